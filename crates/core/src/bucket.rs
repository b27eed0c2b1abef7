//! Token bucket stored as the time at which it is full (GCRA), without rounding.
//!
//! A bucket of `burst` units that refills `amount` units per `period` is one number: the time at which it
//! will be full again. Taking `n` units moves that time `n·period/amount` into the future; the units are
//! available while the time is no further away than a whole burst takes to refill. Refill needs no work and
//! loses nothing: the time is whole ticks plus a fraction with `amount` as its denominator, so a unit costs
//! exactly `period/amount`, whether the rate is one a day or a million a second. A stale `now` can only deny,
//! credits cap themselves (a time in the past is a full bucket), and debt is a time further away than a
//! burst.
//!
//! A bucket lives on a [`Timeline`]: a throttle's on the local clock in nanoseconds, a shared limit's on the
//! wall clock in microseconds.

use std::marker::PhantomData;
use std::time::Duration;

use thiserror::Error;

use crate::duration::Exact;
use crate::time::{Instant, Timeline, nanos};

/// The most units per period: 2⁴⁰.
pub const AMOUNT_MAX: u64 = 1 << 40;
/// The longest period: 366 days.
pub const PERIOD_MAX: Duration = Duration::from_secs(366 * 86_400);
/// The longest time in which an empty bucket refills: 100 years.
pub const REFILL_MAX: Duration = Duration::from_secs(36_525 * 86_400);

/// How fast a bucket refills and how much it holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape<T = Instant> {
    amount: u64,
    /// In ticks.
    period: u64,
    burst: u64,
    /// The time one unit takes to refill, cached: most requests take 1 unit, and 128-bit division is slow.
    unit: Span,
    /// The time the whole burst takes to refill.
    capacity: Span,
    timeline: PhantomData<T>,
}

/// An invalid shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum InvalidShape {
    /// Zero units per period, or too many to count exactly.
    #[error("{amount} units per period, outside 1..={AMOUNT_MAX}")]
    Amount {
        /// Units per period.
        amount: u64,
    },
    /// A period of zero, too long to count exactly, or not a whole number of ticks.
    #[error("a period of {}, not a multiple of {tick} within {tick}..={}", Exact(*.period), Exact(PERIOD_MAX), tick = Exact(*.tick))]
    Period {
        /// The period.
        period: Duration,
        /// The timeline's tick: the shortest period.
        tick: Duration,
    },
    /// A burst of zero, or one that takes more than a century to refill.
    #[error("a burst of {burst} units, which must be at least 1 and refill within {}", Exact(REFILL_MAX))]
    Burst {
        /// Units the bucket holds.
        burst: u64,
    },
}

impl<T: Timeline> Shape<T> {
    /// `amount` units per `period`, and at most `burst` at once.
    ///
    /// # Errors
    /// [`InvalidShape`] names the number that is zero or above its bound.
    pub fn new(amount: u64, period: Duration, burst: u64) -> Result<Self, InvalidShape> {
        if amount == 0 || amount > AMOUNT_MAX {
            return Err(InvalidShape::Amount { amount });
        }
        if period.is_zero() || period > PERIOD_MAX || !nanos(period).is_multiple_of(T::TICK) {
            return Err(InvalidShape::Period { period, tick: Duration::from_nanos(T::TICK) });
        }
        let mut shape = Self {
            amount,
            period: nanos(period) / T::TICK,
            burst,
            unit: Span::ZERO,
            capacity: Span::ZERO,
            timeline: PhantomData,
        };
        shape.unit = shape.span(1);
        shape.capacity = shape.span(burst);
        if burst == 0 || shape.capacity.whole > nanos(REFILL_MAX) / T::TICK {
            return Err(InvalidShape::Burst { burst });
        }
        Ok(shape)
    }

    /// Units per period.
    pub const fn amount(&self) -> u64 {
        self.amount
    }

    /// The period.
    pub fn period(&self) -> Duration {
        Duration::from_nanos(self.period * T::TICK)
    }

    /// Units the bucket holds when full.
    pub const fn burst(&self) -> u64 {
        self.burst
    }

