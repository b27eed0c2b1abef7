//! The line: order, promotion, bounds, and how little it costs to wait.

use std::time::Duration;

use tidegate::{
    Budget, Cost, Event, Gate, ManualClock, Outcome, Pace, Pause, Permit, Random, Rate, Refused, Slots,
    Throttle,
};

use crate::kit::{Caller, REQUEST, millis, secs, settle_tasks, slots};

#[test]
fn waiters_enter_in_the_order_they_asked() {
    let throttle = slots(1);
    let mut held = Some(throttle.try_acquire(REQUEST).unwrap());
    let mut waiters: Vec<_> = (0..5).map(|_| Caller::asks(&throttle, REQUEST)).collect();
    for turn in 0..5 {
        drop(held.take());
        let permits: Vec<_> = waiters.iter_mut().skip(turn).map(Caller::permit).collect();
        assert!(permits[0].is_some() && permits[1..].iter().all(Option::is_none));
        held = permits.into_iter().flatten().next();
    }
}

#[test]
fn try_acquire_does_not_overtake() {
    let throttle = slots(2);
    let (one, two) = (throttle.try_acquire(REQUEST).unwrap(), throttle.try_acquire(REQUEST).unwrap());
    let mut waiter = Caller::asks(&throttle, REQUEST);
    drop(one);
    // The slot that came free was granted to the waiter, though its task has not run yet.
    let refused = throttle.try_acquire(REQUEST).unwrap_err();
    assert_eq!(refused, Refused::Limited { by: Gate::Slots, retry_after: None });
    assert!(waiter.permit().is_some());
    drop(two);
}

#[test]
fn a_costly_head_is_not_starved_by_cheap_ones_behind_it() {
    let clock = ManualClock::new();
    let throttle =
        Throttle::builder().budget(Budget::tokens(100, secs(10))).clock(clock.clone()).build().unwrap();
    let spent = |tokens| Cost::request().tokens(tokens);
    throttle.try_acquire(spent(50)).unwrap().settle(Outcome::success());
    let mut costly = Caller::asks(&throttle, spent(90));
    let mut cheap: Vec<_> = (0..10).map(|_| Caller::asks(&throttle, spent(1))).collect();
    assert!(throttle.try_acquire(spent(1)).is_err(), "50 tokens are left, and the head comes first");
    clock.advance(secs(11));
    let _big = costly.permit().expect("the window is empty");
    assert_eq!(cheap.iter_mut().filter_map(Caller::permit).count(), 10);
}

#[test]
fn leaving_from_the_front_promotes_those_behind_at_once() {
    let clock = ManualClock::new();
    let throttle = Throttle::builder().budget(Budget::tokens(100, secs(10))).clock(clock).build().unwrap();
    throttle.try_acquire(Cost::request().tokens(50)).unwrap().settle(Outcome::success());
    let costly = Caller::asks(&throttle, Cost::request().tokens(90));
    let mut cheap = Caller::asks(&throttle, Cost::request().tokens(1));
    drop(costly);
    assert_eq!(cheap.wakes(), 1);
    assert!(cheap.permit().is_some());
}

#[test]
fn leaving_from_the_middle_disturbs_nobody() {
    let throttle = slots(1);
    let held = throttle.try_acquire(REQUEST).unwrap();
    let mut waiters: Vec<_> = (0..5).map(|_| Caller::asks(&throttle, REQUEST)).collect();
    drop(waiters.remove(2));
    assert_eq!((throttle.snapshot().waiting, waiters.iter().map(Caller::wakes).sum::<usize>()), (4, 0));
    drop(held);
    let mut entered = Vec::new();
    for (index, waiter) in waiters.iter_mut().enumerate() {
        entered.extend(waiter.permit().map(|permit| (index, permit)).map(|(index, _)| index));
    }
    assert_eq!(entered, [0, 1, 2, 3]);
}

