//! One throttle per host: a rate and a number of slots, which `Auto` derives from the host's responses.
//!
//! Nothing waits here. A refused request gets the time after which to retry.

use std::fmt;
use std::time::Duration;

use tidegate::config::Origin;
use tidegate::{
    Authority, CircuitState, Config, ConfigError, Controller, Cost, Draft, Gate, GateName,
    InvalidKeyedOptions, Keyed, Outcome, Pace, PerSecond, Permit, Refused, Retry, Snapshot, State, Throttle,
};

use crate::failure::Failure;
use crate::parse;

/// Maximum pause. A host that asks for a longer one gets no further request in the same run.
const PAUSE_MAX: Duration = Duration::from_hours(24);
/// Where a fetch differs from the preset `host`.
const DEFAULTS: [(&str, &str); 3] = [("slots.max", "8"), ("pause.max", "24h"), ("retry.attempts", "4")];
/// Keys for throttles that callers wait at or that know the size of a request; a trailing dot is a group.
const WITHOUT_EFFECT: [&str; 10] = [
    "budget.",
    "budgets",
    "bytes.",
    "keyed.enabled",
    "milestone_percent",
    "pause.sizes.",
    "retry.budget.",
    "retry.when_refused",
    "total",
    "waiters_max",
];
/// A rate is at its maximum from this share of it on: it swings a little.
const AT_MAX: f64 = 0.95;

/// The throttles of all hosts.
#[derive(Debug)]
pub(crate) struct Gates {
    hosts: Keyed<Authority>,
    /// The most requests per second that a host may get, and the limit that says so.
    rate_max: Option<(f64, UserLimit)>,
}

/// A limit that the user set for the rate of a host.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum UserLimit {
    /// `--rate-max`.
    RateMax(f64),
    /// `auto.rate_max` in the configuration file.
    AutoMax(f64),
    /// `rate.amount` in the configuration file.
    Rate(f64),
    /// One of `rates` in the configuration file.
    Named(GateName),
}

impl UserLimit {
    pub(crate) const fn is_rate_max(self) -> bool {
        matches!(self, Self::RateMax(_) | Self::AutoMax(_))
    }
}

impl fmt::Display for UserLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::RateMax(rate) => write!(f, "--rate-max {rate}"),
            Self::AutoMax(rate) => write!(f, "auto.rate_max = {rate} in --config"),
            Self::Rate(amount) => write!(f, "rate.amount = {amount} in --config"),
            Self::Named(name) => write!(f, "the limit \"{name}\" in --config"),
        }
    }
}

/// Limits on the command line.
#[derive(Debug, Default)]
pub(crate) struct LimitOptions {
    /// Requests per second and host at the start.
    pub(crate) rate: Option<f64>,
    pub(crate) rate_max: Option<f64>,
    /// Requests in flight per host.
    pub(crate) per_host: Option<u32>,
    pub(crate) tries: Option<u32>,
}

impl LimitOptions {
    /// Those that are given, each with its key of the configuration and its value.
    fn given(&self) -> impl Iterator<Item = (&'static str, &'static str, String)> {
        let options = [
            ("--rate", "auto.rate_start", self.rate.map(|rate| rate.to_string())),
            ("--rate-max", "auto.rate_max", self.rate_max.map(|rate| rate.to_string())),
            ("--per-host", "slots.max", self.per_host.map(|slots| slots.to_string())),
            ("--tries", "retry.attempts", self.tries.map(|tries| tries.to_string())),
        ];
        options.into_iter().filter_map(|(option, key, value)| Some((option, key, value?)))
    }

    /// The problems of a configuration in which the options are maps.
    fn explain(&self, error: &ConfigError) -> Failure {
        let explained = error.problems().iter().map(|problem| {
            let given = self.given().find(|(_, key, _)| *key == problem.field);
            let by = given.map_or_else(|| "by default".to_owned(), |(option, ..)| format!("by {option}"));
            problem.to_string().replace(&Origin::Map.to_string(), &by)
        });
        Failure::usage(explained.collect::<Vec<_>>().join("; "))
    }
}

/// Permission to send one request to a host.
#[derive(Debug)]
pub(crate) struct Entry {
    permit: Permit<'static>,
}

/// What the summary shows of a host's throttle.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct ThrottleState {
    /// The rate that it has reached.
    pub(crate) limit: Option<f64>,
    pub(crate) circuit: Option<CircuitState>,
    /// The 95th percentile latency of recent responses.
    pub(crate) latency_p95: Option<Duration>,
}

