//! A bucket kept as the time at which it is full, exact to the last fraction.
//!
//! A bucket of `burst` units that refills `amount` units per `period` is one number: the time at which it
//! will be full again. Taking `n` units moves that time `n·period/amount` further away; the units are there
//! while it is not further away than a whole burst takes. Refill costs nothing and rounds nothing: the time
//! is whole nanoseconds plus a fraction with `amount` as its denominator, so a unit costs exactly
//! `period/amount` for one a day and for a million a second alike. A stale `now` can only deny, returns cap
//! themselves (a time in the past is a full bucket), and debt is a time still further away.

use std::time::Duration;

use thiserror::Error;

use crate::time::{Instant, nanos};

/// Units per period are at most this: 2⁴⁰.
pub const AMOUNT_MAX: u64 = 1 << 40;
/// A period is at most this: 366 days.
pub const PERIOD_MAX: Duration = Duration::from_hours(366 * 24);
/// An empty bucket is full again within this: 100 years.
pub const REFILL_MAX: Duration = Duration::from_hours(36_525 * 24);

/// How fast a bucket refills and how much it holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    amount: u64,
    period: u64,
    burst: u64,
    /// What one unit costs, worked out once: the common cost is 1, and 128-bit division is slow.
    unit: Span,
    /// What the whole burst costs.
    capacity: Span,
}

/// A shape that cannot be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum InvalidShape {
    /// No units, or too many to count exactly.
    #[error("{amount} units per period, outside 1..={AMOUNT_MAX}")]
    Amount {
        /// Units per period.
        amount: u64,
    },
    /// No period, or one too long to count exactly.
    #[error("a period of {period:?}, outside 1ns..={PERIOD_MAX:?}")]
    Period {
        /// The period.
        period: Duration,
    },
    /// A bucket that holds nothing, or that would take more than a century to fill.
    #[error("a burst of {burst} units, which is none or takes more than {REFILL_MAX:?} to refill")]
    Burst {
        /// Units the bucket holds.
        burst: u64,
    },
}

impl Shape {
    /// `amount` units per `period`, and at most `burst` at once.
    ///
    /// # Errors
    /// [`InvalidShape`] names the number that is zero or above its bound.
    pub fn new(amount: u64, period: Duration, burst: u64) -> Result<Self, InvalidShape> {
        if amount == 0 || amount > AMOUNT_MAX {
            return Err(InvalidShape::Amount { amount });
        }
        if period.is_zero() || period > PERIOD_MAX {
            return Err(InvalidShape::Period { period });
        }
        let mut shape = Self { amount, period: nanos(period), burst, unit: Span::ZERO, capacity: Span::ZERO };
        shape.unit = shape.span(1);
        shape.capacity = shape.span(burst);
        if burst == 0 || shape.capacity.whole > nanos(REFILL_MAX) {
            return Err(InvalidShape::Burst { burst });
        }
        Ok(shape)
    }

    /// Units per period.
    pub const fn amount(&self) -> u64 {
        self.amount
    }

    /// The period.
    pub const fn period(&self) -> Duration {
        Duration::from_nanos(self.period)
    }

    /// Units the bucket holds when full.
    pub const fn burst(&self) -> u64 {
        self.burst
    }

    /// How long `units` take to refill.
    fn span(&self, units: u64) -> Span {
        Span::from_parts(u128::from(units) * u128::from(self.period), self.amount)
    }

    #[inline]
    fn span_of(&self, units: u64) -> Span {
        if units == 1 { self.unit } else { self.span(units) }
    }

    /// When a bucket that is to be full at `full_at` has at least nothing in it.
    #[inline]
    fn free_at(&self, full_at: Span) -> Instant {
        // Rounded up: at the instant answered, the units are really there. Before the origin is at once.
        let round_up = u64::from(full_at.part > self.capacity.part);
        match full_at.whole.checked_sub(self.capacity.whole) {
            Some(whole) => Instant::from_nanos(whole.saturating_add(round_up)),
            None => Instant::ZERO,
        }
    }
}

/// The level of one bucket: when it is full. Its [`Shape`] is handed in with every call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bucket {
    full_at: Span,
}

impl Bucket {
    /// A bucket that has been full since the beginning of time.
    pub const fn full() -> Self {
        Self { full_at: Span::ZERO }
    }

    /// When `units` can be taken; `now` or earlier means at once, [`Instant::MAX`] means never.
    pub fn ready_at(&self, shape: &Shape, units: u64, now: Instant) -> Instant {
        if units > shape.burst {
            return Instant::MAX;
        }
        self.free_at(shape, units, now)
    }

    /// When the last of `units` can be taken if they are taken one by one: more than a burst only takes longer.
    #[inline]
    pub fn free_at(&self, shape: &Shape, units: u64, now: Instant) -> Instant {
        shape.free_at(self.after(shape, units, now))
    }

    /// Takes `units` if they are there, else says when they will be and takes nothing.
    ///
    /// # Errors
    /// The time at which `units` can be taken; [`Instant::MAX`] when `units` is more than the burst.
    #[inline]
    pub fn take(&mut self, shape: &Shape, units: u64, now: Instant) -> Result<(), Instant> {
        if units > shape.burst {
            return Err(Instant::MAX);
        }
        let full_at = self.after(shape, units, now);
        let ready = shape.free_at(full_at);
        if ready > now {
            return Err(ready);
        }
        self.full_at = full_at;
        Ok(())
    }

