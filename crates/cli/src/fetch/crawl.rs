//! The event loop of a fetch: starts requests and handles their results until all pages have ended or a
//! signal stops it.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use reqwest::header::HeaderMap;
use reqwest::{Client, Url};
use signal_hook::consts::{SIGHUP, SIGQUIT};
use tidegate::{Kind, Random};
use tokio::sync::mpsc::Receiver;
use tokio::task::{Id, JoinError, JoinSet};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};

use super::address::Address;
use super::attempt::{AttemptResult, PageRequest, PageSink, Reply, Sink, attempt, status_text};
use super::folder::{Folder, write_failure};
use super::frontier::{Frontier, HostId, Start};
use super::header;
use super::host::{Job, JobKind};
use super::input::Line;
use super::progress::Progress;
use super::result::{Download, PageFailure, PageOutcome, PageResult};
use super::robots::{self, RobotsResponse, RobotsRules};
use super::tally::{FAILURES_SHOWN, HostLine, Summary, Tally, per};
use super::writer::{BATCH_MAX, Writer, WriterEvent};
use crate::failure::Failure;
use crate::signals::{SignalEvent, Signals};

/// Redirects that are followed for a page.
const HOPS_MAX: u32 = 10;
/// Interval of progress updates.
const UPDATE_INTERVAL: Duration = Duration::from_millis(250);
/// Finished pages that are not written yet, and their bytes in memory. At the bound, no request starts.
const UNWRITTEN_MAX: usize = 2 * BATCH_MAX;
const UNWRITTEN_BYTES_MAX: usize = 64 << 20;

/// The state of a fetch.
pub(crate) struct Crawl {
    pub(crate) frontier: Frontier,
    pub(crate) client: Client,
    /// Headers of the user.
    pub(crate) headers: HeaderMap,
    pub(crate) folder: Arc<Folder>,
    pub(crate) writer: Writer,
    pub(crate) progress: Progress,
    /// Concurrent requests to all hosts.
    pub(crate) concurrency: usize,
    pub(crate) bytes_max: u64,
    pub(crate) random: Random,
    pub(crate) counts: Counts,
}

/// Counts over all hosts.
#[derive(Default)]
pub(crate) struct Counts {
    pub(crate) total: Tally,
    bad: u64,
    failures: Vec<(Box<str>, String)>,
    final_failures: u64,
    /// Pages handed over to the writer and not written yet.
    unwritten: usize,
    unwritten_bytes: usize,
    /// Whether a flush was requested because no request is in flight.
    is_flushed: bool,
    /// The error that ended the input early.
    input_error: Option<io::Error>,
}

impl Counts {
    const fn has_capacity(&self) -> bool {
        self.unwritten < UNWRITTEN_MAX && self.unwritten_bytes < UNWRITTEN_BYTES_MAX
    }
}

/// Bytes that a finished page holds in memory until it is written.
const fn bytes_in_memory(result: &PageResult) -> usize {
    match &result.outcome {
        PageOutcome::Done(page) => page.bytes_in_memory,
        _ => 0,
    }
}

/// The result of a fetch.
pub(crate) struct CrawlResult {
    pub(crate) summary: Summary,
    /// The signal that stopped it.
    pub(crate) signal: Option<SignalEvent>,
    pub(crate) input_error: Option<io::Error>,
}