/// Why a request to a host has to wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wait {
    /// The rate, at this gate, allows the next request after this time.
    Rate(Duration, Gate),
    /// The host asked for a pause, or for a delay between requests.
    Pause(Duration),
    /// The circuit is open.
    Circuit(Duration),
    /// All slots are in use: wait until a request in flight ends.
    Slot,
}

impl Wait {
    /// The part of it that the host caused.
    pub(crate) const fn requested(self) -> Duration {
        match self {
            Self::Pause(span) | Self::Circuit(span) => span,
            Self::Rate(..) | Self::Slot => Duration::ZERO,
        }
    }
}

impl Gates {
    /// The limits of a configuration file, with those of the options in place of its own.
    ///
    /// Returns the retry policy, too.
    pub(crate) fn new(file: Config, options: &LimitOptions) -> Result<(Self, Retry), Failure> {
        let invalid = |error: ConfigError| options.explain(&error);
        if let Some(key) =
            file.to_map().keys().find(|key| WITHOUT_EFFECT.iter().any(|no| key.starts_with(no)))
        {
            return Err(Failure::usage(format!("`{key}` has no effect on a fetch; remove it from --config")));
        }
        let pairs = options.given().map(|(_, key, value)| (key, value));
        let config = Config::from_map(DEFAULTS).map_err(invalid)?.overlaid_by(file);
        let config = config.overlaid_by(Config::from_map(pairs).map_err(invalid)?);
        let (draft, _) = config.to_keyed().map_err(invalid)?;
        let hosts = Keyed::from_config(&config).map_err(invalid)?.build();
        let hosts = hosts.map_err(|error: InvalidKeyedOptions| Failure::usage(error.to_string()))?;
        let keys = config.to_map();
        let number = |key: &str| keys.get(key).and_then(|number| number.parse::<f64>().ok());
        let period = keys.get("rate.period").and_then(|period| parse::duration(period).ok());
        let limit = if options.rate_max.is_some() { UserLimit::RateMax } else { UserLimit::AutoMax };
        let auto = number("auto.rate_max").map(|rate| (rate, limit(rate)));
        let rate = number("rate.amount").zip(period);
        let rate = rate.map(|(amount, period)| (amount / period.as_secs_f64(), UserLimit::Rate(amount)));
        let rate_max = auto.into_iter().chain(rate).min_by(|(one, _), (other, _)| one.total_cmp(other));
        Ok((Self { hosts, rate_max }, draft.retry))
    }

    /// The limit of the user because of which a host may get no more requests per second.
    pub(crate) fn limited_by(&self, host: &Authority, gate: Gate) -> Option<UserLimit> {
        if let Gate::Named(name) = gate {
            return Some(UserLimit::Named(name));
        }
        let (rate_max, limit) = self.rate_max?;
        let rate = self.view(host)?.rate?;
        (rate.as_f64() >= AT_MAX * rate_max).then_some(limit)
    }

    /// Whether a host's circuit is open or half-open.
    pub(crate) fn is_failing(&self, host: &Authority) -> bool {
        self.view(host).is_some_and(|view| view.state == State::CircuitOpen)
    }

    /// Tries to acquire a permit, without waiting.
    pub(crate) fn try_enter(&self, host: &Authority) -> Result<Entry, Wait> {
        let permit = self.hosts.try_acquire(host, Cost::request()).map_err(wait)?;
        Ok(Entry { permit })
    }

    /// Allows at most one request in `span`, as robots.txt demands. The longest of several spans wins.
    pub(crate) fn space(&self, host: &Authority, span: Duration) -> Throttle {
        let throttle = self.hosts.throttle(host);
        let span = span.max(throttle.snapshot().interval);
        if span.is_zero() {
            return throttle;
        }
        // A span out of bounds is replaced by the longest valid one.
        let is_spaced = [span, PAUSE_MAX].map(Pace::every).into_iter().any(|pace| {
            let spaced = |draft: &mut Draft| draft.pace = Some(pace);
            // A brake that moved nothing but the pace has no range left, and is refused.
            let fixed = |draft: &mut Draft| {
                *draft = draft.clone().controlled_by(Controller::Fixed);
                spaced(draft);
            };
            throttle.retune(spaced).or_else(|_| throttle.retune(fixed)).is_ok()
        });
        debug_assert!(is_spaced, "a delay of robots.txt has no effect");
        throttle
    }

