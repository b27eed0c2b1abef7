//! Pauses across all gates: blocked requests, prices after a pause, and the suspended rate.

use crate::event::Event;
use crate::gate::tests::{REQUEST, Rig, at, bytes, millis, secs};
use crate::outcome::Outcome;
use crate::plan::{Bytes, Draft, Pause, Rate, SizeRule, Slots};
use crate::random::Random;
use crate::snapshot::Phase::{Normal, Paused, Recovering};
use crate::time::Instant;
use crate::verdict::Gate;

/// A hundred slots; while recovering, fewer slots and a higher price for bytes.
fn layered(recovery_slots: u32) -> Draft {
    Draft {
        slots: Some(Slots::fixed(100)),
        recovery_slots: Some(recovery_slots),
        bytes: Some(Bytes::in_flight(1_000).recovering_price(20)),
        pause: Pause::default().tail(secs(10)),
        ..Draft::default()
    }
}

/// A rate of one per second that holds two, both used up at the origin.
fn drained() -> Rig {
    let mut rig = Rig::new(Draft { rate: Some(Rate::per_second(1).burst(2)), ..Draft::default() });
    assert_eq!(rig.obtain().len(), 2);
    rig
}

fn level(rig: &Rig) -> i64 {
    rig.snapshot().rate_level.unwrap()
}

#[test]
fn recovery_prices_bytes_and_returns_the_same_price() {
    let mut rig = Rig::new(layered(2));
    rig.pause(secs(1));
    let first = rig.at(at(1)).enter(bytes(100));
    assert_eq!((first.bytes_held(), rig.snapshot().bytes_in_flight), (2_000, 2_000));
    assert_eq!(rig.waits(bytes(100)), (Gate::Bytes, None));
    rig.at(at(60)).settle(first, Outcome::success());
    assert_eq!(rig.snapshot().bytes_in_flight, 0, "returned at the price of entry");
    assert_eq!(rig.enter(bytes(100)).bytes_held(), 100);
}

#[test]
fn a_request_queued_before_a_pause_recovers_after_it() {
    let mut rig = Rig::new(layered(1));
    let sent = rig.enter(bytes(10));
    rig.settle(sent, Outcome::overload().retry_after(secs(5)));
    assert_eq!(rig.waits(bytes(10)), (Gate::Pause, Some(at(5))));
    let queued = rig.at(at(5)).enter(bytes(10));
    assert!(queued.is_recovering());
    assert_eq!((queued.bytes_held(), rig.snapshot().recovering_in_flight), (200, 1));
}

#[test]
fn a_shorter_pause_after_a_longer_one_is_ignored() {
    let mut rig = Rig::new(Draft::default());
    assert!(rig.pause(secs(5)));
    assert!(!rig.at(at(1)).pause(secs(1)));
    rig.record(Outcome::failure().retry_after(secs(2)));
    assert_eq!(rig.waits(REQUEST), (Gate::Pause, Some(at(5))));
    assert!(rig.pause(secs(9)));
    let told =
        [Event::Paused { until: at(5), span: secs(5) }, Event::Paused { until: at(10), span: secs(9) }];
    assert_eq!(rig.take_events(), told);
}

#[test]
fn success_does_not_end_pause_or_tail() {
    let mut rig = Rig::new(layered(2));
    let (early, late) = (rig.enter(REQUEST), rig.enter(REQUEST));
    rig.at(at(1)).record(Outcome::overload().retry_after(secs(1)));
    rig.later(millis(200)).settle(early, Outcome::success());
    assert_eq!((rig.snapshot().phase, rig.waits(REQUEST)), (Paused, (Gate::Pause, Some(at(2)))));
    rig.at(at(3)).settle(late, Outcome::success());
    rig.call(REQUEST, Outcome::success());
    assert_eq!(rig.snapshot().phase, Recovering);
}

#[test]
fn a_hint_and_the_size_rule_both_hold() {
    let sizes = SizeRule::new(100, secs(1), secs(5));
    for (hint, size, until) in [(30, 10, 30), (3, 1_000, 5), (0, 10, 1)] {
        let mut rig = Rig::new(Draft { pause: Pause::default().sizes(sizes), ..Draft::default() });
        rig.call(bytes(size), Outcome::overload().retry_after(secs(hint)));
        assert_eq!(rig.waits(REQUEST), (Gate::Pause, Some(at(until))), "{hint} s for {size} bytes");
    }
}

