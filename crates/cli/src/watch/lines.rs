//! What is told, written for programs: an object on a line.
//!
//! A reader that stops reading holds up a thread of its own, and what is told waits in a bounded channel: signals end it all
//! the same.

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
use crate::answer::Answer;
use crate::child;
use crate::failure::{Exit, Failure};
use crate::signals::Signals;

/// Texts that are not written yet.
const TEXTS_MAX: usize = 64;

/// Which lines are worth writing.
#[derive(Debug, Default)]
struct Lines {
    is_up: bool,
}

impl Lines {
    /// The lines for what is told: that it is there is told when it was not.
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

/// Writes what is told until a signal ends it, nobody reads it, or the source fails.
pub(crate) async fn written(
    source: impl AsyncFnOnce(mpsc::Sender<Update>, watch::Receiver<Option<Subject>>) -> Failure,
) -> Result<Answer, Failure> {
    let (tell, mut updates) = mpsc::channel(UPDATES_MAX);
    let (_want, wanted) = watch::channel(None);
    let mut signals = Signals::hear()?;
    let (texts, mut ended) = writer()?;
    let mut lines = Lines::default();
    let mut source = pin!(source(tell, wanted));
    let failure = loop {
        let next = async {
            let room = texts.reserve().await.ok()?;
            Some((room, updates.recv().await?))
        };
        tokio::select! {
            biased;
            heard = signals.next() => return Ok(Answer::silent(child::exit_by(heard))),
            error = &mut ended => return over(error.ok().flatten()),
            Some((room, update)) = next => room.send(lines.text(&update)),
            failure = &mut source => break failure,
        }
    };
    // What was told before it failed is written before that is said.
    let rest = async {
        while let Ok(update) = updates.try_recv() {
            if texts.send(lines.text(&update)).await.is_err() {
                break;
            }
        }
        drop(texts);
        ended.await.ok().flatten()
    };
    tokio::select! {
        biased;
        heard = signals.next() => Ok(Answer::silent(child::exit_by(heard))),
        error = rest => match error {
            Some(error) if error.kind() != io::ErrorKind::BrokenPipe => over(Some(error)),
            _ => Err(failure),
        },
    }
}

/// What a writer that has ended says. A reader that has gone away is no failure.
fn over(error: Option<io::Error>) -> Result<Answer, Failure> {
    match error {
        Some(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(Answer::silent(Exit::Done)),
        Some(error) => Err(Failure::failed(format!("what is told cannot be written: {error}"))),
        None => Err(Failure::failed("what is told is written no more")),
    }
}

/// A thread that writes texts to stdout until there are no more, and how that ended.
fn writer() -> Result<(mpsc::Sender<String>, oneshot::Receiver<Option<io::Error>>), Failure> {
    let failed = |error| Failure::failed(format!("stdout cannot be written: {error}"));
    // Not through the lock of stdout: whoever ends this program takes it, too.
    let mut stdout = File::from(io::stdout().as_fd().try_clone_to_owned().map_err(failed)?);
    let (texts, mut to_write) = mpsc::channel::<String>(TEXTS_MAX);
    let (tell, ended) = oneshot::channel();
    let write = move || {
        let mut error = None;
        while let (None, Some(text)) = (&error, to_write.blocking_recv()) {
            error = stdout.write_all(text.as_bytes()).err();
        }
        drop(tell.send(error));
    };
    thread::Builder::new().name("lines".into()).spawn(write).map_err(failed)?;
    Ok((texts, ended))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn that_it_is_there_is_told_when_it_was_not() {
        let mut lines = Lines::default();
        let lost = Update::Lost { why: "gone".to_owned() };
        let told = [Update::Up, Update::Up, lost.clone(), lost, Update::Up, Update::Up];
        let counts = told.map(|update| lines.text(&update).lines().count());
        assert_eq!(counts, [1, 0, 1, 1, 1, 0]);
    }

    #[test]
    fn a_reader_that_has_gone_is_no_failure_and_a_full_disk_is_one() {
        let gone = over(Some(io::ErrorKind::BrokenPipe.into()));
        assert!(gone.is_ok());
        let full = over(Some(io::ErrorKind::StorageFull.into())).unwrap_err();
        assert_eq!(
            (full.exit, full.what.as_str()),
            (Exit::Failed, "what is told cannot be written: no storage space")
        );
    }
}
