//! The cost of a request and the receipt for what it took.
//!
//! A request always takes one slot, one unit of rate and one place in the pace; tokens and bytes are
//! weighted. A [`Charge`] is the receipt: each gate gets back what it lent, at the price of entry, even if
//! the phase has changed since.

use std::num::NonZero;

use crate::time::Instant;

/// What one request takes from the gates.
///
/// Calls that take `impl Into<Cost>` also accept `()` for one request, and a number for one request with that many
/// tokens.
///
/// ```
/// use tidegate_core::cost::Cost;
///
/// let cost = Cost::request().tokens(800).bytes(4_096);
/// assert_eq!((cost.tokens, cost.bytes), (800, 4_096));
/// assert_eq!(Cost::from(800), Cost::request().tokens(800));
/// assert_eq!(Cost::from(()), Cost::request());
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

    /// Sets the estimated tokens.
    #[must_use]
    pub const fn tokens(mut self, tokens: u64) -> Self {
        self.tokens = tokens;
        self
    }

    /// Sets the bytes.
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

/// One request, with neither tokens nor bytes.
impl From<()> for Cost {
    fn from((): ()) -> Self {
        Self::request()
    }
}

/// One request with this many tokens.
// The only conversion from an integer: with a second one, the type of a literal would be ambiguous.
impl From<u64> for Cost {
    fn from(tokens: u64) -> Self {
        Self::request().tokens(tokens)
    }
}

/// The dimensions that a controller estimates: requests and tokens.
pub(crate) const DIMENSIONS: usize = 2;

/// What the controller needs to know about a request when it completes; nothing else is kept per request. 16
/// bytes, because it is part of every charge.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Dispatch {
    /// Microseconds from the admission to the start of the work; 71 minutes at most.
    pub(crate) late: u32,
    /// Units sent before this request, per dimension: the low 32 bits.
    pub(crate) before: [u32; DIMENSIONS],
    /// Requests in flight when it was admitted, this one included; 65,535 at most.
    pub(crate) in_flight: u16,
    /// The cohort whose latency includes this request; 0 is none.
    pub(crate) cohort: u16,
}

/// The receipt for one admitted request: what it took and when.
///
/// Deliberately neither `Clone` nor `Copy`: a charge is settled once. Small, because the fast path moves it
/// by value.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a charge that is not settled leaks its capacity"]
pub struct Charge {
    pub(crate) cost: Cost,
    /// Time of admission: its tokens and its place in the pace belong to this time.
    pub(crate) entered: Instant,
    pub(crate) sent: Dispatch,
    /// Non-zero, so that `Option<Charge>` is no larger.
    pub(crate) generation: NonZero<u32>,
    /// The price of a byte on entry; 0 where bytes were not limited.
    pub(crate) byte_price: u16,
    pub(crate) holds: Holds,
}

impl Charge {
    /// A charge that holds nothing yet.
    #[inline]
    pub(crate) fn new(cost: Cost, entered: Instant, generation: NonZero<u32>) -> Self {
        let (sent, holds) = (Dispatch::default(), Holds::default());
        Self { cost, entered, sent, generation, byte_price: 0, holds }
    }

    /// The requested cost.
    pub const fn cost(&self) -> Cost {
        self.cost
    }

    /// Time of admission. Meaningful only if a timed gate made the throttle read its clock.
    pub const fn entered(&self) -> Instant {
        self.entered
    }

    /// When the work started: at admission, unless [`goes_out`](Self::goes_out) set it later.
    pub fn sent_at(&self) -> Instant {
        self.entered.plus_nanos(u64::from(self.sent.late) * 1_000)
    }

    /// Marks the work as started at `now`, after admission: latency is measured from here. Its tokens and its
    /// place in the pace keep the time of admission.
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

    /// Whether anything must be given back: a request that passed only pace and rate holds nothing.
    #[inline]
    pub const fn holds_anything(&self) -> bool {
        self.holds.has(Holds::RETURNED)
    }

    /// Whether only a slot must be given back.
    #[inline]
    pub const fn holds_slot_alone(&self) -> bool {
        self.byte_price == 0 && self.holds.0 & Holds::RETURNED.0 == Holds::SLOT.0
    }

    /// Whether the request is counted as in flight.
    #[inline]
    pub const fn is_counted(&self) -> bool {
        self.holds.has(Holds::SLOT)
    }

    /// Whether the request is a probe of a half-open circuit.
    pub const fn is_probe(&self) -> bool {
        self.holds.has(Holds::PROBE)
    }

    /// Whether `Auto` counted the request on admission; no other controller does.
    pub(crate) const fn is_counted_by_controller(&self) -> bool {
        self.sent.in_flight > 0
    }

    /// Whether the request bypassed the gates.
    pub const fn is_bypassed(&self) -> bool {
        self.holds.has(Holds::BYPASSED)
    }

    /// Whether the request entered in the recovering phase and holds a recovery slot.
    pub const fn is_recovering(&self) -> bool {
        self.holds.has(Holds::RECOVERY_SLOT)
    }
}

/// The set of places a request took, as bit flags.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Holds(u8);

impl Holds {
    /// Counted as in flight.
    pub(crate) const SLOT: Self = Self(1);
    pub(crate) const RECOVERY_SLOT: Self = Self(1 << 1);
    pub(crate) const PROBE: Self = Self(1 << 2);
    /// Tokens reserved in the budget.
    pub(crate) const TOKENS: Self = Self(1 << 3);
    /// A unit of the rate.
    pub(crate) const RATE: Self = Self(1 << 4);
    /// A place in the pace.
    pub(crate) const PACE: Self = Self(1 << 5);

    /// Bypassed the gates.
    pub(crate) const BYPASSED: Self = Self(1 << 6);
    /// The controller learned from the response before the request ended.
    pub(crate) const ANSWERED: Self = Self(1 << 7);

    /// What goes back when the request ends. Bytes need no flag: a request that holds bytes also holds a
    /// slot.
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

/// Bytes times price, bounded so that a pool's limit plus one more request cannot overflow.
pub(crate) const fn priced(bytes: u64, price: u16) -> u64 {
    const PRICED_MAX: u64 = 1 << 62;
    let priced = bytes.saturating_mul(price as u64);
    if priced > PRICED_MAX { PRICED_MAX } else { priced }
}
