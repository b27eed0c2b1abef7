//! The fetch itself: sends what may be sent, and sees to what comes back, until all has ended or somebody says to stop.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use reqwest::{Client, Url};
use signal_hook::consts::{SIGHUP, SIGQUIT};
use tidegate::{Backoff, Jitter, Kind, Random};
use tokio::sync::mpsc::Receiver;
use tokio::task::{Id, JoinError, JoinSet};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};

use super::address::Address;
use super::attempt::{Ask, Got, Tried, Wants, attempt, status_words};
use super::book::{Book, HostId, Start};
use super::ended::{Ended, Failed, Fate, Whole};
use super::folder::{Folder, trouble};
use super::host::{Job, What};
use super::input::Line;
use super::keeper::{BATCH_MAX, Keeper, Kept};
use super::rules::{self, Rules, Told};
use super::show::Show;
use super::tally::{FAILURES_TOLD, HostLine, Summary, Tally, per};
use crate::failure::Failure;
use crate::signals::{Heard, Signals};

/// Redirects that are followed to a page.
const HOPS_MAX: u32 = 10;
/// Between two looks at how it goes.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// Pages that have ended and are not kept yet, and their bytes in memory: with more, nothing new is begun.
const LANDING_MAX: usize = 2 * BATCH_MAX;
const LANDING_BYTES_MAX: usize = 64 << 20;

/// What a fetch works with.
pub(crate) struct Crawl {
    pub(crate) book: Book,
    pub(crate) client: Client,
    pub(crate) folder: Arc<Folder>,
    pub(crate) keeper: Keeper,
    pub(crate) show: Show,
    /// Requests at once, to all hosts.
    pub(crate) at_once: usize,
    pub(crate) bytes_max: u64,
    pub(crate) random: Random,
    pub(crate) count: Count,
}

/// What is counted for all hosts together.
#[derive(Default)]
pub(crate) struct Count {
    pub(crate) total: Tally,
    bad: u64,
    failures: Vec<(Box<str>, String)>,
    final_failures: u64,
    /// Handed over to the keeper, and not kept yet.
    landing: usize,
    landing_bytes: usize,
    /// The keeper knows that there is nothing else to do.
    is_hurried: bool,
    /// The input could not be read to its end.
    broken: Option<io::Error>,
}

impl Count {
    const fn has_room(&self) -> bool {
        self.landing < LANDING_MAX && self.landing_bytes < LANDING_BYTES_MAX
    }
}

/// What a page that has ended takes in memory until it is kept.
const fn held(ended: &Ended) -> usize {
    match &ended.fate {
        Fate::Done(page) => page.held,
        _ => 0,
    }
}

/// How a fetch ended.
pub(crate) struct Outcome {
    pub(crate) summary: Summary,
    /// The signal that ended it.
    pub(crate) heard: Option<Heard>,
    pub(crate) broken: Option<io::Error>,
}

