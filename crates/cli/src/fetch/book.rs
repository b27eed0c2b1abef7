//! Who is asked next: hosts in turn, each when it may be, and none that waits is in anybody's way.
//!
//! Hosts with something to do stand in a round. Each in turn is asked for one page, or says until when it waits; then it leaves the
//! round and a timer brings it back. So a host that waits occupies nobody, and one with a million pages has no more turns than one
//! with two. Nothing here awaits or sends: `crawl.rs` does.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use tidegate::Authority;
use tokio::time::Instant;

use super::address::{Address, Key};
use super::ahead;
use super::ended::{Ended, Failed, Fate, Skip};
use super::folder::Folder;
use super::gates::{Entry, Gates, Wait};
use super::host::{Host, Job, Page, Turn, What};
use super::name::file_of;
use super::rules::Rules;
use super::tally::Tally;
use crate::words::span_words;

/// So many addresses are held in memory; what is behind them is read when there is room.
pub(crate) const HELD_MAX: usize = 100_000;
/// So many hosts are remembered with their rules and counts when there is nothing to do there.
const HOSTS_MAX: usize = 10_000;
/// So many pages are under way at most: begun, redirected or to be tried again, and not kept.
const UNDER_WAY_MAX: usize = 20_000;
/// So many endings are decided at once before they are kept.
const VERDICTS_MAX: usize = 256;

/// After so long a host is asked again that waits for others.
const CROWDED: Duration = Duration::from_millis(100);

/// A host, by its place.
pub(crate) type HostId = usize;

/// What holds for all hosts.
#[derive(Debug)]
pub(crate) struct Manners {
    pub(crate) ignores_robots: bool,
    /// A host that is to be waited for any longer is given up.
    pub(crate) patience: Duration,
    pub(crate) tries_max: u32,
    pub(crate) user_agent: String,
}

/// All hosts, and what is to be fetched from each.
pub(crate) struct Book {
    pub(crate) hosts: Vec<Option<Host>>,
    pub(crate) gates: Gates,
    pub(crate) manners: Manners,
    folder: Arc<Folder>,
    by_name: HashMap<Authority, HostId>,
    free: Vec<HostId>,
    /// The round.
    ready: VecDeque<HostId>,
    due: BTreeMap<(Instant, u64), Due>,
    /// Hosts with nothing to do, the longest idle first.
    idle: VecDeque<(HostId, u64)>,
    /// Pages that were begun and are not kept yet.
    under_way: HashSet<Key>,
    /// What has ended without a request, and has yet to be kept.
    pub(crate) verdicts: Vec<Ended>,
    /// Addresses in memory.
    held: usize,
    /// Pages that were read.
    pub(crate) known: u64,
    /// The counts of hosts that were forgotten, and how many those are.
    pub(crate) forgotten: (Tally, u64),
    numbers: u64,
}

/// What is due at some time.
enum Due {
    /// A host may be asked again, if it still waits for that.
    Wake(HostId, u64),
    Again(HostId, Job),
}

/// A request that may be sent now.
#[derive(Debug)]
pub(crate) struct Start {
    pub(crate) host: HostId,
    pub(crate) job: Job,
    pub(crate) entry: Entry,
}

/// What became of a host's turn.
enum Pick {
    Start(Box<(Job, Entry)>),
    /// Something was decided; it may go on at its next turn.
    Again,
    Wait(Option<Instant>),
    Nothing,
}

impl Book {
    pub(crate) fn new(gates: Gates, folder: Arc<Folder>, manners: Manners) -> Self {
        Self {
            hosts: Vec::new(),
            gates,
            manners,
            folder,
            by_name: HashMap::new(),
            free: Vec::new(),
            ready: VecDeque::new(),
            due: BTreeMap::new(),
            idle: VecDeque::new(),
            under_way: HashSet::new(),
            verdicts: Vec::new(),
            held: 0,
            known: 0,
            forgotten: (Tally::default(), 0),
            numbers: 0,
        }
    }

