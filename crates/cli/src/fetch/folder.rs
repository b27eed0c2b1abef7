//! The folder of a fetch: pages under their names, and beside them what it needs to go on after an interruption.
//!
//! ```text
//! DIR/example.com/docs/page.html    a page, whole
//! DIR/.tidegate/lock                held while a fetch runs
//! DIR/.tidegate/journal.jsonl       one line for each page that has ended, whatever became of it
//! DIR/.tidegate/parts/KEY-RUN-N     pages that are under way
//! DIR/.tidegate/ahead/N.urls        pages that wait
//! ```
//!
//! A page is written to its part. When it is whole it is brought to the disk, then its line in the journal, and only then does it get
//! its name. So whatever has a name is whole, though the power fails, and a part with a line in the journal has only its name to get.
//! No two parts have one name, in other runs neither: a line is about one part, and not about another that is half written.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, BufRead as _, BufReader, Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use super::address::Key;
use super::codec;
use crate::failure::Failure;

/// What of ours is in the folder. No host begins with a dot.
pub(crate) const STATE: &str = ".tidegate";
pub(crate) const JOURNAL: &str = "journal.jsonl";
/// No line of the journal is longer: addresses are bounded.
const LINE_MAX: u64 = 64 << 10;

/// A folder that is ours for as long as this is there.
#[derive(Debug)]
pub(crate) struct Folder {
    root: PathBuf,
    journal: Option<File>,
    /// What this run's parts are told from others' by, and how many there were.
    run: u128,
    parts: AtomicU64,
    /// Held, and let go by the system however we end.
    _lock: File,
}

impl Folder {
    /// Takes a folder, makes it if it is not there, and ends what was interrupted.
    pub(crate) fn open(root: &Path) -> Result<Self, Failure> {
        let failed = |error: io::Error| trouble(root, &error);
        let state = root.join(STATE);
        for folder in ["parts", "ahead"] {
            fs::create_dir_all(state.join(folder)).map_err(failed)?;
        }
        let lock = OpenOptions::new().create(true).append(true).open(state.join("lock")).map_err(failed)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let what = format!("another fetch is at work in {}", root.display());
                return Err(
                    Failure::failed(what).next("wait until it ends, or choose another folder with --out DIR")
                );
            }
            Err(TryLockError::Error(error)) => return Err(failed(error)),
        }
        let run = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        let mut folder =
            Self { root: root.to_owned(), journal: None, run, parts: AtomicU64::new(0), _lock: lock };
        folder.mend().map_err(failed)?;
        Ok(folder)
    }

    /// The folder that people see.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// The name of a new part for a page.
    pub(crate) fn new_part(&self, key: Key) -> String {
        format!("{key}-{:x}-{}", self.run, self.parts.fetch_add(1, Ordering::Relaxed))
    }

    /// Where a part is.
    pub(crate) fn part(&self, name: &str) -> PathBuf {
        self.parts().join(name)
    }

    pub(crate) fn parts(&self) -> PathBuf {
        self.root.join(STATE).join("parts")
    }

    /// Where pages are that wait.
    pub(crate) fn ahead(&self) -> PathBuf {
        self.root.join(STATE).join("ahead")
    }

    pub(crate) fn journal_path(&self) -> PathBuf {
        self.root.join(STATE).join(JOURNAL)
    }

    /// The journal, at its end. It is there once.
    pub(crate) fn take_journal(&mut self) -> io::Result<File> {
        self.journal.take().map_or_else(|| self.open_journal(), Ok)
    }

    /// Whether a page has its name: then it is whole.
    pub(crate) fn has(&self, file: &str) -> bool {
        fs::symlink_metadata(self.root.join(file)).is_ok()
    }

    /// Ends what an interruption has left: names for what is in the journal, nothing for what is not.
    fn mend(&mut self) -> io::Result<()> {
        for left in fs::read_dir(self.ahead())? {
            fs::remove_file(left?.path())?;
        }
        let mut journal = self.open_journal()?;
        let mut parts = HashSet::new();
        for left in fs::read_dir(self.parts())? {
            parts.insert(left?.file_name());
        }
        if !parts.is_empty() {
            journal.seek(SeekFrom::Start(0))?;
            for line in BufReader::new(&journal).split(b'\n') {
                if let Some((part, file)) = codec::done(&line?)
                    && parts.remove(OsStr::new(&part))
                {
                    give_name(&self.root, &self.part(&part), &file)?;
                }
            }
        }
        for part in parts {
            fs::remove_file(self.parts().join(part))?;
        }
        self.journal = Some(journal);
        Ok(())
    }

    /// Opens the journal. What was not written to its end is cut off.
    fn open_journal(&self) -> io::Result<File> {
        let path = self.journal_path();
        let mut journal = OpenOptions::new().create(true).read(true).append(true).open(path)?;
        let length = journal.metadata()?.len();
        let from = length.saturating_sub(LINE_MAX);
        journal.seek(SeekFrom::Start(from))?;
        let mut end = Vec::new();
        (&journal).take(LINE_MAX).read_to_end(&mut end)?;
        if end.last().is_some_and(|last| *last != b'\n') {
            let whole = end.iter().rposition(|letter| *letter == b'\n').map_or(0, |at| at as u64 + 1);
            journal.set_len(from + whole)?;
        }
        Ok(journal)
    }
}

