//! Listeners and streams of keys in edge cases: an evicted key, a key whose clone panics, and the end of the
//! registry.

use std::fmt::Debug;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use tidegate::{Keyed, Limits, Slots, Throttle};
use tokio::time::timeout;

use crate::kit::secs;

fn one_slot() -> Limits {
    Throttle::builder().slots(Slots::fixed(1)).limits().expect("in bounds")
}

/// A stream of one key shows no events of a key that later reuses its slot in memory.
#[test]
fn stream_of_one_key_never_shows_another() {
    let keyed: Keyed<u32> = Keyed::builder(one_slot()).keys_max(1).shards(1).build().unwrap();
    let mut of_one = keyed.throttle(&1).events();
    // Key 2 replaces key 1, which has no state to lose.
    let two = keyed.throttle(&2);
    assert_eq!((keyed.len(), keyed.get(&1).is_none()), (1, true));
    two.pause(secs(5));
    assert_eq!(of_one.try_next(), None, "an event of key 2 in the stream of key 1");
}

/// A stream of one key ends only with the registry, because the key can be recreated.
#[tokio::test(start_paused = true)]
async fn stream_of_one_key_ends_with_the_registry() {
    let keyed: Keyed<u32> = Keyed::builder(one_slot()).keys_max(1).build().unwrap();
    let mut of_one = keyed.throttle(&1).events();
    let two = keyed.throttle(&2);
    assert!(keyed.get(&1).is_none(), "it was evicted");
    assert!(timeout(secs(60), of_one.next()).await.is_err());
    drop(keyed);
    assert!(timeout(secs(60), of_one.next()).await.is_err(), "the registry is still alive");
    drop(two);
    assert_eq!(timeout(secs(60), of_one.next()).await, Ok(None));
}

static IS_FRAGILE: AtomicBool = AtomicBool::new(false);

#[derive(PartialEq, Eq, Hash)]
struct Fragile(u32);

impl Clone for Fragile {
    fn clone(&self) -> Self {
        assert!(!IS_FRAGILE.load(Ordering::SeqCst), "no clone now");
        Self(self.0)
    }
}

/// A key whose clone panics during an event does not silence the listener.
#[test]
fn panic_in_key_clone_does_not_silence_listener() {
    let count = Arc::new(AtomicU32::new(0));
    let keyed: Keyed<Fragile> = Keyed::builder(one_slot())
        .on_event({
            let count = Arc::clone(&count);
            move |_| {
                count.fetch_add(1, Ordering::SeqCst);
            }
        })
        .build()
        .unwrap();
    let throttle = keyed.throttle(&Fragile(1));
    IS_FRAGILE.store(true, Ordering::SeqCst);
    let paused = catch_unwind(AssertUnwindSafe(|| throttle.pause(secs(1))));
    IS_FRAGILE.store(false, Ordering::SeqCst);
    throttle.resume();
    throttle.pause(secs(9));
    assert!(paused.is_ok(), "the caller of `pause` is unaffected");
    assert_eq!((count.load(Ordering::SeqCst), keyed.snapshot(0).listener_panics), (2, 1));
}

#[test]
fn readers_implement_debug_for_any_key() {
    fn debug(what: impl Debug) -> String {
        format!("{what:?}")
    }
    let keyed: Keyed<Fragile> = Keyed::builder(one_slot()).build().unwrap();
    assert_eq!(debug(keyed.events()), "KeyedEvents { missed: 0, .. }");
    assert_eq!(debug(keyed.snapshots(secs(9), 3)), "Snapshots { span: 9s, top: 3, .. }");
}
