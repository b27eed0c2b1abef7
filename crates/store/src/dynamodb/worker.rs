//! Whoever follows the table's stream and counts what leases have used.
//!
//! A record says which bucket was written, and whether it has marks of ended leases. The bucket waits a little for more of
//! them, and then its marks are counted as everybody counts them ([`count`](super::count)): read as they are now, added to usage
//! and taken away by one transaction. So a record that comes twice, late, or to two workers costs a read, and nothing has to be
//! remembered between runs: what a worker did not hear of is found in the index of what is to be looked at, which each run goes
//! through once after it has begun to read, and again where it may have missed something.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::future::join_all;
use futures_util::stream;
use tidegate_core::limit::name::Subject;
use tidegate_core::time::Stamp;
use tokio::time::Instant;

use super::DynamoDb;
use super::keys::{DUE_PARTS, GSI1, Key};
use super::link::{Range, random};
use super::shards::Shards;
use super::stream::{About, Said, Told};
use super::trouble::Failed;
use crate::aggregate::{AggregateOptions, Aggregated, Aggregator, Until};
use crate::clock::{HostWall, WallClock as _};
use crate::error::StoreError;
use crate::reply::Reply;
use crate::sync::lock;

/// Shards that are read, and buckets that are counted, at a time.
const AT_ONCE: usize = 8;
/// Buckets that wait to be counted; no more is read while there are as many.
const WAITING_MAX: usize = 10_000;
/// So many records since the last look mean that many leases end in a bucket: the youngest marks stay for the next look.
const MANY: u32 = 16;
/// How often the shards are listed, for those that have come and gone.
const LISTED_EVERY: Duration = Duration::from_secs(10);
/// How often leases past their deadline are ended, should nobody else.
const SWEPT_EVERY: Duration = Duration::from_secs(30);
/// As many as are then ended.
const SWEPT_MAX: usize = 1_000;
/// A shard is read at most this often while records come: the engine lets all of its readers ask five times a second.
const SPACING: Duration = Duration::from_millis(200);
/// How long is waited after the first trouble; twice as long after each further one.
const PAUSE: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(10);
/// As often in a row something is tried by whoever wants to be done.
const TRIES: u32 = 7;
/// Once everything is read that there was, so many more looks are to find nothing new; where records come all the time none does.
const PAST_MAX: u32 = 8;
/// What was heard of is counted within this once it is told to stop.
const DRAINED_WITHIN: Duration = Duration::from_secs(10);

/// Follows the stream of a table, for one namespace.
#[derive(Debug)]
pub(super) struct Worker {
    store: DynamoDb,
    options: AggregateOptions,
    done: Mutex<Done>,
}

/// What was done, and since when it is behind.
#[derive(Debug, Default)]
struct Done {
    stats: Aggregated,
    behind_since: Option<Stamp>,
}

impl Worker {
    pub(super) fn new(store: DynamoDb, options: AggregateOptions) -> Self {
        Self { store, options, done: Mutex::default() }
    }

    async fn follow(&self, mut until: Until<'_>) -> Result<(), StoreError> {
        let mut follower = Follower::new(self);
        let mut failures = 0;
        loop {
            let step = tokio::select! {
                biased;
                () = &mut until => break,
                step = follower.step(Haste::Lingers) => step,
            };
            let pause = match step {
                Ok(next) => {
                    failures = 0;
                    next
                }
                Err(error) if error.is_transient() => {
                    failures += 1;
                    self.failed();
                    follower.is_failing = true;
                    follower.tell();
                    pause(failures)
                }
                Err(error) => return Err(error),
            };
            tokio::select! {
                biased;
                () = &mut until => break,
                () = tokio::time::sleep(pause) => {}
            }
        }
        // What is not done by then is done by the next.
        drop(tokio::time::timeout(DRAINED_WITHIN, follower.count(Haste::Now)).await);
        follower.tell();
        Ok(())
    }

