//! The public behaviour of a throttle, in paused time.

use std::sync::{Arc, Mutex};

use tidegate::{
    Aimd, Brake, Budget, Builder, Bytes, Circuit, CircuitState, Controller, Cost, Event, Gate, ManualClock,
    Outcome, Pace, Pause, Phase, Random, Rate, Reason, Refused, Slots, State, Throttle,
};
use tokio::time::{Instant, advance, sleep};

use crate::kit::{Caller, REQUEST, millis, secs, settle_tasks, slots};

fn layered(capacity: u64, recovery: u32) -> Throttle {
    Throttle::builder()
        .slots(Slots::fixed(400))
        .recovery_slots(recovery)
        .bytes(Bytes::in_flight(capacity).recovering_price(20))
        .pause(Pause::default().tail(secs(10)))
        .random(Random::fixed(0.0))
        .build()
        .expect("within the bounds")
}

#[test]
fn default_throttle_has_documented_limits() {
    let snapshot = Throttle::new().snapshot();
    assert_eq!((snapshot.slots, snapshot.slots_max), (Some(32), Some(1_024)));
    assert_eq!((snapshot.rate.unwrap().to_string(), snapshot.state), ("10/s".to_owned(), State::Running));
    assert_eq!(snapshot.control.unwrap().reason, Reason::Probing);
    assert_eq!((snapshot.circuit, snapshot.tokens_remaining, snapshot.percentage), (None, None, None));
}

#[tokio::test(start_paused = true)]
async fn waiter_enters_when_slots_grow() {
    let throttle = slots(1);
    let _held = throttle.acquire(REQUEST).await.unwrap();
    let mut waiter = Caller::queued(&throttle, REQUEST);
    throttle.retune(|limits| limits.slots = Some(Slots::fixed(2))).unwrap();
    let _second = waiter.permit().expect("the waiter runs");
    assert_eq!((throttle.snapshot().in_flight, waiter.wakes()), (2, 1));
}

#[tokio::test(start_paused = true)]
async fn shrunk_slots_bound_permits_until_they_recover() {
    let throttle = Throttle::builder()
        .slots(Slots::adaptive(1..=8))
        .controller(Controller::Brake(Brake::default().at(1, secs(60)).cooling(secs(1))))
        .build()
        .unwrap();
    let held: Vec<_> = (0..8).map(|_| throttle.try_acquire(REQUEST).unwrap()).collect();
    throttle.record_failure();
    throttle.record_failure();
    assert_eq!(throttle.snapshot().slots, Some(2));
    drop(held);
    let count = |throttle: &Throttle| {
        let permits: Vec<_> = std::iter::from_fn(|| throttle.try_acquire(REQUEST).ok()).collect();
        permits.len()
    };
    assert_eq!(count(&throttle), 2);
    for _ in 0..2 {
        advance(secs(1)).await;
        let held: Vec<_> = std::iter::from_fn(|| throttle.try_acquire(REQUEST).ok()).collect();
        for permit in held {
            permit.settle(Outcome::success());
        }
    }
    assert_eq!((throttle.snapshot().slots, count(&throttle)), (Some(4), 4));
}

#[test]
fn twenty_concurrent_failures_open_the_circuit() {
    let throttle = Throttle::builder()
        .slots(Slots::fixed(20))
        .circuit(Circuit::after_failures(20))
        .clock(ManualClock::new())
        .build()
        .unwrap();
    let permits: Vec<_> = (0..20).map(|_| throttle.try_acquire(REQUEST).unwrap().into_owned()).collect();
    let threads: Vec<_> = permits
        .into_iter()
        .map(|permit| std::thread::spawn(move || permit.settle(Outcome::failure())))
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    assert_eq!(throttle.snapshot().circuit.unwrap().state, CircuitState::Open);
}

#[test]
fn explicit_controller_stays_for_any_slots() {
    let brake = Controller::Brake(Brake::default());
    let adaptive = Slots::adaptive(1..=8);
    let first = Throttle::builder().controller(brake).slots(adaptive).build().unwrap();
    let last = Throttle::builder().slots(adaptive).controller(brake).build().unwrap();
    let unnamed = Throttle::builder().slots(adaptive).build().unwrap();
    for (throttle, is_auto) in [(first, false), (last, false), (unnamed, true)] {
        assert_eq!(throttle.snapshot().slots, Some(8));
        assert_eq!(throttle.snapshot().control.is_some(), is_auto);
    }
}

