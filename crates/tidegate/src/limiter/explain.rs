//! Looking without taking: balances, explanations, and when something can be had.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tidegate_core::limit::balance::Balance;
use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::meter::Meter;
use tidegate_core::limit::name::{EntityId, Subject};
use tidegate_core::limit::policy::{OnExpiry, OnUnavailable, Version};
use tidegate_core::limit::resolve::Source;
use tidegate_core::limit::rule::Rule;
use tidegate_core::time::Stamp;
use tidegate_store::{Bucket, Lookup, Seen};

use super::acquire::SubjectRef;
use super::error::{LimitError, LimitLine, Limited};
use super::request::Request;
use super::{Limiter, Shared};

/// What would happen, and why: nothing was taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Explanation {
    /// Who asked, and for what.
    pub subject: Subject,
    /// Every limit that would be asked, or could be, of every level, the subject's own first.
    pub lines: Vec<LimitLine>,
    /// What would happen.
    pub would: Would,
    /// What happens when the store is away, and who says so.
    pub on_unavailable: (OnUnavailable, Source),
    /// What becomes of leases that are never ended, and who says so.
    pub on_expiry: (OnExpiry, Source),
    /// The count of administrative changes that this is as of.
    pub version: Version,
}

/// What would happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Would {
    /// It would be granted.
    Grant,
    /// It would be refused, and can be had after this long.
    Wait(Duration),
    /// It can never be had.
    Never,
}

impl Request<'_> {
    /// What would happen, taking nothing: every limit, the policy it comes from, and its state.
    ///
    /// # Errors
    /// As [`Limiter::acquire`], for what cannot be asked and for a store that is away.
    ///
    /// # Cancel safety
    /// Nothing is taken.
    pub async fn explain(self) -> Result<Explanation, LimitError> {
        let (levels, _) = self.levels().await?;
        let units = levels.units(self.cost())?;
        let subjects = levels.levels().iter().map(|level| level.subject.clone()).collect();
        let lookup = Lookup::Subjects(subjects);
        let seen = self.shared().ask(self.shared().store.balances(&lookup)).await?;
        let asked = Limited { lines: lines(&levels, &by_subject(&seen), seen.at, (&units, Asked::Only)) };
        let lines = lines(&levels, &by_subject(&seen), seen.at, (&units, Asked::OrNot));
        let would = match asked.primary() {
            None => Would::Grant,
            Some(line) => line.balance.retry_after.map_or(Would::Never, Would::Wait),
        };
        Ok(Explanation {
            subject: levels.subject().clone(),
            lines,
            would,
            on_unavailable: levels.on_unavailable().clone(),
            on_expiry: levels.on_expiry().clone(),
            version: levels.version(),
        })
    }
}