    pub(crate) fn host(&mut self, id: HostId) -> &mut Host {
        let Some(host) = self.hosts.get_mut(id).and_then(Option::as_mut) else {
            unreachable!("whoever has something to do is remembered")
        };
        host
    }

    /// Whether more may be read.
    pub(crate) fn has_room(&self) -> bool {
        self.held < HELD_MAX && self.verdicts.len() < VERDICTS_MAX
    }

    /// Whether there is nothing to do, now and later.
    pub(crate) fn is_empty(&self) -> bool {
        self.ready.is_empty() && self.under_way.is_empty() && self.verdicts.is_empty() && self.held == 0
    }

    /// A page to fetch.
    pub(crate) fn add(&mut self, address: Address) -> io::Result<()> {
        self.known += 1;
        let id = self.find(&address.host);
        let (number, folder) = (self.number(), self.folder.ahead());
        let host = self.host(id);
        let held = host.ahead.held();
        host.ahead.push(String::from(address.url).into(), || ahead::file(&folder, number))?;
        let more = host.ahead.held() - held;
        self.held += more;
        self.wake_idle(id);
        Ok(())
    }

    /// A page that was fetched before.
    pub(crate) fn skip(&mut self, address: Address) {
        self.known += 1;
        let host = self.find(&address.host);
        let url = String::from(address.url).into();
        self.host(host).open += 1;
        let fate = Fate::Skipped(Skip::There);
        self.verdicts.push(Ended { url, host: Some(host), key: None, attempts: 0, fate });
    }

    /// The next request, and who may have one; nothing if all wait.
    pub(crate) fn next(&mut self, now: Instant) -> io::Result<Option<Start>> {
        while self.verdicts.len() < VERDICTS_MAX {
            let Some(id) = self.ready.pop_front() else { break };
            match self.pick(id, now)? {
                Pick::Start(start) => {
                    let (job, entry) = *start;
                    let host = self.host(id);
                    host.in_flight += 1;
                    host.asked = Some((host.asked.map_or(now, |(first, _)| first), now));
                    if host.has_work() {
                        self.ready.push_back(id);
                    } else {
                        host.turn = Turn::Idle;
                    }
                    return Ok(Some(Start { host: id, job, entry }));
                }
                Pick::Again => self.ready.push_back(id),
                Pick::Wait(until) => {
                    let ticket = self.number();
                    let host = self.host(id);
                    (host.turn, host.ticket) = (Turn::Waits { until }, ticket);
                    if let Some(until) = until {
                        self.due.insert((until, ticket), Due::Wake(id, ticket));
                    }
                }
                Pick::Nothing => {
                    self.host(id).turn = Turn::Idle;
                    self.rest(id);
                }
            }
        }
        Ok(None)
    }

    fn pick(&mut self, id: HostId, now: Instant) -> io::Result<Pick> {
        let is_crowded = self.under_way.len() >= UNDER_WAY_MAX;
        let host = self.host(id);
        let is_new = host.urgent.is_empty() && host.begun.is_empty();
        if is_new && is_crowded && !host.ahead.is_empty() {
            // A slow host to which fast ones redirect: what was begun has to end before there is more of it.
            return Ok(Pick::Wait(Some(now + CROWDED)));
        }
        if is_new && !self.begin(id)? {
            return Ok(if self.host(id).has_work() { Pick::Again } else { Pick::Nothing });
        }
        let (ignores_robots, patience) = (self.manners.ignores_robots, self.manners.patience);
        let host = self.host(id);
        let is_urgent = !host.urgent.is_empty();
        if let Some(why) = host.gave_up.clone() {
            if let Some(job) = host.urgent.pop_front().or_else(|| host.begun.pop_front()) {
                self.end_away(job, why, now);
            }
            return Ok(Pick::Again);
        }
        if !is_urgent
            && !ignores_robots
            && let Some(pick) = self.ask_rules(id, now)
        {
            return Ok(pick);
        }
        let host = self.host(id).authority.clone();
        let entry = self.gates.try_enter(&host);
        let host = self.host(id);
        Ok(match entry {
            Ok(entry) => match host.urgent.pop_front().or_else(|| host.begun.pop_front()) {
                Some(job) => Pick::Start(Box::new((job, entry))),
                None => Pick::Nothing,
            },
            Err(Wait::Return) if host.in_flight > 0 => Pick::Wait(None),
            // It shares a throttle with hosts for which there was no room: theirs it is that have to end.
            Err(Wait::Return) => Pick::Wait(Some(now + CROWDED)),
            Err(Wait::Asked(span) | Wait::Open(span)) if host.lost(now) + span > patience => {
                let patience = span_words(patience);
                host.gave_up = Some(match entry {
                    Err(Wait::Asked(_)) => {
                        format!("it asks to be left alone for longer than --patience ({patience})")
                    }
                    _ => format!("it fails again and again, and for longer than --patience ({patience})"),
                });
                Pick::Again
            }
            Err(Wait::Turn(span) | Wait::Asked(span) | Wait::Open(span)) => Pick::Wait(Some(now + span)),
        })
    }

