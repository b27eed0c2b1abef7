//! Simulated upstreams, each with a hidden capacity, a latency and a script of outages, and callers that send
//! through one throttle per upstream. Time is virtual and randomness seeded, so every run is reproducible.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tidegate::{
    Aimd, Authority, CircuitState, Class, Classes, Completion, Controller, Cost, Keyed, Limits, Random,
    Refused, RunError, StopReason, Throttle,
};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::kit::millis;

/// How responses are classified.
static CLASSES: Classes = Classes::new();
/// The callers' timeout for a response.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(2);
/// How often the state of the circuit is sampled.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// One request in this many gets a 404.
const MISSING_ONE_IN: u64 = 50;

/// Limits of a host with an adaptive rate (AIMD) instead of `Auto`.
pub(crate) fn aimd_host() -> Limits {
    let builder = Throttle::host().rate(Aimd::RATE).controller(Controller::Aimd(Aimd::default()));
    builder.limits().expect("within the bounds")
}

/// Runs `future` on a runtime with paused time.
pub(crate) fn in_virtual_time<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    runtime.expect("a runtime without I/O").block_on(future)
}

/// The condition of an upstream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Health {
    /// Serves requests up to its capacity, and returns 429 for the rest.
    Healthy,
    /// Returns 429 for everything, with or without a `Retry-After`.
    TooMany(Option<Duration>),
    /// Returns 503 for everything.
    Unavailable,
    /// Never responds.
    Silent,
}

/// The failures that a caller sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum UpstreamError {
    TooMany(Option<Duration>),
    Unavailable,
    TimedOut,
    Missing,
}

/// The capacity of an upstream: a token bucket, or a fixed window.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Capacity {
    Bucket { per_second: f64, burst: f64 },
    Window { requests: u32, span: Duration },
}

/// The remaining capacity of an upstream.
#[derive(Debug)]
struct Allowance {
    left: f64,
    since: Duration,
    random: Random,
}

/// One request as the upstream received it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Arrival {
    pub(crate) at: Duration,
    /// When the caller got a response or timed out; `None` while the request is in flight.
    pub(crate) result: Option<(Duration, Result<(), UpstreamError>)>,
}

/// An upstream and everything it recorded.
#[derive(Debug)]
pub(crate) struct Upstream {
    pub(crate) host: Authority,
    capacity: Capacity,
    latency: Duration,
    /// When each condition begins.
    script: Vec<(Duration, Health)>,
    started: Instant,
    allowance: Mutex<Allowance>,
    arrivals: Mutex<Vec<Arrival>>,
    calls: Mutex<Vec<Call>>,
    circuit: Mutex<Vec<(Duration, CircuitState)>>,
}

/// One call of `run`, with all its attempts.
#[derive(Debug, Clone, Copy)]
struct Call {
    attempts: u32,
    /// Whether an attempt failed with a transient error.
    saw_failure: bool,
}

impl Upstream {
    pub(crate) fn new(host: &str, capacity: Capacity, latency: Duration, seed: u64) -> Self {
        let left = match capacity {
            Capacity::Bucket { burst, .. } => burst,
            Capacity::Window { requests, .. } => f64::from(requests),
        };
        Self {
            host: Authority::new(host).expect("a host"),
            capacity,
            latency,
            script: vec![(Duration::ZERO, Health::Healthy)],
            started: Instant::now(),
            allowance: Mutex::new(Allowance { left, since: Duration::ZERO, random: Random::seeded(seed) }),
            arrivals: Mutex::default(),
            calls: Mutex::default(),
            circuit: Mutex::default(),
        }
    }

    /// Changes the condition from `at` on.
    pub(crate) fn becomes(mut self, at: Duration, health: Health) -> Self {
        self.script.push((at, health));
        self
    }

    pub(crate) fn now(&self) -> Duration {
        self.started.elapsed()
    }

