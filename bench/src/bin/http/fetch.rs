//! `tidegate fetch` with its default options, against a minimal program and against what a host allows.
//!
//! `fetch_overhead`: both sides are separate processes that read the same addresses from a file, request them
//! from a local server without limits, eight at once, and write every file. Ours finds the rate on its own,
//! requests robots.txt, keeps a journal, and syncs a file before it renames it; the peer only writes.
//!
//! `fetch_hidden`: the server has a token bucket that it does not announce, and answers 429 with a
//! `Retry-After` of whole seconds beyond it. The peer is the time that the bucket needs.

use std::env;
use std::fmt::Write as _;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use axum::Router;
use axum::http::StatusCode;
use axum::http::header::RETRY_AFTER;
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use tempfile::TempDir;
use tidegate_bench::report::Row;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::Semaphore;
use tokio::task::{JoinSet, spawn_blocking};

const BYTES: usize = 8 << 10;

/// The files of a first round, from which the number for [`SECONDS`] is computed.
const FILES: u32 = 20_000;
/// A round takes at least this long on each side, which includes finding the rate.
const SECONDS: f64 = 12.0;
/// For a machine that fetches too fast to measure it longer.
const FILES_MAX: u32 = 400_000;
/// The default of `--per-host`.
const CONCURRENCY: usize = 8;
const OVERHEAD_TARGET: f64 = 0.85;
/// Few rounds, as each is long.
const ROUNDS_PER: u32 = 20;

const HIDDEN_FILES: u32 = 300;
/// Tokens per second, and the burst.
const HIDDEN_RATE: u32 = 20;
const HIDDEN_TARGET: f64 = 1.2;
const REJECTED_MAX: f64 = 12.0;

/// Files per second of both sides, each the best of its interleaved rounds.
pub(crate) fn overhead(rounds: u32) -> Result<Vec<Row>> {
    let body: &'static [u8] = Vec::leak(vec![b'x'; BYTES]);
    let (_runtime, address) = serve(get(move || async move { body }))?;
    let folder = TempDir::new()?;
    let (ours, peer) = (folder.path().join("ours"), folder.path().join("peer"));
    let round = |files: u32| -> Result<(f64, f64)> {
        let urls = urls(folder.path(), address, files)?;
        Ok((seconds(fetch(&urls, &ours)?, &ours, files)?, seconds(plain(&urls, &peer)?, &peer, files)?))
    };
    let files = files_for(round(FILES)?);
    let mut best = (0.0_f64, 0.0_f64);
    for _ in 0..rounds.div_ceil(ROUNDS_PER) {
        let took = round(files)?;
        best = (best.0.max(f64::from(files) / took.0), best.1.max(f64::from(files) / took.1));
    }
    let what = format!("`tidegate fetch` vs reqwest, {CONCURRENCY} at once: {files} files of {BYTES} bytes");
    Ok(vec![Row::at_least("fetch_overhead", best, Some(OVERHEAD_TARGET), "files/s", &what)])
}

/// As many files as the faster side fetches in [`SECONDS`], if [`FILES`] took this long.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "within its bounds")]
fn files_for((ours, peer): (f64, f64)) -> u32 {
    let files = f64::from(FILES) * SECONDS / ours.min(peer);
    files.clamp(f64::from(FILES), f64::from(FILES_MAX)) as u32
}

/// The time for files behind a hidden token bucket, and the requests that it rejected.
pub(crate) fn hidden(_: u32) -> Result<Vec<Row>> {
    let bucket = Arc::new(HiddenBucket::default());
    let shared = Arc::clone(&bucket);
    let (_runtime, address) = serve(get(move || async move { shared.respond() }))?;
    let folder = TempDir::new()?;
    let urls = urls(folder.path(), address, HIDDEN_FILES)?;
    let out = folder.path().join("ours");
    let took = seconds(fetch(&urls, &out)?, &out, HIDDEN_FILES)?;
    let (files, rate) = (f64::from(HIDDEN_FILES), f64::from(HIDDEN_RATE));
    let what = format!("{files} files, a hidden bucket of {rate}/s and burst {rate}: its time");
    let time = Row::new("fetch_hidden", (took, files / rate), Some(HIDDEN_TARGET), "s", &what);
    let rejected = f64::from(bucket.rejected.load(Ordering::Relaxed));
    let what = "the requests that it answered with 429";
    Ok(vec![time, Row::new("fetch_hidden_429", (rejected, REJECTED_MAX), Some(1.0), "requests", what)])
}

