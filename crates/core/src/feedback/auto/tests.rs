//! Tests of single decisions of the whole controller. The lab measures how well they work.

use std::mem::size_of;

use super::*;
use crate::control::Control;
use crate::cost::Charge;
use crate::event::Event;
use crate::feedback::headers::Reset;
use crate::gate::{Ending, Gates};
use crate::outcome::QuotaLevel;
use crate::plan::{Auto, Controller, Draft, Plan};
use crate::verdict::{Verdict, Wait};

mod reasons;
mod waits;

/// Gates under `Auto`, and a clock.
struct Rig {
    plan: Plan,
    gates: Gates,
    now: Instant,
    events: Vec<Event>,
}

const fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

impl Rig {
    fn new() -> Self {
        let draft = Draft { controller: Controller::Auto(Auto::default()), ..Draft::default() };
        let plan = draft.check().unwrap();
        let gates = Gates::new(&plan, Random::fixed(0.5));
        Self { plan, gates, now: Instant::ZERO, events: Vec::new() }
    }

    fn later(&mut self, span: Duration) -> &mut Self {
        self.now = self.now + span;
        self
    }

    fn ask(&mut self, cost: Cost) -> Result<Charge, Verdict> {
        self.gates.admit(&self.plan, cost, 0, self.now, &mut self.events)
    }

    /// Waits until the request is admitted.
    fn go(&mut self, cost: Cost) -> Charge {
        loop {
            match self.ask(cost) {
                Ok(charge) => return charge,
                Err(Verdict::Wait(Wait { until: Some(until), .. })) => self.now = until,
                Err(verdict) => panic!("{verdict:?}"),
            }
        }
    }

    fn settle(&mut self, charge: Charge, outcome: Outcome) {
        let ending = Ending { charge, reported: None, outcome: &outcome };
        self.gates.settle(&self.plan, ending, 0, self.now, &mut self.events);
    }

    fn control(&self) -> Control {
        self.gates.snapshot(&self.plan, 0, self.now).control.unwrap()
    }

    fn pace(&self) -> f64 {
        self.control().requests.pace.unwrap().as_f64()
    }

    fn fall_dark(&mut self) {
        for _ in 0..6 {
            let charge = self.go(Cost::request());
            self.later(millis(50)).settle(charge, Outcome::overload());
        }
        assert_eq!(self.control().reason, Reason::Outage);
    }

    /// 64 workers that never rest, for some seconds. `respond` is asked with the number in flight and the time when a
    /// request is sent, for its latency and outcome. Returns the reasons reported since.
    fn work(
        &mut self,
        secs: u64,
        mut respond: impl FnMut(u64, Instant) -> (Duration, Outcome),
    ) -> Vec<Reason> {
        let end = self.now + Duration::from_secs(secs);
        let mut sent: Vec<(Instant, Charge, Outcome)> = Vec::new();
        self.events.clear();
        while self.now < end {
            let next = sent.iter().map(|(at, ..)| *at).min();
            let until = match (sent.len() < 64).then(|| self.ask(Cost::request())) {
                Some(Ok(charge)) => {
                    let (latency, outcome) = respond(sent.len() as u64 + 1, self.now);
                    sent.push((self.now + latency, charge, outcome));
                    continue;
                }
                Some(Err(Verdict::Wait(wait))) => wait.until,
                _ => None,
            };
            self.now = until.into_iter().chain(next).min().expect("a request is in flight, or time helps");
            while let Some(index) = sent.iter().position(|(at, ..)| *at <= self.now) {
                let (_, charge, outcome) = sent.swap_remove(index);
                self.settle(charge, outcome);
            }
        }
        for (at, charge, outcome) in sent {
            self.now = self.now.max(at);
            self.settle(charge, outcome);
        }
        let reason = |event: &Event| match event {
            Event::Controlled { reason } => Some(reason.to),
            _ => None,
        };
        self.events.iter().filter_map(reason).collect()
    }
}

