//! A polite crawler of several hosts that learns the limits of each, with a live table of them.
//!
//! `cargo run --example per_host [-- --seconds 12]`
//!
//! The hosts are built in: five small HTTP servers on the loopback with undocumented limits. One is fast, one
//! is slow, one returns 429 with a `Retry-After`, one fails for a while, one stops responding for a while. No
//! host delays another. On a terminal the table is live; in a pipe only the last one is printed.
#![allow(clippy::print_stdout, reason = "an example prints its results")]

use std::collections::{HashMap, VecDeque};
use std::error::Error;
use std::fmt::Write as _;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http::Response;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tidegate::{
    Authority, Backoff, Circuit, CircuitState, Classes, Completion, Cost, Event, HttpClasses, Jitter,
    KeyView, Keyed, KeyedEvent, KeyedNotice, KeyedSnapshot, Limits, Retry, Slots, Snapshot, State, Throttle,
    Trip, WhenRefused, Why,
};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// Concurrent fetches per host.
const FETCHERS: usize = 8;
/// The timeout of one request.
const TIMEOUT: Duration = Duration::from_millis(300);
/// The hosts and their behaviour. `.test` is a reserved domain that never resolves.
const HOSTS: [(&str, Behaviour); 5] = [
    ("fast.test", Behaviour::Fast),
    ("slow.test", Behaviour::Slow),
    ("busy.test", Behaviour::Busy),
    ("fail.test", Behaviour::Failing),
    ("hang.test", Behaviour::Hanging),
];

/// The limits of `Keyed::hosts()` with shorter times, so that everything happens within seconds.
fn limits(phase_length: Duration) -> Result<Limits> {
    let circuit = Circuit::at_error_rate(0.4, 10, phase_length)
        .or_after_failures(5)
        .open_for(phase_length / 2)
        .probes(3);
    let backoff = Backoff::exponential(TIMEOUT / 6, TIMEOUT).jitter(Jitter::Full);
    Ok(Throttle::host()
        .slots(Slots::adaptive(1..=6))
        .circuit(circuit)
        // An open circuit does not fail a page: the retry waits until the circuit admits it.
        .retry(Retry::attempts(3).backoff(backoff).when_refused(WhenRefused::Wait))
        .limits()?)
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let duration = duration_argument()?;
    let start = Instant::now();
    // The run has six phases; the times of servers and limits scale with their length.
    let phase_length = duration / 6;
    let mut addresses = HashMap::new();
    for (name, behaviour) in HOSTS {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        addresses.insert(Authority::new(name)?, listener.local_addr()?);
        tokio::spawn(serve(listener, Arc::new(Upstream::new(behaviour, start, phase_length))));
    }

    let console = Console::new(start);
    let events = console.clone();
    let hosts: Keyed<Authority> =
        Keyed::builder(limits(phase_length)?).on_event(move |notice| events.event(notice)).build()?;

    let crawler = Arc::new(Crawler {
        hosts: hosts.clone(),
        addresses,
        fetched: AtomicU64::new(0),
        failed: AtomicU64::new(0),
    });
    let mut fetchers = JoinSet::new();
    for (name, _) in HOSTS {
        for number in 0..FETCHERS {
            fetchers.spawn(Arc::clone(&crawler).fetch_all(name, number));
        }
    }
    let mut snapshots = hosts.snapshots(Duration::from_millis(100), HOSTS.len());
    let end = sleep_until(start + duration);
    tokio::pin!(end);
    loop {
        tokio::select! {
            snapshot = snapshots.next() => console.update(&snapshot),
            () = &mut end => break,
        }
    }
    // Refuses new and queued requests, and waits for those in flight.
    hosts.drain().await;
    fetchers.join_all().await;
    console.finish(&hosts.snapshot(HOSTS.len()), &crawler)
}

/// The duration of the run, 12 s by default.
fn duration_argument() -> Result<Duration> {
    let mut arguments = std::env::args().skip(1);
    match (arguments.next().as_deref(), arguments.next()) {
        (None, _) => Ok(Duration::from_secs(12)),
        (Some("--seconds"), Some(seconds)) => Ok(Duration::try_from_secs_f64(seconds.parse()?)?),
        _ => Err("usage: per_host [--seconds 12]".into()),
    }
}