#[test]
fn phases_are_paused_then_recovering_then_normal() {
    let mut rig = Rig::new(layered(10));
    rig.pause(secs(10));
    let phases = [9_900, 10_000, 19_900, 20_000]
        .map(|millis| rig.at(Instant::from_nanos(millis * 1_000_000)).snapshot().phase);
    assert_eq!(phases, [Paused, Recovering, Recovering, Normal]);
    let entered = [9_900, 10_000, 19_900, 20_000].map(|millis| {
        rig.at(Instant::from_nanos(millis * 1_000_000))
            .admit(REQUEST)
            .ok()
            .map(|charge| charge.is_recovering())
    });
    assert_eq!(entered, [None, Some(true), Some(true), Some(false)]);
}

#[test]
fn recovery_slots_bound_entries_while_recovering() {
    let mut rig = Rig::new(layered(10));
    rig.pause(secs(1));
    let mut held = rig.at(at(1)).obtain();
    assert_eq!(held.len(), 10);
    let before = rig.snapshot();
    assert_eq!(
        rig.waits(REQUEST),
        (Gate::RecoverySlots, Some(at(11))),
        "a completion or the end of the tail helps"
    );
    let after = rig.snapshot();
    assert_eq!(
        (after.in_flight, after.admitted),
        (before.in_flight, before.admitted),
        "a waiting request takes nothing"
    );
    rig.settle(held.remove(0), Outcome::success());
    held.extend(rig.obtain());
    assert_eq!((held.len(), rig.snapshot().recovering_in_flight), (10, 10));
    let normal = rig.at(at(11)).enter(REQUEST);
    assert!(!normal.is_recovering());
    for charge in held {
        rig.settle(charge, Outcome::success());
    }
    assert_eq!((rig.snapshot().recovering_in_flight, rig.snapshot().in_flight), (0, 1));
}

/// Regression: the end of the tail frees a recovery slot but no bytes; a request lacking both had to
/// wait for it.
#[test]
fn request_that_also_lacks_bytes_waits_for_completion() {
    let mut rig = Rig::new(layered(1));
    rig.pause(secs(1));
    let _held = rig.at(at(1)).enter(bytes(100));
    assert_eq!((rig.waits(REQUEST), rig.snapshot().next_entry), ((Gate::Bytes, None), None));
}

#[test]
fn recovery_without_slots_only_raises_price_of_bytes() {
    let mut rig = Rig::new(Draft { recovery_slots: None, ..layered(1) });
    rig.pause(secs(1));
    assert_eq!(rig.at(at(1)).obtain().len(), 100);
}

#[test]
fn pause_over_the_maximum_is_capped_with_event() {
    let mut rig = Rig::new(Draft { pause: Pause::default().max(secs(60)), ..Draft::default() });
    rig.record(Outcome::success().retry_after(secs(3_600)));
    assert_eq!(rig.waits(REQUEST), (Gate::Pause, Some(at(60))));
    let capped = Event::PauseCapped { asked: secs(3_600), capped: secs(60) };
    assert_eq!(rig.take_events(), [capped, Event::Paused { until: at(60), span: secs(60) }]);
    assert!(!rig.pause(secs(60)), "the pause is already as long");
    assert_eq!(rig.take_events(), []);
}

#[test]
fn a_pause_by_hand_is_not_capped() {
    let mut rig = Rig::new(Draft { pause: Pause::default().max(secs(60)), ..Draft::default() });
    assert!(rig.pause(secs(3_600)));
    assert_eq!(rig.waits(REQUEST), (Gate::Pause, Some(at(3_600))));
}

#[test]
fn small_extensions_emit_events_when_they_add_up() {
    let mut rig = Rig::new(Draft::default());
    // Hints of 5 s every 40 ms: each extension is too small for an event, until they add up to 50 ms.
    for _ in 0..100 {
        rig.later(millis(40)).record(Outcome::overload().retry_after(secs(5)));
    }
    let reported: Vec<_> =
        rig.take_events().into_iter().filter(|event| matches!(event, Event::Paused { .. })).collect();
    assert_eq!(reported.len(), 50, "the first, and then every second one");
    assert_eq!(rig.waits(REQUEST), (Gate::Pause, Some(rig.now + secs(5))));
}

