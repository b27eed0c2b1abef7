//! Many keys, each with its own rate: `cargo xtask bench keyed`.
//!
//! Our side uses the fast clock, the peers their own clocks. The sequence of keys is drawn before the timing
//! starts, and both sides use the same sequence.

use std::hint::black_box;
use std::num::NonZeroU32;
use std::thread;
use std::time::Instant;

use anyhow::{Context as _, Result};
use clap::Parser;
use governor::{DefaultKeyedRateLimiter, Quota, RateLimiter};
use throttle_net::PerKey;
use tidegate::{Cost, FastClock, Keyed, Outcome, Rate, Throttle};
use tidegate_bench::counters::numbers_by;
use tidegate_bench::measure::best_of;
use tidegate_bench::report::Row;
use tidegate_bench::{Case, Options};

const KEYS: u64 = 100_000;
const FEW_KEYS: u64 = 1_000;
const RIVAL_KEYS: u64 = 16_000;
/// Draws before the sequence repeats.
const DRAWS: usize = 1 << 18;
const PLENTY: u32 = u32::MAX;

const CASES: [Case; 6] = [
    ("keyed_uniform", |rounds| Ok(vec![against_governor("keyed_uniform", rounds, uniform(KEYS))])),
    ("keyed_zipf", |rounds| Ok(vec![against_governor("keyed_zipf", rounds, zipf(KEYS))])),
    ("keyed_rival", |rounds| Ok(vec![rival(rounds)])),
    ("keyed_few", |rounds| Ok(vec![few(rounds)])),
    ("key_bytes", |_| Ok(vec![key_bytes()?])),
    ("two_threads", |rounds| Ok(two_threads(rounds))),
];

/// Measures many keys against the peers.
#[derive(Debug, Parser)]
#[command(name = "keyed")]
struct Arguments {
    #[command(flatten)]
    options: Options,
}

fn main() -> Result<()> {
    tidegate_bench::run("keyed", &CASES, &Arguments::parse().options)
}

/// A precomputed cyclic sequence of keys.
struct Draws {
    keys: Vec<u64>,
    next: usize,
}

impl Draws {
    fn next(&mut self) -> u64 {
        self.next = (self.next + 1) % DRAWS;
        self.keys[self.next]
    }

    fn again(&self) -> Self {
        Self { keys: self.keys.clone(), next: 0 }
    }
}

/// SplitMix64, so that every run draws the same sequence.
fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

fn uniform(keys: u64) -> Draws {
    let mut state = 7;
    Draws { keys: (0..DRAWS).map(|_| random(&mut state) % keys).collect(), next: 0 }
}

/// Zipf's law: the key of rank r has 1/r of the weight of the first.
#[expect(clippy::cast_precision_loss, reason = "weights of a draw")]
fn zipf(keys: u64) -> Draws {
    let mut sum = 0.0;
    let sums: Vec<f64> = (1..=keys)
        .map(|rank| {
            sum += 1.0 / rank as f64;
            sum
        })
        .collect();
    let mut state = 7;
    let mut draw = || {
        let wanted = random(&mut state) as f64 / u64::MAX as f64 * sum;
        let rank = sums.partition_point(|sum| *sum < wanted) as u64;
        // Ranks are spread over the keys, as hashing would.
        rank.min(keys - 1).wrapping_mul(0x9E37_79B9) % keys
    };
    Draws { keys: (0..DRAWS).map(|_| draw()).collect(), next: 0 }
}

fn ours(keys: u64) -> Keyed<u64> {
    let limits = Throttle::builder().rate(Rate::per_second(u64::from(PLENTY))).limits();
    let keyed = Keyed::builder(limits.expect("within the bounds"))
        .keys_max(1 << 21)
        .clock(FastClock::new())
        .build()
        .expect("within the bounds");
    (0..keys).for_each(|key| enter(&keyed, key));
    keyed
}