    /// How long `units` take to refill, in whole ticks and a fraction over the amount.
    pub fn span(&self, units: u64) -> Span {
        // Fast path: the product nearly always fits in 64 bits, and 128-bit division is several times slower.
        if let Some(parts) = units.checked_mul(self.period) {
            return Span { whole: parts / self.amount, part: parts % self.amount };
        }
        Span::from_parts(u128::from(units) * u128::from(self.period), self.amount)
    }

    #[inline]
    fn span_of(&self, units: u64) -> Span {
        if units == 1 { self.unit } else { self.span(units) }
    }

    /// When a bucket that will be full at `full_at` is out of debt.
    #[inline]
    fn free_at(&self, full_at: Span) -> T {
        // Rounded up, so that the units are available at the returned time. A time before the origin means
        // now.
        let round_up = u64::from(full_at.part > self.capacity.part);
        match full_at.whole.checked_sub(self.capacity.whole) {
            Some(whole) => T::from_ticks(whole.saturating_add(round_up)),
            None => T::from_ticks(0),
        }
    }
}

/// The level of one bucket, stored as the time at which it is full. Every call takes its [`Shape`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bucket<T = Instant> {
    full_at: Span,
    timeline: PhantomData<T>,
}

impl<T> Bucket<T> {
    /// A full bucket.
    pub const fn full() -> Self {
        Self::from_full_at(Span::ZERO)
    }

    /// A bucket that is full at `full_at`, as engines store it.
    pub const fn from_full_at(full_at: Span) -> Self {
        Self { full_at, timeline: PhantomData }
    }

    /// The time at which the bucket is full.
    pub const fn full_at(&self) -> Span {
        self.full_at
    }
}

impl<T: Timeline> Bucket<T> {
    /// A bucket that holds `units` at `now`, at most its burst.
    pub fn holding(shape: &Shape<T>, units: u64, now: T) -> Self {
        let missing = shape.span(shape.burst.saturating_sub(units));
        Self::from_full_at(Span::at(now).plus(missing, shape.amount))
    }

    /// When `units` can be taken: `now` or earlier means immediately, the end of time means never.
    pub fn ready_at(&self, shape: &Shape<T>, units: u64, now: T) -> T {
        if units > shape.burst {
            return T::from_ticks(u64::MAX);
        }
        self.free_at(shape, units, now)
    }

    /// When the last of `units` can be taken if they are taken one by one; may be more than a burst.
    #[inline]
    pub fn free_at(&self, shape: &Shape<T>, units: u64, now: T) -> T {
        shape.free_at(self.after(shape, units, now))
    }

    /// Takes `units` if they are available; otherwise takes nothing and returns when they will be.
    ///
    /// # Errors
    /// The time at which `units` can be taken; the end of time when `units` is more than the burst.
    #[inline]
    pub fn take(&mut self, shape: &Shape<T>, units: u64, now: T) -> Result<(), T> {
        *self = self.taking(shape, units, now)?;
        Ok(())
    }

    /// Returns the bucket after taking `units`, or when they will be available.
    ///
    /// # Errors
    /// The time at which `units` can be taken; the end of time when `units` is more than the burst.
    #[inline]
    pub fn taking(&self, shape: &Shape<T>, units: u64, now: T) -> Result<Self, T> {
        if units > shape.burst {
            return Err(T::from_ticks(u64::MAX));
        }
        let full_at = self.after(shape, units, now);
        let ready = shape.free_at(full_at);
        if ready > now { Err(ready) } else { Ok(Self::from_full_at(full_at)) }
    }

    /// Takes `units` even if they are not available; the missing ones become debt.
    pub fn debit(&mut self, shape: &Shape<T>, units: u64, now: T) {
        self.full_at = self.after(shape, units, now);
    }

    /// Returns `units` to the bucket, which never holds more than its burst.
    pub fn credit(&mut self, shape: &Shape<T>, units: u64) {
        self.full_at = self.full_at.minus(shape.span_of(units), shape.amount);
    }

    /// Whole units available at `now`; a negative level is debt.
    pub fn level(&self, shape: &Shape<T>, now: T) -> i64 {
        let missing = self.missing(shape, now).div_ceil(u128::from(shape.period));
        let level = i128::from(shape.burst) - i128::try_from(missing).unwrap_or(i128::MAX);
        i64::try_from(level).unwrap_or(i64::MIN)
    }

