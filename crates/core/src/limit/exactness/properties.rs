//! Property tests of the checker: no false positive for core's own meter, agreement with a check of all
//! windows one by one, and detection of buckets that leak.

use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::limit::meter::Meter;
use crate::limit::policy::Version;
use crate::limit::rule::Limit;
use crate::random::Random;
use crate::time::Timeline;

const START: u64 = 1_800_000_000_000_000;

fn id() -> BucketId {
    BucketId { subject: Subject::new("a", "gpt").expect("valid"), row: "tpm".into() }
}

fn rule(amount: u64, period: u64, burst: u64) -> Arc<Rule> {
    let limit = Limit::per("tpm", amount, Duration::from_micros(period)).burst(burst);
    Arc::new(limit.check().expect("valid"))
}

fn any_rule() -> impl Strategy<Value = Arc<Rule>> {
    let period = prop_oneof![
        Just(1),
        Just(7),
        1_u64..60,
        Just(1_000),
        Just(999_983),
        Just(60_000_000),
        1_u64..5_000_000
    ];
    (1_u64..200, period, 1_u64..100).prop_map(|(amount, period, burst)| rule(amount, period, burst))
}

/// An operation of a simulated store.
#[derive(Debug, Clone)]
enum Operation {
    Draw(u64),
    Extend(usize, u64),
    Adjust(usize, i64),
    Cancel(usize),
    Settle(usize, u64),
    Reshape(Arc<Rule>),
    /// Evicts the bucket if it is full.
    Evict,
}

fn any_operation() -> impl Strategy<Value = (u64, Operation)> {
    let gap = prop_oneof![4 => Just(0), 2 => 1_u64..3, 2 => 0_u64..20_000, 1 => 0_u64..20_000_000];
    let which = 0_usize..64;
    let operation = prop_oneof![
        8 => (0_u64..60).prop_map(Operation::Draw),
        3 => (which.clone(), 0_u64..40).prop_map(|(which, units)| Operation::Extend(which, units)),
        2 => (which.clone(), -50_i64..50).prop_map(|(which, units)| Operation::Adjust(which, units)),
        3 => which.clone().prop_map(Operation::Cancel),
        3 => (which, 0_u64..80).prop_map(|(which, units)| Operation::Settle(which, units)),
        2 => any_rule().prop_map(Operation::Reshape),
        1 => Just(Operation::Evict),
    ];
    (gap, operation)
}

/// A correct store of one bucket, with a log of its movements.
struct ExactStore {
    meter: Option<Meter>,
    rule: Arc<Rule>,
    version: Version,
    now: Stamp,
    /// Open leases: id, last step, units held.
    leases: Vec<(LeaseId, u32, u64)>,
    begun: u128,
    log: Vec<Entry>,
}

impl ExactStore {
    fn new(rule: Arc<Rule>) -> Self {
        let now = Stamp::from_micros(START);
        Self { meter: None, rule, version: Version::ZERO, now, leases: Vec::new(), begun: 0, log: Vec::new() }
    }

    fn meter(&mut self) -> &mut Meter {
        let meter = self.meter.get_or_insert_with(|| Meter::new(Arc::clone(&self.rule), self.version));
        meter.follow(&self.rule, self.version, self.now);
        let shape = *meter.rule().shape();
        self.log.push(Entry::shape(self.now, id(), shape));
        meter
    }

    fn write(&mut self, kind: Kind, lease: LeaseId, step: u32, units: i64) {
        self.log.push(Entry::moved(self.now, id(), Move::new(kind, lease, step, units)));
    }

    /// Takes `units` if they are available.
    fn take(&mut self, units: u64) -> bool {
        let now = self.now;
        let meter = self.meter();
        let is_available = meter.ready_at(units, now) <= now;
        if is_available {
            meter.take(units, now);
        }
        is_available
    }

    fn change(&mut self, delta: i64) {
        let now = self.now;
        self.meter().adjust(delta, now);
    }

    fn pick(&self, which: usize) -> Option<usize> {
        (!self.leases.is_empty()).then(|| which % self.leases.len())
    }

    fn run(&mut self, gap: u64, operation: &Operation) {
        self.now = Stamp::from_micros(self.now.as_micros() + gap);
        match operation {
            Operation::Draw(units) => {
                if self.take(*units) {
                    self.begun += 1;
                    let lease = LeaseId::from_number(self.begun);
                    self.leases.push((lease, 0, *units));
                    self.write(Kind::Draw, lease, 0, signed(*units));
                }
            }
            Operation::Extend(which, units) => self.extend(*which, *units),
            Operation::Adjust(which, delta) => self.adjust(*which, *delta),
            Operation::Cancel(which) => {
                if let Some(place) = self.pick(*which) {
                    let (lease, step, held) = self.leases.swap_remove(place);
                    self.change(-signed(held));
                    self.write(Kind::Return, lease, step + 1, -signed(held));
                }
            }
            Operation::Settle(which, actual) => self.settle(*which, *actual),
            Operation::Reshape(rule) => {
                self.rule = Arc::clone(rule);
                self.version = self.version.next();
            }
            Operation::Evict => {
                let now = self.now;
                self.meter = self.meter.take().filter(|meter| !meter.is_full(now));
            }
        }
    }

