//! Concurrent calls are serializable: each is decided as if it came alone.

use std::future::Future;
use std::sync::Arc;

use tidegate_core::limit::lease::Ending;
use tidegate_core::limit::policy::{Expect, OnExpiry, Scope};
use tidegate_core::limit::rule::Limit;
use tokio::sync::Barrier;

use super::Fixture;
use super::kit::{ACTOR, RESOURCE, granted, is_stale, levels, millis, own, policy, resource, slow};
use super::ledger::used_by;
use super::random_calls::{RandomCalls, check_exact, run_random_calls};
use crate::wrap::Observed;
use crate::{Cancel, DrawResult, Movement, PolicyChange, StoreError, Terms};

/// Runs `count` callers that start at once, and returns their results.
async fn at_once<T, F>(count: usize, call: impl Fn(usize) -> F) -> Vec<T>
where
    T: Send + 'static,
    F: Future<Output = T> + Send + 'static,
{
    let start = Arc::new(Barrier::new(count));
    let callers = (0..count).map(|number| {
        let (start, call) = (Arc::clone(&start), call(number));
        tokio::spawn(async move {
            start.wait().await;
            call.await
        })
    });
    let mut answers = Vec::new();
    for caller in callers.collect::<Vec<_>>() {
        match caller.await {
            Ok(answer) => answers.push(answer),
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        }
    }
    answers
}

fn is_granted(answer: Result<DrawResult, StoreError>) -> bool {
    matches!(answer.expect("a draw has a result"), DrawResult::Granted(_))
}

/// 120 callers draw one each of 50.
pub async fn concurrent_draws_take_exactly_the_limit(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 50)]);
    let answers = at_once(120, |_| {
        let (fixture, levels) = (fixture.clone(), levels.clone());
        async move { is_granted(fixture.store.draw(&fixture.draw_of(&levels, &[("rpm", 1)])).await) }
    });
    let granted = answers.await.into_iter().filter(|granted| *granted).count();
    assert_eq!(granted, 50);
    assert_eq!(fixture.shows("acme", "rpm").await, (0, 50));
}

/// In loops, at two levels.
pub async fn eight_callers_take_exactly_the_limit(fixture: Fixture) {
    let (child, parent) = ([slow("rpm", 1_000)], [slow("rpm", 50)]);
    let answers = at_once(8, |number| {
        let levels = levels(0, &[(&format!("child-{number}"), &child), ("parent", &parent)]);
        let fixture = fixture.clone();
        async move {
            let mut granted = 0_i64;
            for _ in 0..15 {
                let draw = fixture.draw_of(&levels, &[("rpm", 1)]);
                granted += i64::from(is_granted(fixture.store.spend(&draw).await));
            }
            granted
        }
    });
    let granted = answers.await;
    assert_eq!(granted.iter().sum::<i64>(), 50);
    assert_eq!(fixture.shows("parent", "rpm").await, (0, 50));
    for (number, granted) in granted.into_iter().enumerate().filter(|(_, granted)| *granted > 0) {
        let child = format!("child-{number}");
        assert_eq!(fixture.shows(&child, "rpm").await, (1_000 - granted, granted), "{child}");
    }
}

/// No draw is lost when a bucket is created.
pub async fn concurrent_first_uses_are_all_counted(fixture: Fixture) {
    let limits = [slow("rpm", 100), slow("tpm", 100)];
    for round in 0..10 {
        let entity = format!("acme-{round}");
        let both = levels(0, &[(&entity, &limits), ("parent", &[slow("rpm", 1_000)])]);
        at_once(4, |number| {
            let (fixture, levels) = (fixture.clone(), Arc::clone(&both));
            let cost = if number % 2 == 0 { [("rpm", 1), ("tpm", 2)] } else { [("tpm", 1), ("rpm", 3)] };
            async move { fixture.takes(&levels, &cost).await.id }
        })
        .await;
        assert_eq!(fixture.shows(&entity, "rpm").await, (92, 8));
        assert_eq!(fixture.shows(&entity, "tpm").await, (94, 6));
    }
    assert_eq!(fixture.shows("parent", "rpm").await, (920, 80));
}