#[test]
fn a_grant_dropped_unseen_returns_whole_and_promotes_the_next() {
    let clock = ManualClock::new();
    let throttle = Throttle::builder()
        .slots(Slots::fixed(1))
        .rate(Rate::per_hour(2))
        .budget(Budget::tokens(100, secs(1_000)))
        .clock(clock)
        .build()
        .unwrap();
    let held = throttle.try_acquire(REQUEST).unwrap();
    let first = Caller::asks(&throttle, Cost::request().tokens(100));
    let mut second = Caller::asks(&throttle, Cost::request().tokens(100));
    drop(held);
    assert_eq!((first.wakes(), throttle.snapshot().rate_level), (1, Some(0)));
    drop(first);
    // Its slot, its unit of rate and its tokens are all there for the next.
    let permit = second.permit().expect("the grant went on");
    assert_eq!((throttle.snapshot().tokens_used, throttle.snapshot().in_flight), (100, 1));
    drop(permit);
    assert_eq!((throttle.snapshot().tokens_used, throttle.snapshot().admitted), (0, 2));
}

#[test]
fn a_full_line_refuses_and_tells() {
    let throttle = Throttle::builder().slots(Slots::fixed(1)).waiters_max(2).build().unwrap();
    let mut events = throttle.events();
    let _held = throttle.try_acquire(REQUEST).unwrap();
    let _waiters = [Caller::asks(&throttle, REQUEST), Caller::asks(&throttle, REQUEST)];
    let refused = Caller::new(throttle.acquire(REQUEST)).refused();
    assert_eq!(refused, Some(Refused::Busy { waiters_max: 2 }));
    assert_eq!(events.try_next().unwrap().event, Event::QueueFull { waiters_max: 2 });
}

/// Ten thousand callers through `throttle`, with a clock that steps by `step` whenever nobody can enter.
fn ten_thousand(throttle: &Throttle, clock: &ManualClock, step: Duration) {
    let mut waiters: Vec<_> = (0..10_000).map(|_| Some(Caller::new(throttle.acquire(REQUEST)))).collect();
    let mut permits: Vec<Permit<'_>> = Vec::new();
    for waiter in waiters.iter_mut().flatten() {
        permits.extend(waiter.permit());
    }
    let before = throttle.snapshot();
    let mut entered = permits.len();
    let mut next = permits.len();
    while entered < 10_000 {
        // The head's own task is the only one that runs: everybody else is granted without being polled.
        for permit in permits.drain(..) {
            permit.settle(Outcome::success());
        }
        clock.advance(step);
        while let Some(permit) = waiters.get_mut(next).and_then(|waiter| waiter.as_mut()?.permit()) {
            permits.push(permit);
            entered += 1;
            next += 1;
        }
    }
    drop(permits);
    let after = throttle.snapshot();
    let grants = after.admitted - before.admitted;
    let evaluations = after.evaluations - before.evaluations;
    assert!(evaluations <= 2 * grants, "{evaluations} evaluations for {grants} grants");
    assert_eq!((after.waiting, after.in_flight), (0, 0));
}

#[test]
fn ten_thousand_waiters_for_slots_cost_at_most_two_evaluations_each() {
    let clock = ManualClock::new();
    let throttle = Throttle::builder().slots(Slots::fixed(7)).clock(clock.clone()).build().unwrap();
    ten_thousand(&throttle, &clock, secs(1));
    assert_eq!(clock.sleeps(), 0, "no timer where nobody waits for time");
}

#[test]
fn ten_thousand_waiters_for_a_rate_cost_at_most_two_evaluations_each() {
    let clock = ManualClock::new();
    let throttle = Throttle::builder()
        .rate(Rate::per_second(1_000).burst(3))
        .slots(Slots::unlimited())
        .clock(clock.clone())
        .build()
        .unwrap();
    ten_thousand(&throttle, &clock, millis(1));
}

#[test]
fn ten_thousand_waiters_for_slots_and_pace_cost_at_most_two_evaluations_each() {
    let clock = ManualClock::new();
    let throttle = Throttle::builder()
        .slots(Slots::fixed(1))
        .pace(Pace::every(millis(10)))
        .clock(clock.clone())
        .build()
        .unwrap();
    ten_thousand(&throttle, &clock, millis(10));
}

