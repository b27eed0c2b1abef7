//! Random operations on few keys near `keys_max`: each key is admitted exactly what its own throttle would
//! admit.
//!
//! Eviction removes only entries that equal a fresh one, so it cannot be observed in admissions. The model is
//! a separate throttle per key, with the same limits, clock and calls.

use std::collections::HashMap;
use std::time::Duration;

use proptest::prelude::*;
use tidegate::{
    Budget, Circuit, CircuitState, Clock, Cost, Instant, Keyed, Limits, ManualClock, Outcome, Pace, Permit,
    Random, Rate, Slots, Throttle,
};

const KEYS: u64 = 6;

#[derive(Debug, Clone)]
enum Step {
    Try {
        key: u64,
        tokens: u64,
    },
    Settle(usize, u8),
    Drop(usize),
    Record(u64, u8),
    Pause(u64, u64),
    Tick(u64),
    /// Long enough for every key to be idle.
    Rest,
    Snapshot,
    /// Calls one key repeatedly, which evicts idle keys.
    Sweep(u64),
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (0..KEYS, 0_u64..30).prop_map(|(key, tokens)| Step::Try { key, tokens }),
        4 => (0_usize..20, 0_u8..4).prop_map(|(index, kind)| Step::Settle(index, kind)),
        2 => (0_usize..20).prop_map(Step::Drop),
        1 => (0..KEYS, 0_u8..4).prop_map(|(key, kind)| Step::Record(key, kind)),
        1 => (0..KEYS, 0_u64..5_000).prop_map(|(key, millis)| Step::Pause(key, millis)),
        6 => (0_u64..3_000).prop_map(Step::Tick),
        1 => Just(Step::Rest),
        1 => Just(Step::Snapshot),
        1 => (0..KEYS).prop_map(Step::Sweep),
    ]
}

#[derive(Debug, Clone)]
#[expect(clippy::struct_excessive_bools, reason = "each gate is optional")]
struct Gates {
    slots: bool,
    rate: bool,
    pace: bool,
    budget: bool,
    circuit: bool,
}

fn any_gates() -> impl Strategy<Value = Gates> {
    any::<[bool; 5]>().prop_map(|[slots, rate, pace, budget, circuit]| Gates {
        slots,
        rate,
        pace,
        budget,
        circuit,
    })
}

impl Gates {
    fn limits(&self) -> Limits {
        let mut builder = Throttle::builder();
        if self.slots {
            builder = builder.slots(Slots::fixed(2));
        }
        if self.rate {
            builder = builder.rate(Rate::per_second(1).burst(3));
        }
        if self.pace {
            builder = builder.pace(Pace::every(Duration::from_millis(300)));
        }
        if self.budget {
            builder = builder.budget(Budget::tokens(60, Duration::from_secs(4)));
        }
        if self.circuit {
            // By error rate over a window: a streak of failures never expires by itself, but is lost with
            // eviction.
            let circuit = Circuit::at_error_rate(0.5, 2, Duration::from_secs(3)).slices(3);
            builder = builder.circuit(circuit.open_for(Duration::from_secs(2)).probes(1));
        }
        builder.limits().expect("within the bounds")
    }
}

const fn outcome(kind: u8) -> Outcome {
    match kind {
        0 => Outcome::success(),
        1 => Outcome::failure(),
        2 => Outcome::overload().retry_after(Duration::from_millis(1_500)),
        _ => Outcome::ignored(),
    }
}

fn alone(clock: &ManualClock, limits: &Limits) -> Throttle {
    let builder = Throttle::builder().clock(clock.clone()).random(Random::fixed(0.0));
    let throttle = builder.build().expect("within the bounds");
    throttle.retune(|draft| *draft = limits.draft().clone()).expect("within the bounds");
    throttle
}

/// A registry, and a separate throttle for each key.
struct ModelPair {
    clock: ManualClock,
    keyed: Keyed<u64>,
    limits: Limits,
    alone: HashMap<u64, Throttle>,
    /// Admissions of model throttles that were replaced.
    admitted_before: u64,
    held: Vec<(Permit<'static>, Permit<'static>)>,
}

impl ModelPair {
    /// With space for one key more than can be held, so that no key has to share.
    fn new(limits: &Limits, keys_max: usize, shards: usize) -> Self {
        let clock = ManualClock::new();
        let keyed = Keyed::builder(limits.clone()).clock(clock.clone()).random(Random::fixed(0.0));
        let keyed = keyed.keys_max(keys_max).shards(shards).build().expect("within the bounds");
        let alone = (0..KEYS).map(|key| (key, alone(&clock, limits))).collect();
        Self { clock, keyed, limits: limits.clone(), alone, admitted_before: 0, held: Vec::new() }
    }

    /// An open circuit is learned state. Once a probe has long been due the key may be evicted, and its model
    /// throttle starts afresh.
    fn replace_evicted_model(&mut self, key: u64) {
        let circuit = self.alone[&key].snapshot().circuit;
        if self.keyed.get(&key).is_none()
            && let Some(circuit) = circuit.filter(|circuit| circuit.state != CircuitState::Closed)
        {
            assert_eq!(circuit.retry_after, Duration::ZERO, "key {key} was evicted while it was limited");
            let before = self.alone.insert(key, alone(&self.clock, &self.limits));
            self.admitted_before += before.expect("one for each key").snapshot().admitted;
        }
    }

