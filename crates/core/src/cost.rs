//! What a request asks for, and what was taken for it.
//!
//! A request always takes one slot, one unit of rate and one place in the pace; tokens and bytes carry
//! weight. A [`Charge`] is the receipt: it goes back whole to where it came from, at the price at which it
//! was taken, whatever the phase is by then.

use std::num::NonZero;

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

    /// Units per dimension that a controller estimates.
    pub(crate) const fn units(self) -> [u64; DIMENSIONS] {
        [1, self.tokens]
    }
}

/// What a controller estimates: requests and tokens.
pub(crate) const DIMENSIONS: usize = 2;

/// What a controller must know later about a request it admitted: nothing else is kept per request. 16 bytes, because it
/// travels with every charge.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Sent {
    /// Microseconds from the admission to the start of the work; 71 minutes at most.
    pub(crate) late: u32,
    /// Units sent before it, per dimension: the low 32 bits.
    pub(crate) before: [u32; DIMENSIONS],
    /// Requests in flight when it was admitted, this one included; 65,535 at most.
    pub(crate) in_flight: u16,
    /// The cohort whose latency it counts in; 0 is none.
    pub(crate) cohort: u16,
}

/// What was taken for one request, and when: the receipt a permit carries.
///
/// Deliberately neither `Clone` nor `Copy`: a charge is settled once. Small, because it is handed on by value on
/// the hottest path there is.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a charge that is not settled leaks what it holds"]
pub struct Charge {
    pub(crate) cost: Cost,
    /// When it was admitted: its tokens belong to the window of this time, and its place in the pace.
    pub(crate) entered: Instant,
    pub(crate) sent: Sent,
    /// Never zero, so that an optional charge is no larger.
    pub(crate) generation: NonZero<u32>,
    /// What a byte cost on entry; 0 where bytes were not limited.
    pub(crate) byte_price: u16,
    pub(crate) holds: Holds,
}

impl Charge {
    /// What was asked for.
    pub const fn cost(&self) -> Cost {
        self.cost
    }

    /// When the request was admitted. Meaningful only if a timed gate made the throttle read its clock.
    pub const fn entered(&self) -> Instant {
        self.entered
    }

    /// When the work started: at admission, unless [`goes_out`](Self::goes_out) set it later.
    pub fn sent_at(&self) -> Instant {
        self.entered.plus_nanos(u64::from(self.sent.late) * 1_000)
    }

    /// The work starts only now, some time after the request was admitted: its latency starts here. Its tokens and its place
    /// in the pace stay where they were taken.
    pub fn goes_out(mut self, now: Instant) -> Self {
        self.sent.late = u32::try_from(now.nanos_since(self.entered) / 1_000).unwrap_or(u32::MAX);
        self
    }

    /// Bytes held, at the price of the phase in which the request entered.
    pub const fn bytes_held(&self) -> u64 {
        priced(self.cost.bytes, self.byte_price)
    }

    /// Tokens reserved in the budget: none where there was no budget on entry.
    pub const fn tokens_held(&self) -> u64 {
        if self.holds.has(Holds::TOKENS) { self.cost.tokens } else { 0 }
    }

    /// Whether there is anything to give back: a request that met only pace and rate holds nothing.
    #[inline]
    pub const fn holds_anything(&self) -> bool {
        self.holds.has(Holds::RETURNED)
    }

    /// Whether a slot is all there is to give back.
    #[inline]
    pub const fn holds_slot_alone(&self) -> bool {
        self.byte_price == 0 && self.holds.0 & Holds::RETURNED.0 == Holds::SLOT.0
    }

    /// Whether it is counted among the requests in flight.
    #[inline]
    pub const fn is_counted(&self) -> bool {
        self.holds.has(Holds::SLOT)
    }

    /// Whether the request is a probe of a half-open circuit.
    pub const fn is_probe(&self) -> bool {
        self.holds.has(Holds::PROBE)
    }

    /// Whether `Auto` counted it when it was admitted: another controller, or none, counts nothing.
    pub(crate) const fn is_counted_by_controller(&self) -> bool {
        self.sent.in_flight > 0
    }

    /// Whether it went past the gates, which were bypassed.
    pub const fn is_past(&self) -> bool {
        self.holds.has(Holds::PAST)
    }

    /// Whether the request entered while recovering and holds a recovery slot.
    pub const fn is_recovering(&self) -> bool {
        self.holds.has(Holds::RECOVERY_SLOT)
    }
}

/// Which places a request took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Holds(u8);

impl Holds {
    /// It is counted among the requests in flight.
    pub(crate) const SLOT: Self = Self(1);
    pub(crate) const RECOVERY_SLOT: Self = Self(1 << 1);
    pub(crate) const PROBE: Self = Self(1 << 2);
    /// Its tokens are reserved in the budget.
    pub(crate) const TOKENS: Self = Self(1 << 3);
    /// It took a unit of the rate.
    pub(crate) const RATE: Self = Self(1 << 4);
    /// It took a place in the pace.
    pub(crate) const PACE: Self = Self(1 << 5);

    /// It went past the gates.
    pub(crate) const PAST: Self = Self(1 << 6);
    /// Its answer was learned from before its end.
    pub(crate) const ANSWERED: Self = Self(1 << 7);

    /// What goes back at the end. Bytes are among it: whoever holds bytes is counted.
    const RETURNED: Self = Self(Self::SLOT.0 | Self::RECOVERY_SLOT.0 | Self::PROBE.0 | Self::TOKENS.0);

    #[inline]
    pub(crate) const fn add(&mut self, more: Self) {
        self.0 |= more.0;
    }

    #[inline]
    pub(crate) const fn has(self, wanted: Self) -> bool {
        self.0 & wanted.0 != 0
    }
}

/// Bytes at a price, bounded so that what a pool holds, at most its limit and one request more, fits.
pub(crate) const fn priced(bytes: u64, price: u16) -> u64 {
    const PRICED_MAX: u64 = 1 << 62;
    let priced = bytes.saturating_mul(price as u64);
    if priced > PRICED_MAX { PRICED_MAX } else { priced }
}
