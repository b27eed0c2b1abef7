//! The level of one bucket, as high as any order of its entries allows it to be.
//!
//! Let *M* be what is missing from the bucket, in units. Between two times it falls by rate·*dt*, not below 0; what
//! is taken raises it, what is given back lowers it, not below 0. Unrolled, *M* at a time is the greatest of
//! taken − returned − rate·*W* over all windows *W* that end there, and of 0. So *M* ≤ burst after a draw says
//! that no window that ends with it has more than burst + rate·*W*, and one pass looks at all windows.
//!
//! *No false alarm.* By induction, what is missing here is never more than what is really missing, *D*. Time: both
//! fall alike. One moment: the real order is one of many, and its floors at 0 only raise *D*, so after all of it
//! *D* ≥ max(0, *M* + all that moved). At the last draw in the real order, of a lease *y*, every lease has done all
//! its draws of the moment, and *y* nothing after its own; so *D* there is at least *M* + the least sum each lease
//! has had at or after its last draw, and *y*'s exactly at it. The least over all *y* is what is judged. A new shape
//! keeps the level, capped: *D* becomes *D* + new burst − old burst rounded up, where *M* is rounded down.
//! Two exceptions favour the bucket. One that is full may be forgotten, and is then new: where a moment with a new
//! shape may have seen it full, *M* may be missing from the new burst instead of the old. And where several shapes
//! come at one time, none of them is known to be the last: the bucket may refill like the fastest and hold as much
//! as the largest until the next shape; then it is the level, burst − *M*, that is never below the real one.
//!
//! *No excess missed.* From moment to moment *M* is exact, in parts of a unit so small that a tick refills whole
//! ones; a new period rounds by less than one such part. What one moment hides is what some order of it allows.

use crate::bucket::Shape;
use crate::limit::check::{BucketId, Violation};
use crate::limit::lease::LeaseId;
use crate::time::{Stamp, Timeline};

/// What happened to a bucket at one time.
#[derive(Debug, Default)]
pub(super) struct Moment {
    pub(super) shapes: Vec<Shape<Stamp>>,
    /// By lease when judged; of one lease in the order of its steps.
    moves: Vec<Moved>,
}

#[derive(Debug, Clone, Copy)]
struct Moved {
    lease: LeaseId,
    delta: i128,
    /// It had to be there.
    is_asked: bool,
}

/// The level of one bucket.
#[derive(Debug, Default)]
pub(super) struct Level {
    /// None before the first shape.
    pace: Option<Pace>,
    at: Stamp,
    /// What is missing, in parts of a unit: as many as the pace's period has ticks.
    missing: i128,
    /// When it was last full, and what was taken since.
    since: Stamp,
    taken: i128,
    is_reported: bool,
}

/// How fast a bucket refills and how much it holds: where several shapes may be the last, the most of each.
#[derive(Debug, Clone, Copy)]
struct Pace {
    amount: i128,
    period: i128,
    burst: i128,
    /// The least it may hold.
    burst_min: i128,
}

/// What the moves of a moment come to.
#[derive(Debug, Default)]
struct Sum {
    /// All of them.
    net: i128,
    /// The least sum that any order has at its last draw. None without a draw.
    asked: Option<i128>,
    /// The least sum that any order has at any time.
    least: i128,
}

impl Moment {
    pub(super) fn push(&mut self, lease: LeaseId, delta: i128, is_asked: bool) {
        self.moves.push(Moved { lease, delta, is_asked });
    }

    fn sum(&mut self) -> Sum {
        self.moves.sort_by_key(|moved| moved.lease);
        let mut all = Sum::default();
        // Over all leases: the least sum at or after the last draw, and how much less that is than at a draw.
        let (mut low_all, mut slack) = (0, None::<i128>);
        for lease in self.moves.chunk_by(|one, other| one.lease == other.lease) {
            let (mut sum, mut least, mut low, mut asked) = (0_i128, 0_i128, 0_i128, None);
            for moved in lease {
                sum = sum.saturating_add(moved.delta);
                least = least.min(sum);
                low = low.min(sum);
                if moved.is_asked {
                    (low, asked) = (sum, Some(sum));
                }
            }
            all.net = all.net.saturating_add(sum);
            all.least = all.least.saturating_add(least);
            low_all += low;
            if let Some(asked) = asked {
                slack = Some(slack.map_or(asked - low, |slack| slack.min(asked - low)));
            }
        }
        all.asked = slack.map(|slack| low_all + slack);
        all
    }
}

impl Level {
    /// Takes the level past a moment, and tells what was asked in it and was not there in any order.
    pub(super) fn pass(&mut self, bucket: &BucketId, at: Stamp, moment: &mut Moment) -> Option<Violation> {
        let (sum, next) = (moment.sum(), Pace::of(&moment.shapes));
        let Some(pace) = self.pace.or(next) else {
            return self.without_shape(bucket, at, moment);
        };
        self.refill(&pace, at);
        let available = self.available(&pace, next.as_ref(), sum.least);
        let excess = sum.asked.map_or(0, |asked| asked.saturating_mul(pace.period).saturating_sub(available));
        let by = div_ceil(excess, pace.period).max(0);
        let taken = self.taken.saturating_add(sum.asked.unwrap_or(0));
        let (since, allowed) = (self.since, taken - by);
        // What was in excess is forgiven once it is told: the next one is another.
        let moved = sum.net - by;
        self.taken = self.taken.saturating_add(moved);
        let left = available.saturating_sub(moved.saturating_mul(pace.period));
        self.reshape(left, &pace, &next.unwrap_or(pace));
        (by > 0).then(|| Violation::Excess { bucket: bucket.clone(), at, since, taken, allowed })
    }

    /// What is there at the start of a moment that may bring the next pace, and whose moves come at least to `least`.
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

    /// Keeps what is left, capped, under the next pace.
    fn reshape(&mut self, left: i128, pace: &Pace, next: &Pace) {
        // In two steps, because left × next period does not fit in 128 bits; what is left is rounded up.
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
    /// The fastest and the largest of these shapes; none of none.
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
