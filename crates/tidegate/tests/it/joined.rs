//! One permit over a throttle and a shared limit: what an acquire charges, and what each outcome settles on
//! both sides.

use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tidegate::{
    Budget, Cost, Joined, JoinedError, JoinedPermit, Limit, LimitError, Limiter, Memory, Outcome, Refused,
    Slots, Throttle,
};

use crate::kit::limiter::{ACME, Act, HookStore, Moment, calm, flushed, level, memory, over, settled};
use crate::kit::secs;

const COST: Cost = Cost::request().tokens(100);

/// Eight slots and a budget of tokens, under limits of a thousand of each a day.
fn joined() -> (Joined, Memory) {
    let throttle = Throttle::builder()
        .slots(Slots::fixed(8))
        .budget(Budget::tokens(10_000, secs(3_600)))
        .build()
        .expect("within the bounds");
    let memory = Memory::new();
    let limits = [Limit::per_day("rpm", 1_000), Limit::per_day("tpm", 1_000)];
    let limiter = Limiter::builder(memory.clone()).defaults(limits).build().expect("within the bounds");
    (throttle.limited_by(&limiter), memory)
}

async fn consumed(memory: &Memory) -> (i64, i64) {
    let of = async |limit| level(memory, ACME, limit).await.map_or(0, |(_, consumed)| consumed);
    (of("rpm").await, of("tpm").await)
}

#[tokio::test(start_paused = true)]
async fn permit_holds_slot_and_lease() {
    let (joined, memory) = joined();
    let permit = joined.acquire(ACME, COST).await.unwrap();
    let snapshot = joined.throttle().snapshot();
    assert_eq!((snapshot.in_flight, snapshot.tokens_used), (1, 100));
    assert_eq!(consumed(&memory).await, (1, 100));
    assert_eq!((permit.cost(), permit.degraded(), permit.is_probe()), (COST, None, false));
    assert_eq!(permit.subject().to_string(), "acme on gpt");
    assert_eq!((permit.lease().held("rpm"), permit.lease().held("tpm")), (Some(1), Some(100)));
    let left: Vec<_> = permit.balances().iter().map(|balance| balance.available).collect();
    assert_eq!(left, [999, 900]);
    assert_eq!(joined.limiter().stats().open_leases, 1);
}

#[tokio::test(start_paused = true)]
async fn several_requests_and_kinds_are_drawn_in_full() {
    let (joined, memory) = joined();
    let mut permit =
        joined.acquire(ACME, Cost::requests(3).input_tokens(80).output_tokens(20)).await.unwrap();
    assert_eq!(consumed(&memory).await, (3, 100));
    assert_eq!(joined.throttle().snapshot().tokens_used, 100);
    permit.spend(Cost::request().input_tokens(70));
    permit.spend(Cost::request().output_tokens(5));
    permit.settle(Outcome::success()).await.unwrap();
    assert_eq!(consumed(&memory).await, (3, 75), "the requests stay drawn");
    assert_eq!(joined.throttle().snapshot().tokens_used, 75);
}

#[tokio::test(start_paused = true)]
async fn kinds_of_tokens_draw_limits_of_their_own() {
    let throttle = Throttle::builder().slots(Slots::fixed(8)).build().unwrap();
    let limits = [Limit::per_day("itpd", 1_000), Limit::per_day("otpd", 1_000)];
    let limiter = Limiter::builder(Memory::new()).defaults(limits).build().unwrap();
    let kinds = |cost: Cost| [("itpd", cost.input_tokens), ("otpd", cost.output_tokens)];
    let joined = throttle.limited_by(&limiter).costs(kinds);
    let permit = joined.acquire(ACME, Cost::request().input_tokens(80).output_tokens(20)).await.unwrap();
    assert_eq!((permit.lease().held("itpd"), permit.lease().held("otpd")), (Some(80), Some(20)));
    let spent = Cost::request().input_tokens(70).output_tokens(30);
    permit.settle(Outcome::success().spent(spent)).await.unwrap();
    let left = async || -> Vec<i64> {
        limiter.balances(ACME).await.unwrap().iter().map(|line| line.balance.available).collect()
    };
    assert_eq!(left().await, [930, 970]);
    // A total does not say of which kind it was: the estimates stand.
    let mut permit = joined.acquire(ACME, Cost::request().input_tokens(80).output_tokens(20)).await.unwrap();
    permit.spend(50);
    permit.settle(Outcome::success()).await.unwrap();
    assert_eq!(left().await, [850, 950]);
}