    async fn once(&self) -> Result<(), StoreError> {
        let mut follower = Follower::new(self);
        let (mut failures, mut past) = (0, 0);
        loop {
            let done = async {
                let next = follower.step(Haste::Now).await?;
                past += u32::from(follower.is_past_start());
                if !follower.is_at_end() && past < PAST_MAX {
                    return Ok(Some(next));
                }
                // Records may be few and far between, so that nothing coming is not all having come.
                follower.sweep().await?;
                follower.look_everywhere().await?;
                follower.count(Haste::Now).await?;
                Ok(None)
            };
            let pause = match done.await {
                Ok(Some(next)) => {
                    failures = 0;
                    next
                }
                Ok(None) => {
                    follower.tell();
                    return Ok(());
                }
                Err(error) if StoreError::is_transient(&error) && failures < TRIES => {
                    failures += 1;
                    self.failed();
                    pause(failures)
                }
                Err(error) => return Err(error),
            };
            tokio::time::sleep(pause).await;
        }
    }

    /// It has ended by an error: nobody reads what comes.
    fn stopped(&self) {
        let mut done = lock(&self.done);
        done.stats.errors += 1;
        done.stats.is_caught_up = false;
    }

    fn failed(&self) {
        lock(&self.done).stats.errors += 1;
    }
}

impl Aggregator for Worker {
    fn run<'a>(&'a self, until: Until<'a>) -> Reply<'a, ()> {
        Reply::later(async move {
            let ended = self.follow(until).await;
            if ended.is_err() {
                self.stopped();
            }
            ended
        })
    }

    fn catch_up(&self) -> Reply<'_, ()> {
        Reply::later(async move {
            let ended = self.once().await;
            if ended.is_err() {
                self.stopped();
            }
            ended
        })
    }

    fn stats(&self) -> Aggregated {
        let done = lock(&self.done);
        let lag = done.behind_since.map(|since| HostWall.now().since(since)).unwrap_or_default();
        Aggregated { lag, ..done.stats }
    }
}

/// Whether what was heard of waits for more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Haste {
    Lingers,
    Now,
}

/// A bucket that was heard of.
#[derive(Debug)]
struct Heard {
    /// When the first change was made that is not counted, and the last.
    oldest: Stamp,
    newest: Stamp,
    /// Records since it was looked at.
    records: u32,
    look_at: Instant,
}

/// One run of a worker.
struct Follower<'a> {
    worker: &'a Worker,
    arn: Option<String>,
    shards: Shards,
    listed_at: Option<Instant>,
    swept_at: Option<Instant>,
    /// Something may have been missed: all buckets with marks are to be looked at.
    is_look_due: bool,
    /// When all shards were read last, and whether that fails now.
    read_at: Option<Stamp>,
    is_failing: bool,
    waiting: HashMap<Subject, Heard>,
    /// When it was begun.
    begun: Stamp,
}

impl<'a> Follower<'a> {
    fn new(worker: &'a Worker) -> Self {
        Self {
            worker,
            arn: None,
            shards: Shards::default(),
            listed_at: None,
            swept_at: None,
            is_look_due: true,
            read_at: None,
            is_failing: false,
            waiting: HashMap::new(),
            begun: HostWall.now(),
        }
    }

    /// Reads what there is, and counts what is due. Answers how long to wait before the next time.
    async fn step(&mut self, haste: Haste) -> Result<Duration, StoreError> {
        self.list().await?;
        let is_roomy = self.waiting.len() < WAITING_MAX;
        let next = if is_roomy { self.read().await } else { Ok(Some(Duration::ZERO)) };
        // Whatever fails, what was heard of is counted.
        let swept = if haste == Haste::Lingers { self.look_and_sweep().await } else { Ok(()) };
        let counted = self.count(if self.waiting.len() < WAITING_MAX { haste } else { Haste::Now }).await;
        let next = next?;
        swept?;
        counted?;
        self.tell();
        let options = &self.worker.options;
        Ok(next.unwrap_or_else(|| if haste == Haste::Now { SPACING } else { options.every }))
    }

    /// Looks everywhere, if something may have been missed, and at what is due.
    async fn look_and_sweep(&mut self) -> Result<(), StoreError> {
        if self.is_look_due {
            self.look_everywhere().await?;
        }
        self.sweep().await
    }

