//! The steps of a lease, each a call in a transaction; and balances, which are read beside them.

use rusqlite::Connection;
use tidegate_core::limit::anchor::Anchor;
use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::name::ResourceName;

use super::trouble::Trouble;
use super::work::{Call, Job, Work};
use super::{Sqlite, leases, listing, retention};
use crate::buckets::{
    Adjust, Bucket, Buckets, Cancel, Draw, Drawn, Extend, Lookup, Moved, Renew, Renewed, Seen, Settle,
    Standing,
};
use crate::error::StoreError;
use crate::page::{Page, Paging};
use crate::reply::Reply;
use crate::store::Swept;

/// Leases that are ended at a time before something is read.
const SWEPT_BEFORE_READING: usize = 1_000;

/// A call on a lease of a namespace.
type On<R> = (i64, R);

impl Buckets for Sqlite {
    fn draw<'a>(&'a self, asked: &'a Draw) -> Reply<'a, Drawn> {
        let (call, answer) = Call::new((self.namespace, asked.clone()), draw);
        Reply::later(self.inner.write((call.or_undo(give_back), answer)))
    }

    fn extend<'a>(&'a self, asked: &'a Extend) -> Reply<'a, Drawn> {
        Reply::later(self.inner.write(Call::new((self.namespace, asked.clone()), extend)))
    }

    fn adjust<'a>(&'a self, asked: &'a Adjust) -> Reply<'a, Moved> {
        Reply::later(self.inner.write(Call::new((self.namespace, asked.clone()), adjust)))
    }

    fn renew<'a>(&'a self, asked: &'a Renew) -> Reply<'a, Renewed> {
        Reply::later(self.inner.write(Call::new((self.namespace, asked.clone()), renew)))
    }

    fn settle<'a>(&'a self, asked: &'a Settle) -> Reply<'a, Moved> {
        Reply::later(self.inner.write(Call::new((self.namespace, asked.clone()), settle)))
    }

    fn cancel<'a>(&'a self, asked: &'a Cancel) -> Reply<'a, Moved> {
        Reply::later(self.inner.write(Call::new((self.namespace, asked.clone()), cancel)))
    }

    fn spend<'a>(&'a self, asked: &'a Draw) -> Reply<'a, Drawn> {
        Reply::later(self.inner.write(Call::new((self.namespace, asked.clone()), spend)))
    }

    fn lease(&self, lease: LeaseId) -> Reply<'_, Standing> {
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

    fn balances<'a>(&'a self, lookup: &'a Lookup) -> Reply<'a, Seen> {
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

    fn buckets<'a>(&'a self, resource: &'a ResourceName, paging: &'a Paging) -> Reply<'a, Page<Bucket>> {
        Reply::later(async move {
            self.sweep_what_is_due().await?;
            let (namespace, resource, paging) = (self.namespace, resource.clone(), paging.clone());
            let read = self.inner.read(move |connection, clock| {
                listing::buckets(connection, namespace, (&resource, clock.latest()), &paging)
            });
            read.await
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

    /// Ends the leases that are past their deadline: whoever looks at balances and usage means theirs too.
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

fn draw(work: &mut Work<'_>, (namespace, draw): &On<Draw>) -> Result<Drawn, Trouble> {
    work.draws()?;
    let (connection, now) = (work.connection, work.now);
    let space = work.space(*namespace)?;
    let answer = space.decide(connection, now, (draw.lease, &draw.levels), |desk| desk.draw(draw))?;
    if let Drawn::Granted(moved) = &answer {
        space.is_due_at(moved.at + draw.terms.deadline);
    }
    Ok(answer)
}

/// Returns what was drawn for somebody who did not wait for it. What was drawn before, and is told again, is somebody's;
/// and whoever has chosen the id asks again.
fn give_back((namespace, draw): &On<Draw>, drawn: &Drawn) -> Option<Box<dyn Job>> {
    match drawn {
        Drawn::Granted(moved) if !moved.is_repeat && !draw.lease.is_chosen() => {
            let levels = std::sync::Arc::clone(&draw.levels);
            let asked = Cancel { lease: draw.lease, step: 1, levels, is_watched: false };
            Some(Box::new(Call::unheard((*namespace, asked), cancel)))
        }
        Drawn::Granted(_) | Drawn::Refused(_) => None,
    }
}

fn spend(work: &mut Work<'_>, (namespace, draw): &On<Draw>) -> Result<Drawn, Trouble> {
    work.draws()?;
    let (connection, now) = (work.connection, work.now);
    work.space(*namespace)?.decide(connection, now, (draw.lease, &draw.levels), |desk| desk.spend(draw))
}

fn extend(work: &mut Work<'_>, (namespace, extend): &On<Extend>) -> Result<Drawn, Trouble> {
    work.draws()?;
    let (connection, now) = (work.connection, work.now);
    let on = (extend.lease, &*extend.levels);
    work.space(*namespace)?.decide(connection, now, on, |desk| desk.extend(extend))
}

fn adjust(work: &mut Work<'_>, (namespace, adjust): &On<Adjust>) -> Result<Moved, Trouble> {
    let (connection, now) = (work.connection, work.now);
    let on = (adjust.lease, &*adjust.levels);
    work.space(*namespace)?.decide(connection, now, on, |desk| desk.adjust(adjust))
}

fn renew(work: &mut Work<'_>, (namespace, renew): &On<Renew>) -> Result<Renewed, Trouble> {
    let (connection, now) = (work.connection, work.now);
    let on = (renew.lease, &*renew.levels);
    work.space(*namespace)?.decide(connection, now, on, |desk| desk.renew(renew))
}

fn settle(work: &mut Work<'_>, (namespace, settle): &On<Settle>) -> Result<Moved, Trouble> {
    let (connection, now) = (work.connection, work.now);
    let on = (settle.lease, &*settle.levels);
    work.space(*namespace)?.decide(connection, now, on, |desk| desk.settle(settle))
}

fn cancel(work: &mut Work<'_>, (namespace, cancel): &On<Cancel>) -> Result<Moved, Trouble> {
    let (connection, now) = (work.connection, work.now);
    let on = (cancel.lease, &*cancel.levels);
    work.space(*namespace)?.decide(connection, now, on, |desk| desk.cancel(cancel))
}
