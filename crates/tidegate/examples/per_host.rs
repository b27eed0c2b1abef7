//! A polite crawler of several hosts, each with limits that it learns by itself, and a live table of them.
//!
//! `cargo run --example per_host [-- --seconds 12]`
//!
//! The hosts are built in: five small HTTP servers on the loopback, which do not tell what they bear. One is fast, one is
//! slow, one says 429 with a `Retry-After`, one fails for a while and heals, one stops answering for a while. None is in
//! another's way. On a terminal the table is live; in a pipe there is only the last one.
#![allow(clippy::print_stdout, reason = "an example talks on its terminal")]

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

/// Pages of one host that are asked for at a time.
const FETCHERS: usize = 8;
/// Whoever has not answered by then is not waited for.
const PATIENCE: Duration = Duration::from_millis(300);
/// The host, and what it is like. The names are for tests and on no net.
const HOSTS: [(&str, Mood); 5] = [
    ("fast.test", Mood::Fast),
    ("slow.test", Mood::Slow),
    ("busy.test", Mood::Busy),
    ("sick.test", Mood::Sick),
    ("mute.test", Mood::Mute),
];

/// Limits as those of `Keyed::hosts()`, with shorter times: so that all of it can be seen in seconds.
fn limits(act: Duration) -> Result<Limits> {
    let circuit = Circuit::at_error_rate(0.4, 10, act).or_after_failures(5).open_for(act / 2).probes(3);
    let backoff = Backoff::exponential(PATIENCE / 6, PATIENCE).jitter(Jitter::Full);
    Ok(Throttle::host()
        .slots(Slots::adaptive(1..=6))
        .circuit(circuit)
        // An open circuit is no reason to drop a page: it is asked for again when probes pass.
        .retry(Retry::attempts(3).backoff(backoff).when_refused(WhenRefused::Wait))
        .limits()?)
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let span = seconds()?;
    let start = Instant::now();
    // The play has six acts; the far sides and the limits go by the same time.
    let act = span / 6;
    let mut names = HashMap::new();
    for (name, mood) in HOSTS {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        names.insert(Authority::new(name)?, listener.local_addr()?);
        tokio::spawn(serve(listener, Arc::new(FarSide::new(mood, start, act))));
    }

    let show = Show::new(start);
    let teller = show.clone();
    let hosts: Keyed<Authority> =
        Keyed::builder(limits(act)?).on_event(move |notice| teller.event(notice)).build()?;

    let crawler =
        Arc::new(Crawler { hosts: hosts.clone(), names, read: AtomicU64::new(0), lost: AtomicU64::new(0) });
    let mut fetchers = JoinSet::new();
    for (name, _) in HOSTS {
        for number in 0..FETCHERS {
            fetchers.spawn(Arc::clone(&crawler).fetch_all(name, number));
        }
    }
    let mut snapshots = hosts.snapshots(Duration::from_millis(100), HOSTS.len());
    let end = sleep_until(start + span);
    tokio::pin!(end);
    loop {
        tokio::select! {
            seen = snapshots.next() => show.look(&seen),
            () = &mut end => break,
        }
    }
    // Nobody new is let in, and whoever waits hears so; what is on its way is waited for.
    hosts.drain().await;
    fetchers.join_all().await;
    show.finish(&hosts.snapshot(HOSTS.len()), &crawler)
}

/// How long it shall take: 12 s unless told.
fn seconds() -> Result<Duration> {
    let mut arguments = std::env::args().skip(1);
    match (arguments.next().as_deref(), arguments.next()) {
        (None, _) => Ok(Duration::from_secs(12)),
        (Some("--seconds"), Some(seconds)) => Ok(Duration::try_from_secs_f64(seconds.parse()?)?),
        _ => Err("it is started as `per_host [--seconds 12]`".into()),
    }
}

