//! Reads addresses: from the command line, from a file, from stdin. A thread of its own reads, and stays a little ahead.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;

use tokio::sync::mpsc::{Receiver, Sender, channel};

use super::address::{ADDRESS_MAX, Address, Key, shown_line};
use super::folder::Folder;
use super::name::file_of;
use crate::failure::Failure;

/// Lines that are handed over at once, and how many of those may wait.
const BATCH: usize = 256;
const BATCHES: usize = 8;
const BUFFER: usize = 64 << 10;

/// Where addresses come from.
#[derive(Debug)]
pub(crate) enum Input {
    Words(Vec<String>),
    File(PathBuf),
    Stdin,
}

/// A line of it.
#[derive(Debug)]
pub(crate) enum Line {
    /// A page to fetch.
    Page(Address),
    /// A page that is there already.
    There(Address),
    /// No address, and why.
    Bad(String, String),
    /// Nothing more can be read.
    Broken(io::Error),
}

impl Input {
    /// Begins to read.
    pub(crate) fn read(self, folder: &Arc<Folder>) -> Result<Receiver<Vec<Line>>, Failure> {
        let reader: Box<dyn Read + Send> = match self {
            Self::Words(words) => Box::new(io::Cursor::new(words.join("\n"))),
            Self::Stdin => Box::new(io::stdin()),
            Self::File(path) => {
                let file = File::open(&path).map_err(|error| {
                    Failure::usage(format!("the input `{}` cannot be read: {error}", path.display()))
                })?;
                Box::new(file)
            }
        };
        let (tell, lines) = channel(BATCHES);
        let reading = Reading { folder: Arc::clone(folder), tell, batch: Vec::with_capacity(BATCH) };
        let thread = thread::Builder::new().name("input".into()).spawn(move || reading.run(reader));
        thread.map_err(|error| Failure::failed(format!("no thread can be started: {error}")))?;
        Ok(lines)
    }
}

struct Reading {
    folder: Arc<Folder>,
    tell: Sender<Vec<Line>>,
    batch: Vec<Line>,
}

impl Reading {
    fn run(mut self, reader: Box<dyn Read + Send>) {
        let mut reader = BufReader::with_capacity(BUFFER, reader);
        let mut line = Vec::new();
        loop {
            match read_line(&mut reader, &mut line) {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => {
                    self.batch.push(Line::Broken(error));
                    break;
                }
            }
            let text = String::from_utf8_lossy(&line);
            // Editors of some systems begin a file with a mark of its encoding.
            self.batch.extend(self.sort(text.trim_start_matches('\u{feff}').trim()));
            // What is next may take a while: whoever types waits for what was typed.
            let is_due = self.batch.len() >= BATCH || reader.buffer().is_empty();
            if is_due && !self.hand_over() {
                return;
            }
        }
        self.hand_over();
    }

    /// What a line is; nothing for a blank one, and for what is behind a `#`.
    fn sort(&self, text: &str) -> Option<Line> {
        if text.is_empty() || text.starts_with('#') {
            return None;
        }
        Some(match Address::parse(text) {
            Ok(address) if self.folder.has(&file_of(&address, Key::of(&address.url))) => Line::There(address),
            Ok(address) => Line::Page(address),
            Err(why) => Line::Bad(shown_line(text), why),
        })
    }

    /// Whether somebody still takes them.
    fn hand_over(&mut self) -> bool {
        let batch = std::mem::replace(&mut self.batch, Vec::with_capacity(BATCH));
        batch.is_empty() || self.tell.blocking_send(batch).is_ok()
    }
}

/// Reads a line without its end, and keeps no more of it than an address may have. `false` at the end of all.
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
        // One more than there may be, so that it is seen to be too long.
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
    fn a_line_is_read_to_its_end_and_no_more_of_it_is_kept_than_it_may_have() {
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
