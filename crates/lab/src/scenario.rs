//! Scenarios: an upstream with a hidden limit, and the clients that call it. They are TOML files.

use std::collections::HashSet;
use std::fmt::Display;

use serde::Deserialize;
use thiserror::Error;

/// The scenarios that come with the lab, one file for each kind of upstream.
const BUILT_IN: [&str; 8] = [
    include_str!("../scenarios/rates.toml"),
    include_str!("../scenarios/headers.toml"),
    include_str!("../scenarios/windows.toml"),
    include_str!("../scenarios/slots.toml"),
    include_str!("../scenarios/steps.toml"),
    include_str!("../scenarios/shared.toml"),
    include_str!("../scenarios/tokens.toml"),
    include_str!("../scenarios/others.toml"),
];

/// The longest run, in seconds of virtual time.
const SECONDS_MAX: f64 = 86_400.0;
/// The most clients of one upstream.
const CLIENTS_MAX: usize = 1_000;
/// The most workers of one client.
const WORKERS_MAX: usize = 100_000;
/// The most arrivals per second of one client.
const ARRIVALS_MAX: f64 = 1e6;
/// The highest rate in units per second.
const RATE_MAX: f64 = 1e9;
const RATE: &str = "above 0, at most 1e9";
const SPAN_ABOVE_0: &str = "above 0, at most 86400";

/// One upstream and its clients.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Scenario {
    /// The name.
    pub name: String,
    /// The limit of the upstream.
    pub upstream: Upstream,
    /// The limit from a second on: units per second (bucket, window), requests in flight (cap, knee). Empty
    /// if free.
    #[serde(default)]
    pub capacity: Vec<(f64, f64)>,
    /// The length of a run, in seconds.
    pub seconds: f64,
    /// Independent clients.
    #[serde(default = "one")]
    pub clients: usize,
    /// Seconds between the starts of two clients.
    #[serde(default)]
    pub stagger: f64,
    /// Requests that each client keeps in flight, if allowed (closed arrivals).
    #[serde(default = "workers")]
    pub workers: usize,
    /// Requests per second of each client (open arrivals) instead of workers that always want more.
    pub arrivals: Option<f64>,
    /// Mean latency in seconds.
    #[serde(default = "latency")]
    pub latency: f64,
    /// Deviation of the logarithm of the latency.
    #[serde(default = "sigma")]
    pub sigma: f64,
    /// From a second on the latency is multiplied by this.
    pub slower: Option<(f64, f64)>,
    /// Latency of a rejection in seconds.
    #[serde(default = "reject_latency")]
    pub reject_latency: f64,
    /// Share of requests that fail with a 500.
    #[serde(default)]
    pub errors: f64,
    /// The `Retry-After` of rejections.
    #[serde(default)]
    pub retry_after: RetryAfter,
    /// The quota headers of responses.
    #[serde(default)]
    pub headers: Headers,
    /// Whether rejected requests use up quota.
    #[serde(default)]
    pub burns: bool,
    /// Other clients take this share of the quota, alternating this many seconds on and off.
    pub background: Option<(f64, f64)>,
    /// Tokens of a request (mean, deviation of the logarithm), if the upstream counts tokens.
    pub tokens: Option<(f64, f64)>,
    /// A second quota, of tokens, in addition to that of requests.
    pub token_quota: Option<TokenQuota>,
    /// The capacity that goodput is compared with, if it is not `capacity`.
    pub ideal: Option<Vec<(f64, f64)>>,
}

/// The limit of an upstream.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Upstream {
    /// A token bucket that holds `depth` seconds of its rate, and at least one request.
    Bucket {
        /// Seconds.
        depth: f64,
    },
    /// A fixed window.
    Window {
        /// Seconds.
        length: f64,
    },
    /// A sliding window.
    Sliding {
        /// Seconds.
        length: f64,
    },
    /// Rejects requests beyond a number in flight.
    Cap,
    /// Beyond a number in flight each request runs at (knee ÷ in flight)^power: none is rejected, all get
    /// slower.
    Knee {
        /// The exponent.
        power: f64,
    },
    /// Limits nothing.
    Free,
}

/// A quota of tokens in addition to that of requests.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct TokenQuota {
    /// Tokens per second, in a bucket of one second.
    pub rate: f64,
    /// Mean tokens of a request from a second on.
    pub mean: Vec<(f64, f64)>,
    /// Whether a rejection names the exceeded quota.
    #[serde(default)]
    pub named: bool,
}

