//! Differential test: any sequence of calls gives the same answers on the SQLite store as on the in-memory
//! store, with one handle, with two alternating handles, and after reopening.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use tidegate_core::limit::cascade::{Deltas, Levels, Units};
use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::meter::Meter;
use tidegate_core::limit::policy::{OnExpiry, Policy, Version};
use tidegate_core::limit::resolve::resolve;
use tidegate_core::limit::rule::Limit;
use tidegate_core::limit::usage::Window;
use tidegate_core::time::Stamp;
use tidegate_store::{
    Adjust, Cancel, Draw, DrawResult, Extend, LeaseSnapshot, LeaseStatus, Lookup, ManualWall, Memory,
    Movement, Paging, Renew, Settle, Sqlite, Store, StoreError, Terms, UsageOf, UsageQuery, WallClock as _,
};

use crate::kit::common::{START, subject};
use crate::kit::sqlite::TempFile;

/// A call to a store.
#[derive(Debug, Clone)]
pub(crate) enum Step {
    Draw {
        lease: u8,
        holder: u8,
        units: [Option<u64>; 2],
        seconds: u8,
        returns: bool,
    },
    Spend {
        lease: u8,
        holder: u8,
        units: [Option<u64>; 2],
    },
    Extend {
        lease: u8,
        holder: u8,
        step: u8,
        units: [Option<u64>; 2],
    },
    Adjust {
        lease: u8,
        holder: u8,
        step: u8,
        deltas: [Option<i64>; 2],
    },
    Settle {
        lease: u8,
        holder: u8,
        step: u8,
        actual: [Option<u64>; 2],
    },
    Renew {
        lease: u8,
        holder: u8,
        step: u8,
        seconds: u32,
    },
    Find {
        lease: u8,
    },
    Cancel {
        lease: u8,
        holder: u8,
        step: u8,
    },
    /// Less than ten minutes in total, because stores evict ended leases at different times.
    Pass {
        millis: u64,
    },
    Look,
    Reopen,
}

impl Step {
    /// The same, except that a lease draws from every limit, and deltas do not overflow.
    pub(crate) fn drawing_all(mut self) -> Self {
        if let Self::Draw { units, .. } | Self::Spend { units, .. } = &mut self {
            *units = units.map(|units| units.or(Some(0)));
        }
        // A saturated delta leaves a full bucket with consumption, which only a report shows.
        if let Self::Adjust { deltas, .. } = &mut self {
            *deltas = deltas.map(|delta| delta.map(|delta| delta.clamp(-60, 60)));
        }
        self
    }

    /// The lease of the step.
    pub(crate) const fn lease(&self) -> Option<u8> {
        match *self {
            Self::Draw { lease, .. }
            | Self::Spend { lease, .. }
            | Self::Extend { lease, .. }
            | Self::Adjust { lease, .. }
            | Self::Settle { lease, .. }
            | Self::Renew { lease, .. }
            | Self::Find { lease }
            | Self::Cancel { lease, .. } => Some(lease),
            Self::Pass { .. } | Self::Look | Self::Reopen => None,
        }
    }
}

fn units() -> impl Strategy<Value = [Option<u64>; 2]> {
    let some = prop_oneof![8 => 0..40_u64, 1 => Just(1 << 40), 1 => Just(u64::MAX)];
    [prop::option::weighted(0.8, some.clone()), prop::option::weighted(0.8, some)]
}

fn deltas() -> impl Strategy<Value = [Option<i64>; 2]> {
    let some = prop_oneof![8 => -60..60_i64, 1 => Just(i64::MAX), 1 => Just(i64::MIN)];
    [prop::option::weighted(0.8, some.clone()), prop::option::weighted(0.8, some)]
}

pub(crate) fn step() -> impl Strategy<Value = Step> {
    let (lease, holder, number) = (0..6_u8, 0..6_u8, 0..5_u8);
    prop_oneof![
        6 => (lease.clone(), holder.clone(), units(), 1..30_u8, any::<bool>()).prop_map(
            |(lease, holder, units, seconds, returns)| Step::Draw { lease, holder, units, seconds, returns }
        ),
        2 => (lease.clone(), holder.clone(), units())
            .prop_map(|(lease, holder, units)| Step::Spend { lease, holder, units }),
        3 => (lease.clone(), holder.clone(), number.clone(), units())
            .prop_map(|(lease, holder, step, units)| Step::Extend { lease, holder, step, units }),
        3 => (lease.clone(), holder.clone(), number.clone(), deltas())
            .prop_map(|(lease, holder, step, deltas)| Step::Adjust { lease, holder, step, deltas }),
        3 => (lease.clone(), holder.clone(), number.clone(), units())
            .prop_map(|(lease, holder, step, actual)| Step::Settle { lease, holder, step, actual }),
        2 => (lease.clone(), holder.clone(), number.clone(), prop_oneof![0..30_u32, Just(20_000), Just(100_000)])
            .prop_map(|(lease, holder, step, seconds)| Step::Renew { lease, holder, step, seconds }),
        2 => lease.clone().prop_map(|lease| Step::Find { lease }),
        2 => (lease, holder, number).prop_map(|(lease, holder, step)| Step::Cancel { lease, holder, step }),
        3 => (0..9_000_u64).prop_map(|millis| Step::Pass { millis }),
        1 => Just(Step::Look),
        1 => Just(Step::Reopen),
    ]
}