struct Crawler {
    hosts: Keyed<Authority>,
    /// Where each host is.
    names: HashMap<Authority, SocketAddr>,
    /// Pages that came, and pages that were given up.
    read: AtomicU64,
    lost: AtomicU64,
}

impl Crawler {
    /// Reads pages of a host, one after the other, until nobody is let in any more.
    async fn fetch_all(self: Arc<Self>, name: &str, number: usize) {
        for page in (number..).step_by(FETCHERS) {
            let url = format!("http://{name}/page/{page}");
            match self.fetch(&url).await {
                Some(true) => self.read.fetch_add(1, Ordering::Relaxed),
                Some(false) => self.lost.fetch_add(1, Ordering::Relaxed),
                None => return,
            };
        }
    }

    /// Reads one page, by the limits of its host. Answers whether it came; `None` when no attempt was made.
    async fn fetch(&self, url: &str) -> Option<bool> {
        let host = Authority::new(url).ok()?;
        let address = *self.names.get(&host)?;
        // What a status and its headers mean is in the table of classes; of errors only we know.
        let classes = HttpClasses::new(Classes::new()).errors(|error: &io::Error| match error.kind() {
            io::ErrorKind::TimedOut => Completion::Timeout,
            _ => Completion::Connection,
        });
        let throttle = self.hosts.throttle(&host);
        let answer =
            throttle.runner().classified_by(classes).run(Cost::request(), |_| get(address, &host, url)).await;
        match answer {
            Ok(response) => Some(response.status().is_success()),
            Err(tidegate::RunError::Refused(_)) => None,
            Err(_) => Some(false),
        }
    }
}

/// One GET: the least of HTTP that will do.
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
    let text = timeout(PATIENCE, exchange).await.map_err(io::Error::from)??;
    read(&text).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

fn read(text: &str) -> Option<Response<String>> {
    let (head, body) = text.split_once("\r\n\r\n")?;
    let mut lines = head.lines();
    let status: u16 = lines.next()?.split(' ').nth(1)?.parse().ok()?;
    let mut response = Response::builder().status(status);
    for (name, value) in lines.filter_map(|line| line.split_once(':')) {
        response = response.header(name, value.trim());
    }
    response.body(body.to_owned()).ok()
}

/// What is seen of it: events, and under them the table, which is drawn in one go.
#[derive(Clone)]
struct Show {
    start: Instant,
    /// On the standard error; nothing where that is no terminal.
    table: ProgressBar,
    is_colourful: bool,
}

impl Show {
    fn new(start: Instant) -> Self {
        let table = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
        if let Ok(style) = ProgressStyle::with_template("{msg}") {
            table.set_style(style);
        }
        Self { start, table, is_colourful: std::env::var_os("NO_COLOR").is_none() }
    }

    fn look(&self, seen: &KeyedSnapshot<Authority>) {
        // An empty line keeps it apart from the events.
        self.table.set_message(format!("\n{}", table(seen, self.start.elapsed(), self.is_colourful)));
    }

    fn event(&self, notice: &KeyedNotice<Authority>) {
        let KeyedEvent::Throttle(event) = &notice.event else { return };
        let what = match event {
            Event::Slowed { rate: Some(rate), why, .. } => {
                let why = match why {
                    Why::Overload => "it says that it is too much".to_owned(),
                    Why::Latency { latency, .. } => format!("a page took {} ms", latency.as_millis()),
                    Why::Failures { count, .. } => format!("{count} failures"),
                    _ => return,
                };
                format!("slowed from {:.1} to {:.1}/s: {why}", rate.from.as_f64(), rate.to.as_f64())
            }
            Event::Recovered { rate } => format!("recovered: {:.1}/s as before", rate.as_f64()),
            Event::Paused { span, .. } => format!("paused for {:.1} s, as it asked", span.as_secs_f64()),
            Event::CircuitOpened { span, why } => {
                let why = match why {
                    Trip::Consecutive { failures } => format!("{failures} failures in a row"),
                    Trip::ErrorRate { failures, total } => format!("{failures} of {total} failed"),
                    Trip::Probe => "a probe failed".to_owned(),
                    _ => return,
                };
                format!("circuit opened for {:.1} s: {why}", span.as_secs_f64())
            }
            Event::CircuitHalfOpened => "circuit half-open: a probe goes out".to_owned(),
            Event::CircuitClosed => "circuit closed".to_owned(),
            _ => return,
        };
        let (at, host) =
            (self.start.elapsed().as_secs_f64(), notice.key.as_ref().map_or("", Authority::as_str));
        self.table.println(format!("{at:>5.1} s  {host:<11}{what}"));
    }

