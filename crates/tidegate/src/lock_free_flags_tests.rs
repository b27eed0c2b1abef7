//! Property test of the flags that are read without the lock: they never lag behind the state under the lock,
//! and no slot is lost or invented.

use std::time::Duration;

use proptest::prelude::*;
use tidegate_core::outcome::Outcome;

use crate::{Circuit, Cost, Permit, Rate, Slots, Throttle};

#[derive(Debug, Clone)]
enum Act {
    Enter,
    Settle(u8, u8, Option<u32>),
    Record(u8, Option<u32>),
    Pause(u32),
    Resume,
    Slots(u32),
    Circuit(bool),
    Wait(u32),
    Close,
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let hint = || proptest::option::of(prop_oneof![Just(0), 1..5_u32, 1..5_000_000_u32]);
    let act = prop_oneof![
        8 => Just(Act::Enter),
        8 => (any::<u8>(), any::<u8>(), hint()).prop_map(|(which, kind, hint)| Act::Settle(which, kind, hint)),
        2 => (any::<u8>(), hint()).prop_map(|(kind, hint)| Act::Record(kind, hint)),
        1 => (0..3_000_000_u32).prop_map(Act::Pause),
        1 => Just(Act::Resume),
        1 => (1..6_u32).prop_map(Act::Slots),
        1 => any::<bool>().prop_map(Act::Circuit),
        6 => (0..3_000_000_u32).prop_map(Act::Wait),
        1 => Just(Act::Close),
    ];
    proptest::collection::vec(act, 1..80)
}

fn outcome(kind: u8, hint: Option<u32>) -> Outcome {
    let outcome = match kind % 4 {
        0 => Outcome::success(),
        1 => Outcome::failure(),
        2 => Outcome::overload(),
        _ => Outcome::ignored(),
    };
    hint.map_or(outcome, |span| outcome.retry_after(Duration::from_micros(span.into())))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn flags_are_current_and_slots_are_conserved(acts in acts(), has_rate: bool, has_circuit: bool) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let mut builder = Throttle::builder().slots(Slots::fixed(3));
            if has_rate {
                builder = builder.rate(Rate::per_second(1_000));
            }
            if has_circuit {
                builder = builder.circuit(Circuit::after_failures(2).open_for(Duration::from_secs(1)));
            }
            let throttle = builder.build().unwrap();
            let mut held: Vec<Permit<'_>> = Vec::new();
            let mut closes = 0;
            for act in acts {
                match act.clone() {
                    Act::Enter => held.extend(throttle.try_acquire(Cost::request()).ok()),
                    Act::Settle(which, kind, hint) => if !held.is_empty() {
                        let permit = held.swap_remove(usize::from(which) % held.len());
                        permit.settle(outcome(kind, hint));
                    },
                    Act::Record(kind, hint) => throttle.record(outcome(kind, hint)),
                    Act::Pause(span) => drop(throttle.pause(Duration::from_micros(span.into()))),
                    Act::Resume => drop(throttle.resume()),
                    Act::Slots(count) => throttle.retune(|draft| draft.slots = Some(Slots::fixed(count))).unwrap(),
                    Act::Circuit(is_there) => throttle
                        .retune(|draft| draft.circuit = is_there.then(|| Circuit::after_failures(1).open_for(Duration::from_secs(2))))
                        .unwrap(),
                    Act::Wait(span) => tokio::time::advance(Duration::from_micros(span.into())).await,
                    // Rarely: a closed throttle stays closed.
                    Act::Close => {
                        closes += 1;
                        if closes > 3 {
                            let _ = throttle.close();
                        }
                    }
                }
                let has_begun = throttle.inner.lock().gates.has_begun();
                assert!(!has_begun || throttle.inner.has_begun(), "after {act:?}");
                assert_eq!(throttle.snapshot().in_flight as usize, held.len(), "after {act:?}");
            }
        });
    }
}