#[test]
fn ten_thousand_waiters_for_a_budget_cost_at_most_two_evaluations_each() {
    let clock = ManualClock::new();
    // Five tokens a second, one for each: whoever ends brings a place and no token, and the head need not be asked.
    let throttle =
        Throttle::builder().budget(Budget::tokens(5, secs(1))).clock(clock.clone()).build().unwrap();
    let cost = Cost::request().tokens(1);
    let mut waiters: Vec<_> = (0..10_000).map(|_| Caller::new(throttle.acquire(cost))).collect();
    let mut permits: Vec<_> = waiters.iter_mut().filter_map(Caller::permit).collect();
    let before = throttle.snapshot();
    let mut next = permits.len();
    while next < 10_000 {
        for permit in permits.drain(..) {
            permit.settle(Outcome::success());
        }
        clock.advance(secs(1) + Duration::from_nanos(1));
        while let Some(permit) = waiters.get_mut(next).and_then(Caller::permit) {
            permits.push(permit);
            next += 1;
        }
    }
    let after = throttle.snapshot();
    let (grants, evaluations) = (after.admitted - before.admitted, after.evaluations - before.evaluations);
    assert!(evaluations <= 2 * grants, "{evaluations} evaluations for {grants} grants");
}

#[tokio::test]
async fn one_timer_serves_ten_thousand_waiters_and_each_is_woken_once() {
    let clock = ManualClock::new();
    let throttle = Throttle::builder().rate(Rate::per_second(1)).clock(clock.clone()).build().unwrap();
    drop(throttle.try_acquire(REQUEST).unwrap());
    let mut waiters: Vec<_> = (0..10_000).map(|_| Caller::asks(&throttle, REQUEST)).collect();
    settle_tasks().await;
    assert_eq!(clock.sleeping(), 1);
    clock.advance(secs(5));
    settle_tasks().await;
    // One a second with a burst of one: five seconds at once are one entry, and the next is a second away.
    assert_eq!((throttle.snapshot().waiting, clock.sleeping()), (9_999, 1));
    for _ in 0..20 {
        clock.advance(secs(1));
        settle_tasks().await;
    }
    assert_eq!(throttle.snapshot().waiting, 9_979);
    assert_eq!(clock.sleeping(), 1);
    let entered = waiters.iter_mut().take(21).filter_map(Caller::permit).count();
    assert_eq!(entered, 21);
    assert!(waiters[..21].iter().all(|waiter| waiter.wakes() == 1));
    assert!(waiters[22..].iter().all(|waiter| waiter.wakes() == 0), "nobody is woken before its turn");
    drop(waiters);
    settle_tasks().await;
    assert_eq!(clock.sleeping(), 0, "the keeper goes when nobody waits");
}

#[tokio::test]
async fn all_that_is_due_in_one_tick_enters_in_that_tick() {
    let clock = ManualClock::new();
    let throttle = Throttle::builder().rate(Rate::per_second(100)).clock(clock.clone()).build().unwrap();
    for _ in 0..100 {
        drop(throttle.try_acquire(REQUEST).unwrap());
    }
    let mut waiters: Vec<_> = (0..100).map(|_| Caller::asks(&throttle, REQUEST)).collect();
    settle_tasks().await;
    clock.advance(secs(1));
    settle_tasks().await;
    assert_eq!(waiters.iter_mut().filter_map(Caller::permit).count(), 100);
    assert!(waiters.iter().all(|waiter| waiter.wakes() == 1));
}

/// A future kept in a buffered stream whose consumer is busy is not polled. It must not hold up the line: when
/// its turn comes it is granted, holds that, and everybody else goes on.
#[tokio::test]
async fn a_head_that_is_never_polled_blocks_only_what_it_holds() {
    let clock = ManualClock::new();
    let throttle = Throttle::builder()
        .slots(Slots::fixed(2))
        .pace(Pace::every(secs(1)))
        .random(Random::fixed(0.0))
        .clock(clock.clone())
        .build()
        .unwrap();
    let mut events = throttle.events();
    drop(throttle.try_acquire(REQUEST).unwrap());
    let forgotten = Caller::asks(&throttle, REQUEST);
    let mut others: Vec<_> = (0..3).map(|_| Caller::asks(&throttle, REQUEST)).collect();
    settle_tasks().await;
    for other in &mut others {
        clock.advance(secs(1));
        settle_tasks().await;
        clock.advance(secs(1));
        settle_tasks().await;
        drop(other.permit().expect("the line goes on without the one that is not polled"));
    }
    assert_eq!(throttle.snapshot().in_flight, 1, "it holds its slot");
    let second = throttle.try_acquire(REQUEST).expect("the other slot is free");
    // Those who have to wait behind an unseen grant find it, and after a second tell of it.
    let late = Caller::asks(&throttle, REQUEST);
    let later = Caller::asks(&throttle, REQUEST);
    clock.advance(secs(2));
    let last = Caller::asks(&throttle, REQUEST);
    let told = std::iter::from_fn(|| events.try_next());
    assert!(told.into_iter().any(|notice| matches!(notice.event, Event::GrantUnseen { .. })));
    drop((forgotten, second, late, later, last));
    assert_eq!((throttle.snapshot().in_flight, throttle.snapshot().waiting), (0, 0));
}

