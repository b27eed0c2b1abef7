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
use crate::engine::{Change, Step, StepResult, TakeMode};
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
#[derive(Clone, Copy)]
struct ScriptStep<'a> {
    op: Op,
    of: Step<'a>,
}

impl Op {
    const fn of(change: &Change<'_>) -> Self {
        match change {
            Change::Take(_, TakeMode::Open(_)) => Self::Draw,
            Change::Take(_, TakeMode::Spend) => Self::Spend,
            Change::Take(_, TakeMode::Extend) => Self::Extend,
            Change::Shift(_) => Self::Adjust,
            Change::Renew(_) => Self::Renew,
            Change::End(Some(_)) => Self::Settle,
            Change::End(None) => Self::Cancel,
            Change::Set(_) => Self::Repair,
        }
    }
}

fn check(step: &Step<'_>) -> Result<(), StoreError> {
    check_levels(step.levels)?;
    let names = step.levels.names().len();
    if names > NAMES_MAX {
        let what = format!("a lease on {names} limits, more than {NAMES_MAX}");
        return Err(StoreError::Invalid { what });
    }
    match step.change {
        Change::Take(units, _) | Change::End(Some(units)) | Change::Set(units) => {
            fits(step.levels, units.len())
        }
        Change::Shift(deltas) => fits(step.levels, deltas.len()),
        Change::Renew(_) | Change::End(None) => Ok(()),
    }
}

impl ScriptStep<'_> {
    /// The step as the script reads it. Indices of keys are inserted at `indices_at` when the batch is built.
    fn pack(&self, encoded: &Arc<EncodedLevels>) -> EncodedStep {
        let Step { lease, number, change, is_watched, .. } = self.of;
        let levels = &encoded.levels;
        let names = levels.names().len();
        // It distinguishes a repeated ending from a different one.
        let digest = match change {
            Change::Take(units, TakeMode::Spend) | Change::End(Some(units)) | Change::Set(units) => {
                levels.digest(units)
            }
            _ => 0,
        };
        let (span, on_expiry) = match change {
            Change::Take(_, TakeMode::Open(terms)) => (terms.deadline, terms.on_expiry),
            Change::Renew(span) => (span, OnExpiry::Settle),
            _ => (Duration::ZERO, OnExpiry::Settle),
        };
        let count = |count: usize| u8::try_from(count).unwrap_or(u8::MAX);
        let mut packed = Packer::default();
        packed.byte(self.op as u8).byte(u8::from(is_watched)).byte(count(levels.levels().len()));
        packed.word(number).bytes(&digest.to_le_bytes()).bytes(&encoded.identity).byte(count(names));
        for name in 0..names {
            packed.double(match change {
                Change::Take(units, _) | Change::End(Some(units)) | Change::Set(units) => {
                    units[name].map_or(NONE, to_double)
                }
                Change::Shift(deltas) => deltas[name].map_or(NONE, to_signed_double),
                Change::Renew(_) | Change::End(None) => NONE,
            });
        }
        let indices_at = packed.0.len();
        packed.number(levels.version().number()).span(span);
        packed.byte(u8::from(on_expiry == OnExpiry::Return));
        EncodedStep { op: self.op, encoded: Arc::clone(encoded), lease, packed: packed.0, indices_at }
    }
}

impl Redis {
    /// Runs a step.
    pub(super) async fn step(&self, step: Step<'_>) -> Result<StepResult, StoreError> {
        self.run_step(ScriptStep { op: Op::of(&step.change), of: step }).await
    }

    /// Ends a lease that is past its deadline. Returns whether it has: not if it was renewed or has ended.
    pub(super) async fn expire(&self, lease: LeaseId, levels: &Arc<Levels>) -> Result<bool, StoreError> {
        let of = Step { lease, number: 0, levels, change: Change::End(None), is_watched: false };
        match self.run_step(ScriptStep { op: Op::Expire, of }).await {
            Ok(done) => Ok(!done.moved().is_repeat),
            Err(StoreError::Ended { .. } | StoreError::NoLease { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Runs a step. If it comes with newer levels than the lease drew from, it is retried with those of the
    /// lease.
    async fn run_step(&self, step: ScriptStep<'_>) -> Result<StepResult, StoreError> {
        let Step { lease, levels, .. } = step.of;
        check(&step.of)?;
        let encoded = self.encode(levels).await?;
        if step.op == Op::Draw {
            // Before it is sent: the reply may be lost.
            self.inner.keyspace.remember_lease(lease, encoded.home);
        }
        let drew = match self.run_once(&step, &encoded).await? {
            Ok(result) => return Ok(result),
            Err(drew) => drew,
        };
        drew_from(lease, &drew, levels)?;
        let encoded = self.encode(&drew).await?;
        let of = Step { levels: &drew, ..step.of };
        let result = self.run_once(&ScriptStep { of, ..step }, &encoded).await?;
        let elsewhere = |_| StoreError::Invalid { what: format!("the lease {lease} drew from other levels") };
        let mut result = result.map_err(elsewhere)?;
        if let StepResult::Granted(moved) | StepResult::Refused(moved) = &mut result {
            attach_rules(&mut moved.readings, &drew, levels);
        }
        Ok(result)
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
        step: &ScriptStep<'_>,
        encoded: &Arc<EncodedLevels>,
    ) -> Result<Result<StepResult, Arc<Levels>>, StoreError> {
        let answer = batcher::run(&encoded.batcher, &self.inner, step.pack(encoded)).await?;
        decode_reply(step, &encoded.levels, &answer, self.inner.connection.context())
    }
}

fn decode_reply(
    step: &ScriptStep<'_>,
    levels: &Arc<Levels>,
    answer: &StepReply,
    context: &ErrorContext,
) -> Result<Result<StepResult, Arc<Levels>>, StoreError> {
    let mut read = Unpacker::new(answer.bytes(), "the script's reply");
    let Step { lease, number, change, .. } = step.of;
    let code = read.byte()?;
    Ok(Ok(match (code, step.op) {
        (8, _) => return Err(context.script_error(&String::from_utf8_lossy(read.rest()))),
        (0 | 2, Op::Renew) => {
            let (at, deadline) = (read.stamp()?, read.stamp()?);
            StepResult::Renewed(Renewal { at, is_repeat: code == 2, deadline })
        }
        (10, _) if let Change::Take(units, _) = change => {
            StepResult::Granted(fast_path_grant(&mut read, units, levels, answer.nth)?)
        }
        (0 | 2, _) => StepResult::Granted(decode_moved(&mut read, levels, code == 2)?),
        (1, _) => StepResult::Refused(decode_moved(&mut read, levels, false)?),
        (3, _) => return Err(StoreError::Ended { lease, how: ending(read.byte()?)? }),
        (4, _) => return Err(StoreError::Late { lease, step: number, done: read.word()? }),
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
    units: &Units,
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
            if let Some(units) = units[line.name] {
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
