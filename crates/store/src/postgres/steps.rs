//! The steps of a lease, each a call that goes with others; and balances, which are read beside them.

use std::sync::Arc;

use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::name::ResourceName;
use tidegate_core::time::Stamp;

use super::batch::ROWS_MAX;
use super::call::{Answer, Call, Kind, Status};
use super::{Postgres, listing};
use crate::buckets::{
    Adjust, Bucket, Buckets, Cancel, Draw, Drawn, Extend, Lookup, Moved, Renew, Renewed, Seen, Settle,
    Standing,
};
use crate::codec::levels_from_text;
use crate::desk::{check_levels, check_renewal, drew_from, fits, tell};
use crate::error::StoreError;
use crate::page::{Page, Paging};
use crate::reply::Reply;

impl Buckets for Postgres {
    fn draw<'a>(&'a self, asked: &'a Draw) -> Reply<'a, Drawn> {
        Reply::later(async move { Ok(drawn(self.step(Call::draw(Kind::Draw, asked)).await?)) })
    }

    fn extend<'a>(&'a self, asked: &'a Extend) -> Reply<'a, Drawn> {
        Reply::later(async move { Ok(drawn(self.step(Call::extend(asked)).await?)) })
    }

    fn adjust<'a>(&'a self, asked: &'a Adjust) -> Reply<'a, Moved> {
        Reply::later(async move { Ok(moved(self.step(Call::adjust(asked)).await?)) })
    }

    fn renew<'a>(&'a self, asked: &'a Renew) -> Reply<'a, Renewed> {
        Reply::later(async move {
            check_renewal(asked)?;
            let Answer { at, is_repeat, extra, .. } = self.step(Call::renew(asked)).await?;
            Ok(Renewed { at, is_repeat, deadline: Stamp::from_micros(extra.unsigned_abs()) })
        })
    }

    fn settle<'a>(&'a self, asked: &'a Settle) -> Reply<'a, Moved> {
        Reply::later(async move { Ok(moved(self.step(Call::settle(asked)).await?)) })
    }

    fn cancel<'a>(&'a self, asked: &'a Cancel) -> Reply<'a, Moved> {
        Reply::later(async move { Ok(moved(self.step(Call::cancel(asked)).await?)) })
    }

    fn spend<'a>(&'a self, asked: &'a Draw) -> Reply<'a, Drawn> {
        Reply::later(async move { Ok(drawn(self.step(Call::draw(Kind::Spend, asked)).await?)) })
    }

    fn lease(&self, lease: LeaseId) -> Reply<'_, Standing> {
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

    fn balances<'a>(&'a self, lookup: &'a Lookup) -> Reply<'a, Seen> {
        Reply::later(async move {
            let (seen, is_any_due) = listing::balances(&self.inner, self.namespace, lookup).await?;
            if !is_any_due {
                return Ok(seen);
            }
            // Whoever looks at balances means those of leases that are past their deadline too.
            self.sweep_what_is_due().await?;
            Ok(listing::balances(&self.inner, self.namespace, lookup).await?.0)
        })
    }

    fn buckets<'a>(&'a self, resource: &'a ResourceName, paging: &'a Paging) -> Reply<'a, Page<Bucket>> {
        Reply::later(async move {
            self.sweep_what_is_due().await?;
            listing::buckets(&self.inner, self.namespace, resource, paging).await
        })
    }
}

impl Postgres {
    /// Has a step made. What is not done is an error, but for a refusal.
    pub(super) async fn step(&self, call: Call) -> Result<Answer, StoreError> {
        check_levels(&call.levels)?;
        fits(&call.levels, call.numbers.len())?;
        let (lease, step) = (call.lease, call.step);
        let asked = Arc::clone(&call.levels);
        let mut answer = self.lanes.call(call.clone()).await?;
        if let Status::OtherLevels(text) = &answer.status {
            // The lease is moved where it drew, by the rules that it drew by.
            let drawn: Arc<Levels> = Arc::new(levels_from_text(text)?);
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

fn drawn(answer: Answer) -> Drawn {
    if matches!(answer.status, Status::Refused) {
        return Drawn::Refused(moved(answer));
    }
    Drawn::Granted(moved(answer))
}

fn moved(answer: Answer) -> Moved {
    Moved { at: answer.at, is_repeat: answer.is_repeat, readings: answer.readings }
}
