//! Regression tests of keyed throttles: lookup, eviction, snapshots and events.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tidegate::{Circuit, EvictCause, Keyed, KeyedEvent, Limits, ManualClock, Outcome, Rate, Slots, Throttle};
use tokio::time::{sleep, timeout};

use crate::kit::{REQUEST, millis, secs};

fn one_slot() -> Limits {
    Throttle::builder().slots(Slots::fixed(1)).limits().expect("in bounds")
}

/// A crawler meets as many dead hosts as `keys_max`; a year later there must be space for a live one.
#[test]
fn hosts_dead_for_long_are_evicted() {
    let clock = ManualClock::new();
    let limits = Throttle::host().circuit(Circuit::after_failures(1).open_for(secs(15))).limits().unwrap();
    let hosts: Keyed<u32> = Keyed::builder(limits).keys_max(64).clock(clock.clone()).build().unwrap();
    for dead in 0..64 {
        hosts.try_acquire(&dead, REQUEST).unwrap().settle(Outcome::failure());
    }
    clock.advance(secs(365 * 86_400));
    for new in 1_000..1_100 {
        hosts.try_acquire(&new, REQUEST).map(|permit| permit.settle(Outcome::success())).ok();
        clock.advance(secs(200));
    }
    let snapshot = hosts.snapshot(0);
    assert_eq!(
        snapshot.overflowed, 0,
        "{} calls used the overflow entry, and {} dead hosts stay",
        snapshot.overflowed, snapshot.half_open
    );
}

/// Waiters and requests of the overflow entry are included.
#[tokio::test(start_paused = true)]
async fn snapshot_includes_overflow_entry() {
    let keyed: Keyed<u32> = Keyed::builder(one_slot()).keys_max(1).build().unwrap();
    let _one = keyed.try_acquire(&1, REQUEST).unwrap();
    let _two = keyed.try_acquire(&2, REQUEST).unwrap();
    let waiting = tokio::spawn({
        let keyed = keyed.clone();
        async move { keyed.acquire(&3, REQUEST).await.map(drop) }
    });
    sleep(millis(1)).await;
    let snapshot = keyed.snapshot(8);
    waiting.abort();
    assert_eq!((snapshot.overflowed, snapshot.admitted), (2, 2));
    assert_eq!((snapshot.in_flight, snapshot.waiting), (2, 1), "in flight and waiting in total");
}

/// Disabling and enabling all limits keeps a manual retune of one key.
#[test]
fn toggling_limits_keeps_manual_retune() {
    let keyed: Keyed<u32> = Keyed::builder(one_slot()).build().unwrap();
    let throttle = keyed.throttle(&1);
    throttle.retune(|draft| draft.slots = Some(Slots::fixed(7))).unwrap();
    keyed.set_enabled(false);
    keyed.set_enabled(true);
    assert_eq!(throttle.snapshot().slots, Some(7));
}

/// A limits function that panics for one key does not keep other keys or the overflow entry from being
/// closed.
#[tokio::test(start_paused = true)]
async fn panicking_limits_function_does_not_block_close() {
    let is_broken = Arc::new(AtomicBool::new(false));
    let keyed: Keyed<u32> = Keyed::builder(one_slot())
        .keys_max(2)
        .limits_by({
            let is_broken = Arc::clone(&is_broken);
            move |_| {
                assert!(!is_broken.load(Ordering::SeqCst), "broken");
                one_slot()
            }
        })
        .build()
        .unwrap();
    let _held: Vec<_> = (0..2).map(|key| keyed.try_acquire(&key, REQUEST).unwrap()).collect();
    let waiters: Vec<_> = (0..2)
        .map(|key| {
            let keyed = keyed.clone();
            tokio::spawn(async move { keyed.acquire(&key, REQUEST).await.map(drop) })
        })
        .collect();
    sleep(millis(1)).await;
    let overflow = keyed.throttle(&9);
    is_broken.store(true, Ordering::SeqCst);
    let first = catch_unwind(AssertUnwindSafe(|| keyed.close()));
    is_broken.store(false, Ordering::SeqCst);
    let again = keyed.close();
    let mut refused = 0;
    for waiter in waiters {
        refused += u32::from(timeout(secs(1), waiter).await.is_ok());
    }
    assert!(
        refused == 2 && overflow.try_acquire(REQUEST).is_err(),
        "first close: {first:?}, second: {again}; {refused} of 2 waiters were refused; the overflow entry is {}",
        if overflow.try_acquire(REQUEST).is_err() { "closed" } else { "open" },
    );
}

static CLONES_LEFT: AtomicU32 = AtomicU32::new(u32::MAX);

#[derive(PartialEq, Eq, Hash)]
struct Fragile(u32);

impl Clone for Fragile {
    fn clone(&self) -> Self {
        assert!(CLONES_LEFT.fetch_sub(1, Ordering::SeqCst) > 0, "no more clones");
        Self(self.0)
    }
}

