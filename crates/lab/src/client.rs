//! Clients decide when requests are sent. Ours run the production gates and controllers.

use std::time::Duration;

use tidegate_core::cost::{Charge, Cost};
use tidegate_core::event::Event;
use tidegate_core::gate::{Ending, Gates};
use tidegate_core::outcome::Outcome;
use tidegate_core::plan::{Draft, Plan};
use tidegate_core::random::Random;
use tidegate_core::time::Instant;
use tidegate_core::verdict::Verdict;

use crate::upstream::{Kind, Response};

/// The cost of a request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Request {
    /// Units of the quota that the upstream counts.
    pub(crate) units: f64,
    /// Tokens; equal to the units if there is no second quota.
    pub(crate) tokens: f64,
}

/// The decision on a request that a worker wants to send.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Decision {
    /// Sent; the handle comes back with the response.
    Send(usize),
    /// Not before this second.
    NotBefore(f64),
    /// Not before the next response.
    OnResponse,
}

/// Decides when requests are sent.
pub(crate) trait Client {
    /// Decides whether a request may be sent at `now`.
    fn ask(&mut self, now: f64, request: Request) -> Decision;

    /// A response arrived at `now`.
    fn done(&mut self, now: f64, handle: usize, response: &Response);
}

/// Requests in flight, by reusable handles (a slab).
#[derive(Debug)]
pub(crate) struct InFlight<T> {
    slots: Vec<Option<T>>,
    free: Vec<usize>,
}

impl<T> Default for InFlight<T> {
    fn default() -> Self {
        Self { slots: Vec::new(), free: Vec::new() }
    }
}

impl<T> InFlight<T> {
    pub(crate) fn add(&mut self, value: T) -> usize {
        let handle = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        self.slots[handle] = Some(value);
        handle
    }

    pub(crate) fn take(&mut self, handle: usize) -> Option<T> {
        let value = self.slots.get_mut(handle)?.take();
        if value.is_some() {
            self.free.push(handle);
        }
        value
    }

    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }
}

/// A client with the gates of a throttle.
#[derive(Debug)]
pub(crate) struct GatesClient {
    plan: Plan,
    gates: Gates,
    has_tokens: bool,
    charges: InFlight<Charge>,
    events: Vec<Event>,
}

impl GatesClient {
    /// Creates a throttle from a draft; `has_tokens` if requests cost tokens.
    pub(crate) fn new(draft: Draft, has_tokens: bool, seed: u64) -> Self {
        let plan = draft.check().expect("presets are within their bounds");
        let gates = Gates::new(&plan, Random::seeded(seed));
        Self { plan, gates, has_tokens, charges: InFlight::default(), events: Vec::new() }
    }
}

impl Client for GatesClient {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "whole positive tokens")]
    fn ask(&mut self, now: f64, request: Request) -> Decision {
        self.events.clear();
        let tokens = if self.has_tokens { request.tokens as u64 } else { 0 };
        let cost = Cost::request().tokens(tokens);
        match self.gates.admit(&self.plan, cost, 1, instant(now), &mut self.events) {
            Ok(charge) => Decision::Send(self.charges.add(charge)),
            Err(Verdict::Wait(wait)) => {
                wait.until.map_or(Decision::OnResponse, |until| Decision::NotBefore(seconds(until)))
            }
            Err(Verdict::Refuse(refused)) => {
                Decision::NotBefore(now + refused.retry_after().map_or(0.25, |span| span.as_secs_f64()))
            }
            Err(Verdict::Admit) => unreachable!("an admission returns a charge"),
        }
    }

    fn done(&mut self, now: f64, handle: usize, response: &Response) {
        let mut outcome = match response.kind {
            Kind::Success => Outcome::success(),
            Kind::Rejected => Outcome::overload(),
            Kind::Error => Outcome::failure(),
        };
        if let Some(hint) = response.retry_after {
            outcome = outcome.retry_after(Duration::from_secs_f64(hint));
        }
        if let Some(dimension) = response.exceeded {
            outcome = outcome.exceeded(dimension);
        }
        if let Some((dimension, level)) = response.quota {
            outcome = outcome.quota(dimension, level);
        }
        let Some(charge) = self.charges.take(handle) else { return };
        self.events.clear();
        let ending = Ending { charge, reported: None, outcome: &outcome };
        self.gates.settle(&self.plan, ending, 1, instant(now), &mut self.events);
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "times are positive and short")]
fn instant(now: f64) -> Instant {
    Instant::from_nanos((now * 1e9).round() as u64)
}

#[expect(clippy::cast_precision_loss, reason = "a day in nanoseconds is exact")]
fn seconds(at: Instant) -> f64 {
    at.as_nanos() as f64 / 1e9
}