struct Crawler {
    hosts: Keyed<Authority>,
    /// The address of each host.
    addresses: HashMap<Authority, SocketAddr>,
    /// Pages that succeeded, and pages that failed.
    fetched: AtomicU64,
    failed: AtomicU64,
}

impl Crawler {
    /// Fetches pages of a host one after another until the throttle is closed.
    async fn fetch_all(self: Arc<Self>, name: &str, number: usize) {
        for page in (number..).step_by(FETCHERS) {
            let url = format!("http://{name}/page/{page}");
            match self.fetch(&url).await {
                Some(true) => self.fetched.fetch_add(1, Ordering::Relaxed),
                Some(false) => self.failed.fetch_add(1, Ordering::Relaxed),
                None => return,
            };
        }
    }

    /// Fetches a page within the limits of its host. Returns whether that succeeded, or `None` if it was
    /// refused.
    async fn fetch(&self, url: &str) -> Option<bool> {
        let host = Authority::new(url).ok()?;
        let address = *self.addresses.get(&host)?;
        // `Classes` knows status codes and headers; errors depend on the client.
        let classes = HttpClasses::new(Classes::new()).errors(|error: &io::Error| match error.kind() {
            io::ErrorKind::TimedOut => Completion::Timeout,
            _ => Completion::Connection,
        });
        let throttle = self.hosts.throttle(&host);
        let result =
            throttle.runner().classified_by(classes).run(Cost::request(), |_| get(address, &host, url)).await;
        match result {
            Ok(response) => Some(response.status().is_success()),
            Err(tidegate::RunError::Refused(_)) => None,
            Err(_) => Some(false),
        }
    }
}

