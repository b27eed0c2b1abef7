//! Background housekeeping in small steps: deletes usage and audit entries past their retention, and repairs
//! the index.
//!
//! It cycles through all names of the index and all keys. The position is stored in Redis, so that processes
//! share a cycle and short-lived ones contribute. A step is small, and a claim with a TTL lets one process
//! run at a time in the background. The number of steps grows with the subjects that this process has added,
//! and with the lines that are old, so that cleaning keeps up with both.

use std::time::Duration;

use ::redis::Cmd;
use tidegate_core::time::Stamp;

use super::Redis;
use super::index::{Prefix, subject_named};
use super::keyspace::Keyspace;
use super::repair::ScanPosition;
use super::usage::is_old;
use crate::error::StoreError;
use crate::store::SweepReport;

/// Subjects that are cleaned in one step.
const SUBJECTS_PER_STEP: usize = 50;
/// The longest time that a process may claim the housekeeping.
const CLAIM_MAX: Duration = Duration::from_secs(86_400);
/// Lines of usage, and audit entries, that are deleted in one step.
const LINES_MAX: usize = 500;
/// Steps that a round adds because those before deleted [`LINES_MAX`] lines and left some.
const FULL_STEPS_MAX: usize = 100;

/// The position in both cycles.
#[derive(Debug, Default)]
struct Progress {
    /// The last name that was cleaned.
    name: Option<String>,
    keys: ScanPosition,
}

impl Redis {
    /// Ends up to `max` leases that are past their deadline, then does some housekeeping unless another
    /// process has claimed it.
    pub(super) async fn sweep_in_background(&self, max: usize) -> Result<(), StoreError> {
        self.sweep_up_to(max).await?;
        let span = self.inner.sweep_timer.every().clamp(Duration::from_millis(1), CLAIM_MAX).as_millis();
        let mut claim = Cmd::set(self.inner.keyspace.admin("tending"), 1);
        claim.arg("NX").arg("PX").arg(u64::try_from(span).unwrap_or(u64::MAX));
        if self.inner.connection.query(&claim).await? { self.clean_up().await } else { Ok(()) }
    }

    /// Ends up to `max` leases that are past their deadline, then does some housekeeping.
    pub(super) async fn sweep_and_clean_up(&self, max: usize) -> Result<SweepReport, StoreError> {
        let swept = self.sweep_up_to(max).await?;
        self.clean_up().await?;
        Ok(swept)
    }

    /// Cleans some subjects, deletes old audit entries and indexes some keys.
    async fn clean_up(&self) -> Result<(), StoreError> {
        let mut progress = self.load_progress().await?;
        let looked = self.read_values(Keyspace::admin_home(), &[]).await?;
        let wall = looked.at - looked.clock_offset;
        // More subjects than were added since, so that the cycle ends.
        let mut steps = 1 + (2 * self.inner.keyspace.take_registered()).div_ceil(SUBJECTS_PER_STEP);
        let steps_max = steps + FULL_STEPS_MAX;
        let mut step = 0;
        while step < steps {
            step += 1;
            let is_full;
            (progress.name, is_full) = self.clean_subjects(progress.name.as_deref(), wall).await?;
            steps = (steps + usize::from(is_full)).min(steps_max);
            // Saved at once, so that a later failure does not repeat it.
            self.save_progress(&progress).await?;
            if progress.name.is_none() && !is_full {
                break;
            }
        }
        let forgotten = match self.inner.options.retention.audit_before(looked.at) {
            Some(before) => {
                self.prune_audit(|entry| entry.at < before, FULL_STEPS_MAX * LINES_MAX).await.map(drop)
            }
            None => Ok(()),
        };
        let (_, keys) = self.index_some_keys(&progress.keys).await?;
        progress.keys = keys.unwrap_or_default();
        self.save_progress(&progress).await?;
        forgotten
    }

    /// Cleans some subjects after `after` and returns the last, `None` at the end of the cycle, and whether
    /// the next one may have more lines than one step deletes.
    async fn clean_subjects(
        &self,
        after: Option<&str>,
        now: Stamp,
    ) -> Result<(Option<String>, bool), StoreError> {
        let names = self.range(&Prefix::of(&["s"]), after, SUBJECTS_PER_STEP).await?;
        let (mut left, mut last) = (LINES_MAX, after.map(str::to_owned));
        for name in &names {
            match self.clean_subject(name, now, left).await {
                // This subject may have more lines.
                Ok(0) => return Ok((last, true)),
                Ok(lines) => left = lines,
                Err(error) if error.is_transient() => return Err(error),
                // It cannot be decoded, which reading it reports. It must not block the others.
                Err(_) => {}
            }
            last = Some(name.clone());
        }
        Ok((last.filter(|_| names.len() == SUBJECTS_PER_STEP), false))
    }

    /// Deletes a subject's usage past its retention, at most `left` lines, or removes the subject if it has
    /// none. Returns how many lines are left to delete.
    async fn clean_subject(&self, name: &str, now: Stamp, mut left: usize) -> Result<usize, StoreError> {
        let subject = &subject_named(name)?;
        let (keyspace, connection) = (&self.inner.keyspace, &self.inner.connection);
        let fields: Vec<Vec<u8>> = match keyspace.home_of(connection, &subject.entity).await? {
            Some(home) => connection.query(&Cmd::hkeys(keyspace.usage(home, subject))).await?,
            None => Vec::new(),
        };
        if fields.is_empty() {
            self.remove_if_unused(subject).await?;
            return Ok(left);
        }
        for (window, before) in self.inner.options.retention.usage_before(now) {
            // Usually nothing is old, which the field names show.
            if left > 0 && fields.iter().any(|field| is_old(field, window, before)) {
                left -= self.prune_subject(subject, window, before, left).await?;
            }
        }
        Ok(left)
    }

    async fn load_progress(&self) -> Result<Progress, StoreError> {
        let read = Cmd::hmget(self.inner.keyspace.admin("tended"), &["name", "server", "cursor"]);
        let found: (Option<String>, Option<String>, Option<u64>) = self.inner.connection.query(&read).await?;
        let keys = ScanPosition { server: found.1.unwrap_or_default(), cursor: found.2.unwrap_or(0) };
        Ok(Progress { name: found.0.filter(|name| !name.is_empty()), keys })
    }

    async fn save_progress(&self, progress: &Progress) -> Result<(), StoreError> {
        let Progress { name, keys } = progress;
        let mut keep = Cmd::hset(self.inner.keyspace.admin("tended"), "name", name.as_deref().unwrap_or(""));
        keep.arg("server").arg(&keys.server).arg("cursor").arg(keys.cursor);
        self.inner.connection.query(&keep).await
    }
}
