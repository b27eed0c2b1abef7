//! Random interleavings of all caller operations, checked against the invariants.

use std::task::Poll;
use std::time::Duration;

use proptest::prelude::*;
use tidegate::{
    Budget, Bytes, Circuit, Cost, Draft, ManualClock, Outcome, Pace, Pause, Permit, Random, Rate, Refused,
    Slots, Throttle,
};

use crate::kit::{Caller, settle_tasks};

#[derive(Debug, Clone)]
enum Step {
    Acquire {
        tokens: u64,
        bytes: u64,
    },
    Within {
        tokens: u64,
        millis: u64,
    },
    Try {
        tokens: u64,
    },
    /// Polls the woken callers, as a runtime would.
    Run,
    Leave(usize),
    Settle(usize, u8),
    Drop(usize),
    Slots(u32),
    Rate(u64),
    Budget(Option<u64>),
    Named(bool),
    Pace(Option<u64>),
    Circuit(bool),
    Pause(u64),
    Resume,
    Tick(u64),
    Close,
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0_u64..60, 0_u64..500).prop_map(|(tokens, bytes)| Step::Acquire { tokens, bytes }),
        2 => (0_u64..60, 0_u64..3_000).prop_map(|(tokens, millis)| Step::Within { tokens, millis }),
        2 => (0_u64..120).prop_map(|tokens| Step::Try { tokens }),
        6 => Just(Step::Run),
        3 => (0_usize..20).prop_map(Step::Leave),
        4 => (0_usize..20, 0_u8..5).prop_map(|(index, kind)| Step::Settle(index, kind)),
        3 => (0_usize..20).prop_map(Step::Drop),
        1 => (1_u32..6).prop_map(Step::Slots),
        1 => (1_u64..50).prop_map(Step::Rate),
        1 => prop::option::of(40_u64..200).prop_map(Step::Budget),
        1 => any::<bool>().prop_map(Step::Named),
        1 => prop::option::of(1_u64..200).prop_map(Step::Pace),
        1 => any::<bool>().prop_map(Step::Circuit),
        1 => (0_u64..2_000).prop_map(Step::Pause),
        1 => Just(Step::Resume),
        5 => (0_u64..1_500).prop_map(Step::Tick),
        1 => prop_oneof![9 => Just(Step::Run), 1 => Just(Step::Close)],
    ]
}

#[derive(Debug, Clone)]
#[expect(clippy::struct_excessive_bools, reason = "each gate is optional")]
struct Limits {
    slots: u32,
    bytes: bool,
    pace: bool,
    rate: bool,
    budget: bool,
    named: bool,
    circuit: bool,
}

fn any_limits() -> impl Strategy<Value = Limits> {
    (1_u32..5, any::<(bool, bool, bool, bool, bool, bool)>()).prop_map(
        |(slots, (bytes, pace, rate, budget, named, circuit))| Limits {
            slots,
            bytes,
            pace,
            rate,
            budget,
            named,
            circuit,
        },
    )
}

fn named_rate() -> Rate {
    Rate::per_minute(1_800).burst(4)
}

fn named_budget() -> Budget {
    Budget::input_tokens(75, Duration::from_secs(3))
}

/// A request whose tokens are in part input tokens.
fn cost(tokens: u64) -> Cost {
    Cost::request().tokens(tokens).input_tokens(tokens / 2)
}

fn build(limits: &Limits, clock: &ManualClock) -> Throttle {
    let mut builder = Throttle::builder()
        .slots(Slots::fixed(limits.slots))
        .recovery_slots(2)
        .pause(Pause::default().tail(Duration::from_millis(700)))
        .random(Random::seeded(5))
        .clock(clock.clone());
    if limits.bytes {
        builder = builder.bytes(Bytes::in_flight(600).recovering_price(20));
    }
    if limits.pace {
        builder = builder.pace(Pace::every(Duration::from_millis(40)).jitter(0.5));
    }
    if limits.rate {
        builder = builder.rate(Rate::per_second(20).burst(3));
    }
    if limits.budget {
        builder = builder.budget(Budget::tokens(100, Duration::from_secs(2)));
    }
    if limits.named {
        builder = builder.rate_named("rpm", named_rate()).budget_named("itpm", named_budget());
    }
    if limits.circuit {
        builder = builder.circuit(Circuit::after_failures(4).open_for(Duration::from_millis(500)));
    }
    builder.build().expect("within the bounds")
}

