//! Tests of the draw order and of starting all futures.

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
fn draws_are_ordered_by_specificity_then_subject() {
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
        let matched: Vec<_> = descriptors.iter().map(|one| rules.resolve("", one, 1)).collect();
        let draws: Vec<_> = matched.iter().enumerate().filter_map(as_draw).collect();
        let order: Vec<_> =
            in_lock_order(&draws).iter().map(|(_, draw)| draw.subject.entity.to_string()).collect();
        assert_eq!(order, ["z:u", "a", "b", "everybody"]);
        descriptors.rotate_left(1);
    }
}

#[test]
fn all_futures_start_before_any_is_awaited() {
    let started = Cell::new(0);
    let waits = (0..DESCRIPTORS_MAX).map(|_| async {
        started.set(started.get() + 1);
        std::future::pending::<()>().await;
    });
    assert!(join_all_started(waits).now_or_never().is_none());
    assert_eq!(started.get(), DESCRIPTORS_MAX);
}
