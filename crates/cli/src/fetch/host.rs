//! The state of one host: its queues, the robots.txt rules of its sites, and its counts.

use std::collections::VecDeque;
use std::time::Duration;

use tidegate::{Authority, Kind};
use tokio::time::Instant;

use super::address::{Address, Key};
use super::file_name::FileName;
use super::frontier::HostId;
use super::gates::{ThrottleState, UserLimit};
use super::partial::Partial;
use super::robots::RobotsRules;
use super::spill_queue::SpillQueue;
use super::tally::Tally;

/// A request to make: a page or a robots.txt, and its history so far.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) kind: JobKind,
    /// The current address, after redirects.
    pub(crate) at: Address,
    /// Redirects followed so far.
    pub(crate) hops: u32,
    /// Attempts since the last redirect.
    pub(crate) tries: u32,
    /// Those of them that the host rejected until later. They do not count: a host that only rejects is given up.
    pub(crate) rejections: u32,
    /// Attempts in all.
    pub(crate) attempts: u32,
    /// Whether a failure of it has counted against the current host.
    pub(crate) has_failed: bool,
    /// Whether it was started while the circuit was not closed.
    pub(crate) is_probe: bool,
    /// What has arrived of the page.
    pub(crate) partial: Option<Partial>,
}

impl Job {
    pub(crate) const fn new(kind: JobKind, at: Address) -> Self {
        Self {
            kind,
            at,
            hops: 0,
            tries: 0,
            rejections: 0,
            attempts: 0,
            has_failed: false,
            is_probe: false,
            partial: None,
        }
    }

    /// The job after a redirect, with no attempts at the new address.
    pub(crate) fn redirected(self, at: Address) -> Self {
        Self { at, hops: self.hops + 1, tries: 0, rejections: 0, has_failed: false, ..self }
    }
}

/// What a job fetches.
#[derive(Debug)]
pub(crate) enum JobKind {
    Page(Page),
    /// The robots.txt of the host's HTTP or HTTPS site.
    Robots {
        of: HostId,
        is_https: bool,
    },
}

/// A page.
#[derive(Debug)]
pub(crate) struct Page {
    /// The address as requested.
    pub(crate) address: Address,
    pub(crate) key: Key,
    pub(crate) file: FileName,
    /// The host of the requested address, whose counts include the page.
    pub(crate) host: HostId,
}

/// The scheduling state of a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RunState {
    /// It has no work.
    Idle,
    /// It has work, and is in the ready queue.
    Ready,
    /// It has work, and waits until this time, or for one of its requests to end.
    Waiting { until: Option<Instant> },
}

/// A host.
#[derive(Debug)]
pub(crate) struct Host {
    pub(crate) authority: Authority,
    /// The rules of its HTTP site and of its HTTPS site.
    pub(crate) rules: [RobotsRules; 2],
    /// Keeps the throttle with the delay that the rules demand from being evicted.
    pub(crate) throttle: Option<tidegate::Throttle>,
    /// The throttle's state when the host was last idle: an idle throttle is evicted after some minutes.
    pub(crate) throttle_state: Option<ThrottleState>,
    /// Requests for robots.txt, which go first.
    pub(crate) urgent: VecDeque<Job>,
    /// Pages redirected here, and the next page while it waits for the throttle. They go next.
    pub(crate) started: VecDeque<Job>,
    /// Pages that have not been started, before all pages that have failed.
    pub(crate) queue: SpillQueue,
    /// Pages that failed in an earlier run.
    pub(crate) failed_before: SpillQueue,
    /// Pages due for a retry. They go last: the retries of a few broken pages must not delay the others, nor
    /// be all that a half-open circuit is probed with.
    pub(crate) retries: VecDeque<Job>,
    pub(crate) in_flight: u32,
    /// Jobs that wait for a retry.
    pub(crate) delayed: u32,
    /// Pages of this host that were started and have not ended, even if redirected elsewhere.
    pub(crate) unfinished: u64,
    pub(crate) state: RunState,
    /// Changes with each turn, so that stale timers are recognized.
    pub(crate) ticket: u64,
    pub(crate) tally: Tally,
    /// Start of the first and of the last request.
    pub(crate) requested: Option<(Instant, Instant)>,
    /// The first and the last failure of the current series.
    pub(crate) failing: Option<(Instant, Instant)>,
    /// The place in the queue that the next probe is taken from. It changes if a probe fails.
    pub(crate) probe_place: u32,
    /// Why the host was given up.
    pub(crate) gave_up: Option<String>,
    /// The limit of the user that its last wait for the rate was due to.
    pub(crate) limited_by: Option<UserLimit>,
    /// Recent pages per second, a moving average.
    pub(crate) speed: f64,
    /// Pages that had ended at the last update of the speed.
    pub(crate) ended_before: u64,
}

impl Host {
    pub(crate) fn new(authority: Authority, ticket: u64) -> Self {
        Self {
            authority,
            rules: [RobotsRules::Unknown, RobotsRules::Unknown],
            throttle: None,
            throttle_state: None,
            urgent: VecDeque::new(),
            started: VecDeque::new(),
            queue: SpillQueue::default(),
            failed_before: SpillQueue::default(),
            retries: VecDeque::new(),
            in_flight: 0,
            delayed: 0,
            unfinished: 0,
            state: RunState::Idle,
            ticket,
            tally: Tally::default(),
            requested: None,
            failing: None,
            probe_place: 0,
            gave_up: None,
            limited_by: None,
            speed: 0.0,
            ended_before: 0,
        }
    }

    pub(crate) fn has_work(&self) -> bool {
        !(self.urgent.is_empty() && self.started.is_empty() && self.retries.is_empty()) || self.has_new()
    }

    /// Whether a page is left that was not started in this run.
    pub(crate) fn has_new(&self) -> bool {
        !(self.queue.is_empty() && self.failed_before.is_empty())
    }

    /// Pages that were not started in this run and are in memory.
    pub(crate) fn in_memory(&self) -> usize {
        self.queue.in_memory() + self.failed_before.in_memory()
    }

    /// Whether evicting it would lose nothing but its rules and counts.
    pub(crate) fn is_idle(&self) -> bool {
        let is_robots_pending = self.rules.iter().any(|rules| matches!(rules, RobotsRules::Pending));
        !self.has_work()
            && !is_robots_pending
            && self.in_flight == 0
            && self.delayed == 0
            && self.unfinished == 0
    }

    /// Pages that have not ended.
    pub(crate) fn remaining(&self) -> u64 {
        self.queue.len() + self.failed_before.len() + self.unfinished
    }

    /// Counts a response. A series of failures ends with any response that is none, and each page counts once.
    pub(crate) fn on_response(&mut self, kind: Kind, is_repeated: bool) {
        let now = Instant::now();
        self.failing = match kind {
            _ if is_repeated => self.failing,
            Kind::Failure | Kind::Overload => Some((self.failing.map_or(now, |(first, _)| first), now)),
            _ => None,
        };
    }

    /// The duration of the current series of failures.
    pub(crate) fn failing_for(&self) -> Duration {
        self.failing.map_or(Duration::ZERO, |(first, last)| last.saturating_duration_since(first))
    }

    pub(crate) const fn rules_of(&mut self, is_https: bool) -> &mut RobotsRules {
        let [http, https] = &mut self.rules;
        if is_https { https } else { http }
    }
}
