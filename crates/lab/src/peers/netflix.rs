//! Netflix's concurrency limits, Vegas and Gradient2, with the defaults they ship with. A rejection is a
//! drop.

use crate::client::{Client, Decision, InFlight, Request};
use crate::rng::Rng;
use crate::upstream::{Kind, Response};

/// The initial limit of both.
const START: f64 = 20.0;
/// Bounds of Vegas.
const VEGAS: (f64, f64) = (1.0, 1_000.0);
/// Bounds of Gradient2, its smoothing, its tolerance and its queue.
const GRADIENT: (f64, f64) = (20.0, 200.0);
const SMOOTHING: f64 = 0.2;
const TOLERANCE: f64 = 1.5;
const QUEUE: f64 = 4.0;
/// Samples of Gradient2's long window, and of its warm-up.
const LONG: f64 = 600.0;
const WARMUP: u32 = 10;

#[derive(Debug)]
pub(crate) struct Netflix {
    rule: Rule,
    limit: f64,
    in_flight: InFlight<f64>,
    paused_until: f64,
    rng: Rng,
}

#[derive(Debug)]
enum Rule {
    /// The lowest latency since the last probe, samples since then, and when to probe again.
    Vegas { no_load: f64, samples: f64, jitter: f64 },
    /// The long-term average latency, windows so far, and the current window.
    Gradient2 { long: f64, windows: u32, sum: f64, count: f64, next_at: f64, most: f64 },
}

impl Netflix {
    pub(crate) fn vegas(seed: u64) -> Self {
        let mut rng = Rng::seeded(seed);
        let rule = Rule::Vegas { no_load: 0.0, samples: 0.0, jitter: 0.5 + rng.uniform() / 2.0 };
        Self { rule, limit: START, in_flight: InFlight::default(), paused_until: 0.0, rng }
    }

    pub(crate) fn gradient2(seed: u64) -> Self {
        let rule = Rule::Gradient2 { long: 0.0, windows: 0, sum: 0.0, count: 0.0, next_at: 0.0, most: 0.0 };
        let rng = Rng::seeded(seed);
        Self { rule, limit: START, in_flight: InFlight::default(), paused_until: 0.0, rng }
    }

    fn learn(&mut self, now: f64, latency: f64, in_flight: f64, is_drop: bool) {
        let limit = self.limit;
        match &mut self.rule {
            Rule::Vegas { no_load, samples, jitter } => {
                *samples += 1.0;
                if *samples >= *jitter * 30.0 * limit {
                    (*jitter, *samples, *no_load) = (0.5 + self.rng.uniform() / 2.0, 0.0, latency);
                    return;
                }
                if !is_drop && (*no_load == 0.0 || latency < *no_load) {
                    *no_load = latency;
                    return;
                }
                let queue = (limit * (1.0 - *no_load / latency)).ceil();
                let step = limit.max(1.0).log10().floor().max(1.0);
                let next = match queue {
                    _ if is_drop => limit - step,
                    _ if in_flight * 2.0 < limit => limit,
                    queue if queue <= step => limit + 6.0 * step,
                    queue if queue < 3.0 * step => limit + step,
                    queue if queue > 6.0 * step => limit - step,
                    _ => limit,
                };
                self.limit = next.clamp(VEGAS.0, VEGAS.1);
            }
            Rule::Gradient2 { long, windows, sum, count, next_at, most } => {
                (*sum, *count, *most) = (*sum + latency, *count + 1.0, most.max(in_flight));
                if now <= *next_at || *count < 10.0 {
                    return;
                }
                let short = *sum / *count;
                let used = *most;
                (*sum, *count, *most, *next_at, *windows) = (0.0, 0.0, 0.0, now + 1.0, *windows + 1);
                let weight = if *windows <= WARMUP { 1.0 / f64::from(*windows) } else { 2.0 / (LONG + 1.0) };
                *long += (short - *long) * weight;
                if *long / short > 2.0 {
                    *long *= 0.95;
                }
                if used < limit / 2.0 {
                    return;
                }
                let gradient = (TOLERANCE * *long / short).clamp(0.5, 1.0);
                let next = limit * (1.0 - SMOOTHING) + (limit * gradient + QUEUE) * SMOOTHING;
                self.limit = next.clamp(GRADIENT.0, GRADIENT.1);
            }
        }
    }
}

impl Client for Netflix {
    #[expect(clippy::cast_precision_loss, reason = "requests in flight are few")]
    fn ask(&mut self, now: f64, _: Request) -> Decision {
        if now < self.paused_until {
            return Decision::NotBefore(self.paused_until);
        }
        let in_flight = self.in_flight.len() as f64 + 1.0;
        if in_flight > self.limit.floor() {
            Decision::OnResponse
        } else {
            Decision::Send(self.in_flight.add(in_flight))
        }
    }

    fn done(&mut self, now: f64, handle: usize, response: &Response) {
        let in_flight = self.in_flight.take(handle).unwrap_or(1.0);
        if let Some(hint) = response.retry_after {
            self.paused_until = self.paused_until.max(now + hint);
        }
        if response.kind != Kind::Error {
            let is_drop = response.kind == Kind::Rejected;
            self.learn(now, now - response.sent_at, in_flight, is_drop);
        }
    }
}
