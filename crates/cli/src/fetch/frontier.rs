//! The scheduler: round robin over hosts, so that a waiting host blocks no other.
//!
//! Hosts with work are in a ready queue. Each turn starts one request or yields the time until which the host
//! waits; then it leaves the queue, and a timer puts it back. A waiting host thus occupies no worker, and a
//! host with a million pages gets no more turns than one with two. Nothing here awaits or sends: `crawl.rs`
//! does.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use tidegate::{Authority, Kind, Random, Retry};
use tokio::time::Instant;

use super::address::{Address, Key};
use super::attempt::AttemptResult;
use super::file_name::file_name;
use super::folder::Folder;
use super::gates::{Entry, Gates, ThrottleState, Wait};
use super::host::{Host, Job, JobKind, Page, RunState};
use super::result::{PageFailure, PageOutcome, PageResult, SkipReason};
use super::robots::RobotsRules;
use super::spill_queue;
use super::tally::Tally;
use crate::format;

/// Addresses in memory; more input is read when there is space.
pub(crate) const IN_MEMORY_MAX: usize = 100_000;
/// Idle hosts whose rules and counts are cached.
const HOSTS_MAX: usize = 10_000;
/// Pages in progress: started, redirected or due for a retry, and not yet written.
const IN_PROGRESS_MAX: usize = 20_000;
/// Results without a request that are collected before they are written.
const FINISHED_MAX: usize = 256;

/// Delay before a host is tried again that waits for capacity of others.
const CROWDED_DELAY: Duration = Duration::from_millis(100);

/// The index of a host.
pub(crate) type HostId = usize;

/// Settings for all hosts.
#[derive(Debug)]
pub(crate) struct HostOptions {
    pub(crate) ignores_robots: bool,
    /// A host that pauses or fails for longer is given up.
    pub(crate) patience: Duration,
    pub(crate) retry: Retry,
    pub(crate) user_agent: String,
}

/// All hosts and their queues.
pub(crate) struct Frontier {
    pub(crate) hosts: Vec<Option<Host>>,
    pub(crate) gates: Gates,
    pub(crate) options: HostOptions,
    folder: Arc<Folder>,
    by_name: HashMap<Authority, HostId>,
    free: Vec<HostId>,
    /// The ready queue.
    ready: VecDeque<HostId>,
    due: BTreeMap<(Instant, u64), Due>,
    /// Idle hosts, the longest idle first.
    idle: VecDeque<(HostId, u64)>,
    /// Pages that were started and are not written yet.
    in_progress: HashSet<Key>,
    /// Pages that ended without a request and are not written yet.
    pub(crate) finished: Vec<PageResult>,
    /// Addresses in memory.
    in_memory: usize,
    /// Pages read from the input.
    pub(crate) known: u64,
    /// The summed counts of evicted hosts, and their number.
    pub(crate) evicted: (Tally, u64),
    numbers: u64,
}

/// A timer entry.
enum Due {
    /// Wakes a host, if its ticket is still current.
    Wake(HostId, u64),
    Requeue(HostId, Box<Job>),
}

impl Due {
    fn into_job(self) -> Option<Job> {
        match self {
            Self::Requeue(_, job) => Some(*job),
            Self::Wake(..) => None,
        }
    }
}

/// A request that may be sent now.
#[derive(Debug)]
pub(crate) struct Start {
    pub(crate) host: HostId,
    pub(crate) job: Job,
    pub(crate) entry: Entry,
}

/// The result of a host's turn.
enum Pick {
    Start(Box<(Job, Entry)>),
    /// A page was decided without a request; the host continues at its next turn.
    Retry,
    Wait(Option<Instant>),
    Nothing,
}

impl Frontier {
    pub(crate) fn new(gates: Gates, folder: Arc<Folder>, options: HostOptions) -> Self {
        Self {
            hosts: Vec::new(),
            gates,
            options,
            folder,
            by_name: HashMap::new(),
            free: Vec::new(),
            ready: VecDeque::new(),
            due: BTreeMap::new(),
            idle: VecDeque::new(),
            in_progress: HashSet::new(),
            finished: Vec::new(),
            in_memory: 0,
            known: 0,
            evicted: (Tally::default(), 0),
            numbers: 0,
        }
    }

