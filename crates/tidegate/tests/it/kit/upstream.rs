//! Far sides that are not there: each with a capacity nobody is told, a latency, and a script of moods; and the callers
//! that learn of all that through a throttle of its own for each. Time is virtual, chance is seeded: a run is the same
//! every time.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tidegate::{
    Aimd, Authority, CircuitState, Class, Classes, Controller, Cost, Ended, Keyed, Limits, Random, Refused,
    RunError, Stopped, Throttle,
};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::kit::millis;

/// What each answer means.
static CLASSES: Classes = Classes::new();
/// A caller gives up on an answer after this.
const PATIENCE: Duration = Duration::from_secs(2);
/// How often the circuit is looked at.
const LOOK: Duration = Duration::from_millis(20);
/// One request of so many asks for what is not there.
const MISSING_ONE_IN: u64 = 50;

/// Limits of a host with an adaptive rate (AIMD) instead of `Auto`.
pub(crate) fn aimd_host() -> Limits {
    let builder = Throttle::host().rate(Aimd::RATE).controller(Controller::Aimd(Aimd::default()));
    builder.limits().expect("within the bounds")
}

/// Runs `future` in a virtual time of its own.
pub(crate) fn in_virtual_time<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    runtime.expect("a runtime without I/O").block_on(future)
}

/// How a far side feels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mood {
    /// Answers what it has room for, and says 429 to the rest.
    Healthy,
    /// Says 429 to everything, with or without a time to come back.
    TooMany(Option<Duration>),
    /// Says 503 to everything.
    Unavailable,
    /// Never answers.
    Silent,
}

/// What a caller gets instead of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Trouble {
    TooMany(Option<Duration>),
    Unavailable,
    TimedOut,
    Missing,
}

/// How much a far side bears: by the second with a burst, or in windows of time.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Capacity {
    Bucket { per_second: f64, burst: f64 },
    Window { requests: u32, span: Duration },
}

/// What a far side has left.
#[derive(Debug)]
struct Room {
    left: f64,
    since: Duration,
    random: Random,
}

/// One request as the far side saw it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Arrival {
    pub(crate) at: Duration,
    /// When the caller had the answer, or had given up; none while it is out.
    pub(crate) ended: Option<(Duration, Result<(), Trouble>)>,
}

/// A far side, and all it has seen.
#[derive(Debug)]
pub(crate) struct FarSide {
    pub(crate) host: Authority,
    capacity: Capacity,
    latency: Duration,
    /// From when on it feels how.
    script: Vec<(Duration, Mood)>,
    born: Instant,
    room: Mutex<Room>,
    arrivals: Mutex<Vec<Arrival>>,
    calls: Mutex<Vec<Call>>,
    circuit: Mutex<Vec<(Duration, CircuitState)>>,
}

/// One piece of work as its caller saw it.
#[derive(Debug, Clone, Copy)]
struct Call {
    attempts: u32,
    /// Whether an attempt met a failure that may pass.
    is_hurt: bool,
}

impl FarSide {
    pub(crate) fn new(host: &str, capacity: Capacity, latency: Duration, seed: u64) -> Self {
        let left = match capacity {
            Capacity::Bucket { burst, .. } => burst,
            Capacity::Window { requests, .. } => f64::from(requests),
        };
        Self {
            host: Authority::new(host).expect("a host"),
            capacity,
            latency,
            script: vec![(Duration::ZERO, Mood::Healthy)],
            born: Instant::now(),
            room: Mutex::new(Room { left, since: Duration::ZERO, random: Random::seeded(seed) }),
            arrivals: Mutex::default(),
            calls: Mutex::default(),
            circuit: Mutex::default(),
        }
    }

    /// From `at` on it feels like this.
    pub(crate) fn turns(mut self, at: Duration, mood: Mood) -> Self {
        self.script.push((at, mood));
        self
    }

    pub(crate) fn now(&self) -> Duration {
        self.born.elapsed()
    }

