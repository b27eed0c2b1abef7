//! Upstreams with hidden limits: which requests are accepted, and the contents of responses.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use tidegate_core::feedback::headers::{Dimension, Reset};
use tidegate_core::outcome::QuotaLevel;

use crate::rng::Rng;
use crate::scenario::{Headers, RetryAfter, Scenario, Upstream, at};

/// The age of stale headers, in seconds.
const STALE: f64 = 1.0;

/// The kind of a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// It succeeded.
    Success,
    /// It was rejected with a 429.
    Rejected,
    /// It failed with a 500.
    Error,
}

/// The response to a request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Response {
    /// Its kind.
    pub(crate) kind: Kind,
    /// When it was sent, in seconds.
    pub(crate) sent_at: f64,
    /// Units of the quota that it used.
    pub(crate) units: f64,
    /// `Retry-After`, in seconds.
    pub(crate) retry_after: Option<f64>,
    /// The quota that a rejection names.
    pub(crate) exceeded: Option<Dimension>,
    /// The quota that headers report.
    pub(crate) quota: Option<(Dimension, QuotaLevel)>,
}

/// The state of an upstream that counts on arrival. Caps and knees count requests in flight, so the simulator
/// holds them.
#[derive(Debug)]
pub(crate) struct Quotas {
    scenario: Arc<Scenario>,
    /// Units in the bucket, or used in the window.
    level: f64,
    seen_at: f64,
    window: u64,
    /// Units and when they were accepted, in a sliding window.
    accepted: VecDeque<(f64, f64)>,
    tokens: f64,
    tokens_at: f64,
    /// Recent header reports, for stale ones.
    reports: VecDeque<(f64, QuotaLevel)>,
}

/// The decision of an upstream on a request.
pub(crate) struct Verdict {
    pub(crate) is_accepted: bool,
    pub(crate) retry_after: Option<f64>,
    pub(crate) exceeded: Option<Dimension>,
    pub(crate) quota: Option<(Dimension, QuotaLevel)>,
}

impl Quotas {
    pub(crate) fn new(scenario: &Scenario) -> Self {
        let mut quotas = Self {
            scenario: Arc::new(scenario.clone()),
            level: 0.0,
            seen_at: 0.0,
            window: 0,
            accepted: VecDeque::new(),
            tokens: scenario.token_quota.as_ref().map_or(0.0, |quota| quota.rate),
            tokens_at: 0.0,
            reports: VecDeque::new(),
        };
        quotas.level = quotas.depth(0.0);
        quotas
    }

    /// The depth of the bucket in units: at least four mean requests if costs vary, otherwise one.
    fn depth(&self, now: f64) -> f64 {
        let Upstream::Bucket { depth } = self.scenario.upstream else { return 0.0 };
        let least = self.scenario.tokens.map_or(1.0, |(mean, _)| 4.0 * mean);
        (depth * self.scenario.capacity_at(now)).max(least)
    }

    fn refill(&mut self, now: f64) {
        let refilled = self.level + self.scenario.capacity_at(now) * (now - self.seen_at);
        self.level = refilled.min(self.depth(now));
        self.seen_at = now;
    }

    /// Other clients take a mean request, if available; returns the units taken.
    pub(crate) fn take_for_others(&mut self, now: f64) -> f64 {
        self.refill(now);
        let unit = self.scenario.unit();
        if self.level < unit {
            return 0.0;
        }
        self.level -= unit;
        unit
    }

