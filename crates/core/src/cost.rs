//! The cost of a request and the receipt for what it took.
//!
//! A request takes one slot and one place in the pace, as many units of each rate as it counts requests, and
//! tokens and bytes by weight. A [`Charge`] is the receipt: each gate gets back what it lent, at the price of
//! entry, even if the phase has changed since.

use std::num::NonZero;

use crate::feedback::headers::Dimension;
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
///
/// let batch = Cost::requests(3).input_tokens(2_000).output_tokens(500);
/// assert_eq!((batch.request_count(), batch.total_tokens()), (3, 2_500));
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Cost {
    /// Tokens of the budget: an estimate on entry, settled when the work ends.
    pub tokens: u64,
    /// Bytes in flight.
    pub bytes: u64,
    /// Input tokens, for limits that count them apart.
    pub input_tokens: u64,
    /// Output tokens, for limits that count them apart.
    pub output_tokens: u64,
    /// Requests beyond the first; 64 bits, because a move of narrower fields waits for their stores.
    more: u64,
}

impl Cost {
    /// One request, with neither tokens nor bytes.
    pub const fn request() -> Self {
        Self::requests(1)
    }

    /// One call that the upstream counts as this many requests: it takes one slot, and so many units of every rate.
    /// Zero counts as one.
    ///
    /// ```
    /// use tidegate_core::cost::Cost;
    ///
    /// assert_eq!(Cost::requests(5).request_count(), 5);
    /// assert_eq!(Cost::requests(1), Cost::request());
    /// ```
    pub const fn requests(count: u32) -> Self {
        Self { tokens: 0, bytes: 0, input_tokens: 0, output_tokens: 0, more: count.saturating_sub(1) as u64 }
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

    /// Sets the estimated input tokens. They count as tokens too: see [`total_tokens`](Self::total_tokens).
    #[must_use]
    pub const fn input_tokens(mut self, tokens: u64) -> Self {
        self.input_tokens = tokens;
        self
    }

    /// Sets the estimated output tokens. They count as tokens too: see [`total_tokens`](Self::total_tokens).
    #[must_use]
    pub const fn output_tokens(mut self, tokens: u64) -> Self {
        self.output_tokens = tokens;
        self
    }

    /// How many requests it counts as: at least one.
    pub const fn request_count(&self) -> u64 {
        1 + self.more
    }

    /// Tokens of all kinds: [`tokens`](Self::tokens), or input and output tokens together if they are more.
    pub const fn total_tokens(&self) -> u64 {
        let parts = self.input_tokens.saturating_add(self.output_tokens);
        if parts > self.tokens { parts } else { self.tokens }
    }

    /// Units in a dimension; none in [`Dimension::Other`].
    pub const fn units(&self, dimension: Dimension) -> u64 {
        match dimension {
            Dimension::Requests => self.request_count(),
            Dimension::Tokens => self.total_tokens(),
            Dimension::InputTokens => self.input_tokens,
            Dimension::OutputTokens => self.output_tokens,
            Dimension::Other => 0,
        }
    }

    /// Adds the tokens of another report, in total and of each kind; everything else is that of `self`.
    #[must_use]
    pub const fn plus_tokens(mut self, more: Self) -> Self {
        self.tokens = self.total_tokens().saturating_add(more.total_tokens());
        self.input_tokens = self.input_tokens.saturating_add(more.input_tokens);
        self.output_tokens = self.output_tokens.saturating_add(more.output_tokens);
        self
    }

    /// The same use by as many requests as `cost` counts.
    #[must_use]
    pub const fn counted_as(mut self, cost: Self) -> Self {
        self.more = cost.more;
        self
    }

    /// Whether it says how many tokens were used, and not of which kind.
    pub const fn has_only_a_total(&self) -> bool {
        self.tokens > 0 && self.input_tokens == 0 && self.output_tokens == 0
    }

    /// Whether tokens were used of which it does not say that they are of another kind than this.
    pub(crate) const fn may_have_more(&self, kind: Dimension) -> bool {
        self.units(kind) == 0 && self.tokens > self.input_tokens.saturating_add(self.output_tokens)
    }

    /// Whether it is one request with at most tokens and bytes: the fast path in `gates.rs`.
    #[inline]
    pub const fn is_plain(&self) -> bool {
        self.more == 0 && self.input_tokens == 0 && self.output_tokens == 0 && self.tokens < u64::MAX
    }

    /// Units per dimension that a controller estimates.
    pub(crate) const fn estimated(&self) -> [u64; DIMENSIONS] {
        [self.request_count(), self.total_tokens(), self.input_tokens, self.output_tokens]
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

/// The dimensions that a controller estimates: requests, tokens, input tokens and output tokens.
pub(crate) const DIMENSIONS: usize = 4;
/// The first of them, which most requests have; a charge keeps the kinds of tokens apart.
pub(crate) const USUAL_DIMENSIONS: usize = 2;

/// What the controller needs to know about a request when it completes; nothing else is kept per request. 16
/// bytes, because it is part of every charge.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Dispatch {
    /// Microseconds from the admission to the start of the work; 71 minutes at most.
    pub(crate) late: u32,
    /// Requests and tokens sent before this request: the low 32 bits.
    pub(crate) before: [u32; USUAL_DIMENSIONS],
    /// Requests in flight when it was admitted, this one included; 65,535 at most.
    pub(crate) in_flight: u16,
    /// The cohort whose latency includes this request; 0 is none.
    pub(crate) cohort: u16,
}

/// The cost of a charge in 16 bytes: few requests count as several, or name kinds of tokens.
#[derive(Debug, PartialEq, Eq)]
enum ChargedCost {
    Plain {
        /// Tokens, plus one: zero is the niche that marks the other variant.
        tokens: NonZero<u64>,
        bytes: u64,
    },
    Full(Box<FullCost>),
}

/// A cost of several requests or kinds of tokens.
#[derive(Debug, PartialEq, Eq)]
struct FullCost {
    cost: Cost,
    /// Input and output tokens sent before this request, as in [`Dispatch`].
    before: [u32; DIMENSIONS - USUAL_DIMENSIONS],
}

/// The receipt for one admitted request: what it took and when.
///
/// Deliberately neither `Clone` nor `Copy`: a charge is settled once. Small, because the fast path moves it
/// by value.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a charge that is not settled leaks its capacity"]
pub struct Charge {
    cost: ChargedCost,
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
        let cost = if cost.is_plain() {
            ChargedCost::Plain { tokens: NonZero::<u64>::MIN.saturating_add(cost.tokens), bytes: cost.bytes }
        } else {
            ChargedCost::Full(Box::new(FullCost { cost, before: Default::default() }))
        };
        let (sent, holds) = (Dispatch::default(), Holds::default());
        Self { cost, entered, sent, generation, byte_price: 0, holds }
    }

    /// The requested cost.
    pub fn cost(&self) -> Cost {
        match &self.cost {
            ChargedCost::Plain { tokens, bytes } => Cost::request().tokens(tokens.get() - 1).bytes(*bytes),
            ChargedCost::Full(full) => full.cost,
        }
    }

    /// The requested bytes.
    pub(crate) fn bytes(&self) -> u64 {
        match &self.cost {
            ChargedCost::Plain { bytes, .. } => *bytes,
            ChargedCost::Full(full) => full.cost.bytes,
        }
    }

    /// Whether tokens reported exceed its cost, in total or of a kind.
    pub fn is_exceeded_by(&self, reported: Cost) -> bool {
        let cost = self.cost();
        reported.total_tokens() > cost.total_tokens()
            || reported.input_tokens > cost.input_tokens
            || reported.output_tokens > cost.output_tokens
    }

    /// Records what the controller needs when the request completes: `before` are the units sent before it, per
    /// dimension.
    pub(crate) fn count(&mut self, sent: Dispatch, before: [u32; DIMENSIONS]) {
        let [requests, tokens, input, output] = before;
        self.sent = Dispatch { before: [requests, tokens], ..sent };
        if let ChargedCost::Full(full) = &mut self.cost {
            full.before = [input, output];
        }
    }

    /// Units sent before this request, per dimension. A request without input or output tokens counts none of them.
    pub(crate) fn sent_before(&self) -> [u32; DIMENSIONS] {
        let [requests, tokens] = self.sent.before;
        let [input, output] = match &self.cost {
            ChargedCost::Full(full) => full.before,
            ChargedCost::Plain { .. } => [0, 0],
        };
        [requests, tokens, input, output]
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
    pub fn bytes_held(&self) -> u64 {
        priced(self.bytes(), self.byte_price)
    }

    /// Tokens reserved in the unnamed budget: none where there was none on entry.
    pub fn tokens_held(&self) -> u64 {
        if self.holds.has(Holds::TOKENS) { self.cost().total_tokens() } else { 0 }
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

/// What the fast path took: with its cost it is a [`Charge`]. Two words, so that even an `Option` is returned in
/// registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub struct Admission {
    entered: Instant,
    /// The generation, and above it what the request holds.
    packed: NonZero<u64>,
}

impl Admission {
    #[inline]
    pub(crate) fn new(entered: Instant, generation: NonZero<u32>, holds: Holds) -> Self {
        Self { entered, packed: NonZero::<u64>::from(generation) | (u64::from(holds.0) << u32::BITS) }
    }

    /// The receipt of a request of this cost.
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "the halves of a word")]
    pub fn charge(self, cost: Cost) -> Charge {
        let packed = self.packed.get();
        let generation = NonZero::new(packed as u32).unwrap_or(NonZero::<u32>::MIN);
        let mut charge = Charge::new(cost, self.entered, generation);
        charge.holds = Holds((packed >> u32::BITS) as u16);
        charge
    }
}

/// The set of places a request took, as bit flags.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Holds(u16);

impl Holds {
    /// Counted as in flight.
    pub(crate) const SLOT: Self = Self(1);
    pub(crate) const RECOVERY_SLOT: Self = Self(1 << 1);
    pub(crate) const PROBE: Self = Self(1 << 2);
    /// Tokens reserved in the budget.
    pub(crate) const TOKENS: Self = Self(1 << 3);
    /// Units of the rate.
    pub(crate) const RATE: Self = Self(1 << 4);
    /// A place in the pace.
    pub(crate) const PACE: Self = Self(1 << 5);

    /// Bypassed the gates.
    pub(crate) const BYPASSED: Self = Self(1 << 6);
    /// The controller learned from the response before the request ended.
    pub(crate) const ANSWERED: Self = Self(1 << 7);
    /// Units of the named rates.
    pub(crate) const NAMED_RATES: Self = Self(1 << 8);
    /// Units reserved in the named budgets.
    pub(crate) const NAMED_BUDGETS: Self = Self(1 << 9);

    /// What goes back when the request ends. Bytes need no flag: a request that holds bytes also holds a
    /// slot.
    const RETURNED: Self =
        Self(Self::SLOT.0 | Self::RECOVERY_SLOT.0 | Self::PROBE.0 | Self::TOKENS.0 | Self::NAMED_BUDGETS.0);

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