    /// Lists the shards, if they were not for a while.
    async fn list(&mut self) -> Result<(), StoreError> {
        if self.listed_at.is_some_and(|at| at.elapsed() < LISTED_EVERY) {
            return Ok(());
        }
        let link = &self.worker.store.inner.link;
        let (arn, is_new) = match &self.arn {
            Some(arn) => (arn.clone(), false),
            None => (self.arn.insert(super::stream::find(link).await?).clone(), true),
        };
        match super::stream::list(link, &arn).await {
            Ok((listed, is_on)) => {
                self.shards.learn(&listed, self.worker.options.since);
                if !is_on && self.shards.is_over() {
                    self.begin_anew();
                    return Ok(());
                }
            }
            // The table may have another stream by now.
            Err(Failed::Answer(StoreError::Invalid { .. })) if !is_new => {
                self.begin_anew();
                return Ok(());
            }
            // Those that are known are read meanwhile.
            Err(Failed::Away { .. }) if self.shards.is_listed() => self.worker.failed(),
            Err(failed) => return Err(failed.into_error()),
        }
        self.listed_at = Some(Instant::now());
        Ok(())
    }

    fn begin_anew(&mut self) {
        (self.arn, self.listed_at, self.shards, self.is_look_due) = (None, None, Shards::default(), true);
    }

    /// Reads each shard once. Answers when to read again, if that is sooner than usual.
    async fn read(&mut self) -> Result<Option<Duration>, StoreError> {
        let Some(arn) = self.arn.clone() else { return Ok(Some(SPACING)) };
        let inner = &self.worker.store.inner;
        let mut again: Option<Duration> = None;
        let mut trouble = None;
        for asks in self.shards.asks().chunks(AT_ONCE) {
            let said = asks
                .iter()
                .map(|(shard, ask)| super::stream::ask(&inner.link, &inner.keys, &arn, shard, ask));
            for ((shard, _), said) in asks.iter().zip(join_all(said).await) {
                match said {
                    // The others are heard first.
                    Err(failed) => trouble = Some(failed.into_error()),
                    Ok(said) => {
                        if let Some(soon) = self.heard(shard, said) {
                            again = Some(again.map_or(soon, |again| again.min(soon)));
                        }
                    }
                }
            }
            if self.waiting.len() >= WAITING_MAX {
                again = Some(Duration::ZERO);
                break;
            }
        }
        if let Some(trouble) = trouble {
            return Err(trouble);
        }
        (self.read_at, self.is_failing) = (Some(HostWall.now()), false);
        Ok(again)
    }

    /// What a shard said. Answers when to ask it again, if that is sooner than usual.
    fn heard(&mut self, shard: &str, said: Said) -> Option<Duration> {
        match said {
            Said::Iterator(iterator) => self.shards.began(shard, iterator),
            // Not at once: a shard that is listed though it has gone would be asked for ever without a pause.
            Said::Expired => {
                self.is_look_due |= self.shards.expired(shard);
                return Some(SPACING);
            }
            Said::Trimmed => {
                self.is_look_due = true;
                self.shards.trimmed(shard);
                return Some(SPACING);
            }
            Said::Gone => {
                self.is_look_due = true;
                self.shards.gone(shard);
                self.listed_at = None;
                return Some(SPACING);
            }
            Said::Records { told, last, next } => {
                let is_quiet = last.is_none();
                if told.iter().any(|told| told.at.is_some_and(|at| at > self.begun)) {
                    self.shards.passed(shard);
                }
                for told in told {
                    self.note(told);
                }
                if self.shards.read(shard, last, next) {
                    // Its children go on with it.
                    self.listed_at = None;
                } else {
                    return (!is_quiet).then_some(SPACING);
                }
            }
        }
        Some(Duration::ZERO)
    }

    fn note(&mut self, Told { at, of }: Told) {
        let at = at.unwrap_or_else(|| HostWall.now());
        let mut done = lock(&self.worker.done);
        done.stats.records += 1;
        done.stats.newest = done.stats.newest.max(Some(at));
        match of {
            About::Other => {}
            About::Lost(marks) => done.stats.lost += marks,
            About::Marks(subject) => {
                drop(done);
                let look_at = Instant::now() + self.worker.options.linger;
                let new = || Heard { oldest: at, newest: at, records: 0, look_at };
                let heard = self.waiting.entry(subject).or_insert_with(new);
                heard.records = heard.records.saturating_add(1);
                (heard.oldest, heard.newest) = (heard.oldest.min(at), heard.newest.max(at));
            }
        }
    }

