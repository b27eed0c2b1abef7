//! Idempotent draws: a request with a caller-chosen id can be retried and is charged once.
//!
//! Nothing is cancelled when a response is lost, here or on its way: the caller retries with the same id. The
//! store decides by the id whether a draw is new; a repeat is compared with what the store still knows of the
//! first request.

use std::collections::BTreeMap;
use std::sync::Arc;

use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::rule::Rule;
use tidegate_store::{Draw, DrawResult, LeaseSnapshot, LeaseStatus, Readings, Settle, StoreError};

use super::Shared;
use super::acquire::Kind;
use super::error::LimitError;
use super::lease::{Backing, Lease};

impl Shared {
    /// Draws, unless it was drawn before. `unavailable` is the store's error, if it could not be called.
    pub(super) async fn draw_idempotent(
        self: &Arc<Self>,
        draw: Draw,
        kind: Kind,
        unavailable: Option<StoreError>,
    ) -> Result<Lease, LimitError> {
        if let Some(error) = unavailable {
            return self.without_store(draw, kind, error).await;
        }
        let reply = match kind {
            Kind::Draw => self.store.draw(&draw),
            Kind::Spend | Kind::SpendWithBalances => self.store.spend(&draw),
        };
        let answer = if self.is_immediate {
            reply.await
        } else {
            self.breaker.call(reply).await.map_err(StoreError::from)
        };
        let is_repeat = |drawn: &DrawResult| matches!(drawn, DrawResult::Granted(moved) if moved.is_repeat);
        match (kind, answer) {
            (Kind::Draw, Ok(drawn)) if is_repeat(&drawn) => self.replay(&draw, drawn).await,
            (_, Ok(drawn)) => self.finish_draw(draw, drawn, kind),
            // Its limits have changed since the first draw.
            (Kind::Draw, Err(error @ StoreError::Invalid { .. })) => {
                self.drawn_before(&draw).await?.ok_or(LimitError::Store(error))
            }
            (
                Kind::Spend | Kind::SpendWithBalances,
                Err(StoreError::Ended { lease, .. } | StoreError::Late { lease, .. }),
            ) => Err(LimitError::Reused { lease }),
            (_, Err(error)) if error.is_unavailable() => self.without_store(draw, kind, error).await,
            (_, Err(error)) => Err(self.failure(error)),
        }
    }

    /// The lease drawn before, with its current limits.
    async fn replay(self: &Arc<Self>, draw: &Draw, drawn: DrawResult) -> Result<Lease, LimitError> {
        let (DrawResult::Granted(moved) | DrawResult::Refused(moved)) = drawn;
        let found = self.drawn_before(draw).await?;
        // It has ended and was forgotten since the store's response.
        let mut lease = found.ok_or(LimitError::Store(StoreError::NoLease { lease: draw.lease }))?;
        (lease.at, lease.readings) = (moved.at, moved.readings);
        Ok(lease)
    }

    /// The open lease with this id that the same request drew; `None` if there is none.
    pub(super) async fn drawn_before(self: &Arc<Self>, draw: &Draw) -> Result<Option<Lease>, LimitError> {
        let (backing, held) = match self.standing(draw.lease).await {
            Ok((backing, LeaseStatus::Open(held))) => (backing, held),
            Ok((_, LeaseStatus::Ended(ended))) => {
                let how = ended.how;
                return Err(LimitError::Store(StoreError::Ended { lease: draw.lease, how }));
            }
            Err(LimitError::Store(StoreError::NoLease { .. })) => return Ok(None),
            Err(error) => return Err(error),
        };
        if backing == Backing::Store && !is_same(&held, draw) {
            return Err(LimitError::Reused { lease: draw.lease });
        }
        let LeaseSnapshot { at, levels, record } = held;
        let drawn = Draw { levels, units: record.held().into(), ..draw.clone() };
        let mut lease = self.lease(drawn, at, Readings::new(), (backing, Kind::Draw))?;
        let Settle { step, .. } = &mut lease.now;
        *step = record.step();
        lease.time_left = Some(record.deadline().since(at));
        Ok(Some(lease))
    }
}

/// Whether this request drew the lease, as far as that can be decided: once the lease was extended or
/// adjusted, its first amounts are unknown.
fn is_same(held: &LeaseSnapshot, draw: &Draw) -> bool {
    let LeaseSnapshot { levels, record, .. } = held;
    let is_as_drawn = || {
        amounts(levels, record.held()) == amounts(&draw.levels, &draw.units)
            && record.stepped_at() + draw.terms.deadline == record.deadline()
    };
    levels.subject() == draw.levels.subject()
        && rules_of_call(levels).eq(rules_of_call(&draw.levels))
        && (record.step() > 0 || is_as_drawn())
}

/// The units drawn per limit, without zeros.
fn amounts<'a>(levels: &'a Levels, units: &[Option<u64>]) -> BTreeMap<&'a str, u64> {
    let named = levels.names().iter().zip(units);
    named.filter_map(|(name, units)| Some((name.as_str(), units.filter(|units| *units > 0)?))).collect()
}

/// The limits given with the call.
fn rules_of_call(levels: &Levels) -> impl Iterator<Item = &Rule> {
    let own = levels.levels().first().into_iter().flat_map(|level| &level.limits);
    own.map(|line| &*line.rule).filter(|rule| rule.is_of_call())
}
