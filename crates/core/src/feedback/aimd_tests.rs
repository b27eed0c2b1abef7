//! The AIMD rate grows with time and use, is cut once per wave, and stays within its bounds.

use proptest::prelude::*;

use super::*;
use crate::plan::{Aimd, Controller, Draft, Rate};

const fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

const fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// 0.5 to 8 per second, increased by half a unit each second, with a latency target of 100 ms.
fn cases() -> Aimd {
    Aimd::default().within(0.5..=8.0).increase(0.5).latency_target(millis(100))
}

/// An adaptive rate with its limits, a clock and a count of sent requests.
struct Rig {
    limits: AimdLimits,
    state: AimdState,
    now: Instant,
    admitted: u64,
    has_demand: bool,
    cuts: u32,
}

impl Rig {
    fn new(aimd: Aimd) -> Self {
        Self::starting(aimd, Aimd::RATE)
    }

    fn starting(aimd: Aimd, rate: Rate) -> Self {
        let limits = limits(aimd, rate);
        let state = AimdState::new(&limits);
        Self { limits, state, now: Instant::ZERO, admitted: 0, has_demand: false, cuts: 0 }
    }

    /// Learns from one outcome and applies the advice.
    fn learn(&mut self, kind: Kind, latency: Option<Duration>, is_current: bool) -> &mut Self {
        let (has_demand, admitted) = (self.has_demand, self.admitted);
        let sample = Sample { kind, is_current, in_flight: 1, has_demand, latency, admitted, now: self.now };
        let tuning = Tuning { slots: 7, interval: secs(9), rate: Some(self.state.rate()) };
        let to = match self.state.learn(&self.limits, tuning, sample) {
            Some(Advice::Cut(to, _)) => {
                self.cuts += 1;
                to
            }
            Some(Advice::Grow(to)) => to,
            None => return self,
        };
        assert_eq!((to.slots, to.interval), (7, secs(9)), "only the rate changes");
        self.state.set(&self.limits, to.rate.expect("it moves the rate"));
        self
    }

    fn overloads(&mut self) -> &mut Self {
        self.learn(Kind::Overload, Some(millis(50)), true)
    }

    fn succeeds_after(&mut self, latency: Duration) -> &mut Self {
        self.learn(Kind::Success, Some(latency), true)
    }

    /// A fast success, with more requests since the last one than any rate needs to count as used.
    fn succeeds(&mut self) -> &mut Self {
        self.admitted += 1 << 30;
        self.succeeds_after(Duration::ZERO)
    }

    fn later(&mut self, span: Duration) -> &mut Self {
        self.now = self.now + span;
        self
    }

    /// The rate in millionths.
    fn rate(&self) -> u64 {
        self.state.rate().millionths()
    }
}

fn limits(aimd: Aimd, rate: Rate) -> AimdLimits {
    let draft = Draft { rate: Some(rate), controller: Controller::Aimd(aimd), ..Draft::default() };
    draft.check().unwrap().aimd.unwrap()
}

/// The rate after each second of fast successes, in millionths.
fn path(rig: &mut Rig, seconds: usize) -> Vec<u64> {
    rig.succeeds();
    (0..seconds).map(|_| rig.later(secs(1)).succeeds().rate()).collect()
}

#[test]
fn a_second_of_fast_successes_adds_one_increase() {
    let mut rig = Rig::new(cases());
    for _ in 0..20 {
        assert_eq!(rig.succeeds().rate(), 2_000_000);
        rig.later(millis(50));
    }
    assert_eq!(rig.succeeds().rate(), 2_500_000);
    assert_eq!(path(&mut rig, 3), [3_000_000, 3_500_000, 4_000_000]);
}

#[test]
fn growth_is_per_second_and_not_per_response() {
    for responses in [1, 10, 1_000] {
        let mut rig = Rig::new(cases());
        rig.succeeds();
        for _ in 0..responses {
            rig.later(secs(1) / responses).succeeds();
        }
        assert_eq!(rig.rate(), 2_500_000, "{responses} responses");
    }
}

