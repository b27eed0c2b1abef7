//! What can go wrong with a store, and whether it helps to try again.

use std::error::Error;
use std::time::Duration;

use thiserror::Error;
use tidegate_core::limit::entity::InvalidEntity;
use tidegate_core::limit::lease::{Ending, LeaseId};
use tidegate_core::limit::name::EntityId;
use tidegate_core::limit::policy::Version;
use tidegate_core::limit::token::{InvalidToken, TokenId};

/// Why a store did not do what it was asked to. Nothing was changed, except where the error is transient: then
/// it may have been, and asking again with the same lease and step, or the same expected version, finds out.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The engine cannot be reached, is starting, failing over or overloaded.
    #[error("the store is away: {what}")]
    Unavailable {
        /// What was seen.
        what: String,
        /// What it comes from.
        #[source]
        source: Option<Box<dyn Error + Send + Sync>>,
    },
    /// The engine did not answer in time. What was asked may have been done.
    #[error("the store did not answer within {millis} ms")]
    TimedOut {
        /// How long was waited.
        millis: u64,
    },
    /// Too many calls of this process wait for the engine, which is available. Nothing was done.
    #[error("the store is busy: {waiting_max} calls wait for {place}")]
    Busy {
        /// Where the engine is.
        place: String,
        /// How many calls may wait.
        waiting_max: usize,
        /// How long the first of them has waited: about as long as the next one would.
        retry_after: Duration,
    },
    /// The store was closed by this process. It never opens again: whoever wants it opens another.
    #[error("the store is closed: {what}")]
    Closed {
        /// Which one was closed.
        what: String,
    },
    /// The engine does not let us in.
    #[error("the store denies access: {what}")]
    Denied {
        /// What it said.
        what: String,
    },
    /// What the engine holds is not what we wrote.
    #[error("the store holds what it should not: {what}")]
    Corrupt {
        /// What was found where.
        what: String,
    },
    /// A bound was reached.
    #[error("the store is full: {max} {what}")]
    Full {
        /// What there are too many of.
        what: &'static str,
        /// The bound.
        max: u64,
    },
    /// Somebody else has written since.
    #[error("{what} is not as expected: {}", current_version(*current))]
    Stale {
        /// Which record.
        what: String,
        /// Its version now; `None` where it is not there.
        current: Option<Version>,
    },
    /// The lease has ended; nothing about it changes any more.
    #[error("the lease {lease} has ended: it was {how}")]
    Ended {
        /// Which lease.
        lease: LeaseId,
        /// How it ended.
        how: Ending,
    },
    /// A later step of the lease was done already.
    #[error("step {step} of the lease {lease} comes after step {done}")]
    Late {
        /// Which lease.
        lease: LeaseId,
        /// The step that came late.
        step: u32,
        /// The step that was done.
        done: u32,
    },
    /// There is no such lease: it never drew, or it ended long ago.
    #[error("there is no lease {lease}")]
    NoLease {
        /// Which lease.
        lease: LeaseId,
    },
    /// An entity that cannot be.
    #[error(transparent)]
    Entity(#[from] InvalidEntity),
    /// There is no such entity.
    #[error("there is no entity `{entity}`")]
    NoEntity {
        /// Which one.
        entity: EntityId,
    },
    /// An entity with others below it is not removed.
    #[error("the entity `{entity}` has {children} below it; move or remove them first")]
    HasChildren {
        /// Which one.
        entity: EntityId,
        /// How many.
        children: u64,
    },
    /// A token that cannot be.
    #[error(transparent)]
    Token(#[from] InvalidToken),
    /// There is no such token.
    #[error("there is no token `{token}`")]
    NoToken {
        /// Which one.
        token: TokenId,
    },
    /// Something asked for is outside its bounds.
    #[error("{what}")]
    Invalid {
        /// The field, the value and the bound.
        what: String,
    },
}

impl StoreError {
    /// An engine that is away, and why.
    pub fn unavailable(what: impl Into<String>) -> Self {
        Self::Unavailable { what: what.into(), source: None }
    }

    /// Whether the same call may succeed later: the engine is unavailable, or our queue to it is full. Everything else is an
    /// answer.
    pub const fn is_transient(&self) -> bool {
        self.is_unavailable() || matches!(self, Self::Busy { .. })
    }

    /// Whether the engine cannot be reached, or did not answer in time. It may have done the call.
    pub const fn is_unavailable(&self) -> bool {
        matches!(self, Self::Unavailable { .. } | Self::TimedOut { .. })
    }
}

fn current_version(current: Option<Version>) -> String {
    current.map_or_else(|| "it is not there".to_owned(), |version| format!("it is at version {version}"))
}