impl Limiter {
    /// What the store would answer to an acquire, taking nothing. Those of this process who wait are not counted.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire), for what cannot be asked and for a store that is away.
    ///
    /// # Cancel safety
    /// Nothing is taken.
    pub async fn explain<'a>(
        &self,
        subject: impl Into<SubjectRef<'a>>,
        cost: impl AsRef<[(&'a str, u64)]>,
    ) -> Result<Explanation, LimitError> {
        self.request(subject.into(), cost.as_ref()).explain().await
    }

    /// How long until `cost` can be had, if nobody else takes it: zero is now. Those of this process who wait for the
    /// same subject are not counted. After a change of the rate it is told as if the next draw were now: until then the
    /// level grows by the rate that the bucket was last drawn by.
    ///
    /// # Errors
    /// [`LimitError::TooLarge`] if never; else as [`explain`](Self::explain).
    ///
    /// # Cancel safety
    /// Nothing is taken.
    pub async fn time_until_available<'a>(
        &self,
        subject: impl Into<SubjectRef<'a>>,
        cost: impl AsRef<[(&'a str, u64)]>,
    ) -> Result<Duration, LimitError> {
        let explanation = self.explain(subject, cost).await?;
        match explanation.would {
            Would::Grant => Ok(Duration::ZERO),
            Would::Wait(span) => Ok(span),
            Would::Never => {
                let mut lines = explanation.lines;
                lines.retain(|line| line.balance.retry_after.is_none());
                Err(LimitError::TooLarge(Box::new(Limited { lines })))
            }
        }
    }

    /// The balances of a subject and of those above it that it draws from, in one round trip.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire), for what cannot be asked and for a store that is away.
    ///
    /// # Cancel safety
    /// Nothing is taken.
    pub async fn balances<'a>(
        &self,
        subject: impl Into<SubjectRef<'a>>,
    ) -> Result<Vec<LimitLine>, LimitError> {
        let mut all = self.balances_of_all(&[subject.into()]).await?;
        Ok(all.pop().unwrap_or_default())
    }

    /// The balances of many subjects, each with those above it, in one round trip.
    ///
    /// # Errors
    /// As [`balances`](Self::balances).
    ///
    /// # Cancel safety
    /// Nothing is taken.
    pub async fn balances_of_all(
        &self,
        subjects: &[SubjectRef<'_>],
    ) -> Result<Vec<Vec<LimitLine>>, LimitError> {
        let mut all: Vec<Arc<Levels>> = Vec::with_capacity(subjects.len());
        for subject in subjects {
            all.push(self.shared.levels(*subject).await?.0);
        }
        let mut wanted: Vec<Subject> =
            all.iter().flat_map(|levels| levels.levels()).map(|level| level.subject.clone()).collect();
        wanted.sort_unstable();
        wanted.dedup();
        let seen = self.shared.ask(self.shared.store.balances(&Lookup::Subjects(wanted))).await?;
        let buckets = by_subject(&seen);
        let of = |levels: &Arc<Levels>| {
            let units = vec![Some(0); levels.names().len()];
            lines(levels, &buckets, seen.at, (&units, Asked::OrNot))
        };
        Ok(all.iter().map(of).collect())
    }

    /// The balances of everything an entity has used, and of everything those have that it draws from, in one round
    /// trip.
    ///
    /// # Errors
    /// [`LimitError::Name`] for a name that cannot be, and as [`acquire`](Self::acquire) for a store that is away.
    ///
    /// # Cancel safety
    /// Nothing is taken.
    pub async fn balances_of_entity(&self, entity: &str) -> Result<Vec<Balance>, LimitError> {
        let lookup = Lookup::Lineage(EntityId::new(entity)?);
        let seen = self.shared.ask(self.shared.store.balances(&lookup)).await?;
        let balances = |bucket: &Bucket| {
            let balance = |meter: &Meter| Balance::of(&bucket.subject, meter, 0, seen.at);
            bucket.meters.iter().map(balance).collect::<Vec<_>>()
        };
        Ok(seen.buckets.iter().flat_map(balances).collect())
    }
}

/// Which limits are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Asked {
    /// Those that something is asked of.
    Only,
    /// The others too.
    OrNot,
}

/// Buckets that were seen, to be found.
pub(super) type Found<'a> = BTreeMap<&'a Subject, &'a Bucket>;

pub(super) fn by_subject(seen: &Seen) -> Found<'_> {
    seen.buckets.iter().map(|bucket| (&bucket.subject, bucket)).collect()
}

/// The limits of every level, as they were seen; what is not there is full.
pub(super) fn lines(
    levels: &Levels,
    seen: &Found<'_>,
    at: Stamp,
    (units, wanted): (&[Option<u64>], Asked),
) -> Vec<LimitLine> {
    let mut lines = Vec::new();
    for level in levels.levels() {
        let bucket = seen.get(&level.subject).copied();
        for line in level.limits.iter().filter(|line| wanted == Asked::OrNot || units[line.name].is_some()) {
            let asked = units[line.name].unwrap_or(0);
            let meter = meter(bucket, &line.rule, levels.version(), at);
            let balance = Balance::of(&level.subject, &meter, asked, at);
            lines.push(LimitLine { balance, source: line.source.clone() });
        }
    }
    lines
}

/// A limit's state as a draw would find it.
fn meter(bucket: Option<&Bucket>, rule: &Arc<Rule>, version: Version, at: Stamp) -> Meter {
    let found = bucket.and_then(|bucket| bucket.meters.iter().find(|meter| meter.rule().row() == rule.row()));
    let mut meter = found.cloned().unwrap_or_else(|| Meter::new(Arc::clone(rule), version));
    meter.follow(rule, version, at);
    meter
}

impl Shared {
    /// What could never be had, by the rules that are known.
    pub(super) fn never(levels: &Levels, units: &[Option<u64>]) -> Option<Limited> {
        let mut lines = lines(levels, &Found::new(), Stamp::ZERO, (units, Asked::Only));
        lines.retain(|line| line.balance.retry_after.is_none());
        (!lines.is_empty()).then_some(Limited { lines })
    }
}

impl fmt::Display for Explanation {
    /// One line for people per limit, and what would happen.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.would {
            Would::Grant => writeln!(f, "{} would be granted", self.subject)?,
            Would::Wait(span) => writeln!(f, "{} would be refused; come back in {span:?}", self.subject)?,
            Would::Never => writeln!(f, "{} could never be granted this", self.subject)?,
        }
        for line in &self.lines {
            let mark = if line.balance.is_short() { "short" } else { "there" };
            writeln!(f, "  {mark}  {} (by {})", line.balance, line.source)?;
        }
        Ok(())
    }
}
