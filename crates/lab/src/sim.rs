//! The simulator: discrete events in virtual time, several clients, one upstream.
//!
//! The upstream counts at send time. Demand is closed (a number of workers that always want more) or open
//! (arrivals that do not wait for each other). There is no network jitter and no timer granularity.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, VecDeque};

use crate::client::{Client, Decision, Request};
use crate::rng::Rng;
use crate::scenario::{Scenario, Upstream};
use crate::upstream::{Kind, Quotas, Response, draw_cost, speed};

/// The width of a bin in seconds.
pub(crate) const BIN: f64 = 0.1;

/// The counts of one bin.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Bin {
    /// Units that succeeded.
    pub(crate) good: f64,
    /// The capacity in units.
    pub(crate) ideal: f64,
    pub(crate) sent: u32,
    pub(crate) rejected: u32,
}

/// One run.
#[derive(Debug, Default)]
pub(crate) struct Run {
    pub(crate) bins: Vec<Bin>,
    /// Units that succeeded in the second half, per client.
    pub(crate) late: Vec<f64>,
    /// Latencies of successes, in seconds.
    pub(crate) latencies: Vec<f32>,
    /// Waits of open arrivals until they were sent, in seconds.
    pub(crate) waits: Vec<f32>,
}

#[derive(Clone, Copy)]
enum Event {
    /// A client retries its gate, unless a later kick replaced this one.
    Kick {
        client: usize,
        version: u64,
    },
    Response {
        client: usize,
        handle: usize,
        response: Response,
    },
    /// The next request of a knee is done, unless their number has changed since.
    Shared {
        version: u64,
    },
    Arrival {
        client: usize,
    },
    Background,
}

struct ScheduledEvent {
    at: f64,
    number: u64,
    event: Event,
}

impl PartialEq for ScheduledEvent {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}

impl Eq for ScheduledEvent {}

impl PartialOrd for ScheduledEvent {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for ScheduledEvent {
    /// The earliest is the greatest: `BinaryHeap` pops that first.
    fn cmp(&self, other: &Self) -> Ordering {
        other.at.total_cmp(&self.at).then(other.number.cmp(&self.number))
    }
}

/// A request that a knee processes; done when the work per request reaches `done_at`.
struct Job {
    done_at: f64,
    client: usize,
    handle: usize,
    response: Response,
}

impl PartialEq for Job {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Job {}

impl PartialOrd for Job {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Job {
    fn cmp(&self, other: &Self) -> Ordering {
        other.done_at.total_cmp(&self.done_at)
    }
}

struct Caller {
    client: Box<dyn Client>,
    in_flight: usize,
    kick_at: f64,
    version: u64,
    queue: VecDeque<f64>,
    /// The cost of the next request, drawn once.
    next: Option<(f64, f64)>,
}

struct Simulator<'a> {
    scenario: &'a Scenario,
    rng: Rng,
    events: BinaryHeap<ScheduledEvent>,
    scheduled: u64,
    callers: Vec<Caller>,
    quotas: Quotas,
    in_flight: usize,
    jobs: BinaryHeap<Job>,
    /// Work done per request of a knee, as of `worked_at`.
    work: f64,
    worked_at: f64,
    shared_version: u64,
    is_background_on: bool,
    background_phase: f64,
    run: Run,
}

/// Runs a scenario with a client of `make` for each of its clients; the same seed gives the same run.
pub(crate) fn run(scenario: &Scenario, seed: u64, make: &dyn Fn(u64) -> Box<dyn Client>) -> Run {
    let mut simulator = Simulator::new(scenario, seed, make);
    simulator.start();
    while let Some(ScheduledEvent { at, event, .. }) = simulator.events.pop() {
        if at > scenario.seconds {
            break;
        }
        if let Some(client) = simulator.handle(event, at) {
            simulator.pump(client, at);
        }
    }
    simulator.run
}

impl<'a> Simulator<'a> {
    fn new(scenario: &'a Scenario, seed: u64, make: &dyn Fn(u64) -> Box<dyn Client>) -> Self {
        let bins = index(scenario.seconds) + 2;
        let bin = |index: usize| Bin { ideal: BIN * scenario.ideal_at(start(index)), ..Bin::default() };
        let caller = |number: u64| Caller {
            client: make(seed * 1_000 + number),
            in_flight: 0,
            kick_at: f64::INFINITY,
            version: 0,
            queue: VecDeque::new(),
            next: None,
        };
        Self {
            scenario,
            rng: Rng::seeded(seed.wrapping_mul(0x1234_5678_9ABC_DEF1) ^ 0x4D),
            events: BinaryHeap::new(),
            scheduled: 0,
            callers: (0..scenario.clients as u64).map(caller).collect(),
            quotas: Quotas::new(scenario),
            in_flight: 0,
            jobs: BinaryHeap::new(),
            work: 0.0,
            worked_at: 0.0,
            shared_version: 0,
            is_background_on: false,
            background_phase: 0.0,
            run: Run {
                bins: (0..bins).map(bin).collect(),
                late: vec![0.0; scenario.clients],
                ..Run::default()
            },
        }
    }

