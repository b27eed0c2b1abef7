//! Maps a request's cost to units of the shared limits, by limit name.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use smallvec::SmallVec;
use tidegate_core::cost::Cost;

/// Units by limit name, from a custom map.
type OwnedUnits = SmallVec<[(Cow<'static, str>, u64); 4]>;

/// How a cost maps to units of limits.
#[derive(Clone, Default)]
pub(super) enum Costs {
    /// One `rpm` per request, and one `tpm` per token of any kind, if there are any.
    #[default]
    Usual,
    /// A user-supplied function.
    Map(Arc<dyn Fn(Cost) -> OwnedUnits + Send + Sync>),
}

/// The units a request draws from each limit, by name.
#[derive(Debug)]
pub(super) enum CostUnits {
    Usual([(&'static str, u64); 2], usize),
    Map(OwnedUnits),
}

/// The same units in the form the limiter takes.
pub(super) type NamedUnits<'a> = SmallVec<[(&'a str, u64); 4]>;

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

    /// The units that `cost` draws from each limit.
    #[inline]
    pub(super) fn of(&self, cost: Cost) -> CostUnits {
        match self {
            Self::Usual => {
                let tokens = cost.total_tokens();
                let units = [("rpm", cost.request_count()), ("tpm", tokens)];
                CostUnits::Usual(units, 1 + usize::from(tokens > 0))
            }
            Self::Map(map) => CostUnits::Map(map(cost)),
        }
    }
}

impl CostUnits {
    /// With the units of `estimates` for all names in which `others` differ from them.
    pub(super) fn keep(self, estimates: &Self, others: &Self) -> Self {
        let (estimates, others) = (estimates.by_name(), others.by_name());
        let of = |named: &NamedUnits<'_>, name: &str| {
            named.iter().find(|(other, _)| *other == name).map_or(0, |(_, units)| *units)
        };
        let kept = estimates.iter().filter(|(name, units)| of(&others, name) != *units);
        let used = self.by_name();
        let used = used.iter().filter(|(name, _)| of(&estimates, name) == of(&others, name));
        Self::Map(used.chain(kept).map(|(name, units)| (Cow::Owned((*name).to_owned()), *units)).collect())
    }

    #[inline]
    pub(super) fn by_name(&self) -> NamedUnits<'_> {
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