impl Crawl {
    /// Fetches everything.
    ///
    /// # Errors
    /// If the folder can no longer be written. Pages that were written are complete.
    pub(crate) async fn run(
        mut self,
        mut lines: Receiver<Vec<Line>>,
        mut signals: Signals,
    ) -> Result<CrawlResult, Failure> {
        let started = Instant::now();
        let mut in_flight = InFlight::default();
        let mut progress_tick = interval(UPDATE_INTERVAL);
        progress_tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut is_read, mut stop) = (false, None::<SignalEvent>);
        loop {
            let now = Instant::now();
            self.frontier.fire_timers(now);
            while stop.is_none() && in_flight.tasks.len() < self.concurrency && self.counts.has_capacity() {
                let Some(start) = self.frontier.next(now).map_err(|error| self.write_failure(&error))? else {
                    break;
                };
                self.send(&mut in_flight, start);
            }
            if stop.is_some() && in_flight.tasks.is_empty() {
                self.frontier.stop();
            }
            for result in self.frontier.finished.drain(..) {
                self.counts.unwritten += 1;
                self.counts.unwritten_bytes += bytes_in_memory(&result);
                self.counts.is_flushed = false;
                self.writer.write(result);
            }
            if in_flight.tasks.is_empty() && self.counts.unwritten > 0 && !self.counts.is_flushed {
                self.counts.is_flushed = true;
                self.writer.flush();
            }
            let is_quiet = in_flight.tasks.is_empty() && self.counts.unwritten == 0;
            if is_quiet && (stop.is_some() || (is_read && self.frontier.is_empty())) {
                break;
            }
            let may_read =
                !is_read && stop.is_none() && self.frontier.has_capacity() && self.counts.has_capacity();
            // Timers are ignored while the fetch stops.
            let due = self.frontier.next_due().filter(|_| stop.is_none());
            tokio::select! {
                Some(result) = in_flight.tasks.join_next_with_id() => self.on_attempt_end(&mut in_flight, result)?,
                event = self.writer.next() => self.on_writer_event(event)?,
                batch = lines.recv(), if may_read => match batch {
                    Some(batch) => self.read(batch)?,
                    None => is_read = true,
                },
                () = sleep_until(due.unwrap_or(now)), if due.is_some() => {}
                _ = progress_tick.tick() => self.progress.update(&mut self.frontier, &self.counts.total, is_read, stop.is_some(), in_flight.tasks.len()),
                signal = signals.next() => if is_stop(signal) {
                    if stop.is_some() {
                        // Parts without a line in the journal are removed when the folder is next opened.
                        self.progress.clear();
                        std::process::exit(i32::from(crate::child::exit_by(signal).code()));
                    }
                    stop = Some(signal);
                    self.progress.stopping(in_flight.tasks.len());
                },
            }
        }
        self.writer.finish();
        self.progress.clear();
        let unfinished = self.frontier.known - self.counts.total.ended().min(self.frontier.known);
        let is_interrupted = stop.is_some();
        let summary = self.summary(unfinished, is_interrupted, started.elapsed());
        Ok(CrawlResult { summary, signal: stop, input_error: self.counts.input_error.take() })
    }

    fn write_failure(&self, error: &io::Error) -> Failure {
        self.progress.clear();
        write_failure(self.folder.root(), error)
    }

    fn send(&self, in_flight: &mut InFlight, start: Start) {
        let Start { host, mut job, entry } = start;
        let mut headers = HeaderMap::new();
        let sink = match &job.kind {
            JobKind::Page(page) => {
                headers = header::allowed(&self.headers, &page.address, &job.at);
                Sink::Page(Box::new(PageSink {
                    page: page.address.url.clone(),
                    journal: self.writer.partials(),
                    parts: self.folder.parts(),
                    part: self.folder.new_part(page.key),
                    bytes_max: self.bytes_max,
                    partial: job.partial.take(),
                }))
            }
            JobKind::Robots { .. } => Sink::Robots,
        };
        let request = PageRequest { url: job.at.url.clone(), sink, has_failed: job.has_failed, headers };
        let task = in_flight.tasks.spawn(attempt(self.client.clone(), request, entry));
        in_flight.jobs.insert(task.id(), ActiveRequest { host, job });
    }

    fn read(&mut self, batch: Vec<Line>) -> Result<(), Failure> {
        for line in batch {
            match line {
                Line::Page(address) => {
                    self.frontier.add(address).map_err(|error| self.write_failure(&error))?;
                }
                Line::Exists(address) => self.frontier.skip(address),
                Line::Invalid(text, why) => {
                    self.frontier.known += 1;
                    self.counts.bad += 1;
                    let outcome = PageOutcome::Failed(PageFailure {
                        why: format!("invalid address: {why}"),
                        status: None,
                        is_final: true,
                    });
                    self.frontier.finished.push(PageResult {
                        url: text.into(),
                        host: None,
                        key: None,
                        attempts: 0,
                        partial: None,
                        outcome,
                    });
                }
                Line::ReadError(error) => self.counts.input_error = Some(error),
            }
        }
        Ok(())
    }

    fn on_writer_event(&mut self, event: Option<WriterEvent>) -> Result<(), Failure> {
        let batch = match event {
            Some(WriterEvent::Written(batch)) => batch,
            Some(WriterEvent::Failed(error)) => return Err(self.write_failure(&error)),
            None => {
                return Err(Failure::failed("fetched pages cannot be written: the writer thread has ended"));
            }
        };
        self.counts.unwritten -= batch.len();
        for result in batch {
            self.counts.unwritten_bytes -= bytes_in_memory(&result);
            // Before `on_written`, which may evict the host.
            let gave_up = result.host.and_then(|id| self.frontier.host(id).gave_up.clone());
            self.frontier.on_written(&result);
            self.counts.total.count(&result);
            if let PageOutcome::Failed(failed) = result.outcome {
                self.counts.final_failures += u64::from(failed.is_final);
                // The reason for giving up a host is reported once, not for each of its pages.
                let is_reported = gave_up.as_ref() == Some(&failed.why);
                if !is_reported && self.counts.failures.len() < FAILURES_SHOWN {
                    self.counts.failures.push((result.url, failed.why));
                }
            }
        }
        Ok(())
    }

    /// Handles the result of a request: retries it, follows a redirect, or ends its page.
    fn on_attempt_end(
        &mut self,
        in_flight: &mut InFlight,
        result: Result<(Id, AttemptResult), JoinError>,
    ) -> Result<(), Failure> {
        let (id, mut result) = match result {
            Ok(done) => done,
            Err(error) => {
                let why = format!("internal error: {error}");
                let result = AttemptResult {
                    reply: Reply::Invalid(why),
                    kind: Kind::Ignored,
                    is_of_page: false,
                    is_retryable: false,
                    hint: None,
                    partial: None,
                };
                (error.id(), result)
            }
        };
        let Some(ActiveRequest { host, mut job }) = in_flight.jobs.remove(&id) else {
            unreachable!("every task has a job")
        };
        self.counts.total.attempts += 1;
        job.partial = result.partial.take();
        if let Reply::Disk(error) = result.reply {
            return Err(self.write_failure(&error));
        }
        let Some(job) = self.frontier.on_attempt_end(host, job, &result, &mut self.random) else {
            return Ok(());
        };
        match job.kind {
            JobKind::Page(_) => self.on_page(host, job, result),
            JobKind::Robots { of, is_https } => self.on_robots(of, is_https, job, result),
        }
        // The target host of a redirect may have no pages of its own that would end.
        self.frontier.mark_idle(host);
        Ok(())
    }

    fn on_page(&mut self, host: HostId, job: Job, result: AttemptResult) {
        let is_final = !result.is_retryable;
        let failed = |why: String, status| PageOutcome::Failed(PageFailure { why, status, is_final });
        let JobKind::Page(page) = &job.kind else { unreachable!("it is a page") };
        let outcome = match result.reply {
            Reply::Page { status, body, extension, part } => {
                let moved_to = (job.hops > 0).then(|| job.at.url.to_string());
                let bytes_in_memory = body.bytes_in_memory();
                PageOutcome::Done(Download {
                    part,
                    file: page.file.with(extension),
                    body,
                    bytes_in_memory,
                    status,
                    moved_to,
                })
            }
            Reply::Redirect(url) => match self.follow_redirect(job, url, HOPS_MAX) {
                Ok(()) => return,
                Err((job, why)) => {
                    self.frontier.end(*job, failed(why, None));
                    return;
                }
            },
            Reply::Status(status) => {
                failed(with_host(&job, page.host != host, &status_text(status)), Some(status))
            }
            Reply::TooLarge => failed(format!("larger than --max-bytes {}", self.bytes_max), None),
            Reply::Broken(why) | Reply::Invalid(why) => {
                failed(with_host(&job, page.host != host, &why), None)
            }
            Reply::Robots(_) | Reply::Disk(_) => unreachable!("handled before"),
        };
        self.frontier.end(job, outcome);
    }

    fn on_robots(&mut self, of: HostId, is_https: bool, job: Job, result: AttemptResult) {
        let response = match result.reply {
            Reply::Robots(response) => response,
            // RFC 9309: after five redirects, or an invalid target, robots.txt counts as missing.
            Reply::Redirect(url) => match self.follow_redirect(job, url, robots::HOPS_MAX) {
                Ok(()) => return,
                Err(_) => RobotsResponse::Missing,
            },
            Reply::Invalid(_) => RobotsResponse::Missing,
            Reply::Broken(why) => RobotsResponse::Unavailable(why),
            Reply::Page { .. } | Reply::Status(_) | Reply::TooLarge | Reply::Disk(_) => {
                unreachable!("not a reply to a robots.txt request")
            }
        };
        let rules = RobotsRules::read(response, &self.frontier.options.user_agent, Instant::now());
        let host = self.frontier.host(of);
        let (delay, authority) = (rules.delay(), host.authority.clone());
        *host.rules_of(is_https) = rules;
        if let Some(delay) = delay {
            let throttle = self.frontier.gates.space(&authority, delay);
            self.frontier.host(of).throttle = Some(throttle);
        }
        self.frontier.on_request_end(of);
    }

    /// Follows a redirect, if its target is valid.
    fn follow_redirect(&mut self, job: Job, url: Url, hops_max: u32) -> Result<(), (Box<Job>, String)> {
        if job.hops >= hops_max {
            return Err((Box::new(job), format!("redirected more than {hops_max} times")));
        }
        match Address::of(url) {
            Ok(at) => {
                self.frontier.enqueue(job.redirected(at));
                Ok(())
            }
            Err(why) => Err((Box::new(job), format!("redirected to an invalid address: {why}"))),
        }
    }

    fn summary(&mut self, unfinished: u64, is_interrupted: bool, took: Duration) -> Summary {
        let mut hosts = Vec::new();
        for host in self.frontier.hosts.iter().flatten() {
            let span = host.requested.map(|(first, last)| last.duration_since(first).as_secs_f64());
            // n requests span n - 1 intervals.
            let per_second =
                span.filter(|span| *span > 0.0).map(|span| per(host.tally.attempts.saturating_sub(1), span));
            hosts.push(HostLine {
                host: host.authority.to_string(),
                tally: host.tally,
                per_second,
                limited_by: host.limited_by,
                throttle: self.frontier.throttle_state(host),
                gave_up: host.gave_up.clone(),
            });
        }
        hosts.sort_by_key(|line| std::cmp::Reverse(line.tally.ended()));
        let (tally, count) = self.frontier.evicted;
        if count > 0 {
            let host = format!("({count} evicted)");
            hosts.push(HostLine { host, tally, ..HostLine::default() });
        }
        Summary {
            hosts,
            total: self.counts.total,
            bad: self.counts.bad,
            unfinished,
            is_interrupted,
            took,
            failures: std::mem::take(&mut self.counts.failures),
            final_failures: self.counts.final_failures,
        }
    }
}

