//! The pages of a host that nobody has begun yet: a few in memory, and the rest in a file.
//!
//! Input is read to its end as fast as it comes, whatever its order, and no host can fill the memory with what it cannot take: of
//! each host [`MEMORY`] pages are held, and all behind them go to a file of their own. It is scratch: after an interruption the input
//! is read again.

use std::collections::VecDeque;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead as _, BufReader, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

/// So many pages of one host are held in memory.
pub(crate) const MEMORY: usize = 1_000;
/// So much is collected before it is written.
const BUFFER: usize = 8 << 10;

/// Pages that wait, first come first served.
#[derive(Debug, Default)]
pub(crate) struct Ahead {
    memory: VecDeque<Box<str>>,
    spilled: Option<Spilled>,
}

/// What is behind those in memory.
#[derive(Debug)]
struct Spilled {
    path: PathBuf,
    /// Not written yet.
    buffer: String,
    /// How far the file was read.
    read: u64,
    /// Pages in the file and the buffer.
    pages: u64,
}

impl Ahead {
    /// Puts a page behind all others; `spill` is where a file may be made.
    pub(crate) fn push(&mut self, url: Box<str>, spill: impl FnOnce() -> PathBuf) -> io::Result<()> {
        if self.spilled.is_none() {
            if self.memory.len() < MEMORY {
                self.memory.push_back(url);
                return Ok(());
            }
            self.spilled = Some(Spilled { path: spill(), buffer: String::new(), read: 0, pages: 0 });
        }
        let Some(spilled) = &mut self.spilled else { unreachable!("it was made above") };
        spilled.buffer.push_str(&url);
        spilled.buffer.push('\n');
        spilled.pages += 1;
        if spilled.buffer.len() >= BUFFER { spilled.write() } else { Ok(()) }
    }

    /// The next page.
    pub(crate) fn pop(&mut self) -> io::Result<Option<Box<str>>> {
        if self.memory.is_empty()
            && let Some(spilled) = &mut self.spilled
        {
            spilled.read_into(&mut self.memory)?;
            if spilled.pages == 0 {
                self.spilled = None;
            }
        }
        Ok(self.memory.pop_front())
    }

    /// How many there are.
    pub(crate) fn len(&self) -> u64 {
        self.memory.len() as u64 + self.spilled.as_ref().map_or(0, |spilled| spilled.pages)
    }

    /// How many of them are in memory.
    pub(crate) fn held(&self) -> usize {
        self.memory.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Spilled {
    fn write(&mut self) -> io::Result<()> {
        let mut file = OpenOptions::new().create(true).append(true).open(&self.path)?;
        file.write_all(self.buffer.as_bytes())?;
        self.buffer.clear();
        Ok(())
    }

    /// Moves the first of them to the memory.
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
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "somebody has cut it"));
            }
            self.read += bytes as u64;
            self.pages -= 1;
            memory.push_back(line.trim_end().into());
        }
        Ok(())
    }
}

impl Drop for Spilled {
    fn drop(&mut self) {
        // Whatever is left is removed when the folder is next opened.
        drop(fs::remove_file(&self.path));
    }
}

/// The file of this number.
pub(crate) fn file(folder: &Path, number: u64) -> PathBuf {
    folder.join(format!("{number}.urls"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_pages_come_out_in_their_order_and_few_are_in_memory() {
        let folder = tempfile::tempdir().unwrap();
        let mut ahead = Ahead::default();
        let (mut pushed, mut popped) = (0_u64, 0_u64);
        // More come than go, then more go than come.
        for (come, go) in [(5_000, 700), (100, 2_500), (3_000, 10), (0, 10_000)] {
            for _ in 0..come {
                ahead.push(format!("https://h/{pushed}").into(), || file(folder.path(), 7)).unwrap();
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
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left behind");
    }
}
