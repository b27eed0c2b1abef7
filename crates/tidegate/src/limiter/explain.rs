//! Reads without drawing: balances, explanations and retry times.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tidegate_core::duration::Rounded;
use tidegate_core::limit::balance::Balance;
use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::meter::Meter;
use tidegate_core::limit::name::{EntityId, Subject};
use tidegate_core::limit::policy::{OnExpiry, OnUnavailable, Version};
use tidegate_core::limit::resolve::Source;
use tidegate_core::limit::rule::Rule;
use tidegate_core::time::Stamp;
use tidegate_store::{Bucket, BucketSnapshot, Lookup};

use super::acquire::SubjectRef;
use super::error::{LimitError, LimitLine, Limited};
use super::request::{Request, refuse_disabled};
use super::{Limiter, Shared};

/// The result that a draw would have, and why. Nothing was drawn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Explanation {
    /// The subject.
    pub subject: Subject,
    /// Every limit of every level that takes part, or could, the subject's own first.
    pub lines: Vec<LimitLine>,
    /// The result.
    pub would: Would,
    /// What happens while the store is unavailable, and the source of that rule.
    pub on_unavailable: (OnUnavailable, Source),
    /// What happens to leases that are never ended, and the source of that rule.
    pub on_expiry: (OnExpiry, Source),
    /// The version of the policies that this is based on.
    pub version: Version,
}

/// The result that a draw would have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Would {
    /// Granted.
    Grant,
    /// Refused until the given time has passed.
    Wait(Duration),
    /// Refused forever.
    Never,
}

impl Request<'_> {
    /// The result that a draw would have, without drawing: every limit, the policy that defines it, and its
    /// state.
    ///
    /// # Errors
    /// As [`Limiter::try_acquire`], for invalid requests and an unavailable store.
    ///
    /// # Cancel safety
    /// Draws nothing.
    pub async fn explain(self) -> Result<Explanation, LimitError> {
        let (levels, _) = self.levels().await?;
        refuse_disabled(&levels)?;
        let units = levels.units(self.cost())?;
        let subjects = levels.levels().iter().map(|level| level.subject.clone()).collect();
        let lookup = Lookup::Subjects(subjects);
        let seen = self.shared().call_store(self.shared().store.balances(&lookup)).await?;
        let requested =
            Limited { lines: lines(&levels, &by_subject(&seen), seen.at, (&units, LimitFilter::Requested)) };
        let lines = lines(&levels, &by_subject(&seen), seen.at, (&units, LimitFilter::All));
        let would = match requested.primary() {
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
    /// The store's response to an acquire, without drawing. Waiters of this process are not considered.
    ///
    /// # Errors
    /// As [`try_acquire`](Self::try_acquire), for invalid requests and an unavailable store.
    ///
    /// # Cancel safety
    /// Draws nothing.
    pub async fn explain<'a>(
        &self,
        subject: impl Into<SubjectRef<'a>>,
        cost: impl AsRef<[(&'a str, u64)]>,
    ) -> Result<Explanation, LimitError> {
        self.request(subject.into(), cost.as_ref()).explain().await
    }

    /// The time until `cost` is available if no other caller draws; zero means now. Waiters of this process
    /// are not considered. After a change of the rate this assumes that the next draw happens now: until a
    /// draw, the level refills at the rate of the last draw.
    ///
    /// # Errors
    /// [`LimitError::TooLarge`] if never; otherwise as [`explain`](Self::explain).
    ///
    /// # Cancel safety
    /// Draws nothing.
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

    /// The balances of a subject and of the ancestors it draws from, in one round trip.
    ///
    /// # Errors
    /// As [`try_acquire`](Self::try_acquire), for invalid requests and an unavailable store.
    ///
    /// # Cancel safety
    /// Draws nothing.
    pub async fn balances<'a>(
        &self,
        subject: impl Into<SubjectRef<'a>>,
    ) -> Result<Vec<LimitLine>, LimitError> {
        let mut all = self.balances_of_all(&[subject.into()]).await?;
        Ok(all.pop().unwrap_or_default())
    }

    /// The balances of many subjects, each with its ancestors, in one round trip.
    ///
    /// # Errors
    /// As [`balances`](Self::balances).
    ///
    /// # Cancel safety
    /// Draws nothing.
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
        let seen = self.shared.call_store(self.shared.store.balances(&Lookup::Subjects(wanted))).await?;
        let buckets = by_subject(&seen);
        let of = |levels: &Arc<Levels>| {
            let units = vec![Some(0); levels.names().len()];
            lines(levels, &buckets, seen.at, (&units, LimitFilter::All))
        };
        Ok(all.iter().map(of).collect())
    }

    /// The balances of everything an entity has drawn, and of everything its ancestors have, in one round
    /// trip. Units that are only [recorded](crate::Request::recorded) have no limit, and are not included.
    ///
    /// # Errors
    /// [`LimitError::Name`] for an invalid name, and as [`try_acquire`](Self::try_acquire) for an unavailable store.
    ///
    /// # Cancel safety
    /// Draws nothing.
    pub async fn balances_of_entity(&self, entity: &str) -> Result<Vec<Balance>, LimitError> {
        let lookup = Lookup::Lineage(EntityId::new(entity)?);
        let seen = self.shared.call_store(self.shared.store.balances(&lookup)).await?;
        let balances = |bucket: &Bucket| {
            let balance = |meter: &Meter| Balance::of(&bucket.subject, meter, 0, seen.at);
            let limits = bucket.meters.iter().filter(|meter| !meter.rule().only_records());
            limits.map(balance).collect::<Vec<_>>()
        };
        Ok(seen.buckets.iter().flat_map(balances).collect())
    }
}