/// The `Retry-After` of rejections.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RetryAfter {
    /// Nothing.
    #[default]
    None,
    /// The exact time until the request would be accepted.
    Exact,
    /// That time in whole seconds, at least one.
    Seconds,
    /// Ten times the whole seconds.
    TenTimes,
}

/// The quota headers of responses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Headers {
    /// Nothing.
    #[default]
    None,
    /// The actual limit, remaining and reset.
    Right,
    /// The values of a second ago.
    Stale,
    /// Twice the actual limit and remaining.
    Lying,
}

/// An error in a scenario file.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ScenarioError {
    /// The text is not a list of scenarios.
    #[error("{0}")]
    Toml(#[from] toml::de::Error),
    /// A number is out of its bounds.
    #[error("`{field}` of scenario `{name}` is {value}, and must be {bound}")]
    Invalid {
        /// The scenario.
        name: String,
        /// The field.
        field: &'static str,
        /// The value.
        value: String,
        /// The allowed values.
        bound: &'static str,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    scenario: Vec<Scenario>,
}

const fn one() -> usize {
    1
}

const fn workers() -> usize {
    32
}

const fn latency() -> f64 {
    0.2
}

const fn sigma() -> f64 {
    0.3
}

const fn reject_latency() -> f64 {
    0.03
}

impl Scenario {
    /// Reads scenarios from TOML.
    ///
    /// # Errors
    /// [`ScenarioError`] with the place or with field, value and bound.
    pub fn parse(text: &str) -> Result<Vec<Self>, ScenarioError> {
        let File { scenario } = toml::from_str(text)?;
        scenario.iter().try_for_each(Self::check)?;
        let mut names = HashSet::new();
        if let Some(again) = scenario.iter().find(|one| !names.insert(one.name.as_str())) {
            again.expect(false, "name", &again.name, "unique in its file")?;
        }
        Ok(scenario)
    }

    /// The scenarios that come with the lab.
    ///
    /// # Panics
    /// Never: they are compiled in, and a test parses them.
    pub fn built_in() -> Vec<Self> {
        BUILT_IN
            .into_iter()
            .flat_map(|text| Self::parse(text).expect("built-in scenarios are valid"))
            .collect()
    }

    fn check(&self) -> Result<(), ScenarioError> {
        self.check_upstream()?;
        self.check_quotas()?;
        self.check_demand()?;
        self.expect(
            self.seconds > 1.0 && self.seconds <= SECONDS_MAX,
            "seconds",
            &self.seconds,
            "above 1, at most 86400",
        )?;
        self.expect(is_span(self.latency) && self.latency > 0.0, "latency", &self.latency, SPAN_ABOVE_0)?;
        self.expect((0.0..=5.0).contains(&self.sigma), "sigma", &self.sigma, "from 0 to 5")?;
        self.expect((0.0..1.0).contains(&self.errors), "errors", &self.errors, "from 0, below 1")?;
        self.expect(
            is_span(self.reject_latency) && self.reject_latency > 0.0,
            "reject-latency",
            &self.reject_latency,
            SPAN_ABOVE_0,
        )?;
        let (from, by) = self.slower.unwrap_or((0.0, 1.0));
        let is_good = is_span(from) && by > 0.0 && by <= 1_000.0;
        self.expect(is_good, "slower", &pair((from, by)), "a second, and a factor above 0, at most 1000")
    }

    fn check_upstream(&self) -> Result<(), ScenarioError> {
        match self.upstream {
            Upstream::Bucket { depth } => self.expect(is_span(depth), "depth", &depth, "from 0 to 86400"),
            Upstream::Window { length } | Upstream::Sliding { length } => {
                self.expect(is_span(length) && length >= 0.001, "length", &length, "from 0.001 to 86400")
            }
            Upstream::Knee { power } => {
                self.expect((0.0..=10.0).contains(&power), "power", &power, "from 0 to 10")
            }
            Upstream::Cap | Upstream::Free => Ok(()),
        }
    }

    fn check_quotas(&self) -> Result<(), ScenarioError> {
        if self.upstream != Upstream::Free || !self.capacity.is_empty() {
            self.expect_steps("capacity", &self.capacity)?;
        }
        if let Some(ideal) = &self.ideal {
            self.expect_steps("ideal", ideal)?;
        }
        if let Some(quota) = &self.token_quota {
            self.expect(is_rate(quota.rate), "token-quota.rate", &quota.rate, RATE)?;
            self.expect_steps("token-quota.mean", &quota.mean)?;
        }
        if let Some((mean, sigma)) = self.tokens {
            let is_good = (1.0..=RATE_MAX).contains(&mean) && (0.0..=5.0).contains(&sigma);
            self.expect(
                is_good,
                "tokens",
                &pair((mean, sigma)),
                "a mean from 1 to 1e9, and a deviation from 0 to 5",
            )?;
        }
        let is_bucket = matches!(self.upstream, Upstream::Bucket { .. });
        let only_buckets = "absent unless the upstream is a bucket";
        self.expect(is_bucket || self.token_quota.is_none(), "token-quota", &"given", only_buckets)?;
        self.expect(is_bucket || self.background.is_none(), "background", &"given", only_buckets)?;
        let (share, length) = self.background.unwrap_or((1.0, 1.0));
        let is_good = share > 0.0 && share <= 1.0 && is_span(length) && length >= 0.1;
        self.expect(
            is_good,
            "background",
            &pair((share, length)),
            "a share above 0, at most 1, and seconds from 0.1 to 86400",
        )
    }

    fn check_demand(&self) -> Result<(), ScenarioError> {
        self.expect((1..=CLIENTS_MAX).contains(&self.clients), "clients", &self.clients, "from 1 to 1000")?;
        self.expect(is_span(self.stagger), "stagger", &self.stagger, "from 0 to 86400")?;
        self.expect((1..=WORKERS_MAX).contains(&self.workers), "workers", &self.workers, "from 1 to 100000")?;
        let arrivals = self.arrivals.unwrap_or(1.0);
        let is_good = arrivals > 0.0 && arrivals <= ARRIVALS_MAX;
        self.expect(is_good, "arrivals", &arrivals, "above 0, at most 1000000")
    }

    /// Steps must begin at second 0, be in order, and have valid values.
    fn expect_steps(&self, field: &'static str, steps: &[(f64, f64)]) -> Result<(), ScenarioError> {
        let Some(first) = steps.first() else {
            return self.expect(false, field, &"[]", "given from second 0 on");
        };
        self.expect(first.0 == 0.0, field, &pair(*first), "given from second 0 on")?;
        for step in steps {
            self.expect(
                is_span(step.0) && is_rate(step.1),
                field,
                &pair(*step),
                "seconds and a value above 0, at most 1e9",
            )?;
        }
        let disorder = steps.windows(2).find(|two| two[0].0 >= two[1].0);
        let (is_good, value) = disorder.map_or((true, String::new()), |two| (false, pair(two[1])));
        self.expect(is_good, field, &value, "in the order of time")
    }

    fn expect(
        &self,
        is_good: bool,
        field: &'static str,
        value: &dyn Display,
        bound: &'static str,
    ) -> Result<(), ScenarioError> {
        if is_good {
            return Ok(());
        }
        Err(ScenarioError::Invalid { name: self.name.clone(), field, value: value.to_string(), bound })
    }

    /// The limit at `now`.
    pub fn capacity_at(&self, now: f64) -> f64 {
        at(&self.capacity, now)
    }

    /// The factor of the latency at `now`.
    pub(crate) fn slowness_at(&self, now: f64) -> f64 {
        self.slower.map_or(1.0, |(from, by)| if now >= from { by } else { 1.0 })
    }

    /// The capacity in units per second at `now`.
    #[expect(clippy::cast_precision_loss, reason = "workers are few")]
    pub fn ideal_at(&self, now: f64) -> f64 {
        match self.upstream {
            Upstream::Bucket { .. } | Upstream::Window { .. } | Upstream::Sliding { .. } => {
                self.ideal.as_deref().map_or_else(|| self.capacity_at(now), |ideal| at(ideal, now))
            }
            Upstream::Cap => self.capacity_at(now) / self.latency,
            Upstream::Knee { .. } => self.capacity_at(now) / (self.latency * self.slowness_at(now)),
            Upstream::Free => (self.workers * self.clients) as f64 / (self.latency * self.slowness_at(now)),
        }
    }

    /// Whether a quota is counted on arrival. Accepted requests then count at their send time, otherwise on
    /// completion.
    pub(crate) const fn counts_on_arrival(&self) -> bool {
        matches!(self.upstream, Upstream::Bucket { .. } | Upstream::Window { .. } | Upstream::Sliding { .. })
    }

    /// Mean units of a request in the quota.
    pub(crate) fn unit(&self) -> f64 {
        self.tokens.map_or(1.0, |(mean, _)| mean)
    }
}

/// Whether `seconds` is a valid duration within a run.
fn is_span(seconds: f64) -> bool {
    (0.0..=SECONDS_MAX).contains(&seconds)
}

fn is_rate(rate: f64) -> bool {
    rate > 0.0 && rate <= RATE_MAX
}

/// A pair in the notation of the file.
fn pair((first, second): (f64, f64)) -> String {
    format!("[{first}, {second}]")
}

/// The value of a step function.
pub(crate) fn at(steps: &[(f64, f64)], now: f64) -> f64 {
    steps.iter().rev().find(|(from, _)| *from <= now).or(steps.first()).map_or(0.0, |(_, value)| *value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_in_scenarios_have_unique_names() {
        let mut names: Vec<String> = Scenario::built_in().into_iter().map(|scenario| scenario.name).collect();
        let count = names.len();
        assert!(count > 60, "{count}");
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count);
    }

    #[test]
    fn invalid_scenario_names_field_value_and_bound() {
        let table = [
            ("[[scenario]]\nname = \"x\"", "missing field `upstream`"),
            (
                "[[scenario]]\nname = \"x\"\nupstream = \"cap\"\nseconds = 60",
                "`capacity` of scenario `x` is [], and must be given from second 0 on",
            ),
            (
                "[[scenario]]\nname = \"x\"\nupstream = \"cap\"\nseconds = 60\ncapacity = [[0, 4], [5, -1]]",
                "`capacity` of scenario `x` is [5, -1], and must be seconds and a value above 0, at most 1e9",
            ),
            (
                "[[scenario]]\nname = \"x\"\nupstream = \"cap\"\nseconds = 60\ncapacity = [[0, 4], [9, 1], [8, 2]]",
                "`capacity` of scenario `x` is [8, 2], and must be in the order of time",
            ),
            (
                "[[scenario]]\nname = \"x\"\nupstream = { window = { length = 0 } }\nseconds = 60\ncapacity = [[0, 4]]",
                "`length` of scenario `x` is 0, and must be from 0.001 to 86400",
            ),
            (
                "[[scenario]]\nname = \"x\"\nupstream = \"free\"\nseconds = 60\nbackground = [0.5, 20]",
                "`background` of scenario `x` is given, and must be absent unless the upstream is a bucket",
            ),
            (
                "[[scenario]]\nname = \"x\"\nupstream = { bucket = { depth = 1 } }\nseconds = 60\ncapacity = [[0, 4]]\n\
                 background = [0.5, 0]",
                "`background` of scenario `x` is [0.5, 0], and must be a share above 0, at most 1, and seconds",
            ),
            (
                "[[scenario]]\nname = \"x\"\nupstream = \"free\"\nseconds = 60\nworkers = 0",
                "`workers` of scenario `x` is 0, and must be from 1 to 100000",
            ),
            (
                "[[scenario]]\nname = \"x\"\nupstream = \"free\"\nseconds = 60\nlatency = nan",
                "`latency` of scenario `x` is NaN, and must be above 0, at most 86400",
            ),
            (
                "[[scenario]]\nname = \"x\"\nupstream = \"free\"\nseconds = 60\n[[scenario]]\nname = \"x\"\n\
                 upstream = \"free\"\nseconds = 60",
                "`name` of scenario `x` is x, and must be unique in its file",
            ),
            (
                "[[scenario]]\nname = \"x\"\nupstream = \"free\"\nseconds = 60\nerrors = 2",
                "`errors` of scenario `x` is 2, and must be from 0, below 1",
            ),
            (
                "[[scenario]]\nname = \"x\"\nupstream = \"free\"\nseconds = 60\nspeed = 2",
                "unknown field `speed`",
            ),
        ];
        for (text, wanted) in table {
            let error = Scenario::parse(text).unwrap_err().to_string();
            assert!(error.contains(wanted), "{error}");
        }
    }
}
