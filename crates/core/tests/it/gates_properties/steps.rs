//! Random plans, and random steps under them.

use std::time::Duration;

use proptest::prelude::*;
use proptest::sample::Index;
use tidegate_core::cost::Cost;
use tidegate_core::feedback::headers::{Dimension, Reset};
use tidegate_core::outcome::{Outcome, QuotaLevel};
use tidegate_core::plan::{
    Aimd, Auto, Brake, Budget, Bytes, Circuit, Controller, Draft, Oversize, Pace, Pause, Rate, SizeRule,
    Slots,
};

/// The numbers of a plan that the model checks.
#[derive(Debug, Clone)]
pub(crate) struct Limits {
    pub(crate) draft: Draft,
    pub(crate) recovery_slots: Option<u32>,
    pub(crate) bytes: Option<u64>,
    pub(crate) burst: Option<i64>,
    pub(crate) budget: Option<u64>,
    pub(crate) probes: Option<u32>,
}

#[derive(Debug, Clone)]
pub(crate) enum Step {
    Admit { tokens: u64, bytes: u64, waiting: u32 },
    Settle { which: Index, outcome: Outcome, reported: Option<u64> },
    Record(Outcome),
    Undo(Index),
    Pause(Duration),
    Resume,
    Retune(Box<Limits>),
    Close,
    Forward(Duration),
    Back(Duration),
}

const fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// `Some` more often than not.
fn some<S: Strategy>(strategy: S) -> impl Strategy<Value = Option<S::Value>>
where
    S::Value: Clone,
{
    prop::option::weighted(0.6, strategy)
}

/// Plans of timed gates only, so that no request waits for a completion.
pub(crate) fn timed_limits() -> impl Strategy<Value = Limits> {
    let pace = (1_u64..400, 0_u64..2_000, prop_oneof![Just(0.0), 0.0..=1.0])
        .prop_map(|(min, more, jitter)| Pace::every(millis(min)).slowest(millis(min + more)).jitter(jitter));
    let rate = (1_u64..40, prop_oneof![Just(1_000_u64), Just(7_000)], 1_u64..6)
        .prop_map(|(amount, period, burst)| (Rate::new(amount, millis(period)).burst(burst), burst));
    let budget = (1_u64..300, 1_u64..4_000, prop_oneof![Just(Oversize::Refuse), Just(Oversize::Alone)])
        .prop_map(|(tokens, window, oversize)| {
            (Budget::tokens(tokens, millis(window)).oversize(oversize), tokens)
        });
    let pause = (0_u64..9_000, any::<bool>()).prop_map(|(max, is_sized)| {
        let pause = Pause::default().max(millis(max));
        if is_sized { pause.sizes(SizeRule::new(50, millis(300), millis(900))) } else { pause }
    });
    (some(pace), some(rate), some(budget), pause).prop_map(|(pace, rate, budget, pause)| Limits {
        draft: Draft {
            pace,
            rate: rate.map(|(rate, _)| rate),
            budget: budget.map(|(budget, _)| budget),
            pause,
            ..Draft::default()
        }
        .controlled_by(Controller::Fixed),
        recovery_slots: None,
        bytes: None,
        burst: rate.map(|(_, burst)| i64::try_from(burst).expect("a small burst")),
        budget: budget.map(|(_, tokens)| tokens),
        probes: None,
    })
}

/// Plans of all gates.
pub(crate) fn any_limits() -> impl Strategy<Value = Limits> {
    let slots = (1_u32..4, 0_u32..5, any::<bool>()).prop_map(|(min, more, is_low)| {
        let slots = Slots::adaptive(min..=min + more);
        if is_low { slots.start(min) } else { slots }
    });
    let circuit = (1_u32..4, 0_u64..3_000, 1_u32..3, any::<bool>()).prop_map(
        |(failures, open_for, probes, by_rate)| {
            let circuit = if by_rate {
                Circuit::at_error_rate(0.6, failures * 2, millis(4_000))
            } else {
                Circuit::after_failures(failures)
            };
            (circuit.open_for(millis(open_for)).probes(probes), probes)
        },
    );
    let brake = (1_u32..4, 1_u64..3_000).prop_map(|(failures, span)| {
        Controller::Brake(Brake::default().at(failures, millis(span)).cooling(millis(span)))
    });
    // Bounds that contain all rates generated here.
    let aimd = (0.05..0.14, 40.0..80.0, 0.1..9.0, any::<bool>()).prop_map(|(min, max, increase, is_slow)| {
        let aimd = Aimd::default().within(min..=max).increase(increase).latency_target(millis(400));
        Controller::Aimd(if is_slow { aimd.slow_start() } else { aimd })
    });
    let auto = (0.001..5.0, 0.0..200.0)
        .prop_map(|(min, more)| Controller::Auto(Auto::default().within(min..=min + more)));
    let learns = prop_oneof![brake, aimd, auto];
    let bytes = (1_u64..300, 1_u16..20);
    let recovery = (some(1_u32..4), 1_u64..4_000);
    (timed_limits(), some(slots), recovery, some(bytes), some(circuit), some(learns), some(0_u64..9))
        .prop_map(|(timed, slots, (recovery_slots, tail), bytes, circuit, learns, total)| {
            // A tail needs a limit, and the limits of the tail need one.
            let has_tail = recovery_slots.is_some() || bytes.is_some_and(|(_, price)| price > 1);
            let tail = if has_tail { millis(tail) } else { Duration::ZERO };
            Limits {
                draft: Draft {
                    slots,
                    recovery_slots,
                    bytes: bytes.map(|(bytes, of)| Bytes::in_flight(bytes).recovering_price(of)),
                    circuit: circuit.map(|(circuit, _)| circuit),
                    total,
                    pause: timed.draft.pause.tail(tail),
                    ..timed.draft.clone()
                }
                .controlled_by(learns.filter(|learns| fits(learns, slots, &timed)).unwrap_or_default()),
                recovery_slots,
                bytes: bytes.map(|(bytes, _)| bytes),
                probes: circuit.map(|(_, probes)| probes),
                ..timed
            }
        })
}