/// Regression: the wait assumed a bucket of one unit and the refill one of 20 ms, so at high rates callers
/// waited too long.
#[test]
fn wait_ends_when_the_refill_has_a_unit() {
    for rate in [0.5, 10.0, 1_000.0, 50_000.0] {
        let auto = Auto::default().rate_start(rate);
        let mut rig = Rig::new();
        rig.plan = Draft { controller: Controller::Auto(auto), ..Draft::default() }.check().unwrap();
        rig.gates = Gates::new(&rig.plan, Random::fixed(0.5));
        let burst = std::iter::from_fn(|| rig.ask(Cost::request()).ok()).take(32).count();
        assert!(burst >= 1);
        if burst == 32 {
            continue;
        }
        let (_, at) = rig.gates.bound_at(&rig.plan, Cost::request(), 0, rig.now).expect("it waits");
        let span = at.since(rig.now);
        assert!((span.as_secs_f64() * rate - 1.0).abs() < 0.01, "{rate}: {span:?}");
        rig.now = at;
        assert!(rig.ask(Cost::request()).is_ok(), "{rate}/s: not after {span:?}");
    }
}

/// Regression: one huge request left a debt of 3,000 s: three mean requests at the slowest pace.
#[test]
fn debt_of_one_request_is_bounded() {
    let mut rig = Rig::new();
    for cost in [Cost::request().tokens(60), Cost::request(), Cost::request().tokens(u64::MAX)] {
        let _charge = rig.later(millis(100)).ask(cost).unwrap();
    }
    assert!(rig.later(Duration::from_secs(1_001)).ask(Cost::request()).is_ok());
}

/// An upstream that takes 20 s to respond but rejects immediately: rejections come long before the first
/// success.
#[test]
fn early_rejections_do_not_starve_the_rate() {
    let mut rig = Rig::new();
    let mut slow: Vec<(Instant, Charge)> = Vec::new();
    let (mut rejected, mut answered) = (0, 0);
    while rig.now < Instant::ZERO + Duration::from_secs(300) {
        match rig.ask(Cost::request()) {
            // Two per second are accepted.
            Ok(charge) if (slow.len() as u64) + answered < rig.now.as_nanos() / 500_000_000 => {
                slow.push((rig.now + Duration::from_secs(20), charge));
            }
            Ok(charge) => {
                rejected += 1;
                rig.later(millis(30)).settle(charge, Outcome::overload());
            }
            Err(Verdict::Wait(Wait { until: Some(until), .. })) => rig.now = until,
            Err(_) => rig.now = slow[0].0,
        }
        while slow.first().is_some_and(|(at, _)| *at <= rig.now) {
            let (_, charge) = slow.remove(0);
            rig.settle(charge, Outcome::success());
            answered += 1;
        }
    }
    let accepted = answered + slow.len() as u64;
    assert!(accepted > 400, "{accepted} of 600 accepted, {rejected} rejected, pace {}", rig.pace());
    assert!(rejected < 150, "{rejected} rejected");
}

#[test]
fn other_errors_move_neither_rate_nor_slots() {
    let mut rig = Rig::new();
    let before = (rig.pace(), rig.control().slots);
    for _ in 0..50 {
        let charge = rig.later(Duration::from_secs(1)).go(Cost::request());
        rig.later(millis(50)).settle(charge, Outcome::failure());
    }
    assert_eq!((rig.pace(), rig.control().slots), before);
}

#[test]
fn named_dimension_is_cut_and_no_other() {
    for (named, is_tokens) in [(Metered::Tokens, true), (Metered::Requests, false)] {
        let mut rig = Rig::new();
        for _ in 0..20 {
            let charge = rig.go(Cost::request().tokens(100));
            rig.later(millis(50)).settle(charge, Outcome::success());
        }
        let charge = rig.go(Cost::request().tokens(100));
        rig.later(millis(50)).settle(charge, Outcome::overload().exceeded(named));
        let control = rig.control();
        assert_eq!(
            (control.tokens.quota.is_some(), control.requests.quota.is_some()),
            (is_tokens, !is_tokens)
        );
    }
}

#[test]
fn wave_is_one_cut() {
    let mut rig = Rig::new();
    let charges: Vec<_> = (0..10).map(|_| rig.go(Cost::request())).collect();
    let before = rig.pace();
    rig.later(millis(50));
    let mut paces = Vec::new();
    for charge in charges {
        rig.settle(charge, Outcome::overload());
        paces.push(rig.pace());
    }
    assert!(paces[0] < before);
    assert!(paces.iter().all(|pace| (pace - paces[0]).abs() < 1e-9), "{paces:?}");
}