/// The head was told to wait for a slot, and that the budget is used up for a minute. The one that leaves brings
/// both: its slot, and tokens it did not use.
#[tokio::test]
async fn tokens_that_come_back_with_a_slot_let_the_head_in_at_once() {
    let clock = ManualClock::new();
    let throttle = Throttle::builder()
        .slots(Slots::fixed(1))
        .budget(Budget::tokens(100, secs(60)))
        .clock(clock)
        .build()
        .unwrap();
    let first = throttle.try_acquire(Cost::request().tokens(100)).unwrap();
    let mut second = Caller::asks(&throttle, Cost::request().tokens(50));
    first.settle(Outcome::success().spent(Cost::request().tokens(10)));
    assert!(second.permit().is_some());
}

/// Everybody waits for a return at first. The return lets the first in, and the next head, which nobody polls,
/// now waits for time: the line must go on without it.
#[tokio::test]
async fn a_head_that_comes_to_wait_for_time_unpolled_does_not_block_the_line() {
    let clock = ManualClock::new();
    let throttle = Throttle::builder()
        .slots(Slots::fixed(2))
        .pace(Pace::every(secs(1)))
        .clock(clock.clone())
        .build()
        .unwrap();
    let first = throttle.try_acquire(REQUEST).unwrap();
    clock.advance(secs(1));
    let second = throttle.try_acquire(REQUEST).unwrap();
    clock.advance(secs(1));
    let mut third = Caller::asks(&throttle, REQUEST);
    let forgotten = Caller::asks(&throttle, REQUEST);
    let mut live = Caller::asks(&throttle, REQUEST);
    drop(first);
    drop(third.permit().expect("a slot came back"));
    drop(second);
    settle_tasks().await;
    for _ in 0..2 {
        clock.advance(secs(1));
        settle_tasks().await;
    }
    assert!(live.permit().is_some(), "the forgotten one holds one slot, and the other is free");
    drop(forgotten);
}

#[test]
fn a_recovery_slot_comes_back_where_nothing_else_is_counted() {
    let clock = ManualClock::new();
    let throttle = Throttle::builder()
        .rate(Rate::per_second(100))
        .recovery_slots(1)
        .pause(Pause::default().tail(secs(10)))
        .random(Random::fixed(0.0))
        .clock(clock.clone())
        .build()
        .unwrap();
    throttle.pause(secs(1));
    clock.advance(secs(1));
    for _ in 0..3 {
        let permit = throttle.try_acquire(REQUEST).expect("the recovery slot is free again");
        assert_eq!(throttle.snapshot().recovering_in_flight, 1);
        permit.settle(Outcome::success());
    }
    assert_eq!(throttle.snapshot().recovering_in_flight, 0);
}

/// A waiter whose deadline could still be met is told when a new limit makes that impossible.
#[test]
fn a_slower_rate_refuses_those_it_makes_too_late() {
    let clock = ManualClock::new();
    let throttle = Throttle::builder().rate(Rate::per_second(1)).clock(clock).build().unwrap();
    drop(throttle.try_acquire(REQUEST).unwrap());
    let mut hurried = Caller::new(throttle.acquire_within(REQUEST, secs(5)));
    assert!(hurried.poll().is_pending());
    let mut patient = Caller::asks(&throttle, REQUEST);
    throttle.retune(|limits| limits.rate = Some(Rate::per_minute(1))).unwrap();
    assert_eq!(hurried.refused(), Some(Refused::Limited { by: Gate::Rate, retry_after: Some(secs(60)) }));
    assert!(patient.permit().is_none());
}

