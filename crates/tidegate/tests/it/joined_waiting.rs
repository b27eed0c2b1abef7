//! A limit is short: who waits where, in which order, and who passes meanwhile.

use std::sync::Mutex;
use std::time::Duration;

use tidegate::store::wrap::Verb;
use tidegate::{
    Controller, JoinedError, Limit, LimitError, LimitEvent, Limiter, Memory, Outcome, Pace, Rate, Refused,
    Scope, Slots, Throttle,
};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::kit::joined::{BETA, Entered, limiter, one, rps, slots, spend, wait};
use crate::kit::limiter::{ACME, Act, Heard, Hooked, Moment, calls, calm, child, id, over, policy};
use crate::kit::{millis, secs, settle_tasks};

#[tokio::test(start_paused = true)]
async fn a_refusal_returns_the_whole_local_charge() {
    // Slots, rate, pace and tokens: what never went out is taken nowhere.
    let throttle = Throttle::builder()
        .slots(Slots::fixed(1))
        .rate(Rate::per_second(1))
        .pace(Pace::every(secs(1)))
        .controller(Controller::Fixed)
        .build()
        .unwrap();
    let limiter = limiter(Limit::per_hour("rpm", 1));
    let joined = throttle.limited_by(&limiter);
    spend(&limiter, ACME, 1).await;
    let stuck = tokio::spawn({
        let joined = joined.clone();
        async move { joined.acquire(ACME, one()).await.map(drop) }
    });
    settle_tasks().await;
    let snapshot = throttle.snapshot();
    assert_eq!((snapshot.in_flight, snapshot.admitted, snapshot.rate_level), (0, 0, Some(1)));
    // Another tenant goes out in the same moment, and through the same single slot.
    let start = Instant::now();
    joined.acquire(BETA, one()).await.unwrap().settle(Outcome::success()).await.unwrap();
    assert_eq!(start.elapsed(), Duration::ZERO);
    stuck.abort();
    settle_tasks().await;
    assert_eq!(limiter.stats().waiting, 0);
}

#[tokio::test(start_paused = true)]
async fn one_tenant_stuck_on_its_own_limit_neither_blocks_nor_drains_the_others() {
    let limiter = limiter(Limit::per_day("rpm", 1_000));
    child(&limiter, "acme", "org").await;
    child(&limiter, "beta", "org").await;
    let own = policy([Limit::per_hour("rpm", 1)]);
    limiter.admin("ops").set_policy(Scope::Entity(id("acme")), own).await.unwrap();
    spend(&limiter, ACME, 1).await;
    let joined = slots(2).limited_by(&limiter);
    let entered = Entered::default();
    let stuck: Vec<_> = (0..20).map(|_| wait(&joined, ACME, "acme", &entered)).collect();
    settle_tasks().await;
    let start = Instant::now();
    for _ in 0..50 {
        joined.acquire(BETA, one()).await.unwrap().settle(Outcome::success()).await.unwrap();
    }
    assert_eq!(start.elapsed(), Duration::ZERO);
    let org = limiter.balances(("org", "gpt")).await.unwrap();
    assert_eq!(org[0].balance.available, 1_000 - 51, "and the stuck one has taken nothing above it");
    for task in stuck {
        task.abort();
    }
}

#[tokio::test(start_paused = true)]
async fn callers_of_one_subject_are_served_in_the_order_they_came() {
    for is_remote in [false, true] {
        let store = calm();
        let limiter =
            if is_remote { over(&store).defaults([rps()]).build().unwrap() } else { limiter(rps()) };
        let joined = slots(2).limited_by(&limiter);
        spend(&limiter, ACME, 1).await;
        let entered = Entered::default();
        let mut tasks = Vec::new();
        for number in 0..6 {
            tasks.push(wait(&joined, ACME, &number.to_string(), &entered));
            settle_tasks().await;
        }
        for task in tasks {
            task.await.unwrap();
        }
        assert_eq!(entered.names(), ["0", "1", "2", "3", "4", "5"]);
        assert_eq!(entered.times(), [1, 2, 3, 4, 5, 6].map(secs), "one a second, and none is lost");
    }
}

#[tokio::test(start_paused = true)]
async fn a_line_does_not_ask_the_store_for_everybody_at_each_unit() {
    let store = calm();
    let limiter = over(&store).defaults([rps()]).build().unwrap();
    let joined = slots(100).limited_by(&limiter);
    spend(&limiter, ACME, 1).await;
    let entered = Entered::default();
    let tasks: Vec<_> = (0..50).map(|number| wait(&joined, ACME, &number.to_string(), &entered)).collect();
    for task in tasks {
        task.await.unwrap();
    }
    let draws = calls(&store, Verb::Draw);
    assert!((100..=50 * 4).contains(&draws), "fifty at first, then a few for each that is granted: {draws}");
}

