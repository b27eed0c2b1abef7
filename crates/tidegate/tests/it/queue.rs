//! The queue: FIFO order, promotion, bounds, and the cost of waiting.

use std::time::Duration;

use tidegate::{
    Budget, Cost, Event, Gate, ManualClock, Outcome, Pace, Pause, Permit, Random, Rate, Refused, Slots,
    Throttle,
};

use crate::kit::{Caller, REQUEST, millis, secs, settle_tasks, slots};

#[test]
fn waiters_enter_in_fifo_order() {
    let throttle = slots(1);
    let mut held = Some(throttle.try_acquire(REQUEST).unwrap());
    let mut waiters: Vec<_> = (0..5).map(|_| Caller::queued(&throttle, REQUEST)).collect();
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
    let mut waiter = Caller::queued(&throttle, REQUEST);
    drop(one);
    // The freed slot was granted to the waiter, although its task has not run yet.
    let refused = throttle.try_acquire(REQUEST).unwrap_err();
    assert_eq!(refused, Refused::Limited { by: Gate::Slots, retry_after: None });
    assert!(waiter.permit().is_some());
    drop(two);
}

#[test]
fn costly_head_is_not_starved_by_cheap_waiters() {
    let clock = ManualClock::new();
    let throttle =
        Throttle::builder().budget(Budget::tokens(100, secs(10))).clock(clock.clone()).build().unwrap();
    let spent = |tokens| Cost::request().tokens(tokens);
    throttle.try_acquire(spent(50)).unwrap().settle(Outcome::success());
    let mut costly = Caller::queued(&throttle, spent(90));
    let mut cheap: Vec<_> = (0..10).map(|_| Caller::queued(&throttle, spent(1))).collect();
    assert!(throttle.try_acquire(spent(1)).is_err(), "50 tokens are left, and the head is first");
    clock.advance(secs(11));
    let _big = costly.permit().expect("the window is empty");
    assert_eq!(cheap.iter_mut().filter_map(Caller::permit).count(), 10);
}

#[test]
fn leaving_head_promotes_the_next_at_once() {
    let clock = ManualClock::new();
    let throttle = Throttle::builder().budget(Budget::tokens(100, secs(10))).clock(clock).build().unwrap();
    throttle.try_acquire(Cost::request().tokens(50)).unwrap().settle(Outcome::success());
    let costly = Caller::queued(&throttle, Cost::request().tokens(90));
    let mut cheap = Caller::queued(&throttle, Cost::request().tokens(1));
    drop(costly);
    assert_eq!(cheap.wakes(), 1);
    assert!(cheap.permit().is_some());
}

