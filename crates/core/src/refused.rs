//! Every reason to be turned away, each answering the caller's next question: when to come back.

use std::time::Duration;

use thiserror::Error;

use crate::verdict::Gate;

/// Why a request was not admitted. Nothing was taken for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Refused {
    /// The throttle was closed; it never re-opens.
    #[error("the throttle is closed")]
    Closed,
    /// The circuit is open, or half-open with all its probes out.
    #[error("the circuit is open; come back in {retry_after:?}")]
    CircuitOpen {
        /// Time until it is worth asking again; never zero.
        retry_after: Duration,
    },
    /// The cost is above the capacity: no amount of waiting would help.
    #[error("{tokens} tokens are asked for, and the budget holds {capacity} per window")]
    TooLarge {
        /// Tokens asked for.
        tokens: u64,
        /// Tokens the budget ever holds.
        capacity: u64,
    },
    /// The queue is full.
    #[error("{waiters_max} callers are waiting already, as many as the queue holds")]
    Busy {
        /// The queue's bound.
        waiters_max: u32,
    },
    /// The request would have had to wait, or to wait longer than it was ready to.
    #[error("held back by {by}{}", come_back(*retry_after))]
    Limited {
        /// The gate that held it.
        by: Gate,
        /// A lower bound for the wait where time decides; `None` where only a return can help.
        retry_after: Option<Duration>,
    },
}

impl Refused {
    /// When it is worth asking again: `None` if never, or if it depends on others' returns and not on time.
    ///
    /// [`is_final`](Self::is_final) tells those two apart.
    pub const fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Closed | Self::TooLarge { .. } | Self::Busy { .. } => None,
            Self::CircuitOpen { retry_after } => Some(*retry_after),
            Self::Limited { retry_after, .. } => *retry_after,
        }
    }

    /// Whether asking again for the same cost can never help.
    pub const fn is_final(&self) -> bool {
        matches!(self, Self::Closed | Self::TooLarge { .. })
    }
}

fn come_back(retry_after: Option<Duration>) -> String {
    retry_after.map_or_else(String::new, |span| format!("; come back in {span:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_says_when_to_come_back_and_whether_it_is_final() {
        let second = Duration::from_secs(1);
        let limited = |retry_after| Refused::Limited { by: Gate::Rate, retry_after };
        let table = [
            (Refused::Closed, None, true),
            (Refused::TooLarge { tokens: 9, capacity: 5 }, None, true),
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
    fn a_refusal_reads_as_a_sentence_with_its_numbers() {
        let table = [
            (Refused::Closed, "the throttle is closed"),
            (
                Refused::TooLarge { tokens: 200, capacity: 100 },
                "200 tokens are asked for, and the budget holds 100 per window",
            ),
            (Refused::Busy { waiters_max: 7 }, "7 callers are waiting already, as many as the queue holds"),
            (
                Refused::CircuitOpen { retry_after: Duration::from_secs(3) },
                "the circuit is open; come back in 3s",
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
        ];
        for (by, name) in gates {
            let refused = Refused::Limited { by, retry_after: None };
            assert_eq!(refused.to_string(), format!("held back by {name}"));
        }
        let timed = Refused::Limited { by: Gate::Pace, retry_after: Some(Duration::from_millis(5)) };
        assert_eq!(timed.to_string(), "held back by the pace; come back in 5ms");
    }
}