    /// What the summary shows of a host's throttle; `None` if it was evicted.
    pub(crate) fn state(&self, host: &Authority) -> Option<ThrottleState> {
        let view = self.view(host)?;
        Some(ThrottleState {
            limit: view.rate.map(PerSecond::as_f64),
            circuit: view.circuit.map(|circuit| circuit.state),
            latency_p95: view.latency_p95,
        })
    }

    /// The state of a host's throttle.
    pub(crate) fn view(&self, host: &Authority) -> Option<Snapshot> {
        Some(self.hosts.get(host)?.snapshot())
    }
}

impl Entry {
    /// Records the outcome of a response whose body has not arrived yet.
    pub(crate) fn learn(&mut self, outcome: Outcome) {
        self.permit.record(outcome);
    }

    /// Returns the permit and records the outcome.
    pub(crate) fn settle(self, outcome: Outcome) {
        self.permit.settle(outcome);
    }
}

fn wait(refused: Refused) -> Wait {
    match refused {
        Refused::CircuitOpen { retry_after } => Wait::Circuit(retry_after),
        Refused::Limited { by: Gate::Pause | Gate::Pace, retry_after: Some(span) } => Wait::Pause(span),
        Refused::Limited { by, retry_after: Some(span) } => Wait::Rate(span, by),
        _ => Wait::Slot,
    }
}