/// Gives a page its name, and makes the folders above it.
pub(crate) fn give_name(root: &Path, part: &Path, file: &str) -> io::Result<()> {
    let named = root.join(file);
    let renamed = match fs::rename(part, &named) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            named.parent().map_or(Ok(()), fs::create_dir_all).and_then(|()| fs::rename(part, &named))
        }
        renamed => renamed,
    };
    // Something of somebody else's may be in the way, and nobody finds it by the error alone.
    renamed.map_err(|error| io::Error::new(error.kind(), format!("{file} cannot get its name: {error}")))
}

/// What is said of a folder that cannot be written to.
pub(crate) fn trouble(root: &Path, error: &io::Error) -> Failure {
    let root = root.display();
    let (what, next) = match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            (format!("the disk of {root} is full: {error}"), "make room")
        }
        io::ErrorKind::FileTooLarge => {
            (format!("a file in {root} may not be as large as it has to be: {error}"), "raise the limit")
        }
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            (format!("{root} cannot be written to: {error}"), "see who may write there")
        }
        _ => (format!("{root} cannot be used: {error}"), "see to the folder and its disk"),
    };
    Failure::failed(what).next(format!("{next}, then run the same command again: it goes on where it was"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_an_interruption_what_is_in_the_journal_gets_its_name_and_the_rest_is_gone() {
        let root = tempfile::tempdir().unwrap();
        let folder = Folder::open(root.path()).unwrap();
        let key = Key::of(&reqwest::Url::parse("https://h/1.html").unwrap());
        let new = |text: &str| {
            let part = folder.new_part(key);
            fs::write(folder.part(&part), text).unwrap();
            part
        };
        let (whole, _half, torn) =
            (new("whole"), new("half, of the same page"), new("whole, and its line is torn"));
        let torn = codec::done_line(&torn, "h/3.html");
        let text = codec::done_line(&format!("{key}-1-1"), "h/9.html")
            + &codec::done_line(&whole, "h/a/1.html")
            + &torn[..torn.len() - 7];
        fs::write(folder.journal_path(), text).unwrap();
        drop(folder);
        let mut folder = Folder::open(root.path()).unwrap();
        assert_eq!(fs::read_to_string(root.path().join("h/a/1.html")).unwrap(), "whole");
        assert!(!folder.has("h/3.html") && !folder.has("h/9.html"));
        assert_eq!(fs::read_dir(folder.parts()).unwrap().count(), 0);
        let journal = fs::read_to_string(folder.journal_path()).unwrap();
        assert!(journal.ends_with("}\n") && journal.lines().count() == 2, "{journal}");
        assert!(folder.take_journal().is_ok());
    }

    #[test]
    fn what_is_in_the_way_of_a_name_is_found_by_the_error() {
        let root = tempfile::tempdir().unwrap();
        let part = root.path().join("part");
        fs::write(&part, "whole").unwrap();
        fs::write(root.path().join("h"), "somebody else's").unwrap();
        let error = give_name(root.path(), &part, "h/a/1.html").unwrap_err();
        let failure = trouble(root.path(), &error);
        assert!(failure.what.contains("h/a/1.html cannot get its name: Not a directory"), "{}", failure.what);
        fs::remove_file(root.path().join("h")).unwrap();
        give_name(root.path(), &part, "h/a/1.html").unwrap();
    }

    #[test]
    fn a_folder_is_one_fetchs_at_a_time() {
        let root = tempfile::tempdir().unwrap();
        let first = Folder::open(root.path()).unwrap();
        let refused = Folder::open(root.path()).unwrap_err();
        assert!(refused.what.starts_with("another fetch is at work in "), "{}", refused.what);
        drop(first);
        assert!(Folder::open(root.path()).is_ok());
    }
}
