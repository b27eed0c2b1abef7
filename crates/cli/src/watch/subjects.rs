//! Those who are limited, as many as can be looked at: when the table is full, whoever matters least leaves.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::time::Duration;

use tidegate::{Balance, EntityId, LimitName, Stamp, Subject};

use super::rates::Rates;
use crate::words::shown;

/// Subjects that are remembered.
pub(crate) const SUBJECTS_MAX: usize = 1_000;
/// Limits of one of them: no policy has as many.
const LEVELS_MAX: usize = 64;
/// The speed of one subject is known for so many seconds.
const SECONDS: usize = 16;

/// One who is limited.
#[derive(Debug, Clone)]
pub(crate) struct Row {
    pub(crate) subject: Subject,
    /// Their names as they may stand on a terminal.
    pub(crate) entity: String,
    pub(crate) resource: String,
    /// The limit that refused last, or that has least, and whose it is if it is another's.
    pub(crate) limit: String,
    /// Refusals, or units where only a store is seen.
    pub(crate) count: u64,
    pub(crate) rates: Rates,
    /// When it was last counted.
    pub(crate) last: Option<Stamp>,
    /// When it is worth asking again, as it was told last.
    pub(crate) retry: Retry,
    pub(crate) levels: Vec<Level>,
}

/// When it is worth asking again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Retry {
    /// Nobody said.
    Unknown,
    At(Stamp),
    Never,
}

/// What is there of a limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Level {
    /// As it may stand on a terminal, with whose it is if it is not the subject's own.
    pub(crate) limit: String,
    /// Its name as it is, and whose it is: for programs.
    pub(crate) name: LimitName,
    pub(crate) of: EntityId,
    pub(crate) available: i64,
    pub(crate) burst: u64,
    pub(crate) amount: u64,
    pub(crate) period: Duration,
    /// Taken less given back, ever.
    pub(crate) consumed: i64,
}

impl Level {
    /// What a balance says to someone who looks at `subject`.
    pub(crate) fn of(balance: &Balance, subject: &Subject) -> Self {
        Self {
            limit: limit_of(balance.limit.as_str(), balance.subject.entity.as_str(), subject),
            name: balance.limit.clone(),
            of: balance.subject.entity.clone(),
            available: balance.available,
            burst: balance.burst,
            amount: balance.amount,
            period: balance.period,
            consumed: balance.consumed,
        }
    }

    /// How much of it is there, from 0 to 1.
    pub(crate) fn fill(&self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "it is a bar of some columns")]
        let fill = self.available.max(0) as f64 / self.burst.max(1) as f64;
        fill.min(1.0)
    }
}

/// A limit, with whose it is where that is not the one who asks.
fn limit_of(limit: &str, of: &str, subject: &Subject) -> String {
    if of == subject.entity.as_str() { shown(limit) } else { shown(&format!("{limit} of {of}")) }
}

/// By what they are sorted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sort {
    Count,
    Speed,
    Last,
    Name,
}

impl Sort {
    pub(crate) const fn next(self) -> Self {
        match self {
            Self::Count => Self::Speed,
            Self::Speed => Self::Last,
            Self::Last => Self::Name,
            Self::Name => Self::Count,
        }
    }
}

/// The table of them.
#[derive(Debug, Clone)]
pub(crate) struct Subjects {
    rows: HashMap<Subject, Row>,
    rows_max: usize,
    /// How many have left it for others.
    pub(crate) left: u64,
}

