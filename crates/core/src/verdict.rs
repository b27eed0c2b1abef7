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
    /// The named rate or budget is used up.
    Named(GateName),
}

/// The name of a rate or a budget: at most [`GateName::MAX`] bytes, kept inline, so that refusals stay `Copy`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct GateName {
    length: u8,
    /// Zeros behind the name.
    bytes: [u8; Self::MAX],
}

impl GateName {
    /// The longest name in bytes.
    pub const MAX: usize = 23;

    /// A name of letters, digits, `_`, `-` and `.`; `None` if `name` has other characters, is empty or too long.
    pub fn new(name: &str) -> Option<Self> {
        let fits = |letter: u8| letter.is_ascii_alphanumeric() || b"_-.".contains(&letter);
        let length = u8::try_from(name.len()).ok().filter(|length| *length > 0)?;
        let mut bytes = [0; Self::MAX];
        bytes.get_mut(..name.len())?.copy_from_slice(name.as_bytes());
        name.bytes().all(fits).then_some(Self { length, bytes })
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        let name = self.bytes.get(..usize::from(self.length)).unwrap_or_default();
        std::str::from_utf8(name).unwrap_or_default()
    }
}

impl fmt::Display for GateName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl fmt::Debug for GateName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

impl fmt::Display for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Named(name) => return write!(f, "the limit \"{name}\""),
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
