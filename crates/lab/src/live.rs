//! The upstream of a scenario in real time, for a server that pretends to be one.

use std::time::Duration;

use tidegate_core::feedback::headers::Dimension;
use tidegate_core::outcome::QuotaLevel;

use crate::scenario::{Scenario, Upstream};
use crate::upstream::{Quotas, speed};

/// The upstream of a scenario. Times are seconds since it started.
#[derive(Debug)]
pub struct LiveUpstream {
    scenario: Scenario,
    quotas: Quotas,
    in_flight: usize,
    /// The part of the next error: errors are spread evenly over the accepted requests.
    errors: f64,
}

/// How the upstream responds to a request.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct LiveResponse {
    /// 200, 429 or 500.
    pub status: u16,
    /// How long the response takes.
    pub latency: Duration,
    /// The `Retry-After` of a rejection, in seconds.
    pub retry_after: Option<f64>,
    /// The quota that a rejection names.
    pub exceeded: Option<Dimension>,
    /// The quota that headers report.
    pub quota: Option<(Dimension, QuotaLevel)>,
}

impl LiveUpstream {
    /// Starts the upstream.
    pub fn new(scenario: Scenario) -> Self {
        Self { quotas: Quotas::new(&scenario), scenario, in_flight: 0, errors: 0.0 }
    }

    /// Decides on a request of `tokens`. Call [`ended`](Self::ended) when it has ended.
    ///
    /// ```
    /// use tidegate_lab::{LiveUpstream, Scenario};
    ///
    /// let text = "[[scenario]]\nname = 'x'\nseconds = 60\nupstream = { bucket = { depth = 1 } }\ncapacity = [[0, 2]]";
    /// let mut upstream = LiveUpstream::new(Scenario::parse(text)?.remove(0));
    /// let statuses = [0.0, 0.1, 0.2, 1.0].map(|now| upstream.receive(100, now).status);
    /// assert_eq!(statuses, [200, 200, 429, 200]);
    /// # Ok::<(), tidegate_lab::ScenarioError>(())
    /// ```
    #[expect(clippy::cast_precision_loss, reason = "tokens of a request are few")]
    pub fn receive(&mut self, tokens: u64, now: f64) -> LiveResponse {
        self.in_flight += 1;
        let tokens = tokens as f64;
        let units = if self.scenario.tokens.is_some() { tokens } else { 1.0 };
        let verdict = self.quotas.receive(units, tokens, self.in_flight, now);
        let mut latency = self.scenario.reject_latency;
        if verdict.is_accepted {
            latency = self.scenario.latency * self.scenario.slowness_at(now);
            if let Upstream::Knee { power } = self.scenario.upstream {
                latency /= speed(power, self.scenario.capacity_at(now), self.in_flight);
            }
        }
        self.errors += if verdict.is_accepted { self.scenario.errors } else { 0.0 };
        let status = match verdict.is_accepted {
            false => 429,
            true if self.errors >= 1.0 => {
                self.errors -= 1.0;
                500
            }
            true => 200,
        };
        LiveResponse {
            status,
            latency: Duration::try_from_secs_f64(latency).unwrap_or(Duration::MAX),
            retry_after: verdict.retry_after,
            exceeded: verdict.exceeded,
            quota: verdict.quota,
        }
    }

    /// A request has ended.
    pub fn ended(&mut self) {
        self.in_flight = self.in_flight.saturating_sub(1);
    }
}
