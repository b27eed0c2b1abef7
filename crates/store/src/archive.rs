//! Moves the audit from a store to an archive: gzip files of JSON lines in a folder or an object store.
//!
//! An [`ArchivePlace`] holds the archive of one store: files `audit-{first}-{last}.jsonl.gz`, named after the
//! first and the last change in them, each change whole in one file. [`archive`] moves there what is older
//! than a given time, and [`read_archive`] reads it back. A line is one audit entry.
//!
//! Entries are pruned from the store only after their file is durable in the archive. A run that stops in
//! between loses nothing: the next run compares entries that are in both, prunes them from the store, and
//! continues.
//!
//! ```no_run
//! use tidegate_core::time::Stamp;
//! use tidegate_store::archive::{ArchiveOptions, ArchivePlace, archive, read_archive};
//! use tidegate_store::{Memory, SystemWall, WallClock};
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let store = Memory::new();
//! let month_ago = Stamp::from_micros(SystemWall::new().now().as_micros() - 30 * 86_400 * 1_000_000);
//! let place = ArchivePlace::open("s3://backups/tidegate/audit?region=eu-central-1")?;
//! let archived = archive(&store, &ArchiveOptions::at(place.clone(), month_ago)).await?;
//! println!("{} entries in {} files", archived.entries, archived.files);
//! let mut entries = read_archive(&place).await?;
//! while let Some(entry) = entries.next_entry().await? {
//!     println!("{} {} {}", entry.at, entry.actor, entry.filed);
//! }
//! # Ok(())
//! # }
//! ```

mod files;
mod lock;
mod place;
mod reader;
mod writer;

use std::io;
use std::path::{Path, PathBuf};

pub use object_store;
use thiserror::Error;
use tidegate_core::limit::audit::Entry;
use tidegate_core::limit::policy::Version;
use tidegate_core::time::Stamp;
use tokio::task::coop::consume_budget;

use crate::error::StoreError;
use crate::ledger::{AuditQuery, Prune};
use crate::page::Paging;
use crate::store::Store;
use files::ArchiveFile;
use lock::LockedFiles;
pub use place::ArchivePlace;
pub use reader::{Entries, read_archive};
use writer::Writer;

/// A file is complete with the change that brings it to this number of entries.
const FILE_ENTRIES: usize = 10_000;
/// Entries that are fetched, and pruned, at a time.
const BATCH: u32 = 1_000;

/// What to archive, and where.
#[derive(Debug, Clone)]
pub struct ArchiveOptions {
    place: ArchivePlace,
    before: Stamp,
    file_entries: usize,
}

impl ArchiveOptions {
    /// Archives every change made before this time to this folder, which is created if only its last
    /// component is missing. Each store, and each namespace of it, needs its own folder.
    pub fn new(folder: impl Into<PathBuf>, before: Stamp) -> Self {
        Self::at(ArchivePlace::folder(folder), before)
    }

    /// Archives every change made before this time to this place.
    pub fn at(place: ArchivePlace, before: Stamp) -> Self {
        Self { place, before, file_entries: FILE_ENTRIES }
    }

    /// Completes a file with the change that brings it to this number of entries; 10,000 by default, at least
    /// one.
    #[must_use]
    pub fn file_entries(mut self, entries: usize) -> Self {
        self.file_entries = entries.max(1);
        self
    }
}

/// The result of a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ArchiveReport {
    /// Files that were written.
    pub files: u64,
    /// Entries that were written.
    pub entries: u64,
    /// Entries that were pruned from the store, including those that an earlier run wrote and did not prune.
    pub pruned: u64,
    /// The last change that is in the archive and no longer in the store; `None` while there is none.
    pub through: Option<Version>,
}

