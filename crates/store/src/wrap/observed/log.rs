//! The log of movements, derived from replies in any order.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use tidegate_core::bucket::Shape;
use tidegate_core::limit::cascade::{Levels, Units};
use tidegate_core::limit::exactness::{BucketId, Entry, Kind, Move, What};
use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::policy::Version;
use tidegate_core::time::Stamp;

use crate::engine::Step as Applying;
use crate::{Change, Movement, Reading, StepResult, TakeMode};

/// The log.
pub(super) struct Log {
    lines: Vec<Line>,
    max: usize,
    missed: u64,
    /// The shapes of each bucket, by time. Replies may arrive out of order, and of several at one time the
    /// last is unknown.
    shapes: HashMap<BucketId, BTreeMap<Stamp, Vec<Shape<Stamp>>>>,
}

enum Line {
    Entry(Entry),
    /// A reading of a bucket's shape and version.
    Shape {
        at: Stamp,
        bucket: BucketId,
        shape: Shape<Stamp>,
        version: Version,
    },
    /// A settlement. Its units are known once all steps of the lease are, whose replies may arrive in any
    /// order.
    Settlement {
        at: Stamp,
        step: Step,
        moved: Vec<(BucketId, i64)>,
    },
}

/// A step of a lease.
#[derive(Clone, Copy)]
struct Step {
    lease: LeaseId,
    number: u32,
    kind: Kind,
}

impl Log {
    pub(super) fn new(max: usize) -> Self {
        Self { lines: Vec::new(), max, missed: 0, shapes: HashMap::new() }
    }

    /// The entries for the checker.
    pub(super) fn entries(&self) -> Vec<Entry> {
        let newest = self.newest();
        let mut held: HashMap<LeaseId, Vec<(BucketId, i64)>> = HashMap::new();
        for line in &self.lines {
            match line {
                Line::Entry(Entry { bucket, what: What::Moved(movement), .. }) => {
                    hold(held.entry(movement.lease).or_default(), bucket, movement.units);
                }
                Line::Entry(_) | Line::Shape { .. } => {}
                Line::Settlement { step, moved, .. } => {
                    let held = held.entry(step.lease).or_default();
                    for (bucket, units) in moved {
                        hold(held, bucket, *units);
                    }
                }
            }
        }
        let mut entries = Vec::new();
        for line in &self.lines {
            match line {
                Line::Entry(entry) => entries.push(entry.clone()),
                Line::Shape { at, bucket, shape, version } => {
                    let earlier = newest[bucket].range(..at).next_back();
                    if earlier.is_none_or(|(_, newest)| version >= newest) {
                        entries.push(Entry::shape(*at, bucket.clone(), *shape));
                    }
                }
                Line::Settlement { at, step, .. } => {
                    let ended = held.get(&step.lease).into_iter().flatten();
                    entries.extend(ended.map(|(bucket, units)| step.entry(*at, bucket.clone(), *units, 0)));
                }
            }
        }
        entries
    }

    /// The newest version of each bucket by time. Versions never fall: a later reading with an older version
    /// came from a cache, as a refusal may, and not from the bucket.
    fn newest(&self) -> HashMap<&BucketId, BTreeMap<Stamp, Version>> {
        let mut newest: HashMap<&BucketId, BTreeMap<Stamp, Version>> = HashMap::new();
        for line in &self.lines {
            if let Line::Shape { at, bucket, version, .. } = line {
                let known = newest.entry(bucket).or_default().entry(*at).or_insert(*version);
                *known = (*known).max(*version);
            }
        }
        for versions in newest.values_mut() {
            let mut most = Version::ZERO;
            for version in versions.values_mut() {
                most = most.max(*version);
                *version = most;
            }
        }
        newest
    }

    pub(super) const fn missed(&self) -> u64 {
        self.missed
    }

    /// Records a step and its result.
    pub(super) fn applied(&mut self, step: &Applying<'_>, answer: &StepResult) {
        let levels = &**step.levels;
        let of = |kind| Step { lease: step.lease, number: step.number, kind };
        match (step.change, answer) {
            (Change::Renew(_), _) | (_, StepResult::Renewed(_)) => {}
            (_, StepResult::Refused(moved)) => self.see(levels, moved),
            (Change::Take(units, taking), StepResult::Granted(moved)) => {
                let kind = if taking == TakeMode::Extend { Kind::Extend } else { Kind::Draw };
                self.moved(of(kind), levels, named(levels, units), moved);
                if taking == TakeMode::Spend && !moved.is_repeat {
                    let step = Step { number: 1, ..of(Kind::Settle) };
                    self.push(Line::Settlement { at: moved.at, step, moved: Vec::new() });
                }
            }
            (Change::Shift(_), StepResult::Granted(moved)) => self.moved(of(Kind::Adjust), levels, 0, moved),
            (Change::End(Some(_)), StepResult::Granted(moved)) => {
                self.settled(of(Kind::Settle), levels, moved);
            }
            (Change::End(None), StepResult::Granted(moved)) => self.returned(of(Kind::Return), levels, moved),
            (Change::Set(units), StepResult::Granted(moved)) => self.set(levels, units, moved),
        }
    }

    fn set(&mut self, levels: &Levels, units: &Units, moved: &Movement) {
        if moved.is_repeat {
            return;
        }
        self.see(levels, moved);
        for reading in &moved.readings {
            let units = units[reading.name].unwrap_or(0);
            self.push(Line::Entry(Entry::set(moved.at, bucket_of(levels, reading), units)));
        }
    }

