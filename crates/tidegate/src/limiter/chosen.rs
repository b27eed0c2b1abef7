//! Draws with an id that the caller has chosen: to ask again is to ask for the same lease.
//!
//! Nothing is cancelled when an answer is lost, here or on its way: whoever has chosen an id asks again with it. The store
//! decides by the id whether a draw is new; what it was is compared with what the store still knows of it.

use std::collections::BTreeMap;
use std::sync::Arc;

use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::rule::Rule;
use tidegate_store::{Draw, Drawn, Held, Readings, Settle, Standing, StoreError};

use super::Shared;
use super::acquire::Kind;
use super::error::LimitError;
use super::lease::{Backing, Lease};

impl Shared {
    /// Draws, unless it was done before. `away` is what is wrong with the store, if it could not be asked.
    pub(super) async fn draw_chosen(
        self: &Arc<Self>,
        draw: Draw,
        kind: Kind,
        away: Option<StoreError>,
    ) -> Result<Lease, LimitError> {
        if let Some(error) = away {
            return self.without_store(draw, kind, error).await;
        }
        let reply = match kind {
            Kind::Draw => self.store.draw(&draw),
            Kind::Spend | Kind::Tell => self.store.spend(&draw),
        };
        let answer = if self.is_immediate {
            reply.await
        } else {
            self.guard.call(reply).await.map_err(StoreError::from)
        };
        let is_repeat = |drawn: &Drawn| matches!(drawn, Drawn::Granted(moved) if moved.is_repeat);
        match (kind, answer) {
            (Kind::Draw, Ok(drawn)) if is_repeat(&drawn) => self.again(&draw, drawn).await,
            (_, Ok(drawn)) => self.answered(draw, drawn, kind),
            // It drew from what were its limits then; they have changed.
            (Kind::Draw, Err(error @ StoreError::Invalid { .. })) => {
                self.drawn_before(&draw).await?.ok_or(LimitError::Store(error))
            }
            (
                Kind::Spend | Kind::Tell,
                Err(StoreError::Ended { lease, .. } | StoreError::Late { lease, .. }),
            ) => Err(LimitError::Reused { lease }),
            (_, Err(error)) if error.is_unavailable() => self.without_store(draw, kind, error).await,
            (_, Err(error)) => Err(self.failure(error)),
        }
    }

    /// The lease that was drawn before, told of with the limits as they are.
    async fn again(self: &Arc<Self>, draw: &Draw, drawn: Drawn) -> Result<Lease, LimitError> {
        let (Drawn::Granted(moved) | Drawn::Refused(moved)) = drawn;
        let found = self.drawn_before(draw).await?;
        // It has ended, and was forgotten, since the store told of it.
        let mut lease = found.ok_or(LimitError::Store(StoreError::NoLease { lease: draw.lease }))?;
        (lease.at, lease.readings) = (moved.at, moved.readings);
        Ok(lease)
    }

    /// The lease of this id, if it is open and was drawn by the same request; `None` where there is none.
    pub(super) async fn drawn_before(self: &Arc<Self>, draw: &Draw) -> Result<Option<Lease>, LimitError> {
        let (backing, held) = match self.standing(draw.lease).await {
            Ok((backing, Standing::Open(held))) => (backing, held),
            Ok((_, Standing::Ended(ended))) => {
                let how = ended.how;
                return Err(LimitError::Store(StoreError::Ended { lease: draw.lease, how }));
            }
            Err(LimitError::Store(StoreError::NoLease { .. })) => return Ok(None),
            Err(error) => return Err(error),
        };
        if backing == Backing::Store && !is_same(&held, draw) {
            return Err(LimitError::Reused { lease: draw.lease });
        }
        let Held { at, levels, record } = held;
        let drawn = Draw { levels, units: record.held().into(), ..draw.clone() };
        let mut lease = self.lease(drawn, at, Readings::new(), (backing, Kind::Draw))?;
        let Settle { step, .. } = &mut lease.now;
        *step = record.step();
        lease.left = Some(record.deadline().since(at));
        Ok(Some(lease))
    }
}

/// Whether a lease was drawn by this request, as far as it can be told: what it holds has changed if it went on.
fn is_same(held: &Held, draw: &Draw) -> bool {
    let Held { levels, record, .. } = held;
    let is_as_drawn = || {
        amounts(levels, record.held()) == amounts(&draw.levels, &draw.units)
            && record.stepped_at() + draw.terms.deadline == record.deadline()
    };
    levels.subject() == draw.levels.subject()
        && rules_of_call(levels).eq(rules_of_call(&draw.levels))
        && (record.step() > 0 || is_as_drawn())
}

/// How much of each limit that anything is taken of.
fn amounts<'a>(levels: &'a Levels, units: &[Option<u64>]) -> BTreeMap<&'a str, u64> {
    let named = levels.names().iter().zip(units);
    named.filter_map(|(name, units)| Some((name.as_str(), units.filter(|units| *units > 0)?))).collect()
}

/// The limits that were given with the call.
fn rules_of_call(levels: &Levels) -> impl Iterator<Item = &Rule> {
    let own = levels.levels().first().into_iter().flat_map(|level| &level.limits);
    own.map(|line| &*line.rule).filter(|rule| rule.is_of_call())
}
