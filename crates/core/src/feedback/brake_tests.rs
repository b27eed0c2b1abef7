//! The brake cuts once per wave, and restores all limits while the upstream is healthy.

use proptest::prelude::*;

use super::*;
use crate::plan::{Controller, Draft, Pace, Slots};

const COOLING: Duration = Duration::from_secs(60);

const fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

const fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// A brake with its plan, its tuning and a clock.
struct Rig {
    plan: Plan,
    brake: Brake,
    state: BrakeState,
    tuning: Tuning,
    now: Instant,
    cuts: u32,
}

impl Rig {
    /// Brakes at three failures within 60 s; cooling periods of 60 s.
    fn new(slots: Slots, pace: Option<Pace>) -> Self {
        Self::with(Some(slots), pace, Brake::default())
    }

    fn with(slots: Option<Slots>, pace: Option<Pace>, brake: Brake) -> Self {
        let controller = Controller::Brake(brake);
        let plan = Draft { slots, pace, controller, ..Draft::default() }.check().unwrap();
        let tuning = Tuning {
            slots: slots.map_or(u32::MAX, |slots| slots.start),
            interval: pace.map_or(Duration::ZERO, |pace| pace.interval_min),
            rate: None,
        };
        let state = BrakeState::new(&plan);
        Self { plan, brake, state, tuning, now: Instant::ZERO, cuts: 0 }
    }

    /// Learns from one outcome and applies the advice.
    fn learn(&mut self, kind: Kind, is_current: bool, in_flight: u64, waiting: u32) -> &mut Self {
        let has_demand = waiting > 0;
        let sample =
            Sample { kind, is_current, in_flight, has_demand, latency: None, admitted: 0, now: self.now };
        match self.state.learn(&self.plan, &self.brake, self.tuning, sample) {
            Some(Advice::Cut(tuning, _)) => {
                self.cuts += 1;
                self.tuning = tuning;
            }
            Some(Advice::Grow(tuning)) => self.tuning = tuning,
            None => {}
        }
        self
    }

    fn fails(&mut self) -> &mut Self {
        self.learn(Kind::Failure, true, 1, 0)
    }

    fn overloads(&mut self) -> &mut Self {
        self.learn(Kind::Overload, true, 1, 0)
    }

    /// A success while all slots are in use.
    fn succeeds(&mut self) -> &mut Self {
        self.learn(Kind::Success, true, u64::from(self.tuning.slots), 0)
    }

    fn later(&mut self, span: Duration) -> &mut Self {
        self.now = self.now + span;
        self
    }

    fn slots(&self) -> u32 {
        self.tuning.slots
    }

    /// Slots after each of `periods` healthy cooling periods with all slots in use.
    fn cool(&mut self, periods: u32) -> Vec<u32> {
        (0..periods).map(|_| self.later(COOLING).succeeds().slots()).collect()
    }
}

const fn paced(min: Duration, max: Duration) -> Pace {
    Pace::every(min).slowest(max)
}

#[test]
fn the_interval_doubles_up_to_its_longest() {
    let mut rig = Rig::new(Slots::adaptive(1..=8), Some(paced(secs(1), secs(10))));
    rig.tuning.interval = secs(8);
    assert_eq!([rig.overloads().tuning.interval, rig.overloads().tuning.interval], [secs(10), secs(10)]);
}

#[test]
fn slots_halve_down_to_one() {
    let mut rig = Rig::new(Slots::adaptive(1..=10), None);
    assert_eq!([(); 4].map(|()| rig.overloads().slots()), [5, 2, 1, 1]);
}

#[test]
fn slots_halve_down_to_their_minimum() {
    let mut rig = Rig::new(Slots::adaptive(3..=10), None);
    assert_eq!([(); 3].map(|()| rig.overloads().slots()), [5, 3, 3]);
}

#[test]
fn slots_grow_one_a_period_up_to_the_ceiling() {
    let mut rig = Rig::new(Slots::adaptive(4..=64).start(6), None);
    rig.overloads();
    assert_eq!((rig.slots(), rig.state.ceiling()), (4, 6));
    assert_eq!(rig.cool(3), [5, 6, 6]);
}

#[test]
fn each_cut_restarts_the_count() {
    let brake = Brake::default().at(2, secs(60));
    let mut rig = Rig::with(Some(Slots::adaptive(1..=16)), None, brake);
    let mut after = |failures: u32| {
        for _ in 0..failures {
            rig.fails();
        }
        (rig.slots(), rig.state.failures(&brake, rig.now))
    };
    assert_eq!([after(2), after(1), after(1)], [(8, 0), (8, 1), (4, 0)]);
}

#[test]
fn failures_count_within_their_window_only() {
    let mut rig = Rig::new(Slots::adaptive(1..=16), None);
    rig.fails().fails().later(secs(61)).fails();
    assert_eq!((rig.cuts, rig.state.failures(&rig.brake, rig.now)), (0, 1));
    rig.later(secs(30)).fails().later(secs(30)).fails();
    assert_eq!((rig.cuts, rig.slots()), (1, 8));
}