    fn start(&mut self) {
        let mut at = 0.0;
        for client in 0..self.callers.len() {
            let event = match self.scenario.arrivals {
                Some(_) => Event::Arrival { client },
                None => Event::Kick { client, version: 0 },
            };
            self.schedule(at, event);
            at += self.scenario.stagger;
        }
        if self.scenario.background.is_some() {
            self.schedule(0.0, Event::Background);
        }
    }

    fn schedule(&mut self, at: f64, event: Event) {
        self.scheduled += 1;
        self.events.push(ScheduledEvent { at, number: self.scheduled, event });
    }

    /// Handles an event; returns the client that may send now.
    fn handle(&mut self, event: Event, now: f64) -> Option<usize> {
        match event {
            Event::Kick { client, version } => {
                let caller = &mut self.callers[client];
                if version != caller.version {
                    return None;
                }
                caller.kick_at = f64::INFINITY;
                Some(client)
            }
            Event::Arrival { client } => {
                self.callers[client].queue.push_back(now);
                let gap = self.rng.exponential(self.scenario.arrivals?);
                self.schedule(now + gap, Event::Arrival { client });
                Some(client)
            }
            Event::Background => {
                self.background(now);
                None
            }
            Event::Shared { version } => {
                if version == self.shared_version {
                    self.finish_jobs(now);
                }
                None
            }
            Event::Response { client, handle, response } => {
                self.respond(client, handle, &response, now);
                Some(client)
            }
        }
    }

    fn background(&mut self, now: f64) {
        let Some((share, length)) = self.scenario.background else { return };
        let phase = (now / length).floor();
        if phase > self.background_phase {
            self.background_phase = phase;
            self.is_background_on = !self.is_background_on;
        }
        if self.is_background_on {
            self.run.bins[index(now)].ideal -= self.quotas.take_for_others(now);
            let rate = self.scenario.capacity_at(now) / self.scenario.unit() * share;
            let gap = self.rng.exponential(rate);
            self.schedule(now + gap, Event::Background);
        } else {
            self.schedule((phase + 1.0) * length + 1e-9, Event::Background);
        }
    }

    fn respond(&mut self, client: usize, handle: usize, response: &Response, now: f64) {
        let caller = &mut self.callers[client];
        caller.in_flight -= 1;
        self.in_flight -= 1;
        match response.kind {
            Kind::Success => {
                if !self.scenario.counts_on_arrival() {
                    self.run.bins[index(now)].good += response.units;
                }
                if now > self.scenario.seconds / 2.0 {
                    self.run.late[client] += response.units;
                }
                self.run.latencies.push(seconds(now - response.sent_at));
            }
            Kind::Rejected => self.run.bins[index(response.sent_at)].rejected += 1,
            Kind::Error => {}
        }
        caller.client.done(now, handle, response);
    }