    /// Whole units that can be debited at `now` before the debt exceeds `debt_max`.
    pub fn room(&self, shape: &Shape<T>, debt_max: u64, now: T) -> u64 {
        let most = (u128::from(shape.burst) + u128::from(debt_max)) * u128::from(shape.period);
        let room = most.saturating_sub(self.missing(shape, now)) / u128::from(shape.period);
        u64::try_from(room).unwrap_or(u64::MAX)
    }

    /// Changes the shape and keeps the level, capped to the new burst.
    pub fn reshape(&mut self, old: &Shape<T>, new: &Shape<T>, now: T) {
        // Missing units as a fraction over the old period; units that the new burst adds are missing too.
        let period = i128::from(old.period);
        let grown = (i128::from(new.burst) - i128::from(old.burst)) * period;
        let missing = grown + i128::try_from(self.missing(old, now)).unwrap_or(i128::MAX / 2);
        let Ok(missing) = u128::try_from(missing) else {
            self.full_at = Span::at(now);
            return;
        };
        // In two steps, because missing × new period does not fit in 128 bits. Rounded up, to never add
        // units.
        let (old_period, new_period) = (u128::from(old.period), u128::from(new.period));
        let (units, rest) = (missing / old_period, missing % old_period);
        let parts = units * new_period + (rest * new_period).div_ceil(old_period);
        self.full_at = Span::at(now).plus(Span::from_parts(parts, new.amount), new.amount);
    }

    /// Lowers the level as of `then` to at most `units`; a lower level stays.
    pub fn leave(&mut self, shape: &Shape<T>, units: u64, then: T) {
        let missing = shape.span_of(shape.burst.saturating_sub(units));
        let full_at = Span::at(then).plus(missing, shape.amount);
        if (full_at.whole, full_at.part) > (self.full_at.whole, self.full_at.part) {
            self.full_at = full_at;
        }
    }

    /// Stops the refill between `from` and `until`, by moving the time at which the bucket is full.
    pub fn suspend(&mut self, from: T, until: T) {
        if self.full_at.is_after(from) {
            self.full_at.whole =
                self.full_at.whole.saturating_add(until.ticks().saturating_sub(from.ticks()));
        }
    }

    /// Undoes, as of `now`, the rest of a [`suspend`](Self::suspend) that would last until `until`.
    pub fn unsuspend(&mut self, now: T, until: T) {
        if self.full_at.is_after(until) {
            self.full_at.whole = self.full_at.whole.saturating_sub(until.ticks().saturating_sub(now.ticks()));
        } else if self.full_at.is_after(now) {
            // A credit during the suspension filled the bucket by its end, so it is full now.
            self.full_at = Span::at(now);
        }
    }

    /// Whether the bucket is full at `now`. A full bucket is equivalent to a new one.
    pub fn is_full(&self, now: T) -> bool {
        !self.full_at.is_after(now)
    }

    /// When the bucket will be full after `units` are taken at `now`.
    #[inline]
    fn after(&self, shape: &Shape<T>, units: u64, now: T) -> Span {
        let base = if self.full_at.is_after(now) { self.full_at } else { Span::at(now) };
        base.plus(shape.span_of(units), shape.amount)
    }

    /// Missing units at `now`, times the period.
    fn missing(&self, shape: &Shape<T>, now: T) -> u128 {
        if self.is_full(now) {
            return 0;
        }
        let whole = u128::from(self.full_at.whole - now.ticks());
        whole * u128::from(shape.amount) + u128::from(self.full_at.part)
    }
}

/// Ticks plus a fraction over the shape's amount: a duration, or a point on the timeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Whole ticks.
    pub whole: u64,
    /// The fraction of a tick, as a numerator over the shape's amount.
    pub part: u64,
}

impl Span {
    /// The origin of the timeline, or a duration of zero.
    pub const ZERO: Self = Self { whole: 0, part: 0 };

    fn at(now: impl Timeline) -> Self {
        Self { whole: now.ticks(), part: 0 }
    }

    fn from_parts(parts: u128, amount: u64) -> Self {
        let amount = u128::from(amount);
        match (u64::try_from(parts / amount), u64::try_from(parts % amount)) {
            (Ok(whole), Ok(part)) => Self { whole, part },
            _ => Self { whole: u64::MAX, part: 0 },
        }
    }

    #[inline]
    fn is_after(self, now: impl Timeline) -> bool {
        self.whole > now.ticks() || (self.whole == now.ticks() && self.part > 0)
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