/// A queued caller, with its number and its count of wake-ups at the last poll.
struct QueuedCaller<'a> {
    number: u64,
    caller: Caller<'a>,
    seen: usize,
}

struct World<'a> {
    throttle: &'a Throttle,
    clock: &'a ManualClock,
    queue: Vec<QueuedCaller<'a>>,
    permits: Vec<Permit<'a>>,
    next: u64,
    closed: bool,
}

impl<'a> World<'a> {
    fn join(&mut self, mut caller: Caller<'a>) {
        self.next += 1;
        match caller.poll() {
            Poll::Ready(Ok(permit)) => self.enter(permit, self.next),
            Poll::Ready(Err(refused)) => self.check_refusal(refused),
            Poll::Pending => {
                let seen = caller.wakes();
                self.queue.push(QueuedCaller { number: self.next, caller, seen });
            }
        }
    }

    /// FIFO order: callers that still wait arrived later. Earlier ones were granted, even if not yet polled.
    fn enter(&mut self, permit: Permit<'a>, number: u64) {
        let later = self.queue.iter().filter(|waiter| waiter.number > number).count();
        let waiting = usize::try_from(self.throttle.snapshot().waiting).expect("few");
        assert!(waiting <= later, "{waiting} wait and {later} arrived after caller {number}, who entered");
        self.permits.push(permit);
    }

    fn check_refusal(&self, refused: Refused) {
        assert!(self.closed || refused != Refused::Closed, "refused as closed, but never closed");
    }

    /// Polls woken callers in order of arrival until none is left, like a fair runtime.
    async fn run(&mut self) {
        loop {
            settle_tasks().await;
            let Some(index) = self.queue.iter().position(|waiter| waiter.caller.wakes() > waiter.seen) else {
                return;
            };
            let waiter = &mut self.queue[index];
            waiter.seen = waiter.caller.wakes();
            match waiter.caller.poll() {
                Poll::Pending => {}
                Poll::Ready(Ok(permit)) => {
                    let number = self.queue.remove(index).number;
                    self.enter(permit, number);
                }
                Poll::Ready(Err(refused)) => {
                    self.queue.remove(index);
                    self.check_refusal(refused);
                }
            }
        }
    }

    async fn apply(&mut self, step: &Step) {
        let throttle = self.throttle;
        match *step {
            Step::Acquire { tokens, bytes } => {
                self.join(Caller::new(throttle.acquire(cost(tokens).bytes(bytes))));
            }
            Step::Within { tokens, millis } => {
                let within = Duration::from_millis(millis);
                self.join(Caller::new(throttle.acquire_within(cost(tokens), within)));
            }
            Step::Try { tokens } => match throttle.try_acquire(cost(tokens)) {
                Ok(permit) => {
                    self.next += 1;
                    self.enter(permit, self.next);
                }
                Err(refused) => self.check_refusal(refused),
            },
            Step::Run => {
                self.run().await;
                self.check_no_lost_wakeup();
            }
            Step::Leave(index) if !self.queue.is_empty() => {
                drop(self.queue.remove(index % self.queue.len()));
            }
            Step::Settle(index, kind) if !self.permits.is_empty() => {
                let permit = self.permits.remove(index % self.permits.len());
                permit.settle(match kind {
                    0 => Outcome::failure(),
                    1 => Outcome::overload().retry_after(Duration::from_millis(300)),
                    2 => Outcome::ignored(),
                    3 => Outcome::success().spent(Cost::request().tokens(7)),
                    _ => Outcome::success(),
                });
            }
            Step::Drop(index) if !self.permits.is_empty() => {
                drop(self.permits.remove(index % self.permits.len()));
            }
            Step::Slots(slots) => {
                throttle.retune(|limits| limits.slots = Some(Slots::fixed(slots))).expect("in bounds");
            }
            Step::Rate(rate) => {
                throttle.retune(|limits| limits.rate = Some(Rate::per_second(rate))).expect("in bounds");
            }
            Step::Budget(tokens) => {
                let budget = tokens.map(|tokens| Budget::tokens(tokens, Duration::from_secs(2)));
                throttle.retune(|limits| limits.budget = budget).expect("in bounds");
            }
            Step::Named(is_set) => {
                let set = |limits: &mut Draft| {
                    limits.rates.clear();
                    limits.budgets.clear();
                    if is_set {
                        *limits = limits
                            .clone()
                            .rate_named("rpm", named_rate())
                            .budget_named("itpm", named_budget());
                    }
                };
                throttle.retune(set).expect("in bounds");
            }
            Step::Pace(millis) => {
                let pace = millis.map(|millis| Pace::every(Duration::from_millis(millis)));
                throttle.retune(|limits| limits.pace = pace).expect("in bounds");
            }
            Step::Circuit(is_enabled) => {
                let circuit =
                    is_enabled.then(|| Circuit::after_failures(3).open_for(Duration::from_millis(90)));
                throttle.retune(|limits| limits.circuit = circuit).expect("in bounds");
            }
            Step::Pause(millis) => drop(throttle.pause(Duration::from_millis(millis))),
            Step::Resume => drop(throttle.resume()),
            Step::Tick(millis) => self.clock.advance(Duration::from_millis(millis)),
            Step::Close => {
                self.closed = true;
                throttle.close();
            }
            Step::Leave(_) | Step::Settle(..) | Step::Drop(_) => {}
        }
    }

