//! Writes updates as JSON lines.
//!
//! A blocked reader blocks a separate writer thread, behind a bounded channel, so that signals still end the
//! program.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::AsFd as _;
use std::pin::pin;
use std::thread;

use tidegate::Subject;
use tokio::sync::{mpsc, oneshot, watch};

use super::model::Update;
use super::remote::wall;
use super::{UPDATES_MAX, codec};
use crate::child;
use crate::failure::{Exit, Failure};
use crate::output::Output;
use crate::signals::Signals;

/// Capacity of the channel to the writer thread.
const CHUNKS_MAX: usize = 64;

/// Formats updates, without repeated `up` lines.
#[derive(Debug, Default)]
struct JsonLines {
    is_up: bool,
}

impl JsonLines {
    /// The lines of an update. `up` is written only after the source was down.
    fn text(&mut self, update: &Update) -> String {
        match update {
            Update::Up if self.is_up => return String::new(),
            Update::Up => self.is_up = true,
            Update::Lost { .. } => self.is_up = false,
            _ => {}
        }
        codec::update(update, wall()).into_iter().map(|line| line.to_string() + "\n").collect()
    }
}

/// Writes updates until a signal arrives, the reader closes the pipe, or the source fails.
pub(crate) async fn run(
    source: impl AsyncFnOnce(mpsc::Sender<Update>, watch::Receiver<Option<Subject>>) -> Failure,
) -> Result<Output, Failure> {
    let (sender, mut updates) = mpsc::channel(UPDATES_MAX);
    let (_want, wanted) = watch::channel(None);
    let mut signals = Signals::install()?;
    let (chunks, mut ended) = writer()?;
    let mut lines = JsonLines::default();
    let mut source = pin!(source(sender, wanted));
    let failure = loop {
        let next = async {
            let room = chunks.reserve().await.ok()?;
            Some((room, updates.recv().await?))
        };
        tokio::select! {
            biased;
            signal = signals.next() => return Ok(Output::silent(child::exit_by(signal))),
            error = &mut ended => return writer_result(error.ok().flatten()),
            Some((room, update)) = next => room.send(lines.text(&update)),
            failure = &mut source => break failure,
        }
    };
    // Updates from before the failure are written before it is reported.
    let rest = async {
        while let Ok(update) = updates.try_recv() {
            if chunks.send(lines.text(&update)).await.is_err() {
                break;
            }
        }
        drop(chunks);
        ended.await.ok().flatten()
    };
    tokio::select! {
        biased;
        signal = signals.next() => Ok(Output::silent(child::exit_by(signal))),
        error = rest => match error {
            Some(error) if error.kind() != io::ErrorKind::BrokenPipe => writer_result(Some(error)),
            _ => Err(failure),
        },
    }
}

/// The result of the writer thread. A closed pipe is not a failure.
fn writer_result(error: Option<io::Error>) -> Result<Output, Failure> {
    match error {
        Some(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(Output::silent(Exit::Done)),
        Some(error) => Err(Failure::failed(format!("events cannot be written: {error}"))),
        None => Err(Failure::failed("the writer thread has ended")),
    }
}

/// Starts a thread that writes to stdout until the channel closes, and reports how it ended.
fn writer() -> Result<(mpsc::Sender<String>, oneshot::Receiver<Option<io::Error>>), Failure> {
    let failed = |error| Failure::failed(format!("stdout cannot be written: {error}"));
    // Not through the lock of stdout, which the exit of the program takes, too.
    let mut stdout = File::from(io::stdout().as_fd().try_clone_to_owned().map_err(failed)?);
    let (chunks, mut to_write) = mpsc::channel::<String>(CHUNKS_MAX);
    let (sender, ended) = oneshot::channel();
    let write = move || {
        let mut error = None;
        while let (None, Some(text)) = (&error, to_write.blocking_recv()) {
            error = stdout.write_all(text.as_bytes()).err();
        }
        drop(sender.send(error));
    };
    thread::Builder::new().name("lines".into()).spawn(write).map_err(failed)?;
    Ok((chunks, ended))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn up_is_written_only_after_a_loss() {
        let mut lines = JsonLines::default();
        let lost = Update::Lost { why: "gone".to_owned() };
        let updates = [Update::Up, Update::Up, lost.clone(), lost, Update::Up, Update::Up];
        let counts = updates.map(|update| lines.text(&update).lines().count());
        assert_eq!(counts, [1, 0, 1, 1, 1, 0]);
    }

    #[test]
    fn closed_pipe_is_no_failure_and_full_disk_is_one() {
        let closed = writer_result(Some(io::ErrorKind::BrokenPipe.into()));
        assert!(closed.is_ok());
        let full = writer_result(Some(io::ErrorKind::StorageFull.into())).unwrap_err();
        assert_eq!(
            (full.exit, full.what.as_str()),
            (Exit::Failed, "events cannot be written: no storage space")
        );
    }
}
