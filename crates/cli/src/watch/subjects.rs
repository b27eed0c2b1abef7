//! The table of limited subjects. At its bound, it evicts the row with the fewest and oldest refusals.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::time::Duration;

use tidegate::{Balance, EntityId, LimitKey, Stamp, Subject};

use super::rates::Rates;
use crate::format;

/// Maximum rows.
pub(crate) const SUBJECTS_MAX: usize = 1_000;
/// Maximum limits of a subject: no policy has as many.
const LEVELS_MAX: usize = 64;
/// Seconds of history per row.
const SECONDS: usize = 16;

/// A limited subject.
#[derive(Debug, Clone)]
pub(crate) struct Row {
    pub(crate) subject: Subject,
    /// The names, escaped for display.
    pub(crate) entity: String,
    pub(crate) resource: String,
    /// The limit that refused last, or the lowest one, with its entity if that is another one.
    pub(crate) limit: String,
    /// Refusals, or units for a store.
    pub(crate) count: u64,
    /// Grants of a server.
    pub(crate) granted: u64,
    pub(crate) rates: Rates,
    /// The time of the last count.
    pub(crate) last: Option<Stamp>,
    /// When a retry may succeed, by the last refusal.
    pub(crate) retry: Retry,
    pub(crate) levels: Vec<Level>,
}

/// When a retry may succeed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Retry {
    /// Not reported.
    Unknown,
    At(Stamp),
    Never,
}

/// The level of a limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Level {
    /// Its name, escaped for display, with its entity if that is not the subject's own.
    pub(crate) limit: String,
    /// Its plain name and its entity, for programs; `None` if all entities share it.
    pub(crate) name: LimitKey,
    pub(crate) of: Option<EntityId>,
    pub(crate) available: i64,
    pub(crate) burst: u64,
    pub(crate) amount: u64,
    pub(crate) period: Duration,
    /// Units taken minus units returned, since the bucket was first used.
    pub(crate) consumed: i64,
}

impl Level {
    /// The level of a balance, as seen from `subject`.
    pub(crate) fn of(balance: &Balance, subject: &Subject) -> Self {
        Self {
            limit: limit_of(&balance.key().to_string(), balance.subject.one_entity(), subject),
            name: balance.key(),
            of: balance.subject.one_entity().cloned(),
            available: balance.available,
            burst: balance.burst,
            amount: balance.amount,
            period: balance.period,
            consumed: balance.consumed,
        }
    }

    /// The available fraction, from 0 to 1.
    pub(crate) fn fill(&self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "it is a bar of some columns")]
        let fill = self.available.max(0) as f64 / self.burst.max(1) as f64;
        fill.min(1.0)
    }
}

/// A limit's name, with its entity if that is not the subject's.
fn limit_of(limit: &str, of: Option<&EntityId>, subject: &Subject) -> String {
    match of.filter(|of| **of != subject.entity) {
        Some(of) => format::escape(&format!("{limit} of {of}")),
        None => format::escape(limit),
    }
}

/// The sort order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sort {
    Count,
    Speed,
    Last,
    Name,
    Granted,
}

impl Sort {
    pub(crate) const fn next(self) -> Self {
        match self {
            Self::Count => Self::Speed,
            Self::Speed => Self::Last,
            Self::Last => Self::Name,
            Self::Name => Self::Granted,
            Self::Granted => Self::Count,
        }
    }
}

/// The table.
#[derive(Debug, Clone)]
pub(crate) struct Subjects {
    rows: HashMap<Subject, Row>,
    rows_max: usize,
    /// Number of evicted rows.
    pub(crate) evicted: u64,
}

