//! A gate's answer: admit, wait, or refuse.

use std::fmt;

use crate::refused::Refused;
use crate::time::Instant;

/// The answer of one gate, or of all of them together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Enter.
    Admit,
    /// Not yet.
    Wait(Wait),
    /// Turned away; waiting inside would not help.
    Refuse(Refused),
}

/// Why not yet, and until when.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wait {
    /// The gate that holds the request.
    pub by: Gate,
    /// The earliest time at which it is worth asking again; `None` when only a return can help.
    pub until: Option<Instant>,
    /// What pause, pace and rate say: even after a return it is not worth asking before this.
    pub floor: Instant,
}

/// The name of a gate, for answers and events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Gate {
    /// Others asked before.
    Queue,
    /// The far side asked for a pause.
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
