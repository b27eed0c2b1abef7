//! The folder of a fetch: pages under their names, and the state to resume after an interruption.
//!
//! ```text
//! DIR/example.com/docs/page.html    a complete page
//! DIR/.tidegate/lock                locked while a fetch runs
//! DIR/.tidegate/journal.jsonl       one line per finished page, done, skipped or failed
//! DIR/.tidegate/parts/KEY-RUN-N     pages in progress, and the first bytes of those that broke off
//! DIR/.tidegate/ahead/N.urls        queued pages
//! ```
//!
//! The journal is a write-ahead log. A page is written to its part and synced, then its journal line is
//! written and synced, and only then is the part renamed. A file under its final name is thus complete, even
//! after a power failure, and recovery only renames the parts that the journal lists. Part names are unique
//! across runs, so a line never refers to a different, incomplete part.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, BufRead as _, BufReader, Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use reqwest::Url;

use super::address::Key;
use super::codec::{self, JournalLine};
use super::file_name::FileName;
use super::partial::Partial;
use crate::failure::Failure;

/// The folder with the state of a fetch. No host name begins with a dot.
pub(crate) const STATE: &str = ".tidegate";
pub(crate) const JOURNAL: &str = "journal.jsonl";
/// Upper bound of a journal line, since addresses are bounded.
const LINE_MAX: u64 = 64 << 10;
/// Failed pages that are remembered: 16 MB.
const FAILED_MAX: usize = 1_000_000;

/// A folder that this process has locked.
#[derive(Debug)]
pub(crate) struct Folder {
    root: PathBuf,
    journal: Option<File>,
    /// Pages that an earlier run requested and that failed.
    failed: HashSet<Key>,
    /// What arrived of pages that failed.
    partials: HashMap<Key, Partial>,
    /// Start time of this run, which makes part names unique across runs.
    run: u128,
    parts: AtomicU64,
    /// The kernel releases the lock however the process ends.
    _lock: File,
}

impl Folder {
    /// Creates and locks a folder, and recovers from an interruption.
    pub(crate) fn open(root: &Path) -> Result<Self, Failure> {
        let failed = |error: io::Error| write_failure(root, &error);
        let state = root.join(STATE);
        for folder in ["parts", "ahead"] {
            fs::create_dir_all(state.join(folder)).map_err(failed)?;
        }
        let lock = OpenOptions::new().create(true).append(true).open(state.join("lock")).map_err(failed)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let what = format!("another fetch is running in {}", root.display());
                return Err(
                    Failure::failed(what).next("wait until it ends, or choose another folder with --out DIR")
                );
            }
            Err(TryLockError::Error(error)) => return Err(failed(error)),
        }
        let run = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        let mut folder = Self {
            root: root.to_owned(),
            journal: None,
            failed: HashSet::new(),
            partials: HashMap::new(),
            run,
            parts: AtomicU64::new(0),
            _lock: lock,
        };
        folder.recover().map_err(failed)?;
        Ok(folder)
    }

    /// The folder that the user chose.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// The name of a new part for a page.
    pub(crate) fn new_part(&self, key: Key) -> String {
        format!("{key}-{:x}-{}", self.run, self.parts.fetch_add(1, Ordering::Relaxed))
    }

    /// The path of a part.
    pub(crate) fn part(&self, name: &str) -> PathBuf {
        self.parts().join(name)
    }

    pub(crate) fn parts(&self) -> PathBuf {
        self.root.join(STATE).join("parts")
    }

    /// The folder of spill files.
    pub(crate) fn spill_folder(&self) -> PathBuf {
        self.root.join(STATE).join("ahead")
    }

    pub(crate) fn journal_path(&self) -> PathBuf {
        self.root.join(STATE).join(JOURNAL)
    }

    /// The journal, positioned at its end. Returns the handle once and reopens the file after that.
    pub(crate) fn take_journal(&mut self) -> io::Result<File> {
        self.journal.take().map_or_else(|| self.open_journal(), Ok)
    }

    /// Whether a page exists under one of its final names, and so is complete.
    pub(crate) fn has(&self, file: &FileName) -> bool {
        file.all().any(|name| fs::symlink_metadata(self.root.join(name)).is_ok())
    }

    /// Whether an earlier run requested a page and it failed.
    pub(crate) fn has_failed(&self, key: Key) -> bool {
        self.failed.contains(&key)
    }

    /// What arrived of a page in an earlier run.
    pub(crate) fn partial(&self, key: Key) -> Option<&Partial> {
        self.partials.get(&key)
    }

    /// Recovers from an interruption: renames the parts that the journal lists and removes the others. Also
    /// reads which pages have failed.
    fn recover(&mut self) -> io::Result<()> {
        for left in fs::read_dir(self.spill_folder())? {
            fs::remove_file(left?.path())?;
        }
        let mut journal = self.open_journal()?;
        let mut parts = HashSet::new();
        for left in fs::read_dir(self.parts())? {
            parts.insert(left?.file_name());
        }
        journal.seek(SeekFrom::Start(0))?;
        for line in BufReader::new(&journal).split(b'\n') {
            match codec::journaled(&line?) {
                // The last line of a page counts.
                Some(JournalLine::Done { url, part, file }) => {
                    if parts.remove(OsStr::new(&part)) {
                        rename_part(&self.root, &self.part(&part), &file)?;
                    }
                    let Ok(url) = Url::parse(&url) else { continue };
                    let key = Key::of(&url);
                    self.failed.remove(&key);
                    self.partials.remove(&key);
                }
                Some(JournalLine::Failed { url, partial }) if self.failed.len() < FAILED_MAX => {
                    let Ok(url) = Url::parse(&url) else { continue };
                    let key = Key::of(&url);
                    self.failed.insert(key);
                    self.partials.remove(&key);
                    self.partials.extend(partial.map(|partial| (key, partial)));
                }
                _ => {}
            }
        }
        self.partials.retain(|_, partial| parts.remove(OsStr::new(&partial.part)));
        for part in parts {
            fs::remove_file(self.parts().join(part))?;
        }
        self.journal = Some(journal);
        Ok(())
    }

    /// Opens the journal and truncates an incomplete last line.
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