#[test]
fn one_wave_of_failures_is_one_cut() {
    let mut rig = Rig::new(Slots::adaptive(1..=64), None);
    for index in 0..30 {
        // Requests admitted before the cut are not current any more.
        let is_current = rig.cuts == 0;
        rig.learn(Kind::Failure, is_current, 30 - index, 0);
    }
    assert_eq!((rig.cuts, rig.slots()), (1, 32));
    assert_eq!(rig.state.failures(&rig.brake, rig.now), 0, "the rest of the wave is not counted");
}

#[test]
fn an_overload_cuts_at_once_and_once_per_wave() {
    let mut rig = Rig::new(Slots::adaptive(1..=64), Some(paced(millis(200), secs(30))));
    rig.overloads();
    assert_eq!((rig.cuts, rig.slots(), rig.tuning.interval), (1, 32, millis(400)));
    for _ in 0..10 {
        rig.learn(Kind::Overload, false, 10, 0);
    }
    assert_eq!((rig.cuts, rig.slots(), rig.tuning.interval), (1, 32, millis(400)));
}

#[test]
fn slots_that_start_low_grow_to_their_maximum() {
    let mut rig = Rig::new(Slots::adaptive(1..=8).start(2), None);
    rig.succeeds();
    assert_eq!(rig.cool(50).last(), Some(&8));
    assert!(!rig.state.is_cooling(), "nothing was ever cut");
}

#[test]
fn interval_grows_from_zero_and_returns_to_zero() {
    let mut rig = Rig::new(Slots::adaptive(1..=8), Some(paced(Duration::ZERO, secs(30))));
    let slowed = [(); 3].map(|()| rig.overloads().tuning.interval);
    assert_eq!(slowed, [50, 100, 200].map(millis));
    let back = [(); 4].map(|()| rig.later(COOLING).succeeds().tuning.interval);
    assert_eq!(back, [100, 50, 0, 0].map(millis));
}

#[test]
fn a_short_interval_doubles_too() {
    let mut rig = Rig::new(Slots::adaptive(1..=8), Some(paced(millis(10), secs(30))));
    let slowed = [(); 3].map(|()| rig.overloads().tuning.interval);
    assert_eq!(slowed, [20, 40, 80].map(millis));
    let back = [(); 4].map(|()| rig.later(COOLING).succeeds().tuning.interval);
    assert_eq!(back, [40, 20, 10, 10].map(millis));
}

#[test]
fn one_slot_is_slowed_by_its_interval_alone() {
    let mut rig = Rig::new(Slots::fixed(1), Some(paced(millis(200), secs(30))));
    rig.overloads();
    assert_eq!((rig.slots(), rig.tuning.interval, rig.state.is_cooling()), (1, millis(400), true));
    assert_eq!(rig.cool(1), [1]);
    assert_eq!((rig.tuning.interval, rig.state.is_cooling()), (millis(200), false));
}

#[test]
fn slots_grow_only_when_half_of_them_are_used() {
    let table = [(8, 3, 8), (8, 4, 9), (8, 8, 9), (7, 3, 7), (7, 4, 8)];
    for (start, in_flight, wanted) in table {
        let mut rig = Rig::new(Slots::adaptive(1..=64).start(start), None);
        rig.succeeds().later(COOLING).learn(Kind::Success, true, in_flight, 9);
        assert_eq!(rig.slots(), wanted, "{in_flight} of {start} in flight");
    }
}

#[test]
fn an_unused_period_is_not_lost_and_not_added_up() {
    let mut rig = Rig::new(Slots::adaptive(1..=64).start(8), None);
    rig.succeeds().later(COOLING * 10).learn(Kind::Success, true, 1, 0);
    assert_eq!(rig.slots(), 8);
    assert_eq!([rig.succeeds().slots(), rig.succeeds().slots()], [9, 9], "one step, however long it took");
}

/// Regression: a long interval keeps slots idle (five slots, one request in flight every 30 s). Requiring
/// slots in use before shortening the interval kept it long forever.
#[test]
fn interval_shrinks_for_waiters_despite_idle_slots() {
    for slots in [Some(Slots::fixed(5)), Some(Slots::unlimited()), None] {
        let mut rig = Rig::with(slots, Some(paced(secs(1), secs(30))), Brake::default());
        for _ in 0..5 {
            rig.overloads();
        }
        assert_eq!(rig.tuning.interval, secs(30));
        let back = [(); 6].map(|()| rig.later(COOLING).learn(Kind::Success, true, 1, 7).tuning.interval);
        assert_eq!(back, [15_000, 7_500, 3_750, 1_875, 1_000, 1_000].map(millis));
        assert_eq!(Some(rig.slots()), slots.map(|slots| slots.max).or(Some(u32::MAX)));
        assert!(!rig.state.is_cooling());
    }
}

#[test]
fn interval_stays_without_waiters_and_with_idle_slots() {
    let mut rig = Rig::new(Slots::fixed(5), Some(paced(secs(1), secs(30))));
    rig.overloads().later(COOLING).learn(Kind::Success, true, 1, 0);
    assert_eq!((rig.tuning.interval, rig.state.is_cooling()), (secs(2), true));
}

