//! The level of one bucket: the highest that any order of its entries allows.
//!
//! Let *M* be the deficit of the bucket, in units. Over time it falls by rate·*dt*, not below 0; taking
//! raises it, returning lowers it, not below 0. Unrolled, *M* at a time is the maximum of taken − returned −
//! rate·*W* over all windows *W* that end there, and of 0. So *M* ≤ burst after a draw means that no window
//! that ends with it has more than burst + rate·*W*: one pass checks all windows.
//!
//! *No false positives.* By induction, *M* is never more than the real deficit *D*. Over time, both fall
//! alike. Within one moment, the real order is one of many, and its floors at 0 only raise *D*, so after the
//! moment *D* ≥ max(0, *M* + the sum of all moves). At the last draw in the real order, by a lease *y*, every
//! lease has done all its draws of the moment, and *y* nothing after its own; so *D* there is at least *M* +
//! the least sum of each lease at or after its last draw, and for *y* exactly at it. The check uses the
//! minimum over all *y*. A new shape keeps the level, capped: *D* becomes *D* + new burst − old burst,
//! rounded up, where *M* is rounded down. Two exceptions favour the bucket. A full bucket may be evicted and
//! recreated: if it may have been full in a moment with a new shape, *M* may count from the new burst instead
//! of the old. And if several shapes have the same time, the last one is unknown: until the next shape the
//! bucket may refill like the fastest and hold as much as the largest; the invariant is then that the level,
//! burst − *M*, is never below the real one.
//!
//! *No false negatives.* From moment to moment *M* is exact, in parts of a unit so small that a tick refills
//! a whole number of them; a new period rounds by less than one part. An excess within one moment is missed
//! only if some order of the moment allows it.

use crate::bucket::Shape;
use crate::limit::exactness::{BucketId, Violation};
use crate::limit::lease::LeaseId;
use crate::time::{Stamp, Timeline};

/// The events of a bucket at one time.
#[derive(Debug, Default)]
pub(super) struct Moment {
    pub(super) shapes: Vec<Shape<Stamp>>,
    /// The units that a repair has set; the most of several.
    pub(super) set: Option<u64>,
    /// Sorted by lease when summed; those of one lease in the order of its steps.
    moves: Vec<LeaseMove>,
}

#[derive(Debug, Clone, Copy)]
struct LeaseMove {
    lease: LeaseId,
    delta: i128,
    /// Whether the units had to be available.
    is_draw: bool,
}

/// The level of one bucket.
#[derive(Debug, Default)]
pub(super) struct Level {
    /// None before the first shape.
    pace: Option<Pace>,
    at: Stamp,
    /// The deficit, in parts of a unit: as many parts as the pace's period has ticks.
    missing: i128,
    /// When the bucket was last full, and the units taken since.
    since: Stamp,
    taken: i128,
    is_reported: bool,
}

/// The refill rate and burst of a bucket: the maximum of each if several shapes may be the last.
#[derive(Debug, Clone, Copy)]
struct Pace {
    amount: i128,
    period: i128,
    burst: i128,
    /// The smallest possible burst.
    burst_min: i128,
}

/// The sums of the moves of a moment.
#[derive(Debug, Default)]
struct Sum {
    /// All of them.
    net: i128,
    /// The minimum over all orders of the sum at the last draw; `None` without a draw.
    drawn: Option<i128>,
    /// The minimum over all orders and positions.
    least: i128,
}

impl Moment {
    pub(super) fn push(&mut self, lease: LeaseId, delta: i128, is_draw: bool) {
        self.moves.push(LeaseMove { lease, delta, is_draw });
    }

    fn sum(&mut self) -> Sum {
        self.moves.sort_by_key(|moved| moved.lease);
        let mut all = Sum::default();
        // Over all leases: the minimum sum at or after the last draw, and its distance from the sum at a
        // draw.
        let (mut low_all, mut slack) = (0, None::<i128>);
        for lease in self.moves.chunk_by(|one, other| one.lease == other.lease) {
            let (mut sum, mut least, mut low, mut drawn) = (0_i128, 0_i128, 0_i128, None);
            for moved in lease {
                sum = sum.saturating_add(moved.delta);
                least = least.min(sum);
                low = low.min(sum);
                if moved.is_draw {
                    (low, drawn) = (sum, Some(sum));
                }
            }
            all.net = all.net.saturating_add(sum);
            all.least = all.least.saturating_add(least);
            low_all += low;
            if let Some(drawn) = drawn {
                slack = Some(slack.map_or(drawn - low, |slack| slack.min(drawn - low)));
            }
        }
        all.drawn = slack.map(|slack| low_all + slack);
        all
    }
}