    /// Leaves the last table behind, and checks that it adds up.
    fn finish(&self, seen: &KeyedSnapshot<Authority>, crawler: &Crawler) -> Result<()> {
        self.table.println("");
        self.table.finish_and_clear();
        println!("{}", table(seen, self.start.elapsed(), false));
        let (read, lost) = (crawler.read.load(Ordering::Relaxed), crawler.lost.load(Ordering::Relaxed));
        println!("\n{read} pages read, {lost} given up; {} attempts were made again", seen.retries);
        let entered: u64 = seen.top.iter().map(|view| view.throttle.admitted).sum();
        if (seen.in_flight, seen.waiting, seen.admitted) != (0, 0, entered) {
            return Err(format!("the hosts let {entered} in, and all of them {}", seen.admitted).into());
        }
        Ok(())
    }
}

/// One line for all hosts, and one for each.
fn table(seen: &KeyedSnapshot<Authority>, at: Duration, is_colourful: bool) -> String {
    let mut text = format!(
        "{:.1} s  {} requests  {} throttled  {} refused  {} retries  {} open  {} half-open  {:.0} s waited\n",
        at.as_secs_f64(),
        seen.total,
        seen.throttled,
        seen.refused,
        seen.retries,
        seen.open,
        seen.half_open,
        seen.waited.as_secs_f64(),
    );
    text.push_str(&line(&[
        "host", "rate", "level", "wait", "flight", "ok", "429", "5xx", "net", "mean", "p95", "errors",
        "circuit", "next",
    ]));
    for (name, _) in HOSTS {
        let Some(view) = seen.top.iter().find(|view| view.key.as_str() == name) else { continue };
        let row = row(view);
        // A write to a string cannot fail.
        let _ = match colour(&view.throttle).filter(|_| is_colourful) {
            Some(colour) => write!(text, "\n\x1b[{colour}m{row}\x1b[0m"),
            None => write!(text, "\n{row}"),
        };
    }
    text
}

fn row(view: &KeyView<Authority>) -> String {
    let (seen, counts) = (&view.throttle, view.throttle.outcomes);
    let circuit = match seen.circuit.map(|circuit| circuit.state) {
        None | Some(CircuitState::Closed) => "closed",
        Some(CircuitState::Open) => "open",
        Some(CircuitState::HalfOpen) => "half-open",
    };
    let next = match view.next_entry() {
        None if seen.state == State::Closed => String::new(),
        None => "a return".to_owned(),
        Some(Duration::ZERO) => "now".to_owned(),
        Some(wait) => span(Some(wait)),
    };
    line(&[
        view.key.as_str(),
        &seen.rate.map_or_else(String::new, |rate| format!("{:.1}/s", rate.as_f64())),
        &seen.rate_level.unwrap_or_default().to_string(),
        &seen.waiting.to_string(),
        &seen.in_flight.to_string(),
        &counts.successes.to_string(),
        &counts.throttled.to_string(),
        &counts.server.to_string(),
        &counts.network.to_string(),
        &span(seen.latency_mean),
        &span(seen.latency_p95),
        &seen.error_rate.map_or_else(String::new, |rate| format!("{:.0} %", 100.0 * rate)),
        circuit,
        &next,
    ])
}