#[tokio::test(start_paused = true)]
async fn once_there_is_room_again_the_line_goes_on_many_at_a_time() {
    // A store ten milliseconds away: one after the other, a hundred would take a second.
    let memory = Memory::new();
    let store = Hooked::new(&memory, |verb, moment| match (verb, moment) {
        (Verb::Draw, Moment::Before) => Act::Sleep(millis(10)),
        _ => Act::Pass,
    });
    let limiter = over(&store).defaults([Limit::per_hour("rpm", 100)]).build().unwrap();
    let mut lease = limiter.acquire(ACME, [("rpm", 100)]).await.unwrap();
    let joined = slots(200).limited_by(&limiter);
    let entered = Entered::default();
    let tasks: Vec<_> = (0..100).map(|number| wait(&joined, ACME, &number.to_string(), &entered)).collect();
    tokio::time::sleep(millis(100)).await;
    let start = Instant::now();
    lease.cancel().await.unwrap();
    for task in tasks {
        task.await.unwrap();
    }
    assert!(start.elapsed() <= millis(100), "{:?}", start.elapsed());
    assert_eq!(limiter.stats().waiting, 0);
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_comes_back_takes_its_old_place_in_the_throttles_queue() {
    let (throttle, limiter) = (slots(1), limiter(rps()));
    let joined = throttle.limited_by(&limiter);
    spend(&limiter, ACME, 1).await;
    let entered = Entered::default();
    let acme = wait(&joined, ACME, "acme", &entered);
    settle_tasks().await;
    // The slot is taken, and others queue for it, before the second that acme waits is over.
    let slot = throttle.acquire(one()).await.unwrap();
    let others: Vec<_> = ["first", "second"].map(|name| wait(&joined, BETA, name, &entered)).into();
    let plain = tokio::spawn({
        let (throttle, entered) = (throttle.clone(), entered.clone());
        async move {
            let permit = throttle.acquire(one()).await.unwrap();
            entered.note("plain", Instant::now());
            permit.settle(Outcome::success());
        }
    });
    tokio::time::sleep(millis(1_500)).await;
    assert_eq!(throttle.snapshot().waiting, 4);
    slot.settle(Outcome::success());
    acme.await.unwrap();
    plain.await.unwrap();
    for task in others {
        task.await.unwrap();
    }
    let names = entered.names();
    assert_eq!(names[0], "acme", "it came before all of them: {names:?}");
    assert_eq!(names[1..3], ["first", "plain"], "and those who came later keep their order");
}

#[tokio::test(start_paused = true)]
async fn leaving_the_line_lets_the_next_ask_for_itself() {
    let limiter = limiter(Limit::per_hour("rpm", 10));
    spend(&limiter, ACME, 5).await;
    let joined = slots(4).limited_by(&limiter).costs(|cost| [("rpm", cost.tokens.max(1))]);
    let costly = tokio::spawn({
        let joined = joined.clone();
        async move { joined.acquire(ACME, one().tokens(10)).await.map(drop) }
    });
    settle_tasks().await;
    let entered = Entered::default();
    let cheap: Vec<_> = (0..5).map(|number| wait(&joined, ACME, &number.to_string(), &entered)).collect();
    settle_tasks().await;
    assert!(entered.names().is_empty(), "a costly one is not overtaken");
    let start = Instant::now();
    costly.abort();
    for task in cheap {
        task.await.unwrap();
    }
    assert_eq!(start.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn those_who_do_not_wait_do_not_overtake_those_who_do() {
    let limiter = limiter(Limit::per_hour("rpm", 10));
    spend(&limiter, ACME, 5).await;
    let joined = slots(4).limited_by(&limiter).costs(|cost| [("rpm", cost.tokens.max(1))]);
    let costly = tokio::spawn({
        let joined = joined.clone();
        async move { joined.acquire(ACME, one().tokens(10)).await.map(drop) }
    });
    settle_tasks().await;
    let error = joined.try_acquire(ACME, one()).await.unwrap_err();
    assert!(matches!(error, JoinedError::Limit(LimitError::Waiting { ahead: 1, .. })), "{error}");
    assert!(error.retry_after() > Some(secs(1_700)) && !error.is_final(), "{error}");
    // The same for those who ask the limiter by itself.
    let error = limiter.acquire(ACME, [("rpm", 1)]).await.unwrap_err();
    assert!(matches!(error, LimitError::Waiting { .. }), "{error}");
    assert_eq!(joined.throttle().snapshot().admitted, 0);
    drop(joined.try_acquire(BETA, one()).await.unwrap());
    costly.abort();
}

#[tokio::test(start_paused = true)]
async fn within_refuses_as_soon_as_the_time_will_not_do() {
    let (throttle, limiter) = (slots(1), limiter(rps()));
    let joined = throttle.limited_by(&limiter);
    spend(&limiter, ACME, 1).await;
    let start = Instant::now();
    let error = joined.acquire_within(ACME, one(), millis(999)).await.unwrap_err();
    assert!(matches!(error, JoinedError::Limit(LimitError::Limited(_))), "{error}");
    assert_eq!((error.retry_after(), start.elapsed()), (Some(secs(1)), Duration::ZERO));
    // Behind others: the first is not to be served in time, so nobody is.
    let entered = Entered::default();
    let head = wait(&joined, ACME, "head", &entered);
    settle_tasks().await;
    let error = joined.acquire_within(ACME, one(), millis(500)).await.unwrap_err();
    assert!(matches!(error, JoinedError::Limit(LimitError::Waiting { ahead: 1, .. })), "{error}");
    assert_eq!(start.elapsed(), Duration::ZERO);
    // In time for the first, and not for itself.
    let error = joined.acquire_within(ACME, one(), millis(1_500)).await.unwrap_err();
    assert!(matches!(error, JoinedError::Limit(LimitError::Limited(_))), "{error}");
    assert_eq!(start.elapsed(), secs(1));
    head.await.unwrap();
    // In time.
    joined.acquire_within(ACME, one(), secs(1)).await.unwrap().settle(Outcome::success()).await.unwrap();
    assert_eq!(start.elapsed(), secs(2));
    // Held up by the throttle, not by the limit.
    let slot = throttle.acquire(one()).await.unwrap();
    let error = joined.acquire_within(BETA, one(), millis(100)).await.unwrap_err();
    assert!(matches!(error, JoinedError::Refused(Refused::Limited { .. })), "{error}");
    assert_eq!(start.elapsed(), millis(2_100));
    drop(slot);
    assert_eq!((limiter.stats().waiting, throttle.snapshot().waiting), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn as_many_wait_as_may_and_the_next_is_told() {
    let heard = Heard::default();
    let limiter = Limiter::builder(Memory::new())
        .defaults([Limit::per_hour("rpm", 1)])
        .waiters_max(2)
        .on_event(heard.ear())
        .build()
        .unwrap();
    let joined = slots(4).limited_by(&limiter);
    spend(&limiter, ACME, 1).await;
    let entered = Entered::default();
    let tasks: Vec<_> = (0..2).map(|_| wait(&joined, ACME, "one", &entered)).collect();
    settle_tasks().await;
    let error = joined.acquire(ACME, one()).await.unwrap_err();
    assert!(matches!(error, JoinedError::Limit(LimitError::Busy { waiters_max: 2, .. })), "{error}");
    assert!(!error.is_final());
    assert_eq!(heard.count(|event| matches!(event, LimitEvent::QueueFull { waiters_max: 2 })), 1);
    tasks.iter().for_each(JoinHandle::abort);
    settle_tasks().await;
    assert_eq!((limiter.stats().waiting, joined.throttle().snapshot().in_flight), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn whoever_passed_the_gate_and_waits_at_the_throttle_stays_ahead_of_those_who_came_later() {
    let (throttle, limiter) = (slots(1), limiter(rps()));
    let joined = throttle.limited_by(&limiter);
    let slot = joined.acquire(ACME, one()).await.unwrap();
    let entered = Entered::default();
    // It queues at the throttle, for nothing is known against it. Then the unit is used up by others.
    let early = wait(&joined, ACME, "early", &entered);
    settle_tasks().await;
    let other = slots(1).limited_by(&limiter);
    let elsewhere = wait(&other, ACME, "elsewhere", &entered);
    settle_tasks().await;
    let late = wait(&joined, ACME, "late", &entered);
    settle_tasks().await;
    slot.settle(Outcome::success()).await.unwrap();
    for task in [early, late, elsewhere] {
        task.await.unwrap();
    }
    let names = entered.names();
    let place = |name: &str| names.iter().position(|entered| entered == name);
    assert!(place("early") < place("late"), "{names:?}");
}

#[tokio::test(start_paused = true)]
async fn newcomers_at_a_closed_gate_take_nothing_local_and_do_not_queue_at_the_throttle() {
    let (throttle, limiter) = (slots(1), limiter(Limit::per_hour("rpm", 1)));
    let joined = throttle.limited_by(&limiter);
    spend(&limiter, ACME, 1).await;
    let entered = Entered::default();
    let first = wait(&joined, ACME, "first", &entered);
    settle_tasks().await;
    let slot = throttle.acquire(one()).await.unwrap();
    let evaluations = throttle.snapshot().evaluations;
    let second = wait(&joined, ACME, "second", &entered);
    settle_tasks().await;
    let snapshot = throttle.snapshot();
    assert_eq!((snapshot.waiting, snapshot.evaluations), (0, evaluations));
    assert_eq!(limiter.stats().waiting, 2);
    drop(slot);
    first.abort();
    second.abort();
}

#[tokio::test(start_paused = true)]
async fn one_admitted_by_the_throttle_does_not_overtake_one_that_was_refused_meanwhile() {
    // While the costly one was asking, the cheap one queued for the only slot. When the costly one was refused, the
    // cheap one had the slot, and took what the costly one waits for.
    let memory = Memory::new();
    let store = Hooked::new(&memory, |verb, moment| match (verb, moment) {
        (Verb::Draw, Moment::Before) => Act::Sleep(millis(20)),
        _ => Act::Pass,
    });
    let limiter = over(&store).defaults([Limit::per_second("rpm", 10)]).build().unwrap();
    spend(&limiter, ACME, 5).await;
    let throttle = slots(1);
    let joined = throttle.limited_by(&limiter).costs(|cost| [("rpm", cost.tokens.max(1))]);
    let entered = Entered::default();
    let start = Instant::now();
    let costly = tokio::spawn({
        let (joined, entered) = (joined.clone(), entered.clone());
        async move {
            let permit = joined.acquire(ACME, one().tokens(10)).await.unwrap();
            entered.note("costly", start);
            permit.settle(Outcome::success()).await.unwrap();
        }
    });
    tokio::time::sleep(millis(10)).await;
    let cheap = wait(&joined, ACME, "cheap", &entered);
    settle_tasks().await;
    assert_eq!(throttle.snapshot().waiting, 1);
    costly.await.unwrap();
    cheap.await.unwrap();
    assert_eq!(entered.names(), ["costly", "cheap"]);
    assert!(entered.times()[0] < millis(600), "{:?}", entered.times());
}

#[tokio::test(start_paused = true)]
async fn whoever_becomes_the_first_is_not_overtaken_by_those_who_ask_the_limiter_by_itself() {
    // Two were refused in flight, and the first of them left: what it had told went with it, and nobody told anew.
    let memory = Memory::new();
    let store = Hooked::new(&memory, |verb, moment| match (verb, moment) {
        (Verb::Draw, Moment::Before) => Act::Sleep(millis(20)),
        _ => Act::Pass,
    });
    let limiter = over(&store).defaults([Limit::per_hour("rpm", 10)]).build().unwrap();
    spend(&limiter, ACME, 5).await;
    let joined = slots(4).limited_by(&limiter).costs(|cost| [("rpm", cost.tokens.max(1))]);
    let costly = |units: u64| {
        let joined = joined.clone();
        tokio::spawn(async move { joined.acquire(ACME, one().tokens(units)).await.map(drop) })
    };
    let (first, second) = (costly(10), costly(9));
    tokio::time::sleep(millis(100)).await;
    first.abort();
    tokio::time::sleep(millis(100)).await;
    let error = limiter.acquire(ACME, [("rpm", 1)]).await.unwrap_err();
    assert!(matches!(error, LimitError::Waiting { ahead: 1, retry_after: Some(_), .. }), "{error}");
    second.abort();
}

#[tokio::test(start_paused = true)]
async fn the_one_who_came_first_asks_first_though_the_others_refusal_arrived_first() {
    let memory = Memory::new();
    let draws = Mutex::new(0);
    let store = Hooked::new(&memory, move |verb, moment| {
        let mut draws = draws.lock().expect("no panic");
        *draws += i32::from((verb, moment) == (Verb::Draw, Moment::Before));
        match (verb, moment, *draws) {
            (Verb::Draw, Moment::Before, 1) => Act::Sleep(millis(30)),
            _ => Act::Pass,
        }
    });
    let limiter = over(&store).defaults([rps()]).build().unwrap();
    spend(&limiter, ACME, 1).await;
    let joined = slots(4).limited_by(&limiter);
    let entered = Entered::default();
    let first = wait(&joined, ACME, "first", &entered);
    settle_tasks().await;
    let second = wait(&joined, ACME, "second", &entered);
    for task in [first, second] {
        task.await.unwrap();
    }
    assert_eq!(entered.names(), ["first", "second"]);
}