    /// Takes the next new page, if it is to be fetched. Whether there is one.
    fn begin(&mut self, id: HostId) -> io::Result<bool> {
        let host = self.host(id);
        let held = host.ahead.held();
        let url = host.ahead.pop()?;
        let now_held = host.ahead.held();
        self.held = self.held + now_held - held;
        let Some(url) = url else { return Ok(false) };
        let Ok(at) = Address::parse(&url) else { unreachable!("it was read before") };
        self.host(id).open += 1;
        let key = Key::of(&at.url);
        let file = file_of(&at, key);
        let skip = if self.under_way.contains(&key) {
            Some(Skip::Twice)
        } else {
            self.folder.has(&file).then_some(Skip::There)
        };
        if let Some(skip) = skip {
            let fate = Fate::Skipped(skip);
            self.verdicts.push(Ended { url, host: Some(id), key: None, attempts: 0, fate });
            return Ok(false);
        }
        self.under_way.insert(key);
        let what = What::Page(Page { url, key, file, host: id });
        self.host(id).begun.push_back(Job { what, at, hops: 0, tries: 0, attempts: 0 });
        Ok(true)
    }

    /// Sees to it that the rules let the next page be fetched; says what to do if not.
    fn ask_rules(&mut self, id: HostId, now: Instant) -> Option<Pick> {
        let host = self.host(id);
        let job = host.begun.front()?;
        let (at, url) = (job.at.robots(), job.at.url.clone());
        let is_https = at.is_https();
        let rules = host.rules_of(is_https);
        match rules {
            Rules::Unknown => {
                *rules = Rules::Asking;
                let what = What::Rules { of: id, is_https };
                host.urgent.push_back(Job { what, at, hops: 0, tries: 0, attempts: 0 });
                Some(Pick::Again)
            }
            Rules::Asking => Some(Pick::Wait(None)),
            Rules::Away { until, .. } if *until <= now => {
                *rules = Rules::Unknown;
                Some(Pick::Again)
            }
            Rules::Away { why, .. } => {
                let why = format!("robots.txt of {} cannot be had: {why}", at.host);
                let job = host.begun.pop_front()?;
                self.end_away(job, why, now);
                Some(Pick::Again)
            }
            Rules::Known(_) if rules.allow(&url) == Some(true) => None,
            Rules::Known(_) => {
                let job = host.begun.pop_front()?;
                self.end(job, Fate::Skipped(Skip::Robots));
                Some(Pick::Again)
            }
        }
    }

    /// What cannot be had for now.
    fn end_away(&mut self, job: Job, why: String, now: Instant) {
        match job.what {
            What::Page(_) => self.end(job, Fate::Failed(Failed { why, status: None, is_final: false })),
            What::Rules { of, is_https } => {
                let rules = Rules::read(super::rules::Told::Away(why), &self.manners.user_agent, now);
                *self.host(of).rules_of(is_https) = rules;
                self.wake(of);
            }
        }
    }

