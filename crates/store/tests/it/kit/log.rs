//! Logs of child processes, as lines that the parent reads.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use tidegate_core::bucket::Shape;
use tidegate_core::limit::exactness::{BucketId, Entry, Kind, Move, STEP_MAX, What};
use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::name::Subject;
use tidegate_core::limit::policy::OnExpiry;
use tidegate_core::time::Stamp;

const KINDS: [Kind; 6] = [Kind::Draw, Kind::Extend, Kind::Adjust, Kind::Return, Kind::Settle, Kind::Degraded];

pub(crate) fn to_line(entry: &Entry) -> String {
    let Subject { entity, resource } = &entry.bucket.subject;
    let head = format!("{}\t{entity}\t{resource}\t{}", entry.at.as_micros(), entry.bucket.row);
    match entry.what {
        What::Shape(shape) => {
            format!("{head}\tshape\t{}\t{}\t{}", shape.amount(), shape.period().as_micros(), shape.burst())
        }
        What::Set(units) => format!("{head}\tset\t{units}"),
        What::Moved(Move { lease, step, units, kind, buckets }) => {
            let kind = KINDS.iter().position(|known| *known == kind).expect("a kind that is known");
            format!("{head}\t{kind}\t{lease}\t{step}\t{units}\t{buckets}")
        }
    }
}

pub(crate) fn from_line(line: &str) -> Entry {
    let parts: Vec<&str> = line.split('\t').collect();
    let number = |place: usize| parts[place].parse::<u64>().expect("a number");
    let subject = Subject::stored(parts[1], parts[2]).expect("a subject");
    let (at, bucket) = (Stamp::from_micros(number(0)), BucketId { subject, row: parts[3].into() });
    if parts[4] == "shape" {
        let shape = Shape::new(number(5), Duration::from_micros(number(6)), number(7)).expect("a shape");
        return Entry::shape(at, bucket, shape);
    }
    if parts[4] == "set" {
        return Entry::set(at, bucket, number(5));
    }
    let lease: LeaseId = parts[5].parse().expect("a lease");
    let kind = KINDS[parts[4].parse::<usize>().expect("a kind")];
    let (step, units) = (parts[6].parse().expect("a step"), parts[7].parse().expect("units"));
    let movement = Move::new(kind, lease, step, units).one_of(parts[8].parse().expect("a count"));
    Entry::moved(at, bucket, movement)
}

/// The ends of leases that were left to their deadlines, which no response reports.
pub(crate) fn endings(log: &[Entry], left: &HashMap<LeaseId, (Duration, OnExpiry)>) -> Vec<Entry> {
    let mut held: BTreeMap<(LeaseId, BucketId), (Stamp, i64)> = BTreeMap::new();
    for entry in log {
        if let What::Moved(movement) = entry.what
            && left.contains_key(&movement.lease)
        {
            let (drawn_at, units) =
                held.entry((movement.lease, entry.bucket.clone())).or_insert((entry.at, 0));
            *drawn_at = entry.at.min(*drawn_at);
            *units += movement.units;
        }
    }
    let ending = |((lease, bucket), (drawn_at, units)): ((LeaseId, BucketId), (Stamp, i64))| {
        let (deadline, on_expiry) = left[&lease];
        let (kind, units) = match on_expiry {
            OnExpiry::Settle => (Kind::Settle, units),
            OnExpiry::Return => (Kind::Return, -units),
        };
        // The end is at the deadline or at the next call after it; the checker gets the earlier time.
        Entry::moved(drawn_at + deadline, bucket, Move::new(kind, lease, STEP_MAX, units))
    };
    held.into_iter().map(ending).collect()
}
