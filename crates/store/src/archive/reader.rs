//! Reading an archive back.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use flate2::bufread::MultiGzDecoder;
use tidegate_core::limit::audit::Entry;
use tidegate_core::limit::policy::Version;

use super::ArchiveError;
use super::folder::{ArchiveFile, files, versions};
use crate::codec::entry_from_line;
use crate::error::StoreError;

/// A line has at most so many bytes: many times what the largest entry has.
const LINE_MAX: u64 = 16 << 20;

/// The entries of an archive, in the order the changes were made in: of its folder, or of one of its files.
///
/// It reads as it goes, and blocks. A file that is not as it was written is an error, after which nothing follows.
///
/// # Errors
/// [`ArchiveError::Io`] where there is no such folder or file, [`ArchiveError::Corrupt`] for a folder whose files say the
/// same changes.
pub fn read_archive(path: impl AsRef<Path>) -> Result<Entries, ArchiveError> {
    let path = path.as_ref();
    let is_folder = fs::metadata(path).map_err(ArchiveError::io(path, "read"))?.is_dir();
    let waiting = if is_folder {
        files(path)?.into_iter().map(|file| (file.path, Some((file.first, file.last)))).collect()
    } else {
        [(path.to_owned(), versions(path))].into()
    };
    Ok(Entries { waiting, open: None })
}

/// The entries of an archive: see [`read_archive`].
#[derive(Debug)]
pub struct Entries {
    /// Files that come later, and the changes that their names say.
    waiting: VecDeque<(PathBuf, Option<(Version, Version)>)>,
    open: Option<Reader>,
}

impl Entries {
    pub(super) fn of(files: impl Iterator<Item = ArchiveFile>) -> Self {
        let waiting = files.map(|file| (file.path, Some((file.first, file.last)))).collect();
        Self { waiting, open: None }
    }
}

impl Iterator for Entries {
    type Item = Result<Entry, ArchiveError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let answer = if let Some(reader) = &mut self.open {
                reader.next()
            } else {
                let (path, said) = self.waiting.pop_front()?;
                Reader::open(path, said).and_then(|reader| self.open.insert(reader).next())
            };
            match answer {
                Ok(Some(entry)) => return Some(Ok(entry)),
                Ok(None) => self.open = None,
                Err(error) => {
                    (self.open, self.waiting) = (None, VecDeque::new());
                    return Some(Err(error));
                }
            }
        }
    }
}

#[derive(Debug)]
struct Reader {
    path: PathBuf,
    lines: BufReader<MultiGzDecoder<BufReader<File>>>,
    said: Option<(Version, Version)>,
    latest: Option<Version>,
    line: Vec<u8>,
    number: u64,
}

impl Reader {
    fn open(path: PathBuf, said: Option<(Version, Version)>) -> Result<Self, ArchiveError> {
        let file = File::open(&path).map_err(ArchiveError::io(&path, "open"))?;
        let lines = BufReader::new(MultiGzDecoder::new(BufReader::new(file)));
        Ok(Self { path, lines, said, latest: None, line: Vec::new(), number: 0 })
    }

    fn next(&mut self) -> Result<Option<Entry>, ArchiveError> {
        self.line.clear();
        self.number += 1;
        let read = self.lines.by_ref().take(LINE_MAX).read_until(b'\n', &mut self.line);
        match read {
            Ok(0) => return self.end().map(|()| None),
            Ok(_) if self.line.ends_with(b"\n") => {}
            Ok(_) => return Err(self.corrupt("it has no end")),
            // What is no gzip, or is cut, or was changed, the decoder says in these words; others are the system's.
            Err(error) if is_of_the_decoder(&error) => return Err(self.corrupt(&error.to_string())),
            Err(error) => return Err(ArchiveError::io(&self.path, "read")(error)),
        }
        let Ok(line) = std::str::from_utf8(&self.line) else { return Err(self.corrupt("it is no text")) };
        let entry = match entry_from_line(line) {
            Ok(entry) => entry,
            Err(StoreError::Corrupt { what }) => return Err(self.corrupt(&what)),
            Err(error) => return Err(error.into()),
        };
        let least = self.latest.or(self.said.map(|(first, _)| first));
        let is_first = self.latest.is_none() && self.said.is_some_and(|(first, _)| first != entry.version);
        if is_first || least.is_some_and(|least| entry.version < least) {
            return Err(self.corrupt(&format!("a change of version {} out of its order", entry.version)));
        }
        self.latest = Some(entry.version);
        Ok(Some(entry))
    }

    /// Whether the file ends with the change that its name says.
    fn end(&self) -> Result<(), ArchiveError> {
        match self.said {
            Some((_, last)) if self.latest != Some(last) => {
                Err(self.corrupt(&format!("the file ends before the change of version {last}")))
            }
            _ => Ok(()),
        }
    }

    fn corrupt(&self, what: &str) -> ArchiveError {
        ArchiveError::Corrupt { path: self.path.clone(), what: format!("line {}: {what}", self.number) }
    }
}

fn is_of_the_decoder(error: &io::Error) -> bool {
    use io::ErrorKind::{InvalidData, InvalidInput, UnexpectedEof};
    matches!(error.kind(), InvalidData | InvalidInput | UnexpectedEof)
}
