//! In which order descriptors are drawn, and that all are begun.

use std::cell::Cell;

use envoy_types::pb::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use envoy_types::pb::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::Entry;
use futures_util::FutureExt as _;

use super::*;
use crate::rls::config::{EntryConfig, RuleConfig};

fn rule(keys: &[&str], entity: &str) -> RuleConfig {
    let entry = |key: &&str| EntryConfig { key: (*key).to_owned(), value: "*".to_owned() };
    RuleConfig {
        entries: keys.iter().map(entry).collect(),
        entity: Some(entity.to_owned()),
        resource: Some("shop".to_owned()),
        ..RuleConfig::default()
    }
}

#[test]
fn what_is_of_fewer_is_drawn_first_and_the_order_of_a_request_does_not_count() {
    let rules = [
        rule(&["all"], "everybody"),
        rule(&["tenant"], "{tenant}"),
        rule(&["tenant", "user"], "{tenant}:{user}"),
    ];
    let rules = EnvoyRules::new(Unknown::Allow, &rules).unwrap();
    let descriptor = |entries: &[(&str, &str)]| RateLimitDescriptor {
        entries: entries
            .iter()
            .map(|(key, value)| Entry { key: (*key).to_owned(), value: (*value).to_owned() })
            .collect(),
        ..RateLimitDescriptor::default()
    };
    let mut descriptors = [
        descriptor(&[("all", "x")]),
        descriptor(&[("tenant", "b")]),
        descriptor(&[("tenant", "a")]),
        descriptor(&[("tenant", "z"), ("user", "u")]),
    ];
    for _ in 0..descriptors.len() {
        let asked: Vec<_> = descriptors.iter().map(|one| rules.ask("", one, 1)).collect();
        let asks: Vec<_> = asked.iter().enumerate().filter_map(drawn).collect();
        let order: Vec<_> = in_order(&asks).iter().map(|(_, ask)| ask.subject.entity.to_string()).collect();
        assert_eq!(order, ["z:u", "a", "b", "everybody"]);
        descriptors.rotate_left(1);
    }
}

#[test]
fn all_are_begun_before_any_is_waited_for() {
    let begun = Cell::new(0);
    let waits = (0..DESCRIPTORS_MAX).map(|_| async {
        begun.set(begun.get() + 1);
        std::future::pending::<()>().await;
    });
    assert!(all(waits).now_or_never().is_none());
    assert_eq!(begun.get(), DESCRIPTORS_MAX);
}
