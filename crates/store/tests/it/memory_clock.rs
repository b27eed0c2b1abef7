//! The in-memory store's clock.
//!
//! Two callers used to read the clock before they locked a bucket: the first reader could come second to the
//! bucket and be granted units at a time before they were returned. By those times more than the limit was in
//! use. So a bucket's times never run against the order of its changes.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::exactness::check;
use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::name::Subject;
use tidegate_core::limit::policy::{OnExpiry, Policy, Version};
use tidegate_core::limit::resolve::resolve;
use tidegate_core::limit::rule::Limit;
use tidegate_core::time::Stamp;
use tidegate_store::wrap::Observed;
use tidegate_store::{
    AnchoredWall, Buckets, Cancel, Draw, DrawResult, LeaseStatus, ManualWall, Memory, Renew, Store as _,
    Terms, WallClock,
};

use crate::kit::clock::{assert_books_at_wall_clock, assert_follows_vectors, grants_over_ten_flaps, pass};

const START: Stamp = Stamp::from_secs(1_800_000_000);

/// Reports that the clock was read, and waits for permission to return.
type Hold = (Sender<()>, Receiver<()>);

/// A clock that pauses its next reader between reading and returning.
#[derive(Debug, Clone)]
struct PausingClock {
    time: ManualWall,
    next: Arc<Mutex<Option<Hold>>>,
}

impl WallClock for PausingClock {
    fn now(&self) -> Stamp {
        let now = self.time.now();
        let hold = self.next.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some((has_read, may_go)) = hold {
            has_read.send(()).expect("the test awaits the reading");
            // A store that reads the clock under its locks blocks the other caller until this times out.
            let _ = may_go.recv_timeout(Duration::from_secs(60));
        }
        now
    }
}

fn draw(lease: u128) -> Draw {
    let subject = Subject::new("acme", "gpt").expect("valid");
    let policy = Policy::new([Limit::per_day("rpm", 10)]).expect("valid");
    let resolved = resolve(&subject, [Some(&policy), None, None, None], &Policy::default());
    let levels = Arc::new(Levels::new(Version::ZERO, vec![(subject, resolved)]));
    let units = levels.units(&[("rpm", 10)]).expect("valid");
    let terms = Terms { deadline: Duration::from_secs(3_600), on_expiry: OnExpiry::Settle };
    Draw { lease: LeaseId::from_number(lease), levels, units, terms, is_watched: true }
}

#[tokio::test(flavor = "multi_thread")]
async fn bucket_times_follow_the_order_of_changes() {
    let clock = PausingClock { time: ManualWall::new(START), next: Arc::default() };
    let store = Arc::new(Observed::new(Memory::with_clock(clock.clone())));
    let first = draw(1);
    assert!(matches!(store.draw(&first).await.unwrap(), DrawResult::Granted(_)));

    let ((has_read, reads), (go, may_go)) = (channel(), channel());
    *clock.next.lock().unwrap() = Some((has_read, may_go));
    let (slow_store, runtime) = (store.clone(), tokio::runtime::Handle::current());
    let slow =
        tokio::task::spawn_blocking(move || runtime.block_on(async { slow_store.draw(&draw(2)).await }));
    let reads = tokio::task::spawn_blocking(move || reads.recv());
    reads.await.unwrap().unwrap();

    clock.time.advance(Duration::from_millis(1));
    store
        .cancel(&Cancel { lease: first.lease, step: 1, levels: first.levels, is_watched: true })
        .await
        .unwrap();
    // The receiver is gone if the clock was read under the lock.
    let _ = go.send(());
    slow.await.unwrap().unwrap();
    let report = check(&store.log());
    assert!(report.is_exact(), "{report}");
}

/// Regression: a step that read the clock before a lease was due was granted after a sweep or a lookup had
/// found it due, and the lease was then ended nevertheless.
#[tokio::test]
async fn step_after_a_sweep_or_lookup_has_its_time() {
    let later = START + Duration::from_secs(1);
    for is_sweep in [true, false] {
        let clock = ManualWall::new(START);
        let store = Memory::with_clock(clock.clone());
        let draw = draw(1);
        assert!(matches!(store.draw(&draw).await.unwrap(), DrawResult::Granted(_)));
        clock.advance(Duration::from_secs(1));
        if is_sweep {
            store.sweep(1).await.unwrap();
        } else {
            store.lease(draw.lease).await.unwrap();
        }
        clock.set(START);
        let cancel = Cancel { lease: draw.lease, step: 1, levels: draw.levels, is_watched: true };
        assert_eq!(store.cancel(&cancel).await.unwrap().at, later);
    }
}

#[tokio::test]
async fn renewal_is_exact_when_the_clock_steps_back() {
    let time = ManualWall::new(START);
    let time_source = time.clone();
    let store = Memory::with_clock(AnchoredWall::new(move || time_source.now()));
    let draw = draw(1);
    assert!(matches!(store.draw(&draw).await.unwrap(), DrawResult::Granted(_)));
    let renew = |step, mins: u64| {
        let span = Duration::from_secs(mins * 60);
        Renew { lease: draw.lease, step, levels: Arc::clone(&draw.levels), span }
    };
    time.advance(Duration::from_secs(1_800));
    let first = store.renew(&renew(1, 60)).await.unwrap();
    assert_eq!(first.deadline, START + Duration::from_secs(5_400));
    time.set(Stamp::from_secs(START.as_micros() / 1_000_000 - 7_200));
    let again = store.renew(&renew(2, 60)).await.unwrap();
    assert_eq!((again.at, again.deadline), (first.at, first.deadline));
    pass(&store, &time, 3_540).await;
    assert!(matches!(store.lease(draw.lease).await.unwrap(), LeaseStatus::Open(_)));
    pass(&store, &time, 60).await;
    assert!(matches!(store.lease(draw.lease).await.unwrap(), LeaseStatus::Ended(_)));
}

fn anchored(clock: &ManualWall) -> Memory {
    let clock = clock.clone();
    Memory::with_clock(AnchoredWall::new(move || clock.now()))
}

#[tokio::test]
async fn clock_follows_the_vectors() {
    assert_follows_vectors(async |clock| anchored(clock)).await;
}

#[tokio::test]
async fn flapping_clock_credits_elapsed_time_only() {
    let clock = ManualWall::new(START);
    let store = anchored(&clock);
    assert_eq!(grants_over_ten_flaps(&store, &clock).await, 30);
}

#[tokio::test]
async fn usage_is_booked_at_the_wall_clock() {
    let clock = ManualWall::new(START);
    let store = anchored(&clock);
    assert_books_at_wall_clock(&store, &clock).await;
}
