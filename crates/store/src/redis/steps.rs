//! The steps of a lease: each is one call of one script.

use std::sync::Arc;
use std::time::Duration;

use tidegate_core::bucket::Shape;
use tidegate_core::limit::cascade::{Levels, Units};
use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::meter::Meter;
use tidegate_core::limit::policy::{OnExpiry, Version};
use tidegate_core::limit::rule::Rule;
use tidegate_core::time::Stamp;

use super::Redis;
use super::leases::{self, ending};
use super::levels::Encoded;
use super::pack::{NONE, Packed, Unpack, to_double, to_signed_double};
use super::together::{Answer, Asked};
use super::trouble::Whose;
use crate::buckets::{Moved, Reading, Readings, Renewed};
use crate::engine::{self, Change, Taking};
use crate::error::StoreError;
use crate::shared_engine::{check_levels, drew_from, fits, tell};

/// A lease's limits are told apart by a byte.
const NAMES_MAX: usize = 255;
/// As many limits as a bucket may have.
const ROWS_MAX: u64 = 64;

/// Which step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Op {
    Draw = 0,
    Spend = 1,
    Extend = 2,
    Adjust = 3,
    Settle = 4,
    Cancel = 5,
    Renew = 6,
    Expire = 7,
}

/// What is asked of the script.
pub(super) struct Step<'a> {
    pub(super) op: Op,
    pub(super) lease: LeaseId,
    pub(super) number: u32,
    pub(super) levels: &'a Arc<Levels>,
    pub(super) amounts: Amounts<'a>,
    /// How long a draw or a renewal has.
    pub(super) span: Duration,
    pub(super) on_expiry: OnExpiry,
    pub(super) is_watched: bool,
    /// What an ending is told apart by from another.
    pub(super) digest: u64,
}

/// How much of each limit.
#[derive(Clone, Copy)]
pub(super) enum Amounts<'a> {
    Nothing,
    Units(&'a [Option<u64>]),
    Deltas(&'a [Option<i64>]),
}

/// What the script answers.
pub(super) enum Told {
    Granted(Moved),
    Refused(Moved),
    Renewed(Renewed),
    Expired(OnExpiry),
    /// It has more time than was thought, or has ended by then.
    NotDue,
}

impl<'a> From<engine::Step<'a>> for Step<'a> {
    fn from(step: engine::Step<'a>) -> Self {
        let engine::Step { lease, number, levels, change, is_watched } = step;
        let digest =
            |units: &Units| if units.len() == levels.names().len() { levels.digest(units) } else { 0 };
        let of = |op| Self { is_watched, ..Self::new(op, lease, number, levels) };
        match change {
            Change::Take(units, Taking::Open(terms)) => Self {
                amounts: Amounts::Units(units),
                span: terms.deadline,
                on_expiry: terms.on_expiry,
                ..of(Op::Draw)
            },
            Change::Take(units, Taking::Spend) => {
                Self { amounts: Amounts::Units(units), digest: digest(units), ..of(Op::Spend) }
            }
            Change::Take(units, Taking::Extend) => Self { amounts: Amounts::Units(units), ..of(Op::Extend) },
            Change::Shift(deltas) => Self { amounts: Amounts::Deltas(deltas), ..of(Op::Adjust) },
            Change::Renew(span) => Self { span, ..of(Op::Renew) },
            Change::End(Some(actual)) => {
                Self { amounts: Amounts::Units(actual), digest: digest(actual), ..of(Op::Settle) }
            }
            Change::End(None) => of(Op::Cancel),
        }
    }
}

impl<'a> Step<'a> {
    pub(super) const fn new(op: Op, lease: LeaseId, number: u32, levels: &'a Arc<Levels>) -> Self {
        Self {
            op,
            lease,
            number,
            levels,
            amounts: Amounts::Nothing,
            span: Duration::ZERO,
            on_expiry: OnExpiry::Settle,
            is_watched: true,
            digest: 0,
        }
    }

