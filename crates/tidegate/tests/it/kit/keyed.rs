//! What the tests of keyed throttles share: limits in one word, and keys that can be held, limited and idle.

use std::future::Future;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tidegate::{
    Keyed, KeyedBuilder, KeyedEvent, KeyedNotice, Limits, ManualClock, Random, Rate, Slots, Throttle,
};

/// The least that keys are kept for when nobody asks for them.
pub(crate) const IDLE: Duration = Duration::from_secs(180);

pub(crate) fn slots(slots: u32) -> Limits {
    Throttle::builder().slots(Slots::fixed(slots)).limits().expect("within the bounds")
}

pub(crate) fn rate(rate: Rate) -> Limits {
    Throttle::builder().rate(rate).limits().expect("within the bounds")
}

/// A builder without chance, on a clock that is moved by hand.
pub(crate) fn by_hand(limits: Limits) -> (KeyedBuilder<u64>, ManualClock) {
    let clock = ManualClock::new();
    (Keyed::builder(limits).clock(clock.clone()).random(Random::fixed(0.0)), clock)
}

/// Keys without chance, on a clock that is moved by hand.
pub(crate) fn keys(limits: Limits) -> (Keyed<u64>, ManualClock) {
    let (builder, clock) = by_hand(limits);
    (builder.build().expect("within the bounds"), clock)
}

pub(crate) fn poll_once<T>(future: impl Future<Output = T>) -> Poll<T> {
    pin!(future).poll(&mut Context::from_waker(Waker::noop()))
}

/// Asks for `key` often enough to look at everything there is, in small steps.
pub(crate) fn sweep(keyed: &Keyed<u64>, key: u64) {
    for _ in 0..20_000 {
        drop(keyed.throttle(&key));
    }
}

pub(crate) fn has(keyed: &Keyed<u64>, key: u64) -> bool {
    keyed.get(&key).is_some()
}

/// Something that is done to keys.
pub(crate) type Call = fn(&Keyed<u64>);
/// What a listener heard.
pub(crate) type Heard = Arc<Mutex<Vec<KeyedNotice<u64>>>>;

/// A listener that writes down what it hears.
pub(crate) fn hearing(builder: KeyedBuilder<u64>) -> (KeyedBuilder<u64>, Heard) {
    let heard = Heard::default();
    let ears = Arc::clone(&heard);
    (builder.on_event(move |notice| ears.lock().expect("no panic").push(notice.clone())), heard)
}

/// What was heard so far, without the times, and it is forgotten.
pub(crate) fn told(heard: &Heard) -> Vec<(Option<u64>, KeyedEvent)> {
    let heard = std::mem::take(&mut *heard.lock().expect("no panic"));
    heard.into_iter().map(|notice| (notice.key, notice.event)).collect()
}