/// Eight copies at once.
pub async fn concurrent_copies_of_a_draw_count_once(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 100)]);
    let draw = fixture.draw_of(&levels, &[("rpm", 10)]);
    let answers: Vec<Movement> = at_once(8, |_| {
        let (store, draw) = (Arc::clone(&fixture.store), draw.clone());
        async move { granted(store.draw(&draw).await) }
    })
    .await;
    assert_eq!(answers.iter().filter(|moved| !moved.is_repeat).count(), 1, "one was the first");
    assert_eq!(fixture.shows("acme", "rpm").await, (90, 10));
}

/// Eight copies at once.
pub async fn concurrent_copies_of_a_settle_count_once(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 100)]);
    let lease = fixture.takes(&levels, &[("rpm", 10)]).await;
    let settle = lease.settlement(1, &[("rpm", 4)]);
    let answers: Vec<Movement> = at_once(8, |_| {
        let (store, settle) = (Arc::clone(&fixture.store), settle.clone());
        async move { store.settle(&settle).await.expect("the same settle is no error") }
    })
    .await;
    assert_eq!(answers.iter().filter(|moved| !moved.is_repeat).count(), 1, "one was the first");
    assert_eq!(fixture.shows("acme", "rpm").await, (96, 4));
    assert_eq!(used_by(&fixture, "acme", "rpm").await, (4, 4, 1));
}

/// In either order.
pub async fn cancel_racing_its_draw_leaves_nothing_taken(fixture: Fixture) {
    let limits = [slow("rpm", 100)];
    let both = levels(0, &[("child", &limits), ("parent", &limits)]);
    for _ in 0..25 {
        let draw = fixture.draw_of(&both, &[("rpm", 10)]);
        at_once(4, |number| {
            let (store, draw) = (Arc::clone(&fixture.store), draw.clone());
            async move {
                let cancel =
                    Cancel { lease: draw.lease, step: 1, levels: draw.levels.clone(), is_watched: true };
                if number % 2 == 0 {
                    store.cancel(&cancel).await.map(drop).expect("a cancel has a result");
                } else if let Err(error) = store.draw(&draw).await {
                    let is_ended = matches!(error, StoreError::Ended { how: Ending::Cancelled, .. });
                    assert!(is_ended, "a late draw returns {error}");
                }
            }
        })
        .await;
    }
    fixture.is_untouched("child", "rpm").await;
    fixture.is_untouched("parent", "rpm").await;
}

/// Exactly one of them succeeds.
pub async fn settle_racing_a_cancel_ends_the_lease_once(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 1_000)]);
    let mut settled = 0;
    for _ in 0..25 {
        let lease = Arc::new(fixture.takes(&levels, &[("rpm", 10)]).await);
        let wins = at_once(2, |number| {
            let (store, lease) = (Arc::clone(&fixture.store), Arc::clone(&lease));
            async move {
                let answer = match number {
                    0 => store.settle(&lease.settlement(1, &[("rpm", 4)])).await,
                    _ => store.cancel(&lease.cancellation(1)).await,
                };
                match answer {
                    Ok(_) => true,
                    Err(StoreError::Ended { .. }) => false,
                    Err(error) => panic!("the second ending returns {error}"),
                }
            }
        });
        let wins = wins.await;
        assert_ne!(wins[0], wins[1], "one of them ends it");
        settled += u64::from(wins[0]);
    }
    let used = i64::try_from(4 * settled).expect("a hundred fit");
    assert_eq!(fixture.shows("acme", "rpm").await, (1_000 - used, used));
    assert_eq!(used_by(&fixture, "acme", "rpm").await, (4 * settled, 4 * settled, settled));
}

/// The ledger agrees with the buckets.
pub async fn deadline_racing_an_ending_ends_the_lease_once(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 10_000)]);
    at_once(6, |number| {
        let (fixture, levels) = (fixture.clone(), levels.clone());
        let on_expiry = if number % 2 == 0 { OnExpiry::Settle } else { OnExpiry::Return };
        async move {
            for _ in 0..10 {
                let terms = Terms { deadline: millis(2), on_expiry };
                let lease = fixture.takes_on(terms, &levels, &[("rpm", 10)]).await;
                fixture.time.pass(millis(1)).await;
                match fixture.store.settle(&lease.settlement(1, &[("rpm", 3)])).await {
                    Ok(_) | Err(StoreError::Ended { how: Ending::Expired, .. }) => {}
                    Err(error) => panic!("a settle around its deadline returns {error}"),
                }
                fixture.store.sweep(3).await.expect("a sweep has a result");
            }
        }
    })
    .await;
    fixture.time.pass(millis(10)).await;
    fixture.sweep_all().await;
    let (_, consumed) = fixture.shows("acme", "rpm").await;
    let (used, ..) = used_by(&fixture, "acme", "rpm").await;
    assert_eq!(consumed, 0_i64.saturating_add_unsigned(used));
}