fn governor(keys: u64) -> DefaultKeyedRateLimiter<u64> {
    let limiter = RateLimiter::keyed(Quota::per_second(NonZeroU32::MAX));
    (0..keys).for_each(|key| drop(limiter.check_key(&key)));
    limiter
}

#[inline]
fn enter(keyed: &Keyed<u64>, key: u64) {
    keyed.try_acquire(&key, Cost::request()).expect("there is plenty").settle(Outcome::success());
}

fn against_governor(name: &str, rounds: u32, mut draws: Draws) -> Row {
    let (keyed, peer) = (ours(KEYS), governor(KEYS));
    let mut peer_draws = draws.again();
    let pair = best_of(
        rounds,
        || enter(&keyed, draws.next()),
        || drop(black_box(peer.check_key(&peer_draws.next()))),
    );
    Row::new(name, pair, Some(1.5), "ns", "try_acquire + settle of 100,000 keys vs governor keyed (dashmap)")
}

/// Few enough to stay in the CPU's caches: reported without a target.
fn few(rounds: u32) -> Row {
    let (keyed, peer) = (ours(FEW_KEYS), governor(FEW_KEYS));
    let mut draws = uniform(FEW_KEYS);
    let mut peer_draws = draws.again();
    let pair = best_of(
        rounds,
        || enter(&keyed, draws.next()),
        || drop(black_box(peer.check_key(&peer_draws.next()))),
    );
    Row::new("keyed_few", pair, None, "ns", "the same of 1,000 keys vs governor keyed (dashmap)")
}

fn rival(rounds: u32) -> Row {
    let keyed = ours(RIVAL_KEYS);
    let peer: PerKey<u64> = PerKey::per_second(PLENTY);
    (0..RIVAL_KEYS).for_each(|key| assert!(peer.try_acquire(&key), "there is plenty"));
    let mut draws = uniform(RIVAL_KEYS);
    let mut peer_draws = draws.again();
    let pair = best_of(
        rounds,
        || enter(&keyed, draws.next()),
        || assert!(black_box(peer.try_acquire(&peer_draws.next())), "there is plenty"),
    );
    Row::new("keyed_rival", pair, Some(0.9), "ns", "the same of 16,000 keys vs throttle-net PerKey")
}

fn key_bytes() -> Result<Row> {
    let bytes = numbers_by("memory", &["keys"])?.get("key_bytes").copied().context("no `key_bytes`")?;
    Ok(Row::new("key_bytes", (bytes, 400.0), Some(1.0), "bytes", "a key with a rate alone, of a million"))
}

/// Two threads on the same keys: reported without a target.
fn two_threads(rounds: u32) -> Vec<Row> {
    let (keyed, peer) = (ours(KEYS), governor(KEYS));
    let table = [
        ("two_threads_uniform", uniform(KEYS), "keyed_uniform from two threads at once"),
        ("two_threads_zipf", zipf(KEYS), "keyed_zipf from two threads at once"),
    ];
    table
        .into_iter()
        .map(|(name, draws, what)| {
            let mut best = (f64::INFINITY, f64::INFINITY);
            for _ in 0..rounds {
                best.0 = best.0.min(contended(&draws, |key| enter(&keyed, key)));
                best.1 = best.1.min(contended(&draws, |key| drop(black_box(peer.check_key(&key)))));
            }
            Row::new(name, best, None, "ns", what)
        })
        .collect()
}

/// Nanoseconds per operation while another thread does the same with other keys.
fn contended(draws: &Draws, operation: impl Fn(u64) + Sync) -> f64 {
    let batch = 50_000;
    let start = Instant::now();
    thread::scope(|scope| {
        for side in 0..2 {
            let (keys, operation) = (&draws.keys[side * batch..(side + 1) * batch], &operation);
            scope.spawn(move || keys.iter().for_each(|key| operation(*key)));
        }
    });
    #[expect(clippy::cast_precision_loss, reason = "a number of operations")]
    let operations = (2 * batch) as f64;
    start.elapsed().as_secs_f64() * 1e9 / operations
}