/// Requests in flight and their jobs.
#[derive(Default)]
struct InFlight {
    tasks: JoinSet<AttemptResult>,
    jobs: HashMap<Id, ActiveRequest>,
}

/// A request in flight.
struct ActiveRequest {
    /// The host it was sent to.
    host: HostId,
    job: Job,
}

/// Whether a signal stops the fetch. A hangup of the terminal does, too.
const fn is_stop(signal: SignalEvent) -> bool {
    signal.is_stop() || matches!(signal.number, SIGHUP | SIGQUIT)
}

/// Adds the host to a reason, if it is not the one in the page's address.
fn with_host(job: &Job, is_elsewhere: bool, why: &str) -> String {
    if is_elsewhere { format!("after a redirect to {}: {why}", job.at.host) } else { why.to_owned() }
}

#[cfg(test)]
mod tests {
    use tidegate::{Config, Outcome, Retry};

    use super::*;
    use crate::fetch::frontier::HostOptions;
    use crate::fetch::gates::{Gates, LimitOptions};

    /// The event loop panicked: the only idle host of more than 10,000 was the one whose page had just ended.
    #[tokio::test(start_paused = true)]
    async fn page_that_fails_among_many_hosts_is_counted() {
        let root = tempfile::tempdir().unwrap();
        let folder = Arc::new(Folder::open(root.path()).unwrap());
        let gates = Gates::new(Config::default(), &LimitOptions::default()).unwrap().0;
        let (patience, retry) = (Duration::from_mins(10), Retry::attempts(1));
        let options = HostOptions { ignores_robots: true, patience, retry, user_agent: "bot".to_owned() };
        let journal = std::fs::File::create(folder.journal_path()).unwrap();
        let mut crawl = Crawl {
            frontier: Frontier::new(gates, Arc::clone(&folder), options),
            client: Client::new(),
            headers: HeaderMap::new(),
            writer: Writer::start(&folder, journal, false).unwrap(),
            folder,
            progress: Progress::new(),
            concurrency: 1,
            bytes_max: 1,
            random: Random::seeded(1),
            counts: Counts::default(),
        };
        for number in 0..10_001 {
            let address = Address::parse(&format!("https://h{number}.example/")).unwrap();
            crawl.frontier.add(address).unwrap();
        }
        let Start { host, job, entry } = crawl.frontier.next(Instant::now()).unwrap().unwrap();
        entry.settle(Outcome::failure());
        let result = AttemptResult {
            reply: Reply::Broken("no connection".to_owned()),
            kind: Kind::Failure,
            is_of_page: true,
            is_retryable: true,
            hint: None,
            partial: None,
        };
        let job = crawl.frontier.on_attempt_end(host, job, &result, &mut crawl.random).unwrap();
        crawl.on_page(host, job, result);
        let written = std::mem::take(&mut crawl.frontier.finished);
        crawl.counts.unwritten = written.len();
        crawl.on_writer_event(Some(WriterEvent::Written(written))).unwrap();
        assert_eq!((crawl.frontier.evicted.1, crawl.counts.total.failed), (1, 1));
        assert_eq!(crawl.counts.failures.len(), 1);
    }
}
