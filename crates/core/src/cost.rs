//! What a request asks for, and what was taken for it.
//!
//! A request always takes one slot, one unit of rate and one place in the pace; tokens and bytes carry
//! weight. A [`Charge`] is the receipt: it goes back whole to where it came from, at the price at which it
//! was taken, whatever the phase is by then.

use crate::time::Instant;

/// What one request asks for.
///
/// ```
/// use tidegate_core::cost::Cost;
///
/// let cost = Cost::request().tokens(800).bytes(4_096);
/// assert_eq!((cost.tokens, cost.bytes), (800, 4_096));
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Cost {
    /// Tokens of the budget: an estimate on entry, settled when the work ends.
    pub tokens: u64,
    /// Bytes in flight.
    pub bytes: u64,
}

impl Cost {
    /// One request, with neither tokens nor bytes.
    pub const fn request() -> Self {
        Self { tokens: 0, bytes: 0 }
    }

    /// The same with an estimate of tokens.
    #[must_use]
    pub const fn tokens(mut self, tokens: u64) -> Self {
        self.tokens = tokens;
        self
    }

    /// The same with its bytes.
    #[must_use]
    pub const fn bytes(mut self, bytes: u64) -> Self {
        self.bytes = bytes;
        self
    }
}

/// What was taken for one request, and when: the receipt a permit carries.
///
/// Deliberately neither `Clone` nor `Copy`: a charge is settled once.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a charge that is not settled leaks what it holds"]
pub struct Charge {
    pub(crate) cost: Cost,
    /// Bytes as priced on entry; what returns is this, not `cost.bytes`.
    pub(crate) bytes_held: u64,
    /// Tokens reserved in the budget: none where there was no budget on entry.
    pub(crate) tokens_held: u64,
    /// When it entered: its latency starts here, and its tokens are stamped with it.
    pub(crate) entered: Instant,
    pub(crate) generation: u32,
    pub(crate) probe: bool,
    pub(crate) recovery_slot: bool,
    /// Whether a unit of the rate was taken.
    pub(crate) rate_held: bool,
}

impl Charge {
    /// What was asked for.
    pub const fn cost(&self) -> Cost {
        self.cost
    }

    /// When the request entered. Meaningful only where a timed gate made the throttle read its clock.
    pub const fn entered(&self) -> Instant {
        self.entered
    }

    /// Bytes held, at the price of the phase in which the request entered.
    pub const fn bytes_held(&self) -> u64 {
        self.bytes_held
    }

    /// Whether the request is a probe of a half-open circuit.
    pub const fn is_probe(&self) -> bool {
        self.probe
    }

    /// Whether the request entered while recovering and holds a recovery slot.
    pub const fn is_recovering(&self) -> bool {
        self.recovery_slot
    }
}