    /// Conservation: requests in flight are the permits held plus the unpolled grants.
    fn check(&self) {
        let snapshot = self.throttle.snapshot();
        let held = u32::try_from(self.permits.len()).expect("few");
        let queue = u32::try_from(self.queue.len()).expect("few");
        assert!(snapshot.in_flight >= held, "{} in flight, {held} held", snapshot.in_flight);
        assert!(snapshot.in_flight + snapshot.waiting <= held + queue, "a caller is counted twice");
    }

    /// No lost wake-up: once all woken callers have run, evaluating the head again admits no caller.
    fn check_no_lost_wakeup(&self) {
        let before = self.throttle.snapshot();
        self.throttle.retune(|_| ()).expect("nothing changed");
        assert_eq!(self.throttle.snapshot().admitted, before.admitted, "a due caller was not woken");
    }

    /// Every caller leaves or is served, whatever the interleaving.
    async fn end(mut self) {
        self.throttle.resume();
        for _ in 0..2_000 {
            for permit in self.permits.drain(..) {
                permit.settle(Outcome::success());
            }
            self.run().await;
            if self.queue.is_empty() && self.permits.is_empty() {
                break;
            }
            self.clock.advance(Duration::from_millis(250));
        }
        assert!(self.queue.is_empty(), "{} callers wait although no gate holds them", self.queue.len());
        let snapshot = self.throttle.snapshot();
        assert_eq!((snapshot.in_flight, snapshot.waiting, snapshot.bytes_in_flight), (0, 0, 0));
        assert_eq!(snapshot.recovering_in_flight, 0);
        // What is left was used in the last windows: nothing stays reserved or taken for good.
        self.clock.advance(Duration::from_secs(60));
        for limit in self.throttle.snapshot().limits {
            assert_eq!(limit.available, limit.capacity.cast_signed(), "{limit:?}");
        }
    }
}

proptest! {
    /// Invariants 1, 2, 5 and 9: conservation, order, no overtaking, no lost wake-up, no starvation.
    #[test]
    fn interleavings_conserve_keep_order_and_serve_all(
        limits in any_limits(),
        steps in prop::collection::vec(any_step(), 1..120),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        runtime.block_on(async {
            let clock = ManualClock::new();
            let throttle = build(&limits, &clock);
            let mut world = World {
                throttle: &throttle,
                clock: &clock,
                queue: Vec::new(),
                permits: Vec::new(),
                next: 0,
                closed: false,
            };
            for step in &steps {
                world.apply(step).await;
                world.check();
            }
            world.end().await;
        });
    }

    /// Invariant 2: no grant raises the requests in flight above the current limit.
    #[test]
    fn no_grant_exceeds_the_current_limit(
        changes in prop::collection::vec((1_u32..8, 0_usize..12, any::<bool>()), 1..60),
    ) {
        let throttle = crate::kit::slots(3);
        let mut permits: Vec<Permit<'_>> = Vec::new();
        for (limit, leave, resize) in changes {
            if resize {
                throttle.retune(|limits| limits.slots = Some(Slots::fixed(limit))).expect("in bounds");
            } else if leave < permits.len() {
                permits.truncate(leave);
            }
            let before = throttle.snapshot();
            let entered = throttle.try_acquire(Cost::request());
            prop_assert_eq!(entered.is_ok(), before.in_flight < before.slots.expect("there are slots"));
            permits.extend(entered.ok());
        }
    }
}
