//! Changes are announced to whoever has the namespace open, in whatever process.

use tidegate_core::limit::policy::{Expect, Policy, Scope};
use tidegate_core::limit::rule::Limit;
use tidegate_store::{Policies, PolicyChange, Store};

use crate::kit::engine::{POSTGRES, skip_without, unique};
use crate::kit::postgres::{by_way_of, listens_at, open, options, patient, url};
use crate::kit::proxy::Proxy;
use crate::kit::words::eventually;

fn change() -> [PolicyChange; 1] {
    let policy = Policy::new([Limit::per_minute("rpm", 7)]).expect("a valid policy");
    [PolicyChange { scope: Scope::System, expect: Expect::Any, policy: Some(policy) }]
}

#[tokio::test]
async fn a_change_is_heard_of_by_other_handles_and_not_by_other_namespaces() {
    skip_without!(POSTGRES);
    let options = options();
    let (one, two) = (open(options.clone()).await, open(options).await);
    let other = two.namespace("other").await.unwrap();
    let (heard, silent) = (two.changes().unwrap(), other.changes().unwrap());
    // The listener may still be connecting: the first change may be told by what it reads then.
    let version = one.apply(&change(), "ops").await.unwrap();
    eventually("it is heard of", async || heard.newest() == version).await;
    let version = one.apply(&change(), "ops").await.unwrap();
    eventually("the next is heard of too", async || heard.newest() == version).await;
    assert_eq!(silent.newest().number(), 0);
}

#[tokio::test]
async fn what_was_announced_while_nobody_listened_is_read_later() {
    skip_without!(POSTGRES);
    let schema = unique("t");
    let wire = Proxy::to(listens_at(&url())).await;
    let near = open(patient(url()).schema(&schema)).await;
    let far = open(patient(by_way_of(&url(), wire.address)).schema(&schema)).await;
    let heard = far.changes().unwrap();
    let version = near.apply(&change(), "ops").await.unwrap();
    eventually("it listens", async || heard.newest() == version).await;
    wire.take_down(true);
    let version = near.apply(&change(), "ops").await.unwrap();
    wire.take_down(false);
    eventually("it has read what it missed", async || heard.newest() == version).await;
}
