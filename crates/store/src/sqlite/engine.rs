//! The engine trait on SQLite: writes are calls in a transaction of the writer, reads run in parallel.
//!
//! An acquire is read and written by `namespace.rs`, and decided by `shared_engine/steps.rs`.

use rusqlite::Connection;
use tidegate_core::limit::anchor::Anchor;
use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::name::{EntityId, ResourceName};
use tidegate_core::limit::usage::Usage;

use super::errors::CallError;
use super::transaction::{Call, Job, Transaction};
use super::{Sqlite, leases, listing, records, retention};
use crate::buckets::{Bucket, BucketSnapshot, LeaseStatus, Lookup};
use crate::cursor::UsagePlace;
use crate::engine::{Change, Engine, QueuedStep, Step, StepResult, TakeMode};
use crate::error::StoreError;
use crate::ledger::{Prune, UsageQuery};
use crate::record::{Key, Record, RecordWrite, Records, Scan};
use crate::reply::Reply;
use crate::store::{Capabilities, ClockSource, SweepReport};

/// The most leases that are ended at a time before a read.
const DUE_BATCH: usize = 1_000;

/// A request in a namespace.
type InNamespace<R> = (i64, R);

impl Engine for Sqlite {
    fn about(&self) -> Capabilities {
        Capabilities {
            engine: "sqlite",
            is_immediate: false,
            is_durable: self.inner.readers.is_some(),
            clock: ClockSource::Host,
            deadline: self.inner.deadline,
        }
    }

    fn apply_step<'a>(&'a self, step: Step<'a>) -> Reply<'a, StepResult> {
        let (call, answer) = Call::new((self.namespace, step.into()), apply);
        Reply::later(self.inner.write((call.or_undo(undo_unclaimed_draw), answer)))
    }

    fn find_lease(&self, lease: LeaseId) -> Reply<'_, LeaseStatus> {
        Reply::later(async move {
            let namespace = self.namespace;
            let read = move || {
                self.inner.read(move |connection, clock| {
                    Ok(leases::find(connection, namespace, lease)?.status(lease, clock.latest())?)
                })
            };
            match read().await? {
                LeaseStatus::Open(held) if held.record.is_due(held.at) => {
                    self.sweep_all_due().await?;
                    read().await
                }
                standing => Ok(standing),
            }
        })
    }

    fn look<'a>(&'a self, lookup: &'a Lookup) -> Reply<'a, BucketSnapshot> {
        Reply::later(async move {
            self.sweep_all_due().await?;
            let (namespace, lookup) = (self.namespace, lookup.clone());
            let read = self.inner.read(move |connection, clock| {
                let (at, clock_offset) = (clock.latest(), clock.offset());
                let buckets = listing::balances(connection, namespace, &lookup, at)?;
                Ok(BucketSnapshot { at, clock_offset, buckets })
            });
            read.await
        })
    }

    fn scan_buckets<'a>(
        &'a self,
        resource: &'a ResourceName,
        after: Option<EntityId>,
        max: usize,
    ) -> Reply<'a, Vec<Bucket>> {
        Reply::later(async move {
            self.sweep_all_due().await?;
            let (namespace, resource) = (self.namespace, resource.clone());
            let read = self.inner.read(move |connection, clock| {
                listing::buckets(connection, namespace, (&resource, clock.latest()), after.as_ref(), max)
            });
            read.await
        })
    }

    fn scan_usage<'a>(
        &'a self,
        query: &'a UsageQuery,
        after: Option<UsagePlace<'a>>,
        max: usize,
    ) -> Reply<'a, Vec<Usage>> {
        Reply::later(async move {
            self.sweep_all_due().await?;
            let (namespace, query) = (self.namespace, query.clone());
            let after = after.map(|place| (place.name.to_owned(), place.limit.to_owned(), place.start));
            let read = self.inner.read(move |connection, _| {
                let after =
                    after.as_ref().map(|(name, limit, start)| UsagePlace { name, limit, start: *start });
                listing::usage(connection, namespace, &query, after, max)
            });
            read.await
        })
    }

    fn prune_ledger<'a>(&'a self, prune: &'a Prune, max: usize) -> Reply<'a, u64> {
        Reply::later(self.inner.write(Call::new((self.namespace, *prune, max), retention::prune)))
    }

    fn sweep_leases(&self, max: usize) -> Reply<'_, SweepReport> {
        Reply::later(self.sweep_up_to(max))
    }

    fn read_records<'a>(&'a self, keys: &'a [Key]) -> Reply<'a, Records> {
        let (namespace, keys) = (self.namespace, keys.to_vec());
        Reply::later(
            self.inner
                .read(move |connection, clock| records::read(connection, namespace, &keys, clock.latest())),
        )
    }

    fn scan_records<'a>(&'a self, scan: &'a Scan) -> Reply<'a, Vec<Record>> {
        let (namespace, scan) = (self.namespace, scan.clone());
        Reply::later(self.inner.read(move |connection, _| records::scan(connection, namespace, &scan)))
    }

    fn write_records<'a>(&'a self, write: &'a RecordWrite) -> Reply<'a, bool> {
        Reply::later(self.inner.write(Call::new((self.namespace, write.clone()), records::write)))
    }

    fn shut_down(&self) -> Reply<'_, ()> {
        Reply::later(async {
            Self::close(self).await;
            Ok(())
        })
    }
}

