//! gentlify's published rule: three failures in a minute halve the slots and double the interval; each quiet
//! minute gives one slot back and halves the interval.

use std::collections::VecDeque;

use crate::client::{Client, Decision, Request};
use crate::rng::Rng;
use crate::upstream::{Kind, Response};

const SLOTS: f64 = 5.0;
const INTERVAL: (f64, f64) = (0.2, 30.0);
const JITTER: f64 = 0.5;
const FAILURES: usize = 3;
const WINDOW: f64 = 60.0;
const COOLING: f64 = 60.0;

#[derive(Debug)]
pub(crate) struct Gentlify {
    slots: f64,
    interval: f64,
    in_flight: f64,
    next_at: f64,
    failures: VecDeque<f64>,
    cooling_since: f64,
    paused_until: f64,
    rng: Rng,
}

impl Gentlify {
    pub(crate) const fn new(seed: u64) -> Self {
        Self {
            slots: SLOTS,
            interval: INTERVAL.0,
            in_flight: 0.0,
            next_at: 0.0,
            failures: VecDeque::new(),
            cooling_since: 0.0,
            paused_until: 0.0,
            rng: Rng::seeded(seed),
        }
    }
}

impl Client for Gentlify {
    fn ask(&mut self, now: f64, _: Request) -> Decision {
        let at = self.next_at.max(self.paused_until);
        if now < at {
            return Decision::NotBefore(at);
        }
        if self.in_flight >= self.slots {
            return Decision::OnResponse;
        }
        self.in_flight += 1.0;
        self.next_at = now + self.interval * (1.0 + JITTER * self.rng.uniform());
        Decision::Send(0)
    }

    fn done(&mut self, now: f64, _: usize, response: &Response) {
        self.in_flight -= 1.0;
        if let Some(hint) = response.retry_after {
            self.paused_until = self.paused_until.max(now + hint);
        }
        if response.kind == Kind::Success {
            if now - self.cooling_since >= COOLING {
                self.cooling_since = now;
                self.slots = (self.slots + 1.0).min(SLOTS);
                self.interval = (self.interval / 2.0).max(INTERVAL.0);
            }
            return;
        }
        self.failures.push_back(now);
        while self.failures.front().is_some_and(|at| now - at > WINDOW) {
            self.failures.pop_front();
        }
        if self.failures.len() >= FAILURES {
            self.failures.clear();
            self.cooling_since = now;
            self.slots = (self.slots / 2.0).floor().max(1.0);
            self.interval = (self.interval * 2.0).min(INTERVAL.1);
        }
    }
}