    /// Decides on a request of `units`, and of `tokens` if there is a second quota; `in_flight` includes the
    /// request.
    pub(crate) fn receive(&mut self, units: f64, tokens: f64, in_flight: usize, now: f64) -> Verdict {
        let scenario = &*Arc::clone(&self.scenario);
        let mut exceeded = None;
        let (is_accepted, wait) = match scenario.upstream {
            Upstream::Bucket { .. } => {
                self.refill(now);
                match &scenario.token_quota {
                    Some(quota) => {
                        self.tokens = (self.tokens + quota.rate * (now - self.tokens_at)).min(quota.rate);
                        self.tokens_at = now;
                        let lacks_tokens = self.tokens < tokens;
                        let is_accepted = !lacks_tokens && self.level >= 1.0;
                        if is_accepted {
                            self.tokens -= tokens;
                            self.level -= 1.0;
                        } else if quota.named {
                            exceeded =
                                Some(if lacks_tokens { Dimension::Tokens } else { Dimension::Requests });
                        }
                        (is_accepted, 0.0)
                    }
                    None if self.level >= units => {
                        self.level -= units;
                        (true, 0.0)
                    }
                    None => {
                        let wait = (units - self.level) / scenario.capacity_at(now);
                        if scenario.burns {
                            self.level -= units.min(self.level);
                        }
                        (false, wait)
                    }
                }
            }
            Upstream::Window { length } => {
                let index = window_index(now, length);
                if index != self.window {
                    (self.window, self.level) = (index, 0.0);
                }
                let is_accepted = self.level + units <= scenario.capacity_at(now) * length;
                if is_accepted || scenario.burns {
                    self.level += units;
                }
                (is_accepted, window_end(index, length) - now)
            }
            Upstream::Sliding { length } => self.slide(units, length, now),
            Upstream::Cap => (as_number(in_flight) <= scenario.capacity_at(now), scenario.latency / 4.0),
            Upstream::Knee { .. } | Upstream::Free => (true, 0.0),
        };
        let retry_after = (!is_accepted).then(|| hint(scenario.retry_after, wait)).flatten();
        Verdict { is_accepted, retry_after, exceeded, quota: self.report(now) }
    }

    fn slide(&mut self, units: f64, length: f64, now: f64) -> (bool, f64) {
        while let Some((at, old)) = self.accepted.front().copied()
            && at <= now - length
        {
            self.level -= old;
            self.accepted.pop_front();
        }
        let is_accepted = self.level + units <= self.scenario.capacity_at(now) * length;
        if is_accepted {
            self.level += units;
            self.accepted.push_back((now, units));
        }
        (is_accepted, self.accepted.front().map_or(0.0, |(at, _)| at + length - now))
    }

    /// The quota reported in the headers of a response sent now.
    fn report(&mut self, now: f64) -> Option<(Dimension, QuotaLevel)> {
        let dimension = if self.scenario.tokens.is_some() { Dimension::Tokens } else { Dimension::Requests };
        let level = match self.scenario.headers {
            Headers::None => return None,
            Headers::Right => self.level_now(now)?,
            Headers::Lying => {
                let level = self.level_now(now)?;
                QuotaLevel { limit: 2 * level.limit, remaining: 2 * level.remaining, ..level }
            }
            Headers::Stale => {
                let level = self.level_now(now)?;
                self.reports.push_back((now, level));
                while self.reports.get(1).is_some_and(|(at, _)| *at <= now - STALE) {
                    self.reports.pop_front();
                }
                self.reports.front()?.1
            }
        };
        Some((dimension, level))
    }

    fn level_now(&self, now: f64) -> Option<QuotaLevel> {
        let (limit, remaining, reset) = match self.scenario.upstream {
            Upstream::Bucket { .. } => {
                let depth = self.depth(now);
                let to_full = (depth - self.level) / self.scenario.capacity_at(now);
                (depth, self.level, Reset::Full(span(to_full)))
            }
            Upstream::Window { length } => {
                let limit = self.scenario.capacity_at(now) * length;
                (limit, limit - self.level, Reset::More(span(window_end(self.window, length) - now)))
            }
            _ => return None,
        };
        Some(QuotaLevel { limit: whole(limit), remaining: whole(remaining), reset, window: None })
    }
}

/// The speed of each request of a knee (processor sharing).
pub(crate) fn speed(power: f64, knee: f64, in_flight: usize) -> f64 {
    let in_flight = as_number(in_flight);
    if in_flight > knee { (knee / in_flight).powf(power) } else { 1.0 }
}

/// Draws the cost of a request: units of the first quota, and tokens of the second.
pub(crate) fn draw_cost(scenario: &Scenario, now: f64, rng: &mut Rng) -> (f64, f64) {
    let spread = |rng: &mut Rng, mean: f64, sigma: f64, most: f64| {
        rng.lognormal(mean, sigma).clamp(mean / 20.0, mean * most).round().max(1.0)
    };
    let units = scenario.tokens.map_or(1.0, |(mean, sigma)| spread(rng, mean, sigma, 20.0));
    let tokens = scenario.token_quota.as_ref().map(|quota| spread(rng, at(&quota.mean, now), 1.0, 8.0));
    (units, tokens.unwrap_or(units))
}

