//! Requests with a client-chosen id: retries return the same lease and are charged once, across lost replies,
//! cancelled callers, changed policies and outages.

use std::sync::{Arc, OnceLock};

use tidegate::store::wrap::Verb;
use tidegate::store::{AnchoredWall, ManualWall, WallClock as _};
use tidegate::{
    Degraded, Limit, LimitError, Limiter, Memory, OnUnavailable, Request, Scope, Share, Sqlite,
    SqliteOptions, Stamp, StoreError,
};

use crate::kit::limiter::{ACME, Act, HookStore, Moment, calm, level, memory, over, policy, poll_and_drop};
use crate::kit::{millis, secs};

const ID: u128 = 0x1234_5678;
const START: Stamp = Stamp::from_secs(1_800_000_000);

fn limits() -> [Limit; 2] {
    [Limit::per_day("rpm", 1).burst(100), Limit::per_day("tpm", 1).burst(1_000)]
}

fn request(limiter: &Limiter) -> Request<'_> {
    limiter.request(ACME, &[("tpm", 100)]).id(ID)
}

fn is_reused<T>(answer: &Result<T, LimitError>) -> bool {
    matches!(answer, Err(LimitError::Reused { .. }))
}

/// The behaviour that holds for every store.
async fn check_retries(limiter: &Limiter) {
    let first = request(limiter).deadline(secs(60)).try_acquire().await.expect("enough units");
    assert_eq!(first.drawn_before(), None);
    let id = first.detach();
    let again = request(limiter).deadline(secs(60)).try_acquire().await.expect("enough units");
    assert_eq!((again.id(), again.held("tpm")), (id, Some(100)));
    assert!(again.drawn_before().is_some_and(|left| left <= secs(60)));
    assert_eq!(
        again.balances().iter().find(|line| line.limit.as_str() == "tpm").expect("enough units").available,
        900
    );
    again.detach();
    let waited = request(limiter).deadline(secs(60)).acquire_within(secs(60)).await.expect("enough units");
    assert_eq!((waited.id(), waited.drawn_before().is_some()), (id, true));
    waited.detach();

    assert!(is_reused(&request(limiter).deadline(secs(61)).try_acquire().await), "another deadline");
    let other = limiter.request(ACME, &[("tpm", 101)]).id(ID).deadline(secs(60));
    assert!(is_reused(&other.try_acquire().await), "another cost");
    let other = limiter.request(ACME, &[("tpm", 100), ("rpm", 1)]).id(ID).deadline(secs(60));
    assert!(is_reused(&other.try_acquire().await), "another limit");
    let other = request(limiter).deadline(secs(60)).limits([Limit::per_minute("tpm", 500)]);
    assert!(is_reused(&other.try_acquire().await), "a limit of its own");
    assert!(is_reused(&request(limiter).spend().await), "a spend");

    // A policy with more limits: a retry still returns the original lease.
    let more = limits().into_iter().chain([Limit::per_day("usd", 5)]);
    limiter.admin("tests").set_policy(Scope::System, policy(more)).await.expect("enough units");
    let again = request(limiter).deadline(secs(60)).try_acquire().await.expect("enough units");
    assert_eq!((again.id(), again.drawn_before().is_some()), (id, true));
    again.detach();

    // After an extension, a retry returns the current step and units.
    limiter.extend_lease(id, 1, [("tpm", 50)]).await.expect("enough units");
    let mut again = request(limiter).deadline(secs(60)).try_acquire().await.expect("enough units");
    assert_eq!(again.held("tpm"), Some(150));
    again.settle([("tpm", 120)]).await.expect("enough units");
    let ended = request(limiter).deadline(secs(60)).try_acquire().await;
    assert!(matches!(ended, Err(LimitError::Store(StoreError::Ended { .. }))), "{ended:?}");

    for _ in 0..3 {
        limiter.request(ACME, &[("tpm", 30)]).id(ID + 1).spend().await.expect("enough units");
    }
    assert!(is_reused(&limiter.request(ACME, &[("tpm", 31)]).id(ID + 1).spend().await));
    let balances = limiter.balances(ACME).await.expect("enough units");
    let tpm = balances.iter().find(|line| line.balance.limit.as_str() == "tpm").expect("enough units");
    assert_eq!(tpm.balance.available, 1_000 - 120 - 30, "each was charged once");
}

async fn with_policy(limiter: Limiter) -> Limiter {
    limiter.admin("tests").set_policy(Scope::System, policy(limits())).await.expect("enough units");
    limiter
}

/// A lease is drawn at wall time, and its deadline is in the store's time.
#[tokio::test]
async fn repeat_is_recognized_after_a_step_back() {
    let clock = ManualWall::new(START);
    let hands = clock.clone();
    let store = Memory::with_clock(AnchoredWall::new(move || hands.now()));
    let limiter = Limiter::builder(store).defaults(limits()).build().unwrap();
    limiter.balances(ACME).await.unwrap();
    clock.set(START - secs(3_600));
    check_retries(&limiter).await;
}

#[tokio::test(start_paused = true)]
async fn memory_store_deduplicates_by_id() {
    check_retries(&with_policy(Limiter::new(Memory::new())).await).await;
}