/// Three entities, two of them children of the third, each with two versions of its rules. A lease always has
/// the same holder: the in-memory store looks it up at its holder's buckets.
fn lease_and_levels(lease: u8, holder: u8) -> (LeaseId, Arc<Levels>) {
    // Versions that no administrative change has made: an evicting store keeps buckets with newer versions.
    let version = 1 + u64::from(holder / 3);
    (LeaseId::new(1_800_000_000_000, u128::from(lease)), levels(lease, version, 20 + 40 * version))
}

/// The levels of a lease under a version of the rules.
pub(crate) fn levels(lease: u8, version: u64, burst: u64) -> Arc<Levels> {
    let limits = [Limit::per_minute("rpm", 7 + version).burst(burst), Limit::per_second("tpm", 3).burst(90)];
    let entities: &[&str] = match lease % 3 {
        0 => &["child-0", "parent"],
        1 => &["child-1", "parent"],
        _ => &["parent"],
    };
    let row = |entity: &&str| {
        let policy = Policy::new(limits.iter().cloned()).expect("a valid policy");
        let resolved = resolve(&subject(entity), [Some(&policy), None, None, None], &Policy::default());
        (subject(entity), resolved)
    };
    Arc::new(Levels::new(Version::new(version), entities.iter().map(row).collect()))
}

/// An answer as text, for comparison. A repeated step has the time of the first one, but levels of now.
fn describe(levels: &Levels, now: Stamp, answer: Result<(&str, Movement), StoreError>) -> String {
    let (what, moved) = match answer {
        Ok(answer) => answer,
        Err(error) => return error.to_string(),
    };
    let mut text = format!("{what} at {} repeat {}", moved.at.as_micros(), moved.is_repeat);
    for reading in &moved.readings {
        let meter = reading.meter(levels);
        let (level, name, units) = (reading.level, reading.name, reading.moved);
        let seen = seen(&meter, now);
        writeln!(text, "\n  {level} {name} moved {units} {:?} {seen}", reading.version()).expect("a text");
    }
    text
}

/// The visible state of a limit; when a full one became full is not visible.
fn seen(meter: &Meter, at: Stamp) -> String {
    let full_at = meter.bucket().full_at();
    let full_at = if meter.is_full(at) { None } else { Some((full_at.whole, full_at.part)) };
    format!("{} {:?} {} full at {full_at:?}", meter.rule(), meter.version(), meter.consumed())
}

fn describe_draw(levels: &Levels, now: Stamp, answer: Result<DrawResult, StoreError>) -> String {
    let answer = answer.map(|drawn| match drawn {
        DrawResult::Granted(moved) => ("granted", moved),
        DrawResult::Refused(moved) => ("refused", moved),
    });
    describe(levels, now, answer)
}

fn describe_move(levels: &Levels, now: Stamp, answer: Result<Movement, StoreError>) -> String {
    describe(levels, now, answer.map(|moved| ("moved", moved)))
}

/// Runs a step, with the lease and the levels that `of` returns for its numbers.
pub(crate) async fn run_step(
    store: &dyn Store,
    step: &Step,
    now: Stamp,
    of: &dyn Fn(u8, u8) -> (LeaseId, Arc<Levels>),
) -> String {
    match *step {
        Step::Draw { lease, holder, units, seconds, returns } => {
            let on_expiry = if returns { OnExpiry::Return } else { OnExpiry::Settle };
            let terms = Terms { deadline: Duration::from_secs(seconds.into()), on_expiry };
            let (lease, levels) = of(lease, holder);
            let units = Units::from_slice(&units);
            let draw = Draw { lease, levels: levels.clone(), units, terms, is_watched: true };
            describe_draw(&levels, now, store.draw(&draw).await)
        }
        Step::Spend { lease, holder, units } => {
            let terms = Terms { deadline: Duration::from_secs(9), on_expiry: OnExpiry::Settle };
            let (lease, levels) = of(lease, holder);
            let units = Units::from_slice(&units);
            let draw = Draw { lease, levels: levels.clone(), units, terms, is_watched: true };
            describe_draw(&levels, now, store.spend(&draw).await)
        }
        Step::Extend { lease, holder, step, units } => {
            let ((lease, levels), step) = (of(lease, holder), step.into());
            let units = Units::from_slice(&units);
            let extend = Extend { lease, step, levels: levels.clone(), units };
            describe_draw(&levels, now, store.extend(&extend).await)
        }
        Step::Adjust { lease, holder, step, deltas } => {
            let ((lease, levels), step) = (of(lease, holder), step.into());
            let deltas = Deltas::from_slice(&deltas);
            let adjust = Adjust { lease, step, levels: levels.clone(), deltas };
            describe_move(&levels, now, store.adjust(&adjust).await)
        }
        Step::Settle { lease, holder, step, actual } => {
            let ((lease, levels), step) = (of(lease, holder), step.into());
            let actual = Units::from_slice(&actual);
            let settle = Settle { lease, step, levels: levels.clone(), actual, is_watched: true };
            describe_move(&levels, now, store.settle(&settle).await)
        }
        Step::Renew { lease, holder, step, seconds } => {
            let ((lease, levels), step) = (of(lease, holder), step.into());
            let renew = Renew { lease, step, levels, span: Duration::from_secs(seconds.into()) };
            format!("{:?}", store.renew(&renew).await.map_err(|error| error.to_string()))
        }
        Step::Find { lease } => match store.lease(of(lease, 0).0).await {
            Ok(LeaseStatus::Open(LeaseSnapshot { at, levels, record })) => {
                format!("{at:?} {:?} {:?} {record:?}", levels.version(), levels.names())
            }
            Ok(LeaseStatus::Ended(ended)) => format!("{ended:?}"),
            Err(error) => error.to_string(),
        },
        Step::Cancel { lease, holder, step } => {
            let ((lease, levels), step) = (of(lease, holder), step.into());
            let cancel = Cancel { lease, step, levels: levels.clone(), is_watched: true };
            describe_move(&levels, now, store.cancel(&cancel).await)
        }
        Step::Pass { .. } => {
            // Stores report expired leases at different times: both are swept.
            store.sweep(1_000).await.map_or_else(|error| error.to_string(), |_| String::new())
        }
        Step::Look | Step::Reopen => visible_state(store).await,
    }
}