    fn extend(&mut self, which: usize, units: u64) {
        let Some(place) = self.pick(which) else { return };
        if self.take(units) {
            let (lease, step, held) = &mut self.leases[place];
            (*step, *held) = (*step + 1, *held + units);
            let (lease, step) = (*lease, *step);
            self.write(Kind::Extend, lease, step, signed(units));
        }
    }

    fn adjust(&mut self, which: usize, delta: i64) {
        let Some(place) = self.pick(which) else { return };
        let (lease, step, held) = &mut self.leases[place];
        let delta = delta.max(-signed(*held));
        (*step, *held) = (*step + 1, held.saturating_add_signed(delta));
        let (lease, step) = (*lease, *step);
        self.change(delta);
        self.write(Kind::Adjust, lease, step, delta);
    }

    fn settle(&mut self, which: usize, actual: u64) {
        let Some(place) = self.pick(which) else { return };
        let (lease, step, held) = self.leases.swap_remove(place);
        let delta = signed(actual) - signed(held);
        self.change(delta);
        if delta < 0 && actual.is_multiple_of(2) {
            self.write(Kind::Return, lease, step + 1, delta);
        }
        self.write(Kind::Settle, lease, step + 1, signed(actual));
    }
}

fn signed(units: u64) -> i64 {
    i64::try_from(units).expect("few")
}

/// The entries in random order, except within one lease and step, where the sort by step cannot restore the
/// order.
fn shuffled(log: &[Entry], seed: u64) -> Vec<Entry> {
    let mut random = Random::seeded(seed);
    let is_settled = |entry: &Entry| matches!(entry.what, What::Moved(moved) if moved.kind == Kind::Settle);
    let (last, mut first): (Vec<Entry>, Vec<Entry>) = log.iter().cloned().partition(is_settled);
    for place in (1..first.len()).rev() {
        let other = usize::try_from(random.below(place as u64 + 1)).expect("a place");
        first.swap(place, other);
    }
    first.extend(last);
    first
}

