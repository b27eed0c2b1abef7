//! Reads addresses from the command line, a file or stdin, on a thread of its own with a bounded read-ahead.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;

use tokio::sync::mpsc::{Receiver, Sender, channel};

use super::address::{ADDRESS_MAX, Address, Key, shown_line};
use super::file_name::file_name;
use super::folder::Folder;
use crate::failure::Failure;

/// Lines per batch, and batches in the channel.
const BATCH: usize = 256;
const BATCHES: usize = 8;
const BUFFER: usize = 64 << 10;

/// The source of addresses.
#[derive(Debug)]
pub(crate) enum Input {
    Args(Vec<String>),
    File(PathBuf),
    Stdin,
}

/// A line of the input.
#[derive(Debug)]
pub(crate) enum Line {
    /// A page to fetch.
    Page(Address),
    /// A page that exists already.
    Exists(Address),
    /// An invalid address, and the reason.
    Invalid(String, String),
    /// A read error, which ends the input.
    ReadError(io::Error),
}

impl Input {
    /// Starts the thread.
    pub(crate) fn read(self, folder: &Arc<Folder>) -> Result<Receiver<Vec<Line>>, Failure> {
        let reader: Box<dyn Read + Send> = match self {
            Self::Args(urls) => Box::new(io::Cursor::new(urls.join("\n"))),
            Self::Stdin => Box::new(io::stdin()),
            Self::File(path) => {
                let file = File::open(&path).map_err(|error| {
                    Failure::usage(format!("the input `{}` cannot be read: {error}", path.display()))
                })?;
                Box::new(file)
            }
        };
        let (sender, lines) = channel(BATCHES);
        let state = Reader { folder: Arc::clone(folder), sender, batch: Vec::with_capacity(BATCH) };
        let thread = thread::Builder::new().name("input".into()).spawn(move || state.run(reader));
        thread.map_err(|error| Failure::failed(format!("the input thread cannot be started: {error}")))?;
        Ok(lines)
    }
}

struct Reader {
    folder: Arc<Folder>,
    sender: Sender<Vec<Line>>,
    batch: Vec<Line>,
}

impl Reader {
    fn run(mut self, reader: Box<dyn Read + Send>) {
        let mut reader = BufReader::with_capacity(BUFFER, reader);
        let mut line = Vec::new();
        loop {
            match read_line(&mut reader, &mut line) {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => {
                    self.batch.push(Line::ReadError(error));
                    break;
                }
            }
            let text = String::from_utf8_lossy(&line);
            // Some editors begin a file with a byte order mark.
            self.batch.extend(self.classify(text.trim_start_matches('\u{feff}').trim()));
            // The next line may take a while: lines typed at a terminal must not wait for a full batch.
            let is_due = self.batch.len() >= BATCH || reader.buffer().is_empty();
            if is_due && !self.send_batch() {
                return;
            }
        }
        self.send_batch();
    }

    /// Classifies a line. Returns `None` for blank lines and comments.
    fn classify(&self, text: &str) -> Option<Line> {
        if text.is_empty() || text.starts_with('#') {
            return None;
        }
        Some(match Address::parse(text) {
            Ok(address) if self.folder.has(&file_name(&address, Key::of(&address.url))) => {
                Line::Exists(address)
            }
            Ok(address) => Line::Page(address),
            Err(why) => Line::Invalid(shown_line(text), why),
        })
    }

    /// Sends the batch. Returns whether the receiver still exists.
    fn send_batch(&mut self) -> bool {
        let batch = std::mem::replace(&mut self.batch, Vec::with_capacity(BATCH));
        batch.is_empty() || self.sender.blocking_send(batch).is_ok()
    }
}

/// Reads a line without its end, truncated beyond the maximum length of an address. Returns `false` at the
/// end of input.
fn read_line(reader: &mut impl BufRead, line: &mut Vec<u8>) -> io::Result<bool> {
    line.clear();
    let mut is_begun = false;
    loop {
        let chunk = match reader.fill_buf() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            chunk => chunk?,
        };
        if chunk.is_empty() {
            return Ok(is_begun);
        }
        is_begun = true;
        let end = chunk.iter().position(|letter| *letter == b'\n');
        let part = &chunk[..end.unwrap_or(chunk.len())];
        // One byte over the maximum, so that the line is rejected as too long.
        let room = (ADDRESS_MAX + 1).saturating_sub(line.len());
        line.extend_from_slice(&part[..part.len().min(room)]);
        let used = end.map_or(chunk.len(), |end| end + 1);
        reader.consume(used);
        if end.is_some() {
            return Ok(true);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_line_is_truncated_and_consumed() {
        let long = "x".repeat(3 * ADDRESS_MAX);
        let text = format!("one\r\n\n{long}\nlast");
        let mut reader = BufReader::with_capacity(7, text.as_bytes());
        let (mut line, mut lengths) = (Vec::new(), Vec::new());
        while read_line(&mut reader, &mut line).unwrap() {
            lengths.push(line.len());
        }
        assert_eq!(lengths, [4, 0, ADDRESS_MAX + 1, 4]);
    }
}