/// Renames a part to its final name, and creates the folders above it.
pub(crate) fn rename_part(root: &Path, part: &Path, file: &str) -> io::Result<()> {
    let named = root.join(file);
    let renamed = match fs::rename(part, &named) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            named.parent().map_or(Ok(()), fs::create_dir_all).and_then(|()| fs::rename(part, &named))
        }
        renamed => renamed,
    };
    // The OS error does not name the path, which the user needs to find a conflicting file.
    renamed.map_err(|error| io::Error::new(error.kind(), format!("{file} cannot be created: {error}")))
}

/// The failure of a write to the folder, with a hint by its cause.
pub(crate) fn write_failure(root: &Path, error: &io::Error) -> Failure {
    let root = root.display();
    let (what, next) = match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            (format!("the disk of {root} is full: {error}"), "free some space")
        }
        io::ErrorKind::FileTooLarge => {
            (format!("a file in {root} exceeds the file size limit: {error}"), "raise the limit")
        }
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            (format!("{root} cannot be written to: {error}"), "check its permissions")
        }
        _ => (format!("{root} cannot be used: {error}"), "check the folder and its disk"),
    };
    Failure::failed(what).next(format!("{next}, then run the same command again to resume"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recovery_renames_journaled_parts_and_drops_others() {
        let root = tempfile::tempdir().unwrap();
        let folder = Folder::open(root.path()).unwrap();
        let key = Key::of(&Url::parse("https://h/1.html").unwrap());
        let new = |text: &str| {
            let part = folder.new_part(key);
            fs::write(folder.part(&part), text).unwrap();
            part
        };
        let (whole, _half, torn) =
            (new("whole"), new("half, of the same page"), new("whole, and its line is torn"));
        let done = |part: &str, file: &str| codec::done_line(&format!("https://{file}"), part, file);
        let torn = done(&torn, "h/3.html");
        let text =
            done(&format!("{key}-1-1"), "h/9.html") + &done(&whole, "h/a/1.html") + &torn[..torn.len() - 7];
        fs::write(folder.journal_path(), text).unwrap();
        drop(folder);
        let mut folder = Folder::open(root.path()).unwrap();
        assert_eq!(fs::read_to_string(root.path().join("h/a/1.html")).unwrap(), "whole");
        for lost in ["h/3.html", "h/9.html"] {
            assert!(!folder.has(&FileName::Whole(lost.to_owned())), "{lost}");
        }
        assert_eq!(fs::read_dir(folder.parts()).unwrap().count(), 0);
        let journal = fs::read_to_string(folder.journal_path()).unwrap();
        assert!(journal.ends_with("}\n") && journal.lines().count() == 2, "{journal}");
        assert!(folder.take_journal().is_ok());
    }

    /// A page that broke off and was fetched in a later run left its first part behind for good.
    #[test]
    fn recovery_drops_the_first_part_of_a_fetched_page() {
        let root = tempfile::tempdir().unwrap();
        let folder = Folder::open(root.path()).unwrap();
        let url = Url::parse("https://h/1.html").unwrap();
        let key = Key::of(&url);
        let part = folder.new_part(key);
        fs::write(folder.part(&part), "its first bytes").unwrap();
        let partial = Partial {
            part,
            bytes: 3,
            url: Url::parse("https://h/target").unwrap(),
            validator: "\"a\"".to_owned(),
            empty_rests: 0,
        };
        let mut journal = Vec::new();
        codec::write_partial(&mut journal, &url, &partial).unwrap();
        fs::write(folder.journal_path(), &journal).unwrap();
        drop(folder);
        let folder = Folder::open(root.path()).unwrap();
        assert_eq!((folder.partial(key), folder.has_failed(key)), (Some(&partial), true));
        drop(folder);
        journal.extend(codec::done_line(url.as_str(), "another", "h/1.html").into_bytes());
        fs::write(root.path().join(STATE).join(JOURNAL), &journal).unwrap();
        let folder = Folder::open(root.path()).unwrap();
        assert_eq!((folder.partial(key), folder.has_failed(key)), (None, false));
        assert_eq!(fs::read_dir(folder.parts()).unwrap().count(), 0);
    }

    #[test]
    fn rename_error_names_the_file() {
        let root = tempfile::tempdir().unwrap();
        let part = root.path().join("part");
        fs::write(&part, "whole").unwrap();
        fs::write(root.path().join("h"), "a file of the user").unwrap();
        let error = rename_part(root.path(), &part, "h/a/1.html").unwrap_err();
        let failure = write_failure(root.path(), &error);
        assert!(failure.what.contains("h/a/1.html cannot be created: Not a directory"), "{}", failure.what);
        fs::remove_file(root.path().join("h")).unwrap();
        rename_part(root.path(), &part, "h/a/1.html").unwrap();
    }

    #[test]
    fn folder_is_locked_by_one_fetch() {
        let root = tempfile::tempdir().unwrap();
        let first = Folder::open(root.path()).unwrap();
        let refused = Folder::open(root.path()).unwrap_err();
        assert!(refused.what.starts_with("another fetch is running in "), "{}", refused.what);
        drop(first);
        assert!(Folder::open(root.path()).is_ok());
    }
}
