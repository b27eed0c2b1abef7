//! The throttle within one process: hot paths against governor, tokio and throttle-net, and memory.
//!
//! `instructions_slots` is compared with a recorded count in place of a peer: the 209 instructions that `try_acquire` and
//! drop took before the library was last reworked.

use std::hint::black_box;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use governor::clock::{FakeRelativeClock, MonotonicClock};
use governor::{Quota, RateLimiter};
use throttle_net::MultiLimiter;
use tidegate::{
    Brake, Budget, Circuit, Clock, Controller, Cost, FastClock, Outcome, Pace, Rate, Slots, Throttle,
    TokioClock,
};
use tokio::sync::Semaphore;

use tidegate_bench::Case;
use tidegate_bench::counters::{instructions, numbers_by};
use tidegate_bench::measure::{best_of, best_of_batches};
use tidegate_bench::report::Row;

const PLENTY: u32 = u32::MAX;
/// Instructions of `try_acquire` and drop with slots, as they were recorded.
const SLOTS_RECORDED: f64 = 209.0;
const SLOTS: u32 = 1_000;

pub(crate) const CASES: [Case; 9] = [
    ("rate_std_clock", |rounds| Ok(vec![rate_std_clock(rounds)])),
    ("rate_fast_clock", |rounds| Ok(vec![rate_fast_clock(rounds)])),
    ("slots", |rounds| Ok(vec![slots(rounds)])),
    ("slots_await", |rounds| Ok(vec![slots_await(rounds)?])),
    ("everything", |rounds| Ok(vec![everything(rounds)])),
    ("bytes", |_| memory()),
    ("small_burst", |rounds| Ok(vec![small_burst(rounds)?])),
    ("two_threads", |rounds| Ok(two_threads(rounds))),
    ("instructions", |_| counts()),
];

/// Runs a hot path for callgrind.
pub(crate) fn run_hot(name: &str, times: u32) -> Result<()> {
    // Constructs only the requested side: a clock that calibrates itself at the start would distort the
    // count.
    let mut operation: Box<dyn FnMut()> = match name {
        "rate" => {
            let ours = rate_only(FrozenClock);
            Box::new(move || try_and_settle(&ours))
        }
        "rate_peer" => {
            let peer = RateLimiter::direct_with_clock(quota(), FakeRelativeClock::default());
            Box::new(move || drop(black_box(peer.check())))
        }
        "slots" => {
            let ours = slots_only();
            Box::new(move || try_and_drop(&ours))
        }
        "everything" => {
            let ours = all_gates(FrozenClock);
            Box::new(move || try_and_spend(&ours))
        }
        other => bail!("unknown hot path `{other}`"),
    };
    for _ in 0..times {
        operation();
    }
    Ok(())
}

/// A clock without a thread, so that callgrind counts the caller alone.
#[derive(Debug)]
struct FrozenClock;

impl Clock for FrozenClock {
    fn now(&self) -> tidegate::Instant {
        tidegate::Instant::from_nanos(1_000_000_000)
    }

    fn sleep_until(&self, _: tidegate::Instant) -> tidegate::Sleep {
        Box::pin(std::future::pending())
    }
}

fn rate_only(clock: impl Clock) -> Throttle {
    let builder = Throttle::builder().rate(Rate::per_second(u64::from(PLENTY))).clock(clock);
    builder.build().expect("within the bounds")
}

fn slots_only() -> Throttle {
    Throttle::builder().slots(Slots::fixed(SLOTS)).build().expect("within the bounds")
}

fn quota() -> Quota {
    Quota::per_second(NonZeroU32::MAX)
}

fn governor_default() -> governor::DefaultDirectRateLimiter {
    RateLimiter::direct(quota())
}

#[inline]
fn try_and_settle(throttle: &Throttle) {
    throttle.try_acquire(Cost::request()).expect("there is plenty").settle(Outcome::success());
}

#[inline]
fn try_and_drop(throttle: &Throttle) {
    drop(black_box(throttle.try_acquire(Cost::request()).expect("there is plenty")));
}

fn rate_std_clock(rounds: u32) -> Row {
    let ours = rate_only(TokioClock::new());
    let peer = RateLimiter::direct_with_clock(quota(), MonotonicClock);
    let pair = best_of(rounds, || try_and_settle(&ours), || drop(black_box(peer.check())));
    Row::new("rate_std_clock", pair, Some(1.3), "ns", "try_acquire + settle vs governor check, std clock")
}

fn rate_fast_clock(rounds: u32) -> Row {
    let ours = rate_only(FastClock::new());
    let peer = governor_default();
    let pair = best_of(rounds, || try_and_settle(&ours), || drop(black_box(peer.check())));
    Row::new("rate_fast_clock", pair, Some(3.0), "ns", "the same, fast clock vs governor's default clock")
}

/// The cost of a burst that refills faster than the timer's granularity: 10 at 5,000 per second are 2 ms.
fn small_burst(rounds: u32) -> Result<Row> {
    let mut best = (0.0_f64, 0.0_f64);
    for _ in 0..rounds.clamp(1, 5) {
        let numbers = numbers_by("burst", &[])?;
        let number = |name: &str| numbers.get(name).copied().with_context(|| format!("no `{name}`"));
        best.0 = best.0.max(number("burst_10")?);
        best.1 = best.1.max(number("burst_5000")?);
    }
    let what = "admissions at 5,000/s with a burst of 10 vs 5,000";
    Ok(Row::at_least("small_burst", best, Some(0.95), "/s", what))
}

