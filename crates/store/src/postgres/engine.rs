//! The engine trait on PostgreSQL: steps go to the server in batches; records and buckets are read and
//! written in single statements.

use std::sync::Arc;

use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::name::{EntityId, ResourceName};
use tidegate_core::limit::usage::Usage;
use tidegate_core::time::Stamp;

use super::batch::ROWS_MAX;
use super::call::{Call, Status, StepReply};
use super::{Postgres, listing, records};
use crate::buckets::{Bucket, BucketSnapshot, LeaseStatus, Lookup, Movement, Renewal};
use crate::changes::Changes;
use crate::codec::levels_from_text;
use crate::cursor::UsagePlace;
use crate::engine::{Change, Engine, Step, StepResult};
use crate::error::StoreError;
use crate::ledger::{Prune, UsageQuery};
use crate::record::{Key, Record, RecordWrite, Records, Scan};
use crate::reply::Reply;
use crate::shared_engine::{attach_rules, check_levels, drew_from, fits};
use crate::store::{Capabilities, ClockSource, SweepReport};

impl Engine for Postgres {
    fn about(&self) -> Capabilities {
        Capabilities {
            engine: "postgres",
            is_immediate: false,
            is_durable: true,
            clock: ClockSource::Engine,
            deadline: self.inner.deadline,
        }
    }

    fn apply_step<'a>(&'a self, step: Step<'a>) -> Reply<'a, StepResult> {
        Reply::later(async move {
            let StepReply { status, at, is_repeat, extra, readings } = self.step(step.into()).await?;
            if matches!(step.change, Change::Renew(_)) {
                let deadline = Stamp::from_micros(extra.unsigned_abs());
                return Ok(StepResult::Renewed(Renewal { at, is_repeat, deadline }));
            }
            let moved = Movement { at, is_repeat, readings };
            let is_refused = matches!(status, Status::Refused);
            Ok(if is_refused { StepResult::Refused(moved) } else { StepResult::Granted(moved) })
        })
    }

    fn find_lease(&self, lease: LeaseId) -> Reply<'_, LeaseStatus> {
        Reply::later(async move {
            match listing::standing(&self.inner, self.namespace, lease).await? {
                LeaseStatus::Open(held) if held.record.is_due(held.at) => {
                    self.sweep_all_due().await?;
                    listing::standing(&self.inner, self.namespace, lease).await
                }
                standing => Ok(standing),
            }
        })
    }

    fn look<'a>(&'a self, lookup: &'a Lookup) -> Reply<'a, BucketSnapshot> {
        Reply::later(async move {
            let (seen, is_any_due) = listing::balances(&self.inner, self.namespace, lookup).await?;
            if !is_any_due {
                return Ok(seen);
            }
            // Leases past their deadline are ended first.
            self.sweep_all_due().await?;
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
            self.sweep_all_due().await?;
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
            self.sweep_all_due().await?;
            listing::usage(&self.inner, self.namespace, query, after, max).await
        })
    }

    fn prune_ledger<'a>(&'a self, prune: &'a Prune, max: usize) -> Reply<'a, u64> {
        Reply::later(self.prune_up_to(prune, max))
    }

    fn sweep_leases(&self, max: usize) -> Reply<'_, SweepReport> {
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

    fn chain<'a>(&'a self, id: &'a EntityId, max: usize) -> Reply<'a, Vec<Record>> {
        Reply::later(records::chain(&self.inner, self.namespace, id, max))
    }

    fn announcements(&self) -> Option<Changes> {
        Some(self.changes.clone())
    }
}

impl Postgres {
    /// Runs a step. Any result other than success or refusal is an error.
    async fn step(&self, call: Call) -> Result<StepReply, StoreError> {
        check_levels(&call.levels)?;
        fits(&call.levels, call.numbers.len())?;
        let (lease, step) = (call.lease, call.step);
        let requested = Arc::clone(&call.levels);
        let mut answer = self.steps.call(call.clone()).await?;
        if let Status::OtherLevels(text) = &answer.status {
            // The lease is changed at the levels that it drew from, by the rules of that time.
            let drawn = Arc::new(levels_from_text(text)?);
            drew_from(lease, &drawn, &requested)?;
            answer = self.steps.call(Call { levels: Arc::clone(&drawn), ..call }).await?;
            attach_rules(&mut answer.readings, &drawn, &requested);
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
