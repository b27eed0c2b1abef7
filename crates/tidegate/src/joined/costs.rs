//! What a request costs the shared limits: units by the names of the limits, made of a request's own cost.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use smallvec::SmallVec;
use tidegate_core::cost::Cost;

/// Units by limit, as a map of one's own says them.
type Named = SmallVec<[(Cow<'static, str>, u64); 4]>;

/// How a cost becomes units of limits.
#[derive(Clone, Default)]
pub(super) enum Costs {
    /// One `rpm`, and a `tpm` for each token where there are any.
    #[default]
    Usual,
    /// A function of the caller's.
    Map(Arc<dyn Fn(Cost) -> Named + Send + Sync>),
}

/// What a request asks of each limit, by name.
#[derive(Debug)]
pub(super) enum Asked {
    Usual([(&'static str, u64); 2], usize),
    Map(Named),
}

/// The same as the limiter reads it.
pub(super) type Said<'a> = SmallVec<[(&'a str, u64); 4]>;

impl Costs {
    pub(super) fn map<I, N>(map: impl Fn(Cost) -> I + Send + Sync + 'static) -> Self
    where
        I: IntoIterator<Item = (N, u64)>,
        N: Into<Cow<'static, str>>,
    {
        Self::Map(Arc::new(move |cost| {
            map(cost).into_iter().map(|(name, units)| (name.into(), units)).collect()
        }))
    }

    /// What `cost` asks of each limit.
    #[inline]
    pub(super) fn of(&self, cost: Cost) -> Asked {
        match self {
            Self::Usual => Asked::Usual([("rpm", 1), ("tpm", cost.tokens)], 1 + usize::from(cost.tokens > 0)),
            Self::Map(map) => Asked::Map(map(cost)),
        }
    }
}

impl Asked {
    #[inline]
    pub(super) fn said(&self) -> Said<'_> {
        match self {
            Self::Usual(units, count) => SmallVec::from_slice(&units[..*count]),
            Self::Map(named) => named.iter().map(|(name, units)| (&**name, *units)).collect(),
        }
    }
}

impl fmt::Debug for Costs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Usual => "Usual",
            Self::Map(_) => "Map",
        })
    }
}
