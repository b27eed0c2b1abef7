//! Reads an archive.

use std::collections::VecDeque;
use std::io::{BufRead as _, BufReader, Cursor, Read as _};

use flate2::bufread::MultiGzDecoder;
use tidegate_core::limit::audit::Entry;
use tidegate_core::limit::policy::Version;
use tokio::task::coop::consume_budget;

use super::files::{ArchiveFile, Files};
use super::{ArchiveError, ArchivePlace};
use crate::codec::entry_from_line;
use crate::error::StoreError;

/// The longest line, in bytes: many times the size of the largest entry.
const LINE_MAX: u64 = 16 << 20;

/// The entries of an archive, in the order in which the changes were made. Files are read one at a time.
///
/// # Errors
/// [`ArchiveError::Io`] for a folder that does not exist, [`ArchiveError::Remote`] for an object store that
/// fails, [`ArchiveError::Corrupt`] if the names of two files have the same changes.
pub async fn read_archive(place: &ArchivePlace) -> Result<Entries, ArchiveError> {
    let files = place.files()?;
    let list = files.list().await?;
    Ok(Entries::new(files, list))
}

/// The entries of an archive: see [`read_archive`].
#[derive(Debug)]
pub struct Entries {
    files: Files,
    waiting: VecDeque<ArchiveFile>,
    open: Option<Reader>,
}

impl Entries {
    pub(super) fn new(files: Files, list: Vec<ArchiveFile>) -> Self {
        Self { files, waiting: list.into(), open: None }
    }

    /// The next entry; `None` after the last, and after an error.
    ///
    /// # Errors
    /// [`ArchiveError::Corrupt`] for a file that is not as it was written, otherwise errors of the file
    /// system or the object store.
    ///
    /// # Cancel safety
    /// Dropping the future skips no entry.
    pub async fn next_entry(&mut self) -> Result<Option<Entry>, ArchiveError> {
        consume_budget().await;
        let next = self.read_next().await;
        if next.is_err() {
            (self.open, self.waiting) = (None, VecDeque::new());
        }
        next
    }

    async fn read_next(&mut self) -> Result<Option<Entry>, ArchiveError> {
        loop {
            if let Some(reader) = &mut self.open {
                let next = reader.next();
                match next.map_err(|what| self.files.corrupt(&reader.file.name, what))? {
                    None => self.open = None,
                    entry => return Ok(entry),
                }
            }
            let Some(file) = self.waiting.front() else { return Ok(None) };
            let bytes = self.files.read(&file.name).await?;
            self.open = self.waiting.pop_front().map(|file| Reader::new(file, bytes));
        }
    }
}

#[derive(Debug)]
struct Reader {
    file: ArchiveFile,
    lines: BufReader<MultiGzDecoder<Cursor<Vec<u8>>>>,
    latest: Option<Version>,
    line: Vec<u8>,
    number: u64,
}

impl Reader {
    fn new(file: ArchiveFile, bytes: Vec<u8>) -> Self {
        let lines = BufReader::new(MultiGzDecoder::new(Cursor::new(bytes)));
        Self { file, lines, latest: None, line: Vec::new(), number: 0 }
    }

    /// The next entry, or what is wrong with the file.
    fn next(&mut self) -> Result<Option<Entry>, String> {
        self.number += 1;
        let entry = self.next_line().map_err(|what| format!("line {}: {what}", self.number))?;
        let ArchiveFile { first, last, .. } = self.file;
        match &entry {
            Some(entry) => {
                let is_in_order = match self.latest {
                    None => entry.version == first,
                    Some(latest) => entry.version >= latest,
                };
                if !is_in_order {
                    let (line, version) = (self.number, entry.version);
                    return Err(format!("line {line}: a change of version {version} is out of order"));
                }
                self.latest = Some(entry.version);
            }
            None if self.latest != Some(last) => {
                return Err(format!("the file ends before the change of version {last}"));
            }
            None => {}
        }
        Ok(entry)
    }

    fn next_line(&mut self) -> Result<Option<Entry>, String> {
        self.line.clear();
        let read = self.lines.by_ref().take(LINE_MAX).read_until(b'\n', &mut self.line);
        if read.map_err(|error| error.to_string())? == 0 {
            return Ok(None);
        }
        let line = self.line.strip_suffix(b"\n").ok_or("the line has no end")?;
        let line = std::str::from_utf8(line).map_err(|error| error.to_string())?;
        match entry_from_line(line) {
            Ok(entry) => Ok(Some(entry)),
            Err(StoreError::Corrupt { what }) => Err(what),
            Err(error) => Err(error.to_string()),
        }
    }
}