impl Subjects {
    pub(crate) fn new(rows_max: usize) -> Self {
        Self { rows: HashMap::new(), rows_max, evicted: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.rows.len()
    }

    /// Adds a refusal.
    pub(crate) fn add_refusal(
        &mut self,
        subject: &Subject,
        of: Option<&EntityId>,
        limit: &str,
        retry: Retry,
        now: Stamp,
    ) {
        let row = self.row(subject);
        row.limit = limit_of(limit, of, subject);
        row.count = row.count.saturating_add(1);
        row.rates.add(1, now);
        row.last = Some(now);
        row.retry = retry;
    }

    /// Sets how often subjects were granted.
    pub(crate) fn set_granted(&mut self, busiest: &[(Subject, u64)]) {
        for (subject, granted) in busiest {
            // Rows with refusals are not evicted for others.
            if self.rows.contains_key(subject) || self.rows.len() < self.rows_max {
                self.row(subject).granted = *granted;
            }
        }
    }

    /// Sets the levels of a subject. Returns the units taken since the last call.
    pub(crate) fn set_levels(&mut self, subject: &Subject, mut levels: Vec<Level>) -> u64 {
        levels.truncate(LEVELS_MAX);
        let row = self.row(subject);
        let taken = |level: &Level| {
            let before = row.levels.iter().find(|before| before.limit == level.limit)?;
            u64::try_from(level.consumed.saturating_sub(before.consumed)).ok()
        };
        let taken = levels.iter().filter_map(taken).fold(0, u64::saturating_add);
        row.levels = levels;
        taken
    }

    /// Adds units that a subject has taken.
    pub(crate) fn add_units(&mut self, subject: &Subject, units: u64, from: Stamp, now: Stamp) {
        let row = self.row(subject);
        if let Some(least) = row.levels.iter().min_by(|one, other| one.fill().total_cmp(&other.fill())) {
            row.limit.clone_from(&least.limit);
        }
        if units > 0 {
            row.count = row.count.saturating_add(units);
            row.rates.spread(units, from, now);
            row.last = Some(now);
        }
    }

    /// The sorted rows that contain `filter`.
    pub(crate) fn rows(&self, filter: &str, sort: Sort, now: Stamp) -> Vec<&Row> {
        let filter = filter.to_lowercase();
        let holds = |text: &str| text.to_lowercase().contains(&filter);
        let is_listed =
            |row: &&Row| filter.is_empty() || holds(&row.entity) || holds(&row.resource) || holds(&row.limit);
        let mut rows: Vec<&Row> = self.rows.values().filter(is_listed).collect();
        // Cached keys: each comparison would otherwise sum the rates again.
        rows.sort_by_cached_key(|row| {
            let by = match sort {
                // Among rows without refusals, the busiest is first.
                Sort::Count => (row.count, None, row.granted),
                Sort::Granted => (row.granted, None, row.count),
                Sort::Speed => (row.rates.recent(now), None, 0),
                Sort::Last => (0, row.last, 0),
                Sort::Name => (0, None, 0),
            };
            (Reverse(by), &row.subject)
        });
        rows
    }

    /// The row of a subject, inserted if missing.
    fn row(&mut self, subject: &Subject) -> &mut Row {
        if !self.rows.contains_key(subject) && self.rows.len() >= self.rows_max {
            let least = self.rows.values().min_by(|one, other| {
                let by = (one.count, one.last).cmp(&(other.count, other.last));
                by.then_with(|| other.subject.cmp(&one.subject))
            });
            let least = least.map(|row| row.subject.clone());
            if let Some(least) = least {
                self.rows.remove(&least);
                self.evicted += 1;
            }
        }
        let [entity, resource] = format::bucket(subject);
        self.rows.entry(subject.clone()).or_insert_with(|| Row {
            subject: subject.clone(),
            entity,
            resource,
            limit: String::new(),
            count: 0,
            granted: 0,
            rates: Rates::new(SECONDS),
            last: None,
            retry: Retry::Unknown,
            levels: Vec::new(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn subject(entity: &str) -> Subject {
        Subject::new(entity, "gpt").unwrap()
    }

    fn refuse(table: &mut Subjects, entity: &str, at: u64) {
        let subject = subject(entity);
        table.add_refusal(&subject, Some(&subject.entity), "rpm", Retry::Unknown, Stamp::from_secs(at));
    }

    fn names(table: &Subjects, filter: &str, sort: Sort) -> Vec<String> {
        let rows = table.rows(filter, sort, Stamp::from_secs(100));
        rows.into_iter().map(|row| row.entity.clone()).collect()
    }

    #[test]
    fn full_table_evicts_fewest_and_oldest_refusals() {
        let mut table = Subjects::new(3);
        for (entity, at) in [("a", 1), ("a", 2), ("b", 3), ("c", 4), ("c", 5), ("d", 6), ("e", 7)] {
            refuse(&mut table, entity, at);
        }
        assert_eq!(
            (names(&table, "", Sort::Name), table.evicted),
            (vec!["a".into(), "c".into(), "e".into()], 2)
        );
        for stranger in 0..10_000 {
            refuse(&mut table, &format!("s{stranger}"), 8 + stranger);
        }
        assert_eq!((table.len(), table.evicted), (3, 10_002));
        assert_eq!(
            names(&table, "", Sort::Count)[..2],
            ["a", "c"],
            "a flood does not evict frequent subjects"
        );
    }

    #[test]
    fn rows_are_sorted_with_ties_by_name() {
        let mut table = Subjects::new(9);
        for (entity, at) in [("b", 1), ("b", 1), ("b", 1), ("a", 98), ("c", 97), ("c", 99)] {
            refuse(&mut table, entity, at);
        }
        let table_of = [
            (Sort::Count, ["b", "c", "a"]),
            (Sort::Speed, ["c", "a", "b"]),
            (Sort::Last, ["c", "a", "b"]),
            (Sort::Name, ["a", "b", "c"]),
        ];
        for (sort, sorted) in table_of {
            assert_eq!(names(&table, "", sort), sorted, "{sort:?}");
        }
        assert_eq!(names(&table, "B", Sort::Count), ["b"], "case-insensitive");
        assert_eq!(names(&table, "rp", Sort::Name).len(), 3, "matches the limit too");
    }

    #[test]
    fn taken_units_are_known_from_the_second_scan() {
        let level = |consumed| Level {
            limit: "rpm".into(),
            name: "rpm".parse().unwrap(),
            of: EntityId::new("a").ok(),
            available: 5,
            burst: 10,
            amount: 10,
            period: Duration::from_secs(1),
            consumed,
        };
        let mut table = Subjects::new(3);
        let a = subject("a");
        assert_eq!(table.set_levels(&a, vec![level(100)]), 0);
        assert_eq!(table.set_levels(&a, vec![level(107)]), 7);
        assert_eq!(table.set_levels(&a, vec![level(90)]), 0, "returned units are not taken");
    }

    #[test]
    fn control_and_bidi_characters_are_escaped() {
        let mut table = Subjects::new(3);
        // Names cannot have them, but an event has its limit as text.
        let a = subject("a");
        table.add_refusal(&a, Some(&a.entity), "rp\u{202e}m\n", Retry::Never, Stamp::ZERO);
        let rows = table.rows("", Sort::Name, Stamp::ZERO);
        assert_eq!(rows[0].limit, "rp\\u{202e}m\\n");
    }
}