type Report = fn(&mut JoinedPermit<'static>);
/// The report before the end, the outcome, tokens that stay used at the throttle, and units at the store.
type Row = (Report, Option<Outcome>, u64, (i64, i64));

#[tokio::test(start_paused = true)]
async fn each_outcome_settles_permit_and_lease() {
    let spent = Cost::request().tokens(60);
    let nothing: Report = |_| {};
    let reported: Report = |permit| permit.spend(40);
    let batch: Report = |permit| permit.record(Outcome::success().spent(Cost::request().tokens(40)));
    let table: [Row; 16] = [
        (nothing, Some(Outcome::success()), 100, (1, 100)),
        (nothing, Some(Outcome::success().spent(spent)), 60, (1, 60)),
        (nothing, Some(Outcome::success().spent(Cost::request())), 0, (1, 0)),
        (nothing, Some(Outcome::success().spent(Cost::request().tokens(170))), 170, (1, 170)),
        (reported, Some(Outcome::success()), 40, (1, 40)),
        (batch, Some(Outcome::success()), 40, (1, 40)),
        (nothing, Some(Outcome::failure()), 0, (0, 0)),
        (nothing, Some(Outcome::failure().spent(spent)), 60, (1, 60)),
        (reported, Some(Outcome::failure()), 40, (1, 40)),
        (nothing, Some(Outcome::overload()), 0, (0, 0)),
        (nothing, Some(Outcome::overload().spent(spent)), 60, (1, 60)),
        (reported, Some(Outcome::overload()), 40, (1, 40)),
        (nothing, Some(Outcome::ignored()), 0, (0, 0)),
        (reported, Some(Outcome::ignored()), 40, (1, 40)),
        (nothing, None, 0, (0, 0)),
        (reported, None, 40, (1, 40)),
    ];
    for (row, (report, outcome, tokens, units)) in table.into_iter().enumerate() {
        let over_network = calm();
        let (here, here_memory) = joined();
        let throttle = here.throttle().twin();
        let limits = [Limit::per_day("rpm", 1_000), Limit::per_day("tpm", 1_000)];
        let remote = over(&over_network).defaults(limits).build().unwrap();
        for (joined, memory) in [(here, &here_memory), (throttle.limited_by(&remote), memory(&over_network))]
        {
            let mut permit = joined.acquire(ACME, COST).await.unwrap().into_owned();
            report(&mut permit);
            match outcome {
                Some(outcome) => drop(permit.settle(outcome).await.unwrap()),
                None => drop(permit),
            }
            let snapshot = joined.throttle().snapshot();
            assert_eq!((snapshot.in_flight, snapshot.tokens_used), (0, tokens), "row {row}");
            flushed(joined.limiter()).await;
            assert_eq!(consumed(memory).await, units, "row {row}");
            let in_ledger = settled(memory, ACME, "tpm").await.0;
            assert_eq!(i64::try_from(in_ledger), Ok(units.1), "row {row}");
            assert_eq!(joined.limiter().stats().open_leases, 0, "row {row}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn unpolled_settle_ends_permit_and_lease() {
    let network = calm();
    let limits = [Limit::per_day("rpm", 1_000), Limit::per_day("tpm", 1_000)];
    let limiter = over(&network).defaults(limits).build().unwrap();
    let throttle = Throttle::builder().slots(Slots::fixed(1)).build().unwrap();
    let joined = throttle.limited_by(&limiter);
    let permit = joined.acquire(ACME, COST).await.unwrap();
    let ending = permit.settle(Outcome::success().spent(Cost::request().tokens(7)));
    assert_eq!(throttle.snapshot().in_flight, 0);
    drop(ending);
    flushed(&limiter).await;
    assert_eq!(consumed(memory(&network)).await, (1, 7));
}

#[tokio::test(start_paused = true)]
async fn permit_can_be_settled_in_another_task() {
    let (joined, memory) = joined();
    let mut permit = joined.acquire(ACME, COST).await.unwrap().into_owned();
    let task = tokio::spawn(async move {
        permit.spend(10);
        permit.settle(Outcome::success()).await
    });
    task.await.unwrap().unwrap();
    assert_eq!(consumed(&memory).await, (1, 10));
    assert_eq!(joined.throttle().snapshot().in_flight, 0);
}

#[tokio::test(start_paused = true)]
async fn cost_without_tokens_draws_only_requests() {
    let (joined, memory) = joined();
    let permit = joined.acquire(ACME, Cost::request()).await.unwrap();
    assert_eq!(permit.lease().held("tpm"), None);
    permit.settle(Outcome::success()).await.unwrap();
    assert_eq!(consumed(&memory).await, (1, 0));
    // Tokens used without a reservation are charged as well.
    let permit = joined.acquire(ACME, Cost::request()).await.unwrap();
    permit.settle(Outcome::success().spent(Cost::request().tokens(30))).await.unwrap();
    assert_eq!(consumed(&memory).await, (2, 30));
}

#[tokio::test(start_paused = true)]
async fn custom_cost_map_applies_to_draw_and_settle() {
    let limiter = Limiter::builder(Memory::new())
        .defaults([Limit::per_day("cents", 100), Limit::per_day("kilobytes", 100)])
        .build()
        .unwrap();
    let names = ["cents".to_owned(), "kilobytes".to_owned()];
    let joined = Throttle::builder().build().unwrap().limited_by(&limiter).costs(move |cost| {
        let [cents, kilobytes] = names.clone();
        [(cents, cost.tokens / 10), (kilobytes, cost.bytes / 1_000)]
    });
    let permit = joined.acquire(ACME, Cost::request().tokens(500).bytes(20_000)).await.unwrap();
    let left = async || limiter.balances(ACME).await.unwrap().into_iter().map(|line| line.balance.available);
    assert_eq!(left().await.collect::<Vec<_>>(), [50, 80]);
    permit.settle(Outcome::success().spent(Cost::request().tokens(100).bytes(5_000))).await.unwrap();
    assert_eq!(left().await.collect::<Vec<_>>(), [90, 95]);
}

#[tokio::test(start_paused = true)]
async fn unknown_limit_error_lists_known_limits() {
    let limiter = Limiter::builder(Memory::new()).defaults([Limit::per_day("rpm", 10)]).build().unwrap();
    let throttle = Throttle::builder().slots(Slots::fixed(1)).build().unwrap();
    let joined = throttle.limited_by(&limiter);
    let error = joined.acquire(ACME, COST).await.unwrap_err();
    assert_eq!(error.to_string(), "`acme on gpt` has no limit `tpm`; it has `rpm`");
    assert!(error.is_final() && error.limit().is_some() && error.refused().is_none());
    assert_eq!(throttle.snapshot().in_flight, 0);
    // An unknown name at settle time keeps the drawn units used, because the work is done.
    let permit = joined.acquire(ACME, Cost::request()).await.unwrap();
    let error = permit.settle(Outcome::success().spent(COST)).await.unwrap_err();
    assert!(matches!(error, LimitError::Cost(_)), "{error}");
    assert_eq!(limiter.balances(ACME).await.unwrap()[0].balance.available, 9);
    let stats = limiter.stats();
    assert_eq!((stats.open_leases, throttle.snapshot().in_flight), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn panicking_cost_map_leaves_no_charge() {
    let (here, memory) = joined();
    let joined = here.clone().costs(|cost| {
        assert!(cost.tokens != 13, "a map with a bug, as the test planned");
        [("rpm", 1), ("tpm", cost.tokens)]
    });
    let unlucky = Cost::request().tokens(13);
    let mut acquiring = Box::pin(joined.acquire(ACME, unlucky));
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    let polled = std::panic::catch_unwind(AssertUnwindSafe(|| acquiring.as_mut().poll(&mut context)));
    assert!(polled.is_err());
    assert_eq!((joined.throttle().snapshot().admitted, consumed(&memory).await), (0, (0, 0)));
    // At the end: the request counts as ignored.
    let permit = joined.acquire(ACME, COST).await.unwrap().into_owned();
    let settling = std::panic::catch_unwind(AssertUnwindSafe(|| {
        drop(permit.settle(Outcome::success().spent(unlucky)));
    }));
    assert!(settling.is_err());
    assert_eq!((joined.throttle().snapshot().in_flight, consumed(&memory).await), (0, (0, 0)));
    // In a drop, with tokens reported: the drawn units stay used, and the process does not abort.
    let mut permit = joined.acquire(ACME, COST).await.unwrap();
    permit.spend(13);
    drop(permit);
    assert_eq!(consumed(&memory).await, (1, 100));
    assert_eq!(joined.limiter().stats().open_leases, 0);
}

#[tokio::test(start_paused = true)]
async fn impossible_cost_is_refused_without_local_charge() {
    let (joined, _) = joined();
    let bare =
        Throttle::builder().slots(Slots::fixed(1)).build().unwrap().limited_by(&Limiter::new(Memory::new()));
    let error = joined.acquire(ACME, Cost::request().tokens(1_001)).await.unwrap_err();
    assert!(matches!(error, JoinedError::Limit(LimitError::TooLarge(_))) && error.is_final(), "{error}");
    let error = joined.acquire(ACME, Cost::request().tokens(10_001)).await.unwrap_err();
    assert!(matches!(error, JoinedError::Refused(Refused::TooLarge { .. })) && error.is_final(), "{error}");
    let error = joined.acquire(("", "gpt"), COST).await.unwrap_err();
    assert!(matches!(error, JoinedError::Limit(LimitError::Name(_))), "{error}");
    let error = bare.acquire(ACME, COST).await.unwrap_err();
    assert!(matches!(error, JoinedError::Limit(LimitError::NoLimits { .. })), "{error}");
    for joined in [&joined, &bare] {
        let snapshot = joined.throttle().snapshot();
        assert_eq!((snapshot.in_flight, snapshot.tokens_used, snapshot.admitted), (0, 0, 0));
    }
    // A queue at the throttle makes no difference: an impossible cost does not wait.
    let permits: Vec<_> = (0..8).map(|_| joined.throttle().try_acquire(Cost::request()).unwrap()).collect();
    let error = joined.acquire(ACME, Cost::request().tokens(1_001)).await.unwrap_err();
    assert!(matches!(error, JoinedError::Limit(LimitError::TooLarge(_))), "{error}");
    drop(permits);
}

#[tokio::test(start_paused = true)]
async fn try_acquire_never_waits() {
    let limiter = Limiter::builder(Memory::new()).defaults([Limit::per_minute("rpm", 2)]).build().unwrap();
    let throttle = Throttle::builder().slots(Slots::fixed(1)).build().unwrap();
    let joined = throttle.limited_by(&limiter);
    let permit = joined.try_acquire(ACME, Cost::request()).await.unwrap();
    let error = joined.try_acquire(ACME, Cost::request()).await.unwrap_err();
    assert!(matches!(error, JoinedError::Refused(Refused::Limited { .. })), "{error}");
    permit.settle(Outcome::success()).await.unwrap();
    joined.try_acquire(ACME, Cost::request()).await.unwrap().settle(Outcome::success()).await.unwrap();
    let error = joined.try_acquire(ACME, Cost::request()).await.unwrap_err();
    assert!(matches!(error, JoinedError::Limit(LimitError::Limited(_))), "{error}");
    assert_eq!(error.retry_after(), Some(secs(30)));
    let snapshot = throttle.snapshot();
    assert_eq!((snapshot.in_flight, snapshot.admitted), (0, 2));
}

#[tokio::test(start_paused = true)]
async fn acquire_is_immediate_with_enough_units() {
    let (joined, _) = joined();
    let start = tokio::time::Instant::now();
    for _ in 0..5 {
        let permit = joined.acquire_within(ACME, COST, Duration::ZERO).await.unwrap();
        permit.settle(Outcome::success()).await.unwrap();
    }
    assert_eq!(start.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn cost_map_runs_once_before_any_charge() {
    // For an uncached subject or an exhausted limit it once ran again, with a slot already taken.
    let (here, _) = joined();
    let (throttle, seen) = (here.throttle().clone(), Arc::new(Mutex::new(Vec::new())));
    let runs = Arc::clone(&seen);
    let joined = here.clone().costs(move |cost| {
        runs.lock().expect("no panic").push(throttle.snapshot().in_flight);
        [("rpm", 1), ("tpm", cost.tokens)]
    });
    let ran = || std::mem::take(&mut *seen.lock().expect("no panic"));
    let first = joined.acquire(ACME, COST).await.unwrap();
    assert_eq!(ran(), [0], "the subject is not cached");
    first.settle(Outcome::ignored()).await.unwrap();
    joined.try_acquire(ACME, COST).await.unwrap().settle(Outcome::ignored()).await.unwrap();
    assert_eq!(ran(), [0], "the subject is cached");
    let all = joined.limiter().try_acquire(ACME, [("tpm", 1_000)]).await.unwrap();
    assert!(joined.try_acquire(ACME, COST).await.is_err());
    assert_eq!(ran(), [0], "a limit is exhausted");
    let waiting = tokio::spawn({
        let joined = joined.clone();
        async move { joined.acquire(ACME, COST).await.map(drop) }
    });
    tokio::time::sleep(secs(1)).await;
    drop(all);
    waiting.await.unwrap().unwrap();
    assert_eq!(ran(), [0], "after a wait");
}

/// Time in the store once counted as upstream latency, and cut the rate.
#[tokio::test(start_paused = true)]
async fn time_in_the_store_is_not_latency() {
    let store = HookStore::new(&Memory::new(), |_, moment| match moment {
        Moment::Before => Act::Sleep(secs(5)),
        Moment::After => Act::Pass,
    });
    let limiter = over(&store)
        .defaults([Limit::per_day("rpm", 1_000)])
        .store_deadline(secs(60))
        .build()
        .expect("within the bounds");
    let joined = Throttle::new().limited_by(&limiter);
    for _ in 0..3 {
        let permit = joined.acquire(ACME, Cost::request()).await.unwrap();
        tokio::time::sleep(Duration::from_millis(200)).await;
        permit.settle(Outcome::success()).await.unwrap();
    }
    let slowest = joined.throttle().snapshot().latency_p95.expect("three successes");
    assert!(slowest < secs(1), "{slowest:?}");
}