/// A token bucket that a client cannot see.
#[derive(Debug, Default)]
struct HiddenBucket {
    /// When it is full again. Each request moves this by one interval.
    full_at: Mutex<Option<Instant>>,
    rejected: AtomicU32,
}

impl HiddenBucket {
    fn respond(&self) -> Response {
        let interval = Duration::from_secs(1) / HIDDEN_RATE;
        let (now, burst) = (Instant::now(), interval * HIDDEN_RATE);
        let mut full_at = self.full_at.lock().unwrap_or_else(PoisonError::into_inner);
        let next = full_at.unwrap_or(now).max(now) + interval;
        if let Some(wait) = next.checked_duration_since(now + burst).filter(|wait| !wait.is_zero()) {
            self.rejected.fetch_add(1, Ordering::Relaxed);
            let seconds = wait.as_secs() + u64::from(wait.subsec_nanos() > 0);
            return (StatusCode::TOO_MANY_REQUESTS, [(RETRY_AFTER, seconds.to_string())]).into_response();
        }
        *full_at = Some(next);
        "hello".into_response()
    }
}

/// Serves files, without a robots.txt, until the runtime is dropped.
fn serve(files: axum::routing::MethodRouter) -> Result<(Runtime, SocketAddr)> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0"))?;
    let address = listener.local_addr()?;
    let robots = get(|| async { StatusCode::NOT_FOUND });
    let app = Router::new().route("/robots.txt", robots).fallback(files);
    runtime.spawn(async move { axum::serve(listener, app).await });
    Ok((runtime, address))
}

/// Writes the addresses to a file.
fn urls(folder: &Path, address: SocketAddr, count: u32) -> Result<PathBuf> {
    let mut lines = String::new();
    (0..count).try_for_each(|number| writeln!(lines, "http://{address}/{}/{number}.html", number % 16))?;
    let urls = folder.join("urls");
    fs::write(&urls, lines)?;
    Ok(urls)
}

/// Our command.
fn fetch(urls: &Path, out: &Path) -> Result<Command> {
    let mut command = Command::new(env::current_exe()?.with_file_name("tidegate"));
    command.arg("fetch").arg("-i").arg(urls).arg("--out").arg(out);
    Ok(command)
}

/// The peer's command: this program with `--plain`.
fn plain(urls: &Path, out: &Path) -> Result<Command> {
    let mut command = Command::new(env::current_exe()?);
    command.arg("--plain").arg(urls).arg(out);
    Ok(command)
}

/// The seconds that a command took. It must have written all files, which are removed.
fn seconds(mut command: Command, out: &Path, files: u32) -> Result<f64> {
    let start = Instant::now();
    let status = command.stdin(Stdio::null()).stdout(Stdio::null()).status();
    let took = start.elapsed().as_secs_f64();
    let status = status
        .with_context(|| format!("could not start {command:?}, which must be built beside this program"))?;
    ensure!(status.success(), "{command:?} ended with {status}");
    let count = count(out)?;
    ensure!(count == files, "{command:?} wrote {count} files, expected {files}");
    fs::remove_dir_all(out)?;
    Ok(took)
}

/// Counts the page files.
fn count(folder: &Path) -> Result<u32> {
    let mut files = 0;
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            files += count(&path)?;
        } else if path.extension().is_some_and(|ending| ending == "html") {
            files += 1;
        }
    }
    Ok(files)
}

/// Fetches every address of a file concurrently, each to its own file.
pub(crate) fn run_plain(urls: &Path, out: PathBuf) -> Result<()> {
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(async {
        fs::create_dir_all(&out)?;
        let client = reqwest::Client::new();
        let (permits, out) = (Arc::new(Semaphore::new(CONCURRENCY)), Arc::new(out));
        let mut tasks = JoinSet::new();
        for (number, url) in fs::read_to_string(urls)?.lines().enumerate() {
            let permit = Arc::clone(&permits).acquire_owned().await?;
            let (client, url, out) = (client.clone(), url.to_owned(), Arc::clone(&out));
            tasks.spawn(async move {
                let body = client.get(url).send().await?.error_for_status()?.bytes().await?;
                spawn_blocking(move || fs::write(out.join(format!("{number}.html")), body)).await??;
                drop(permit);
                anyhow::Ok(())
            });
        }
        while let Some(task) = tasks.join_next().await {
            task??;
        }
        Ok(())
    })
}