/// The head waits for the budget's window, a minute away, when tokens come back; pace would not let it in yet. It is
/// asked again when pace does, and not a minute later.
#[tokio::test]
async fn tokens_that_come_back_before_the_pace_allows_are_not_forgotten() {
    let clock = ManualClock::new();
    let throttle = Throttle::builder()
        .pace(Pace::every(secs(1)))
        .budget(Budget::tokens(100, secs(60)))
        .clock(clock.clone())
        .build()
        .unwrap();
    let first = throttle.try_acquire(Cost::request().tokens(100)).unwrap();
    let mut second = Caller::asks(&throttle, Cost::request().tokens(50));
    settle_tasks().await;
    clock.advance(millis(500));
    first.settle(Outcome::success().spent(Cost::request().tokens(10)));
    settle_tasks().await;
    assert!(second.permit().is_none(), "the pace holds it");
    clock.advance(millis(500));
    settle_tasks().await;
    assert!(second.permit().is_some());
}

/// Nobody needed a timer until the pause; whoever sets the pause sees to it that there is one.
#[tokio::test]
async fn a_pause_set_while_all_wait_for_slots_ends_without_the_head_being_polled() {
    let clock = ManualClock::new();
    let throttle = Throttle::builder()
        .slots(Slots::fixed(2))
        .random(Random::fixed(0.0))
        .clock(clock.clone())
        .build()
        .unwrap();
    let held = [throttle.try_acquire(REQUEST).unwrap(), throttle.try_acquire(REQUEST).unwrap()];
    let forgotten = Caller::asks(&throttle, REQUEST);
    let mut live = Caller::asks(&throttle, REQUEST);
    for permit in held {
        permit.settle(Outcome::overload().retry_after(secs(5)));
    }
    settle_tasks().await;
    clock.advance(secs(6));
    settle_tasks().await;
    assert!(live.permit().is_some(), "one slot is the forgotten one's, and the other is free");
    drop(forgotten);
}

#[test]
fn a_bound_counts_only_what_cannot_come_back() {
    let clock = ManualClock::new();
    let throttle = Throttle::builder().budget(Budget::tokens(100, secs(60))).clock(clock).build().unwrap();
    let held = throttle.try_acquire(Cost::request().tokens(100)).unwrap();
    let mut hurried = Caller::new(throttle.acquire_within(Cost::request().tokens(50), secs(5)));
    assert!(hurried.poll().is_pending(), "the one in flight may use less than it reserved");
    held.settle(Outcome::success().spent(Cost::request().tokens(10)));
    assert!(hurried.permit().is_some());
}

#[test]
fn a_waker_that_panics_keeps_nobody_else_asleep() {
    struct Bomb;
    impl std::task::Wake for Bomb {
        fn wake(self: std::sync::Arc<Self>) {
            panic!("a bug in somebody's runtime");
        }
    }
    let throttle = slots(2);
    let held = [throttle.try_acquire(REQUEST).unwrap(), throttle.try_acquire(REQUEST).unwrap()];
    let bomb = std::task::Waker::from(std::sync::Arc::new(Bomb));
    let mut first = Box::pin(throttle.acquire(REQUEST));
    assert!(first.as_mut().poll(&mut std::task::Context::from_waker(&bomb)).is_pending());
    let mut second = Caller::asks(&throttle, REQUEST);
    throttle.retune(|limits| limits.slots = Some(Slots::fixed(4))).unwrap();
    assert_eq!((second.wakes(), throttle.snapshot().listener_panics), (1, 1));
    assert!(second.permit().is_some());
    drop(held);
}

#[test]
fn a_cost_that_became_impossible_is_refused_wherever_it_stands_in_line() {
    let clock = ManualClock::new();
    let throttle = Throttle::builder()
        .slots(Slots::fixed(1))
        .budget(Budget::tokens(100, secs(60)))
        .clock(clock)
        .build()
        .unwrap();
    let _held = throttle.try_acquire(REQUEST).unwrap();
    let mut small = Caller::asks(&throttle, Cost::request().tokens(5));
    let mut large = Caller::asks(&throttle, Cost::request().tokens(80));
    throttle.retune(|limits| limits.budget = Some(Budget::tokens(50, secs(60)))).unwrap();
    assert_eq!(large.refused(), Some(Refused::TooLarge { tokens: 80, capacity: 50 }));
    assert!(small.permit().is_none());
}