    pub(crate) fn host(&mut self, id: HostId) -> &mut Host {
        let Some(host) = self.hosts.get_mut(id).and_then(Option::as_mut) else {
            unreachable!("a host with work is never evicted")
        };
        host
    }

    /// Whether more input may be read.
    pub(crate) fn has_capacity(&self) -> bool {
        self.in_memory < IN_MEMORY_MAX && self.finished.len() < FINISHED_MAX
    }

    /// Whether no work is left, now or later.
    pub(crate) fn is_empty(&self) -> bool {
        self.ready.is_empty()
            && self.in_progress.is_empty()
            && self.finished.is_empty()
            && self.in_memory == 0
    }

    /// Adds a page to fetch. One that failed in an earlier run goes after those that did not.
    pub(crate) fn add(&mut self, address: Address) -> io::Result<()> {
        self.known += 1;
        let id = self.host_id(&address.host);
        let (number, folder) = (self.number(), Arc::clone(&self.folder));
        let host = self.host(id);
        let in_memory = host.in_memory();
        let has_failed = folder.has_failed(Key::of(&address.url));
        let queue = if has_failed { &mut host.failed_before } else { &mut host.queue };
        let path = || spill_queue::spill_path(&folder.spill_folder(), number);
        queue.push(String::from(address.url).into(), path)?;
        let more = host.in_memory() - in_memory;
        self.in_memory += more;
        self.wake_idle(id);
        Ok(())
    }

    /// Adds a page that was fetched before.
    pub(crate) fn skip(&mut self, address: Address) {
        self.known += 1;
        let host = self.host_id(&address.host);
        let url = String::from(address.url).into();
        self.host(host).unfinished += 1;
        let outcome = PageOutcome::Skipped(SkipReason::Exists);
        self.finished.push(PageResult {
            url,
            host: Some(host),
            key: None,
            attempts: 0,
            partial: None,
            outcome,
        });
    }

    /// The next request and its host; `None` if all hosts wait.
    pub(crate) fn next(&mut self, now: Instant) -> io::Result<Option<Start>> {
        while self.finished.len() < FINISHED_MAX {
            let Some(id) = self.ready.pop_front() else { break };
            match self.pick(id, now)? {
                Pick::Start(start) => {
                    let (job, entry) = *start;
                    let host = self.host(id);
                    host.in_flight += 1;
                    host.requested = Some((host.requested.map_or(now, |(first, _)| first), now));
                    if host.has_work() {
                        self.ready.push_back(id);
                    } else {
                        host.state = RunState::Idle;
                    }
                    return Ok(Some(Start { host: id, job, entry }));
                }
                Pick::Retry => self.ready.push_back(id),
                Pick::Wait(until) => {
                    let ticket = self.number();
                    let host = self.host(id);
                    (host.state, host.ticket) = (RunState::Waiting { until }, ticket);
                    if let Some(until) = until {
                        self.due.insert((until, ticket), Due::Wake(id, ticket));
                    }
                }
                Pick::Nothing => {
                    self.host(id).state = RunState::Idle;
                    self.mark_idle(id);
                }
            }
        }
        Ok(None)
    }