/// Why the audit was not archived, or not completely. Entries that are not in the archive are still in the
/// store.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ArchiveError {
    /// A call of the store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Another run holds the lock of the archive.
    #[error("`{}` is locked by another run", folder.display())]
    Locked {
        /// The folder, or the address of the object store.
        folder: PathBuf,
    },
    /// The archive belongs to another store, or to this store before a backup was restored.
    #[error("`{}` is not the archive of this store: {what}", folder.display())]
    Foreign {
        /// The folder, or the address of the object store.
        folder: PathBuf,
        /// What does not match.
        what: String,
    },
    /// A file is not as it was written.
    #[error("`{}` is not a valid archive file: {what}", path.display())]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// What is wrong with it, and where.
        what: String,
    },
    /// A request to an object store failed.
    #[error("cannot {doing} `{}`: {source}", path.display())]
    Remote {
        /// The address of the object.
        path: PathBuf,
        /// The operation.
        doing: &'static str,
        /// Whether the same request may succeed later.
        is_transient: bool,
        /// The error of the object store.
        source: Box<object_store::Error>,
    },
    /// An operation on a file or a folder failed.
    #[error("cannot {doing} `{}`", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The operation.
        doing: &'static str,
        /// The error of the file system.
        #[source]
        source: io::Error,
    },
}

impl ArchiveError {
    /// Whether the same call may succeed later, with nothing changed but time.
    pub const fn is_transient(&self) -> bool {
        match self {
            Self::Store(error) => error.is_transient(),
            Self::Locked { .. } | Self::Remote { is_transient: true, .. } => true,
            _ => false,
        }
    }

    fn io(path: &Path, doing: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { path: path.to_owned(), doing, source }
    }
}

/// Moves every change made before a given time from the store's audit to the archive, in the order in which
/// they were made, up to the first change that is younger.
///
/// Memory holds one page of a thousand entries and one compressed file at a time.
///
/// # Errors
/// [`ArchiveError::Locked`] while another run holds the lock, [`Foreign`](ArchiveError::Foreign) if the
/// archive and the store have different entries for the same changes, [`Corrupt`](ArchiveError::Corrupt) for
/// a file that must be compared and cannot be decoded; nothing is pruned then. Otherwise errors of the store,
/// the file system or the object store. The next run continues where this one stopped.
///
/// # Cancel safety
/// Dropping the future may leave a file that is written and not pruned; the next run prunes it. A folder
/// stays locked until the file being written is complete. An object store stays locked for up to two minutes.
pub async fn archive(store: &dyn Store, options: &ArchiveOptions) -> Result<ArchiveReport, ArchiveError> {
    let place = options.place.lock().await?;
    let mut run = Run { store, place, archived: ArchiveReport::default() };
    let done = run.finish_all(options).await;
    run.place.release().await;
    done.map(|()| run.archived)
}

struct Run<'a> {
    store: &'a dyn Store,
    place: LockedFiles,
    archived: ArchiveReport,
}