impl Sqlite {
    pub(super) async fn sweep_up_to(&self, max: usize) -> Result<SweepReport, StoreError> {
        let sweep = |transaction: &mut Transaction<'_>, (namespace, max): &InNamespace<usize>| {
            let (connection, now) = (transaction.connection, transaction.now);
            let state = transaction.namespace_as_is(*namespace)?;
            let swept = state.sweep(connection, now, *max)?.with(&mut state.unreported, *max);
            retention::apply(transaction)?;
            Ok(swept)
        };
        self.inner.write(Call::new((self.namespace, max), sweep)).await
    }

    /// Ends all leases past their deadline, so that a following read includes them.
    pub(super) async fn sweep_all_due(&self) -> Result<(), StoreError> {
        let namespace = self.namespace;
        let sweep = |transaction: &mut Transaction<'_>, namespace: &i64| {
            let (connection, now) = (transaction.connection, transaction.now);
            transaction.namespace_as_is(*namespace)?.sweep_unreported(connection, now, DUE_BATCH)
        };
        let is_any_due = move |connection: &Connection, clock: Anchor| {
            listing::is_any_due(connection, namespace, clock.latest())
        };
        while self.inner.read(is_any_due).await? {
            match self.inner.write(Call::new(namespace, sweep)).await {
                Ok(()) => {}
                // A file that cannot be written is read as it is.
                Err(error) if error.is_transient() => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Applies a step in the transaction.
fn apply(
    transaction: &mut Transaction<'_>,
    (namespace, step): &InNamespace<QueuedStep>,
) -> Result<StepResult, CallError> {
    let step = step.as_step();
    if matches!(step.change, Change::Take(..)) {
        transaction.draws()?;
    }
    let (connection, now) = (transaction.connection, transaction.now);
    let state = transaction.namespace(*namespace)?;
    let answer = state.decide(connection, now, (step.lease, step.levels), |context| context.apply(&step))?;
    if let (Change::Take(_, TakeMode::Open(terms)), StepResult::Granted(moved)) = (step.change, &answer) {
        state.note_deadline(moved.at + terms.deadline);
    }
    Ok(answer)
}

/// Returns the units of a draw whose caller did not wait for its reply. A repeated draw belongs to an earlier
/// reply, and the caller of a chosen id will retry.
fn undo_unclaimed_draw(
    (namespace, step): &InNamespace<QueuedStep>,
    answer: &StepResult,
) -> Option<Box<dyn Job>> {
    let step = step.as_step();
    match (step.change, answer) {
        (Change::Take(_, TakeMode::Open(_)), StepResult::Granted(moved))
            if !moved.is_repeat && !step.lease.is_chosen() =>
        {
            let cancel = Step { number: 1, change: Change::End(None), is_watched: false, ..step };
            Some(Box::new(Call::detached((*namespace, cancel.into()), apply)))
        }
        _ => None,
    }
}
