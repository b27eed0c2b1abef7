//! Requests with an id that their caller has chosen: sent again, they are answered with the same lease and charged once,
//! through answers that were lost, callers who gave up, changed policies and a store that was away.

use std::sync::{Arc, OnceLock};

use tidegate::store::wrap::Verb;
use tidegate::store::{Anchored, ManualWall, WallClock as _};
use tidegate::{
    Degraded, Limit, LimitError, Limiter, Memory, OnUnavailable, Request, Scope, Share, Sqlite,
    SqliteOptions, Stamp, StoreError,
};

use crate::kit::limiter::{ACME, Act, Hooked, Moment, calm, level, memory, over, policy, poll_and_drop};
use crate::kit::{millis, secs};

const ID: u128 = 0x1234_5678;
const START: Stamp = Stamp::from_secs(1_800_000_000);

fn limits() -> [Limit; 2] {
    [Limit::per_day("rpm", 1).burst(100), Limit::per_day("tpm", 1).burst(1_000)]
}

fn ask(limiter: &Limiter) -> Request<'_> {
    limiter.request(ACME, &[("tpm", 100)]).id(ID)
}

fn is_reused<T>(answer: &Result<T, LimitError>) -> bool {
    matches!(answer, Err(LimitError::Reused { .. }))
}

/// What holds over every store.
async fn check_repeats(limiter: &Limiter) {
    let first = ask(limiter).deadline(secs(60)).acquire().await.expect("the store is there, and has enough");
    assert_eq!(first.drawn_before(), None);
    let id = first.detach();
    let again = ask(limiter).deadline(secs(60)).acquire().await.expect("the store is there, and has enough");
    assert_eq!((again.id(), again.held("tpm")), (id, Some(100)));
    assert!(again.drawn_before().is_some_and(|left| left <= secs(60)));
    assert_eq!(
        again
            .balances()
            .iter()
            .find(|line| line.limit.as_str() == "tpm")
            .expect("the store is there, and has enough")
            .available,
        900
    );
    again.detach();
    let waited = ask(limiter)
        .deadline(secs(60))
        .acquire_within(secs(60))
        .await
        .expect("the store is there, and has enough");
    assert_eq!((waited.id(), waited.drawn_before().is_some()), (id, true));
    waited.detach();

    assert!(is_reused(&ask(limiter).deadline(secs(61)).acquire().await), "another deadline");
    let other = limiter.request(ACME, &[("tpm", 101)]).id(ID).deadline(secs(60));
    assert!(is_reused(&other.acquire().await), "another cost");
    let other = limiter.request(ACME, &[("tpm", 100), ("rpm", 1)]).id(ID).deadline(secs(60));
    assert!(is_reused(&other.acquire().await), "another limit");
    let other = ask(limiter).deadline(secs(60)).limits([Limit::per_minute("tpm", 500)]);
    assert!(is_reused(&other.acquire().await), "a limit of its own");
    assert!(is_reused(&ask(limiter).spend().await), "a spend");

    // A policy that names more limits: the lease is still the one that was drawn.
    let more = limits().into_iter().chain([Limit::per_day("usd", 5)]);
    limiter
        .admin("tests")
        .set_policy(Scope::System, policy(more))
        .await
        .expect("the store is there, and has enough");
    let again = ask(limiter).deadline(secs(60)).acquire().await.expect("the store is there, and has enough");
    assert_eq!((again.id(), again.drawn_before().is_some()), (id, true));
    again.detach();

    // It went on: its step and what it holds are those of now.
    limiter.extend_lease(id, 1, [("tpm", 50)]).await.expect("the store is there, and has enough");
    let mut again =
        ask(limiter).deadline(secs(60)).acquire().await.expect("the store is there, and has enough");
    assert_eq!(again.held("tpm"), Some(150));
    again.settle([("tpm", 120)]).await.expect("the store is there, and has enough");
    let ended = ask(limiter).deadline(secs(60)).acquire().await;
    assert!(matches!(ended, Err(LimitError::Store(StoreError::Ended { .. }))), "{ended:?}");

    for _ in 0..3 {
        limiter
            .request(ACME, &[("tpm", 30)])
            .id(ID + 1)
            .spend()
            .await
            .expect("the store is there, and has enough");
    }
    assert!(is_reused(&limiter.request(ACME, &[("tpm", 31)]).id(ID + 1).spend().await));
    let balances = limiter.balances(ACME).await.expect("the store is there, and has enough");
    let tpm = balances
        .iter()
        .find(|line| line.balance.limit.as_str() == "tpm")
        .expect("the store is there, and has enough");
    assert_eq!(tpm.balance.available, 1_000 - 120 - 30, "each was charged once");
}

async fn with_policy(limiter: Limiter) -> Limiter {
    limiter
        .admin("tests")
        .set_policy(Scope::System, policy(limits()))
        .await
        .expect("the store is there, and has enough");
    limiter
}