fn slots(rounds: u32) -> Row {
    let ours = slots_only();
    let peer = Semaphore::new(SLOTS as usize);
    let pair = best_of(rounds, || try_and_drop(&ours), || drop(black_box(peer.try_acquire())));
    Row::new("slots", pair, Some(3.0), "ns", "try_acquire + drop vs tokio Semaphore")
}

fn slots_await(rounds: u32) -> Result<Row> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
    let ours = slots_only();
    let peer = Semaphore::new(SLOTS as usize);
    let pair = best_of_batches(
        rounds,
        |times| {
            runtime.block_on(async {
                for _ in 0..times {
                    drop(black_box(ours.acquire(Cost::request()).await));
                }
            });
        },
        |times| {
            runtime.block_on(async {
                for _ in 0..times {
                    drop(black_box(peer.acquire().await));
                }
            });
        },
    );
    Ok(Row::new("slots_await", pair, Some(2.0), "ns", "acquire().await + drop vs tokio Semaphore"))
}

/// All gates, none of which ever delays a request.
fn all_gates(clock: impl Clock) -> Throttle {
    Throttle::builder()
        .slots(Slots::fixed(SLOTS))
        .pace(Pace::every(Duration::ZERO).slowest(Duration::from_secs(1)))
        .rate(Rate::per_second(u64::from(PLENTY)))
        .budget(Budget::tokens(1 << 53, Duration::from_mins(1)))
        .circuit(Circuit::default())
        .controller(Controller::Brake(Brake::default()))
        .total(0)
        .clock(clock)
        .build()
        .expect("within the bounds")
}

#[inline]
fn try_and_spend(throttle: &Throttle) {
    let permit = throttle.try_acquire(black_box(Cost::request().tokens(1_700))).expect("there is plenty");
    permit.settle(Outcome::success().spent(Cost::request().tokens(1_500)));
}

fn everything(rounds: u32) -> Row {
    let ours = all_gates(FastClock::new());
    let peer = MultiLimiter::builder()
        .dimension("requests", throttle_net::Throttle::per_second(PLENTY))
        .dimension("input_tokens", throttle_net::Throttle::per_second(PLENTY))
        .dimension("output_tokens", throttle_net::Throttle::per_second(PLENTY))
        .build();
    let costs = [("requests", 1), ("input_tokens", 1_500), ("output_tokens", 200)];
    let pair = best_of(
        rounds,
        || try_and_spend(&ours),
        || assert!(black_box(peer.try_acquire_costs(black_box(&costs))), "there is plenty"),
    );
    let what = "slots, pace, rate, budget, circuit, progress vs throttle-net, three dimensions";
    Row::new("everything", pair, Some(0.4), "ns", what)
}

fn memory() -> Result<Vec<Row>> {
    let bytes = numbers_by("memory", &[])?;
    let number = |name: &str| bytes.get(name).copied().with_context(|| format!("no `{name}`"));
    let throttle = (number("throttle_bytes")?, 512.0);
    let waiter = (number("waiter_bytes")?, 256.0);
    Ok(vec![
        Row::new("throttle_bytes", throttle, Some(1.0), "bytes", "an idle throttle beyond its plan"),
        Row::new("waiter_bytes", waiter, Some(1.0), "bytes", "a waiter beyond its future, of 10,000"),
    ])
}

/// Two threads on one throttle: reported without a target.
fn two_threads(rounds: u32) -> Vec<Row> {
    let rate = Arc::new(rate_only(FastClock::new()));
    let governor = Arc::new(governor_default());
    let slots = Arc::new(slots_only());
    let semaphore = Arc::new(Semaphore::new(SLOTS as usize));
    let rate_pair =
        contended(rounds, move || try_and_settle(&rate), move || drop(black_box(governor.check())));
    let slots_pair =
        contended(rounds, move || try_and_drop(&slots), move || drop(black_box(semaphore.try_acquire())));
    vec![
        Row::new("two_threads_rate", rate_pair, None, "ns", "rate_fast_clock from two threads at once"),
        Row::new("two_threads_slots", slots_pair, None, "ns", "slots from two threads at once"),
    ]
}

/// Nanoseconds per operation while another thread does the same.
fn contended<A, B>(rounds: u32, ours: A, peer: B) -> (f64, f64)
where
    A: Fn() + Send + Sync,
    B: Fn() + Send + Sync,
{
    fn pair(operation: &(impl Fn() + Sync)) -> f64 {
        let batch = 50_000_u32;
        let start = std::time::Instant::now();
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| (0..batch).for_each(|_| operation()));
            }
        });
        start.elapsed().as_secs_f64() * 1e9 / f64::from(2 * batch)
    }
    let mut best = (f64::INFINITY, f64::INFINITY);
    for _ in 0..rounds {
        best.0 = best.0.min(pair(&ours));
        best.1 = best.1.min(pair(&peer));
    }
    best
}

fn counts() -> Result<Vec<Row>> {
    let rate = (instructions("rate")?, instructions("rate_peer")?);
    let slots = (instructions("slots")?, SLOTS_RECORDED);
    Ok(vec![
        Row::new(
            "instructions_rate",
            rate,
            None,
            "instructions",
            "the same with frozen clocks, counted by callgrind",
        ),
        Row::new(
            "instructions_slots",
            slots,
            Some(1.1),
            "instructions",
            "slots, counted by callgrind, vs the count that was recorded",
        ),
    ])
}