impl Subjects {
    pub(crate) fn new(rows_max: usize) -> Self {
        Self { rows: HashMap::new(), rows_max, left: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.rows.len()
    }

    /// A limit refused one of them.
    pub(crate) fn refused(&mut self, subject: &Subject, of: &str, limit: &str, retry: Retry, now: Stamp) {
        let row = self.row(subject);
        row.limit = limit_of(limit, of, subject);
        row.count = row.count.saturating_add(1);
        row.rates.add(1, now);
        row.last = Some(now);
        row.retry = retry;
    }

    /// How the limits of one of them are. Answers the units that were taken since it was looked at last.
    pub(crate) fn looked(&mut self, subject: &Subject, mut levels: Vec<Level>) -> u64 {
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

    /// Units were taken from one of them.
    pub(crate) fn drawn(&mut self, subject: &Subject, units: u64, from: Stamp, now: Stamp) {
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

    /// Those that hold `filter`, sorted.
    pub(crate) fn listed(&self, filter: &str, sort: Sort, now: Stamp) -> Vec<&Row> {
        let filter = filter.to_lowercase();
        let holds = |text: &str| text.to_lowercase().contains(&filter);
        let is_listed =
            |row: &&Row| filter.is_empty() || holds(&row.entity) || holds(&row.resource) || holds(&row.limit);
        let mut rows: Vec<&Row> = self.rows.values().filter(is_listed).collect();
        // Once for each row: to compare them, a speed would be summed up again and again.
        rows.sort_by_cached_key(|row| {
            let by = match sort {
                Sort::Count => (row.count, None),
                Sort::Speed => (row.rates.lately(now), None),
                Sort::Last => (0, row.last),
                Sort::Name => (0, None),
            };
            (Reverse(by), &row.subject)
        });
        rows
    }

    /// The row of a subject, which is made if it is not there.
    fn row(&mut self, subject: &Subject) -> &mut Row {
        if !self.rows.contains_key(subject) && self.rows.len() >= self.rows_max {
            let least = self.rows.values().min_by(|one, other| {
                let by = (one.count, one.last).cmp(&(other.count, other.last));
                by.then_with(|| other.subject.cmp(&one.subject))
            });
            let least = least.map(|row| row.subject.clone());
            if let Some(least) = least {
                self.rows.remove(&least);
                self.left += 1;
            }
        }
        self.rows.entry(subject.clone()).or_insert_with(|| Row {
            subject: subject.clone(),
            entity: shown(subject.entity.as_str()),
            resource: shown(subject.resource.as_str()),
            limit: String::new(),
            count: 0,
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
        table.refused(&subject(entity), entity, "rpm", Retry::Unknown, Stamp::from_secs(at));
    }

    fn names(table: &Subjects, filter: &str, sort: Sort) -> Vec<String> {
        let rows = table.listed(filter, sort, Stamp::from_secs(100));
        rows.into_iter().map(|row| row.entity.clone()).collect()
    }

    #[test]
    fn when_the_table_is_full_whoever_was_refused_least_and_longest_ago_leaves() {
        let mut table = Subjects::new(3);
        for (entity, at) in [("a", 1), ("a", 2), ("b", 3), ("c", 4), ("c", 5), ("d", 6), ("e", 7)] {
            refuse(&mut table, entity, at);
        }
        assert_eq!(
            (names(&table, "", Sort::Name), table.left),
            (vec!["a".into(), "c".into(), "e".into()], 2)
        );
        for stranger in 0..10_000 {
            refuse(&mut table, &format!("s{stranger}"), 8 + stranger);
        }
        assert_eq!((table.len(), table.left), (3, 10_002));
        assert_eq!(names(&table, "", Sort::Count)[..2], ["a", "c"], "a flood drives out nobody who matters");
    }

    #[test]
    fn they_are_sorted_as_was_asked_and_ties_by_name() {
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
        assert_eq!(names(&table, "B", Sort::Count), ["b"], "small or large");
        assert_eq!(names(&table, "rp", Sort::Name).len(), 3, "by the limit too");
    }

    #[test]
    fn what_was_taken_is_known_from_the_second_look_on() {
        let level = |consumed| Level {
            limit: "rpm".into(),
            name: LimitName::new("rpm").unwrap(),
            of: EntityId::new("a").unwrap(),
            available: 5,
            burst: 10,
            amount: 10,
            period: Duration::from_secs(1),
            consumed,
        };
        let mut table = Subjects::new(3);
        let a = subject("a");
        assert_eq!(table.looked(&a, vec![level(100)]), 0);
        assert_eq!(table.looked(&a, vec![level(107)]), 7);
        assert_eq!(table.looked(&a, vec![level(90)]), 0, "what is given back was not taken");
    }

    #[test]
    fn names_that_would_move_the_cursor_or_turn_the_text_are_shown_escaped() {
        let mut table = Subjects::new(3);
        let evil = Subject::new("ev\u{202e}il", "g").unwrap();
        table.refused(&evil, "ev\u{202e}il", "rpm", Retry::Never, Stamp::ZERO);
        assert_eq!(names(&table, "", Sort::Name), ["ev\\u{202e}il"]);
    }
}
