//! The engine trait. Everything else of a store is implemented once on top of it.
//!
//! An engine applies the steps of leases to buckets and keeps versioned records. Policies, entities, tokens,
//! the audit, their listings and cursors are records: see [`records`](crate::records). Engines that decide in
//! this process share the decisions in [`shared_engine`](crate::shared_engine).

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tidegate_core::limit::cascade::{Deltas, Levels, Units};
use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::name::{Across, EntityId, ResourceName};
use tidegate_core::limit::policy::Version;
use tidegate_core::limit::usage::Usage;

use crate::buckets::{Bucket, BucketSnapshot, DrawResult, LeaseStatus, Lookup, Movement, Renewal, Terms};
use crate::changes::Changes;
use crate::cursor::UsagePlace;
use crate::ledger::{Prune, UsageQuery};
use crate::record::{Key, Record, RecordWrite, Records, Scan};
use crate::reply::Reply;
use crate::store::{Capabilities, SweepReport};
use crate::wrap::Verb;

/// The storage of the buckets, leases and records of one namespace.
///
/// Every engine is a [`Store`](crate::Store). The contract of steps, leases and usage is written at
/// [`Buckets`](crate::Buckets) and [`Ledger`](crate::Ledger), that of records here. The feature `conformance`
/// has a suite that shows whether an engine keeps both. `docs/write-an-engine.md` in the repository is a
/// guide with a complete engine.
///
/// # Records
/// A namespace counts its changes: its [`Version`]. [`write_records`](Self::write_records) makes all of its
/// changes or none, raises the version by one, and only if the version is the one that the writer has read
/// (optimistic locking). The audit entry of a change is one of the records that it writes.
///
/// # Cancel safety
/// A reply that is dropped may have been carried out or not.
pub trait Engine: fmt::Debug + Send + Sync + 'static {
    /// What the engine is and can do.
    fn about(&self) -> Capabilities;

    /// Applies one step of a lease to the buckets that it names: all or nothing, at one reading of the
    /// engine's clock, and at most once. Engines behind a network send many steps in one round trip.
    fn apply_step<'a>(&'a self, step: Step<'a>) -> Reply<'a, StepResult>;

    /// A lease by its id. One that is past its deadline is ended first.
    fn find_lease(&self, lease: LeaseId) -> Reply<'_, LeaseStatus>;

    /// The buckets of these subjects or entities, in one round trip. Nothing is written.
    fn look<'a>(&'a self, lookup: &'a Lookup) -> Reply<'a, BucketSnapshot>;

    /// Up to `max` buckets of a resource, by entity, those after `after` only.
    fn scan_buckets<'a>(
        &'a self,
        resource: &'a ResourceName,
        after: Option<EntityId>,
        max: usize,
    ) -> Reply<'a, Vec<Bucket>>;

    /// Up to `max` lines of usage by subject, limit and window, those after `after` only.
    fn scan_usage<'a>(
        &'a self,
        query: &'a UsageQuery,
        after: Option<UsagePlace<'a>>,
        max: usize,
    ) -> Reply<'a, Vec<Usage>>;

    /// Deletes up to `max` lines of the ledger, as [`Ledger::prune`](crate::Ledger::prune) says.
    fn prune_ledger<'a>(&'a self, prune: &'a Prune, max: usize) -> Reply<'a, u64>;

    /// Housekeeping: ends up to `max` leases that are past their deadline, deletes what is older than the
    /// retention, and evicts subjects that are the same as unused ones.
    fn sweep_leases(&self, max: usize) -> Reply<'_, SweepReport>;

    /// The records with these keys, each in its place, the namespace's version and the time, all as of one
    /// moment.
    fn read_records<'a>(&'a self, keys: &'a [Key]) -> Reply<'a, Records>;

    /// Records in the order of their keys.
    fn scan_records<'a>(&'a self, scan: &'a Scan) -> Reply<'a, Vec<Record>>;

    /// Applies all of the changes, or none and returns `false` if the namespace's version is no longer the
    /// one they are based on.
    fn write_records<'a>(&'a self, write: &'a RecordWrite) -> Reply<'a, bool>;

    /// The namespace's version.
    fn newest_version(&self) -> Reply<'_, Version> {
        Reply::after(self.about().is_immediate, async { Ok(self.read_records(&[]).await?.version) })
    }

    /// An entity's record and those of the ancestors that it cascades to, at most `max`; further ancestors
    /// may follow. One round trip where the engine can follow links.
    fn chain<'a>(&'a self, id: &'a EntityId, max: usize) -> Reply<'a, Vec<Record>> {
        Reply::after(self.about().is_immediate, async move {
            let (mut chain, mut next) = (Vec::new(), Some(id.clone()));
            while let Some(id) = next.take().filter(|_| chain.len() < max) {
                let found = self.read_records(&[Key::Entity(id)]).await?.records.pop().flatten();
                let Some(record) = found else { break };
                next = record.entity()?.next().cloned();
                chain.push(record);
            }
            Ok(chain)
        })
    }

    /// Shuts the engine down for all of its handles, after completing and persisting calls in flight.
    fn shut_down(&self) -> Reply<'_, ()> {
        Reply::ready(Ok(()))
    }

    /// The engine's announcements of administrative changes by any process; `None` if it has none.
    fn announcements(&self) -> Option<Changes> {
        None
    }

    /// Why the engine cannot count such pools together with the buckets of all subjects that share them, all or
    /// nothing; `None` if it can. Policies with such limits are refused.
    fn pool_refusal(&self, across: Across) -> Option<&'static str> {
        let _ = across;
        None
    }

    /// A setting of the engine that may break the store's guarantees, and what to change; found when it was
    /// opened.
    fn warning(&self) -> Option<String> {
        None
    }
}