#[test]
fn undone_request_leaves_no_trace() {
    let mut rig = Rig::new();
    let charge = rig.go(Cost::request());
    assert!(rig.ask(Cost::request()).is_err());
    rig.gates.undo(&rig.plan, charge, rig.now, &mut rig.events);
    assert!(rig.ask(Cost::request()).is_ok());
}

#[test]
fn cancelled_and_panicked_requests_change_nothing() {
    let mut rig = Rig::new();
    for _ in 0..100 {
        let charge = rig.later(Duration::from_secs(1)).go(Cost::request());
        rig.later(Duration::from_secs(30)).settle(charge, Outcome::ignored());
    }
    let control = rig.control();
    assert_eq!((control.reason, control.requests.quota), (Reason::Probing, None));
}

#[test]
fn clock_that_steps_back_adds_nothing() {
    let mut rig = Rig::new();
    rig.later(Duration::from_secs(100));
    let _first = rig.go(Cost::request());
    let at = rig.now;
    rig.now = Instant::ZERO;
    assert!(rig.ask(Cost::request()).is_err(), "no refill by a step back");
    rig.now = at + millis(100);
    assert!(rig.ask(Cost::request()).is_ok());
}

#[test]
fn absurd_costs_and_headers_do_not_panic() {
    let mut rig = Rig::new();
    for tokens in [u64::MAX, 0, 1, u64::MAX] {
        let charge = rig.later(Duration::from_secs(1)).ask(Cost::request().tokens(tokens));
        let Ok(charge) = charge else { continue };
        let level = QuotaLevel {
            limit: u64::MAX,
            remaining: u64::MAX,
            reset: Reset::Full(Duration::MAX),
            window: None,
        };
        rig.settle(charge, Outcome::overload().quota(Metered::Tokens, level).retry_after(Duration::MAX));
    }
    assert!(rig.pace().is_finite());
}

/// The memory of an idle key under `Auto`.
#[test]
fn idle_key_stays_within_its_memory() {
    assert_eq!(size_of::<Option<Charge>>(), 48, "a permit is no larger than it must be");
    let bytes = size_of::<Gates>() + size_of::<AutoState>();
    assert!(bytes <= 512, "{bytes} bytes: {} and {}", size_of::<Gates>(), size_of::<AutoState>());
}

/// Input and output tokens have estimates of their own: a rejection that names one cuts no other.
#[test]
fn named_kind_of_token_is_cut_and_no_other() {
    for (named, index) in [(Metered::InputTokens, 2), (Metered::OutputTokens, 3)] {
        let mut rig = Rig::new();
        let cost = Cost::request().input_tokens(1_000).output_tokens(200);
        for _ in 0..20 {
            let charge = rig.go(cost);
            rig.later(millis(50)).settle(charge, Outcome::success());
        }
        let charge = rig.go(cost);
        rig.later(millis(50)).settle(charge, Outcome::overload().exceeded(named));
        let control = rig.control();
        let of = [control.requests, control.tokens, control.input_tokens, control.output_tokens];
        assert!(of.iter().all(|estimate| estimate.pace.is_some()), "{control:?}");
        let known: Vec<_> = of.iter().map(|estimate| estimate.quota.is_some()).collect();
        let wanted: Vec<_> = (0..4).map(|other| other == index).collect();
        assert_eq!(known, wanted, "{named:?}");
    }
}

/// A request goes when all dimensions allow it: headers of output tokens hold back requests with many of them.
#[test]
fn headers_of_one_kind_hold_back_its_requests() {
    let mut rig = Rig::new();
    let cost = |output| Cost::request().input_tokens(100).output_tokens(output);
    let charge = rig.go(cost(100));
    let reset = Reset::More(Duration::from_secs(60));
    let level = QuotaLevel { limit: 600, remaining: 60, reset, window: None };
    rig.later(millis(50)).settle(charge, Outcome::success().quota(Metered::OutputTokens, level));
    let pace = rig.control().output_tokens.pace.unwrap().as_f64();
    assert!((pace - 1.0).abs() < 0.05, "60 left for 60 s, not {pace}/s");
    let start = rig.now;
    for _ in 0..6 {
        let charge = rig.go(cost(20));
        rig.settle(charge, Outcome::success());
    }
    assert!(rig.now.since(start) > Duration::from_secs(10), "{:?}", rig.now.since(start));
}