#[test]
fn leaving_from_the_middle_keeps_the_others() {
    let throttle = slots(1);
    let held = throttle.try_acquire(REQUEST).unwrap();
    let mut waiters: Vec<_> = (0..5).map(|_| Caller::queued(&throttle, REQUEST)).collect();
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
fn unpolled_grant_returns_and_promotes_the_next() {
    let clock = ManualClock::new();
    let throttle = Throttle::builder()
        .slots(Slots::fixed(1))
        .rate(Rate::per_hour(2))
        .budget(Budget::tokens(100, secs(1_000)))
        .clock(clock)
        .build()
        .unwrap();
    let held = throttle.try_acquire(REQUEST).unwrap();
    let first = Caller::queued(&throttle, Cost::request().tokens(100));
    let mut second = Caller::queued(&throttle, Cost::request().tokens(100));
    drop(held);
    assert_eq!((first.wakes(), throttle.snapshot().rate_level), (1, Some(0)));
    drop(first);
    // Its slot, rate unit and tokens are all available to the next caller.
    let permit = second.permit().expect("the grant was passed on");
    assert_eq!((throttle.snapshot().tokens_used, throttle.snapshot().in_flight), (100, 1));
    drop(permit);
    assert_eq!((throttle.snapshot().tokens_used, throttle.snapshot().admitted), (0, 2));
}

#[test]
fn full_queue_refuses_and_emits_event() {
    let throttle = Throttle::builder().slots(Slots::fixed(1)).waiters_max(2).build().unwrap();
    let mut events = throttle.events();
    let _held = throttle.try_acquire(REQUEST).unwrap();
    let _waiters = [Caller::queued(&throttle, REQUEST), Caller::queued(&throttle, REQUEST)];
    let refused = Caller::new(throttle.acquire(REQUEST)).refused();
    assert_eq!(refused, Some(Refused::Busy { waiters_max: 2 }));
    assert_eq!(events.try_next().unwrap().event, Event::QueueFull { waiters_max: 2 });
}

/// Runs ten thousand callers through `throttle`, advancing the clock by `step` whenever none can enter.
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
        // Only the head's task runs; all others are granted without being polled.
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

/// At most two evaluations per waiter.
#[test]
fn ten_thousand_slot_waiters_cost_two_evaluations() {
    let clock = ManualClock::new();
    let throttle = Throttle::builder().slots(Slots::fixed(7)).clock(clock.clone()).build().unwrap();
    ten_thousand(&throttle, &clock, secs(1));
    assert_eq!(clock.sleeps(), 0, "no timer unless a caller waits for time");
}

/// At most two evaluations per waiter.
#[test]
fn ten_thousand_rate_waiters_cost_two_evaluations() {
    let clock = ManualClock::new();
    let throttle = Throttle::builder()
        .rate(Rate::per_second(1_000).burst(3))
        .slots(Slots::unlimited())
        .clock(clock.clone())
        .build()
        .unwrap();
    ten_thousand(&throttle, &clock, millis(1));
}

/// Slots and pace together cost at most two evaluations per waiter.
#[test]
fn ten_thousand_paced_waiters_cost_two_evaluations() {
    let clock = ManualClock::new();
    let throttle = Throttle::builder()
        .slots(Slots::fixed(1))
        .pace(Pace::every(millis(10)))
        .clock(clock.clone())
        .build()
        .unwrap();
    ten_thousand(&throttle, &clock, millis(10));
}

/// At most two evaluations per waiter.
#[test]
fn ten_thousand_budget_waiters_cost_two_evaluations() {
    let clock = ManualClock::new();
    // Five tokens per second, one per request: a finished request frees a slot but no token, so the head need
    // not be evaluated.
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
async fn one_timer_wakes_ten_thousand_waiters_once_each() {
    let clock = ManualClock::new();
    let throttle = Throttle::builder().rate(Rate::per_second(1)).clock(clock.clone()).build().unwrap();
    drop(throttle.try_acquire(REQUEST).unwrap());
    let mut waiters: Vec<_> = (0..10_000).map(|_| Caller::queued(&throttle, REQUEST)).collect();
    settle_tasks().await;
    assert_eq!(clock.sleeping(), 1);
    clock.advance(secs(5));
    settle_tasks().await;
    // One per second with a burst of one: a step of five seconds is one entry, and the next is a second away.
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
    assert!(waiters[22..].iter().all(|waiter| waiter.wakes() == 0), "no waiter is woken early");
    drop(waiters);
    settle_tasks().await;
    assert_eq!(clock.sleeping(), 0, "the timer ends with the last waiter");
}

#[tokio::test]
async fn all_due_waiters_enter_in_one_tick() {
    let clock = ManualClock::new();
    let throttle = Throttle::builder().rate(Rate::per_second(100)).clock(clock.clone()).build().unwrap();
    for _ in 0..100 {
        drop(throttle.try_acquire(REQUEST).unwrap());
    }
    let mut waiters: Vec<_> = (0..100).map(|_| Caller::queued(&throttle, REQUEST)).collect();
    settle_tasks().await;
    clock.advance(secs(1));
    settle_tasks().await;
    assert_eq!(waiters.iter_mut().filter_map(Caller::permit).count(), 100);
    assert!(waiters.iter().all(|waiter| waiter.wakes() == 1));
}

/// A future inside a buffered stream with a busy consumer is not polled. It must not block the queue: it is
/// granted in turn and holds its permit, while the others proceed.
#[tokio::test]
async fn unpolled_head_blocks_only_its_own_permit() {
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
    let unpolled = Caller::queued(&throttle, REQUEST);
    let mut others: Vec<_> = (0..3).map(|_| Caller::queued(&throttle, REQUEST)).collect();
    settle_tasks().await;
    for other in &mut others {
        clock.advance(secs(1));
        settle_tasks().await;
        clock.advance(secs(1));
        settle_tasks().await;
        drop(other.permit().expect("the queue proceeds past the unpolled caller"));
    }
    assert_eq!(throttle.snapshot().in_flight, 1, "it holds its slot");
    let second = throttle.try_acquire(REQUEST).expect("the other slot is free");
    // Waiters behind an unpolled grant detect it, and report it after a second.
    let late = Caller::queued(&throttle, REQUEST);
    let later = Caller::queued(&throttle, REQUEST);
    clock.advance(secs(2));
    let last = Caller::queued(&throttle, REQUEST);
    let notices = std::iter::from_fn(|| events.try_next());
    assert!(notices.into_iter().any(|notice| matches!(notice.event, Event::GrantUnseen { .. })));
    drop((unpolled, second, late, later, last));
    assert_eq!((throttle.snapshot().in_flight, throttle.snapshot().waiting), (0, 0));
}

/// The head waits for a slot and for a budget that is exhausted for a minute. A settle frees both: its slot,
/// and its unused tokens.
#[tokio::test]
async fn tokens_returned_with_a_slot_admit_the_head() {
    let clock = ManualClock::new();
    let throttle = Throttle::builder()
        .slots(Slots::fixed(1))
        .budget(Budget::tokens(100, secs(60)))
        .clock(clock)
        .build()
        .unwrap();
    let first = throttle.try_acquire(Cost::request().tokens(100)).unwrap();
    let mut second = Caller::queued(&throttle, Cost::request().tokens(50));
    first.settle(Outcome::success().spent(Cost::request().tokens(10)));
    assert!(second.permit().is_some());
}

/// All callers wait for a release at first. It admits the first one, and the next head, which is never
/// polled, now waits for time. The queue must proceed without it.
#[tokio::test]
async fn unpolled_head_waiting_for_time_is_not_blocking() {
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
    let mut third = Caller::queued(&throttle, REQUEST);
    let unpolled = Caller::queued(&throttle, REQUEST);
    let mut live = Caller::queued(&throttle, REQUEST);
    drop(first);
    drop(third.permit().expect("a slot was released"));
    drop(second);
    settle_tasks().await;
    for _ in 0..2 {
        clock.advance(secs(1));
        settle_tasks().await;
    }
    assert!(live.permit().is_some(), "the unpolled caller holds one slot, and the other is free");
    drop(unpolled);
}

#[test]
fn recovery_slot_returns_without_other_limits() {
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

/// A waiter is refused as soon as a new limit makes its deadline unreachable.
#[test]
fn slower_rate_refuses_waiters_it_makes_late() {
    let clock = ManualClock::new();
    let throttle = Throttle::builder().rate(Rate::per_second(1)).clock(clock).build().unwrap();
    drop(throttle.try_acquire(REQUEST).unwrap());
    let mut bounded = Caller::new(throttle.acquire_within(REQUEST, secs(5)));
    assert!(bounded.poll().is_pending());
    let mut unbounded = Caller::queued(&throttle, REQUEST);
    throttle.retune(|limits| limits.rate = Some(Rate::per_minute(1))).unwrap();
    assert_eq!(bounded.refused(), Some(Refused::Limited { by: Gate::Rate, retry_after: Some(secs(60)) }));
    assert!(unbounded.permit().is_none());
}

/// Tokens return while the head waits for the budget's window, a minute away, and pace still holds it. It is
/// evaluated again when pace allows, and not a minute later.
#[tokio::test]
async fn tokens_returned_before_pace_allows_are_used() {
    let clock = ManualClock::new();
    let throttle = Throttle::builder()
        .pace(Pace::every(secs(1)))
        .budget(Budget::tokens(100, secs(60)))
        .clock(clock.clone())
        .build()
        .unwrap();
    let first = throttle.try_acquire(Cost::request().tokens(100)).unwrap();
    let mut second = Caller::queued(&throttle, Cost::request().tokens(50));
    settle_tasks().await;
    clock.advance(millis(500));
    first.settle(Outcome::success().spent(Cost::request().tokens(10)));
    settle_tasks().await;
    assert!(second.permit().is_none(), "pace holds it");
    clock.advance(millis(500));
    settle_tasks().await;
    assert!(second.permit().is_some());
}

/// No timer was needed before the pause; the caller that sets the pause starts one.
#[tokio::test]
async fn pause_over_slot_waiters_ends_with_unpolled_head() {
    let clock = ManualClock::new();
    let throttle = Throttle::builder()
        .slots(Slots::fixed(2))
        .random(Random::fixed(0.0))
        .clock(clock.clone())
        .build()
        .unwrap();
    let held = [throttle.try_acquire(REQUEST).unwrap(), throttle.try_acquire(REQUEST).unwrap()];
    let unpolled = Caller::queued(&throttle, REQUEST);
    let mut live = Caller::queued(&throttle, REQUEST);
    for permit in held {
        permit.settle(Outcome::overload().retry_after(secs(5)));
    }
    settle_tasks().await;
    clock.advance(secs(6));
    settle_tasks().await;
    assert!(live.permit().is_some(), "the unpolled caller holds one slot, and the other is free");
    drop(unpolled);
}

#[test]
fn deadline_bound_ignores_returnable_tokens() {
    let clock = ManualClock::new();
    let throttle = Throttle::builder().budget(Budget::tokens(100, secs(60))).clock(clock).build().unwrap();
    let held = throttle.try_acquire(Cost::request().tokens(100)).unwrap();
    let mut bounded = Caller::new(throttle.acquire_within(Cost::request().tokens(50), secs(5)));
    assert!(bounded.poll().is_pending(), "the one in flight may use less than it reserved");
    held.settle(Outcome::success().spent(Cost::request().tokens(10)));
    assert!(bounded.permit().is_some());
}

#[test]
fn panicking_waker_does_not_block_other_waiters() {
    struct PanickingWaker;
    impl std::task::Wake for PanickingWaker {
        fn wake(self: std::sync::Arc<Self>) {
            panic!("injected panic");
        }
    }
    let throttle = slots(2);
    let held = [throttle.try_acquire(REQUEST).unwrap(), throttle.try_acquire(REQUEST).unwrap()];
    let bomb = std::task::Waker::from(std::sync::Arc::new(PanickingWaker));
    let mut first = Box::pin(throttle.acquire(REQUEST));
    assert!(first.as_mut().poll(&mut std::task::Context::from_waker(&bomb)).is_pending());
    let mut second = Caller::queued(&throttle, REQUEST);
    throttle.retune(|limits| limits.slots = Some(Slots::fixed(4))).unwrap();
    assert_eq!((second.wakes(), throttle.snapshot().listener_panics), (1, 1));
    assert!(second.permit().is_some());
    drop(held);
}

#[test]
fn cost_made_impossible_is_refused_anywhere_in_queue() {
    let clock = ManualClock::new();
    let throttle = Throttle::builder()
        .slots(Slots::fixed(1))
        .budget(Budget::tokens(100, secs(60)))
        .clock(clock)
        .build()
        .unwrap();
    let _held = throttle.try_acquire(REQUEST).unwrap();
    let mut small = Caller::queued(&throttle, Cost::request().tokens(5));
    let mut large = Caller::queued(&throttle, Cost::request().tokens(80));
    throttle.retune(|limits| limits.budget = Some(Budget::tokens(50, secs(60)))).unwrap();
    assert_eq!(large.refused(), Some(Refused::TooLarge { tokens: 80, capacity: 50 }));
    assert!(small.permit().is_none());
}