/// A minimal HTTP GET.
async fn get(address: SocketAddr, host: &Authority, url: &str) -> io::Result<Response<String>> {
    let exchange = async {
        let mut stream = TcpStream::connect(address).await?;
        let path = url.splitn(4, '/').last().unwrap_or_default();
        let request = format!("GET /{path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut text = String::new();
        stream.take(64 << 10).read_to_string(&mut text).await?;
        io::Result::Ok(text)
    };
    let text = timeout(TIMEOUT, exchange).await.map_err(io::Error::from)??;
    parse_response(&text).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

fn parse_response(text: &str) -> Option<Response<String>> {
    let (head, body) = text.split_once("\r\n\r\n")?;
    let mut lines = head.lines();
    let status: u16 = lines.next()?.split(' ').nth(1)?.parse().ok()?;
    let mut response = Response::builder().status(status);
    for (name, value) in lines.filter_map(|line| line.split_once(':')) {
        response = response.header(name, value.trim());
    }
    response.body(body.to_owned()).ok()
}

/// Prints events, and below them the table, which is redrawn as a whole.
#[derive(Clone)]
struct Console {
    start: Instant,
    /// Drawn on stderr; hidden if that is not a terminal.
    table: ProgressBar,
    is_colourful: bool,
}

impl Console {
    fn new(start: Instant) -> Self {
        let table = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
        if let Ok(style) = ProgressStyle::with_template("{msg}") {
            table.set_style(style);
        }
        Self { start, table, is_colourful: std::env::var_os("NO_COLOR").is_none() }
    }

    fn update(&self, snapshot: &KeyedSnapshot<Authority>) {
        // An empty line separates the table from the events.
        self.table.set_message(format!("\n{}", table(snapshot, self.start.elapsed(), self.is_colourful)));
    }

    fn event(&self, notice: &KeyedNotice<Authority>) {
        let KeyedEvent::Throttle(event) = &notice.event else { return };
        let what = match event {
            Event::Slowed { rate: Some(rate), why, .. } => {
                let reason = match why {
                    Why::Overload => "the host rejected a request".to_owned(),
                    Why::Latency { latency, .. } => format!("a page took {} ms", latency.as_millis()),
                    Why::Failures { count, .. } => format!("{count} failures"),
                    _ => return,
                };
                format!("slowed from {:.1} to {:.1}/s: {reason}", rate.from.as_f64(), rate.to.as_f64())
            }
            Event::Recovered { rate } => format!("recovered: back to {:.1}/s", rate.as_f64()),
            Event::Paused { span, .. } => {
                format!("paused for {:.1} s, as the host requested", span.as_secs_f64())
            }
            Event::CircuitOpened { span, why } => {
                let reason = match why {
                    Trip::Consecutive { failures } => format!("{failures} failures in a row"),
                    Trip::ErrorRate { failures, total } => format!("{failures} of {total} failed"),
                    Trip::Probe => "a probe failed".to_owned(),
                    _ => return,
                };
                format!("circuit opened for {:.1} s: {reason}", span.as_secs_f64())
            }
            Event::CircuitHalfOpened => "circuit half-open: sending a probe".to_owned(),
            Event::CircuitClosed => "circuit closed".to_owned(),
            _ => return,
        };
        let (at, host) =
            (self.start.elapsed().as_secs_f64(), notice.key.as_ref().map_or("", Authority::as_str));
        self.table.println(format!("{at:>5.1} s  {host:<11}{what}"));
    }

    /// Prints the last table and checks its sums.
    fn finish(&self, snapshot: &KeyedSnapshot<Authority>, crawler: &Crawler) -> Result<()> {
        self.table.println("");
        self.table.finish_and_clear();
        println!("{}", table(snapshot, self.start.elapsed(), false));
        let (fetched, failed) =
            (crawler.fetched.load(Ordering::Relaxed), crawler.failed.load(Ordering::Relaxed));
        println!("\n{fetched} pages fetched, {failed} failed; {} retries", snapshot.retries);
        let admitted: u64 = snapshot.top.iter().map(|view| view.throttle.admitted).sum();
        if (snapshot.in_flight, snapshot.waiting, snapshot.admitted) != (0, 0, admitted) {
            return Err(format!(
                "the hosts admitted {admitted} requests, but their total is {}",
                snapshot.admitted
            )
            .into());
        }
        Ok(())
    }
}

/// A summary line, and a row per host.
fn table(snapshot: &KeyedSnapshot<Authority>, at: Duration, is_colourful: bool) -> String {
    let mut text = format!(
        "{:.1} s  {} requests  {} throttled  {} refused  {} retries  {} open  {} half-open  {:.0} s waited\n",
        at.as_secs_f64(),
        snapshot.total,
        snapshot.throttled,
        snapshot.refused,
        snapshot.retries,
        snapshot.open,
        snapshot.half_open,
        snapshot.waited.as_secs_f64(),
    );
    text.push_str(&format_row(&[
        "host", "rate", "level", "wait", "flight", "ok", "429", "5xx", "net", "mean", "p95", "errors",
        "circuit", "next",
    ]));
    for (name, _) in HOSTS {
        let Some(view) = snapshot.top.iter().find(|view| view.key.as_str() == name) else { continue };
        let row = host_row(view);
        // A write to a string cannot fail.
        let _ = match colour(&view.throttle).filter(|_| is_colourful) {
            Some(colour) => write!(text, "\n\x1b[{colour}m{row}\x1b[0m"),
            None => write!(text, "\n{row}"),
        };
    }
    text
}

fn host_row(view: &KeyView<Authority>) -> String {
    let (snapshot, counts) = (&view.throttle, view.throttle.outcomes);
    let circuit = match snapshot.circuit.map(|circuit| circuit.state) {
        None | Some(CircuitState::Closed) => "closed",
        Some(CircuitState::Open) => "open",
        Some(CircuitState::HalfOpen) => "half-open",
    };
    let next = match view.next_entry() {
        None if snapshot.state == State::Closed => String::new(),
        None => "full".to_owned(),
        Some(Duration::ZERO) => "now".to_owned(),
        Some(wait) => format_span(Some(wait)),
    };
    format_row(&[
        view.key.as_str(),
        &snapshot.rate.map_or_else(String::new, |rate| format!("{:.1}/s", rate.as_f64())),
        &snapshot.rate_level.unwrap_or_default().to_string(),
        &snapshot.waiting.to_string(),
        &snapshot.in_flight.to_string(),
        &counts.successes.to_string(),
        &counts.throttled.to_string(),
        &counts.server.to_string(),
        &counts.network.to_string(),
        &format_span(snapshot.latency_mean),
        &format_span(snapshot.latency_p95),
        &snapshot.error_rate.map_or_else(String::new, |rate| format!("{:.0} %", 100.0 * rate)),
        circuit,
        &next,
    ])
}

/// Formats a row of 98 columns: host and circuit are left-aligned, the others right-aligned.
fn format_row(cells: &[&str; 14]) -> String {
    let [host, rate, level, wait, flight, ok, throttled, server, network, mean, p95, errors, circuit, next] =
        cells;
    let load = format!("{host:<10}{rate:>7}{level:>6}{wait:>5}{flight:>7}");
    let ends = format!("{ok:>6}{throttled:>5}{server:>5}{network:>5}{mean:>8}{p95:>8}{errors:>7}");
    format!("{load}{ends}  {circuit:<9}{next:>8}").trim_end().to_owned()
}

fn format_span(span: Option<Duration>) -> String {
    match span {
        None => String::new(),
        Some(span) if span < Duration::from_secs(1) => format!("{} ms", span.as_millis()),
        Some(span) => format!("{:.1} s", span.as_secs_f64()),
    }
}

/// Red while the circuit is open, yellow while paused or cooling down.
const fn colour(snapshot: &Snapshot) -> Option<u8> {
    match snapshot.state {
        State::CircuitOpen => Some(31),
        State::Paused | State::Cooling => Some(33),
        _ => None,
    }
}

/// The behaviour of a host.
#[derive(Clone, Copy)]
enum Behaviour {
    /// Responds at once.
    Fast,
    /// Has one slow worker.
    Slow,
    /// Allows a number of requests per second, and returns 429 with a `Retry-After` to the rest.
    Busy,
    /// Returns 503 in the second phase.
    Failing,
    /// Does not respond in the fourth phase.
    Hanging,
}

/// An upstream server, which uses nothing of tidegate.
struct Upstream {
    behaviour: Behaviour,
    start: Instant,
    phase_length: Duration,
    worker: Semaphore,
    recent: Mutex<VecDeque<Instant>>,
}

/// A status line and a header.
type Reply = (&'static str, &'static str);
const SUCCESS: Reply = ("200 OK", "X-Page: yes");

impl Upstream {
    /// Requests per second that the busy host allows.
    const QUOTA: usize = 15;

    fn new(behaviour: Behaviour, start: Instant, phase_length: Duration) -> Self {
        Self { behaviour, start, phase_length, worker: Semaphore::new(1), recent: Mutex::default() }
    }

    /// The reply; `None` if it does not respond.
    async fn reply(&self) -> Option<Reply> {
        let elapsed = self.start.elapsed();
        let is_in_phase =
            |number: u32| (self.phase_length * number..self.phase_length * (number + 1)).contains(&elapsed);
        match self.behaviour {
            Behaviour::Slow => {
                let _worker = self.worker.acquire().await;
                sleep(Duration::from_millis(35)).await;
            }
            Behaviour::Busy if !self.allows() => return Some(("429 Too Many Requests", "Retry-After: 1")),
            Behaviour::Failing if is_in_phase(1) => return Some(("503 Service Unavailable", "X-Page: no")),
            Behaviour::Hanging if is_in_phase(3) => return None,
            _ => sleep(Duration::from_millis(12)).await,
        }
        Some(SUCCESS)
    }

    fn allows(&self) -> bool {
        let now = Instant::now();
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        recent.retain(|at| now - *at < Duration::from_secs(1));
        let is_allowed = recent.len() < Self::QUOTA;
        if is_allowed {
            recent.push_back(now);
        }
        is_allowed
    }
}

async fn serve(listener: TcpListener, upstream: Arc<Upstream>) -> io::Result<()> {
    loop {
        let (stream, _) = listener.accept().await?;
        tokio::spawn(handle(stream, Arc::clone(&upstream)));
    }
}

async fn handle(stream: TcpStream, upstream: Arc<Upstream>) -> io::Result<()> {
    let mut stream = BufReader::new(stream);
    let mut line = String::new();
    // The head of the request ends with an empty line.
    while stream.read_line(&mut line).await? > 2 {
        line.clear();
    }
    if let Some((status, header)) = upstream.reply().await {
        let body = "<p>a page</p>";
        let head =
            format!("HTTP/1.1 {status}\r\n{header}\r\nContent-Length: {}\r\nConnection: close", body.len());
        return stream.write_all(format!("{head}\r\n\r\n{body}").as_bytes()).await;
    }
    // Holds the connection open until the client closes it.
    stream.read_u8().await.map(drop)
}