/// Anthropic reports the tightest limit as that of all tokens too: input was paced by the limit of output.
#[test]
fn level_of_a_kind_is_not_that_of_all_tokens() {
    let reset = Reset::More(Duration::from_secs(60));
    let level = QuotaLevel { limit: 600, remaining: 60, reset, window: None };
    let report = Outcome::success().quota(Metered::OutputTokens, level).quota(Metered::Tokens, level);
    for (cost, is_paced) in
        [(Cost::request().input_tokens(900).output_tokens(9), false), (Cost::request().tokens(909), true)]
    {
        let mut rig = Rig::new();
        let charge = rig.go(cost);
        rig.later(millis(50)).settle(charge, report);
        let pace = rig.control().tokens.pace.unwrap().as_f64();
        assert_eq!(pace < 2.0, is_paced, "{cost:?}: {pace}/s");
    }
}

/// A kind that no request names is a part of all tokens.
#[test]
fn rejection_of_an_unused_kind_cuts_tokens() {
    let mut rig = Rig::new();
    for _ in 0..20 {
        let charge = rig.go(Cost::request().tokens(100));
        rig.later(millis(50)).settle(charge, Outcome::success());
    }
    let charge = rig.go(Cost::request().tokens(100));
    rig.later(millis(50)).settle(charge, Outcome::overload().exceeded(Metered::OutputTokens));
    let control = rig.control();
    assert!(control.tokens.quota.is_some() && control.requests.quota.is_none(), "{control:?}");
    assert_eq!((control.input_tokens.pace, control.output_tokens.pace), (None, None));
}

#[test]
fn headers_do_not_exceed_the_ceiling() {
    let mut rig = Rig::new();
    let auto = Auto::default().rate_max(5.0);
    rig.plan = Draft { controller: Controller::Auto(auto), ..Draft::default() }.check().unwrap();
    rig.gates = Gates::new(&rig.plan, Random::fixed(0.5));
    let charge = rig.go(Cost::request());
    let reset = Reset::Full(Duration::from_secs(6));
    let level = QuotaLevel { limit: 3_000, remaining: 2_700, reset, window: None };
    rig.later(millis(50)).settle(charge, Outcome::success().quota(Metered::Requests, level));
    assert!(rig.pace() <= 5.0, "{}", rig.pace());
}

/// Regression: when the last requests of a cohort were cancelled, no later request was measured again.
#[test]
fn cancelled_stragglers_do_not_end_latency_control() {
    let mut rig = Rig::new();
    let charges: Vec<_> = (0..12).map(|_| rig.go(Cost::request())).collect();
    rig.later(Duration::from_secs(1));
    for (index, charge) in charges.into_iter().enumerate() {
        rig.settle(charge, if index % 2 == 0 { Outcome::success() } else { Outcome::ignored() });
    }
    let charge = rig.later(Duration::from_secs(1)).go(Cost::request());
    assert_ne!(charge.sent.cohort, 0, "it belongs to a cohort");
}

/// Regression: a probe that was dropped before its response counted as accepted.
#[test]
fn dropped_probe_does_not_end_an_outage() {
    for is_undone in [false, true] {
        let mut rig = Rig::new();
        rig.fall_dark();
        let probe = rig.go(Cost::request());
        if is_undone {
            rig.gates.undo(&rig.plan, probe, rig.now, &mut rig.events);
        } else {
            rig.settle(probe, Outcome::ignored());
        }
        rig.later(Duration::from_secs(5));
        let _next = rig.go(Cost::request());
        assert_eq!(rig.control().reason, Reason::Outage);
    }
}