impl Run<'_> {
    async fn finish_all(&mut self, options: &ArchiveOptions) -> Result<(), ArchiveError> {
        let files = self.place.files.list().await?;
        if let Some(last) = files.last().map(|file| file.last) {
            self.end_last_run(files, last).await?;
        }
        self.write_old_changes(options).await
    }

    /// Prunes entries that are already in the archive from the store, if both have the same entries.
    async fn end_last_run(&mut self, files: Vec<ArchiveFile>, last: Version) -> Result<(), ArchiveError> {
        let made = self.store.version().await?;
        if made < last {
            let what = format!("it has changes up to version {last}, and the store is at version {made}");
            return Err(self.place.files.foreign(what));
        }
        if self.is_in_both(files, last).await? {
            self.prune(last).await?;
        }
        self.archived.through = Some(last);
        Ok(())
    }

    /// Whether the store still has changes up to `last`. Fails if they are not the last changes of the
    /// archive: the store may have pruned a part of its first change, but from the first common entry on both
    /// must have the same entries up to the end of the archive.
    async fn is_in_both(&self, mut files: Vec<ArchiveFile>, last: Version) -> Result<bool, ArchiveError> {
        let mut stored = StoredAudit::new(self.store);
        let mut next = stored.next_entry().await?.filter(|entry| entry.version <= last);
        let Some(first) = &next else { return Ok(false) };
        // From the file that may have the store's first change.
        files.retain(|file| file.last >= first.version);
        let mut archived = Entries::new(self.place.files.clone(), files);
        let mut is_aligned = false;
        while let Some(entry) = &next {
            match archived.next_entry().await? {
                Some(found) if found == *entry => {
                    is_aligned = true;
                    next = stored.next_entry().await?.filter(|entry| entry.version <= last);
                }
                Some(found) if !is_aligned && found.version <= entry.version => {}
                _ => {
                    let Entry { version, filed, at, .. } = entry;
                    let what = format!(
                        "the store's entry of version {version} for `{filed}`, made at {at}, is not in it"
                    );
                    return Err(self.place.files.foreign(what));
                }
            }
        }
        if let Some(Entry { version, filed, .. }) = archived.next_entry().await? {
            let what = format!("its entry of version {version} for `{filed}` is not in the store");
            return Err(self.place.files.foreign(what));
        }
        Ok(true)
    }

    async fn write_old_changes(&mut self, options: &ArchiveOptions) -> Result<(), ArchiveError> {
        let mut stored = StoredAudit::new(self.store);
        let mut writer: Option<Writer> = None;
        let mut current = None;
        while let Some(entry) = stored.next_entry().await? {
            if current != Some(entry.version) {
                // All entries of a change have the same time.
                if entry.at >= options.before {
                    break;
                }
                self.check_is_new(&entry)?;
                if let Some(full) = writer.take_if(|writer| writer.entries() >= options.file_entries) {
                    self.finish(full).await?;
                }
                current = Some(entry.version);
            }
            writer.get_or_insert_with(|| Writer::new(entry.version)).write(&entry)?;
            consume_budget().await;
        }
        match writer {
            Some(writer) => self.finish(writer).await,
            None => Ok(()),
        }
    }

    /// Fails if the store lists an entry that it reported as pruned: it would be archived twice.
    fn check_is_new(&self, entry: &Entry) -> Result<(), ArchiveError> {
        if self.archived.through.is_some_and(|through| entry.version <= through) {
            let what = format!("an entry of the audit of version {} that was pruned", entry.version);
            return Err(StoreError::Corrupt { what }.into());
        }
        Ok(())
    }

    /// Makes a file durable in the archive, then prunes its entries from the store.
    async fn finish(&mut self, writer: Writer) -> Result<(), ArchiveError> {
        let (entries, last) = (writer.entries() as u64, writer.last());
        self.place.add(&writer.name(), writer.finish()).await?;
        self.archived.files += 1;
        self.archived.entries += entries;
        self.prune(last).await?;
        self.archived.through = Some(last);
        Ok(())
    }

    async fn prune(&mut self, through: Version) -> Result<(), ArchiveError> {
        loop {
            self.place.renew_if_old().await?;
            let pruned = self.store.prune(&Prune::Audit { through }, BATCH as usize).await?;
            self.archived.pruned += pruned;
            if pruned < u64::from(BATCH) {
                return Ok(());
            }
        }
    }
}

/// The store's audit from its beginning, read page by page.
struct StoredAudit<'a> {
    store: &'a dyn Store,
    page: std::vec::IntoIter<Entry>,
    next: Option<Paging>,
    latest: Version,
}

impl<'a> StoredAudit<'a> {
    fn new(store: &'a dyn Store) -> Self {
        let next = Paging::first(BATCH).ok();
        Self { store, page: Vec::new().into_iter(), next, latest: Version::ZERO }
    }

    /// The next entry; `None` after the last.
    async fn next_entry(&mut self) -> Result<Option<Entry>, ArchiveError> {
        // No time range: after the clock was set back an older time follows a newer one, and a prune removes
        // both.
        let always = AuditQuery { filed: None, range: Stamp::ZERO..Stamp::MAX };
        while self.page.len() == 0
            && let Some(paging) = self.next.take()
        {
            let page = self.store.audit(&always, &paging).await?;
            self.next = page.next.map(|cursor| paging.after(cursor));
            for entry in &page.items {
                if entry.version < self.latest {
                    let (version, latest) = (entry.version, self.latest);
                    let what =
                        format!("an entry of the audit of version {version} after one of version {latest}");
                    return Err(StoreError::Corrupt { what }.into());
                }
                self.latest = entry.version;
            }
            self.page = page.items.into_iter();
        }
        Ok(self.page.next())
    }
}
