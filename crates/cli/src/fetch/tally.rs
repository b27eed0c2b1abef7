//! The counts of a fetch, per host and in total.

use std::time::Duration;

use super::gates::{ThrottleState, UserLimit};
use super::result::{PageOutcome, PageResult, SkipReason};
use crate::output::{Table, Tint};

/// Failures listed in the final report; the journal has all of them.
pub(crate) const FAILURES_SHOWN: usize = 10;
/// Hosts with a row of their own in the final report.
const HOSTS_SHOWN: usize = 40;

/// Counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) done: u64,
    pub(crate) there: u64,
    pub(crate) twice: u64,
    pub(crate) robots: u64,
    pub(crate) failed: u64,
    pub(crate) bytes: u64,
    pub(crate) attempts: u64,
    /// Attempts that failed or were rejected.
    pub(crate) errors: u64,
}

impl Tally {
    pub(crate) const fn skipped(&self) -> u64 {
        self.there + self.twice + self.robots
    }

    /// Pages that have ended.
    pub(crate) const fn ended(&self) -> u64 {
        self.done + self.skipped() + self.failed
    }

    pub(crate) const fn count(&mut self, result: &PageResult) {
        match &result.outcome {
            PageOutcome::Done(page) => {
                self.done += 1;
                self.bytes += page.body.bytes();
            }
            PageOutcome::Skipped(SkipReason::Exists) => self.there += 1,
            PageOutcome::Skipped(SkipReason::Duplicate) => self.twice += 1,
            PageOutcome::Skipped(SkipReason::Robots) => self.robots += 1,
            PageOutcome::Failed(_) => self.failed += 1,
        }
    }

    pub(crate) const fn add(&mut self, other: &Self) {
        self.done += other.done;
        self.there += other.there;
        self.twice += other.twice;
        self.robots += other.robots;
        self.failed += other.failed;
        self.bytes += other.bytes;
        self.attempts += other.attempts;
        self.errors += other.errors;
    }
}

/// A host's counts, its speed, and the state of its throttle.
#[derive(Debug, Default)]
pub(crate) struct HostLine {
    pub(crate) host: String,
    pub(crate) tally: Tally,
    /// Requests per second, from the first to the last.
    pub(crate) per_second: Option<f64>,
    /// The limit of the user that kept it from a higher rate.
    pub(crate) limited_by: Option<UserLimit>,
    pub(crate) throttle: ThrottleState,
    /// Why the host was given up.
    pub(crate) gave_up: Option<String>,
}

/// The result of a fetch.
#[derive(Debug)]
pub(crate) struct Summary {
    pub(crate) hosts: Vec<HostLine>,
    pub(crate) total: Tally,
    /// Input lines that are not valid addresses.
    pub(crate) bad: u64,
    /// Pages that were read and have not ended.
    pub(crate) unfinished: u64,
    pub(crate) is_interrupted: bool,
    pub(crate) took: Duration,
    /// The first failures, each with its reason.
    pub(crate) failures: Vec<(Box<str>, String)>,
    /// Failures that a later run would repeat.
    pub(crate) final_failures: u64,
}

impl HostLine {
    /// The share of attempts that failed or were rejected.
    pub(crate) fn error_rate(&self) -> Option<f64> {
        #[expect(clippy::cast_precision_loss, reason = "a share")]
        let attempts = self.tally.attempts as f64;
        (self.tally.attempts > 0).then(|| per(self.tally.errors, attempts))
    }
}

impl Summary {
    /// The table of hosts, those with most pages first.
    pub(crate) fn table(&self) -> Table {
        let mut table = Table::new([
            "HOST",
            ">DONE",
            ">SKIPPED",
            ">FAILED",
            ">SIZE",
            ">ATTEMPTS",
            ">PER SECOND",
            ">LIMIT",
        ]);
        let speed = |speed: Option<f64>| speed.map_or_else(|| "-".to_owned(), |speed| format!("{speed:.1}"));
        let row = |table: &mut Table, name: String, tally: &Tally, per_second, limit| {
            let tint = if tally.failed > 0 { Tint::Bad } else { Tint::Plain };
            let counts = [tally.done, tally.skipped(), tally.failed].map(|count| count.to_string());
            let [done, skipped, failed] = counts;
            let (size, attempts) = (size(tally.bytes), tally.attempts.to_string());
            table
                .tinted(tint, [name, done, skipped, failed, size, attempts, speed(per_second), speed(limit)]);
        };
        let (shown, rest) = self.hosts.split_at(self.hosts.len().min(HOSTS_SHOWN));
        for line in shown {
            row(&mut table, line.host.clone(), &line.tally, line.per_second, line.throttle.limit);
        }
        if !rest.is_empty() {
            let mut others = Tally::default();
            for line in rest {
                others.add(&line.tally);
            }
            row(&mut table, format!("({} others)", rest.len()), &others, None, None);
        }
        if self.hosts.len() > 1 {
            let seconds = self.took.as_secs_f64();
            let speed = (seconds > 0.0).then(|| per(self.total.attempts, seconds));
            row(&mut table, "all".to_owned(), &self.total, speed, None);
        }
        table
    }
}

#[expect(clippy::cast_precision_loss, reason = "shown with one digit")]
pub(crate) fn per(count: u64, seconds: f64) -> f64 {
    count as f64 / seconds
}

/// A number of bytes for people.
#[expect(clippy::cast_precision_loss, reason = "shown with one digit")]
pub(crate) fn size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["kB", "MB", "GB", "TB", "PB"];
    if bytes < 1_000 {
        return format!("{bytes} B");
    }
    let mut size = bytes as f64 / 1_000.0;
    let mut units = UNITS.into_iter();
    let mut unit = units.next();
    while size >= 999.95
        && let Some(next) = units.next()
    {
        size /= 1_000.0;
        unit = Some(next);
    }
    format!("{size:.1} {}", unit.unwrap_or("PB"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_picks_a_unit_after_rounding() {
        let table =
            [(0, "0 B"), (999, "999 B"), (1_000, "1.0 kB"), (999_949, "999.9 kB"), (999_950, "1.0 MB")];
        for (bytes, words) in table {
            assert_eq!(size(bytes), words);
        }
        assert_eq!(size(u64::MAX), "18446.7 PB");
    }
}
