//! Calls that race: each is decided as if it came alone, before or after the others.

use std::future::Future;
use std::sync::Arc;

use tidegate_core::limit::lease::Ending;
use tidegate_core::limit::policy::{Expect, OnExpiry, Scope};
use tidegate_core::limit::rule::Limit;
use tokio::sync::Barrier;

use super::Fixture;
use super::kit::{ACTOR, RESOURCE, granted, is_stale, levels, millis, own, policy, resource, slow};
use super::ledger::used_by;
use super::wander::{Wander, judge, wander};
use crate::wrap::Observed;
use crate::{Cancel, Drawn, Moved, PolicyChange, StoreError, Terms};

/// What `count` callers do who all begin at once.
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

fn is_granted(answer: Result<Drawn, StoreError>) -> bool {
    matches!(answer.expect("a draw is answered"), Drawn::Granted(_))
}

/// 120 at once ask for one each of fifty.
pub async fn a_hundred_and_twenty_at_once_take_exactly_the_fifty_there_are(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 50)]);
    let answers = at_once(120, |_| {
        let (fixture, levels) = (fixture.clone(), levels.clone());
        async move { is_granted(fixture.store.draw(&fixture.draw_of(&levels, &[("rpm", 1)])).await) }
    });
    let granted = answers.await.into_iter().filter(|granted| *granted).count();
    assert_eq!(granted, 50);
    assert_eq!(fixture.shows("acme", "rpm").await, (0, 50));
}

/// Eight callers who ask again and again, at two levels.
pub async fn eight_callers_take_exactly_the_fifty_there_are(fixture: Fixture) {
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

/// None of those who use a bucket first is lost.
pub async fn first_uses_that_race_are_all_counted(fixture: Fixture) {
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

/// One draw that arrives eight times at once.
pub async fn one_draw_sent_many_times_at_once_counts_once(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 100)]);
    let draw = fixture.draw_of(&levels, &[("rpm", 10)]);
    let answers: Vec<Moved> = at_once(8, |_| {
        let (store, draw) = (Arc::clone(&fixture.store), draw.clone());
        async move { granted(store.draw(&draw).await) }
    })
    .await;
    assert_eq!(answers.iter().filter(|moved| !moved.is_repeat).count(), 1, "one was the first");
    assert_eq!(fixture.shows("acme", "rpm").await, (90, 10));
}

/// One ending that arrives eight times at once.
pub async fn one_settle_sent_many_times_at_once_counts_once(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 100)]);
    let lease = fixture.takes(&levels, &[("rpm", 10)]).await;
    let settle = lease.settlement(1, &[("rpm", 4)]);
    let answers: Vec<Moved> = at_once(8, |_| {
        let (store, settle) = (Arc::clone(&fixture.store), settle.clone());
        async move { store.settle(&settle).await.expect("the same settle is no error") }
    })
    .await;
    assert_eq!(answers.iter().filter(|moved| !moved.is_repeat).count(), 1, "one was the first");
    assert_eq!(fixture.shows("acme", "rpm").await, (96, 4));
    assert_eq!(used_by(&fixture, "acme", "rpm").await, (4, 4, 1));
}

/// Whichever comes first, nothing stays taken.
pub async fn a_cancel_that_races_its_draw_leaves_nothing_taken(fixture: Fixture) {
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
                    store.cancel(&cancel).await.map(drop).expect("a cancel is answered");
                } else if let Err(error) = store.draw(&draw).await {
                    let is_ended = matches!(error, StoreError::Ended { how: Ending::Cancelled, .. });
                    assert!(is_ended, "a draw that comes late answers {error}");
                }
            }
        })
        .await;
    }
    fixture.is_untouched("child", "rpm").await;
    fixture.is_untouched("parent", "rpm").await;
}

/// A lease ends one way.
pub async fn a_settle_and_a_cancel_that_race_end_a_lease_once(fixture: Fixture) {
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
                    Err(error) => panic!("an ending that comes second answers {error}"),
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

/// Deadlines that pass while leases end: each ends once, and the ledger has what the buckets have.
pub async fn deadlines_that_race_with_endings_end_each_lease_once(fixture: Fixture) {
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
                    Err(error) => panic!("a settle around its deadline answers {error}"),
                }
                fixture.store.sweep(3).await.expect("a sweep is answered");
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

/// Levels that are drawn in opposite orders are drawn all the same.
pub async fn levels_in_opposite_orders_do_not_wait_for_each_other(fixture: Fixture) {
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

/// Of those who expect the same version one wins, and the others are told which is there.
pub async fn writers_that_race_with_one_expectation_win_once(fixture: Fixture) {
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

/// Rules that change under load: callers who know the new one and callers who do not, all judged by the checker.
pub async fn draws_that_race_with_a_change_of_their_rule_stay_exact(fixture: Fixture) {
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
                // Each follows at its own pace, so that some are behind.
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
                    fixture.pass_in_turn(millis(1)).await;
                }
            }
        }
    })
    .await;
    judge(&fixture, &observed).await;
}

/// Everything at once, at random, judged by the checker: no excess, and the ledger is the sum of what was settled.
pub async fn what_callers_do_at_random_stays_exact(fixture: Fixture) {
    let observed = Arc::new(Observed::new(Arc::clone(&fixture.store)));
    let fixture = fixture.with_store(observed.clone());
    wander(&fixture, Wander { callers: 8, leases: 40, seed: 0x7167 }).await;
    judge(&fixture, &observed).await;
}