#[test]
fn latency_cuts_at_twice_the_target_and_not_below() {
    for (latency, wanted) in [(99, 2_000_000), (199, 2_000_000), (200, 1_000_000), (220, 1_000_000)] {
        let mut rig = Rig::new(cases());
        assert_eq!(rig.succeeds().succeeds_after(millis(latency)).rate(), wanted, "{latency} ms");
    }
    let mut rig = Rig::new(cases());
    rig.succeeds();
    for _ in 0..100 {
        // Almost twice the target at first; the target then rises to it, but the success is still not faster.
        rig.admitted += 100;
        assert_eq!(rig.later(secs(1)).succeeds_after(millis(199)).rate(), 2_000_000);
    }
    assert_eq!(rig.succeeds().rate(), 2_000_000, "the time before was not healthy");
    assert_eq!(rig.later(secs(1)).succeeds().rate(), 2_500_000);
}

/// An upstream that always took 1.5 s or more was cut down to the floor.
#[test]
fn constant_latency_of_any_length_is_healthy() {
    for seconds in [2, 5, 20] {
        let mut rig = Rig::new(cases());
        for _ in 0..100 {
            rig.admitted += 1_000;
            rig.later(secs(1)).succeeds_after(secs(seconds));
        }
        assert_eq!((rig.cuts, rig.rate()), (0, 8_000_000), "{seconds} s");
        assert_eq!(rig.succeeds_after(secs(3 * seconds)).cuts, 1, "three times as long is not");
    }
}

#[test]
fn unknown_latency_counts_as_fast_and_keeps_target() {
    let mut rig = Rig::new(cases());
    rig.succeeds_after(millis(150));
    let target = rig.state.target;
    rig.admitted += 100;
    rig.learn(Kind::Success, None, true);
    rig.admitted += 100;
    assert_eq!(rig.later(secs(1)).learn(Kind::Success, None, true).rate(), 2_500_000);
    assert_eq!(rig.state.target, target);
}

#[test]
fn overloads_of_separate_waves_halve_to_the_floor() {
    let mut rig = Rig::new(cases());
    let rates: Vec<_> = (0..3).map(|_| rig.overloads().rate()).collect();
    assert_eq!(rates, [1_000_000, 500_000, 500_000]);
}

#[test]
fn requests_sent_before_a_cut_cause_no_second_cut() {
    let mut rig = Rig::starting(cases(), Rate::per_second(8));
    rig.overloads();
    for _ in 0..7 {
        rig.learn(Kind::Overload, Some(millis(50)), false);
        rig.learn(Kind::Success, Some(secs(9)), false);
    }
    assert_eq!((rig.rate(), rig.cuts), (4_000_000, 1));
    assert_eq!(rig.state.target, millis(100), "the target does not change either");
}

#[test]
fn failures_neither_move_rate_nor_count_as_healthy() {
    let mut rig = Rig::new(cases());
    rig.succeeds();
    for _ in 0..10 {
        rig.later(millis(500)).learn(Kind::Failure, Some(secs(9)), true);
        rig.learn(Kind::Ignored, Some(secs(9)), true);
    }
    assert_eq!((rig.rate(), rig.state.target), (2_000_000, millis(100)));
    rig.later(millis(999));
    assert_eq!(rig.succeeds().rate(), 2_000_000);
    assert_eq!(rig.later(millis(1)).succeeds().rate(), 2_500_000);
}

#[test]
fn target_stays_between_one_and_two_baselines() {
    let mut rig = Rig::new(cases().latency_factor(100.0));
    rig.succeeds();
    let table =
        [(150, 110_000), (60, 100_000), (600, 200_000), (2_000, 247_900), (150, 228_320), (1, 182_856)];
    for (latency, wanted) in table {
        rig.succeeds_after(millis(latency));
        assert_eq!(rig.state.target, Duration::from_micros(wanted), "after {latency} ms");
    }
}

#[test]
fn sample_is_compared_before_it_moves_target() {
    // The sample raises the target to 124 ms, and would be below twice that.
    let mut rig = Rig::new(cases());
    assert_eq!(rig.succeeds().succeeds_after(millis(220)).rate(), 1_000_000);
    assert_eq!(rig.state.target, millis(124));
    assert_eq!(rig.succeeds_after(millis(247)).rate(), 1_000_000);
}