    /// One request, as its caller sees it: answered in time, or given up.
    async fn call(&self) -> Result<(), Trouble> {
        let index = {
            let mut arrivals = hold(&self.arrivals);
            arrivals.push(Arrival { at: self.now(), ended: None });
            arrivals.len() - 1
        };
        let result = timeout(PATIENCE, self.answer()).await.unwrap_or(Err(Trouble::TimedOut));
        hold(&self.arrivals)[index].ended = Some((self.now(), result));
        result
    }

    /// Decides when the request arrives, answers a latency later.
    async fn answer(&self) -> Result<(), Trouble> {
        let now = self.now();
        let (_, mood) =
            self.script.iter().rfind(|(from, _)| *from <= now).expect("the script begins at zero");
        let (answer, latency) = {
            let mut room = hold(&self.room);
            let answer = match *mood {
                Mood::Healthy if !room.take(self.capacity, now) => Err(Trouble::TooMany(None)),
                Mood::Healthy if room.random.below(MISSING_ONE_IN) == 0 => Err(Trouble::Missing),
                Mood::Healthy => Ok(()),
                Mood::TooMany(hint) => Err(Trouble::TooMany(hint)),
                Mood::Unavailable => Err(Trouble::Unavailable),
                Mood::Silent => Err(Trouble::TimedOut),
            };
            // Half to one and a half of what is usual.
            let latency = self.latency / 2 + millis(room.random.below(millis_of(self.latency)));
            (answer, latency)
        };
        if answer == Err(Trouble::TimedOut) {
            std::future::pending::<()>().await;
        }
        sleep(latency).await;
        answer
    }

    pub(crate) fn arrivals(&self) -> Vec<Arrival> {
        hold(&self.arrivals).clone()
    }

    /// Requests that arrived from `from` until `until`, and of these the ones that were served: well, or with the true
    /// answer that there is no such thing.
    pub(crate) fn served(&self, from: Duration, until: Duration) -> Share {
        let arrivals = hold(&self.arrivals);
        let during = arrivals.iter().filter(|arrival| (from..until).contains(&arrival.at));
        let is_served =
            |arrival: &&Arrival| matches!(arrival.ended, Some((_, Ok(()) | Err(Trouble::Missing))));
        Share { of: during.clone().count(), part: during.filter(is_served).count() }
    }

    /// Every change of the circuit, and when.
    pub(crate) fn circuit(&self) -> Vec<(Duration, CircuitState)> {
        hold(&self.circuit).clone()
    }

    /// How long after `from` the circuit was first seen in this state.
    pub(crate) fn seen_after(&self, from: Duration, state: CircuitState) -> Option<Duration> {
        let circuit = self.circuit();
        let seen = circuit.iter().find(|(at, seen)| *at >= from && *seen == state);
        seen.map(|(at, _)| at.saturating_sub(from))
    }

    /// Work that met a failure which may pass, and the attempts that were made for it.
    pub(crate) fn attempts_when_hurt(&self) -> (u32, u32) {
        let calls = hold(&self.calls);
        let hurt = calls.iter().filter(|call| call.is_hurt);
        hurt.fold((0, 0), |(works, attempts), call| (works + 1, attempts + call.attempts))
    }
}

/// So many of so many.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Share {
    pub(crate) part: usize,
    pub(crate) of: usize,
}

impl Share {
    /// Whether it is more than so many percent.
    pub(crate) const fn is_above(self, percent: usize) -> bool {
        self.part * 100 > self.of * percent
    }
}

impl Room {
    fn take(&mut self, capacity: Capacity, now: Duration) -> bool {
        match capacity {
            Capacity::Bucket { per_second, burst } => {
                let gone = now.saturating_sub(self.since).as_secs_f64();
                self.left = burst.min(gone.mul_add(per_second, self.left));
                self.since = now;
            }
            Capacity::Window { requests, span } => {
                if now >= self.since + span {
                    self.left = f64::from(requests);
                    self.since = now;
                }
            }
        }
        let is_there = self.left >= 1.0;
        self.left -= f64::from(u8::from(is_there));
        is_there
    }
}

