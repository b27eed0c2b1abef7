//! `Serialize` for what a throttle reports: snapshots, events and outcomes, for logs and status pages.
//!
//! Names are those of the fields and variants, in snake case; an event has its name as `event`. Durations are
//! seconds, times are seconds of the throttle's clock, and rates are per second, all as numbers.

use std::time::Duration;

use serde::{Serialize, Serializer};

use crate::cause::Cause;
use crate::control::{Control, Estimate, Reason};
use crate::cost::Cost;
use crate::event::{Change, Event, Notice, Trip, Why};
use crate::feedback::headers::Dimension;
use crate::outcome::{Kind, Outcome, QuotaLevel};
use crate::per_second::PerSecond;
use crate::snapshot::{CircuitState, CircuitView, LimitView, Phase, Snapshot, State};
use crate::statistics::Outcomes;
use crate::time::Instant;
use crate::verdict::GateName;

fn seconds<S: Serializer>(span: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(span.as_secs_f64())
}

#[expect(clippy::ref_option, reason = "serde passes the field by reference")]
fn maybe_seconds<S: Serializer>(span: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
    span.map(|span| span.as_secs_f64()).serialize(serializer)
}

fn seconds_change<S: Serializer>(change: &Change<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
    Change { from: change.from.as_secs_f64(), to: change.to.as_secs_f64() }.serialize(serializer)
}

impl Serialize for Instant {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        seconds(&self.since(Self::ZERO), serializer)
    }
}

impl Serialize for PerSecond {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_f64(self.as_f64())
    }
}

impl Serialize for GateName {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl Serialize for Cost {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Form {
            requests: u64,
            tokens: u64,
            bytes: u64,
            input_tokens: u64,
            output_tokens: u64,
        }
        let Self { tokens, bytes, input_tokens, output_tokens, .. } = *self;
        Form { requests: self.request_count(), tokens, bytes, input_tokens, output_tokens }
            .serialize(serializer)
    }
}

/// Serializes types by forms of the same fields.
macro_rules! by_form {
    ($($of:ident: $form:ident),*) => {
        $(impl Serialize for $of {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                $form::serialize(self, serializer)
            }
        })*
    };
}

by_form!(
    Snapshot: SnapshotForm, LimitView: LimitForm, State: StateForm, Phase: PhaseForm, CircuitView: CircuitForm,
    CircuitState: CircuitStateForm, Outcomes: OutcomesForm, Control: ControlForm, Estimate: EstimateForm,
    Reason: ReasonForm, Notice: NoticeForm, Event: EventForm, Why: WhyForm, Trip: TripForm, Kind: KindForm,
    Cause: CauseForm, Dimension: DimensionForm
);

impl<T: Serialize> Serialize for Change<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Form<'a, T> {
            from: &'a T,
            to: &'a T,
        }
        Form { from: &self.from, to: &self.to }.serialize(serializer)
    }
}

impl Serialize for Outcome {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Form {
            kind: Kind,
            cause: Option<Cause>,
            spent: Option<Cost>,
            #[serde(serialize_with = "maybe_seconds")]
            retry_after: Option<Duration>,
            #[serde(serialize_with = "maybe_seconds")]
            latency: Option<Duration>,
            is_retried: bool,
            malformed: u32,
            exceeded: Option<Dimension>,
            quotas: Quotas,
        }
        #[derive(Serialize)]
        struct Quotas {
            requests: Option<Level>,
            tokens: Option<Level>,
            input_tokens: Option<Level>,
            output_tokens: Option<Level>,
        }
        #[derive(Serialize)]
        struct Level {
            limit: u64,
            remaining: u64,
            #[serde(serialize_with = "seconds")]
            reset_after: Duration,
            #[serde(serialize_with = "maybe_seconds")]
            window: Option<Duration>,
        }
        let level = |of| {
            let QuotaLevel { limit, remaining, reset, window } = self.quota_level(of)?;
            Some(Level { limit, remaining, reset_after: reset.after(), window })
        };
        let form = Form {
            kind: self.kind(),
            cause: self.cause(),
            spent: self.spent_cost(),
            retry_after: self.hint(),
            latency: self.latency(),
            is_retried: self.is_retried(),
            malformed: self.malformed().into(),
            exceeded: self.exceeded,
            quotas: Quotas {
                requests: level(Dimension::Requests),
                tokens: level(Dimension::Tokens),
                input_tokens: level(Dimension::InputTokens),
                output_tokens: level(Dimension::OutputTokens),
            },
        };
        form.serialize(serializer)
    }
}

#[derive(Serialize)]
#[serde(remote = "Snapshot")]
struct SnapshotForm {
    at: Instant,
    state: State,
    phase: Phase,
    in_flight: u32,
    slots: Option<u32>,
    slots_max: Option<u32>,
    slots_ceiling: Option<u32>,
    recovering_in_flight: u32,
    #[serde(serialize_with = "seconds")]
    interval: Duration,
    bytes_in_flight: u64,
    rate: Option<PerSecond>,
    rate_level: Option<i64>,
    tokens_used: u64,
    tokens_remaining: Option<u64>,
    limits: Vec<LimitView>,
    failures: u64,
    circuit: Option<CircuitView>,
    error_rate: Option<f64>,
    outcomes: Outcomes,
    #[serde(serialize_with = "maybe_seconds")]
    latency_mean: Option<Duration>,
    #[serde(serialize_with = "maybe_seconds")]
    latency_p50: Option<Duration>,
    #[serde(serialize_with = "maybe_seconds")]
    latency_p95: Option<Duration>,
    completed: u64,
    total: u64,
    percentage: Option<f64>,
    #[serde(serialize_with = "maybe_seconds")]
    eta: Option<Duration>,
    waiting: u32,
    admitted: u64,
    evaluations: u64,
    headers_malformed: u64,
    next_entry: Option<Instant>,
    control: Option<Control>,
    listener_panics: u64,
    events_lost: u64,
}