    /// Sends one request with the callers' timeout.
    async fn call(&self) -> Result<(), UpstreamError> {
        let index = {
            let mut arrivals = lock(&self.arrivals);
            arrivals.push(Arrival { at: self.now(), result: None });
            arrivals.len() - 1
        };
        let result = timeout(CLIENT_TIMEOUT, self.answer()).await.unwrap_or(Err(UpstreamError::TimedOut));
        lock(&self.arrivals)[index].result = Some((self.now(), result));
        result
    }

    /// Decides on arrival, and responds one latency later.
    async fn answer(&self) -> Result<(), UpstreamError> {
        let now = self.now();
        let (_, health) =
            self.script.iter().rfind(|(from, _)| *from <= now).expect("the script begins at zero");
        let (answer, latency) = {
            let mut allowance = lock(&self.allowance);
            let answer = match *health {
                Health::Healthy if !allowance.take(self.capacity, now) => Err(UpstreamError::TooMany(None)),
                Health::Healthy if allowance.random.below(MISSING_ONE_IN) == 0 => Err(UpstreamError::Missing),
                Health::Healthy => Ok(()),
                Health::TooMany(hint) => Err(UpstreamError::TooMany(hint)),
                Health::Unavailable => Err(UpstreamError::Unavailable),
                Health::Silent => Err(UpstreamError::TimedOut),
            };
            // Between half and one and a half times the configured latency.
            let latency = self.latency / 2 + millis(allowance.random.below(millis_of(self.latency)));
            (answer, latency)
        };
        if answer == Err(UpstreamError::TimedOut) {
            std::future::pending::<()>().await;
        }
        sleep(latency).await;
        answer
    }

    pub(crate) fn arrivals(&self) -> Vec<Arrival> {
        lock(&self.arrivals).clone()
    }

    /// The requests that arrived from `from` until `until`, and how many of them were served with a 200 or
    /// 404.
    pub(crate) fn served(&self, from: Duration, until: Duration) -> Share {
        let arrivals = lock(&self.arrivals);
        let during = arrivals.iter().filter(|arrival| (from..until).contains(&arrival.at));
        let is_served =
            |arrival: &&Arrival| matches!(arrival.result, Some((_, Ok(()) | Err(UpstreamError::Missing))));
        Share { of: during.clone().count(), part: during.filter(is_served).count() }
    }

    /// Every state change of the circuit, with its time.
    pub(crate) fn circuit(&self) -> Vec<(Duration, CircuitState)> {
        lock(&self.circuit).clone()
    }

    /// How long after `from` the circuit was first in this state.
    pub(crate) fn seen_after(&self, from: Duration, state: CircuitState) -> Option<Duration> {
        let circuit = self.circuit();
        let seen = circuit.iter().find(|(at, seen)| *at >= from && *seen == state);
        seen.map(|(at, _)| at.saturating_sub(from))
    }

    /// The calls that met a transient failure, and the total of their attempts.
    pub(crate) fn attempts_of_failing_calls(&self) -> (u32, u32) {
        let calls = lock(&self.calls);
        let failing = calls.iter().filter(|call| call.saw_failure);
        failing.fold((0, 0), |(calls, attempts), call| (calls + 1, attempts + call.attempts))
    }
}

/// A part of a total.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Share {
    pub(crate) part: usize,
    pub(crate) of: usize,
}

impl Share {
    /// Whether the part exceeds this percentage.
    pub(crate) const fn is_above(self, percent: usize) -> bool {
        self.part * 100 > self.of * percent
    }
}

impl Allowance {
    fn take(&mut self, capacity: Capacity, now: Duration) -> bool {
        match capacity {
            Capacity::Bucket { per_second, burst } => {
                let elapsed = now.saturating_sub(self.since).as_secs_f64();
                self.left = burst.min(elapsed.mul_add(per_second, self.left));
                self.since = now;
            }
            Capacity::Window { requests, span } => {
                if now >= self.since + span {
                    self.left = f64::from(requests);
                    self.since = now;
                }
            }
        }
        let is_available = self.left >= 1.0;
        self.left -= f64::from(u8::from(is_available));
        is_available
    }
}