#[test]
fn slow_start_doubles_until_first_cut() {
    let aimd = cases().within(0.5..=100.0).decrease(0.9).slow_start();
    let mut rig = Rig::new(aimd);
    assert_eq!(path(&mut rig, 4), [4_000_000, 8_000_000, 16_000_000, 32_000_000]);
    assert_eq!(rig.overloads().rate(), 16_000_000);
    assert_eq!(path(&mut rig, 1), [20_000_000], "a quarter, far below the bad rate");
    assert_eq!(rig.overloads().rate(), 18_000_000);
}

#[test]
fn growth_slows_near_the_remembered_bad_rate() {
    let mut rig = Rig::starting(cases().within(0.5..=16.0), Rate::per_second(8));
    rig.overloads();
    assert_eq!(path(&mut rig, 5), [5_000_000, 6_250_000, 7_812_500, 7_968_750, 8_128_125]);
    assert!(!rig.state.is_cooling(), "the cut is reverted");
    // Five seconds have passed since the cut; after 180 it is no longer remembered.
    rig.later(secs(173)).learn(Kind::Failure, None, true);
    assert_eq!(rig.later(secs(1)).succeeds().rate(), 8_290_687);
    assert_eq!(rig.later(secs(1)).succeeds().rate(), 8_790_687);

    let mut rig = Rig::starting(cases().memory(Duration::ZERO), Rate::per_second(8));
    rig.overloads();
    assert_eq!(path(&mut rig, 2), [4_500_000, 5_000_000], "nothing to remember");
}

/// Regression: a one-minute outage cut the rate from 8 to its minimum, each cut was remembered as the last
/// bad rate, and from 0.25 the rate grew by only 1/50 each second. Recovery took two minutes instead of half
/// a minute without any memory.
#[test]
fn first_of_consecutive_cuts_sets_the_bad_rate() {
    let mut rig = Rig::starting(cases(), Rate::per_second(8));
    for wanted in [4_000_000, 2_000_000, 1_000_000, 500_000, 500_000, 500_000] {
        assert_eq!(rig.later(secs(10)).overloads().rate(), wanted);
    }
    let wanted = [625_000, 781_250, 976_562, 1_220_702, 1_525_877, 1_907_346, 2_384_182, 2_980_227];
    assert_eq!(path(&mut rig, 8), wanted, "grows by a quarter each second");
    assert_eq!(path(&mut rig, 6)[3..], [7_275_941, 7_421_459, 7_569_888], "and by a fiftieth near 8");
    // After a success, the next cut sets a new bad rate.
    rig.overloads();
    assert_eq!(rig.state.bad.unwrap().0.millionths(), 7_569_888);
}

#[test]
fn bad_rate_is_the_send_rate_if_rate_was_used() {
    let bad = |rig: &mut Rig| rig.overloads().state.bad.unwrap().0.millionths();
    let grown = |slow_start: bool| {
        let aimd = cases().within(0.5..=16.0);
        let mut rig = Rig::new(if slow_start { aimd.slow_start() } else { aimd });
        rig.succeeds_after(Duration::ZERO);
        for sent in [2, 3, 3, 4, 4, 5, 5, 6] {
            rig.admitted += if slow_start { 16 } else { sent };
            rig.later(secs(1)).succeeds_after(Duration::ZERO);
        }
        rig
    };
    let mut rig = grown(false);
    assert_eq!((rig.rate(), bad(&mut rig)), (6_000_000, 4_000_000), "32 in 8 s");
    let mut rig = grown(true);
    assert_eq!(
        (rig.rate(), bad(&mut rig)),
        (16_000_000, 16_000_000),
        "in a slow start the send rate lags behind"
    );
    let mut rig = grown(false);
    rig.later(secs(20));
    assert_eq!(bad(&mut rig), 6_000_000, "nothing was sent for a while, so the send rate is unknown");
}

