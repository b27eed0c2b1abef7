//! The steps of a lease. Each is encoded for the lease script and runs in one call of it.

use std::sync::Arc;
use std::time::Duration;

use tidegate_core::bucket::Shape;
use tidegate_core::limit::cascade::{Levels, Units};
use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::meter::Meter;
use tidegate_core::limit::policy::{OnExpiry, Version};
use tidegate_core::limit::rule::Rule;
use tidegate_core::time::Stamp;

use super::batch_call::{EncodedStep, StepReply};
use super::errors::ErrorContext;
use super::leases::{self, ending};
use super::levels::EncodedLevels;
use super::lua_codec::{NONE, Packer, Unpacker, to_double, to_signed_double};
use super::{Redis, batcher};
use crate::buckets::{Movement, Reading, Readings, Renewal};
use crate::engine::{self, Change, TakeMode};
use crate::error::StoreError;
use crate::shared_engine::{attach_rules, check_levels, drew_from, fits};

/// A byte numbers the limits of a lease.
const NAMES_MAX: usize = 255;
/// The most limits of one bucket.
const ROWS_MAX: u64 = 64;

/// The kind of a step, as the script numbers it.
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
    Repair = 8,
}

/// A step as it is sent to the script.
pub(super) struct Step<'a> {
    pub(super) op: Op,
    pub(super) lease: LeaseId,
    pub(super) number: u32,
    pub(super) levels: &'a Arc<Levels>,
    pub(super) amounts: Amounts<'a>,
    /// How long the lease is open after a draw or a renewal.
    pub(super) span: Duration,
    pub(super) on_expiry: OnExpiry,
    pub(super) is_watched: bool,
    /// Distinguishes a repeated ending from a different one.
    pub(super) digest: u64,
}

/// The amount of each limit.
#[derive(Clone, Copy)]
pub(super) enum Amounts<'a> {
    Nothing,
    Units(&'a [Option<u64>]),
    Deltas(&'a [Option<i64>]),
}

/// The result of a step.
pub(super) enum StepOutcome {
    Granted(Movement),
    Refused(Movement),
    Renewed(Renewal),
    Expired(OnExpiry),
    /// The lease is not past its deadline, or has ended.
    NotDue,
}

impl<'a> From<engine::Step<'a>> for Step<'a> {
    fn from(step: engine::Step<'a>) -> Self {
        let engine::Step { lease, number, levels, change, is_watched } = step;
        let digest =
            |units: &Units| if units.len() == levels.names().len() { levels.digest(units) } else { 0 };
        let of = |op| Self { is_watched, ..Self::new(op, lease, number, levels) };
        match change {
            Change::Take(units, TakeMode::Open(terms)) => Self {
                amounts: Amounts::Units(units),
                span: terms.deadline,
                on_expiry: terms.on_expiry,
                ..of(Op::Draw)
            },
            Change::Take(units, TakeMode::Spend) => {
                Self { amounts: Amounts::Units(units), digest: digest(units), ..of(Op::Spend) }
            }
            Change::Take(units, TakeMode::Extend) => {
                Self { amounts: Amounts::Units(units), ..of(Op::Extend) }
            }
            Change::Shift(deltas) => Self { amounts: Amounts::Deltas(deltas), ..of(Op::Adjust) },
            Change::Renew(span) => Self { span, ..of(Op::Renew) },
            Change::End(Some(actual)) => {
                Self { amounts: Amounts::Units(actual), digest: digest(actual), ..of(Op::Settle) }
            }
            Change::End(None) => of(Op::Cancel),
            Change::Set(units) => {
                Self { amounts: Amounts::Units(units), digest: digest(units), ..of(Op::Repair) }
            }
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
            return Err(StoreError::Invalid {
                what: format!("a lease on {names} limits, more than {NAMES_MAX}"),
            });
        }
        match self.amounts {
            Amounts::Nothing => Ok(()),
            Amounts::Units(units) => fits(self.levels, units.len()),
            Amounts::Deltas(deltas) => fits(self.levels, deltas.len()),
        }
    }

    /// The step as the script reads it. Indices of keys are inserted at `indices_at` when the batch is built.
    fn pack(&self, encoded: &Arc<EncodedLevels>) -> EncodedStep {
        let levels = &encoded.levels;
        let names = levels.names().len();
        let count = |count: usize| u8::try_from(count).unwrap_or(u8::MAX);
        let mut packed = Packer::default();
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
        let indices_at = packed.0.len();
        packed.number(levels.version().number()).span(self.span);
        packed.byte(u8::from(self.on_expiry == OnExpiry::Return));
        EncodedStep {
            op: self.op,
            encoded: Arc::clone(encoded),
            lease: self.lease,
            packed: packed.0,
            indices_at,
        }
    }
}

