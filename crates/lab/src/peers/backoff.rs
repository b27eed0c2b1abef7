//! N workers with exponential backoff and full jitter, as in most clients.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::client::{Client, Decision, InFlight, Request};
use crate::rng::Rng;
use crate::upstream::{Kind, Response};

/// The upper bound of the first delay in seconds; it doubles with each attempt.
const BASE: f64 = 0.5;
/// The longest delay in seconds.
const MAX: f64 = 20.0;

/// Workers that retry with exponential backoff; `Retry-After` is a minimum.
#[derive(Debug)]
pub(crate) struct Backoff {
    workers: usize,
    attempts: InFlight<u32>,
    /// Workers in backoff: the end in nanoseconds, and the number of attempts.
    asleep: BinaryHeap<Reverse<(u64, u32)>>,
    awake: Vec<u32>,
    rng: Rng,
}

impl Backoff {
    pub(crate) fn new(workers: usize, seed: u64) -> Self {
        Self {
            workers,
            attempts: InFlight::default(),
            asleep: BinaryHeap::new(),
            awake: Vec::new(),
            rng: Rng::seeded(seed),
        }
    }
}

impl Client for Backoff {
    fn ask(&mut self, now: f64, _: Request) -> Decision {
        while let Some(Reverse((at, attempt))) = self.asleep.peek().copied()
            && at <= nanos(now)
        {
            self.asleep.pop();
            self.awake.push(attempt);
        }
        if self.attempts.len() + self.asleep.len() >= self.workers {
            return self
                .asleep
                .peek()
                .map_or(Decision::OnResponse, |Reverse((at, _))| Decision::NotBefore(seconds(*at)));
        }
        Decision::Send(self.attempts.add(self.awake.pop().unwrap_or(0)))
    }

    fn done(&mut self, now: f64, handle: usize, response: &Response) {
        let attempt = self.attempts.take(handle).unwrap_or(0);
        if response.kind != Kind::Success {
            let most = (BASE * f64::from(1_u32 << attempt.min(16))).min(MAX);
            let delay = (self.rng.uniform() * most).max(response.retry_after.unwrap_or(0.0));
            self.asleep.push(Reverse((nanos(now + delay), attempt + 1)));
        }
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "times are positive and short")]
fn nanos(at: f64) -> u64 {
    (at * 1e9).round() as u64
}

#[expect(clippy::cast_precision_loss, reason = "a day in nanoseconds is exact")]
const fn seconds(nanos: u64) -> f64 {
    nanos as f64 / 1e9
}