/// All visible state.
pub(crate) async fn visible_state(store: &dyn Store) -> String {
    let subjects = ["child-0", "child-1", "parent"].map(subject);
    let seen = store.balances(&Lookup::Subjects(subjects.to_vec())).await.expect("balances are returned");
    let (mut text, at) = (String::new(), seen.at);
    for mut bucket in seen.buckets {
        // A full limit without consumption is equivalent to none.
        bucket.meters.retain(|meter| !meter.is_full(at) || meter.consumed() != 0);
        if bucket.meters.is_empty() {
            continue;
        }
        bucket.meters.sort_by(|one, other| one.rule().row().cmp(other.rule().row()));
        let meters: Vec<_> = bucket.meters.iter().map(|meter| self::seen(meter, at)).collect();
        writeln!(text, "{} {meters:?}", bucket.subject).expect("a text");
    }
    let of = UsageOf::Resource(subjects[0].resource.clone());
    for window in Window::ALL {
        let query = UsageQuery { of: of.clone(), window, range: Stamp::ZERO..Stamp::MAX };
        for line in store.usage(&query, &Paging::default()).await.expect("usage is returned").items {
            // A file saturates at the maximum of a column.
            let units = [line.tally.units, line.tally.own].map(|units| units.min(i64::MAX.unsigned_abs()));
            let (start, leases) = (line.start, line.tally.leases);
            writeln!(text, "{} {} {window:?} {start:?} {units:?} {leases}", line.subject, line.limit)
                .expect("a text");
        }
    }
    text
}

async fn check_equivalence(steps: Vec<Step>) -> Result<(), TestCaseError> {
    let (place, clock) = (TempFile::new(), ManualWall::new(START));
    let memory = Memory::with_clock(clock.clone());
    let in_memory = Sqlite::in_memory_with(&clock).await;
    let mut pair = [place.open(&clock).await, place.open(&clock).await];
    for (number, step) in steps.iter().enumerate() {
        if let Step::Pass { millis } = step {
            clock.advance(Duration::from_millis(*millis));
        }
        if let Step::Reopen = step {
            pair[number % 2].close().await;
            pair[number % 2] = place.open(&clock).await;
        }
        let wanted = run_step(&memory, step, clock.now(), &lease_and_levels).await;
        prop_assert_eq!(
            &run_step(&in_memory, step, clock.now(), &lease_and_levels).await,
            &wanted,
            "step {} is {:?}",
            number,
            step
        );
        prop_assert_eq!(
            &run_step(&pair[number % 2], step, clock.now(), &lease_and_levels).await,
            &wanted,
            "step {} is {:?}",
            number,
            step
        );
    }
    prop_assert_eq!(visible_state(&pair[0]).await, visible_state(&memory).await);
    prop_assert_eq!(visible_state(&pair[1]).await, visible_state(&memory).await);
    Ok(())
}

pub(crate) trait OnClock {
    async fn in_memory_with(clock: &ManualWall) -> Sqlite;
}

impl OnClock for Sqlite {
    async fn in_memory_with(clock: &ManualWall) -> Sqlite {
        tidegate_store::SqliteOptions::memory().clock(clock.clone()).open().await.expect("the store opens")
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(
        std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).map_or(60, |cases: u32| cases.min(2_000))
    ))]

    #[test]
    fn any_call_sequence_matches_memory(steps in prop::collection::vec(step(), 1..60)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(check_equivalence(steps))?;
    }
}
