//! Counts the replayed requests by subject and limit.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::time::Duration;

use tidegate::{LimitName, Stamp, Subject};

use super::log::Line;
use super::simulation::Verdict;
use crate::format;

/// Maximum rows; requests of further rows are counted in the totals only.
const ROWS_MAX: usize = 100_000;

/// A subject and one of its limits.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Key {
    subject: Subject,
    limit: LimitName,
}

impl Key {
    pub(crate) fn words(&self) -> [&str; 3] {
        [self.subject.entity.as_str(), self.subject.resource.as_str(), self.limit.as_str()]
    }
}

/// The results of the requests to one limit.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Row {
    /// All requests. Those neither granted nor refused by this limit were refused by another.
    pub(crate) asked: u64,
    pub(crate) granted: u64,
    /// Requests that this limit refused.
    pub(crate) refused: u64,
    pub(crate) first: Option<Stamp>,
    pub(crate) longest: LongestWait,
    /// The source of the limit at the first refusal.
    pub(crate) by: String,
}

/// The longest wait of a refused request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum LongestWait {
    For(Duration),
    /// The request exceeds the burst: no wait would help.
    Never,
}

impl Default for LongestWait {
    fn default() -> Self {
        Self::For(Duration::ZERO)
    }
}

impl LongestWait {
    pub(crate) fn words(self) -> String {
        match self {
            Self::For(span) => format::duration(span),
            Self::Never => "forever".to_owned(),
        }
    }
}

/// The totals and rows of a replay.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) asked: u64,
    pub(crate) granted: u64,
    pub(crate) refused: u64,
    /// Invalid requests in a server's log.
    pub(crate) invalid: u64,
    /// Requests in a server's log that had limits of their own.
    pub(crate) own_limits: u64,
    pub(crate) first: Option<Stamp>,
    pub(crate) last: Option<Stamp>,
    /// Requests of limits without a row.
    pub(crate) left_out: u64,
    rows: HashMap<Subject, Vec<(LimitName, Row)>>,
    count: usize,
}

impl Tally {
    /// Counts a request.
    pub(crate) fn count(&mut self, line: &Line, verdict: &Verdict) {
        self.first.get_or_insert(line.at);
        self.last = Some(line.at);
        self.asked += 1;
        match verdict {
            Verdict::Granted => self.granted += 1,
            Verdict::Refused(_) => self.refused += 1,
            Verdict::Invalid => {
                self.invalid += 1;
                return;
            }
            Verdict::OwnLimits => {
                self.own_limits += 1;
                return;
            }
        }
        for (limit, _) in line.cost.pairs() {
            let Some(row) = self.row(&line.subject, limit) else {
                self.left_out += 1;
                continue;
            };
            row.asked += 1;
            let Verdict::Refused(short) = verdict else {
                row.granted += 1;
                continue;
            };
            let mut by_this = short.iter().filter(|short| short.limit == limit).peekable();
            if let Some(first) = by_this.peek() {
                row.refused += 1;
                if row.first.is_none() {
                    row.first = Some(line.at);
                    row.by.clone_from(&first.by);
                }
            }
            row.longest = by_this.map(|short| short.wait).fold(row.longest, LongestWait::max);
        }
    }

    /// The rows, by refusals in descending order.
    pub(crate) fn rows(&self) -> Vec<(Key, &Row)> {
        let all = self.rows.iter().flat_map(|(subject, limits)| {
            limits.iter().map(|(limit, row)| (Key { subject: subject.clone(), limit: limit.clone() }, row))
        });
        let mut rows: Vec<_> = all.collect();
        rows.sort_by(|(one_key, one), (other_key, other)| {
            Reverse(one.refused).cmp(&Reverse(other.refused)).then_with(|| one_key.cmp(other_key))
        });
        rows
    }

    fn row(&mut self, subject: &Subject, limit: &str) -> Option<&mut Row> {
        if !self.rows.contains_key(subject) {
            if self.count >= ROWS_MAX {
                return None;
            }
            self.rows.insert(subject.clone(), Vec::new());
        }
        let limits = self.rows.get_mut(subject)?;
        let index = limits.iter().position(|(name, _)| name.as_str() == limit);
        if index.is_none() {
            if self.count >= ROWS_MAX {
                return None;
            }
            self.count += 1;
            limits.push((LimitName::new(limit).ok()?, Row::default()));
        }
        let index = index.unwrap_or(limits.len() - 1);
        limits.get_mut(index).map(|(_, row)| row)
    }
}