    fn pick(&mut self, id: HostId, now: Instant) -> io::Result<Pick> {
        let is_crowded = self.in_progress.len() >= IN_PROGRESS_MAX;
        let host = self.host(id);
        if host.urgent.is_empty() && host.started.is_empty() {
            let may_start = host.has_new() && !is_crowded;
            if !may_start && let Some(job) = host.retries.pop_front() {
                host.started.push_back(job);
            } else if host.has_new() && is_crowded {
                // Bounds the pages in progress if fast hosts redirect to a slow one: pages must end before
                // new ones start.
                return Ok(Pick::Wait(Some(now + CROWDED_DELAY)));
            } else if !self.start_next(id)? {
                return Ok(if self.host(id).has_work() { Pick::Retry } else { Pick::Nothing });
            }
        }
        let (ignores_robots, patience) = (self.options.ignores_robots, self.options.patience);
        let host = self.host(id);
        let is_urgent = !host.urgent.is_empty();
        if let Some(why) = host.gave_up.clone() {
            if let Some(job) = host.urgent.pop_front().or_else(|| host.started.pop_front()) {
                self.end_unavailable(job, why, now);
            }
            return Ok(Pick::Retry);
        }
        if !is_urgent
            && !ignores_robots
            && let Some(pick) = self.check_robots(id, now)
        {
            return Ok(pick);
        }
        let authority = self.host(id).authority.clone();
        let entry = self.gates.try_enter(&authority);
        let host = self.host(id);
        Ok(match entry {
            Ok(entry) => match host.urgent.pop_front().or_else(|| host.started.pop_front()) {
                Some(job) => Pick::Start(Box::new((job, entry))),
                None => Pick::Nothing,
            },
            // Rejections without a hint open no circuit: the host waits for its rate only.
            Err(wait) if host.failing_for() + wait.requested() > patience => {
                let patience = format::duration(patience);
                host.gave_up = Some(match wait {
                    Wait::Pause(_) => format!("it asks for a pause longer than --patience ({patience})"),
                    _ => format!("it has been failing for longer than --patience ({patience})"),
                });
                Pick::Retry
            }
            Err(Wait::Slot) if host.in_flight > 0 => Pick::Wait(None),
            // The host shares a throttle with hosts that exceed the key bound: their requests must end first.
            Err(Wait::Slot) => Pick::Wait(Some(now + CROWDED_DELAY)),
            Err(Wait::Rate(span, by)) => {
                self.host(id).limited_by = self.gates.limited_by(&authority, by);
                Pick::Wait(Some(now + span))
            }
            Err(Wait::Pause(span) | Wait::Circuit(span)) => Pick::Wait(Some(now + span)),
        })
    }

    /// Starts the next new page, unless it is skipped. Returns whether one was started.
    ///
    /// Pages next to each other often fail together, so a circuit is probed with pages from elsewhere in the queue.
    fn start_next(&mut self, id: HostId) -> io::Result<bool> {
        let is_probe = self.hosts[id]
            .as_ref()
            .is_some_and(|host| host.failing.is_some() && self.gates.is_failing(&host.authority));
        let host = self.host(id);
        let in_memory = host.in_memory();
        let queue = if host.queue.is_empty() { &mut host.failed_before } else { &mut host.queue };
        let url = if is_probe { queue.pop_at(host.probe_place)? } else { queue.pop()? };
        let after = host.in_memory();
        self.in_memory = self.in_memory + after - in_memory;
        let Some(url) = url else { return Ok(false) };
        let Ok(at) = Address::parse(&url) else { unreachable!("it was parsed when it was added") };
        self.host(id).unfinished += 1;
        let key = Key::of(&at.url);
        let file = file_name(&at, key);
        let skip = if self.in_progress.contains(&key) {
            Some(SkipReason::Duplicate)
        } else {
            self.folder.has(&file).then_some(SkipReason::Exists)
        };
        if let Some(skip) = skip {
            let outcome = PageOutcome::Skipped(skip);
            self.finished.push(PageResult {
                url,
                host: Some(id),
                key: None,
                attempts: 0,
                partial: None,
                outcome,
            });
            return Ok(false);
        }
        self.in_progress.insert(key);
        let kind = JobKind::Page(Page { address: at.clone(), key, file, host: id });
        let partial = self.folder.partial(key).cloned();
        self.host(id).started.push_back(Job { is_probe, partial, ..Job::new(kind, at) });
        Ok(true)
    }

    /// Checks robots.txt for the next page. Returns `None` if the page may be fetched.
    fn check_robots(&mut self, id: HostId, now: Instant) -> Option<Pick> {
        let host = self.host(id);
        let job = host.started.front()?;
        let (at, url) = (job.at.robots(), job.at.url.clone());
        let is_https = at.is_https();
        let rules = host.rules_of(is_https);
        match rules {
            RobotsRules::Unknown => {
                *rules = RobotsRules::Pending;
                let kind = JobKind::Robots { of: id, is_https };
                host.urgent.push_back(Job::new(kind, at));
                Some(Pick::Retry)
            }
            RobotsRules::Pending => Some(Pick::Wait(None)),
            RobotsRules::Unavailable { until, .. } if *until <= now => {
                *rules = RobotsRules::Unknown;
                Some(Pick::Retry)
            }
            RobotsRules::Unavailable { why, .. } => {
                let why = format!("robots.txt of {} is unavailable: {why}", at.host);
                let job = host.started.pop_front()?;
                self.end_unavailable(job, why, now);
                Some(Pick::Retry)
            }
            RobotsRules::Known(_) if rules.allow(&url) == Some(true) => None,
            RobotsRules::Known(_) => {
                let job = host.started.pop_front()?;
                self.end(job, PageOutcome::Skipped(SkipReason::Robots));
                Some(Pick::Retry)
            }
        }
    }