    fn settled(&mut self, step: Step, levels: &Levels, moved: &Movement) {
        if moved.is_repeat {
            return;
        }
        self.see(levels, moved);
        let by_bucket = moved.readings.iter().map(|reading| (bucket_of(levels, reading), reading.moved));
        self.push(Line::Settlement { at: moved.at, step, moved: by_bucket.collect() });
    }

    fn returned(&mut self, step: Step, levels: &Levels, moved: &Movement) {
        self.moved(step, levels, 0, moved);
        if !moved.is_repeat && moved.readings.is_empty() {
            // A cancel before the draw ends the lease in each bucket that it would have drawn from.
            for level in levels.levels() {
                for line in &level.limits {
                    let bucket = BucketId::new(&level.subject, &line.rule);
                    self.push(Line::Entry(step.entry(moved.at, bucket, 0, 0)));
                }
            }
        }
    }

    fn moved(&mut self, step: Step, levels: &Levels, named: u32, moved: &Movement) {
        if moved.is_repeat {
            return;
        }
        self.see(levels, moved);
        for reading in &moved.readings {
            let entry = step.entry(moved.at, bucket_of(levels, reading), reading.moved, named);
            self.push(Line::Entry(entry));
        }
    }

    /// Records new shapes.
    fn see(&mut self, levels: &Levels, moved: &Movement) {
        for reading in &moved.readings {
            let (bucket, shape) = (bucket_of(levels, reading), *reading.meter(levels).rule().shape());
            let version = reading.version();
            let known = self.shapes.entry(bucket.clone()).or_default();
            let is_known = match known.range(..=moved.at).next_back() {
                Some((at, shapes)) if *at == moved.at => shapes.contains(&shape),
                Some((_, shapes)) => *shapes == [shape],
                None => false,
            };
            // A full log is incomplete anyway.
            if !is_known && self.push(Line::Shape { at: moved.at, bucket: bucket.clone(), shape, version }) {
                self.shapes.entry(bucket).or_default().entry(moved.at).or_default().push(shape);
            }
        }
    }

    fn push(&mut self, line: Line) -> bool {
        let has_space = self.lines.len() < self.max;
        if has_space {
            self.lines.push(line);
        } else {
            self.missed += 1;
        }
        has_space
    }
}

impl Step {
    fn entry(self, at: Stamp, bucket: BucketId, units: i64, named: u32) -> Entry {
        Entry::moved(at, bucket, Move::new(self.kind, self.lease, self.number, units).one_of(named))
    }
}

impl fmt::Debug for Log {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (lines, missed) = (self.lines.len(), self.missed);
        f.debug_struct("Log").field("lines", &lines).field("missed", &missed).finish_non_exhaustive()
    }
}

fn bucket_of(levels: &Levels, reading: &Reading) -> BucketId {
    BucketId::new(&levels.levels()[reading.level].subject, reading.meter(levels).rule())
}

/// The number of buckets that these units name.
fn named(levels: &Levels, units: &[Option<u64>]) -> u32 {
    let lines = levels.levels().iter().flat_map(|level| &level.limits);
    u32::try_from(lines.filter(|line| units[line.name].is_some()).count()).unwrap_or(u32::MAX)
}

fn hold(held: &mut Vec<(BucketId, i64)>, bucket: &BucketId, units: i64) {
    match held.iter_mut().find(|(known, _)| known == bucket) {
        Some((_, sum)) => *sum += units,
        None => held.push((bucket.clone(), units)),
    }
}

#[cfg(test)]
mod tests {
    use tidegate_core::limit::meter::Meter;
    use tidegate_core::limit::name::Subject;
    use tidegate_core::limit::policy::Policy;
    use tidegate_core::limit::resolve::resolve;
    use tidegate_core::limit::rule::Limit;

    use super::*;
    use crate::Readings;

    const START: Stamp = Stamp::from_secs(1_800_000_000);

    #[test]
    fn older_rule_after_a_newer_one_comes_from_a_cache() {
        let subject = Subject::new("acme", "gpt").unwrap();
        let mut log = Log::new(10);
        // The second reply arrives first, and the last is a refusal from a cache.
        for (at, version, burst) in [(3, 2, 5), (0, 1, 40), (4, 1, 40), (3, 1, 40)] {
            let policy = Policy::new([Limit::per_second("rpm", 500).burst(burst)]).unwrap();
            let resolved = resolve(&subject, [Some(&policy), None, None, None], &Policy::default());
            let levels = Levels::new(Version::new(version), vec![(subject.clone(), resolved)]);
            let line = &levels.levels()[0].limits[0];
            let meter = Meter::new(line.rule.clone(), Version::new(version));
            let readings = Readings::from_iter([Reading::new(0, line, 0, &meter)]);
            log.see(
                &levels,
                &Movement { at: Stamp::from_micros(START.as_micros() + at), is_repeat: false, readings },
            );
        }
        let mut shapes: Vec<(u64, u64)> = log
            .entries()
            .into_iter()
            .filter_map(|entry| match entry.what {
                What::Shape(shape) => Some((entry.at.as_micros() - START.as_micros(), shape.burst())),
                What::Moved(_) | What::Set(_) => None,
            })
            .collect();
        shapes.sort_unstable();
        assert_eq!(shapes, [(0, 40), (3, 5), (3, 40)], "of two at one time the last is unknown");
    }
}