/// Draws with the same levels in opposite orders complete.
pub async fn levels_in_opposite_orders_do_not_deadlock(fixture: Fixture) {
    let limits = [slow("rpm", 10_000)];
    at_once(4, |number| {
        let names = if number % 2 == 0 { ["one", "two", "three"] } else { ["three", "two", "one"] };
        let rows: Vec<_> = names.iter().map(|name| (*name, &limits[..])).collect();
        let (fixture, levels) = (fixture.clone(), levels(0, &rows));
        async move {
            for _ in 0..50 {
                fixture.takes(&levels, &[("rpm", 1)]).await.settles(&[]).await;
            }
        }
    })
    .await;
    for entity in ["one", "two", "three"] {
        assert_eq!(fixture.shows(entity, "rpm").await, (9_800, 200), "{entity}");
    }
}

/// The others get the current version.
pub async fn writers_with_the_same_expectation_win_once(fixture: Fixture) {
    let scope = Scope::Resource(resource(RESOURCE));
    let mut version = fixture.writes(&scope, Some(policy(&[slow("rpm", 1)]))).await;
    for _ in 0..5 {
        let answers = at_once(6, |number| {
            let (store, expect) = (Arc::clone(&fixture.store), Expect::Version(version));
            let policy = Some(policy(&[slow("rpm", number as u64 + 2)]));
            let change = PolicyChange { scope: scope.clone(), expect, policy };
            async move { store.apply(&[change], ACTOR).await }
        });
        let answers = answers.await;
        assert_eq!(answers.iter().filter(|answer| answer.is_ok()).count(), 1, "{answers:?}");
        version = version.next();
        for answer in answers {
            match answer {
                Ok(made) => assert_eq!(made, version),
                Err(_) => is_stale(answer, Some(version)),
            }
        }
    }
}

/// Callers with new and with stale rules under load, verified by the checker.
pub async fn draws_racing_a_rule_change_stay_exact(fixture: Fixture) {
    let observed = Arc::new(Observed::new(Arc::clone(&fixture.store)));
    let fixture = fixture.with_store(observed.clone());
    let rules = [
        Limit::per_second("rpm", 2_000).burst(20),
        Limit::per_second("rpm", 500).burst(40),
        Limit::per_minute("rpm", 60_000).burst(5),
    ];
    at_once(6, |number| {
        let (fixture, rules) = (fixture.clone(), rules.clone());
        async move {
            for round in 0..30_u64 {
                // Each caller updates at its own pace, so that some are stale.
                let version = round / (2 + number as u64 % 3);
                let rule = &rules[usize::try_from(version % 3).unwrap_or(0)];
                let levels = levels(version, &[("acme", std::slice::from_ref(rule))]);
                let draw = fixture.draw_of(&levels, &[("rpm", 1 + round % 4)]);
                let turn = fixture.turn().await;
                let is_granted = is_granted(fixture.store.draw(&draw).await);
                drop(turn);
                if is_granted {
                    let cancel =
                        Cancel { lease: draw.lease, step: 1, levels: levels.clone(), is_watched: true };
                    let actual = levels.amounts(&[]).expect("nothing is an amount");
                    let settle =
                        crate::Settle { lease: draw.lease, step: 1, levels, actual, is_watched: true };
                    let _turn = fixture.turn().await;
                    match round % 3 {
                        0 => fixture.store.cancel(&cancel).await.expect("no lease is stranded"),
                        _ => fixture.store.settle(&settle).await.expect("no lease is stranded"),
                    };
                } else {
                    fixture.pass_time(millis(1)).await;
                }
            }
        }
    })
    .await;
    check_exact(&fixture, &observed).await;
}

/// All kinds of calls at random, verified by the checker: no excess, and the ledger is the sum of
/// settlements.
pub async fn random_calls_stay_exact(fixture: Fixture) {
    let observed = Arc::new(Observed::new(Arc::clone(&fixture.store)));
    let fixture = fixture.with_store(observed.clone());
    run_random_calls(&fixture, RandomCalls { callers: 8, leases: 40, seed: 0x7167 }).await;
    check_exact(&fixture, &observed).await;
}