    /// Sends requests of a client as long as it wants to and is allowed to.
    fn pump(&mut self, client: usize, now: f64) {
        loop {
            let caller = &mut self.callers[client];
            let wants = match self.scenario.arrivals {
                Some(_) => !caller.queue.is_empty(),
                None => caller.in_flight < self.scenario.workers,
            };
            if !wants {
                return;
            }
            let (scenario, rng) = (self.scenario, &mut self.rng);
            let (units, tokens) = *caller.next.get_or_insert_with(|| draw_cost(scenario, now, rng));
            let request = Request { units, tokens };
            match caller.client.ask(now, request) {
                Decision::Send(handle) => self.send(client, handle, request, now),
                Decision::OnResponse => return,
                Decision::NotBefore(at) => {
                    let at = at.max(now + 1e-9);
                    if caller.kick_at > at + 1e-12 || caller.kick_at <= now {
                        caller.version += 1;
                        caller.kick_at = at;
                        let version = caller.version;
                        self.schedule(at, Event::Kick { client, version });
                    }
                    return;
                }
            }
        }
    }

    fn send(&mut self, client: usize, handle: usize, request: Request, now: f64) {
        let caller = &mut self.callers[client];
        caller.in_flight += 1;
        caller.next = None;
        if let Some(arrived) = caller.queue.pop_front() {
            self.run.waits.push(seconds(now - arrived));
        }
        self.in_flight += 1;
        self.run.bins[index(now)].sent += 1;
        let latency =
            self.rng.lognormal(self.scenario.latency * self.scenario.slowness_at(now), self.scenario.sigma);
        let verdict = self.quotas.receive(request.units, request.tokens, self.in_flight, now);
        let kind = match verdict.is_accepted {
            false => Kind::Rejected,
            true if self.scenario.errors > 0.0 && self.rng.uniform() < self.scenario.errors => Kind::Error,
            true => Kind::Success,
        };
        // Counted now, because a run that ends before the response has still used the quota.
        if kind == Kind::Success && self.scenario.counts_on_arrival() {
            self.run.bins[index(now)].good += request.units;
        }
        let response = Response {
            kind,
            sent_at: now,
            units: request.units,
            retry_after: verdict.retry_after,
            exceeded: verdict.exceeded,
            quota: verdict.quota,
        };
        match (self.scenario.upstream, kind) {
            (Upstream::Knee { .. }, Kind::Success) => {
                self.do_work(now);
                self.jobs.push(Job { done_at: self.work + latency, client, handle, response });
                self.schedule_jobs(now);
            }
            (_, Kind::Rejected) => {
                let back = self.scenario.reject_latency * (0.8 + 0.4 * self.rng.uniform());
                self.schedule(now + back, Event::Response { client, handle, response });
            }
            _ => self.schedule(now + latency, Event::Response { client, handle, response }),
        }
    }

    /// The work per second of each request of a knee.
    fn speed(&self, now: f64) -> f64 {
        match self.scenario.upstream {
            Upstream::Knee { power } => speed(power, self.scenario.capacity_at(now), self.jobs.len()),
            _ => 1.0,
        }
    }

    fn do_work(&mut self, now: f64) {
        self.work += (now - self.worked_at) * self.speed(now);
        self.worked_at = now;
    }

    fn finish_jobs(&mut self, now: f64) {
        self.do_work(now);
        while self.jobs.peek().is_some_and(|job| job.done_at <= self.work + 1e-12) {
            if let Some(Job { client, handle, response, .. }) = self.jobs.pop() {
                self.schedule(now, Event::Response { client, handle, response });
            }
        }
        self.schedule_jobs(now);
    }

    fn schedule_jobs(&mut self, now: f64) {
        self.shared_version += 1;
        if let Some(job) = self.jobs.peek() {
            let at = now + (job.done_at - self.work) / self.speed(now);
            // At least once a second, because the knee itself may change.
            let version = self.shared_version;
            self.schedule(at.min(now + 1.0), Event::Shared { version });
        }
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "times are positive and short")]
pub(crate) fn index(at: f64) -> usize {
    (at / BIN) as usize
}

#[expect(clippy::cast_precision_loss, reason = "bins are few")]
pub(crate) fn start(bin: usize) -> f64 {
    bin as f64 * BIN
}

#[expect(clippy::cast_possible_truncation, reason = "a millionth of a second is enough")]
const fn seconds(span: f64) -> f32 {
    span as f32
}
