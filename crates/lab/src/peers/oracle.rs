//! An oracle: it knows the hidden limit, and takes its share of the rate or of the slots.

use crate::client::{Client, Decision, Request};
use crate::scenario::{Scenario, Upstream};
use crate::upstream::Response;

#[derive(Debug)]
pub(crate) struct Oracle {
    scenario: Scenario,
    level: f64,
    level_at: f64,
    in_flight: f64,
}

impl Oracle {
    pub(crate) fn new(scenario: &Scenario) -> Self {
        Self { scenario: scenario.clone(), level: 1.0, level_at: 0.0, in_flight: 0.0 }
    }

    #[expect(clippy::cast_precision_loss, reason = "clients are few")]
    fn share(&self, now: f64) -> f64 {
        // With a second quota of tokens, the quota of requests alone does not determine the capacity.
        let scenario = &self.scenario;
        let capacity =
            if scenario.counts_on_arrival() { scenario.ideal_at(now) } else { scenario.capacity_at(now) };
        // Other clients are active half of the time.
        let others = scenario.background.map_or(1.0, |(share, _)| 1.0 - share / 2.0);
        capacity / scenario.clients as f64 * others
    }
}

impl Client for Oracle {
    fn ask(&mut self, now: f64, request: Request) -> Decision {
        match self.scenario.upstream {
            Upstream::Bucket { .. } | Upstream::Window { .. } | Upstream::Sliding { .. } => {
                let (rate, cost) = (self.share(now), request.units);
                self.level = (self.level + rate * (now - self.level_at)).min(cost.max(1.0));
                self.level_at = now;
                if self.level < cost - 1e-9 {
                    return Decision::NotBefore(now + ((cost - self.level) / rate).min(1.0));
                }
                self.level -= cost;
            }
            Upstream::Cap | Upstream::Knee { .. } => {
                if self.in_flight + 1.0 > self.share(now).max(1.0).floor() {
                    return Decision::OnResponse;
                }
            }
            Upstream::Free => {}
        }
        self.in_flight += 1.0;
        Decision::Send(0)
    }

    fn done(&mut self, _: f64, _: usize, _: &Response) {
        self.in_flight -= 1.0;
    }
}
