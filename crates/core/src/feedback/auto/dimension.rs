//! One dimension of the controller: requests, tokens, input tokens or output tokens.

use super::Reply;
use super::header_law::HeaderLaw;
use super::quota::{ESTIMATE_MIN, Quota};
use crate::cost::DIMENSIONS;
use crate::feedback::headers::Dimension as Metered;
use crate::outcome::PackedLevel;

/// The pace's bucket holds this many seconds of its rate, and at least one mean request.
const DEPTH: f64 = 0.02;
/// The largest debt of the pace's bucket in seconds, so that one wrong cost cannot stop all other requests.
const DEBT_MAX: f64 = 1.0 / ESTIMATE_MIN;
/// One dimension: its quota estimate and the bucket that paces it.
#[derive(Debug, Clone)]
pub(super) struct Dimension {
    pub(super) quota: Quota,
    /// Units in the pace's bucket; negative after a request that cost more than the mean.
    pub(super) level: f64,
    /// Only if headers were seen.
    pub(super) law: Option<Box<HeaderLaw>>,
}

impl Dimension {
    /// A dimension at `rate`, whose requests cost `unit` on average.
    pub(super) fn new(rate: f64, unit: f64, since: u64) -> Self {
        Self {
            quota: Quota::starting_at(rate, u32::try_from(since).unwrap_or(u32::MAX)),
            level: depth(rate, unit),
            law: None,
        }
    }

    /// The bucket's level after `elapsed` seconds; shared by refill and wait, so that they agree.
    pub(super) fn refilled(&self, pace: f64, unit: f64, elapsed: f64) -> f64 {
        (self.level.max(-DEBT_MAX * pace) + pace * elapsed).min(depth(pace, unit))
    }

    pub(super) fn law_pace(&self, now: f64, latency: f64) -> Option<f64> {
        self.law.as_ref()?.pace(now, latency)
    }

    pub(super) fn has_headers(&self, now: f64) -> bool {
        self.law.as_ref().is_some_and(|law| law.is_fresh(now))
    }
}

/// The index of a dimension in the list; `None` if it is never counted.
pub(crate) const fn index_of(dimension: Metered) -> Option<usize> {
    match dimension {
        Metered::Requests => Some(0),
        Metered::Tokens => Some(1),
        Metered::InputTokens => Some(2),
        Metered::OutputTokens => Some(3),
        Metered::Other => None,
    }
}

/// The levels of quotas that a response reports. Anthropic repeats the tightest limit as that of all tokens: of a
/// request that counts the kinds, it would limit both by the tighter one.
pub(super) fn distinct_levels(reply: &Reply<'_>) -> [Option<PackedLevel>; DIMENSIONS] {
    let mut levels = reply.outcome.quotas;
    let is_repeated = |kind: usize| reply.units[kind] > 0 && levels[kind] == levels[1];
    if is_repeated(2) || is_repeated(3) {
        levels[1] = None;
    }
    levels
}

/// The capacity of a pace's bucket.
fn depth(pace: f64, unit: f64) -> f64 {
    (pace * DEPTH).max(unit)
}