/// Regression: limits that silently did nothing.
#[test]
fn ranges_that_no_controller_moves_are_refused() {
    let adaptive = Slots::adaptive(1..=8);
    let slowing = Pace::every(millis(200)).slowest(secs(30));
    let refused: [(Builder, &str); 5] = [
        (Throttle::builder().controller(Controller::Fixed).slots(adaptive), "slots.min"),
        (Throttle::builder().slots(adaptive).controller(Controller::Fixed), "slots.min"),
        (Throttle::gentle().controller(Controller::Fixed).slots(adaptive), "slots.min"),
        (Throttle::builder().slots(Slots::fixed(4)).pace(slowing), "pace.interval_max"),
        (Throttle::host().pace(slowing), "pace.interval_max"),
    ];
    for (builder, field) in refused {
        let error = builder.build().expect_err("nothing moves it");
        assert_eq!(error.problems().iter().map(|problem| problem.field).collect::<Vec<_>>(), [field]);
    }
    let throttle = slots(8);
    let error = throttle.retune(|limits| limits.slots = Some(adaptive)).expect_err("nothing moves them");
    assert!(error.to_string().contains("controller `fixed` does not move slots"), "{error}");
    assert_eq!(throttle.snapshot().slots_max, Some(8));
}

#[test]
fn controller_fixes_the_ranges_of_a_preset() {
    let seen = Throttle::gentle().controller(Controller::Fixed).build().unwrap().snapshot();
    assert_eq!((seen.slots, seen.interval), (Some(5), millis(200)));
    let aimd = Throttle::host().rate(Aimd::RATE).controller(Controller::Aimd(Aimd::default()));
    assert_eq!(aimd.build().unwrap().snapshot().slots, Some(1_024));
}