/// How callers come.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Load {
    /// So many, each of which asks again as soon as it is answered.
    Closed(u32),
    /// One every so often, give or take half of that, whatever became of the others.
    Open(Duration),
}

/// Sets callers loose on `far_side`, and looks at its circuit, until the runtime ends.
pub(crate) fn drive(hosts: &Keyed<Authority>, far_side: &Arc<FarSide>, load: Load, seed: u64) {
    let (hosts, far_side) = (hosts.clone(), Arc::clone(far_side));
    tokio::spawn(look(hosts.clone(), Arc::clone(&far_side)));
    match load {
        Load::Closed(callers) => {
            for _ in 0..callers {
                let (hosts, far_side) = (hosts.clone(), Arc::clone(&far_side));
                tokio::spawn(async move {
                    loop {
                        if let Some(wait) = work(&hosts, &far_side).await {
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
                    let (hosts, far_side) = (hosts.clone(), Arc::clone(&far_side));
                    tokio::spawn(async move { work(&hosts, &far_side).await });
                }
            });
        }
    }
}

/// One piece of work, with what `run` makes of it; answers how long to stay away where it was refused.
async fn work(hosts: &Keyed<Authority>, far_side: &FarSide) -> Option<Duration> {
    let call = Mutex::new(Call { attempts: 0, is_hurt: false });
    let result = hosts
        .throttle(&far_side.host)
        .runner()
        .classify(class)
        .run(Cost::request(), |_| async {
            let result = far_side.call().await;
            let mut call = hold(&call);
            call.attempts += 1;
            call.is_hurt |= !matches!(result, Ok(()) | Err(Trouble::Missing));
            result
        })
        .await;
    hold(&far_side.calls).push(*hold(&call));
    match result {
        Err(RunError::Refused(refused) | RunError::Failed { why: Stopped::Refused(refused), .. }) => {
            assert!(matches!(refused, Refused::CircuitOpen { .. }), "{refused}");
            refused.retry_after()
        }
        _ => None,
    }
}

/// 429 and 503 are overloads, silence is a failure of the network, and 404 is nobody's.
pub(crate) fn class(result: &Result<(), Trouble>) -> Class {
    let (ended, hint) = match *result {
        Ok(()) => (Ended::Status(200), None),
        Err(Trouble::TooMany(hint)) => (Ended::Status(429), hint),
        Err(Trouble::Unavailable) => (Ended::Status(503), None),
        Err(Trouble::TimedOut) => (Ended::Timeout, None),
        Err(Trouble::Missing) => (Ended::Status(404), None),
    };
    let outcome = CLASSES.outcome(ended);
    Class::sorted(CLASSES.sort(ended), hint.map_or(outcome, |hint| outcome.retry_after(hint)))
}

/// Writes down every change of the circuit. Looking neither makes a key nor keeps it.
async fn look(hosts: Keyed<Authority>, far_side: Arc<FarSide>) {
    let mut last = CircuitState::Closed;
    let mut next = far_side.born;
    loop {
        next += LOOK;
        sleep_until(next).await;
        let Some(throttle) = hosts.get(&far_side.host) else { continue };
        let state = throttle.snapshot().circuit.expect("a circuit").state;
        if state != last {
            last = state;
            hold(&far_side.circuit).push((far_side.now(), state));
        }
    }
}

/// Says what was measured, for those who run the test to read.
#[expect(clippy::print_stdout, reason = "shown with --nocapture, and where the test fails")]
pub(crate) fn report(line: std::fmt::Arguments<'_>) {
    println!("{line}");
}

fn hold<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("nobody panics while holding it")
}

fn millis_of(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).expect("a short span")
}