    /// Ends a job that may succeed in a later run.
    fn end_unavailable(&mut self, job: Job, why: String, now: Instant) {
        match job.kind {
            JobKind::Page(_) => {
                self.end(job, PageOutcome::Failed(PageFailure { why, status: None, is_final: false }));
            }
            JobKind::Robots { of, is_https } => {
                let rules = RobotsRules::read(
                    super::robots::RobotsResponse::Unavailable(why),
                    &self.options.user_agent,
                    now,
                );
                *self.host(of).rules_of(is_https) = rules;
                self.wake(of);
            }
        }
    }

    /// Counts the end of a request, and queues its job for a retry if that may succeed; else returns it.
    pub(crate) fn on_attempt_end(
        &mut self,
        id: HostId,
        mut job: Job,
        result: &AttemptResult,
        random: &mut Random,
    ) -> Option<Job> {
        let now = Instant::now();
        job.tries += 1;
        job.rejections += u32::from(result.is_rejection());
        job.attempts += 1;
        let host = self.host(id);
        host.in_flight -= 1;
        host.tally.attempts += 1;
        let is_error = matches!(result.kind, Kind::Failure | Kind::Overload) || result.is_retryable;
        host.tally.errors += u64::from(is_error);
        host.on_response(result.kind, result.is_of_page && job.has_failed);
        host.probe_place += u32::from(job.is_probe && result.kind == Kind::Failure);
        job.is_probe = false;
        job.has_failed |= result.is_of_page;
        self.on_request_end(id);
        if !result.is_retryable || job.tries - job.rejections >= self.options.retry.attempts_max() {
            return Some(job);
        }
        // A rejected page always waits for its own hint; the throttle decides whether its host pauses too.
        let delay =
            self.options.retry.delays().delay(job.tries - 1, random).max(result.hint.unwrap_or_default());
        // A page that has waited out its own hint may find all gates open, so the scheduler sees no wait.
        if self.host(id).failing_for().saturating_add(delay) > self.options.patience {
            return Some(job);
        }
        self.enqueue_later(id, job, now + delay);
        None
    }

    /// Hands a finished page over to be written.
    pub(crate) fn end(&mut self, job: Job, outcome: PageOutcome) {
        let JobKind::Page(page) = job.kind else { unreachable!("a robots.txt job has no page") };
        let (url, host, key) = (String::from(page.address.url).into(), Some(page.host), Some(page.key));
        let (attempts, partial) = (job.attempts, job.partial.map(Box::new));
        self.finished.push(PageResult { url, host, key, attempts, partial, outcome });
    }

    /// What the summary shows of a host's throttle.
    pub(crate) fn throttle_state(&self, host: &Host) -> ThrottleState {
        self.gates.state(&host.authority).or(host.throttle_state).unwrap_or_default()
    }

    /// Empties the queues when the fetch stops. Pages of which a part has arrived end, so that the next run
    /// requests the rest.
    pub(crate) fn stop(&mut self) {
        let due = std::mem::take(&mut self.due).into_values();
        let mut jobs: Vec<Job> = due.filter_map(Due::into_job).collect();
        for host in self.hosts.iter_mut().flatten() {
            jobs.extend(host.started.drain(..).chain(host.retries.drain(..)));
        }
        for job in jobs.into_iter().filter(|job| job.partial.is_some()) {
            let why = "interrupted before all of it arrived".to_owned();
            self.end(job, PageOutcome::Failed(PageFailure { why, status: None, is_final: false }));
        }
    }

    /// The page is written, and no longer in progress.
    pub(crate) fn on_written(&mut self, result: &PageResult) {
        if let Some(key) = result.key {
            self.in_progress.remove(&key);
        }
        if let Some(id) = result.host {
            let host = self.host(id);
            host.unfinished -= 1;
            host.tally.count(result);
            self.mark_idle(id);
        }
    }