    fn check(&self) -> Result<(), StoreError> {
        check_levels(self.levels)?;
        let names = self.levels.names().len();
        if names > NAMES_MAX {
            return Err(StoreError::Invalid { what: format!("{names} limits, more than {NAMES_MAX}") });
        }
        match self.amounts {
            Amounts::Nothing => Ok(()),
            Amounts::Units(units) => fits(self.levels, units.len()),
            Amounts::Deltas(deltas) => fits(self.levels, deltas.len()),
        }
    }

    /// What is asked, as the script reads it. It finds what it writes to the lease as it is by its place.
    fn pack(&self, encoded: &Arc<Encoded>) -> Asked {
        let levels = &encoded.levels;
        let names = levels.names().len();
        let count = |count: usize| u8::try_from(count).unwrap_or(u8::MAX);
        let mut packed = Packed::default();
        packed.byte(self.op as u8).byte(u8::from(self.is_watched)).byte(count(levels.levels().len()));
        packed
            .word(self.number)
            .bytes(&self.digest.to_le_bytes())
            .bytes(&encoded.identity)
            .byte(count(names));
        for name in 0..names {
            packed.double(match self.amounts {
                Amounts::Nothing => NONE,
                Amounts::Units(units) => units[name].map_or(NONE, to_double),
                Amounts::Deltas(deltas) => deltas[name].map_or(NONE, to_signed_double),
            });
        }
        let places_at = packed.0.len();
        packed.number(levels.version().number()).span(self.span);
        packed.byte(u8::from(self.on_expiry == OnExpiry::Return));
        Asked { op: self.op, encoded: Arc::clone(encoded), lease: self.lease, packed: packed.0, places_at }
    }
}

impl Redis {
    /// Makes a step. One that comes with newer levels than the lease drew from is made again with those it did.
    pub(super) async fn step(&self, step: Step<'_>) -> Result<Told, StoreError> {
        step.check()?;
        let encoded = self.encode(step.levels).await?;
        match self.ask(&step, &encoded).await? {
            Ok(told) => Ok(told),
            Err(drew) => {
                drew_from(step.lease, &drew, step.levels)?;
                let encoded = self.encode(&drew).await?;
                let told = self.ask(&Step { levels: &drew, ..step }, &encoded).await?;
                let elsewhere = |_| StoreError::Invalid {
                    what: format!("the lease {} drew from other levels", step.lease),
                };
                let mut told = told.map_err(elsewhere)?;
                if let Told::Granted(moved) | Told::Refused(moved) = &mut told {
                    tell(&mut moved.readings, &drew, step.levels);
                }
                Ok(told)
            }
        }
    }

    /// The levels as the script reads them, known to the index.
    pub(super) async fn encode(&self, levels: &Arc<Levels>) -> Result<Arc<Encoded>, StoreError> {
        let inner = &self.inner;
        if let Some(encoded) = inner.encodings.get(levels) {
            return Ok(encoded);
        }
        let home = inner.places.register(&inner.link, levels).await?;
        let encoded = Arc::new(Encoded::new(levels, &inner.places, home, inner.lanes.at(home)));
        inner.encodings.insert(&encoded);
        Ok(encoded)
    }

    /// Has the step made once: its answer, or the levels that the lease drew from.
    async fn ask(
        &self,
        step: &Step<'_>,
        encoded: &Arc<Encoded>,
    ) -> Result<Result<Told, Arc<Levels>>, StoreError> {
        let answer = encoded.lane.make(&self.inner, step.pack(encoded)).await?;
        hear(step, &encoded.levels, &answer, self.inner.link.whose())
    }
}