/// A step of a lease.
#[derive(Debug, Clone, Copy)]
pub struct Step<'a> {
    /// The lease.
    pub lease: LeaseId,
    /// The number of the step: the draw is 0, and later steps are higher.
    pub number: u32,
    /// The buckets that the lease draws from.
    pub levels: &'a Arc<Levels>,
    /// What the step does.
    pub change: Change<'a>,
    /// Whether the caller wants the readings of a grant or an ending. Those of a refusal are always wanted.
    pub is_watched: bool,
}

/// What a step does to a lease and its buckets.
#[derive(Debug, Clone, Copy)]
pub enum Change<'a> {
    /// Takes units of every level, or nothing.
    Take(&'a Units, TakeMode),
    /// Takes or returns units. Never refused: missing units become debt. No more is returned than is held.
    Shift(&'a Deltas),
    /// Moves the deadline to this long from now, never back.
    Renew(Duration),
    /// Ends the lease: settled at its actual usage, which may leave a debt, or cancelled.
    End(Option<&'a Units>),
    /// Sets the units available, for an administrator. The lease begins and ends with the step, so that a retry
    /// finds it; it takes nothing and counts no usage.
    Set(&'a Units),
}

/// How a step takes units.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TakeMode {
    /// The lease begins.
    Open(Terms),
    /// The lease begins and is settled at once.
    Spend,
    /// The lease is open and takes more.
    Extend,
}

impl Step<'_> {
    /// The name of the step, for counters and metrics.
    pub const fn verb(&self) -> Verb {
        match self.change {
            Change::Take(_, TakeMode::Open(_)) => Verb::Draw,
            Change::Take(_, TakeMode::Spend) => Verb::Spend,
            Change::Take(_, TakeMode::Extend) => Verb::Extend,
            Change::Shift(_) => Verb::Adjust,
            Change::Renew(_) => Verb::Renew,
            Change::End(Some(_)) => Verb::Settle,
            Change::End(None) => Verb::Cancel,
            Change::Set(_) => Verb::Repair,
        }
    }
}

/// A step that is queued or sent later.
#[derive(Debug, Clone)]
pub struct QueuedStep {
    lease: LeaseId,
    number: u32,
    levels: Arc<Levels>,
    change: QueuedChange,
    is_watched: bool,
}

#[derive(Debug, Clone)]
enum QueuedChange {
    Take(Units, TakeMode),
    Shift(Deltas),
    Renew(Duration),
    End(Option<Units>),
    Set(Units),
}

impl From<Step<'_>> for QueuedStep {
    fn from(step: Step<'_>) -> Self {
        let Step { lease, number, levels, change, is_watched } = step;
        let change = match change {
            Change::Take(units, taking) => QueuedChange::Take(units.clone(), taking),
            Change::Shift(deltas) => QueuedChange::Shift(deltas.clone()),
            Change::Renew(span) => QueuedChange::Renew(span),
            Change::End(actual) => QueuedChange::End(actual.cloned()),
            Change::Set(units) => QueuedChange::Set(units.clone()),
        };
        Self { lease, number, levels: Arc::clone(levels), change, is_watched }
    }
}

impl QueuedStep {
    /// The step.
    pub const fn as_step(&self) -> Step<'_> {
        let change = match &self.change {
            QueuedChange::Take(units, taking) => Change::Take(units, *taking),
            QueuedChange::Shift(deltas) => Change::Shift(deltas),
            QueuedChange::Renew(span) => Change::Renew(*span),
            QueuedChange::End(actual) => Change::End(actual.as_ref()),
            QueuedChange::Set(units) => Change::Set(units),
        };
        let Self { lease, number, levels, is_watched, .. } = self;
        Step { lease: *lease, number: *number, levels, change, is_watched: *is_watched }
    }
}

/// The result of a step.
#[derive(Debug, Clone)]
pub enum StepResult {
    /// The step was applied.
    Granted(Movement),
    /// Units are not available, and nothing was taken. The readings show which limits are short.
    Refused(Movement),
    /// The lease was renewed.
    Renewed(Renewal),
}

impl From<DrawResult> for StepResult {
    fn from(drawn: DrawResult) -> Self {
        match drawn {
            DrawResult::Granted(moved) => Self::Granted(moved),
            DrawResult::Refused(moved) => Self::Refused(moved),
        }
    }
}

impl StepResult {
    /// The result of a draw, a spend or an extension.
    #[inline]
    pub(crate) fn drawn(self) -> DrawResult {
        match self {
            Self::Granted(moved) => DrawResult::Granted(moved),
            Self::Refused(moved) => DrawResult::Refused(moved),
            Self::Renewed(_) => unreachable!("only a renewal returns a deadline"),
        }
    }

    /// The result of a step that is never refused.
    #[inline]
    pub(crate) fn moved(self) -> Movement {
        match self {
            Self::Granted(moved) | Self::Refused(moved) => moved,
            Self::Renewed(_) => unreachable!("only a renewal returns a deadline"),
        }
    }

    /// The result of a renewal.
    pub(crate) fn renewed(self) -> Renewal {
        match self {
            Self::Renewed(renewed) => renewed,
            Self::Granted(_) | Self::Refused(_) => unreachable!("a renewal returns a deadline"),
        }
    }
}