/// `Aimd` needs a rate, and the others something to move.
fn fits(controller: &Controller, slots: Option<Slots>, limits: &Limits) -> bool {
    match controller {
        Controller::Aimd(_) => limits.draft.rate.is_some(),
        _ => slots.is_some_and(|slots| slots.is_adaptive()),
    }
}

fn any_outcome() -> impl Strategy<Value = Outcome> {
    let kind = prop_oneof![
        4 => Just(Outcome::success()),
        2 => Just(Outcome::failure()),
        1 => Just(Outcome::overload()),
        2 => Just(Outcome::ignored()),
        1 => Just(Outcome::mistake()),
    ];
    let hint = prop::option::weighted(0.1, 0_u64..3_000);
    let dimension =
        || prop_oneof![Just(Dimension::Requests), Just(Dimension::Tokens), Just(Dimension::Other)];
    let exceeded = prop::option::weighted(0.2, dimension());
    let level = (dimension(), 0_u64..300, 0_u64..300, 0_u64..9_000, any::<bool>(), some(0_u64..9_000))
        .prop_map(|(dimension, limit, remaining, reset, is_full, window)| {
            let reset = if is_full { Reset::Full(millis(reset)) } else { Reset::More(millis(reset)) };
            (dimension, QuotaLevel { limit, remaining, reset, window: window.map(millis) })
        });
    let quota = (exceeded, prop::option::weighted(0.2, level));
    (kind, prop::option::of(0_u64..200), hint, any::<bool>(), quota).prop_map(
        |(mut outcome, spent, hint, retried, (exceeded, level))| {
            if let Some(dimension) = exceeded {
                outcome = outcome.exceeded(dimension);
            }
            if let Some((dimension, level)) = level {
                outcome = outcome.quota(dimension, level);
            }
            if let Some(tokens) = spent {
                outcome = outcome.spent(Cost::request().tokens(tokens));
            }
            if let Some(hint) = hint {
                outcome = outcome.retry_after(millis(hint));
            }
            if retried { outcome.retried() } else { outcome }
        },
    )
}

fn any_step(limits: impl Strategy<Value = Limits> + 'static) -> impl Strategy<Value = Step> {
    let reported = prop::option::of(0_u64..200);
    let settle = (any::<Index>(), any_outcome(), reported)
        .prop_map(|(which, outcome, reported)| Step::Settle { which, outcome, reported });
    prop_oneof![
        40 => (0_u64..250, 0_u64..300, 0_u32..4)
            .prop_map(|(tokens, bytes, waiting)| Step::Admit { tokens, bytes, waiting }),
        24 => settle,
        3 => any_outcome().prop_map(Step::Record),
        6 => any::<Index>().prop_map(Step::Undo),
        2 => (0_u64..3_000).prop_map(|span| Step::Pause(millis(span))),
        1 => Just(Step::Resume),
        3 => limits.prop_map(|limits| Step::Retune(Box::new(limits))),
        14 => (0_u64..1_500).prop_map(|span| Step::Forward(millis(span))),
        2 => (0_u64..5_000).prop_map(|span| Step::Back(millis(span))),
    ]
}

/// Plans of slots and a rate only; with an adaptive rate they are not plain.
pub(crate) fn plain_limits() -> impl Strategy<Value = Limits> {
    any_limits().prop_map(|Limits { draft, burst, .. }| Limits {
        draft: Draft { slots: draft.slots, rate: draft.rate, ..Draft::default() }.controlled_by(match draft
            .controller
        {
            moves @ Controller::Aimd(_) => moves,
            _ => Controller::Fixed,
        }),
        recovery_slots: None,
        bytes: None,
        burst,
        budget: None,
        probes: None,
    })
}

/// Random steps with at most one `Close`, in the second half.
pub(crate) fn any_steps(limits: impl Strategy<Value = Limits> + 'static) -> impl Strategy<Value = Vec<Step>> {
    (prop::collection::vec(any_step(limits), 1..150), prop::option::weighted(0.3, any::<Index>())).prop_map(
        |(mut steps, close)| {
            if let Some(at) = close {
                steps.insert(steps.len() / 2 + at.index(steps.len() / 2 + 1), Step::Close);
            }
            steps
        },
    )
}
