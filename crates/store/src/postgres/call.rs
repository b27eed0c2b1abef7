//! A step of a lease as it is sent to the server, and its reply.

use std::sync::Arc;
use std::time::Duration;

use foldhash::HashMap;
use smallvec::SmallVec;
use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::lease::{Ending, LeaseId};
use tidegate_core::limit::policy::OnExpiry;
use tidegate_core::time::Stamp;

use crate::batcher;
use crate::buckets::Readings;
use crate::codec::levels_to_text;
use crate::engine::{Change, Step, TakeMode};
use crate::tables::column;

/// The capacity of the cache of texts.
const TEXTS_MAX: usize = 4_096;

/// The kind of a step, as the function numbers it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Draw = 0,
    Spend = 1,
    Extend = 2,
    Adjust = 3,
    Renew = 4,
    Settle = 5,
    Cancel = 6,
    Expire = 7,
    Repair = 8,
}

/// Units or deltas per limit name.
pub(super) type Numbers = SmallVec<[Option<i64>; 2]>;

/// A step of a lease.
#[derive(Debug, Clone)]
pub(super) struct Call {
    pub(super) kind: Kind,
    pub(super) lease: LeaseId,
    pub(super) step: u32,
    pub(super) levels: Arc<Levels>,
    pub(super) numbers: Numbers,
    /// The time to the deadline, in microseconds.
    pub(super) span: i64,
    pub(super) on_expiry: OnExpiry,
    pub(super) is_watched: bool,
    pub(super) digest: u64,
}

impl Call {
    fn new(kind: Kind, lease: LeaseId, step: u32, levels: &Arc<Levels>, numbers: Numbers) -> Self {
        Self {
            kind,
            lease,
            step,
            levels: Arc::clone(levels),
            numbers,
            span: 0,
            on_expiry: OnExpiry::Settle,
            is_watched: false,
            digest: 0,
        }
    }

    /// Ends a lease past its deadline, unless another call has ended it.
    pub(super) fn expire(lease: LeaseId, levels: &Arc<Levels>) -> Self {
        Self::new(Kind::Expire, lease, 0, levels, none(levels))
    }
}

impl From<Step<'_>> for Call {
    fn from(step: Step<'_>) -> Self {
        let Step { lease, number, levels, change, is_watched } = step;
        let of = |kind, numbers| Self { is_watched, ..Self::new(kind, lease, number, levels, numbers) };
        match change {
            Change::Take(units, TakeMode::Open(terms)) => Self {
                span: micros(terms.deadline),
                on_expiry: terms.on_expiry,
                ..of(Kind::Draw, numbers(units))
            },
            Change::Take(units, TakeMode::Spend) => {
                Self { digest: levels.digest(units), ..of(Kind::Spend, numbers(units)) }
            }
            Change::Take(units, TakeMode::Extend) => of(Kind::Extend, numbers(units)),
            Change::Shift(deltas) => of(Kind::Adjust, deltas.iter().copied().collect()),
            Change::Renew(span) => Self { span: micros(span), ..of(Kind::Renew, none(levels)) },
            Change::End(Some(actual)) => {
                Self { digest: levels.digest(actual), ..of(Kind::Settle, numbers(actual)) }
            }
            Change::End(None) => of(Kind::Cancel, none(levels)),
            Change::Set(units) => {
                Self { digest: levels.digest(units), is_watched: true, ..of(Kind::Repair, numbers(units)) }
            }
        }
    }
}

/// A queued call.
pub(super) struct QueuedCall {
    pub(super) call: Call,
    pub(super) text: Arc<LevelsText>,
}

/// A call of a batch.
pub(super) type Job = batcher::Job<QueuedCall>;

/// The server's reply to a call.
#[derive(Debug)]
pub(super) struct StepReply {
    pub(super) status: Status,
    pub(super) at: Stamp,
    pub(super) is_repeat: bool,
    /// The deadline of a renewed lease; for an expired one, whether it was returned.
    pub(super) extra: i64,
    pub(super) readings: Readings,
}

#[derive(Debug)]
pub(super) enum Status {
    Done,
    Refused,
    Ended(Ending),
    Late {
        done: u32,
    },
    NoLease,
    /// The lease drew from these levels instead.
    OtherLevels(String),
    Full,
}

/// Levels as stored text, with their hashes.
#[derive(Debug)]
pub(super) struct LevelsText {
    pub(super) levels: String,
    /// A hash of the text.
    pub(super) key: i64,
    /// Hashes of the subjects: batches with a common one are not sent in parallel.
    pub(super) subjects: SmallVec<[u64; 2]>,
}

impl LevelsText {
    fn of(levels: &Levels) -> Self {
        let text = levels_to_text(levels);
        let subjects = levels.levels().iter().map(|level| {
            let names = [level.subject.entity.as_str(), level.subject.resource.as_str()];
            hash(&[names[0].as_bytes(), b"#", names[1].as_bytes()])
        });
        let key = hash(&[text.as_bytes()]).cast_signed();
        Self { subjects: subjects.collect(), key, levels: text }
    }
}

/// Texts by the address of their levels, which stays valid because the entry holds them.
#[derive(Default)]
pub(super) struct LevelsTextCache(HashMap<usize, (Arc<Levels>, Arc<LevelsText>)>);

impl LevelsTextCache {
    pub(super) fn of(&mut self, levels: &Arc<Levels>) -> Arc<LevelsText> {
        if self.0.len() >= TEXTS_MAX {
            self.0.clear();
        }
        let make = || (Arc::clone(levels), Arc::new(LevelsText::of(levels)));
        Arc::clone(&self.0.entry(Arc::as_ptr(levels).addr()).or_insert_with(make).1)
    }
}

/// FNV-1a, because the hash must be the same in every process.
pub(super) fn hash(parts: &[&[u8]]) -> u64 {
    let byte = |key: u64, byte: &u8| (key ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01B3);
    parts.iter().flat_map(|part| part.iter()).fold(0xCBF2_9CE4_8422_2325, byte)
}

fn numbers(units: &[Option<u64>]) -> Numbers {
    units.iter().map(|units| units.map(column)).collect()
}

fn none(levels: &Levels) -> Numbers {
    SmallVec::from_elem(None, levels.names().len())
}

fn micros(span: Duration) -> i64 {
    i64::try_from(span.as_micros()).unwrap_or(i64::MAX / 4).min(i64::MAX / 4)
}