fn hear(
    step: &Step<'_>,
    levels: &Arc<Levels>,
    answer: &Answer,
    whose: &Whose,
) -> Result<Result<Told, Arc<Levels>>, StoreError> {
    let mut read = Unpack::new(answer.bytes(), "an answer of the script");
    let lease = step.lease;
    let code = read.byte()?;
    Ok(Ok(match (code, step.op) {
        (9, _) => return Err(whose.told(&String::from_utf8_lossy(read.rest()))),
        (0, Op::Expire) => Told::Expired(leases::on_expiry(read.byte()?)?),
        (3 | 5 | 8, Op::Expire) => Told::NotDue,
        (0 | 2, Op::Renew) => {
            let (at, deadline) = (read.stamp()?, read.stamp()?);
            Told::Renewed(Renewed { at, is_repeat: code == 2, deadline })
        }
        (10, Op::Draw | Op::Spend) => Told::Granted(taken(&mut read, step, levels, answer.nth)?),
        (0 | 2, _) => Told::Granted(moved(&mut read, levels, code == 2)?),
        (1, _) => Told::Refused(moved(&mut read, levels, false)?),
        (3, _) => return Err(StoreError::Ended { lease, how: ending(read.byte()?)? }),
        (4, _) => return Err(StoreError::Late { lease, step: step.number, done: read.word()? }),
        (5, _) => return Err(StoreError::NoLease { lease }),
        (6, _) => return Ok(Err(leases::levels(read.rest())?)),
        (7, _) => return Err(StoreError::Full { what: "limits of one subject", max: ROWS_MAX }),
        _ => return Err(read.corrupt(&format!("the code {code}"))),
    }))
}

/// What was taken of buckets that are all by the rules the caller brought. They are told as they were before so many took the same
/// of them, one after the other: what that leaves is worked out here as it was there.
fn taken(
    read: &mut Unpack<'_>,
    step: &Step<'_>,
    levels: &Arc<Levels>,
    nth: u16,
) -> Result<Moved, StoreError> {
    let at: Stamp = read.stamp()?;
    let mut readings = Readings::new();
    for (number, level) in levels.levels().iter().enumerate() {
        read.double()?;
        for line in &level.limits {
            // Its row, and four numbers: what it is by.
            read.text()?;
            read.skip(4 * size_of::<f64>())?;
            let (full_at, consumed) = (read.full_at()?, read.signed()?);
            let units = match step.amounts {
                Amounts::Units(units) => units[line.name],
                Amounts::Nothing | Amounts::Deltas(_) => None,
            };
            if let Some(units) = units {
                let bucket = tidegate_core::bucket::Bucket::from_full_at(full_at);
                let mut meter = Meter::restored(bucket, Arc::clone(&line.rule), levels.version(), consumed);
                meter.take(units.saturating_mul(u64::from(nth)), at);
                let units = i64::try_from(units).unwrap_or(i64::MAX);
                readings.push(Reading::new(number, line, units, &meter));
            }
        }
    }
    if read.is_empty() {
        Ok(Moved { at, is_repeat: false, readings })
    } else {
        Err(read.corrupt("buckets that were not asked for"))
    }
}

fn moved(read: &mut Unpack<'_>, levels: &Arc<Levels>, is_repeat: bool) -> Result<Moved, StoreError> {
    let at: Stamp = read.stamp()?;
    let mut readings = Readings::new();
    while !read.is_empty() {
        let (level, name) = (usize::from(read.byte()?), usize::from(read.byte()?));
        let moved = read.signed()?;
        let full_at = read.full_at()?;
        let (version, consumed) = (Version::new(read.number()?), read.signed()?);
        let (amount, period, burst) = (read.number()?, Duration::from_micros(read.number()?), read.number()?);
        let line =
            levels.levels().get(level).and_then(|level| level.limits.iter().find(|line| line.name == name));
        let line = line.ok_or_else(|| read.corrupt("a limit that was not asked for"))?;
        let shape = Shape::new(amount, period, burst).map_err(|error| read.corrupt(&error.to_string()))?;
        let rule = if shape == *line.rule.shape() {
            Arc::clone(&line.rule)
        } else {
            Arc::new(Rule::stored(line.rule.name().clone(), shape))
        };
        let bucket = tidegate_core::bucket::Bucket::from_full_at(full_at);
        readings.push(Reading::new(level, line, moved, &Meter::restored(bucket, rule, version, consumed)));
    }
    Ok(Moved { at, is_repeat, readings })
}