/// Regression: permits of another controller were subtracted from the units that `Auto` had sent.
#[test]
fn permits_of_another_controller_are_not_counted() {
    let mut rig = Rig::new();
    let auto = rig.plan.clone();
    rig.plan = Draft::default().check().unwrap();
    rig.gates = Gates::new(&rig.plan, Random::fixed(0.5));
    let charges: Vec<_> = (0..100).map(|_| rig.go(Cost::request())).collect();
    rig.gates.retune(&rig.plan, &auto, rig.now, &mut rig.events);
    rig.plan = auto;
    for charge in charges {
        rig.later(millis(1)).settle(charge, Outcome::overload());
    }
    let charge = rig.later(Duration::from_secs(10)).go(Cost::request());
    rig.settle(charge, Outcome::success());
    assert!(rig.pace() > 1.0, "{}", rig.pace());
}

#[test]
fn endless_latency_does_not_panic() {
    let mut rig = Rig::new();
    for latency in [millis(50), Duration::MAX] {
        for _ in 0..10 {
            // As many as the slots allow, which are cut on the way.
            let charges: Vec<_> =
                (0..20).filter_map(|_| rig.later(millis(100)).ask(Cost::request()).ok()).collect();
            rig.later(Duration::from_secs(4));
            for charge in charges {
                rig.settle(charge, Outcome::success().took(latency));
            }
        }
    }
    assert!(rig.pace().is_finite());
}

/// Regression: a request that was cancelled beside a probe ended it, and the next request went at once.
#[test]
fn cancelled_request_leaves_a_probe() {
    for is_undone in [false, true] {
        let mut rig = Rig::new();
        let other = rig.go(Cost::request());
        rig.fall_dark();
        let probe = rig.go(Cost::request());
        if is_undone {
            rig.gates.undo(&rig.plan, other, rig.now, &mut rig.events);
        } else {
            rig.settle(other, Outcome::ignored());
        }
        assert!(rig.ask(Cost::request()).is_err(), "the probe is out");
        rig.settle(probe, Outcome::success());
        assert_ne!(rig.control().reason, Reason::Outage);
    }
}

/// Regression: an outage never ended while the responses were 404s.
#[test]
fn mistake_of_a_probe_ends_an_outage() {
    for is_recorded in [false, true] {
        let mut rig = Rig::new();
        rig.fall_dark();
        let mut probe = rig.go(Cost::request());
        if is_recorded {
            let not_found = Outcome::mistake();
            rig.gates.record(&rig.plan, Some(&mut probe), not_found, 0, rig.now, &mut rig.events);
            assert_ne!(rig.control().reason, Reason::Outage);
            rig.settle(probe, Outcome::ignored());
        } else {
            rig.settle(probe, Outcome::mistake());
        }
        assert_ne!(rig.control().reason, Reason::Outage);
    }
}

/// Regression: a link checker that met only 404s stayed at the start pace.
#[test]
fn start_pace_rises_with_mistakes_alone() {
    let mut rig = Rig::new();
    let mut sent = 0;
    rig.work(20, |_, _| {
        sent += 1;
        (millis(50), Outcome::mistake())
    });
    assert!(sent > 2_000, "{sent} sent in 20 s");
    assert_eq!(rig.control().reason, Reason::Probing);
}

#[test]
fn rejection_blames_the_dimension_that_held_last() {
    // Held at, and rate over estimate, of requests and of tokens; the blamed dimension.
    let table = [
        ((2.0, 1.0), (1.0, 9.0), 0),
        ((1.0, 9.0), (2.0, 1.0), 1),
        ((1.0, 1.1), (1.0, 1.0), 0),
        ((1.0, 1.0), (1.0, 1.1), 1),
    ];
    let limits = Rig::new().plan.auto.unwrap();
    for (requests, tokens, wanted) in table {
        let mut auto = AutoState::new(&limits);
        auto.take(&limits, Cost::request().tokens(100), 1, Instant::ZERO);
        for (dimension, (held_at, excess)) in auto.dimensions.iter_mut().zip([requests, tokens]) {
            let quota = &mut dimension.quota;
            (quota.estimate, quota.rate, quota.held_at) = (100.0, 100.0 * excess, held_at);
        }
        assert_eq!(auto.blame(None, 3.0), wanted, "{requests:?} {tokens:?}");
        assert_eq!(auto.blame(Some(Metered::Tokens), 3.0), 1);
        auto.dimensions[1].quota.estimate = 0.0;
        assert_eq!(auto.blame(None, 3.0), 0, "tokens were never named");
    }
}