#[test]
fn rate_grows_only_if_nine_tenths_were_sent() {
    // A stretch of 1 s at ten per second.
    let table = [(9, false, true), (8, false, false), (8, true, false), (9, true, true), (0, true, false)];
    for (sent, has_demand, wanted) in table {
        let mut rig = Rig::starting(cases().within(1.0..=20.0), Rate::per_second(10));
        rig.has_demand = has_demand;
        rig.succeeds_after(Duration::ZERO);
        rig.admitted += sent;
        let rate = rig.later(secs(1)).succeeds_after(Duration::ZERO).rate();
        assert_eq!(rate > 10_000_000, wanted, "{sent} sent, demand {has_demand}");
    }
    // A stretch of 1.05 s at ten per second: if the rate held a caller back, a fraction of a unit may be
    // missing.
    for (has_demand, wanted) in [(false, false), (true, true)] {
        let mut rig = Rig::starting(cases().within(1.0..=20.0), Rate::per_second(10));
        rig.has_demand = has_demand;
        rig.succeeds_after(Duration::ZERO);
        rig.admitted += 9;
        let rate = rig.later(millis(1_050)).succeeds_after(Duration::ZERO).rate();
        assert_eq!(rate > 10_000_000, wanted);
    }
}

#[test]
fn idle_time_is_neither_use_nor_growth() {
    let mut rig = Rig::new(cases());
    rig.succeeds_after(Duration::ZERO);
    rig.admitted += 4;
    assert_eq!(rig.later(secs(3_600)).succeeds_after(Duration::ZERO).rate(), 2_000_000);
    rig.admitted += 2;
    assert_eq!(rig.later(secs(1)).succeeds_after(Duration::ZERO).rate(), 2_500_000);
}

#[test]
fn step_scales_with_time_and_at_most_doubles() {
    let mut rig = Rig::new(cases());
    rig.succeeds();
    assert_eq!(rig.later(millis(1_500)).succeeds().rate(), 2_750_000);
    let mut rig = Rig::starting(cases(), Rate::new(1, secs(2)));
    rig.succeeds();
    let rates: Vec<_> = [8, 4, 2, 1].map(|wait| rig.later(secs(wait)).succeeds().rate()).into();
    assert_eq!(rates, [1_000_000, 2_000_000, 3_000_000, 3_500_000]);
}

#[test]
fn a_pause_is_neither_healthy_time_nor_unused() {
    let at = |millis: u64| Instant::ZERO + Duration::from_millis(millis);
    let mut rig = Rig::new(cases());
    rig.succeeds_after(Duration::ZERO);
    rig.admitted += 1;
    rig.later(millis(500)).succeeds_after(Duration::ZERO);
    // Ten seconds, then extended by five.
    rig.state.suspend(at(500), at(10_500));
    rig.state.suspend(at(10_500), at(15_500));
    rig.admitted += 1;
    rig.later(millis(9_000)).succeeds_after(Duration::ZERO);
    assert_eq!(rig.rate(), 2_000_000, "responses during a pause change nothing");
    rig.now = at(15_999);
    assert_eq!(rig.succeeds_after(Duration::ZERO).rate(), 2_000_000);
    rig.now = at(16_000);
    assert_eq!(rig.succeeds_after(Duration::ZERO).rate(), 2_500_000, "two sent in two halves of a second");
    // A pause that ends early is excluded only for its actual length.
    rig.state.suspend(at(16_000), at(99_000));
    rig.state.resume(at(17_000), at(99_000));
    rig.admitted += 3;
    rig.now = at(17_999);
    assert_eq!(rig.succeeds_after(Duration::ZERO).rate(), 2_500_000);
    rig.now = at(18_000);
    assert_eq!(rig.succeeds_after(Duration::ZERO).rate(), 3_000_000);
}

#[test]
fn new_bounds_clamp_learned_rate_or_restart_it() {
    let old = limits(cases(), Aimd::RATE);
    let slower = limits(cases().within(0.5..=1.0), Rate::per_second(1));
    let faster = limits(cases().within(4.0..=16.0).latency_target(secs(1)), Rate::per_second(4));
    let mut rig = Rig::new(cases());
    rig.state.tune(Some(&old), &slower, Instant::ZERO);
    assert_eq!(rig.rate(), 1_000_000, "the new start");
    rig.state.tune(Some(&slower), &faster, Instant::ZERO);
    assert_eq!((rig.rate(), rig.state.target), (4_000_000, secs(1)), "the start, not the maximum");
    let mut rig = Rig::new(cases());
    rig.overloads();
    assert!(rig.state.is_cooling());
    rig.state.tune(Some(&old), &slower, Instant::ZERO);
    assert_eq!(rig.rate(), 1_000_000, "half of two, as learned");
    rig.state.tune(Some(&slower), &faster, Instant::ZERO);
    assert_eq!(rig.rate(), 4_000_000, "not below the minimum");
    assert!(!rig.state.is_cooling(), "faster than before the cut");
}