/// Whether every window that ends with a draw is within burst + rate·W, checked one by one.
fn all_windows_hold(shape: &Shape<Stamp>, moves: &[(u64, Kind, i64)]) -> bool {
    let (amount, period) =
        (i128::from(shape.amount()), i128::try_from(shape.period().as_micros()).expect("short"));
    let ends = moves.iter().enumerate().filter(|(_, (_, kind, _))| *kind == Kind::Draw);
    ends.into_iter().all(|(end, (until, ..))| {
        (0..=end).all(|start| {
            let taken: i128 = moves[start..=end].iter().map(|(.., units)| i128::from(*units)).sum();
            let window = i128::from(until - moves[start].0);
            taken * period <= i128::from(shape.burst()) * period + amount * window
        })
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    /// Draws, extensions, adjustments, endings, new rules and evicted buckets, many at the same time and
    /// logged in any order: no violation is reported for an exact store.
    #[test]
    fn exact_store_has_no_violations(
        first in any_rule(),
        operations in prop::collection::vec(any_operation(), 1..120),
        seed in any::<u64>(),
    ) {
        let mut store = ExactStore::new(first);
        for (gap, operation) in &operations {
            store.run(*gap, operation);
        }
        let report = check(&store.log);
        prop_assert!(report.is_exact(), "{report}\n{:#?}", store.log);
        let report = check(&shuffled(&store.log, seed));
        prop_assert!(report.is_exact(), "shuffled: {report}");
        prop_assert_eq!(report.open.len(), store.leases.len());
    }

    /// For moves one at a time, the single pass finds an excess exactly if some window has one.
    #[test]
    fn one_pass_agrees_with_all_windows(
        rule in any_rule(),
        moves in prop::collection::vec((prop_oneof![1_u64..9, 1_u64..2_000_000], 0_usize..3, 0_i64..80), 1..40),
    ) {
        let mut now = START;
        let moves: Vec<(u64, Kind, i64)> = moves.into_iter().map(|(gap, kind, units)| {
            now += gap;
            // Only the level is checked: returns here belong to no draw.
            let (kind, sign) = [(Kind::Draw, 1), (Kind::Adjust, 1), (Kind::Adjust, -1)][kind];
            (now, kind, units * sign)
        }).collect();
        let mut log = vec![Entry::shape(Stamp::from_micros(START), id(), *rule.shape())];
        log.extend((0..).zip(&moves).map(|(number, (at, kind, units))| {
            let lease = LeaseId::from_number(number);
            Entry::moved(Stamp::from_micros(*at), id(), Move::new(*kind, lease, 0, *units))
        }));
        let report = check(&log);
        let is_within = !report.violations.iter().any(|found| matches!(found, Violation::Excess { .. }));
        prop_assert_eq!(is_within, all_windows_hold(rule.shape(), &moves), "{}", report);
    }
}

/// A bucket that counts whole units and its last refill, as most implementations do, with a selectable leak.
struct Leaky {
    leak: Leak,
    level: i64,
    refilled: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Leak {
    None,
    /// Credits the time that refilled no whole unit twice, as a "drift compensation" does.
    Drift,
    /// The level never falls below zero.
    ForgetsDebt,
    /// Returns may fill it beyond the burst.
    Overfills,
}

/// 1,000 per 3 s, with the same burst.
const AMOUNT: u64 = 1_000;
const PERIOD: u64 = 3_000_000;
const FULL: i64 = 1_000;

impl Leaky {
    fn refill(&mut self, now: u64) {
        let units = (now - self.refilled) * AMOUNT / PERIOD;
        let used = units * PERIOD / AMOUNT;
        self.refilled = match self.leak {
            Leak::Drift if units > 0 => self.refilled + used / 2,
            _ => self.refilled + used,
        };
        self.level = (self.level + signed(units)).min(self.level.max(FULL));
    }
}

/// The checker's report on a bucket that is polled every millisecond for 10 s by callers that take, exceed
/// their estimate, and return.
fn polled(leak: Leak) -> Report {
    let mut bucket = Leaky { leak, level: FULL, refilled: START };
    let rule = rule(AMOUNT, PERIOD, AMOUNT);
    let mut log = vec![Entry::shape(Stamp::from_ticks(START), id(), *rule.shape())];
    let mut random = Random::seeded(4);
    for number in 0..10_000_u64 {
        let (now, lease) = (START + number * 1_000, LeaseId::from_number(number.into()));
        let mut write = |kind, step, units| {
            log.push(Entry::moved(Stamp::from_ticks(now), id(), Move::new(kind, lease, step, units)));
        };
        bucket.refill(now);
        let units = signed(random.below(3));
        if units > bucket.level || bucket.level < 0 {
            continue;
        }
        bucket.level -= units;
        write(Kind::Draw, 0, units);
        match random.below(20) {
            0 => {
                bucket.level -= 20;
                write(Kind::Adjust, 1, 20);
            }
            1 => {
                bucket.level += units;
                write(Kind::Return, 1, -units);
            }
            _ => {}
        }
        match leak {
            Leak::ForgetsDebt => bucket.level = bucket.level.max(0),
            Leak::Overfills => {}
            _ => bucket.level = bucket.level.min(FULL),
        }
    }
    check(&log)
}

#[test]
fn leaking_buckets_are_found() {
    let sound = polled(Leak::None);
    assert!(sound.is_exact(), "{sound}");
    for leak in [Leak::Drift, Leak::ForgetsDebt] {
        let report = polled(leak);
        assert!(matches!(report.violations[..], [Violation::Excess { .. }, ..]), "{leak:?}: {report}");
    }
}

#[test]
fn bucket_overfilled_by_returns_is_found() {
    // Drawn at once, refilled while held, and then returned: 2,000 for a burst of 1,000.
    for (leak, is_exact) in [(Leak::None, true), (Leak::Overfills, false)] {
        let mut bucket = Leaky { leak, level: FULL, refilled: START };
        let rule = rule(AMOUNT, PERIOD, AMOUNT);
        let mut log = vec![Entry::shape(Stamp::from_ticks(START), id(), *rule.shape())];
        let mut write = |at, kind, lease, step, units| {
            let movement = Move::new(kind, LeaseId::from_number(lease), step, units);
            log.push(Entry::moved(Stamp::from_ticks(at), id(), movement));
        };
        write(START, Kind::Draw, 1, 0, FULL);
        bucket.level -= FULL;
        let later = START + PERIOD;
        bucket.refill(later);
        bucket.level += FULL;
        if leak == Leak::None {
            bucket.level = bucket.level.min(FULL);
        }
        write(later, Kind::Return, 1, 1, -FULL);
        write(later + 1, Kind::Draw, 2, 0, bucket.level);
        assert_eq!(check(&log).is_exact(), is_exact, "{leak:?}: {}", check(&log));
    }
}
