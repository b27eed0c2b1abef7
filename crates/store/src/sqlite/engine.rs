//! The engine: writes are calls in a transaction of the writer, reads go beside them.

use rusqlite::Connection;
use tidegate_core::limit::anchor::Anchor;
use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::name::{EntityId, ResourceName};
use tidegate_core::limit::usage::Usage;

use super::trouble::Trouble;
use super::work::{Call, Job, Work};
use super::{Sqlite, leases, listing, records, retention};
use crate::buckets::{Bucket, Lookup, Seen, Standing};
use crate::cursor::UsagePlace;
use crate::engine::{Applied, Change, Engine, QueuedStep, Step, Taking};
use crate::error::StoreError;
use crate::ledger::{Prune, UsageQuery};
use crate::record::{Key, Record, RecordWrite, Records, Scan};
use crate::reply::Reply;
use crate::store::{Capabilities, Clocked, Swept};

/// Leases that are ended at a time before something is read.
const SWEPT_BEFORE_READING: usize = 1_000;

/// A call on a lease of a namespace.
type On<R> = (i64, R);

impl Engine for Sqlite {
    fn about(&self) -> Capabilities {
        Capabilities {
            engine: "sqlite",
            is_immediate: false,
            is_durable: self.inner.readers.is_some(),
            clock: Clocked::Host,
            deadline: self.inner.deadline,
        }
    }

    fn apply_step<'a>(&'a self, step: Step<'a>) -> Reply<'a, Applied> {
        let (call, answer) = Call::new((self.namespace, step.into()), apply);
        Reply::later(self.inner.write((call.or_undo(give_back), answer)))
    }

    fn find_lease(&self, lease: LeaseId) -> Reply<'_, Standing> {
        Reply::later(async move {
            let namespace = self.namespace;
            let read = move || {
                self.inner.read(move |connection, clock| {
                    leases::standing(connection, namespace, (lease, clock.latest()))
                })
            };
            match read().await? {
                Standing::Open(held) if held.record.is_due(held.at) => {
                    self.sweep_what_is_due().await?;
                    read().await
                }
                standing => Ok(standing),
            }
        })
    }

    fn look<'a>(&'a self, lookup: &'a Lookup) -> Reply<'a, Seen> {
        Reply::later(async move {
            self.sweep_what_is_due().await?;
            let (namespace, lookup) = (self.namespace, lookup.clone());
            let read = self.inner.read(move |connection, clock| {
                let (at, clock_offset) = (clock.latest(), clock.offset());
                let buckets = listing::balances(connection, namespace, &lookup, at)?;
                Ok(Seen { at, clock_offset, buckets })
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
            self.sweep_what_is_due().await?;
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
            self.sweep_what_is_due().await?;
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

    fn sweep_leases(&self, max: usize) -> Reply<'_, Swept> {
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

    fn chain<'a>(&'a self, id: &'a EntityId, max: usize) -> Reply<'a, Vec<Record>> {
        let (namespace, id) = (self.namespace, id.clone());
        Reply::later(self.inner.read(move |connection, _| records::chain(connection, namespace, &id, max)))
    }

    fn shut_down(&self) -> Reply<'_, ()> {
        Reply::later(async {
            Self::close(self).await;
            Ok(())
        })
    }
}

impl Sqlite {
    pub(super) async fn sweep_up_to(&self, max: usize) -> Result<Swept, StoreError> {
        let sweep = |work: &mut Work<'_>, (namespace, max): &On<usize>| {
            let (connection, now) = (work.connection, work.now);
            let space = work.untidied(*namespace)?;
            let swept = space.sweep(connection, now, *max)?.with(&mut space.passed, *max);
            retention::apply(work)?;
            Ok(swept)
        };
        self.inner.write(Call::new((self.namespace, max), sweep)).await
    }

    /// Ends the leases that are past their deadline: balances and usage include theirs.
    pub(super) async fn sweep_what_is_due(&self) -> Result<(), StoreError> {
        let namespace = self.namespace;
        let sweep = |work: &mut Work<'_>, namespace: &i64| {
            let (connection, now) = (work.connection, work.now);
            work.untidied(*namespace)?.sweep_in_passing(connection, now, SWEPT_BEFORE_READING)
        };
        let is_any_due = move |connection: &Connection, clock: Anchor| {
            listing::is_any_due(connection, namespace, clock.latest())
        };
        while self.inner.read(is_any_due).await? {
            match self.inner.write(Call::new(namespace, sweep)).await {
                Ok(()) => {}
                // It can be read though it cannot be written: as it is.
                Err(error) if error.is_transient() => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Applies a step in the transaction.
fn apply(work: &mut Work<'_>, (namespace, step): &On<QueuedStep>) -> Result<Applied, Trouble> {
    let step = step.as_step();
    if matches!(step.change, Change::Take(..)) {
        work.draws()?;
    }
    let (connection, now) = (work.connection, work.now);
    let space = work.space(*namespace)?;
    let answer = space.decide(connection, now, (step.lease, step.levels), |context| context.apply(&step))?;
    if let (Change::Take(_, Taking::Open(terms)), Applied::Granted(moved)) = (step.change, &answer) {
        space.is_due_at(moved.at + terms.deadline);
    }
    Ok(answer)
}

/// Returns what was drawn for a caller that did not wait for it. A repeated draw belongs to an earlier answer, and the caller
/// of a chosen id asks again.
fn give_back((namespace, step): &On<QueuedStep>, answer: &Applied) -> Option<Box<dyn Job>> {
    let step = step.as_step();
    match (step.change, answer) {
        (Change::Take(_, Taking::Open(_)), Applied::Granted(moved))
            if !moved.is_repeat && !step.lease.is_chosen() =>
        {
            let cancel = Step { number: 1, change: Change::End(None), is_watched: false, ..step };
            Some(Box::new(Call::unheard((*namespace, cancel.into()), apply)))
        }
        _ => None,
    }
}