/// A lease is drawn at the wall clock, and its deadline is by the store's time.
#[tokio::test]
async fn repeat_is_recognized_after_a_step_back() {
    let clock = ManualWall::new(START);
    let hands = clock.clone();
    let store = Memory::with_clock(Anchored::new(move || hands.now()));
    let limiter = Limiter::builder(store).defaults(limits()).build().unwrap();
    limiter.balances(ACME).await.unwrap();
    clock.set(START - secs(3_600));
    check_repeats(&limiter).await;
}

#[tokio::test(start_paused = true)]
async fn in_memory_the_same_id_is_the_same_lease_and_another_request_is_refused() {
    check_repeats(&with_policy(Limiter::new(Memory::new())).await).await;
}

#[tokio::test]
async fn in_a_file_the_same_id_is_the_same_lease_and_another_request_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let options = SqliteOptions::file(folder.path().join("limits.db"));
    let store: Sqlite = options.clock(ManualWall::new(START)).open().await.unwrap();
    check_repeats(&with_policy(crate::kit::limiter::patient(store).build().unwrap()).await).await;
}

#[tokio::test(start_paused = true)]
async fn behind_a_network_the_same_id_is_the_same_lease_and_another_request_is_refused() {
    let network = calm();
    check_repeats(&with_policy(over(&network).build().unwrap()).await).await;
}

#[tokio::test(start_paused = true)]
async fn whoever_gives_up_at_any_moment_finds_the_lease_again_and_pays_once() {
    let mut found = 0;
    for polls in 0..14 {
        let store = Memory::new();
        let slow = Hooked::new(&store, |_, _| Act::Sleep(millis(2)));
        let limiter = over(&slow).defaults(limits()).build().unwrap();
        if let Some(Ok(lease)) = poll_and_drop(ask(&limiter).acquire(), polls).await {
            lease.detach();
        }
        crate::kit::limiter::flushed(&limiter).await;
        let lease = ask(&limiter).acquire().await.unwrap();
        found += u32::from(lease.drawn_before().is_some());
        assert_eq!(level(&store, ACME, "tpm").await, Some((900, 100)), "{polls} polls");
        lease.detach();
    }
    assert!((2..14).contains(&found), "some were drawn before and some were not: {found}");
}

#[tokio::test(start_paused = true)]
async fn whoever_waits_in_line_with_a_lease_that_is_theirs_is_given_it_at_once() {
    let limiter = with_policy(Limiter::new(Memory::new())).await;
    let id = ask(&limiter).acquire().await.unwrap().detach();
    let other = limiter.clone();
    let waiting =
        tokio::spawn(async move { other.acquire_within(ACME, [("tpm", 1_000)], secs(1_000_000_000)).await });
    while limiter.stats().waiting == 0 {
        tokio::task::yield_now().await;
    }
    let again = ask(&limiter).acquire().await.unwrap();
    assert_eq!((again.id(), again.drawn_before().is_some()), (id, true));
    again.detach();
    let again = ask(&limiter).acquire_within(secs(1)).await.unwrap();
    assert_eq!(again.id(), id);
    again.detach();
    waiting.abort();
}

#[tokio::test(start_paused = true)]
async fn whoever_repeats_what_was_spent_is_told_so_though_others_wait() {
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
    assert!(matches!(new, Err(LimitError::Waiting { .. })), "what is new stands in line: {new:?}");
    waiting.abort();
}

#[tokio::test(start_paused = true)]
async fn a_limiter_that_closes_meanwhile_leaves_the_lease_to_be_found_by_the_next() {
    let (store, slot) = (Memory::new(), Arc::new(OnceLock::<Limiter>::new()));
    let to_close = Arc::clone(&slot);
    let hooked = Hooked::new(&store, move |verb, moment| {
        if (verb, moment) == (Verb::Draw, Moment::After) {
            to_close.get().expect("there is a limiter").close();
        }
        Act::Pass
    });
    let first = slot.get_or_init(|| over(&hooked).defaults(limits()).build().unwrap());
    let closed = ask(first).acquire().await;
    assert!(matches!(closed, Err(LimitError::Closed)), "{closed:?}");
    first.drain().await;
    let second = Limiter::builder(store.clone()).defaults(limits()).build().unwrap();
    let lease = ask(&second).acquire().await.unwrap();
    assert!(lease.drawn_before().is_some());
    assert_eq!(level(&store, ACME, "tpm").await, Some((900, 100)));
}

#[tokio::test(start_paused = true)]
async fn while_the_store_is_away_the_share_of_this_process_knows_the_id_too() {
    let network = calm();
    let share = OnUnavailable::LocalShare(Share::new(0.5).unwrap());
    let limiter = over(&network).defaults(limits()).on_unavailable(share).build().unwrap();
    network.go_away();
    let first = ask(&limiter).acquire().await.unwrap();
    assert_eq!(first.degraded(), Some(Degraded::LocalShare));
    let id = first.detach();
    let again = ask(&limiter).acquire().await.unwrap();
    assert_eq!((again.id(), again.degraded()), (id, Some(Degraded::LocalShare)));
    let tpm = again.balances().into_iter().find(|line| line.limit.as_str() == "tpm").unwrap();
    assert_eq!(tpm.available, 400, "once");
    again.detach();
    assert_eq!(level(memory(&network), ACME, "tpm").await, None);
}
