//! The engine: steps are calls that go to the server in batches, everything else is read and written beside them.

use std::sync::Arc;

use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::name::{EntityId, ResourceName};
use tidegate_core::limit::policy::Version;
use tidegate_core::limit::usage::Usage;
use tidegate_core::time::Stamp;

use super::batch::ROWS_MAX;
use super::call::{Answer, Call, Status};
use super::{Postgres, listing, records};
use crate::buckets::{Bucket, Lookup, Moved, Renewed, Seen, Standing};
use crate::changes::Changes;
use crate::codec::levels_from_text;
use crate::cursor::UsagePlace;
use crate::engine::{Applied, Change, Engine, Step};
use crate::error::StoreError;
use crate::ledger::{Prune, UsageQuery};
use crate::record::{Key, Record, RecordWrite, Records, Scan};
use crate::reply::Reply;
use crate::shared_engine::{check_levels, drew_from, fits, tell};
use crate::store::{Capabilities, Clocked, Swept};

impl Engine for Postgres {
    fn about(&self) -> Capabilities {
        Capabilities {
            engine: "postgres",
            is_immediate: false,
            is_durable: true,
            clock: Clocked::Engine,
            deadline: self.inner.deadline,
        }
    }

    fn apply_step<'a>(&'a self, step: Step<'a>) -> Reply<'a, Applied> {
        Reply::later(async move {
            let Answer { status, at, is_repeat, extra, readings } = self.step(step.into()).await?;
            if matches!(step.change, Change::Renew(_)) {
                let deadline = Stamp::from_micros(extra.unsigned_abs());
                return Ok(Applied::Renewed(Renewed { at, is_repeat, deadline }));
            }
            let moved = Moved { at, is_repeat, readings };
            let is_refused = matches!(status, Status::Refused);
            Ok(if is_refused { Applied::Refused(moved) } else { Applied::Granted(moved) })
        })
    }

    fn find_lease(&self, lease: LeaseId) -> Reply<'_, Standing> {
        Reply::later(async move {
            match listing::standing(&self.inner, self.namespace, lease).await? {
                Standing::Open(held) if held.record.is_due(held.at) => {
                    self.sweep_what_is_due().await?;
                    listing::standing(&self.inner, self.namespace, lease).await
                }
                standing => Ok(standing),
            }
        })
    }

    fn look<'a>(&'a self, lookup: &'a Lookup) -> Reply<'a, Seen> {
        Reply::later(async move {
            let (seen, is_any_due) = listing::balances(&self.inner, self.namespace, lookup).await?;
            if !is_any_due {
                return Ok(seen);
            }
            // Leases that are past their deadline end first.
            self.sweep_what_is_due().await?;
            Ok(listing::balances(&self.inner, self.namespace, lookup).await?.0)
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
            listing::buckets(&self.inner, self.namespace, resource, after.as_ref(), max).await
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
            listing::usage(&self.inner, self.namespace, query, after, max).await
        })
    }

    fn prune_ledger<'a>(&'a self, prune: &'a Prune, max: usize) -> Reply<'a, u64> {
        Reply::later(self.prune_up_to(prune, max))
    }

    fn sweep_leases(&self, max: usize) -> Reply<'_, Swept> {
        Reply::later(self.sweep_up_to(max))
    }

    fn read_records<'a>(&'a self, keys: &'a [Key]) -> Reply<'a, Records> {
        Reply::later(records::read(&self.inner, self.namespace, keys))
    }

    fn scan_records<'a>(&'a self, scan: &'a Scan) -> Reply<'a, Vec<Record>> {
        Reply::later(records::scan(&self.inner, self.namespace, scan))
    }

    fn write_records<'a>(&'a self, write: &'a RecordWrite) -> Reply<'a, bool> {
        Reply::later(records::write(&self.inner, self.namespace, write))
    }

    fn newest_version(&self) -> Reply<'_, Version> {
        Reply::later(records::newest_version(&self.inner, self.namespace))
    }

    fn chain<'a>(&'a self, id: &'a EntityId, max: usize) -> Reply<'a, Vec<Record>> {
        Reply::later(records::chain(&self.inner, self.namespace, id, max))
    }

    fn announcements(&self) -> Option<Changes> {
        Some(self.changes.clone())
    }
}

impl Postgres {
    /// Makes a step. Anything but success and a refusal is an error.
    async fn step(&self, call: Call) -> Result<Answer, StoreError> {
        check_levels(&call.levels)?;
        fits(&call.levels, call.numbers.len())?;
        let (lease, step) = (call.lease, call.step);
        let asked = Arc::clone(&call.levels);
        let mut answer = self.lanes.call(call.clone()).await?;
        if let Status::OtherLevels(text) = &answer.status {
            // The lease is moved where it drew, by the rules that it drew by.
            let drawn = Arc::new(levels_from_text(text)?);
            drew_from(lease, &drawn, &asked)?;
            answer = self.lanes.call(Call { levels: Arc::clone(&drawn), ..call }).await?;
            tell(&mut answer.readings, &drawn, &asked);
        }
        match answer.status {
            Status::Done | Status::Refused => Ok(answer),
            Status::Ended(how) => Err(StoreError::Ended { lease, how }),
            Status::Late { done } => Err(StoreError::Late { lease, step, done }),
            Status::NoLease => Err(StoreError::NoLease { lease }),
            Status::OtherLevels(_) => Err(StoreError::Corrupt {
                what: format!("the levels of the lease {lease} are not as they were written"),
            }),
            Status::Full => Err(StoreError::Full {
                what: "limits of one subject",
                max: u64::from(ROWS_MAX.unsigned_abs()),
            }),
        }
    }
}
