//! Looking after what is kept, a little now and then: usage and audit that are too old are forgotten, and the index is
//! repaired.
//!
//! Somebody goes round all names of the index, and round all keys. How far is kept at the engine: all processes go round
//! together, and one that comes and goes takes part. Each step is small, and in passing at most one is made at a time, however
//! many processes draw. It grows with the subjects that its process has added, so that the index does not.

use std::time::Duration;

use ::redis::Value;
use tidegate_core::time::Stamp;

use super::Redis;
use super::index::Prefix;
use super::places::Places;
use super::repair::Among;
use super::tallies::is_old;
use crate::error::StoreError;
use crate::store::Swept;
use crate::tables::subject;

/// Names that are looked after in one step.
const NAMES: usize = 50;
/// Whoever looks after the rest has no longer than this to itself.
const TENDED_WITHIN: Duration = Duration::from_secs(86_400);
/// Lines of usage, and entries of the audit, that are forgotten in one step.
const LINES_MAX: usize = 500;

/// How far the rounds are.
#[derive(Debug, Default)]
struct Rounds {
    /// The last name that was looked after.
    name: Option<String>,
    keys: Among,
}

impl Redis {
    /// Ends some leases that are past their deadline, and looks after some of the rest unless somebody else does.
    pub(super) async fn sweep_in_passing(&self, max: usize) -> Result<(), StoreError> {
        self.sweep_up_to(max).await?;
        let mut claim = ::redis::cmd("SET");
        claim.arg(self.inner.places.admin("tending")).arg(1).arg("NX");
        claim
            .arg("PX")
            .arg(self.inner.swept_every.as_millis().clamp(1, TENDED_WITHIN.as_millis()).to_string());
        match self.inner.link.query(&claim).await? {
            Value::Okay => self.tend().await,
            _ => Ok(()),
        }
    }

    /// Ends up to `max` leases that are past their deadline, and looks after some of the rest.
    pub(super) async fn sweep_and_tend(&self, max: usize) -> Result<Swept, StoreError> {
        let swept = self.sweep_up_to(max).await?;
        self.tend().await?;
        Ok(swept)
    }

    /// Looks after some names and some keys.
    async fn tend(&self) -> Result<(), StoreError> {
        let mut rounds = self.rounds().await?;
        let looked = self.look_for(Places::center(), &[]).await?;
        let wall = looked.at - looked.clock_offset;
        // More names than were added meanwhile: else there would be ever more.
        for _ in 0..=(2 * self.inner.places.take_registered()).div_ceil(NAMES) {
            rounds.name = self.tend_names(rounds.name.as_deref(), wall).await?;
            // Kept at once: what fails after it does not hold it up.
            self.keep_rounds(&rounds).await?;
            if rounds.name.is_none() {
                break;
            }
        }
        let forgotten = match self.inner.retention.audit_before(looked.at) {
            Some(before) => self.forget_audit(|entry| entry.at < before, LINES_MAX).await.map(drop),
            None => Ok(()),
        };
        let (_, keys) = self.make_some_known(&rounds.keys).await?;
        rounds.keys = keys.unwrap_or_default();
        self.keep_rounds(&rounds).await?;
        forgotten
    }

    /// Looks after some of the names behind `after`, and answers the last; none where the round is over.
    async fn tend_names(&self, after: Option<&str>, now: Stamp) -> Result<Option<String>, StoreError> {
        let names = self.range(&Prefix::of(&["s"]), after, NAMES).await?;
        let (mut left, mut last) = (LINES_MAX, after.map(str::to_owned));
        for name in &names {
            match self.tend_name(name, now, left).await {
                // There may be more of this one.
                Ok(0) => return Ok(last),
                Ok(lines) => left = lines,
                Err(error) if error.is_transient() => return Err(error),
                // It is not as we write it. Whoever asks for it is told so; others must not wait behind it.
                Err(_) => {}
            }
            last = Some(name.clone());
        }
        Ok(last.filter(|_| names.len() == NAMES))
    }

    /// Forgets a subject's usage that is too old, at most `left` lines, or the subject itself if there is nothing of it.
    /// Answers how many lines are left.
    async fn tend_name(&self, name: &str, now: Stamp, mut left: usize) -> Result<usize, StoreError> {
        let (entity, resource) = name.split_once('\0').unwrap_or((name, ""));
        let subject = &subject(entity, resource)?;
        let (places, link) = (&self.inner.places, &self.inner.link);
        let fields: Vec<Vec<u8>> = match places.home_of(link, &subject.entity).await? {
            Some(home) => {
                let mut read = ::redis::cmd("HKEYS");
                let answer = link.query(read.arg(places.usage(home, subject))).await?;
                ::redis::from_redis_value(answer).map_err(|error| link.whose().trouble(error.into()))?
            }
            None => Vec::new(),
        };
        if fields.is_empty() {
            self.forget_if_gone(subject).await?;
            return Ok(left);
        }
        for (window, before) in self.inner.retention.usage_before(now) {
            // Mostly nothing is, and that shows in the names of the fields.
            if left > 0 && fields.iter().any(|field| is_old(field, window, before)) {
                left -= self.prune_subject(subject, window, before, left).await?;
            }
        }
        Ok(left)
    }

    async fn rounds(&self) -> Result<Rounds, StoreError> {
        let mut read = ::redis::cmd("HMGET");
        read.arg(self.inner.places.admin("tended")).arg("name").arg("server").arg("cursor");
        let mut found = self.values(self.inner.link.query(&read).await?)?.into_iter();
        let mut text = || {
            let part = found.next().flatten().unwrap_or_default();
            String::from_utf8(part).unwrap_or_default()
        };
        let (name, server, cursor) = (text(), text(), text());
        let keys = Among { server, cursor: cursor.parse().unwrap_or(0) };
        Ok(Rounds { name: Some(name).filter(|name| !name.is_empty()), keys })
    }

    async fn keep_rounds(&self, rounds: &Rounds) -> Result<(), StoreError> {
        let mut keep = ::redis::cmd("HSET");
        keep.arg(self.inner.places.admin("tended")).arg("name").arg(rounds.name.as_deref().unwrap_or(""));
        keep.arg("server").arg(&rounds.keys.server).arg("cursor").arg(rounds.keys.cursor);
        self.inner.link.query(&keep).await.map(drop)
    }
}
