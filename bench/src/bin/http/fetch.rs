//! `tidegate fetch` against a minimal program with the same concurrency.
//!
//! Both are separate processes that read the same addresses from a file, request them from a local server,
//! and write every file. Ours requests robots.txt, keeps a journal, and syncs a file before it renames it;
//! the peer only writes. The limits never delay a request, so the row shows their overhead.

use std::env;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use axum::Router;
use axum::http::StatusCode;
use axum::routing::get;
use tempfile::TempDir;
use tidegate_bench::report::Row;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::task::{JoinSet, spawn_blocking};

const FILES: usize = 4_000;
const BYTES: usize = 8 << 10;
const CONCURRENCY: u32 = 32;
const TARGET: f64 = 0.8;
/// A round takes a second or more per side.
const ROUNDS_PER: u32 = 4;

/// Files per second of both sides, each the best of its interleaved rounds.
pub(crate) fn overhead(rounds: u32) -> Result<Vec<Row>> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0"))?;
    let address = listener.local_addr()?;
    let body: &'static [u8] = Vec::leak(vec![b'x'; BYTES]);
    let app = Router::new()
        .route("/robots.txt", get(|| async { StatusCode::NOT_FOUND }))
        .fallback(get(move || async move { body }));
    runtime.spawn(async move { axum::serve(listener, app).await });
    let folder = TempDir::new()?;
    let urls = folder.path().join("urls");
    let mut lines = String::new();
    (0..FILES).try_for_each(|number| writeln!(lines, "http://{address}/{}/{number}.html", number % 16))?;
    fs::write(&urls, lines)?;
    let mut best = (0.0_f64, 0.0_f64);
    for round in 0..rounds.div_ceil(ROUNDS_PER) {
        let ours = folder.path().join(format!("ours-{round}"));
        best.0 = best.0.max(files_per_second(fetch(&urls, &ours)?, &ours)?);
        let peer = folder.path().join(format!("peer-{round}"));
        best.1 = best.1.max(files_per_second(plain(&urls, &peer)?, &peer)?);
    }
    let what = format!(
        "`tidegate fetch` vs reqwest writing files: {FILES} files of {BYTES} bytes, concurrency {CONCURRENCY}"
    );
    Ok(vec![Row::at_least("fetch_overhead", best, Some(TARGET), "files/s", &what)])
}

/// Our command.
fn fetch(urls: &Path, out: &Path) -> Result<Command> {
    let concurrency = CONCURRENCY.to_string();
    let mut command = Command::new(env::current_exe()?.with_file_name("tidegate"));
    command.args(["fetch", "--concurrency", &concurrency, "--per-host", &concurrency]);
    command.args(["--rate", "1000000", "--rate-max", "1000000"]);
    command.arg("-i").arg(urls).arg("--out").arg(out);
    Ok(command)
}

/// The peer's command: this program with `--plain`.
fn plain(urls: &Path, out: &Path) -> Result<Command> {
    let mut command = Command::new(env::current_exe()?);
    command.arg("--plain").arg(urls).arg(out);
    Ok(command)
}

fn files_per_second(mut command: Command, out: &Path) -> Result<f64> {
    let start = Instant::now();
    let status = command.stdin(Stdio::null()).stdout(Stdio::null()).status();
    let took = start.elapsed().as_secs_f64();
    let status = status
        .with_context(|| format!("could not start {command:?}, which must be built beside this program"))?;
    ensure!(status.success(), "{command:?} ended with {status}");
    let count = count(out)?;
    ensure!(count == FILES, "{command:?} wrote {count} files, expected {FILES}");
    fs::remove_dir_all(out)?;
    #[expect(clippy::cast_precision_loss, reason = "a few thousand")]
    Ok(FILES as f64 / took)
}

/// Counts the page files.
fn count(folder: &Path) -> Result<usize> {
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
        let (permits, out) = (Arc::new(Semaphore::new(usize::try_from(CONCURRENCY)?)), Arc::new(out));
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