/// Any limits that a plan accepts.
fn any_limits() -> impl Strategy<Value = AimdLimits> {
    let rates = (1_u64..=4_000_000, 0_u64..=4_000_000, 0_u64..=200_000_000);
    let steps = (1_u64..=10_000_000, 1_u64..=999_999, 1_000_000_u64..=4_000_000, 1_u64..=1_000_000);
    (rates, steps, any::<bool>(), 0_u64..300).prop_map(|((min, start, max), steps, slow_start, memory)| {
        let (increase, decrease, latency_factor, latency_weight) = steps;
        AimdLimits {
            min: PerSecond::from_millionths(min),
            start: PerSecond::from_millionths(min + start),
            max: PerSecond::from_millionths(min + start + max),
            burst: 4,
            increase: PerSecond::from_millionths(increase),
            decrease,
            latency_target: millis(100),
            latency_factor,
            latency_weight,
            slow_start,
            memory: secs(memory),
        }
    })
}

fn any_sample() -> impl Strategy<Value = (Kind, u64, u64, u64, bool)> {
    let kind = prop_oneof![
        6 => Just(Kind::Success),
        1 => Just(Kind::Failure),
        1 => Just(Kind::Overload),
        1 => Just(Kind::Ignored),
    ];
    (kind, 0_u64..400, 0_u64..3_000, 0_u64..200, any::<bool>())
}

proptest! {
    #[test]
    fn rate_stays_in_bounds_and_follows_advice(
        limits in any_limits(), samples in prop::collection::vec((any_sample(), any::<bool>()), 1..200),
    ) {
        let state = AimdState::new(&limits);
        let mut rig = Rig { limits, state, now: Instant::ZERO, admitted: 0, has_demand: false, cuts: 0 };
        for ((kind, latency, wait, sent, has_demand), is_current) in samples {
            rig.has_demand = has_demand;
            rig.admitted += sent;
            let (before, cuts) = (rig.rate(), rig.cuts);
            rig.later(millis(wait)).learn(kind, Some(millis(latency)), is_current);
            let rate = rig.state.rate();
            prop_assert!((limits.min..=limits.max).contains(&rate));
            prop_assert_eq!(*rig.state.shape(), limits.shape(rate));
            let baseline = rig.state.baseline.unwrap_or(limits.latency_target);
            prop_assert!(baseline >= limits.latency_target);
            prop_assert!((baseline..=2 * baseline).contains(&rig.state.target));
            let may_grow = is_current && kind == Kind::Success;
            prop_assert!(rig.rate() <= before || (may_grow && rig.rate() <= before * 2));
            let may_cut = is_current && matches!(kind, Kind::Success | Kind::Overload);
            prop_assert!(rig.cuts == cuts || may_cut);
            prop_assert!(rig.rate() >= before || rig.cuts > cuts, "only a cut lowers the rate");
        }
    }

    #[test]
    fn healthy_rate_under_demand_reaches_maximum(
        limits in any_limits(), cuts in 0_u32..6, pace in 1_u64..3_000,
    ) {
        let state = AimdState::new(&limits);
        let mut rig = Rig { limits, state, now: Instant::ZERO, admitted: 0, has_demand: true, cuts: 0 };
        for _ in 0..cuts {
            rig.overloads();
        }
        // The bad rate must expire first, and then the increase needs at most this many steps.
        let most = limits.max.millionths() / limits.increase.millionths();
        prop_assume!(most < 2_000);
        for _ in 0..(limits.memory.as_secs() + most + 50) * 1_000 / pace.min(1_000) + 50 {
            let before = rig.rate();
            rig.later(millis(pace)).succeeds();
            prop_assert!(rig.rate() >= before);
            if rig.rate() == limits.max.millionths() {
                break;
            }
        }
        prop_assert_eq!(rig.state.rate(), limits.max);
        prop_assert!(!rig.state.is_cooling());
    }
}
