//! Changes are announced to every handle of the namespace, in any process.

use tidegate_core::limit::policy::{Expect, Policy, Scope};
use tidegate_core::limit::rule::Limit;
use tidegate_store::{Policies, PolicyChange, Store};

use crate::kit::common::eventually;
use crate::kit::engine::{POSTGRES, skip_without, unique};
use crate::kit::postgres::{open, options, options_at, socket_addr, url, url_via};
use crate::kit::proxy::Proxy;

fn change() -> [PolicyChange; 1] {
    let policy = Policy::new([Limit::per_minute("rpm", 7)]).expect("a valid policy");
    [PolicyChange { scope: Scope::System, expect: Expect::Any, policy: Some(policy) }]
}

#[tokio::test]
async fn change_is_announced_to_handles_of_its_namespace() {
    skip_without!(POSTGRES);
    let options = options();
    let (one, two) = (open(options.clone()).await, open(options).await);
    let other = two.namespace("other").await.unwrap();
    let (reported, silent) = (two.changes().unwrap(), other.changes().unwrap());
    // The listener may still be connecting: then the first change is reported by its initial read.
    let version = one.apply(&change(), "ops").await.unwrap();
    eventually("the change is reported", async || reported.newest() == version).await;
    let version = one.apply(&change(), "ops").await.unwrap();
    eventually("the next change is reported", async || reported.newest() == version).await;
    assert_eq!(silent.newest().number(), 0);
}

#[tokio::test]
async fn missed_announcements_are_read_later() {
    skip_without!(POSTGRES);
    let schema = unique("t");
    let wire = Proxy::to(socket_addr(&url())).await;
    let direct = open(options_at(url()).schema(&schema)).await;
    let proxied = open(options_at(url_via(&url(), wire.address)).schema(&schema)).await;
    let reported = proxied.changes().unwrap();
    let version = direct.apply(&change(), "ops").await.unwrap();
    eventually("the listener is connected", async || reported.newest() == version).await;
    wire.take_down(true);
    let version = direct.apply(&change(), "ops").await.unwrap();
    wire.take_down(false);
    eventually("the missed change is read", async || reported.newest() == version).await;
}