impl Level {
    /// Advances past a moment, and reports draws that were not available in any order.
    pub(super) fn pass(&mut self, bucket: &BucketId, at: Stamp, moment: &mut Moment) -> Option<Violation> {
        let (sum, next) = (moment.sum(), Pace::of(&moment.shapes));
        let Some(pace) = self.pace.or(next) else {
            return self.without_shape(bucket, at, moment);
        };
        self.refill(&pace, at);
        let mut available = self.available(&pace, next.as_ref(), sum.least);
        let repaired = moment.set.map(|units| i128::from(units).min(pace.burst) * pace.period);
        if let Some(repaired) = repaired {
            // In any place of the moment: draws may use the units available before it and after it.
            available = available.max(0).saturating_add(repaired);
        }
        let excess = sum.drawn.map_or(0, |drawn| drawn.saturating_mul(pace.period).saturating_sub(available));
        let by = div_ceil(excess, pace.period).max(0);
        let taken = self.taken.saturating_add(sum.drawn.unwrap_or(0));
        let (since, allowed) = (self.since, taken - by);
        // A reported excess is deducted, so that it is not reported again.
        let moved = sum.net - by;
        self.taken = self.taken.saturating_add(moved);
        let left = match repaired {
            // All returns may be after it, and all draws before it.
            Some(repaired) => repaired.saturating_sub(sum.least.saturating_mul(pace.period)),
            None => available.saturating_sub(moved.saturating_mul(pace.period)),
        };
        self.reshape(left, &pace, &next.unwrap_or(pace));
        (by > 0).then(|| Violation::Excess { bucket: bucket.clone(), at, since, taken, allowed })
    }

    /// The parts available at the start of a moment that may change to pace `next` and whose moves sum to at
    /// least `least`.
    fn available(&self, pace: &Pace, next: Option<&Pace>, least: i128) -> i128 {
        let kept = pace.burst * pace.period - self.missing;
        let missing = (self.missing - (pace.burst - pace.burst_min) * pace.period).max(0);
        let is_full_once = missing.saturating_add(least.saturating_mul(pace.period)) <= 0;
        let renewed = next.filter(|_| is_full_once).map(|next| next.burst * pace.period - missing);
        renewed.map_or(kept, |renewed| renewed.max(kept))
    }

    /// Lets time pass until `at`.
    fn refill(&mut self, pace: &Pace, at: Stamp) {
        let passed = i128::from(at.ticks() - self.at.ticks());
        self.at = at;
        self.missing = self.missing.saturating_sub(passed * pace.amount).max(0);
        if self.missing == 0 {
            (self.since, self.taken) = (at, 0);
        }
    }

    /// Keeps the remaining level, capped, under the next pace.
    fn reshape(&mut self, left: i128, pace: &Pace, next: &Pace) {
        // In two steps, because left × next period overflows 128 bits. Rounded up.
        let (units, rest) = (left.div_euclid(pace.period), left.rem_euclid(pace.period));
        let part = div_ceil(rest * next.period, pace.period);
        let left = units.saturating_mul(next.period).saturating_add(part);
        self.missing = (next.burst * next.period).saturating_sub(left).max(0);
        self.pace = Some(*next);
    }

    fn without_shape(&mut self, bucket: &BucketId, at: Stamp, moment: &Moment) -> Option<Violation> {
        let moved = moment.moves.iter().find(|moved| moved.delta != 0)?;
        if std::mem::replace(&mut self.is_reported, true) {
            return None;
        }
        let units = i64::try_from(moved.delta).unwrap_or(i64::MAX);
        Some(Violation::NoShape { bucket: bucket.clone(), at, units })
    }
}

impl Pace {
    /// The fastest rate and largest burst of these shapes; `None` without shapes.
    fn of(shapes: &[Shape<Stamp>]) -> Option<Self> {
        let paces = shapes.iter().map(|shape| Self {
            amount: i128::from(shape.amount()),
            period: i128::try_from(shape.period().as_micros()).unwrap_or(i128::MAX),
            burst: i128::from(shape.burst()),
            burst_min: i128::from(shape.burst()),
        });
        paces.reduce(|one, other| {
            let is_faster = other.amount * one.period > one.amount * other.period;
            let (burst, burst_min) = (one.burst.max(other.burst), one.burst_min.min(other.burst_min));
            Self { burst, burst_min, ..if is_faster { other } else { one } }
        })
    }
}

fn div_ceil(number: i128, by: i128) -> i128 {
    number.div_euclid(by) + i128::from(number.rem_euclid(by) > 0)
}
