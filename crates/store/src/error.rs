//! The error of stores, and whether a retry may succeed.

use std::error::Error;
use std::time::Duration;

use thiserror::Error;
use tidegate_core::duration::Rounded;
use tidegate_core::limit::entity::InvalidEntity;
use tidegate_core::limit::lease::{Ending, LeaseId};
use tidegate_core::limit::name::EntityId;
use tidegate_core::limit::policy::Version;
use tidegate_core::limit::token::{InvalidToken, TokenId};

/// The error of a call. Nothing was changed, unless the error is transient: the call may then have been
/// applied, and a retry with the same lease and step, or the same expected version, is safe.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The engine cannot be reached, is starting, failing over or overloaded.
    #[error("the store is unavailable: {what}")]
    Unavailable {
        /// What happened.
        what: String,
        /// The cause.
        #[source]
        source: Option<Box<dyn Error + Send + Sync>>,
    },
    /// The engine did not respond in time. The call may have been applied.
    #[error("the store did not respond within {}", Rounded(Duration::from_millis(*millis)))]
    TimedOut {
        /// The timeout.
        millis: u64,
    },
    /// Too many calls of this process wait for the engine, which is available. Nothing was applied.
    #[error("the store is busy: {waiting_max} calls wait for {place}")]
    Busy {
        /// The address of the engine.
        place: String,
        /// The maximum number of waiting calls.
        waiting_max: usize,
        /// How long the first of them has waited, an estimate for the next one.
        retry_after: Duration,
    },
    /// The store was closed by this process and stays closed. Open another one.
    #[error("the store is closed: {what}")]
    Closed {
        /// The store.
        what: String,
    },
    /// The engine denied access.
    #[error("the store denies access: {what}")]
    Denied {
        /// The engine's message.
        what: String,
    },
    /// Stored data is not as it was written.
    #[error("the store has corrupt data: {what}")]
    Corrupt {
        /// The data, and what is wrong with it.
        what: String,
    },
    /// A bound was reached.
    #[error("the store is full: {max} {what}")]
    Full {
        /// What the bound counts.
        what: &'static str,
        /// The bound.
        max: u64,
    },
    /// Another writer was faster: the expected version is stale.
    #[error("{what} is not as expected: {}", current_version(*current))]
    Stale {
        /// The record.
        what: String,
        /// Its current version; `None` if it does not exist.
        current: Option<Version>,
    },
    /// The lease has ended and cannot change any more.
    #[error("the lease {lease} has ended: it was {how}")]
    Ended {
        /// The lease.
        lease: LeaseId,
        /// How it ended.
        how: Ending,
    },
    /// A later step of the lease was already applied.
    #[error("step {step} of the lease {lease} arrived after step {done}")]
    Late {
        /// The lease.
        lease: LeaseId,
        /// The late step.
        step: u32,
        /// The last step applied.
        done: u32,
    },
    /// The lease is unknown: it never drew, or it ended long ago.
    #[error("there is no lease {lease}")]
    NoLease {
        /// The lease.
        lease: LeaseId,
    },
    /// An entity is invalid.
    #[error(transparent)]
    Entity(#[from] InvalidEntity),
    /// The entity does not exist.
    #[error("there is no entity `{entity}`")]
    NoEntity {
        /// Its id.
        entity: EntityId,
    },
    /// The entity has children and cannot be removed.
    #[error("the entity `{entity}` has children: {children}; move or remove them first")]
    HasChildren {
        /// Its id.
        entity: EntityId,
        /// The number of children.
        children: u64,
    },
    /// A token is invalid.
    #[error(transparent)]
    Token(#[from] InvalidToken),
    /// The token does not exist.
    #[error("there is no token `{token}`")]
    NoToken {
        /// Its id.
        token: TokenId,
    },
    /// An argument is invalid.
    #[error("{what}")]
    Invalid {
        /// The field, the value and the bound.
        what: String,
    },
}

impl StoreError {
    /// An [`Unavailable`](Self::Unavailable) error with this reason.
    pub fn unavailable(what: impl Into<String>) -> Self {
        Self::Unavailable { what: what.into(), source: None }
    }

    /// The same error for another caller, without its source, which cannot be cloned.
    #[allow(dead_code, reason = "used by the engines that send calls together")]
    pub(crate) fn duplicate(&self) -> Self {
        match self {
            Self::TimedOut { millis } => Self::TimedOut { millis: *millis },
            Self::Closed { what } => Self::Closed { what: what.clone() },
            Self::Denied { what } => Self::Denied { what: what.clone() },
            Self::Corrupt { what } => Self::Corrupt { what: what.clone() },
            Self::Invalid { what } => Self::Invalid { what: what.clone() },
            Self::Unavailable { what, .. } => Self::unavailable(what.clone()),
            other => Self::unavailable(other.to_string()),
        }
    }

    /// Whether the same call may succeed later: the engine is unavailable, or the queue to it is full. All
    /// other errors are final.
    pub const fn is_transient(&self) -> bool {
        self.is_unavailable() || matches!(self, Self::Busy { .. })
    }

    /// Whether the engine cannot be reached or did not respond in time. It may have applied the call.
    pub const fn is_unavailable(&self) -> bool {
        matches!(self, Self::Unavailable { .. } | Self::TimedOut { .. })
    }
}

fn current_version(current: Option<Version>) -> String {
    current.map_or_else(|| "it does not exist".to_owned(), |version| format!("it is at version {version}"))
}