/// The cells of a line, 98 columns in all: the host and the circuit on the left of theirs, the others on the right.
fn line(cells: &[&str; 14]) -> String {
    let [host, rate, level, wait, flight, ok, busy, failed, silent, mean, p95, errors, circuit, next] = cells;
    let load = format!("{host:<10}{rate:>7}{level:>6}{wait:>5}{flight:>7}");
    let ends = format!("{ok:>6}{busy:>5}{failed:>5}{silent:>5}{mean:>8}{p95:>8}{errors:>7}");
    format!("{load}{ends}  {circuit:<9}{next:>8}").trim_end().to_owned()
}

fn span(span: Option<Duration>) -> String {
    match span {
        None => String::new(),
        Some(span) if span < Duration::from_secs(1) => format!("{} ms", span.as_millis()),
        Some(span) => format!("{:.1} s", span.as_secs_f64()),
    }
}

/// Red while nobody or nearly nobody enters, yellow while it is slower than it was.
const fn colour(seen: &Snapshot) -> Option<u8> {
    match seen.state {
        State::CircuitOpen => Some(31),
        State::Paused | State::Cooling => Some(33),
        _ => None,
    }
}

/// What a host is like.
#[derive(Clone, Copy)]
enum Mood {
    /// Answers at once.
    Fast,
    /// Has one worker, which takes its time.
    Slow,
    /// Allows so many requests a second, and says when to come back.
    Busy,
    /// Fails in the second act, and heals.
    Sick,
    /// Says nothing in the fourth act.
    Mute,
}

/// A server. Nothing in it knows of tidegate.
struct FarSide {
    mood: Mood,
    start: Instant,
    act: Duration,
    worker: Semaphore,
    recent: Mutex<VecDeque<Instant>>,
}

/// A status, and a header with it.
type Reply = (&'static str, &'static str);
const DONE: Reply = ("200 OK", "X-Page: yes");

impl FarSide {
    /// What the busy one allows, in a second.
    const QUOTA: usize = 15;

    fn new(mood: Mood, start: Instant, act: Duration) -> Self {
        Self { mood, start, act, worker: Semaphore::new(1), recent: Mutex::default() }
    }

    /// Its answer; `None` is silence.
    async fn reply(&self) -> Option<Reply> {
        let elapsed = self.start.elapsed();
        let is_in_act = |number: u32| (self.act * number..self.act * (number + 1)).contains(&elapsed);
        match self.mood {
            Mood::Slow => {
                let _worker = self.worker.acquire().await;
                sleep(Duration::from_millis(35)).await;
            }
            Mood::Busy if !self.allows() => return Some(("429 Too Many Requests", "Retry-After: 1")),
            Mood::Sick if is_in_act(1) => return Some(("503 Service Unavailable", "X-Page: no")),
            Mood::Mute if is_in_act(3) => return None,
            _ => sleep(Duration::from_millis(12)).await,
        }
        Some(DONE)
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

async fn serve(listener: TcpListener, far_side: Arc<FarSide>) -> io::Result<()> {
    loop {
        let (stream, _) = listener.accept().await?;
        tokio::spawn(answer(stream, Arc::clone(&far_side)));
    }
}

async fn answer(stream: TcpStream, far_side: Arc<FarSide>) -> io::Result<()> {
    let mut stream = BufReader::new(stream);
    let mut line = String::new();
    // The head of the request ends with an empty line.
    while stream.read_line(&mut line).await? > 2 {
        line.clear();
    }
    if let Some((status, header)) = far_side.reply().await {
        let body = "<p>a page</p>";
        let head =
            format!("HTTP/1.1 {status}\r\n{header}\r\nContent-Length: {}\r\nConnection: close", body.len());
        return stream.write_all(format!("{head}\r\n\r\n{body}").as_bytes()).await;
    }
    // Holds the line until the other hangs up.
    stream.read_u8().await.map(drop)
}