impl Redis {
    /// Runs a step. If it comes with newer levels than the lease drew from, it is retried with those of the
    /// lease.
    pub(super) async fn step(&self, step: Step<'_>) -> Result<StepOutcome, StoreError> {
        step.check()?;
        let encoded = self.encode(step.levels).await?;
        match self.run_once(&step, &encoded).await? {
            Ok(outcome) => Ok(outcome),
            Err(drew) => {
                drew_from(step.lease, &drew, step.levels)?;
                let encoded = self.encode(&drew).await?;
                let outcome = self.run_once(&Step { levels: &drew, ..step }, &encoded).await?;
                let elsewhere = |_| StoreError::Invalid {
                    what: format!("the lease {} drew from other levels", step.lease),
                };
                let mut outcome = outcome.map_err(elsewhere)?;
                if let StepOutcome::Granted(moved) | StepOutcome::Refused(moved) = &mut outcome {
                    attach_rules(&mut moved.readings, &drew, step.levels);
                }
                Ok(outcome)
            }
        }
    }

    /// The levels as the script reads them. Their subjects are added to the index.
    pub(super) async fn encode(&self, levels: &Arc<Levels>) -> Result<Arc<EncodedLevels>, StoreError> {
        let inner = &self.inner;
        if let Some(encoded) = inner.levels_cache.get(levels) {
            return Ok(encoded);
        }
        let home = inner.keyspace.register(&inner.connection, levels).await?;
        let encoded = Arc::new(EncodedLevels::new(levels, &inner.keyspace, home, inner.batchers.at(home)));
        inner.levels_cache.insert(&encoded);
        Ok(encoded)
    }

    /// Sends the step once and returns its result, or the levels that the lease drew from if they differ.
    async fn run_once(
        &self,
        step: &Step<'_>,
        encoded: &Arc<EncodedLevels>,
    ) -> Result<Result<StepOutcome, Arc<Levels>>, StoreError> {
        let answer = batcher::run(&encoded.batcher, &self.inner, step.pack(encoded)).await?;
        decode_reply(step, &encoded.levels, &answer, self.inner.connection.context())
    }
}

fn decode_reply(
    step: &Step<'_>,
    levels: &Arc<Levels>,
    answer: &StepReply,
    context: &ErrorContext,
) -> Result<Result<StepOutcome, Arc<Levels>>, StoreError> {
    let mut read = Unpacker::new(answer.bytes(), "the script's reply");
    let lease = step.lease;
    let code = read.byte()?;
    Ok(Ok(match (code, step.op) {
        (9, _) => return Err(context.script_error(&String::from_utf8_lossy(read.rest()))),
        (0, Op::Expire) => StepOutcome::Expired(leases::on_expiry(read.byte()?)?),
        (3 | 5 | 8, Op::Expire) => StepOutcome::NotDue,
        (0 | 2, Op::Renew) => {
            let (at, deadline) = (read.stamp()?, read.stamp()?);
            StepOutcome::Renewed(Renewal { at, is_repeat: code == 2, deadline })
        }
        (10, Op::Draw | Op::Spend) => {
            StepOutcome::Granted(fast_path_grant(&mut read, step, levels, answer.nth)?)
        }
        (0 | 2, _) => StepOutcome::Granted(decode_moved(&mut read, levels, code == 2)?),
        (1, _) => StepOutcome::Refused(decode_moved(&mut read, levels, false)?),
        (3, _) => return Err(StoreError::Ended { lease, how: ending(read.byte()?)? }),
        (4, _) => return Err(StoreError::Late { lease, step: step.number, done: read.word()? }),
        (5, _) => return Err(StoreError::NoLease { lease }),
        (6, _) => return Ok(Err(leases::levels(read.rest())?)),
        (7, _) => return Err(StoreError::Full { what: "limits of one subject", max: ROWS_MAX }),
        _ => return Err(read.corrupt(&format!("the code {code}"))),
    }))
}

/// The grant of a step that took the fast path, where all rules are those of the caller. The reply has the
/// buckets as they were before `nth` equal steps drew from them in turn; their state after that is computed
/// here, as the script computes it.
fn fast_path_grant(
    read: &mut Unpacker<'_>,
    step: &Step<'_>,
    levels: &Arc<Levels>,
    nth: u16,
) -> Result<Movement, StoreError> {
    let at: Stamp = read.stamp()?;
    let mut readings = Readings::new();
    for (number, level) in levels.levels().iter().enumerate() {
        read.double()?;
        for line in &level.limits {
            // The row's name and four numbers of its rule.
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
        Ok(Movement { at, is_repeat: false, readings })
    } else {
        Err(read.corrupt("buckets that were not requested"))
    }
}

fn decode_moved(
    read: &mut Unpacker<'_>,
    levels: &Arc<Levels>,
    is_repeat: bool,
) -> Result<Movement, StoreError> {
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
        let line = line.ok_or_else(|| read.corrupt("a limit that was not requested"))?;
        let shape = Shape::new(amount, period, burst).map_err(|error| read.corrupt(&error.to_string()))?;
        let rule = if shape == *line.rule.shape() {
            Arc::clone(&line.rule)
        } else {
            Arc::new(Rule::stored(line.rule.name().clone(), shape))
        };
        let bucket = tidegate_core::bucket::Bucket::from_full_at(full_at);
        readings.push(Reading::new(level, line, moved, &Meter::restored(bucket, rule, version, consumed)));
    }
    Ok(Movement { at, is_repeat, readings })
}