/// How callers arrive.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Load {
    /// A closed loop: this many callers, each with one request at a time.
    Closed(u32),
    /// An open loop: one request per interval, give or take half of it, regardless of the others.
    Open(Duration),
}

/// Spawns callers of `upstream` and a sampler of its circuit, which run until the runtime ends.
pub(crate) fn drive(hosts: &Keyed<Authority>, upstream: &Arc<Upstream>, load: Load, seed: u64) {
    let (hosts, upstream) = (hosts.clone(), Arc::clone(upstream));
    tokio::spawn(record_circuit(hosts.clone(), Arc::clone(&upstream)));
    match load {
        Load::Closed(callers) => {
            for _ in 0..callers {
                let (hosts, upstream) = (hosts.clone(), Arc::clone(&upstream));
                tokio::spawn(async move {
                    loop {
                        if let Some(wait) = work(&hosts, &upstream).await {
                            sleep(wait).await;
                        }
                    }
                });
            }
        }
        Load::Open(every) => {
            let mut random = Random::seeded(seed);
            tokio::spawn(async move {
                loop {
                    sleep(every / 2 + millis(random.below(millis_of(every)))).await;
                    let (hosts, upstream) = (hosts.clone(), Arc::clone(&upstream));
                    tokio::spawn(async move { work(&hosts, &upstream).await });
                }
            });
        }
    }
}

/// Makes one call through `run`. Returns how long to back off if it was refused.
async fn work(hosts: &Keyed<Authority>, upstream: &Upstream) -> Option<Duration> {
    let call = Mutex::new(Call { attempts: 0, saw_failure: false });
    let result = hosts
        .throttle(&upstream.host)
        .runner()
        .classify(class)
        .run(Cost::request(), |_| async {
            let result = upstream.call().await;
            let mut call = lock(&call);
            call.attempts += 1;
            call.saw_failure |= !matches!(result, Ok(()) | Err(UpstreamError::Missing));
            result
        })
        .await;
    lock(&upstream.calls).push(*lock(&call));
    match result {
        Err(RunError::Refused(refused) | RunError::Failed { why: StopReason::Refused(refused), .. }) => {
            assert!(matches!(refused, Refused::CircuitOpen { .. }), "{refused}");
            refused.retry_after()
        }
        _ => None,
    }
}

/// 429 and 503 are overloads, a timeout is a network failure, and 404 counts as neither.
pub(crate) fn class(result: &Result<(), UpstreamError>) -> Class {
    let (result, hint) = match *result {
        Ok(()) => (Completion::Status(200), None),
        Err(UpstreamError::TooMany(hint)) => (Completion::Status(429), hint),
        Err(UpstreamError::Unavailable) => (Completion::Status(503), None),
        Err(UpstreamError::TimedOut) => (Completion::Timeout, None),
        Err(UpstreamError::Missing) => (Completion::Status(404), None),
    };
    let outcome = CLASSES.outcome(result);
    Class::new(CLASSES.classify(result), hint.map_or(outcome, |hint| outcome.retry_after(hint)))
}

/// Records every state change of the circuit. `get` neither creates a key nor keeps it alive.
async fn record_circuit(hosts: Keyed<Authority>, upstream: Arc<Upstream>) {
    let mut last = CircuitState::Closed;
    let mut next = upstream.started;
    loop {
        next += POLL_INTERVAL;
        sleep_until(next).await;
        let Some(throttle) = hosts.get(&upstream.host) else { continue };
        let state = throttle.snapshot().circuit.expect("a circuit").state;
        if state != last {
            last = state;
            lock(&upstream.circuit).push((upstream.now(), state));
        }
    }
}

/// Prints a measurement.
#[expect(clippy::print_stdout, reason = "shown with --nocapture, and where the test fails")]
pub(crate) fn report(line: std::fmt::Arguments<'_>) {
    println!("{line}");
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("the lock is not poisoned")
}

fn millis_of(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).expect("a short span")
}