#[test]
fn growth_is_per_period_and_not_per_success() {
    let mut rig = Rig::new(Slots::adaptive(1..=64), None);
    rig.overloads();
    for _ in 0..100 {
        rig.later(millis(599)).succeeds();
    }
    assert_eq!(rig.slots(), 32, "59.9 s after the cut");
    rig.later(millis(100)).succeeds().succeeds();
    assert_eq!(rig.slots(), 33);
}

#[test]
fn a_cut_starts_a_new_cooling_period() {
    let mut rig = Rig::new(Slots::adaptive(1..=64), None);
    rig.overloads().later(secs(59)).overloads().later(secs(59)).succeeds();
    assert_eq!(rig.slots(), 16);
    assert_eq!(rig.later(secs(1)).succeeds().slots(), 17);
}

#[test]
fn ceiling_lifts_after_five_periods_without_failure() {
    let mut rig = Rig::new(Slots::adaptive(1..=8), None);
    rig.overloads().overloads();
    assert_eq!((rig.slots(), rig.state.ceiling()), (2, 4));
    assert_eq!((rig.cool(4), rig.state.ceiling()), (vec![3, 4, 4, 4], 4));
    rig.later(secs(59)).succeeds();
    assert_eq!((rig.slots(), rig.state.ceiling()), (4, 4));
    rig.later(secs(1)).succeeds();
    assert_eq!((rig.slots(), rig.state.ceiling()), (5, 8));
    assert_eq!(rig.cool(4), [6, 7, 8, 8]);
}

#[test]
fn failure_without_a_cut_keeps_the_ceiling() {
    let mut rig = Rig::new(Slots::adaptive(1..=8), None);
    rig.overloads().overloads();
    rig.cool(4);
    rig.fails();
    assert_eq!((rig.cool(4), rig.state.ceiling()), (vec![4; 4], 4));
    assert_eq!((rig.cool(1), rig.state.ceiling()), (vec![5], 8));
}

#[test]
fn ignored_outcomes_change_nothing() {
    let mut rig = Rig::new(Slots::adaptive(1..=8), Some(paced(secs(1), secs(30))));
    for _ in 0..100 {
        rig.later(COOLING).learn(Kind::Ignored, true, 8, 8);
    }
    assert_eq!((rig.slots(), rig.tuning.interval, rig.cuts), (8, secs(1), 0));
    assert_eq!((rig.state.cooling_since, rig.state.last_failure), (None, None));
}

#[test]
fn brake_cools_until_limits_are_restored() {
    let mut rig = Rig::new(Slots::adaptive(1..=4), Some(paced(secs(1), secs(30))));
    assert!(!rig.state.is_cooling());
    rig.overloads();
    let cooling = [(); 3].map(|()| {
        rig.later(COOLING).succeeds();
        (rig.slots(), rig.state.is_cooling())
    });
    assert_eq!(cooling, [(3, true), (4, false), (4, false)]);
}

#[test]
fn new_plan_keeps_ceiling_within_its_bounds() {
    let plan = |slots| Rig::new(slots, None).plan;
    let (old, lower, higher) =
        (plan(Slots::adaptive(1..=16)), plan(Slots::adaptive(1..=6)), plan(Slots::adaptive(12..=32)));
    let table = [(0, &lower, 6), (0, &higher, 32), (2, &lower, 6), (2, &higher, 12), (3, &lower, 4)];
    for (cuts, new, ceiling) in table {
        let mut rig = Rig::new(Slots::adaptive(1..=16), None);
        for _ in 0..cuts {
            rig.overloads();
        }
        rig.state.tune(&old, new);
        assert_eq!(rig.state.ceiling(), ceiling, "after {cuts} cuts");
    }
}

proptest! {
    /// After any history, a healthy upstream under demand gets all limits back.
    #[test]
    fn recovery_always_reaches_the_maximum_again(
        (min, max) in (1_u32..=20).prop_flat_map(|min| (Just(min), min..=40)),
        start in 0_u32..40,
        interval_min in prop_oneof![Just(0_u64), 1_u64..2_000],
        slower in 0_u64..60_000,
        past in prop::collection::vec((0_usize..4, any::<bool>(), 0_u64..50, 0_u64..200_000), 0..80),
    ) {
        let pace = paced(millis(interval_min), millis(interval_min + slower));
        let mut rig = Rig::new(Slots::adaptive(min..=max).start(min + start % (max - min + 1)), Some(pace));
        for (kind, is_current, in_flight, step) in past {
            let kind = [Kind::Success, Kind::Failure, Kind::Overload, Kind::Ignored][kind];
            rig.later(millis(step)).learn(kind, is_current, in_flight, 0);
            prop_assert!((min..=max).contains(&rig.slots()));
            prop_assert!(rig.tuning.interval >= millis(interval_min));
            prop_assert!(rig.tuning.interval <= millis(interval_min + slower));
        }
        // The ceiling is lifted within five periods, each period restores one slot, and halving takes at most
        // 26.
        rig.cool(5 + max + 26);
        prop_assert_eq!((rig.slots(), rig.tuning.interval), (max, millis(interval_min)));
        prop_assert!(!rig.state.is_cooling());
    }
}