/// Which limits to list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LimitFilter {
    /// Only limits that the request draws from.
    Requested,
    /// All limits.
    All,
}

/// Buckets by subject.
pub(super) type BucketMap<'a> = BTreeMap<&'a Subject, &'a Bucket>;

pub(super) fn by_subject(seen: &BucketSnapshot) -> BucketMap<'_> {
    seen.buckets.iter().map(|bucket| (&bucket.subject, bucket)).collect()
}

/// The limits of every level as read; a missing bucket is full.
pub(super) fn lines(
    levels: &Levels,
    seen: &BucketMap<'_>,
    at: Stamp,
    (units, filter): (&[Option<u64>], LimitFilter),
) -> Vec<LimitLine> {
    let mut lines = Vec::new();
    for level in levels.levels() {
        let bucket = seen.get(&level.subject).copied();
        for line in
            level.limits.iter().filter(|line| filter == LimitFilter::All || units[line.name].is_some())
        {
            let requested = units[line.name].unwrap_or(0);
            let meter = meter(bucket, &line.rule, levels.version(), at);
            let balance = Balance::of(&level.subject, &meter, requested, at);
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
    /// The limits that the request exceeds forever, by the known rules.
    pub(super) fn never_granted(levels: &Levels, units: &[Option<u64>]) -> Option<Limited> {
        let mut lines = lines(levels, &BucketMap::new(), Stamp::ZERO, (units, LimitFilter::Requested));
        lines.retain(|line| line.balance.retry_after.is_none());
        (!lines.is_empty()).then_some(Limited { lines })
    }
}

impl fmt::Display for Explanation {
    /// One line with the result, then one line per limit.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.would {
            Would::Grant => writeln!(f, "{} would be granted", self.subject)?,
            Would::Wait(span) => {
                writeln!(f, "{} would be refused; retry after {}", self.subject, Rounded(span))?;
            }
            Would::Never => writeln!(f, "{} would never be granted", self.subject)?,
        }
        for line in &self.lines {
            let mark = if line.balance.is_short() { "short" } else { "ok   " };
            writeln!(f, "  {mark}  {} (by {})", line.balance, line.source)?;
        }
        Ok(())
    }
}