#[tokio::test]
async fn sqlite_store_deduplicates_by_id() {
    let folder = tempfile::tempdir().unwrap();
    let options = SqliteOptions::file(folder.path().join("limits.db"));
    let store: Sqlite = options.clock(ManualWall::new(START)).open().await.unwrap();
    check_retries(&with_policy(crate::kit::limiter::with_long_deadline(store).build().unwrap()).await).await;
}

#[tokio::test(start_paused = true)]
async fn networked_store_deduplicates_by_id() {
    let network = calm();
    check_retries(&with_policy(over(&network).build().unwrap()).await).await;
}

#[tokio::test(start_paused = true)]
async fn retry_after_cancellation_is_charged_once() {
    let mut found = 0;
    for polls in 0..14 {
        let store = Memory::new();
        let slow = HookStore::new(&store, |_, _| Act::Sleep(millis(2)));
        let limiter = over(&slow).defaults(limits()).build().unwrap();
        if let Some(Ok(lease)) = poll_and_drop(request(&limiter).try_acquire(), polls).await {
            lease.detach();
        }
        crate::kit::limiter::flushed(&limiter).await;
        let lease = request(&limiter).try_acquire().await.unwrap();
        found += u32::from(lease.drawn_before().is_some());
        assert_eq!(level(&store, ACME, "tpm").await, Some((900, 100)), "{polls} polls");
        lease.detach();
    }
    assert!((2..14).contains(&found), "some had drawn before, and some had not: {found}");
}

#[tokio::test(start_paused = true)]
async fn queued_retry_gets_its_lease_at_once() {
    let limiter = with_policy(Limiter::new(Memory::new())).await;
    let id = request(&limiter).try_acquire().await.unwrap().detach();
    let other = limiter.clone();
    let waiting =
        tokio::spawn(async move { other.acquire_within(ACME, [("tpm", 1_000)], secs(1_000_000_000)).await });
    while limiter.stats().waiting == 0 {
        tokio::task::yield_now().await;
    }
    let again = request(&limiter).try_acquire().await.unwrap();
    assert_eq!((again.id(), again.drawn_before().is_some()), (id, true));
    again.detach();
    let again = request(&limiter).acquire_within(secs(1)).await.unwrap();
    assert_eq!(again.id(), id);
    again.detach();
    waiting.abort();
}

#[tokio::test(start_paused = true)]
async fn repeated_spend_skips_the_queue() {
    let limiter = with_policy(Limiter::new(Memory::new())).await;
    let spend = async |units| limiter.request(ACME, &[("tpm", units)]).id(ID).spend().await;
    spend(30).await.unwrap();
    let other = limiter.clone();
    let waiting =
        tokio::spawn(async move { other.acquire_within(ACME, [("tpm", 1_000)], secs(1_000_000_000)).await });
    while limiter.stats().waiting == 0 {
        tokio::task::yield_now().await;
    }
    spend(30).await.unwrap();
    assert!(is_reused(&spend(31).await));
    let new = limiter.request(ACME, &[("tpm", 30)]).id(ID + 1).spend().await;
    assert!(matches!(new, Err(LimitError::Waiting { .. })), "a new request queues: {new:?}");
    waiting.abort();
}

#[tokio::test(start_paused = true)]
async fn lease_drawn_while_closing_is_found_by_retry() {
    let (store, slot) = (Memory::new(), Arc::new(OnceLock::<Limiter>::new()));
    let to_close = Arc::clone(&slot);
    let hook_store = HookStore::new(&store, move |verb, moment| {
        if (verb, moment) == (Verb::Draw, Moment::After) {
            to_close.get().expect("the limiter is set").close();
        }
        Act::Pass
    });
    let first = slot.get_or_init(|| over(&hook_store).defaults(limits()).build().unwrap());
    let closed = request(first).try_acquire().await;
    assert!(matches!(closed, Err(LimitError::Closed)), "{closed:?}");
    first.drain().await;
    let second = Limiter::builder(store.clone()).defaults(limits()).build().unwrap();
    let lease = request(&second).try_acquire().await.unwrap();
    assert!(lease.drawn_before().is_some());
    assert_eq!(level(&store, ACME, "tpm").await, Some((900, 100)));
}

#[tokio::test(start_paused = true)]
async fn local_share_deduplicates_by_id() {
    let network = calm();
    let share = OnUnavailable::LocalShare(Share::new(0.5).unwrap());
    let limiter = over(&network).defaults(limits()).on_unavailable(share).build().unwrap();
    network.go_away();
    let first = request(&limiter).try_acquire().await.unwrap();
    assert_eq!(first.degraded(), Some(Degraded::LocalShare));
    let id = first.detach();
    let again = request(&limiter).try_acquire().await.unwrap();
    assert_eq!((again.id(), again.degraded()), (id, Some(Degraded::LocalShare)));
    let tpm = again.balances().into_iter().find(|line| line.limit.as_str() == "tpm").unwrap();
    assert_eq!(tpm.available, 400, "once");
    again.detach();
    assert_eq!(level(memory(&network), ACME, "tpm").await, None);
}