fn hint(style: RetryAfter, wait: f64) -> Option<f64> {
    match style {
        RetryAfter::None => None,
        RetryAfter::Exact => Some(wait),
        RetryAfter::Seconds => Some(wait.ceil().max(1.0)),
        RetryAfter::TenTimes => Some(10.0 * wait.ceil().max(1.0)),
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "`as` from a float saturates")]
fn window_index(now: f64, length: f64) -> u64 {
    (now / length) as u64
}

#[expect(clippy::cast_precision_loss, reason = "windows are few")]
fn window_end(index: u64, length: f64) -> f64 {
    (index + 1) as f64 * length
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "`as` from a float saturates")]
fn whole(units: f64) -> u64 {
    units.max(0.0) as u64
}

#[expect(clippy::cast_precision_loss, reason = "requests in flight are few")]
const fn as_number(count: usize) -> f64 {
    count as f64
}

fn span(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scenario(text: &str) -> Scenario {
        let text = format!("[[scenario]]\nname = \"x\"\nseconds = 60\n{text}");
        Scenario::parse(&text).unwrap().remove(0)
    }

    /// How many of ten requests per second are accepted in each of six seconds.
    fn accepted(text: &str) -> Vec<usize> {
        let scenario = scenario(text);
        let mut quotas = Quotas::new(&scenario);
        let second = |second: u32| {
            let at = |request: u32| f64::from(second) + f64::from(request) / 10.0;
            (0..10).filter(|request| quotas.receive(1.0, 0.0, 1, at(*request)).is_accepted).count()
        };
        (0..6).map(second).collect()
    }

    #[test]
    fn each_limit_accepts_its_capacity() {
        let table = [
            ("upstream = { bucket = { depth = 2 } }\ncapacity = [[0, 4]]", vec![10, 5, 4, 4, 4, 4]),
            ("upstream = { window = { length = 2 } }\ncapacity = [[0, 4]]", vec![8, 0, 8, 0, 8, 0]),
            ("upstream = { sliding = { length = 1 } }\ncapacity = [[0, 4]]", vec![4, 4, 4, 4, 4, 4]),
            ("upstream = { bucket = { depth = 1 } }\ncapacity = [[0, 2], [3, 5]]", vec![3, 2, 2, 5, 5, 5]),
            ("upstream = \"free\"", vec![10; 6]),
        ];
        for (text, wanted) in table {
            assert_eq!(accepted(text), wanted, "{text}");
        }
    }

    #[test]
    fn rejections_can_use_up_quota() {
        let text = "upstream = { window = { length = 2 } }\ncapacity = [[0, 4]]\nburns = true";
        assert_eq!(accepted(text), [8, 0, 8, 0, 8, 0]);
        let bucket = "upstream = { bucket = { depth = 0 } }\ncapacity = [[0, 4]]\nburns = true";
        assert!(accepted(bucket).into_iter().sum::<usize>() < 12, "less than half of 24");
    }

    #[test]
    fn headers_are_right_stale_or_wrong() {
        let level = |headers: &str| {
            let scenario = scenario(&format!(
                "upstream = {{ bucket = {{ depth = 10 }} }}\ncapacity = [[0, 1]]\nheaders = \"{headers}\""
            ));
            let mut quotas = Quotas::new(&scenario);
            let mut receive = |now| quotas.receive(1.0, 0.0, 1, now).quota.map(|(_, level)| level.remaining);
            [receive(0.0), receive(0.0), receive(0.5), receive(1.2)]
        };
        assert_eq!(level("none"), [None; 4]);
        assert_eq!(level("right"), [Some(9), Some(8), Some(7), Some(7)]);
        assert_eq!(level("stale"), [Some(9), Some(9), Some(9), Some(8)]);
        assert_eq!(level("lying"), [Some(18), Some(16), Some(14), Some(14)]);
    }

    #[test]
    fn hints_are_right_rounded_or_wrong() {
        let says = |says: &str| {
            let scenario = scenario(&format!(
                "upstream = {{ bucket = {{ depth = 0 }} }}\ncapacity = [[0, 4]]\nretry-after = \"{says}\""
            ));
            let mut quotas = Quotas::new(&scenario);
            assert!(quotas.receive(1.0, 0.0, 1, 0.0).is_accepted);
            quotas.receive(1.0, 0.0, 1, 0.0).retry_after
        };
        assert_eq!(
            ["none", "exact", "seconds", "ten-times"].map(says),
            [None, Some(0.25), Some(1.0), Some(10.0)]
        );
    }
}