    /// Takes `units` whether they are there or not; what is missing is debt.
    pub fn debit(&mut self, shape: &Shape, units: u64, now: Instant) {
        self.full_at = self.after(shape, units, now);
    }

    /// Gives `units` back. More than was taken fills the bucket, and no further.
    pub fn credit(&mut self, shape: &Shape, units: u64) {
        self.full_at = self.full_at.minus(shape.span_of(units), shape.amount);
    }

    /// Whole units there at `now`; negative is debt.
    pub fn level(&self, shape: &Shape, now: Instant) -> i64 {
        let missing = self.missing(shape, now).div_ceil(u128::from(shape.period));
        let level = i128::from(shape.burst) - i128::try_from(missing).unwrap_or(i128::MAX);
        i64::try_from(level).unwrap_or(i64::MIN)
    }

    /// Keeps the level, capped to the new burst, under another shape.
    pub fn reshape(&mut self, old: &Shape, new: &Shape, now: Instant) {
        // Missing units as a fraction over the old period; what the new burst adds is missing too.
        let period = i128::from(old.period);
        let grown = (i128::from(new.burst) - i128::from(old.burst)) * period;
        let missing = grown + i128::try_from(self.missing(old, now)).unwrap_or(i128::MAX / 2);
        let Ok(missing) = u128::try_from(missing) else {
            self.full_at = Span::at(now);
            return;
        };
        // In two steps, because missing × new period does not fit in 128 bits; rounded up, so never a gift.
        let (old_period, new_period) = (u128::from(old.period), u128::from(new.period));
        let (units, rest) = (missing / old_period, missing % old_period);
        let parts = units * new_period + (rest * new_period).div_ceil(old_period);
        self.full_at = Span::at(now).plus(Span::from_parts(parts, new.amount), new.amount);
    }

    /// Accrues nothing between `from` and `until`: moves a bucket that was filling by that much.
    pub fn suspend(&mut self, from: Instant, until: Instant) {
        if self.full_at.is_after(from) {
            self.full_at.whole = self.full_at.whole.saturating_add(until.nanos_since(from));
        }
    }

    /// Undoes the rest of a [`suspend`](Self::suspend) that was to last until `until`, as of `now`.
    pub fn unsuspend(&mut self, now: Instant, until: Instant) {
        if self.full_at.is_after(until) {
            self.full_at.whole = self.full_at.whole.saturating_sub(until.nanos_since(now));
        } else if self.full_at.is_after(now) {
            // Full at the end of the suspension, because something returned meanwhile: so it is full now.
            self.full_at = Span::at(now);
        }
    }

    /// Whether nothing is missing at `now`: such a bucket is the same as a new one.
    pub fn is_full(&self, now: Instant) -> bool {
        !self.full_at.is_after(now)
    }

    /// When the bucket would be full after taking `units` at `now`.
    #[inline]
    fn after(&self, shape: &Shape, units: u64, now: Instant) -> Span {
        let base = if self.full_at.is_after(now) { self.full_at } else { Span::at(now) };
        base.plus(shape.span_of(units), shape.amount)
    }

    /// Missing units at `now`, times the period.
    fn missing(&self, shape: &Shape, now: Instant) -> u128 {
        if self.is_full(now) {
            return 0;
        }
        let whole = u128::from(self.full_at.whole - now.as_nanos());
        whole * u128::from(shape.amount) + u128::from(self.full_at.part)
    }
}

/// Nanoseconds and a fraction over the shape's amount: an amount of time, or a point on the time line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Span {
    whole: u64,
    part: u64,
}

impl Span {
    const ZERO: Self = Self { whole: 0, part: 0 };

    const fn at(now: Instant) -> Self {
        Self { whole: now.as_nanos(), part: 0 }
    }

    fn from_parts(parts: u128, amount: u64) -> Self {
        let amount = u128::from(amount);
        match (u64::try_from(parts / amount), u64::try_from(parts % amount)) {
            (Ok(whole), Ok(part)) => Self { whole, part },
            _ => Self { whole: u64::MAX, part: 0 },
        }
    }

    #[inline]
    const fn is_after(self, now: Instant) -> bool {
        self.whole > now.as_nanos() || (self.whole == now.as_nanos() && self.part > 0)
    }

    #[inline]
    fn plus(self, more: Self, amount: u64) -> Self {
        let part = self.part + more.part;
        let carry = u64::from(part >= amount);
        Self {
            whole: self.whole.saturating_add(more.whole).saturating_add(carry),
            part: part - carry * amount,
        }
    }

    fn minus(self, less: Self, amount: u64) -> Self {
        let borrow = u64::from(self.part < less.part);
        match self.whole.checked_sub(less.whole).and_then(|whole| whole.checked_sub(borrow)) {
            Some(whole) => Self { whole, part: self.part + borrow * amount - less.part },
            None => Self::ZERO,
        }
    }
}

#[cfg(test)]
#[path = "bucket_tests.rs"]
mod tests;