impl Crawl {
    /// Fetches everything.
    ///
    /// # Errors
    /// Where the folder cannot be written to any more. What was kept is whole.
    pub(crate) async fn run(
        mut self,
        mut lines: Receiver<Vec<Line>>,
        mut signals: Signals,
    ) -> Result<Outcome, Failure> {
        let begun = Instant::now();
        let mut flying = Flying::default();
        let mut look = interval(LOOK_EVERY);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut is_read, mut heard) = (false, None::<Heard>);
        loop {
            let now = Instant::now();
            self.book.bring_back(now);
            while heard.is_none() && flying.tasks.len() < self.at_once && self.count.has_room() {
                let Some(start) = self.book.next(now).map_err(|error| self.trouble(&error))? else { break };
                self.send(&mut flying, start);
            }
            for ended in self.book.verdicts.drain(..) {
                self.count.landing += 1;
                self.count.landing_bytes += held(&ended);
                self.count.is_hurried = false;
                self.keeper.keep(ended);
            }
            if flying.tasks.is_empty() && self.count.landing > 0 && !self.count.is_hurried {
                self.count.is_hurried = true;
                self.keeper.hurry();
            }
            let is_quiet = flying.tasks.is_empty() && self.count.landing == 0;
            if is_quiet && (heard.is_some() || (is_read && self.book.is_empty())) {
                break;
            }
            let may_read = !is_read && heard.is_none() && self.book.has_room() && self.count.has_room();
            // Where there may be more to begin at once, it is.
            let due = self.book.next_due().filter(|_| heard.is_none());
            tokio::select! {
                Some(tried) = flying.tasks.join_next_with_id() => self.landed(&mut flying, tried)?,
                kept = self.keeper.next() => self.keep(kept)?,
                batch = lines.recv(), if may_read => match batch {
                    Some(batch) => self.read(batch)?,
                    None => is_read = true,
                },
                () = sleep_until(due.unwrap_or(now)), if due.is_some() => {}
                _ = look.tick() => self.show.look(&mut self.book, &self.count.total, is_read, heard.is_some(), flying.tasks.len()),
                signal = signals.next() => if is_to_end(signal) {
                    if heard.is_some() {
                        // What is under way is removed when the folder is next opened.
                        self.show.clear();
                        std::process::exit(i32::from(crate::child::exit_by(signal).code()));
                    }
                    heard = Some(signal);
                    self.show.stopping(flying.tasks.len());
                },
            }
        }
        self.keeper.finish();
        self.show.clear();
        let unfinished = self.book.known - self.count.total.ended().min(self.book.known);
        let is_interrupted = heard.is_some();
        let summary = self.summary(unfinished, is_interrupted, begun.elapsed());
        Ok(Outcome { summary, heard, broken: self.count.broken.take() })
    }

    fn trouble(&self, error: &io::Error) -> Failure {
        self.show.clear();
        trouble(self.folder.root(), error)
    }

    fn send(&self, flying: &mut Flying, start: Start) {
        let mut part = String::new();
        let wants = match &start.job.what {
            What::Page(page) => {
                part = self.folder.new_part(page.key);
                Wants::Page { part: self.folder.part(&part), bytes_max: self.bytes_max }
            }
            What::Rules { .. } => Wants::Rules,
        };
        let ask = Ask { url: start.job.at.url.clone(), wants };
        let task = flying.tasks.spawn(attempt(self.client.clone(), ask, start.entry));
        flying.jobs.insert(task.id(), Flight { host: start.host, job: start.job, part });
    }

    fn read(&mut self, batch: Vec<Line>) -> Result<(), Failure> {
        for line in batch {
            match line {
                Line::Page(address) => self.book.add(address).map_err(|error| self.trouble(&error))?,
                Line::There(address) => self.book.skip(address),
                Line::Bad(text, why) => {
                    self.book.known += 1;
                    self.count.bad += 1;
                    let fate = Fate::Failed(Failed {
                        why: format!("no address: {why}"),
                        status: None,
                        is_final: true,
                    });
                    self.book.verdicts.push(Ended {
                        url: text.into(),
                        host: None,
                        key: None,
                        attempts: 0,
                        fate,
                    });
                }
                Line::Broken(error) => self.count.broken = Some(error),
            }
        }
        Ok(())
    }

    fn keep(&mut self, kept: Option<Kept>) -> Result<(), Failure> {
        let batch = match kept {
            Some(Kept::Ended(batch)) => batch,
            Some(Kept::Trouble(error)) => return Err(self.trouble(&error)),
            None => return Err(Failure::failed("what was fetched could not be kept: its thread has ended")),
        };
        self.count.landing -= batch.len();
        for ended in batch {
            self.count.landing_bytes -= held(&ended);
            self.book.kept(&ended);
            self.count.total.count(&ended);
            if let Fate::Failed(failed) = ended.fate {
                self.count.final_failures += u64::from(failed.is_final);
                // Of a host that was given up, that is told once.
                let is_told =
                    ended.host.is_some_and(|id| self.book.host(id).gave_up.as_ref() == Some(&failed.why));
                if !is_told && self.count.failures.len() < FAILURES_TOLD {
                    self.count.failures.push((ended.url, failed.why));
                }
            }
        }
        Ok(())
    }

    /// A request has ended.
    fn landed(&mut self, flying: &mut Flying, tried: Result<(Id, Tried), JoinError>) -> Result<(), Failure> {
        let (id, tried) = match tried {
            Ok(landed) => landed,
            Err(error) => {
                let why = format!("a fault of this program: {error}");
                let tried =
                    Tried { got: Got::Lost(why), kind: Kind::Ignored, is_worth_another: false, hint: None };
                (error.id(), tried)
            }
        };
        let Some(Flight { host, mut job, part }) = flying.jobs.remove(&id) else {
            unreachable!("each task is somebody's")
        };
        let now = Instant::now();
        job.tries += 1;
        job.attempts += 1;
        self.count.total.attempts += 1;
        let far = self.book.host(host);
        far.in_flight -= 1;
        far.tally.attempts += 1;
        far.failing = match tried.kind {
            Kind::Failure | Kind::Overload => far.failing.or(Some(now)),
            _ => None,
        };
        self.book.returned(host);
        if let Got::Disk(error) = tried.got {
            return Err(self.trouble(&error));
        }
        if tried.is_worth_another && job.tries < self.book.manners.tries_max {
            // A rejected page always waits for its own hint; whether its host rests too is for its throttle to decide.
            let delay = backoff().delay(job.tries - 1, &mut self.random).max(tried.hint.unwrap_or_default());
            if delay <= self.book.manners.patience {
                self.book.put_later(host, job, now + delay);
                return Ok(());
            }
        }
        match job.what {
            What::Page(_) => self.page_landed(host, job, part, tried),
            What::Rules { of, is_https } => self.rules_landed(of, is_https, job, tried),
        }
        // Where a redirect led no page may ever end.
        self.book.rest(host);
        Ok(())
    }

    fn page_landed(&mut self, host: HostId, job: Job, part: String, tried: Tried) {
        let is_final = !tried.is_worth_another;
        let failed = |why: String, status| Fate::Failed(Failed { why, status, is_final });
        let What::Page(page) = &job.what else { unreachable!("it is a page") };
        let fate = match tried.got {
            Got::Page { status, body } => {
                let moved_to = (job.hops > 0).then(|| job.at.url.to_string());
                let held = body.held();
                Fate::Done(Whole { part, file: page.file.clone(), body, held, status, moved_to })
            }
            Got::Moved(url) => match self.moved(job, url, HOPS_MAX) {
                Ok(()) => return,
                Err((job, why)) => {
                    self.book.end(*job, failed(why, None));
                    return;
                }
            },
            Got::Status(status) => {
                failed(at_host(&job, page.host != host, &status_words(status)), Some(status))
            }
            Got::Large => failed(format!("it has more than --max-bytes {}", self.bytes_max), None),
            Got::Broken(why) | Got::Lost(why) => failed(at_host(&job, page.host != host, &why), None),
            Got::Rules(_) | Got::Disk(_) => unreachable!("seen to before"),
        };
        self.book.end(job, fate);
    }

    fn rules_landed(&mut self, of: HostId, is_https: bool, job: Job, tried: Tried) {
        let told = match tried.got {
            Got::Rules(told) => told,
            // After five redirects there is none, and so there is at no address.
            Got::Moved(url) => match self.moved(job, url, rules::HOPS_MAX) {
                Ok(()) => return,
                Err(_) => Told::None,
            },
            Got::Lost(_) => Told::None,
            Got::Broken(why) => Told::Away(why),
            Got::Page { .. } | Got::Status(_) | Got::Large | Got::Disk(_) => {
                unreachable!("nobody asked for that")
            }
        };
        let rules = Rules::read(told, &self.book.manners.user_agent, Instant::now());
        let host = self.book.host(of);
        let (delay, authority) = (rules.delay(), host.authority.clone());
        *host.rules_of(is_https) = rules;
        if let Some(delay) = delay {
            let spaced = self.book.gates.space(&authority, delay);
            self.book.host(of).spaced = Some(spaced);
        }
        self.book.returned(of);
    }

    /// Goes on at another address, if it is one.
    fn moved(&mut self, job: Job, url: Url, hops_max: u32) -> Result<(), (Box<Job>, String)> {
        if job.hops >= hops_max {
            return Err((Box::new(job), format!("redirected more than {hops_max} times")));
        }
        match Address::of(url) {
            Ok(at) => {
                let (hops, tries) = (job.hops + 1, 0);
                self.book.put(Job { at, hops, tries, ..job });
                Ok(())
            }
            Err(why) => Err((Box::new(job), format!("redirected to where nobody can go: {why}"))),
        }
    }

    fn summary(&mut self, unfinished: u64, is_interrupted: bool, took: Duration) -> Summary {
        let mut hosts = Vec::new();
        for host in self.book.hosts.iter().flatten() {
            let span = host.asked.map(|(first, last)| last.duration_since(first).as_secs_f64());
            // The first is at the beginning: between two there is one span.
            let per_second =
                span.filter(|span| *span > 0.0).map(|span| per(host.tally.attempts.saturating_sub(1), span));
            let view = self.book.gates.view(&host.authority);
            let limit = view.and_then(|view| view.rate).map(tidegate::PerSecond::as_f64);
            let gave_up = host.gave_up.clone();
            hosts.push(HostLine {
                host: host.authority.to_string(),
                tally: host.tally,
                per_second,
                limit,
                gave_up,
            });
        }
        hosts.sort_by_key(|line| std::cmp::Reverse(line.tally.ended()));
        let (tally, count) = self.book.forgotten;
        if count > 0 {
            let host = format!("({count} forgotten)");
            hosts.push(HostLine { host, tally, per_second: None, limit: None, gave_up: None });
        }
        Summary {
            hosts,
            total: self.count.total,
            bad: self.count.bad,
            unfinished,
            is_interrupted,
            took,
            failures: std::mem::take(&mut self.count.failures),
            final_failures: self.count.final_failures,
        }
    }
}

/// Requests that are under way, and what for.
#[derive(Default)]
struct Flying {
    tasks: JoinSet<Tried>,
    jobs: HashMap<Id, Flight>,
}

/// A request that is under way.
struct Flight {
    /// Where it goes.
    host: HostId,
    job: Job,
    /// Where a page is written.
    part: String,
}

/// Whether a signal asks it to end: its terminal that goes away does too.
const fn is_to_end(heard: Heard) -> bool {
    heard.is_to_end() || matches!(heard.number, SIGHUP | SIGQUIT)
}

/// Between two attempts at one page, unless the host asks for a longer wait.
pub(crate) fn backoff() -> Backoff {
    Backoff::exponential(Duration::from_millis(200), Duration::from_secs(5)).jitter(Jitter::Full)
}

/// Where it was, if it is not where the page's address says.
fn at_host(job: &Job, is_elsewhere: bool, why: &str) -> String {
    if is_elsewhere {
        format!("at {}, where it was redirected to: {why}", job.at.host)
    } else {
        why.to_owned()
    }
}
