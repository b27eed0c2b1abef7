//! Every reason why a shared limit turns a caller away, each with when to come back.

use std::fmt;
use std::time::Duration;

use thiserror::Error;
use tidegate_core::limit::balance::Balance;
use tidegate_core::limit::cascade::{InvalidCost, Levels};
use tidegate_core::limit::entity::LEVELS_MAX;
use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::name::{EntityId, InvalidName, Subject};
use tidegate_core::limit::policy::InvalidPolicy;
use tidegate_core::limit::resolve::Source;
use tidegate_store::{Moved, StoreError};

use super::builder::DEADLINES;

/// Why nothing was drawn. Nothing was taken, unless the store is away: then what it may have taken is cancelled. Only a
/// spend whose answer was lost, and again when it was asked for once more, may stay spent.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LimitError {
    /// A limit is used up for now.
    #[error("{0}")]
    Limited(Box<Limited>),
    /// More is asked for than a limit ever holds: no amount of waiting would help.
    #[error("never possible: {0}")]
    TooLarge(Box<Limited>),
    /// Others of this process are waiting for the same subject.
    #[error("{ahead} callers are waiting for {subject} already{}", come_back(*retry_after))]
    Waiting {
        /// Whose limits.
        subject: Subject,
        /// How many.
        ahead: usize,
        /// When the first of them may be served, as far as is known.
        retry_after: Option<Duration>,
    },
    /// As many callers of this process wait as may, for a subject or for the store.
    #[error("{waiters_max} callers are waiting already, as many as may{}", come_back(*retry_after))]
    Busy {
        /// The bound.
        waiters_max: usize,
        /// When it is worth trying again, as far as is known.
        retry_after: Option<Duration>,
    },
    /// The limiter was closed; it never re-opens.
    #[error("the limiter is closed")]
    Closed,
    /// Nothing limits the subject: to refuse is safer than to let everything through.
    #[error(
        "nothing limits {subject}: write a policy for the system, for the resource `{}` or for the entity `{}`, or give the limiter defaults",
        subject.resource, subject.entity
    )]
    NoLimits {
        /// Whom.
        subject: Subject,
    },
    /// The cost cannot be asked for.
    #[error(transparent)]
    Cost(#[from] Box<InvalidCost>),
    /// A name cannot be.
    #[error(transparent)]
    Name(#[from] InvalidName),
    /// A limit given with the call cannot be.
    #[error(transparent)]
    Policy(#[from] InvalidPolicy),
    /// The lease's deadline is outside its bounds.
    #[error("a lease's deadline of {deadline:?}, outside {:?}..={:?}", DEADLINES.0, DEADLINES.1)]
    Deadline {
        /// The deadline.
        deadline: Duration,
    },
    /// The entity has too many levels above it, or is above itself.
    #[error("the entity `{entity}` draws from more than {LEVELS_MAX} levels")]
    Deep {
        /// Which one.
        entity: EntityId,
    },
    /// The id that the caller has chosen stands for another request: with another cost, deadline or limits of its own, or a
    /// draw where this is a spend.
    #[error("the id was used before, for another request")]
    Reused {
        /// The lease of that request.
        lease: LeaseId,
    },
    /// The store is away, and the policy says to let nobody in.
    #[error("{source}")]
    Unavailable {
        /// What is wrong.
        source: StoreError,
        /// When it is worth trying again.
        retry_after: Duration,
    },
    /// The store refused what was asked, and would again.
    #[error(transparent)]
    Store(StoreError),
}

impl LimitError {
    /// When it is worth asking again; `None` if never, or if time does not decide.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Limited(limited) => limited.retry_after(),
            Self::Waiting { retry_after, .. } | Self::Busy { retry_after, .. } => *retry_after,
            Self::Unavailable { retry_after, .. } => Some(*retry_after),
            _ => None,
        }
    }

    /// Whether asking again for the same can never help.
    pub const fn is_final(&self) -> bool {
        !matches!(
            self,
            Self::Limited(_) | Self::Waiting { .. } | Self::Busy { .. } | Self::Unavailable { .. }
        )
    }

    /// The limits that were asked, where a limit refused.
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

/// A refusal: every limit that was asked, of every level.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limited {
    /// The limits, the subject's own first.
    pub lines: Vec<LimitLine>,
}

/// A limit's state, and which policy it comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LimitLine {
    /// The state.
    pub balance: Balance,
    /// Where the limit is written.
    pub source: Source,
}

impl Limited {
    pub(super) fn new(levels: &Levels, moved: &Moved, units: &[Option<u64>]) -> Self {
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

    /// The limit that is short for longest.
    pub fn primary(&self) -> Option<&LimitLine> {
        // Never is longer than any time.
        self.short().max_by_key(|line| line.balance.retry_after.unwrap_or(Duration::MAX))
    }

    /// When all of it can be had at the earliest; `None` if never.
    pub fn retry_after(&self) -> Option<Duration> {
        self.primary()?.balance.retry_after
    }

    /// Whether one of the limits never holds what was asked of it.
    pub fn is_never(&self) -> bool {
        self.lines.iter().any(|line| line.balance.retry_after.is_none())
    }

    /// The error that this refusal is.
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
            write!(f, "{before}{} (by {})", line.balance, line.source)?;
        }
        f.write_str(&come_back(self.retry_after()))
    }
}

fn come_back(retry_after: Option<Duration>) -> String {
    retry_after.map_or_else(String::new, |span| format!("; come back in {span:?}"))
}