#[derive(Serialize)]
#[serde(remote = "LimitView")]
struct LimitForm {
    name: GateName,
    counts: Dimension,
    capacity: u64,
    available: i64,
}

#[derive(Serialize)]
#[serde(remote = "State", rename_all = "snake_case")]
enum StateForm {
    Closed,
    Draining,
    CircuitOpen,
    Paused,
    Recovering,
    Cooling,
    Running,
}

#[derive(Serialize)]
#[serde(remote = "Phase", rename_all = "snake_case")]
enum PhaseForm {
    Normal,
    Paused,
    Recovering,
}

#[derive(Serialize)]
#[serde(remote = "CircuitView")]
struct CircuitForm {
    state: CircuitState,
    consecutive_failures: u32,
    probe_successes: u32,
    probes_in_flight: u32,
    #[serde(serialize_with = "seconds")]
    retry_after: Duration,
}

#[derive(Serialize)]
#[serde(remote = "CircuitState", rename_all = "snake_case")]
enum CircuitStateForm {
    Closed,
    Open,
    HalfOpen,
}

#[derive(Serialize)]
#[serde(remote = "Outcomes")]
struct OutcomesForm {
    successes: u64,
    throttled: u64,
    server: u64,
    network: u64,
    other: u64,
}

#[derive(Serialize)]
#[serde(remote = "Control")]
struct ControlForm {
    reason: Reason,
    requests: Estimate,
    tokens: Estimate,
    input_tokens: Estimate,
    output_tokens: Estimate,
    slots: u32,
}

#[derive(Serialize)]
#[serde(remote = "Estimate")]
struct EstimateForm {
    pace: Option<PerSecond>,
    quota: Option<PerSecond>,
}

#[derive(Serialize)]
#[serde(remote = "Reason", rename_all = "snake_case")]
enum ReasonForm {
    Outage,
    Headers,
    Concurrency,
    Latency,
    Ceiling,
    Shared,
    Probing,
}

#[derive(Serialize)]
#[serde(remote = "Notice")]
struct NoticeForm {
    at: Instant,
    #[serde(flatten)]
    event: Event,
}

#[derive(Serialize)]
#[serde(remote = "Event", rename_all = "snake_case", tag = "event")]
enum EventForm {
    Slowed {
        slots: Change<u32>,
        #[serde(serialize_with = "seconds_change")]
        interval: Change<Duration>,
        rate: Option<Change<PerSecond>>,
        why: Why,
    },
    SpedUp {
        slots: Change<u32>,
        #[serde(serialize_with = "seconds_change")]
        interval: Change<Duration>,
        rate: Option<Change<PerSecond>>,
    },
    Controlled {
        reason: Change<Reason>,
    },
    Recovered {
        rate: PerSecond,
    },
    CeilingLifted {
        ceiling: Change<u32>,
    },
    CircuitOpened {
        #[serde(serialize_with = "seconds")]
        span: Duration,
        why: Trip,
    },
    CircuitHalfOpened,
    CircuitClosed,
    Paused {
        until: Instant,
        #[serde(serialize_with = "seconds")]
        span: Duration,
    },
    PauseCapped {
        #[serde(serialize_with = "seconds")]
        asked: Duration,
        #[serde(serialize_with = "seconds")]
        capped: Duration,
    },
    Resumed,
    Retuned,
    QueueFull {
        waiters_max: u32,
    },
    BudgetCoarsened,
    GrantUnseen {
        #[serde(serialize_with = "seconds")]
        span: Duration,
    },
    Progressed {
        percent: u32,
        completed: u64,
        total: u64,
    },
    Closed {
        in_flight: u32,
    },
    Drained,
}

#[derive(Serialize)]
#[serde(remote = "Why", rename_all = "snake_case")]
enum WhyForm {
    Failures {
        count: u64,
        #[serde(serialize_with = "seconds")]
        within: Duration,
    },
    Overload,
    Latency {
        #[serde(serialize_with = "seconds")]
        latency: Duration,
        #[serde(serialize_with = "seconds")]
        target: Duration,
    },
}

#[derive(Serialize)]
#[serde(remote = "Trip", rename_all = "snake_case")]
enum TripForm {
    Consecutive { failures: u32 },
    ErrorRate { failures: u64, total: u64 },
    Probe,
}

#[derive(Serialize)]
#[serde(remote = "Kind", rename_all = "snake_case")]
enum KindForm {
    Success,
    Failure,
    Overload,
    Ignored,
}

#[derive(Serialize)]
#[serde(remote = "Cause", rename_all = "snake_case")]
enum CauseForm {
    Throttled,
    Server,
    Network,
    Other,
}

#[derive(Serialize)]
#[serde(remote = "Dimension", rename_all = "snake_case")]
enum DimensionForm {
    Requests,
    Tokens,
    InputTokens,
    OutputTokens,
    Other,
}