#[test]
fn maximum_of_zero_reports_hints_without_pausing() {
    let mut rig = Rig::new(Draft { pause: Pause::default().max(secs(0)), ..Draft::default() });
    rig.record(Outcome::overload().retry_after(secs(1)));
    assert_eq!(rig.take_events(), [Event::PauseCapped { asked: secs(1), capped: secs(0) }]);
    rig.call(REQUEST, Outcome::success());
}

#[test]
fn resume_ends_pause_and_tail() {
    for when in [0, 4, 5, 14] {
        let mut rig = Rig::new(layered(1));
        rig.pause(secs(5));
        rig.take_events();
        assert!(rig.at(at(when)).resume() && !rig.resume(), "at {when} s, only once");
        assert_eq!((rig.snapshot().phase, rig.take_events()), (Normal, vec![Event::Resumed]));
        assert!(!rig.enter(REQUEST).is_recovering());
    }
    let mut rig = Rig::new(layered(1));
    rig.pause(secs(5));
    assert!(!rig.at(at(15)).resume(), "the tail is over");
}

#[test]
fn rate_does_not_refill_while_paused() {
    let mut rig = drained();
    rig.at(at(1)).pause(secs(10));
    let levels = [1, 6, 11, 12, 99].map(|second| level(rig.at(at(second))));
    assert_eq!(levels, [1, 1, 1, 2, 2]);
}

#[test]
fn extended_pause_suspends_the_rate_once() {
    let mut rig = drained();
    rig.pause(secs(10));
    rig.at(at(5)).pause(secs(20));
    rig.at(at(6)).pause(secs(1));
    let levels = [6, 25, 26, 27].map(|second| level(rig.at(at(second))));
    assert_eq!(levels, [0, 0, 1, 2]);
}

#[test]
fn resumed_rate_keeps_its_level() {
    let mut rig = drained();
    rig.at(at(1)).pause(secs(100));
    rig.at(at(50)).resume();
    let levels = [50, 51].map(|second| level(rig.at(at(second))));
    assert_eq!(levels, [1, 2]);
}

/// Regression: an entry undone during a pause filled the bucket at a time within the pause; resuming left it
/// there, and a full bucket denied requests until the pause would have ended.
#[test]
fn entry_undone_while_paused_is_available_on_resume() {
    let mut rig = Rig::new(Draft { rate: Some(Rate::new(1, secs(10))), ..Draft::default() });
    let charge = rig.enter(REQUEST);
    rig.at(at(1)).pause(secs(30));
    rig.at(at(2)).undo(charge);
    assert_eq!(level(&rig), 1);
    rig.at(at(5)).resume();
    assert_eq!(level(&rig), 1);
    rig.call(REQUEST, Outcome::success());
}

#[test]
fn a_lengthened_pause_is_spread_by_its_whole_length() {
    let mut rig = Rig::new(Draft::default());
    rig.gates.random = Random::fixed(1.0);
    rig.waiting = 1;
    rig.pause(secs(5));
    rig.at(at(4)).pause(secs(2));
    assert_eq!(
        rig.waits(REQUEST),
        (Gate::Pause, Some(at(6) + millis(300))),
        "half of a tenth of six seconds later"
    );
}

#[test]
fn waiters_enter_spread_after_the_pause() {
    let mut rig = Rig::new(Draft::default());
    rig.gates.random = Random::seeded(5);
    rig.waiting = 20;
    rig.pause(secs(10));
    let entries: Vec<_> = (0..20)
        .rev()
        .map(|behind| {
            rig.waiting = behind;
            rig.enter_when_ready().entered()
        })
        .collect();
    assert!(entries.iter().all(|entry| (at(10)..=at(11)).contains(entry)), "{entries:?}");
    let at_once = entries.iter().filter(|entry| **entry == entries[0]).count();
    assert!(at_once < 5, "{at_once} of 20 entered together");
}