/// A key whose clone panics uses up no capacity.
#[test]
fn panic_in_key_creation_frees_its_place() {
    let keyed: Keyed<Fragile> = Keyed::builder(one_slot()).keys_max(4).build().unwrap();
    for key in 0..4 {
        // One clone to own the key, none for the entry.
        CLONES_LEFT.store(1, Ordering::SeqCst);
        assert!(catch_unwind(AssertUnwindSafe(|| keyed.throttle(&Fragile(key)))).is_err());
    }
    CLONES_LEFT.store(u32::MAX, Ordering::SeqCst);
    assert_eq!((keyed.len(), keyed.snapshot(0).keys), (0, 0));
}

struct ReentrantKey(u32, Arc<Mutex<Option<Keyed<ReentrantKey>>>>, bool);

impl PartialEq for ReentrantKey {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}
impl Eq for ReentrantKey {}
impl std::hash::Hash for ReentrantKey {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.0.hash(state);
    }
}
impl Clone for ReentrantKey {
    fn clone(&self) -> Self {
        Self(self.0, Arc::clone(&self.1), true)
    }
}
impl Drop for ReentrantKey {
    fn drop(&mut self) {
        let keyed = self.1.lock().expect("the lock is not poisoned").clone();
        if let (Some(keyed), true) = (keyed, self.2) {
            let probe = ReentrantKey(self.0, Arc::default(), false);
            drop(keyed.get(&probe));
            let _ = keyed.is_enabled();
        }
    }
}

/// Invariant 9: only `Hash`, `Eq` and `Clone` of a key run under a lock. Regression: its `Drop` did too, in a
/// snapshot.
#[test]
fn snapshot_drops_no_key_under_a_lock() {
    let (done, ended) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let slot = Arc::new(Mutex::new(None));
        let keyed: Keyed<ReentrantKey> = Keyed::builder(one_slot()).shards(1).build().unwrap();
        for key in 0..8_u32 {
            let key = ReentrantKey(key, Arc::clone(&slot), true);
            for _ in 0..=key.0 {
                drop(keyed.try_acquire(&key, REQUEST));
            }
        }
        *slot.lock().unwrap() = Some(keyed.clone());
        let top = keyed.snapshot(1).top.len();
        let _ = done.send(top);
        *slot.lock().unwrap() = None;
    });
    assert_eq!(ended.recv_timeout(secs(60)), Ok(1), "no deadlock");
}

/// Regression: a key whose limits were set a second time was dropped under the lock of the limits.
#[test]
fn set_limits_drops_no_key_under_a_lock() {
    let (done, ended) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let slot = Arc::new(Mutex::new(None));
        let keyed: Keyed<ReentrantKey> = Keyed::builder(one_slot()).build().unwrap();
        let key = ReentrantKey(1, Arc::clone(&slot), true);
        keyed.set_limits(&key, one_slot()).unwrap();
        *slot.lock().unwrap() = Some(keyed.clone());
        keyed.set_limits(&key, one_slot()).unwrap();
        let _ = done.send(true);
        *slot.lock().unwrap() = None;
    });
    assert_eq!(ended.recv_timeout(secs(60)), Ok(true), "no deadlock");
}

/// An eviction event has its key and cause, and a stream reports its end.
#[tokio::test(start_paused = true)]
async fn eviction_event_carries_its_key() {
    let keyed: Keyed<u32> = Keyed::builder(one_slot()).keys_max(1).build().unwrap();
    let mut events = keyed.events();
    drop(keyed.throttle(&1));
    drop(keyed.throttle(&2));
    let notice = events.try_next().unwrap();
    assert_eq!((notice.key, notice.event), (Some(1), KeyedEvent::Evicted { cause: EvictCause::Size }));
    drop(keyed);
    assert!(timeout(Duration::from_secs(1), events.next()).await.unwrap().is_none());
}

/// A `Retry-After` holds every acquire method where a rate is the only limit.
#[test]
fn rate_only_retry_after_holds_every_acquire() {
    let clock = ManualClock::new();
    let limits = Throttle::builder().rate(Rate::per_second(100).burst(100)).limits().unwrap();
    let keyed: Keyed<u32> = Keyed::builder(limits).clock(clock.clone()).build().unwrap();
    keyed.try_acquire(&1, REQUEST).unwrap().settle(Outcome::success().retry_after(secs(7)));
    let refused = keyed.try_acquire(&1, REQUEST).unwrap_err();
    assert!(refused.retry_after().unwrap() >= secs(7), "{refused}");
    clock.advance(millis(6_999));
    assert!(keyed.try_acquire(&1, REQUEST).is_err());
    clock.advance(secs(2));
    assert!(keyed.try_acquire(&1, REQUEST).is_ok());
}
