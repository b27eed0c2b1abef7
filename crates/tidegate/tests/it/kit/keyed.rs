//! Shared by the tests of keyed throttles: short constructors for limits, registries on a manual clock, and
//! recorded notices.

use std::future::Future;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tidegate::{
    Keyed, KeyedBuilder, KeyedEvent, KeyedNotice, Limits, ManualClock, Random, Rate, Slots, Throttle,
};

/// The shortest `idle_ttl`.
pub(crate) const IDLE: Duration = Duration::from_secs(180);

pub(crate) fn slots(slots: u32) -> Limits {
    Throttle::builder().slots(Slots::fixed(slots)).limits().expect("within the bounds")
}

pub(crate) fn rate(rate: Rate) -> Limits {
    Throttle::builder().rate(rate).limits().expect("within the bounds")
}

/// A builder without randomness, on a manual clock.
pub(crate) fn by_hand(limits: Limits) -> (KeyedBuilder<u64>, ManualClock) {
    let clock = ManualClock::new();
    (Keyed::builder(limits).clock(clock.clone()).random(Random::fixed(0.0)), clock)
}

/// A registry without randomness, on a manual clock.
pub(crate) fn keys(limits: Limits) -> (Keyed<u64>, ManualClock) {
    let (builder, clock) = by_hand(limits);
    (builder.build().expect("within the bounds"), clock)
}

pub(crate) fn poll_once<T>(future: impl Future<Output = T>) -> Poll<T> {
    pin!(future).poll(&mut Context::from_waker(Waker::noop()))
}

/// Looks `key` up often enough for the incremental eviction to examine every entry.
pub(crate) fn sweep(keyed: &Keyed<u64>, key: u64) {
    for _ in 0..20_000 {
        drop(keyed.throttle(&key));
    }
}

pub(crate) fn has(keyed: &Keyed<u64>, key: u64) -> bool {
    keyed.get(&key).is_some()
}

/// An operation on a registry.
pub(crate) type Call = fn(&Keyed<u64>);
/// Recorded notices.
pub(crate) type NoticeLog = Arc<Mutex<Vec<KeyedNotice<u64>>>>;

/// Adds a listener that records its notices.
pub(crate) fn record_notices(builder: KeyedBuilder<u64>) -> (KeyedBuilder<u64>, NoticeLog) {
    let notices = NoticeLog::default();
    let recorder = Arc::clone(&notices);
    (builder.on_event(move |notice| recorder.lock().expect("no panic").push(notice.clone())), notices)
}

/// Takes the recorded notices, without their times.
pub(crate) fn take_notices(notices: &NoticeLog) -> Vec<(Option<u64>, KeyedEvent)> {
    let notices = std::mem::take(&mut *notices.lock().expect("no panic"));
    notices.into_iter().map(|notice| (notice.key, notice.event)).collect()
}
