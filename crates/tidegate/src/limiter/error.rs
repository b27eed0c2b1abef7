//! The errors of a shared limit, with retry times.

use std::fmt;
use std::time::Duration;

use thiserror::Error;
use tidegate_core::duration::{Exact, Rounded};
use tidegate_core::limit::balance::Balance;
use tidegate_core::limit::cascade::{InvalidCost, Levels};
use tidegate_core::limit::entity::LEVELS_MAX;
use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::name::{EntityId, InvalidName, Subject};
use tidegate_core::limit::policy::InvalidPolicy;
use tidegate_core::limit::resolve::Source;
use tidegate_store::{Movement, StoreError};

use super::builder::DEADLINES;

/// Why nothing was drawn. No units were taken, unless the store is unavailable: then a draw that may have
/// happened is cancelled. Only a spend whose response was lost twice may stay spent.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LimitError {
    /// A limit is used up for now.
    #[error("{0}")]
    Limited(Box<Limited>),
    /// The request exceeds a limit's capacity: no amount of waiting would help.
    #[error("never possible: {0}")]
    TooLarge(Box<Limited>),
    /// Other callers of this process wait for the same subject.
    #[error("{ahead} callers are already waiting for {subject}{}", retry_hint(*retry_after))]
    Waiting {
        /// The subject.
        subject: Subject,
        /// The number of waiters. For a caller that has waited itself it is an upper bound: callers that left before their
        /// turn may be included.
        ahead: usize,
        /// When the first of them can be served, if known.
        retry_after: Option<Duration>,
    },
    /// The maximum number of callers of this process wait, for a subject or for the store.
    #[error("{waiters_max} callers are already waiting, which is the maximum{}", retry_hint(*retry_after))]
    Busy {
        /// The maximum.
        waiters_max: usize,
        /// When to retry, if known.
        retry_after: Option<Duration>,
    },
    /// The limiter was closed; it cannot be re-opened.
    #[error("the limiter is closed")]
    Closed,
    /// The subject has no limits: refusing is safer than admitting everything.
    #[error(
        "no limits for {subject}: write a policy for the system, for the resource `{}` or for the entity `{}`, or set defaults on the limiter",
        subject.resource, subject.entity
    )]
    NoLimits {
        /// The subject.
        subject: Subject,
    },
    /// The entity is disabled, or one that it draws from.
    #[error("the entity `{entity}` is disabled: requests of {subject} are refused")]
    Disabled {
        /// The subject.
        subject: Subject,
        /// The disabled entity.
        entity: EntityId,
    },
    /// The cost is invalid.
    #[error(transparent)]
    Cost(#[from] Box<InvalidCost>),
    /// A name is invalid.
    #[error(transparent)]
    Name(#[from] InvalidName),
    /// A limit given with the call is invalid.
    #[error(transparent)]
    Policy(#[from] InvalidPolicy),
    /// The lease's deadline is out of bounds.
    #[error("lease deadline is {}, outside {}..={}", Exact(*.deadline), Exact(DEADLINES.0), Exact(DEADLINES.1))]
    Deadline {
        /// The deadline.
        deadline: Duration,
    },
    /// The entity has too many ancestors, or is its own ancestor.
    #[error("the entity `{entity}` draws from more than {LEVELS_MAX} levels")]
    Deep {
        /// The entity.
        entity: EntityId,
    },
    /// The caller-chosen id belongs to a different request: with another cost, deadline or limits, or a draw
    /// instead of a spend.
    #[error("the id was already used for a different request")]
    Reused {
        /// The lease of that request.
        lease: LeaseId,
    },
    /// The store is unavailable, and the policy blocks all callers.
    #[error("{source}")]
    Unavailable {
        /// The store's error.
        source: StoreError,
        /// When to retry.
        retry_after: Duration,
    },
    /// The store refused the request, and would refuse it again.
    #[error(transparent)]
    Store(StoreError),
}

impl LimitError {
    /// When to retry; `None` if a retry cannot succeed or time does not decide.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Limited(limited) => limited.retry_after(),
            Self::Waiting { retry_after, .. } | Self::Busy { retry_after, .. } => *retry_after,
            Self::Unavailable { retry_after, .. } => Some(*retry_after),
            _ => None,
        }
    }

    /// Whether retrying the same request can never succeed.
    pub const fn is_final(&self) -> bool {
        !matches!(
            self,
            Self::Limited(_) | Self::Waiting { .. } | Self::Busy { .. } | Self::Unavailable { .. }
        )
    }

    /// The limits drawn from, if a limit refused.
    pub fn limited(&self) -> Option<&Limited> {
        match self {
            Self::Limited(limited) | Self::TooLarge(limited) => Some(limited),
            _ => None,
        }
    }
}

impl From<InvalidCost> for LimitError {
    fn from(invalid: InvalidCost) -> Self {
        Self::Cost(Box::new(invalid))
    }
}

/// A refusal: the state of every limit drawn from, on every level.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limited {
    /// The limits, the subject's own first.
    pub lines: Vec<LimitLine>,
}

/// A limit's state and the policy that defines it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LimitLine {
    /// The state.
    pub balance: Balance,
    /// The policy that defines the limit.
    pub source: Source,
}

impl Limited {
    pub(super) fn new(levels: &Levels, moved: &Movement, units: &[Option<u64>]) -> Self {
        let line = |reading: &tidegate_store::Reading| {
            let level = &levels.levels()[reading.level];
            let asked = units.get(reading.name).copied().flatten().unwrap_or(0);
            let source = level.limits.iter().find(|line| line.name == reading.name);
            LimitLine {
                balance: Balance::of(&level.subject, &reading.meter(levels), asked, moved.at),
                source: source.map_or(Source::Defaults, |line| line.source.clone()),
            }
        };
        Self { lines: moved.readings.iter().map(line).collect() }
    }

    /// The limits that are short.
    pub fn short(&self) -> impl Iterator<Item = &LimitLine> {
        self.lines.iter().filter(|line| line.balance.is_short())
    }

    /// The limit that is short for the longest time.
    pub fn primary(&self) -> Option<&LimitLine> {
        // Never is longer than any duration.
        self.short().max_by_key(|line| line.balance.retry_after.unwrap_or(Duration::MAX))
    }

    /// The earliest time at which the whole cost is available; `None` if never.
    pub fn retry_after(&self) -> Option<Duration> {
        self.primary()?.balance.retry_after
    }

    /// Whether the request exceeds the capacity of one of the limits.
    pub fn is_never(&self) -> bool {
        self.lines.iter().any(|line| line.balance.retry_after.is_none())
    }

    /// The error for this refusal.
    pub(super) fn into_error(self) -> LimitError {
        if self.is_never() {
            LimitError::TooLarge(Box::new(self))
        } else {
            LimitError::Limited(Box::new(self))
        }
    }
}

impl fmt::Display for Limited {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, line) in self.short().enumerate() {
            let before = if number == 0 { "" } else { "; " };
            let LimitLine { balance, source } = line;
            write!(f, "{before}limit \"{}\" exceeded for {}: ", balance.limit, balance.subject)?;
            let (available, burst, requested) = (balance.available, balance.burst, balance.asked);
            write!(f, "{available} of {burst} available, {requested} requested (by {source})")?;
        }
        f.write_str(&retry_hint(self.retry_after()))
    }
}

fn retry_hint(retry_after: Option<Duration>) -> String {
    retry_after.map_or_else(String::new, |span| format!("; retry after {}", Rounded(span)))
}
