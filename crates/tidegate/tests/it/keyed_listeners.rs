//! Listeners and streams of keys in unusual orders: a key that is gone, one that is looked up badly, and the end of them all.

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

/// Events of a throttle are its own, also when it is gone and another has its place in memory.
#[test]
fn a_stream_of_events_tells_of_no_other_key() {
    let keyed: Keyed<u32> = Keyed::builder(one_slot()).keys_max(1).shards(1).build().unwrap();
    let mut of_one = keyed.throttle(&1).events();
    // Key 2 takes the place of key 1, which nothing is lost with.
    let two = keyed.throttle(&2);
    assert_eq!((keyed.len(), keyed.get(&1).is_none()), (1, true));
    two.pause(secs(5));
    assert_eq!(of_one.try_next(), None, "an event of key 2 in the stream of key 1");
}

/// A stream is of all keys underneath: it goes on while others may come.
#[tokio::test(start_paused = true)]
async fn a_stream_of_events_of_one_key_ends_with_the_last_of_all_keys() {
    let keyed: Keyed<u32> = Keyed::builder(one_slot()).keys_max(1).build().unwrap();
    let mut of_one = keyed.throttle(&1).events();
    let two = keyed.throttle(&2);
    assert!(keyed.get(&1).is_none(), "it was forgotten");
    assert!(timeout(secs(60), of_one.next()).await.is_err());
    drop(keyed);
    assert!(timeout(secs(60), of_one.next()).await.is_err(), "a throttle of them is left");
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

/// One key whose clone panics while an event is told does not silence the listener for good.
#[test]
fn a_panic_while_a_key_is_looked_up_does_not_silence_a_listener() {
    let heard = Arc::new(AtomicU32::new(0));
    let keyed: Keyed<Fragile> = Keyed::builder(one_slot())
        .on_event({
            let heard = Arc::clone(&heard);
            move |_| {
                heard.fetch_add(1, Ordering::SeqCst);
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
    assert!(paused.is_ok(), "whoever pauses is not hurt");
    assert_eq!((heard.load(Ordering::SeqCst), keyed.snapshot(0).listener_panics), (2, 1));
}

#[test]
fn what_reads_keys_can_be_shown_whatever_the_keys_are() {
    fn shown(what: impl Debug) -> String {
        format!("{what:?}")
    }
    let keyed: Keyed<Fragile> = Keyed::builder(one_slot()).build().unwrap();
    assert_eq!(shown(keyed.events()), "KeyedEvents { missed: 0, .. }");
    assert_eq!(shown(keyed.snapshots(secs(9), 3)), "Snapshots { span: 9s, top: 3, .. }");
}
