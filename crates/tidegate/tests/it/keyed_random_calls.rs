//! Random operations in any order on a few keys, on a clock that jumps: nothing panics or leaks.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use proptest::prelude::*;
use tidegate::{
    Aimd, Brake, Budget, Bytes, Cause, Circuit, Clock, Controller, Cost, Draft, Instant, Keyed, Limits,
    Outcome, Pace, Permit, Random, Rate, Sleep, Slots, Throttle,
};

use crate::kit::{Caller, millis, secs};

#[derive(Debug, Clone, Default)]
struct JumpingClock(Arc<AtomicU64>);

impl Clock for JumpingClock {
    fn now(&self) -> Instant {
        Instant::from_nanos(self.0.load(Ordering::SeqCst))
    }
    fn sleep_until(&self, _: Instant) -> Sleep {
        Box::pin(std::future::pending())
    }
}

fn plan(number: u8) -> Limits {
    let draft = match number % 8 {
        0 => Draft { rate: Some(Rate::per_second(2).burst(4)), ..Draft::default() },
        1 => Draft::host(),
        2 => Draft::layered(),
        3 => Draft::gentle(),
        4 => Draft { slots: Some(Slots::fixed(2)), ..Draft::default() },
        5 => Draft {
            budget: Some(Budget::tokens(100, secs(10))),
            circuit: Some(Circuit::after_failures(2).open_for(secs(1))),
            slots: Some(Slots::adaptive(1..=4)),
            controller: Controller::Brake(Brake::default()),
            total: Some(10),
            ..Draft::default()
        },
        6 => Draft {
            bytes: Some(Bytes::in_flight(100)),
            pace: Some(Pace::every(millis(10))),
            rate: Some(Rate::per_second(1_000_000)),
            ..Draft::default()
        },
        _ => Draft {
            rate: Some(Rate::per_second(4).burst(2)),
            ..Draft::host().controlled_by(Controller::Aimd(Aimd::default().within(0.25..=1_000.0)))
        },
    };
    Limits::try_from(draft).expect("in bounds")
}

fn outcome(number: u8) -> Outcome {
    match number % 9 {
        0 => Outcome::success(),
        1 => Outcome::success().took(secs(90)),
        2 => Outcome::failure().because(Cause::Network),
        3 => Outcome::overload(),
        4 => Outcome::overload().retry_after(secs(3)),
        5 => Outcome::success().retry_after(std::time::Duration::MAX),
        6 => Outcome::success().spent(Cost::request().tokens(u64::MAX).bytes(u64::MAX)),
        7 => Outcome::ignored().spent(Cost::request().tokens(7)),
        _ => Outcome::overload().retry_after(std::time::Duration::ZERO),
    }
}

fn cost(number: u8) -> Cost {
    match number % 4 {
        0 => Cost::request(),
        1 => Cost::request().tokens(60),
        2 => Cost::request().bytes(500),
        _ => Cost::request().tokens(u64::MAX).bytes(u64::MAX),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn random_calls_neither_panic_nor_leak(
        steps in prop::collection::vec((0_u8..15, any::<u8>(), 0_u32..4, any::<u64>()), 1..60),
        seed in any::<u64>(),
        is_tame in any::<bool>(),
    ) {
        let clock = JumpingClock::default();
        let keyed: Keyed<u32> = Keyed::builder(plan(0))
            .limits_by(|key| plan(u8::try_from(*key).unwrap()))
            .overflow(plan(4))
            .keys_max(3)
            .shards(1)
            .random(Random::seeded(seed))
            .clock(clock.clone())
            .build()
            .unwrap();
        let throttles: Vec<Throttle> = (0..3).map(|key| keyed.throttle(&key)).collect();
        let mut latest = 0_u64;
        let mut permits: Vec<Permit<'static>> = Vec::new();
        let mut callers: Vec<Caller<'_>> = Vec::new();
        for (what, how, key, time) in steps {
            match what {
                0 | 1 => permits.extend(keyed.try_acquire(&key, cost(how)).ok()),
                2 | 3 => if !permits.is_empty() {
                    permits.remove(usize::from(how) % permits.len()).settle(outcome(how));
                },
                4 => keyed.record(&key, outcome(how)),
                5 => {
                    clock.0.fetch_add(u64::from(how) * if is_tame || latest < 1 << 62 { 10_000_000 } else { 0 }, Ordering::SeqCst);
                    latest = latest.max(clock.0.load(Ordering::SeqCst));
                }
                6 => {
                    clock.0.store(if how < 8 && !is_tame { u64::MAX - u64::from(how) } else { time >> (4 + how % 60) }, Ordering::SeqCst);
                    latest = latest.max(clock.0.load(Ordering::SeqCst));
                }
                7 => drop(keyed.set_enabled(how % 2 == 0)),
                8 => keyed.reconfigure(move |key| plan(how.wrapping_add(u8::try_from(*key).unwrap()))),
                9 => drop(keyed.set_limits(&key, plan(how))),
                10 => keyed.clear_limits(&key),
                11 => drop(keyed.throttle(&key).pause(std::time::Duration::from_nanos(if is_tame { time >> 27 } else { time }))),
                12 => drop(keyed.throttle(&key).resume()),
                13 => {
                    let mut caller = Caller::new(throttles[usize::try_from(key % 3).unwrap()].acquire(cost(how)));
                    if caller.poll().is_pending() {
                        callers.push(caller);
                    }
                }
                _ => {
                    if let Some(permit) = permits.last_mut() {
                        permit.record(outcome(how));
                        permit.spend(time);
                    }
                    let seen = keyed.snapshot(2);
                    prop_assert!(seen.keys <= 3 && seen.top.len() <= 2);
                }
            }
        }
        drop(callers);
        drop(permits);
        let seen = keyed.snapshot(3);
        prop_assert_eq!((seen.in_flight, seen.waiting), (0, 0));
        for throttle in &throttles {
            let seen = throttle.snapshot();
            prop_assert_eq!((seen.in_flight, seen.bytes_in_flight, seen.recovering_in_flight, seen.waiting), (0, 0, 0, 0));
            let circuit = seen.circuit.map_or(0, |circuit| circuit.probes_in_flight);
            prop_assert_eq!(circuit, 0);
        }
        // Long after, with limits enabled and no manual pause, every key is admitted again.
        if is_tame {
            keyed.set_enabled(true);
            clock.0.store(latest + 2_000_000_000_000, Ordering::SeqCst);
            for (number, throttle) in throttles.iter().enumerate() {
                throttle.resume();
                let answer = throttle.try_acquire(Cost::request()).map(drop);
                prop_assert!(answer.is_ok(), "{number}: {answer:?}");
            }
        }
    }
}