    /// A page has ended, and is to be kept.
    pub(crate) fn end(&mut self, job: Job, fate: Fate) {
        let What::Page(page) = job.what else { unreachable!("rules end otherwise") };
        let (url, host, key) = (page.url, Some(page.host), Some(page.key));
        self.verdicts.push(Ended { url, host, key, attempts: job.attempts, fate });
    }

    /// It is kept, and under way no more.
    pub(crate) fn kept(&mut self, ended: &Ended) {
        if let Some(key) = ended.key {
            self.under_way.remove(&key);
        }
        if let Some(id) = ended.host {
            let host = self.host(id);
            host.open -= 1;
            host.tally.count(ended);
            self.rest(id);
        }
    }

    /// Puts a job where it is to be asked for.
    pub(crate) fn put(&mut self, job: Job) {
        let id = self.find(&job.at.host);
        let host = self.host(id);
        match job.what {
            What::Rules { .. } => {
                host.urgent.push_back(job);
                // It may wait for rules of its own, which these need not.
                self.returned(id);
            }
            What::Page(_) => host.begun.push_back(job),
        }
        self.wake_idle(id);
    }

    /// The same, after a while.
    pub(crate) fn put_later(&mut self, id: HostId, job: Job, at: Instant) {
        self.host(id).later += 1;
        let number = self.number();
        self.due.insert((at, number), Due::Again(id, job));
    }

    /// When something is due.
    pub(crate) fn next_due(&self) -> Option<Instant> {
        self.due.first_key_value().map(|((at, _), _)| *at)
    }

    /// Brings back what is due.
    pub(crate) fn bring_back(&mut self, now: Instant) {
        while let Some(first) = self.due.first_entry()
            && first.key().0 <= now
        {
            match first.remove() {
                Due::Wake(id, ticket) => {
                    let is_meant = self.hosts[id].as_ref().is_some_and(|host| host.ticket == ticket);
                    if is_meant {
                        self.wake(id);
                    }
                }
                Due::Again(id, job) => {
                    self.host(id).later -= 1;
                    self.put(job);
                }
            }
        }
    }

    /// Something has ended that a host may have waited for.
    pub(crate) fn returned(&mut self, id: HostId) {
        if matches!(self.host(id).turn, Turn::Waits { until: None }) {
            self.wake(id);
        }
    }

    /// Into the round if there was nothing to do. Who waits, waits: there is more to do, and no sooner.
    fn wake_idle(&mut self, id: HostId) {
        if self.host(id).turn == Turn::Idle {
            self.wake(id);
        }
    }

    /// Back into the round, if it has something to do and is not there.
    pub(crate) fn wake(&mut self, id: HostId) {
        let ticket = self.number();
        let host = self.host(id);
        if host.turn != Turn::Ready && host.has_work() {
            (host.turn, host.ticket) = (Turn::Ready, ticket);
            self.ready.push_back(id);
        }
    }

    /// A host that is not in the round, and with which nothing would be lost, may be forgotten.
    pub(crate) fn rest(&mut self, id: HostId) {
        let ticket = self.number();
        let host = self.host(id);
        if host.turn == Turn::Idle && host.is_idle() {
            host.ticket = ticket;
            self.idle.push_back((id, ticket));
            self.forget();
        }
    }

    /// Forgets the hosts that were idle longest, where there are too many.
    fn forget(&mut self) {
        while self.by_name.len() > HOSTS_MAX || self.idle.len() > 2 * HOSTS_MAX {
            let Some((id, ticket)) = self.idle.pop_front() else { break };
            let is_meant = |host: &Host| host.ticket == ticket && host.is_idle();
            if self.by_name.len() > HOSTS_MAX && self.hosts[id].as_ref().is_some_and(is_meant) {
                let Some(host) = self.hosts[id].take() else { unreachable!("it was looked at") };
                self.by_name.remove(&host.authority);
                self.forgotten.0.add(&host.tally);
                self.forgotten.1 += 1;
                self.free.push(id);
            }
        }
    }

    fn find(&mut self, authority: &Authority) -> HostId {
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
#[path = "book_tests.rs"]
mod tests;
