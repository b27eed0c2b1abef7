//! The decision of a gate: admit, wait, or refuse.

use std::fmt;

use crate::refused::Refused;
use crate::time::Instant;

/// The decision of one gate, or of all gates together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Admit the request.
    Admit,
    /// Wait before trying again.
    Wait(Wait),
    /// Refuse the request; waiting would not help.
    Refuse(Refused),
}

/// The gate that limits a request, and until when.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wait {
    /// The limiting gate.
    pub by: Gate,
    /// The earliest time for another evaluation; `None` if only another request's completion can help.
    pub until: Option<Instant>,
    /// The earliest time by pause, pace and rate: even after a completion, do not evaluate again before it.
    pub floor: Instant,
}

/// The name of a gate, for decisions and events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Gate {
    /// Other callers are ahead in the queue.
    Queue,
    /// A pause is running, requested by the upstream or by hand.
    Pause,
    /// All slots are taken.
    Slots,
    /// All recovery slots are taken.
    RecoverySlots,
    /// Too many bytes are in flight.
    Bytes,
    /// The last entry was too recent.
    Pace,
    /// The rate is used up.
    Rate,
    /// The token budget of the window is used up.
    Budget,
}

impl fmt::Display for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Queue => "the queue",
            Self::Pause => "the pause",
            Self::Slots => "the slots",
            Self::RecoverySlots => "the recovery slots",
            Self::Bytes => "the bytes in flight",
            Self::Pace => "the pace",
            Self::Rate => "the rate",
            Self::Budget => "the token budget",
        })
    }
}