    /// Whether a call would use the overflow entry, where there is nothing to compare.
    fn uses_overflow(&mut self, key: u64) -> bool {
        self.replace_evicted_model(key);
        let before = self.keyed.snapshot(0).overflowed;
        drop(self.keyed.throttle(&key));
        self.keyed.snapshot(0).overflowed > before
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Try { key, tokens } => {
                if self.uses_overflow(key) {
                    return;
                }
                let cost = Cost::request().tokens(tokens);
                let ours = self.keyed.try_acquire(&key, cost);
                let theirs = self.alone[&key].try_acquire(cost);
                match (ours, theirs) {
                    (Ok(ours), Ok(theirs)) => self.held.push((ours, theirs.into_owned())),
                    (Err(ours), Err(theirs)) => assert_eq!(ours, theirs, "key {key}"),
                    (ours, theirs) => panic!("key {key}: {ours:?} and alone {theirs:?}"),
                }
            }
            Step::Settle(index, kind) if !self.held.is_empty() => {
                let (ours, theirs) = self.held.swap_remove(index % self.held.len());
                ours.settle(outcome(kind));
                theirs.settle(outcome(kind));
            }
            Step::Drop(index) if !self.held.is_empty() => {
                drop(self.held.swap_remove(index % self.held.len()));
            }
            Step::Settle(..) | Step::Drop(_) => {}
            Step::Record(key, kind) => {
                if !self.uses_overflow(key) {
                    self.keyed.record(&key, outcome(kind));
                    self.alone[&key].record(outcome(kind));
                }
            }
            Step::Pause(key, millis) => {
                if !self.uses_overflow(key) {
                    let span = Duration::from_millis(millis);
                    assert_eq!(self.keyed.throttle(&key).pause(span), self.alone[&key].pause(span));
                }
            }
            Step::Tick(millis) => self.clock.advance(Duration::from_millis(millis)),
            Step::Rest => self.clock.advance(Duration::from_secs(240)),
            Step::Snapshot => {
                let seen = self.keyed.snapshot(usize::MAX);
                assert_eq!((seen.keys, seen.top.len()), (self.keyed.len(), self.keyed.len()));
            }
            Step::Sweep(key) => {
                if !self.uses_overflow(key) {
                    (0..600).for_each(|_| drop(self.keyed.throttle(&key)));
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn keyed_admissions_match_separate_throttles(
        gates in any_gates(),
        keys_max in 1_usize..5,
        shards in prop::sample::select(vec![1_usize, 2, 16]),
        steps in prop::collection::vec(any_step(), 1..80),
    ) {
        let mut pair = ModelPair::new(&gates.limits(), keys_max, shards);
        for step in &steps {
            let before = pair.keyed.examined();
            pair.step(step);
            prop_assert!(pair.keyed.len() <= keys_max);
            if matches!(step, Step::Settle(..) | Step::Drop(_) | Step::Tick(_)) {
                prop_assert_eq!(pair.keyed.examined(), before, "only calls for keys examine entries");
            }
        }
        pair.held.clear();
        let seen = pair.keyed.snapshot(usize::MAX);
        prop_assert_eq!((seen.in_flight, seen.waiting), (0, 0));
        prop_assert_eq!((seen.keys, seen.top.len()), (pair.keyed.len(), pair.keyed.len()));
        let admitted: u64 = pair.alone.values().map(|throttle| throttle.snapshot().admitted).sum();
        prop_assert_eq!(seen.admitted, admitted + pair.admitted_before);
    }

    /// In a throttle time stands still while its clock is behind, and an evicted key loses that position. So
    /// admissions may differ, but never exceed what the elapsed real time allows.
    #[test]
    fn clock_step_back_never_exceeds_burst_and_rate(
        keys_max in 1_usize..4,
        steps in prop::collection::vec((0..KEYS, 0_u64..400, 0_u64..20, any::<bool>()), 1..300),
    ) {
        let (burst, second) = (3, 1_000);
        let limits = Throttle::builder().rate(Rate::per_second(1).burst(burst)).limits().expect("within the bounds");
        let clock = ManualClock::new();
        clock.advance(Duration::from_secs(600));
        let keyed: Keyed<u64> = Keyed::builder(limits)
            .clock(clock.clone())
            .keys_max(keys_max)
            .build()
            .expect("within the bounds");
        // The time that has really passed, whatever the clock was set to.
        let mut passed = 0;
        let mut admitted: HashMap<u64, Vec<u64>> = HashMap::new();
        for (key, millis, chance, is_far) in steps {
            if chance == 0 {
                let back = if is_far { Duration::from_secs(540) } else { Duration::from_millis(millis) };
                let now = clock.now().since(Instant::ZERO);
                clock.set(Instant::ZERO + now.saturating_sub(back));
            }
            clock.advance(Duration::from_millis(millis));
            passed += millis;
            drop(keyed.throttle(&key));
            let has_its_own = keyed.get(&key).is_some();
            if keyed.try_acquire(&key, Cost::request()).is_ok() && has_its_own {
                admitted.entry(key).or_default().push(passed);
            }
            prop_assert!(keyed.len() <= keys_max);
        }
        for (key, times) in admitted {
            for first in 0..times.len() {
                for last in first..times.len() {
                    let allowed = burst + (times[last] - times[first]) / second + 1;
                    let count = (last - first + 1) as u64;
                    prop_assert!(count <= allowed, "key {} entered {} times of {}", key, count, allowed);
                }
            }
        }
    }
}