    /// Queues a job at its host.
    pub(crate) fn enqueue(&mut self, job: Job) {
        let id = self.host_id(&job.at.host);
        let host = self.host(id);
        match job.kind {
            JobKind::Robots { .. } => {
                host.urgent.push_back(job);
                // The host may be waiting for its own rules, which these jobs do not need.
                self.on_request_end(id);
            }
            JobKind::Page(_) if job.tries > 0 => host.retries.push_back(job),
            JobKind::Page(_) => host.started.push_back(job),
        }
        self.wake_idle(id);
    }

    /// Queues a job at a later time.
    fn enqueue_later(&mut self, id: HostId, job: Job, at: Instant) {
        self.host(id).delayed += 1;
        let number = self.number();
        self.due.insert((at, number), Due::Requeue(id, Box::new(job)));
    }

    /// When the next timer is due.
    pub(crate) fn next_due(&self) -> Option<Instant> {
        self.due.first_key_value().map(|((at, _), _)| *at)
    }

    /// Fires the timers that are due.
    pub(crate) fn fire_timers(&mut self, now: Instant) {
        while let Some(first) = self.due.first_entry()
            && first.key().0 <= now
        {
            match first.remove() {
                Due::Wake(id, ticket) => {
                    let is_current = self.hosts[id].as_ref().is_some_and(|host| host.ticket == ticket);
                    if is_current {
                        self.wake(id);
                    }
                }
                Due::Requeue(id, job) => {
                    self.host(id).delayed -= 1;
                    self.enqueue(*job);
                }
            }
        }
    }

    /// Wakes a host that waits for one of its requests to end.
    pub(crate) fn on_request_end(&mut self, id: HostId) {
        if matches!(self.host(id).state, RunState::Waiting { until: None }) {
            self.wake(id);
        }
    }

    /// Makes an idle host ready. A host that waits keeps its timer: more work does not shorten the wait.
    fn wake_idle(&mut self, id: HostId) {
        if self.host(id).state == RunState::Idle {
            self.wake(id);
        }
    }

    /// Makes a host ready, if it has work and is not queued.
    pub(crate) fn wake(&mut self, id: HostId) {
        let ticket = self.number();
        let host = self.host(id);
        if host.state != RunState::Ready && host.has_work() {
            (host.state, host.ticket) = (RunState::Ready, ticket);
            self.ready.push_back(id);
        }
    }

    /// Marks a host idle and so evictable, if it is not queued and has no state beyond rules and counts.
    pub(crate) fn mark_idle(&mut self, id: HostId) {
        let ticket = self.number();
        let Self { hosts, gates, .. } = self;
        let Some(host) = hosts[id].as_mut() else { unreachable!("a host with work is never evicted") };
        if host.state == RunState::Idle && host.is_idle() {
            host.ticket = ticket;
            host.throttle_state = gates.state(&host.authority).or(host.throttle_state);
            self.idle.push_back((id, ticket));
            self.evict();
        }
    }

    /// Evicts the longest idle hosts beyond the bound.
    fn evict(&mut self) {
        while self.by_name.len() > HOSTS_MAX || self.idle.len() > 2 * HOSTS_MAX {
            let Some((id, ticket)) = self.idle.pop_front() else { break };
            let is_current = |host: &Host| host.ticket == ticket && host.is_idle();
            if self.by_name.len() > HOSTS_MAX && self.hosts[id].as_ref().is_some_and(is_current) {
                let Some(host) = self.hosts[id].take() else { unreachable!("the slot was checked above") };
                self.by_name.remove(&host.authority);
                self.evicted.0.add(&host.tally);
                self.evicted.1 += 1;
                self.free.push(id);
            }
        }
    }

    fn host_id(&mut self, authority: &Authority) -> HostId {
        if let Some(id) = self.by_name.get(authority) {
            return *id;
        }
        let host = Host::new(authority.clone(), self.number());
        let id = self.free.pop().unwrap_or(self.hosts.len());
        if id == self.hosts.len() {
            self.hosts.push(None);
        }
        self.hosts[id] = Some(host);
        self.by_name.insert(authority.clone(), id);
        id
    }

    const fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }
}

#[cfg(test)]
#[path = "frontier_tests.rs"]
mod tests;