    /// Has all buckets looked at that may have marks, by the index that they are in while they have.
    async fn look_everywhere(&mut self) -> Result<(), StoreError> {
        let inner = &self.worker.store.inner;
        for part in 0..DUE_PARTS {
            let range = Range::new(Some(GSI1), inner.keys.due(part), String::new());
            let found = inner.link.range(&range, usize::MAX).await?;
            let subjects = found.iter().filter_map(Key::of).filter_map(|key| inner.keys.subject(&key));
            let subjects: Vec<Subject> = subjects.collect();
            for some in subjects.chunks(WAITING_MAX) {
                let now = HostWall.now();
                for subject in some {
                    let new = || Heard { oldest: now, newest: now, records: 0, look_at: Instant::now() };
                    self.waiting.entry(subject.clone()).or_insert_with(new).look_at = Instant::now();
                }
                self.count(Haste::Lingers).await?;
            }
        }
        self.is_look_due = false;
        Ok(())
    }

    async fn sweep(&mut self) -> Result<(), StoreError> {
        if self.swept_at.is_none_or(|at| at.elapsed() >= SWEPT_EVERY) {
            self.worker.store.sweep_up_to(SWEPT_MAX).await?;
            self.swept_at = Some(Instant::now());
        }
        Ok(())
    }

    /// Counts what has waited long enough. What fails waits for longer, and others do not wait for it; whoever wants to be done
    /// is told.
    async fn count(&mut self, haste: Haste) -> Result<(), StoreError> {
        let now = Instant::now();
        let due = self.waiting.iter().filter(|(_, heard)| haste == Haste::Now || heard.look_at <= now);
        let due: Vec<(Subject, bool)> = due
            .map(|(subject, heard)| (subject.clone(), haste == Haste::Lingers && heard.records >= MANY))
            .collect();
        let store = &self.worker.store;
        let mut counting = stream::iter(due)
            .map(|(subject, many)| async move {
                let counted = store.count_heard(&subject, many).await;
                (subject, many, counted)
            })
            .buffer_unordered(AT_ONCE);
        let mut trouble = None;
        while let Some((subject, many, counted)) = counting.next().await {
            match counted {
                Ok(counted) => {
                    lock(&self.worker.done).stats.counted += counted;
                    if many {
                        if let Some(heard) = self.waiting.get_mut(&subject) {
                            let look_at = Instant::now() + self.worker.options.linger;
                            *heard =
                                Heard { oldest: heard.newest, newest: heard.newest, records: 0, look_at };
                        }
                    } else {
                        self.waiting.remove(&subject);
                    }
                }
                // One that is not as we write it is for somebody else to look at.
                Err(StoreError::Corrupt { .. }) => {
                    self.worker.failed();
                    self.waiting.remove(&subject);
                }
                Err(error) if haste == Haste::Lingers && error.is_transient() => {
                    self.worker.failed();
                    if let Some(heard) = self.waiting.get_mut(&subject) {
                        heard.look_at = Instant::now() + self.worker.options.linger.max(PAUSE_MAX / 10);
                    }
                }
                Err(error) => trouble = Some(error),
            }
        }
        trouble.map_or(Ok(()), Err)
    }

    /// Everything that there was when it was begun is read and counted.
    fn is_past_start(&self) -> bool {
        self.shards.is_past_start() && self.waiting.is_empty() && !self.is_failing
    }

    /// Everything that there was is read and counted.
    fn is_at_end(&self) -> bool {
        self.shards.is_quiet() && self.waiting.is_empty() && !self.is_failing
    }

    /// Tells how far it has come.
    fn tell(&self) {
        let waiting = self.waiting.values().map(|heard| heard.oldest).min();
        let mut done = lock(&self.worker.done);
        let unread = if self.shards.is_quiet() { None } else { done.stats.newest };
        // While nothing can be read, nobody knows what there is.
        let unknown = self.read_at.filter(|_| self.is_failing);
        done.behind_since = waiting.into_iter().chain(unread).chain(unknown).min();
        done.stats.is_caught_up = self.is_at_end() && !self.is_look_due;
    }
}

/// How long to wait after so many failures in a row: a random part of it, so that several workers do not ask together.
fn pause(failures: u32) -> Duration {
    let most = PAUSE.saturating_mul(1 << failures.min(10).saturating_sub(1)).min(PAUSE_MAX);
    let part = u32::try_from(random() % 1_000).unwrap_or(0);
    most / 2 + most * part / 2_000
}
