//! The folder of an archive: who may write to it, and which files it has.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use tidegate_core::limit::policy::Version;

use super::ArchiveError;

const LOCK: &str = "archive.lock";
const PREFIX: &str = "audit-";
const SUFFIX: &str = ".jsonl.gz";
/// What a file has instead while it is written.
const TEMPORARY: &str = ".jsonl.gz.tmp";

/// A folder that only its holder writes to.
///
/// Whoever works on its files holds it, so that it is locked until the last has ended.
#[derive(Debug)]
pub(super) struct Folder {
    path: PathBuf,
    /// What it is called in messages.
    shown: PathBuf,
    files: Vec<ArchiveFile>,
    /// Unlocked when it is closed; `None` where another place is locked for it.
    _lock: Option<File>,
}

/// A file of an archive, and the changes it holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ArchiveFile {
    pub(super) path: PathBuf,
    pub(super) first: Version,
    pub(super) last: Version,
}

impl ArchiveFile {
    /// Its name in its folder.
    pub(super) fn name(&self) -> String {
        name_of(&self.path)
    }
}

/// The name of a file in its folder.
pub(super) fn name_of(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

impl Folder {
    /// Locks a folder, removes what was left half written, and looks what there is.
    pub(super) fn open(path: PathBuf) -> Result<Self, ArchiveError> {
        match fs::create_dir(&path) {
            Ok(()) => sync_folder(above(&path))?,
            // Perhaps by a run that was stopped just then. Whoever made it for us may not let us see what is above it.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => drop(sync_folder(above(&path))),
            Err(error) => return Err(ArchiveError::io(&path, "make the folder")(error)),
        }
        let lock_path = path.join(LOCK);
        let lock = File::options().create(true).truncate(false).write(true).open(&lock_path);
        let lock = lock.map_err(ArchiveError::io(&lock_path, "open"))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(ArchiveError::Locked { folder: path }),
            Err(TryLockError::Error(error)) => return Err(ArchiveError::io(&lock_path, "lock")(error)),
        }
        for name in names(&path)? {
            if name.starts_with(PREFIX) && name.ends_with(TEMPORARY) {
                let left_over = path.join(name);
                fs::remove_file(&left_over).map_err(ArchiveError::io(&left_over, "remove"))?;
            }
        }
        let files = files(&path)?;
        // A run that was stopped may have named its last file without making the name durable.
        sync_folder(&path)?;
        Ok(Self { shown: path.clone(), path, files, _lock: Some(lock) })
    }

    /// An empty folder on the way to a place that has files of these names, among others.
    pub(super) fn staged(path: &Path, shown: PathBuf, names: Vec<String>) -> Result<Self, ArchiveError> {
        Ok(Self { files: files_of(path, names)?, path: path.to_owned(), shown, _lock: None })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The last change that a file holds.
    pub(super) fn last(&self) -> Option<Version> {
        self.files.last().map(|file| file.last)
    }

    /// The files that hold changes from `first` on.
    pub(super) fn files_from(&self, first: Version) -> impl Iterator<Item = ArchiveFile> {
        self.files.iter().filter(move |file| file.last >= first).cloned()
    }

    /// Where a file is written that begins with this change.
    pub(super) fn temporary(&self, first: Version) -> PathBuf {
        self.path.join(format!("{PREFIX}{:020}{TEMPORARY}", first.number()))
    }

    /// Gives a file that is durable its name, and makes that durable too.
    pub(super) fn name(
        &self,
        temporary: &Path,
        first: Version,
        last: Version,
    ) -> Result<PathBuf, ArchiveError> {
        let path = self.path.join(format!("{PREFIX}{:020}-{:020}{SUFFIX}", first.number(), last.number()));
        let is_there = path.try_exists().map_err(ArchiveError::io(&path, "look for"))?;
        if is_there {
            let error = io::Error::from(io::ErrorKind::AlreadyExists);
            return Err(ArchiveError::io(&path, "write")(error));
        }
        fs::rename(temporary, &path).map_err(ArchiveError::io(&path, "name"))?;
        sync_folder(&self.path)?;
        Ok(path)
    }

    /// It is not of this store.
    pub(super) fn foreign(&self, what: String) -> ArchiveError {
        ArchiveError::Foreign { folder: self.shown.clone(), what }
    }
}

/// The files of an archive, in order.
pub(super) fn files(folder: &Path) -> Result<Vec<ArchiveFile>, ArchiveError> {
    files_of(folder, names(folder)?)
}

/// Those of these names that are files of an archive, in order.
fn files_of(folder: &Path, names: Vec<String>) -> Result<Vec<ArchiveFile>, ArchiveError> {
    let mut files = Vec::new();
    for name in names {
        if name.starts_with(PREFIX) && name.ends_with(SUFFIX) {
            let path = folder.join(&name);
            let Some((first, last)) = versions(&path) else {
                return Err(ArchiveError::Corrupt { path, what: "its name says no changes".to_owned() });
            };
            files.push(ArchiveFile { path, first, last });
        }
    }
    files.sort_by_key(|file| file.first);
    let overlap = files.windows(2).find(|pair| pair[1].first <= pair[0].last);
    if let Some([one, other]) = overlap {
        let what = format!("it has changes that `{}` has too", one.path.display());
        return Err(ArchiveError::Corrupt { path: other.path.clone(), what });
    }
    Ok(files)
}

/// Whether this is the name of a file of an archive.
pub(super) fn is_name(name: &str) -> bool {
    versions(Path::new(name)).is_some()
}

/// The first and the last change that a file's name says.
pub(super) fn versions(path: &Path) -> Option<(Version, Version)> {
    let name = path.file_name()?.to_str()?.strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?;
    let (first, last) = name.split_once('-')?;
    let number = |digits: &str| -> Option<u64> {
        let is_number = digits.len() == 20 && digits.bytes().all(|digit| digit.is_ascii_digit());
        digits.parse().ok().filter(|_| is_number)
    };
    let (first, last) = (number(first)?, number(last)?);
    (first <= last).then(|| (Version::new(first), Version::new(last)))
}

/// The names in a folder that are text.
fn names(folder: &Path) -> Result<Vec<String>, ArchiveError> {
    let mut names = Vec::new();
    for found in fs::read_dir(folder).map_err(ArchiveError::io(folder, "list"))? {
        let found = found.map_err(ArchiveError::io(folder, "list"))?;
        names.extend(found.file_name().into_string());
    }
    Ok(names)
}

fn above(path: &Path) -> &Path {
    match path.parent() {
        Some(above) if !above.as_os_str().is_empty() => above,
        _ => Path::new("."),
    }
}

/// Makes the names in a folder durable, where the system lets a folder be opened.
fn sync_folder(folder: &Path) -> Result<(), ArchiveError> {
    match File::open(folder) {
        Ok(opened) => opened.sync_all().map_err(ArchiveError::io(folder, "make durable")),
        Err(_) if cfg!(windows) => Ok(()),
        Err(error) => Err(ArchiveError::io(folder, "open")(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_files_name_says_its_changes() {
        let name =
            |name: &str| versions(Path::new(name)).map(|(first, last)| (first.number(), last.number()));
        assert_eq!(name("x/audit-00000000000000000003-00000000000000000017.jsonl.gz"), Some((3, 17)));
        assert_eq!(
            name("audit-18446744073709551615-18446744073709551615.jsonl.gz"),
            Some((u64::MAX, u64::MAX))
        );
        for bad in [
            "audit-3-17.jsonl.gz",
            "audit-00000000000000000003.jsonl.gz",
            "audit-00000000000000000017-00000000000000000003.jsonl.gz",
            "audit-+0000000000000000003-00000000000000000017.jsonl.gz",
            "audit-99999999999999999999-99999999999999999999.jsonl.gz",
            "audit-00000000000000000003-00000000000000000017.jsonl",
            "",
        ] {
            assert_eq!(name(bad), None, "{bad}");
        }
    }
}
