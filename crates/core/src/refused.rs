//! The reasons for which a request is refused, each with the time after which to retry.

use std::time::Duration;

use thiserror::Error;

use crate::duration::Rounded;
use crate::verdict::Gate;

/// Why a request was not admitted. Nothing was taken for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Refused {
    /// The throttle was closed; it never re-opens.
    #[error("the throttle is closed")]
    Closed,
    /// The circuit is open, or half-open with all its probes out.
    #[error("the circuit is open; retry after {}", Rounded(*retry_after))]
    CircuitOpen {
        /// Time until a retry is worthwhile; never zero.
        retry_after: Duration,
    },
    /// The cost exceeds the capacity, so waiting cannot help.
    #[error("{tokens} tokens requested, but the budget holds {capacity} per window")]
    TooLarge {
        /// Tokens requested.
        tokens: u64,
        /// The budget's tokens per window.
        capacity: u64,
    },
    /// The cost exceeds what a rate or a named budget ever holds, so waiting cannot help.
    #[error("{requested} units requested, but {by} holds {capacity} at most")]
    AboveCapacity {
        /// The limiting gate.
        by: Gate,
        /// Units requested: requests or tokens.
        requested: u64,
        /// The rate's burst, or the budget's tokens per window.
        capacity: u64,
    },
    /// The queue is full.
    #[error("the queue is full: {waiters_max} callers are waiting")]
    Busy {
        /// The queue's bound.
        waiters_max: u32,
    },
    /// The request would have had to wait, or to wait beyond its deadline.
    #[error("limited by {by}{}", retry_clause(*retry_after))]
    Limited {
        /// The limiting gate.
        by: Gate,
        /// A lower bound for the wait, if time decides; `None` if only another request's completion can help.
        retry_after: Option<Duration>,
    },
}

impl Refused {
    /// When to retry: `None` if never, or if that depends on other requests and not on time.
    ///
    /// [`is_final`](Self::is_final) distinguishes these two cases.
    pub const fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Closed | Self::TooLarge { .. } | Self::AboveCapacity { .. } | Self::Busy { .. } => None,
            Self::CircuitOpen { retry_after } => Some(*retry_after),
            Self::Limited { retry_after, .. } => *retry_after,
        }
    }

    /// The same, `lag` later.
    #[must_use]
    pub(crate) fn later(self, lag: Duration) -> Self {
        match self {
            Self::CircuitOpen { retry_after } => {
                Self::CircuitOpen { retry_after: retry_after.saturating_add(lag) }
            }
            Self::Limited { by, retry_after } => {
                Self::Limited { by, retry_after: retry_after.map(|span| span.saturating_add(lag)) }
            }
            refused => refused,
        }
    }

    /// Whether retrying with the same cost can never succeed.
    pub const fn is_final(&self) -> bool {
        matches!(self, Self::Closed | Self::TooLarge { .. } | Self::AboveCapacity { .. })
    }
}

fn retry_clause(retry_after: Option<Duration>) -> String {
    retry_after.map_or_else(String::new, |span| format!("; retry after {}", Rounded(span)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verdict::GateName;

    #[test]
    fn refusals_report_retry_after_and_finality() {
        let second = Duration::from_secs(1);
        let limited = |retry_after| Refused::Limited { by: Gate::Rate, retry_after };
        let table = [
            (Refused::Closed, None, true),
            (Refused::TooLarge { tokens: 9, capacity: 5 }, None, true),
            (Refused::AboveCapacity { by: Gate::Rate, requested: 9, capacity: 5 }, None, true),
            (Refused::Busy { waiters_max: 2 }, None, false),
            (Refused::CircuitOpen { retry_after: second }, Some(second), false),
            (limited(Some(second)), Some(second), false),
            (limited(None), None, false),
        ];
        for (refused, retry_after, is_final) in table {
            assert_eq!(refused.retry_after(), retry_after, "{refused}");
            assert_eq!(refused.is_final(), is_final, "{refused}");
        }
    }

    #[test]
    fn refusal_messages_contain_their_numbers() {
        let table = [
            (Refused::Closed, "the throttle is closed"),
            (
                Refused::TooLarge { tokens: 200, capacity: 100 },
                "200 tokens requested, but the budget holds 100 per window",
            ),
            (
                Refused::AboveCapacity { by: Gate::Rate, requested: 12, capacity: 10 },
                "12 units requested, but the rate holds 10 at most",
            ),
            (Refused::Busy { waiters_max: 7 }, "the queue is full: 7 callers are waiting"),
            (
                Refused::CircuitOpen { retry_after: Duration::from_secs(3) },
                "the circuit is open; retry after 3s",
            ),
        ];
        for (refused, sentence) in table {
            assert_eq!(refused.to_string(), sentence);
        }
        let gates = [
            (Gate::Queue, "the queue"),
            (Gate::Pause, "the pause"),
            (Gate::Slots, "the slots"),
            (Gate::RecoverySlots, "the recovery slots"),
            (Gate::Bytes, "the bytes in flight"),
            (Gate::Pace, "the pace"),
            (Gate::Rate, "the rate"),
            (Gate::Budget, "the token budget"),
            (Gate::Named(GateName::new("rpd").unwrap()), "the limit \"rpd\""),
        ];
        for (by, name) in gates {
            let refused = Refused::Limited { by, retry_after: None };
            assert_eq!(refused.to_string(), format!("limited by {name}"));
        }
        let timed = Refused::Limited { by: Gate::Pace, retry_after: Some(Duration::from_millis(5)) };
        assert_eq!(timed.to_string(), "limited by the pace; retry after 5ms");
    }
}