#[cfg(test)]
impl Gates {
    /// Starts at `rate`, with at most `per_host` requests in flight.
    pub(crate) fn starting_at(rate: f64, rate_max: Option<f64>, per_host: u32) -> Self {
        let options = LimitOptions { rate: Some(rate), rate_max, per_host: Some(per_host), tries: None };
        Self::new(Config::default(), &options).expect("within the bounds").0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::Exit;

    fn host() -> Authority {
        Authority::new("example.com").expect("a host")
    }

    fn entries(gates: &Gates) -> Vec<Entry> {
        std::iter::from_fn(|| gates.try_enter(&host()).ok()).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn rate_delays_the_next_request() {
        let gates = Gates::starting_at(2.0, Some(8.0), 8);
        assert_eq!(entries(&gates).len(), 1);
        let half_a_second = Duration::from_millis(501);
        assert!(
            matches!(gates.try_enter(&host()), Err(Wait::Rate(span, Gate::Rate)) if span <= half_a_second)
        );
        assert_eq!(gates.view(&host()).unwrap().in_flight, 0, "the permit was returned");
    }

    #[tokio::test(start_paused = true)]
    async fn slots_bound_requests_in_flight() {
        let gates = Gates::starting_at(1_000.0, None, 3);
        let mut held = entries(&gates);
        while held.len() < 3 {
            tokio::time::advance(Duration::from_millis(1)).await;
            held.extend(gates.try_enter(&host()).ok());
        }
        tokio::time::advance(Duration::from_millis(100)).await;
        assert_eq!(gates.try_enter(&host()).unwrap_err(), Wait::Slot);
        held.pop().unwrap().settle(Outcome::success());
        assert!(gates.try_enter(&host()).is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn pauses_of_a_host_differ_from_its_rate() {
        let gates = Gates::starting_at(100.0, Some(100.0), 8);
        let pause = Duration::from_secs(30);
        // A hint on a rejection stops all requests once nothing was accepted since the last.
        for _ in 0..3 {
            tokio::time::advance(Duration::from_secs(1)).await;
            if let Ok(entry) = gates.try_enter(&host()) {
                entry.settle(Outcome::overload().retry_after(pause));
            }
        }
        assert!(matches!(gates.try_enter(&host()), Err(Wait::Pause(span)) if span > pause / 2));
        let other = Authority::new("other.example").expect("a host");
        let held = gates.space(&other, Duration::from_secs(5));
        assert!(gates.try_enter(&other).is_ok());
        assert_eq!(gates.try_enter(&other).unwrap_err(), Wait::Pause(Duration::from_secs(5)));
        drop(held);
        let third = Authority::new("third.example").expect("a host");
        for _ in 0..5 {
            tokio::time::advance(Duration::from_secs(10)).await;
            gates.try_enter(&third).unwrap().settle(Outcome::failure());
        }
        assert!(matches!(gates.try_enter(&third), Err(Wait::Circuit(_))));
    }

    /// A brake without a range is refused, and the refusal was ignored.
    #[tokio::test(start_paused = true)]
    async fn delay_of_robots_txt_applies_to_any_controller() {
        const LONG: Duration = Duration::from_hours(9_000);
        for (file, span, wanted) in [
            ("", 5, 5),
            ("controller = 'fixed'\nslots.max = 4", 5, 5),
            (
                "controller = 'brake'\nslots = { min = 1, max = 4 }\npace = { interval_min = '1s', interval_max = '1m' }",
                5,
                5,
            ),
            (
                "controller = 'brake'\nslots = { min = 4, max = 4 }\npace = { interval_min = '1s', interval_max = '1m' }",
                5,
                5,
            ),
            ("", LONG.as_secs(), PAUSE_MAX.as_secs()),
        ] {
            let config = Config::from_toml(file).unwrap();
            let gates = Gates::new(config, &LimitOptions::default()).unwrap().0;
            let _held = gates.space(&host(), Duration::from_secs(span));
            assert!(gates.try_enter(&host()).is_ok(), "{file}");
            let wanted = Wait::Pause(Duration::from_secs(wanted));
            assert_eq!(gates.try_enter(&host()).unwrap_err(), wanted, "{file}");
        }
    }

    #[test]
    fn extreme_rates_are_valid() {
        for rate in [0.01, 0.25, 1.0, 8.0, 1e6] {
            drop(Gates::starting_at(rate, Some(rate), 1));
            drop(Gates::starting_at(rate, None, 10_000));
        }
    }

    #[test]
    fn options_override_file_which_overrides_defaults() {
        let slots = |file: &str, per_host| {
            let options = LimitOptions { per_host, ..LimitOptions::default() };
            let (gates, retry) = Gates::new(Config::from_toml(file).unwrap(), &options).unwrap();
            let snapshot = gates.hosts.throttle(&host()).snapshot();
            (snapshot.slots_max, retry.attempts_max())
        };
        assert_eq!(slots("", None), (Some(8), 4));
        assert_eq!(slots("slots.max = 20\nretry.attempts = 2", None), (Some(20), 2));
        assert_eq!(slots("slots.max = 20", Some(3)), (Some(3), 4));
    }

    #[test]
    fn key_without_effect_is_refused() {
        for (file, why) in [
            ("waiters_max = 5", "`waiters_max` has no effect on a fetch"),
            ("budgets = ['tpm:90k/min']", "`budgets` has no effect on a fetch"),
            ("auto.rate_min = 5\nauto.rate_max = 2", "auto.rate_min"),
        ] {
            let failure = Gates::new(Config::from_toml(file).unwrap(), &LimitOptions::default()).unwrap_err();
            assert!(failure.exit == Exit::Usage && failure.what.contains(why), "{}", failure.what);
        }
    }

    #[test]
    fn contradiction_of_file_and_option_names_both() {
        let options = LimitOptions { rate: Some(20.0), ..LimitOptions::default() };
        let table = [
            ("auto.rate_max = 5", "`auto.rate_start` is 20 by --rate, and must be from 0.001 to 5"),
            (
                "controller = 'fixed'",
                "`auto.rate_start` is given by --rate, and has no effect because `controller` is fixed",
            ),
        ];
        for (file, why) in table {
            let failure = Gates::new(Config::from_toml(file).unwrap(), &options).unwrap_err();
            assert!(failure.what.starts_with(why), "{}", failure.what);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn rate_max_is_the_reason_at_the_ceiling_only() {
        let shown = |gates: &Gates| gates.limited_by(&host(), Gate::Rate).map(|limit| limit.to_string());
        let capped = Gates::starting_at(10.0, Some(10.0), 8);
        assert_eq!(entries(&capped).len(), 1);
        assert_eq!(shown(&capped).as_deref(), Some("--rate-max 10"));
        let free = Gates::starting_at(10.0, Some(100.0), 8);
        assert_eq!(entries(&free).len(), 1);
        assert_eq!(shown(&free), None);
        let file = Config::from_toml("auto = { rate_start = 5, rate_max = 5 }").unwrap();
        let by_file = Gates::new(file.clone(), &LimitOptions::default()).unwrap().0;
        assert_eq!(entries(&by_file).len(), 1);
        let shown_by_file = shown(&by_file);
        assert_eq!(
            shown_by_file.as_deref(),
            Some("auto.rate_max = 5 in --config"),
            "a maximum in the file is one, too"
        );
        let options = LimitOptions { rate: Some(6.5), rate_max: Some(6.5), ..LimitOptions::default() };
        let by_option = Gates::new(file, &options).unwrap().0;
        assert_eq!(entries(&by_option).len(), 1);
        assert_eq!(shown(&by_option).as_deref(), Some("--rate-max 6.5"));
    }
}