#[tokio::test(start_paused = true)]
async fn paced_callers_enter_one_by_one() {
    let throttle = Throttle::builder().pace(Pace::every(millis(500))).build().unwrap();
    let start = Instant::now();
    let entries = Arc::new(Mutex::new(Vec::new()));
    let tasks: Vec<_> = (0..10)
        .map(|_| {
            let (throttle, entries) = (throttle.clone(), Arc::clone(&entries));
            tokio::spawn(async move {
                let _permit = throttle.acquire(REQUEST).await.unwrap();
                entries.lock().unwrap().push(start.elapsed());
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    let wanted: Vec<_> = (0..10).map(|index| millis(500 * index)).collect();
    assert_eq!(*entries.lock().unwrap(), wanted);
}

#[tokio::test(start_paused = true)]
async fn budget_admits_the_rest_just_after_its_window() {
    let throttle = Throttle::builder().budget(Budget::tokens(100, secs(10))).build().unwrap();
    let start = Instant::now();
    let tasks: Vec<_> = (0..3)
        .map(|_| {
            let throttle = throttle.clone();
            tokio::spawn(async move {
                let permit = throttle.acquire(Cost::request().tokens(100)).await.unwrap();
                assert!(throttle.snapshot().tokens_used <= 100);
                permit.settle(Outcome::success());
                start.elapsed()
            })
        })
        .collect();
    let mut entered = Vec::new();
    for task in tasks {
        entered.push(task.await.unwrap().as_secs());
    }
    assert_eq!(entered, [0, 10, 20]);
}

#[tokio::test(start_paused = true)]
async fn tokens_reported_by_dropped_permit_stay_used() {
    let throttle = Throttle::builder().budget(Budget::tokens(100, secs(10))).build().unwrap();
    let mut permit = throttle.try_acquire(Cost::request().tokens(95)).unwrap();
    permit.spend(60);
    permit.spend(30);
    assert_eq!((permit.reported(), permit.cost().tokens), (90, 95));
    drop(permit);
    let snapshot = throttle.snapshot();
    assert_eq!((snapshot.tokens_used, snapshot.tokens_remaining), (90, Some(10)));
}

#[tokio::test(start_paused = true)]
async fn batch_under_one_permit_reports_each_part() {
    let throttle = Throttle::builder()
        .slots(Slots::fixed(4))
        .circuit(Circuit::after_failures(3))
        .total(10)
        .budget(Budget::tokens(100, secs(10)))
        .build()
        .unwrap();
    let mut permit = throttle.try_acquire(Cost::request().tokens(50)).unwrap();
    permit.record(Outcome::success().spent(Cost::request().tokens(10)));
    permit.record(Outcome::failure());
    permit.record(Outcome::failure());
    assert_eq!(throttle.snapshot().circuit.unwrap().consecutive_failures, 2);
    permit.record(Outcome::success().spent(Cost::request().tokens(5)));
    assert_eq!(permit.reported(), 15);
    permit.settle(Outcome::success());
    let snapshot = throttle.snapshot();
    assert_eq!((snapshot.completed, snapshot.tokens_used, snapshot.percentage), (5, 15, Some(50.0)));
}

#[tokio::test(start_paused = true)]
async fn bytes_return_however_the_work_ends() {
    let throttle = Throttle::builder().bytes(Bytes::in_flight(100)).build().unwrap();
    let cost = |bytes| Cost::request().bytes(bytes);
    throttle.try_acquire(cost(50)).unwrap().settle(Outcome::success());
    let held = throttle.clone();
    let panicked = tokio::spawn(async move {
        let _permit = held.acquire(cost(50)).await;
        panic!("injected panic");
    });
    assert!(panicked.await.unwrap_err().is_panic());
    assert_eq!(throttle.snapshot().bytes_in_flight, 0);
    assert!(throttle.try_acquire(cost(100)).is_ok());
}

#[tokio::test(start_paused = true)]
async fn aborted_task_returns_slot_and_bytes() {
    let throttle = layered(1_000, 2);
    let held = throttle.clone();
    let task = tokio::spawn(async move {
        let _permit = held.acquire(Cost::request().bytes(700)).await.unwrap();
        std::future::pending::<()>().await;
    });
    settle_tasks().await;
    assert_eq!((throttle.snapshot().in_flight, throttle.snapshot().bytes_in_flight), (1, 700));
    task.abort();
    assert!(task.await.unwrap_err().is_cancelled());
    assert_eq!((throttle.snapshot().in_flight, throttle.snapshot().bytes_in_flight), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn bytes_cost_twentyfold_while_recovering() {
    let throttle = layered(1_000, 2);
    throttle.pause(secs(1));
    advance(secs(1)).await;
    let cost = Cost::request().bytes(100);
    let first = throttle.acquire(cost).await.unwrap();
    assert_eq!(throttle.snapshot().bytes_in_flight, 2_000);
    let mut second = Caller::queued(&throttle, cost);
    first.settle(Outcome::success());
    assert!(second.permit().is_some());
}

#[tokio::test(start_paused = true)]
async fn request_enters_at_once_without_a_pause() {
    let throttle = layered(1_000, 2);
    assert!(throttle.try_acquire(Cost::request().bytes(100)).is_ok());
}

#[tokio::test(start_paused = true)]
async fn second_request_enters_when_the_only_slot_returns() {
    let throttle = slots(1);
    let first = throttle.acquire(REQUEST).await.unwrap();
    let mut second = Caller::queued(&throttle, REQUEST);
    sleep(millis(150)).await;
    assert!(second.permit().is_none());
    first.settle(Outcome::success());
    assert!(second.permit().is_some());
}

#[tokio::test(start_paused = true)]
async fn waiters_for_bytes_enter_in_order() {
    let throttle = layered(1_000, 2);
    let held = throttle.try_acquire(Cost::request().bytes(1_001)).unwrap();
    let mut waiters: Vec<_> = (0..5).map(|_| Caller::queued(&throttle, Cost::request().bytes(600))).collect();
    held.settle(Outcome::success());
    let mut permits: Vec<_> = waiters.iter_mut().map(Caller::permit).collect();
    // 1,000 → 400 → −200: two enter, and then one per release.
    assert_eq!(permits.iter().map(Option::is_some).collect::<Vec<_>>(), [true, true, false, false, false]);
    for next in 2..5 {
        permits[next - 2].take().unwrap().settle(Outcome::success());
        permits[next] = waiters[next].permit();
        assert!(permits[next].is_some(), "waiter {next} enters");
        assert!(waiters.iter_mut().skip(next + 1).all(|waiter| waiter.permit().is_none()));
    }
}

#[tokio::test(start_paused = true)]
async fn cancelled_waiter_is_charged_nothing() {
    let throttle = layered(1_000, 2);
    let held = throttle.try_acquire(Cost::request().bytes(1_001)).unwrap();
    let waiter = Caller::queued(&throttle, Cost::request().bytes(600));
    drop(waiter);
    assert_eq!((throttle.snapshot().bytes_in_flight, throttle.snapshot().waiting), (1_001, 0));
    drop(held);
    assert_eq!(throttle.snapshot().bytes_in_flight, 0);
}

#[tokio::test(start_paused = true)]
async fn waiter_queued_before_overload_enters_recovering() {
    let throttle = layered(10_000, 2);
    throttle.retune(|limits| limits.slots = Some(Slots::fixed(1))).unwrap();
    let first = throttle.try_acquire(Cost::request().bytes(10)).unwrap();
    let mut queued = Caller::queued(&throttle, Cost::request().bytes(100));
    first.settle(Outcome::overload().retry_after(secs(5)));
    advance(millis(4_999)).await;
    settle_tasks().await;
    assert!(queued.permit().is_none(), "a pause holds those already queued");
    sleep(millis(2)).await;
    let _permit = queued.permit().expect("the pause is over");
    let snapshot = throttle.snapshot();
    assert_eq!((snapshot.phase, snapshot.recovering_in_flight), (Phase::Recovering, 1));
    assert_eq!(snapshot.bytes_in_flight, 2_000);
}

#[tokio::test(start_paused = true)]
async fn recovery_slots_bound_entries_while_recovering() {
    let throttle = layered(u64::from(u32::MAX), 10);
    throttle.pause(secs(1));
    advance(secs(1)).await;
    let permits: Vec<_> = (0..10).map(|_| throttle.try_acquire(REQUEST).unwrap()).collect();
    let mut eleventh = Caller::queued(&throttle, Cost::request().bytes(5));
    assert_eq!(throttle.snapshot().bytes_in_flight, 0, "it holds nothing while it waits");
    assert!(matches!(throttle.try_acquire(REQUEST), Err(Refused::Limited { by: Gate::Queue, .. })));
    // The end of the tail admits it, although no slot was released.
    sleep(secs(10)).await;
    settle_tasks().await;
    let _permit = eleventh.permit().expect("the tail is over");
    assert_eq!(throttle.snapshot().in_flight, 11);
    drop(permits);
}

#[tokio::test(start_paused = true)]
async fn pause_is_only_ever_raised() {
    let throttle = slots(10);
    let sent_before = throttle.try_acquire(REQUEST).unwrap();
    let start = Instant::now();
    throttle.record(Outcome::overload().retry_after(secs(30)));
    throttle.record(Outcome::overload().retry_after(secs(1)));
    sent_before.settle(Outcome::success());
    let _permit = throttle.acquire(REQUEST).await.unwrap();
    assert!(start.elapsed() >= secs(30));
    assert!(start.elapsed() <= secs(31), "plus at most a second of jitter");
}

#[tokio::test(start_paused = true)]
async fn wave_of_equal_hints_emits_one_event() {
    let throttle = slots(100);
    let mut events = throttle.events();
    let wave: Vec<_> = (0..100).map(|_| throttle.try_acquire(REQUEST).unwrap()).collect();
    for permit in wave {
        advance(std::time::Duration::from_micros(10)).await;
        permit.settle(Outcome::overload().retry_after(secs(5)));
    }
    let count = std::iter::from_fn(|| events.try_next()).count();
    assert_eq!(count, 1);
    let refused = throttle.try_acquire(REQUEST).unwrap_err();
    assert!(refused.retry_after() >= Some(secs(5)), "the last hint applies: {refused}");
}

#[test]
fn budget_refusal_reports_retry_after() {
    let builder = Throttle::builder().budget(Budget::tokens(10, secs(60)));
    let throttle = builder.clock(ManualClock::new()).build().unwrap();
    let _held = throttle.try_acquire(Cost::request().tokens(10)).unwrap();
    let refused = throttle.try_acquire(Cost::request().tokens(1)).unwrap_err();
    assert!(matches!(refused, Refused::Limited { by: Gate::Budget, retry_after: Some(_) }), "{refused:?}");
}

#[tokio::test(start_paused = true)]
async fn manual_pause_can_be_resumed() {
    let throttle = slots(2);
    assert!(throttle.pause(secs(100)));
    assert!(!throttle.pause(secs(5)), "the current pause is longer");
    assert_eq!(throttle.snapshot().state, State::Paused);
    let refused = throttle.try_acquire(REQUEST).unwrap_err();
    assert!(matches!(refused, Refused::Limited { by: Gate::Pause, .. }));
    assert!(refused.retry_after().unwrap() >= secs(100));
    let mut waiter = Caller::queued(&throttle, REQUEST);
    assert!(throttle.resume());
    assert!(waiter.permit().is_some());
    assert!(!throttle.resume(), "there is nothing left to resume");
}

#[tokio::test(start_paused = true)]
async fn too_long_pause_is_capped_and_reported() {
    let throttle =
        Throttle::builder().slots(Slots::fixed(1)).pause(Pause::default().max(secs(60))).build().unwrap();
    let mut events = throttle.events();
    throttle.record(Outcome::overload().retry_after(secs(3_600)));
    let capped = Event::PauseCapped { asked: secs(3_600), capped: secs(60) };
    assert_eq!(events.next().await.unwrap().event, capped);
    assert!(matches!(events.next().await.unwrap().event, Event::Paused { span, .. } if span == secs(60)));
}

#[tokio::test(start_paused = true)]
async fn circuit_with_no_open_time_is_half_open_at_once() {
    let throttle = Throttle::builder().circuit(Circuit::after_failures(1).open_for(secs(0))).build().unwrap();
    throttle.record_failure();
    assert_eq!(throttle.snapshot().circuit.unwrap().state, CircuitState::HalfOpen);
    let probe = throttle.acquire(REQUEST).await.unwrap();
    assert!(probe.is_probe());
    let refused = throttle.acquire(REQUEST).await.unwrap_err();
    assert!(refused.retry_after().unwrap() > secs(0), "half-open never reports zero");
    probe.settle(Outcome::success());
    assert_eq!(throttle.snapshot().state, State::Running);
}

#[tokio::test(start_paused = true)]
async fn opening_circuit_refuses_waiters() {
    let throttle = Throttle::builder()
        .slots(Slots::fixed(1))
        .circuit(Circuit::after_failures(1).open_for(secs(30)))
        .build()
        .unwrap();
    let held = throttle.try_acquire(REQUEST).unwrap();
    let mut waiters: Vec<_> = (0..100).map(|_| Caller::queued(&throttle, REQUEST)).collect();
    held.settle(Outcome::failure());
    for waiter in &mut waiters {
        assert_eq!(waiter.refused(), Some(Refused::CircuitOpen { retry_after: secs(30) }));
        assert_eq!(waiter.wakes(), 1);
    }
    assert_eq!((throttle.snapshot().waiting, throttle.snapshot().in_flight), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn dropped_probe_returns_its_place() {
    let throttle = Throttle::builder().circuit(Circuit::after_failures(1).open_for(secs(5))).build().unwrap();
    throttle.record_failure();
    advance(secs(5)).await;
    let probe = throttle.try_acquire(REQUEST).unwrap();
    assert!(throttle.try_acquire(REQUEST).is_err());
    drop(probe);
    let probe = throttle.try_acquire(REQUEST).expect("its probe slot was released");
    probe.settle(Outcome::of(&Err::<(), _>("mine"), |_| false));
    assert!(throttle.try_acquire(REQUEST).is_ok(), "an ignored error releases it as well");
}

#[tokio::test(start_paused = true)]
async fn cancelled_task_slows_nothing() {
    let throttle =
        Throttle::gentle().controller(Controller::Brake(Brake::default().at(1, secs(60)))).build().unwrap();
    let held = throttle.clone();
    let task = tokio::spawn(async move {
        let _permit = held.acquire(REQUEST).await.unwrap();
        std::future::pending::<()>().await;
    });
    settle_tasks().await;
    task.abort();
    assert!(task.await.is_err());
    let snapshot = throttle.snapshot();
    assert_eq!((snapshot.slots, snapshot.state, snapshot.in_flight), (Some(5), State::Running, 0));
}

#[tokio::test(start_paused = true)]
async fn acquire_within_refuses_unreachable_deadline_early() {
    let throttle = Throttle::builder().rate(Rate::per_second(1)).build().unwrap();
    drop(throttle.acquire(REQUEST).await.unwrap());
    let mut ahead: Vec<_> = (0..3).map(|_| Caller::queued(&throttle, REQUEST)).collect();
    let start = Instant::now();
    // Three callers are ahead at one per second: the fourth enters after 4 s, so 3.5 s is refused at once.
    let refused = throttle.acquire_within(REQUEST, millis(3_500)).await.unwrap_err();
    assert_eq!(refused, Refused::Limited { by: Gate::Rate, retry_after: Some(secs(4)) });
    assert_eq!(start.elapsed(), secs(0));
    let entered = throttle.acquire_within(REQUEST, secs(4)).await;
    assert!(entered.is_ok());
    assert_eq!(start.elapsed(), secs(4));
    assert!(ahead.iter_mut().all(|waiter| waiter.permit().is_some()));
}

#[tokio::test(start_paused = true)]
async fn acquire_within_times_out_and_takes_nothing() {
    let throttle = slots(1);
    let held = throttle.try_acquire(REQUEST).unwrap();
    let start = Instant::now();
    let refused = throttle.acquire_within(REQUEST, secs(2)).await.unwrap_err();
    assert_eq!(refused, Refused::Limited { by: Gate::Slots, retry_after: None });
    assert_eq!((start.elapsed(), throttle.snapshot().waiting), (secs(2), 0));
    drop(held);
    assert!(throttle.try_acquire(REQUEST).is_ok());
}

#[tokio::test(start_paused = true)]
async fn pause_refuses_waiters_with_earlier_deadlines() {
    let throttle = slots(1);
    let _held = throttle.try_acquire(REQUEST).unwrap();
    let mut bounded = Caller::new(throttle.acquire_within(REQUEST, secs(5)));
    assert!(bounded.poll().is_pending());
    let mut unbounded = Caller::queued(&throttle, REQUEST);
    throttle.pause(secs(30));
    assert_eq!(bounded.refused(), Some(Refused::Limited { by: Gate::Pause, retry_after: Some(secs(30)) }));
    assert!(unbounded.permit().is_none());
}

#[tokio::test(start_paused = true)]
async fn retune_keeps_levels_and_admits_waiters() {
    let throttle = Throttle::builder().rate(Rate::per_hour(10)).build().unwrap();
    for _ in 0..10 {
        drop(throttle.try_acquire(REQUEST).unwrap());
    }
    let mut waiter = Caller::queued(&throttle, REQUEST);
    throttle.retune(|limits| limits.rate = Some(Rate::per_hour(20))).unwrap();
    assert_eq!(throttle.snapshot().rate_level, Some(0), "the level is kept");
    assert!(waiter.permit().is_none());
    throttle.retune(|limits| limits.rate = None).unwrap();
    assert!(waiter.permit().is_some());
}

#[test]
fn out_of_bounds_retune_is_rejected_without_effect() {
    let throttle = slots(3);
    let invalid = throttle.retune(|limits| limits.slots = Some(Slots::fixed(0))).unwrap_err();
    assert!(invalid.to_string().contains("`slots.max` is 0, and must be from 1 to"), "{invalid}");
    assert_eq!(throttle.snapshot().slots, Some(3));
    let error = Throttle::gentle().waiters_max(0).build().unwrap_err();
    assert_eq!(error.to_string(), "`waiters_max` is 0, and must be from 1 to 1073741824");
}

#[tokio::test(start_paused = true)]
async fn twin_shares_plan_but_not_state() {
    let throttle = slots(1);
    let _held = throttle.try_acquire(REQUEST).unwrap();
    let twin = throttle.twin();
    assert!(twin.try_acquire(REQUEST).is_ok());
    assert!(throttle.try_acquire(REQUEST).is_err());
}
