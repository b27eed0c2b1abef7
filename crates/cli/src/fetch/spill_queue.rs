//! The queue of pages of a host that have not been started: a bounded head in memory, the rest in a file.
//!
//! Input is read as fast as it arrives, in any order, and a slow host must not fill the memory: each host
//! keeps [`MEMORY`] pages in memory and spills the rest to its own file. The file is scratch space: after an
//! interruption the input is read again.

use std::collections::VecDeque;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead as _, BufReader, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

/// Pages of one host in memory.
pub(crate) const MEMORY: usize = 1_000;
/// Bytes that are buffered before a write.
const BUFFER: usize = 8 << 10;

/// A FIFO queue of pages.
#[derive(Debug, Default)]
pub(crate) struct SpillQueue {
    memory: VecDeque<Box<str>>,
    spill: Option<SpillFile>,
}

/// The pages after those in memory.
#[derive(Debug)]
struct SpillFile {
    path: PathBuf,
    /// Not written yet.
    buffer: String,
    /// Offset up to which the file was read.
    read: u64,
    /// Pages in the file and the buffer.
    pages: u64,
}

impl SpillQueue {
    /// Appends a page; `new_path` returns the path of a new spill file.
    pub(crate) fn push(&mut self, url: Box<str>, new_path: impl FnOnce() -> PathBuf) -> io::Result<()> {
        if self.spill.is_none() {
            if self.memory.len() < MEMORY {
                self.memory.push_back(url);
                return Ok(());
            }
            self.spill = Some(SpillFile { path: new_path(), buffer: String::new(), read: 0, pages: 0 });
        }
        let Some(spill) = &mut self.spill else { unreachable!("the spill file was created above") };
        spill.buffer.push_str(&url);
        spill.buffer.push('\n');
        spill.pages += 1;
        if spill.buffer.len() >= BUFFER { spill.write() } else { Ok(()) }
    }

    /// Removes the first page.
    pub(crate) fn pop(&mut self) -> io::Result<Option<Box<str>>> {
        self.fill()?;
        Ok(self.memory.pop_front())
    }

    /// Removes a page in memory: the last at place 0, and other places are spread by the golden ratio.
    pub(crate) fn pop_at(&mut self, place: u32) -> io::Result<Option<Box<str>>> {
        const GOLDEN: u32 = 0x9E37_79B9;
        self.fill()?;
        let from_end = (u64::from(place.wrapping_mul(GOLDEN)) * self.memory.len() as u64) >> 32;
        let index = self.memory.len().checked_sub(1 + usize::try_from(from_end).unwrap_or_default());
        Ok(index.and_then(|index| self.memory.remove(index)))
    }

    /// Reads pages from the file if none is in memory.
    fn fill(&mut self) -> io::Result<()> {
        if self.memory.is_empty()
            && let Some(spill) = &mut self.spill
        {
            spill.read_into(&mut self.memory)?;
            if spill.pages == 0 {
                self.spill = None;
            }
        }
        Ok(())
    }

    /// The number of pages.
    pub(crate) fn len(&self) -> u64 {
        self.memory.len() as u64 + self.spill.as_ref().map_or(0, |spill| spill.pages)
    }

    /// The number of pages in memory.
    pub(crate) fn in_memory(&self) -> usize {
        self.memory.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl SpillFile {
    fn write(&mut self) -> io::Result<()> {
        let mut file = OpenOptions::new().create(true).append(true).open(&self.path)?;
        file.write_all(self.buffer.as_bytes())?;
        self.buffer.clear();
        Ok(())
    }

    /// Moves the first pages to memory.
    fn read_into(&mut self, memory: &mut VecDeque<Box<str>>) -> io::Result<()> {
        if !self.buffer.is_empty() {
            self.write()?;
        }
        let mut file = File::open(&self.path)?;
        file.seek(SeekFrom::Start(self.read))?;
        let mut lines = BufReader::new(file);
        let mut line = String::new();
        while memory.len() < MEMORY && self.pages > 0 {
            line.clear();
            let bytes = lines.read_line(&mut line)?;
            if bytes == 0 {
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the spill file was truncated"));
            }
            self.read += bytes as u64;
            self.pages -= 1;
            memory.push_back(line.trim_end().into());
        }
        Ok(())
    }
}

impl Drop for SpillFile {
    fn drop(&mut self) {
        // A file that remains is removed when the folder is next opened.
        drop(fs::remove_file(&self.path));
    }
}

/// The path of the spill file with this number.
pub(crate) fn spill_path(folder: &Path, number: u64) -> PathBuf {
    folder.join(format!("{number}.urls"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spilled_pages_keep_their_order_and_bound_memory() {
        let folder = tempfile::tempdir().unwrap();
        let mut ahead = SpillQueue::default();
        let (mut pushed, mut popped) = (0_u64, 0_u64);
        // First more pages are pushed than popped, then more popped than pushed.
        for (come, go) in [(5_000, 700), (100, 2_500), (3_000, 10), (0, 10_000)] {
            for _ in 0..come {
                ahead.push(format!("https://h/{pushed}").into(), || spill_path(folder.path(), 7)).unwrap();
                pushed += 1;
            }
            for _ in 0..go {
                let Some(url) = ahead.pop().unwrap() else { break };
                assert_eq!(*url, format!("https://h/{popped}"));
                popped += 1;
                assert!(ahead.memory.len() <= MEMORY);
                assert_eq!(ahead.len(), pushed - popped);
            }
        }
        assert_eq!((popped, ahead.is_empty()), (pushed, true));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "the spill file is removed");
    }
}
