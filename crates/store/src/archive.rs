//! The audit, moved from a store to gzip files of JSON lines.
//!
//! A folder holds the archive of one store: files `audit-{first}-{last}.jsonl.gz`, named after the first and the last
//! change in them, each change whole in one file. [`archive`] moves there what is older than a given time, and
//! [`read_archive`] reads it back. A line is an entry: who changed what, when, from what to what.
//!
//! A file is written under another name, made durable and only then named; only then are its entries pruned from the
//! store. Whoever stops it, wherever: nothing is lost, and the next run finds out what is in both places, compares it
//! entry by entry, and goes on.
//!
//! ```no_run
//! use std::time::Duration;
//! use tidegate_core::time::Stamp;
//! use tidegate_store::archive::{ArchiveOptions, archive, read_archive};
//! use tidegate_store::{Memory, SystemWall, WallClock};
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let store = Memory::new();
//! let month_ago = Stamp::from_micros(SystemWall::new().now().as_micros() - 30 * 86_400 * 1_000_000);
//! let archived = archive(&store, &ArchiveOptions::new("audit", month_ago)).await?;
//! println!("{} entries in {} files", archived.entries, archived.files);
//! for entry in read_archive("audit")? {
//!     let entry = entry?;
//!     println!("{} {} {}", entry.at, entry.actor, entry.filed);
//! }
//! # Ok(())
//! # }
//! ```

mod compare;
mod folder;
mod place;
mod reader;
mod writer;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tempfile::TempDir;
use thiserror::Error;
use tidegate_core::limit::audit::Entry;
use tidegate_core::limit::policy::Version;
use tidegate_core::time::Stamp;

use crate::error::StoreError;
use crate::ledger::{AuditQuery, Prune};
use crate::page::Paging;
use crate::store::Store;
use compare::Compare;
use folder::Folder;
pub use place::{ArchivePlace, Later, copy_archive};
pub use reader::{Entries, read_archive};
use writer::Writer;

/// A file is closed with the change that brings it to so many entries.
const FILE_ENTRIES: usize = 10_000;
/// Entries that are fetched, and pruned, at a time.
const BATCH: u32 = 1_000;

/// What to archive, and where.
#[derive(Debug, Clone)]
pub struct ArchiveOptions {
    target: Target,
    before: Stamp,
    file_entries: usize,
}

/// Where files go.
#[derive(Debug, Clone)]
enum Target {
    Folder(PathBuf),
    Place(Arc<dyn ArchivePlace>),
}

impl ArchiveOptions {
    /// Every change that was made before this time, to this folder. It is made if it is not there, in a folder that is.
    /// Each store, and each namespace of it, has a folder of its own.
    pub fn new(folder: impl Into<PathBuf>, before: Stamp) -> Self {
        Self { target: Target::Folder(folder.into()), before, file_entries: FILE_ENTRIES }
    }

    /// The same to a place that is no folder of this machine: a bucket.
    pub fn at(place: Arc<dyn ArchivePlace>, before: Stamp) -> Self {
        Self { target: Target::Place(place), before, file_entries: FILE_ENTRIES }
    }

    /// Closes a file with the change that brings it to so many entries: 10,000 unless said otherwise, at least one.
    #[must_use]
    pub fn file_entries(mut self, entries: usize) -> Self {
        self.file_entries = entries.max(1);
        self
    }
}

/// What was archived.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Archived {
    /// Files that were written.
    pub files: u64,
    /// Entries that were written.
    pub entries: u64,
    /// Entries that were pruned from the store, those included that an earlier run wrote and did not prune.
    pub pruned: u64,
    /// The last change that is in the archive and no longer in the store; `None` while there is none.
    pub through: Option<Version>,
}

/// Why the audit was not archived, or not to the end. What is in the store and not in the archive is still in the
/// store.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ArchiveError {
    /// The store did not answer as it should.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Somebody else writes to the folder.
    #[error("`{}` is locked: somebody else archives to it", folder.display())]
    Locked {
        /// Which folder.
        folder: PathBuf,
    },
    /// The folder is the archive of another store, or of what this one was before.
    #[error("`{}` is not the archive of this store: {what}", folder.display())]
    Foreign {
        /// Which folder.
        folder: PathBuf,
        /// What does not fit.
        what: String,
    },
    /// A file is not as it was written.
    #[error("`{}` is no file of an archive: {what}", path.display())]
    Corrupt {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it, and where.
        what: String,
    },
    /// A place that is no folder does not do as it is asked.
    #[error("`{place}`: {what}")]
    Place {
        /// Which one.
        place: String,
        /// What it says.
        what: String,
        /// It may do so later.
        is_away: bool,
    },
    /// A file or a folder cannot be used.
    #[error("cannot {doing} `{}`", path.display())]
    Io {
        /// Which one.
        path: PathBuf,
        /// What was tried.
        doing: &'static str,
        /// Why it cannot.
        #[source]
        source: io::Error,
    },
}

impl ArchiveError {
    /// Whether the same call may succeed later, with nothing changed but time.
    pub const fn is_transient(&self) -> bool {
        match self {
            Self::Store(error) => error.is_transient(),
            Self::Locked { .. } | Self::Place { is_away: true, .. } => true,
            _ => false,
        }
    }

    fn io(path: &Path, doing: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { path: path.to_owned(), doing, source }
    }
}

/// Moves every change that was made before a given time from the store's audit to the archive, in the order they were
/// made in, up to the first that was not.
///
/// Files are worked on outside the runtime's own threads. No more than a thousand entries are held at a time.
///
/// # Errors
/// [`ArchiveError::Locked`] while somebody else archives to the folder, [`Foreign`](ArchiveError::Foreign) for a folder
/// that holds other entries than the store of the same changes, [`Corrupt`](ArchiveError::Corrupt) for a file that is
/// needed to compare and cannot be read; then nothing was pruned. Otherwise what the store or the file system says. To
/// run it again goes on where it ended.
///
/// # Cancel safety
/// Dropping the future may leave a file that is written and not pruned, or half written under a temporary name. The next
/// run tidies up. What is being written as it is dropped is still written, and the folder is locked until then.
pub async fn archive(store: &dyn Store, options: &ArchiveOptions) -> Result<Archived, ArchiveError> {
    match &options.target {
        Target::Folder(path) => {
            let opened = path.clone();
            let folder = Arc::new(off_thread(path, move || Folder::open(opened)).await?);
            Run { store, folder, far: None, archived: Archived::default() }.finish_all(options).await
        }
        Target::Place(place) => {
            place.hold().await?;
            let archived = archive_at(store, place, options).await;
            // Whoever cannot is told by the next run, which waits for it.
            let released = place.release().await;
            archived.and_then(|archived| released.map(|()| archived))
        }
    }
}

/// Archives to a place that is held, by way of a folder of this machine.
async fn archive_at(
    store: &dyn Store,
    place: &Arc<dyn ArchivePlace>,
    options: &ArchiveOptions,
) -> Result<Archived, ArchiveError> {
    let names = place.names().await?;
    let shown = PathBuf::from(place.shown());
    let temporary = std::env::temp_dir();
    let scratch = off_thread(&temporary, || {
        TempDir::new().map_err(ArchiveError::io(&std::env::temp_dir(), "make a folder in"))
    });
    // Removed when this is done.
    let scratch = scratch.await?;
    let folder = Folder::staged(scratch.path(), shown, names)?;
    let far = Some(Arc::clone(place));
    Run { store, folder: Arc::new(folder), far, archived: Archived::default() }.finish_all(options).await
}

struct Run<'a> {
    store: &'a dyn Store,
    folder: Arc<Folder>,
    /// Where files go from the folder, and come from.
    far: Option<Arc<dyn ArchivePlace>>,
    archived: Archived,
}

impl Run<'_> {
    async fn finish_all(mut self, options: &ArchiveOptions) -> Result<Archived, ArchiveError> {
        if let Some(last) = self.folder.last() {
            self.end_last_run(last).await?;
        }
        self.write_what_is_old(options).await?;
        Ok(self.archived)
    }

    /// Fetches what is there of the changes from `first` on.
    async fn fetch(&self, first: Version) -> Result<(), ArchiveError> {
        let Some(far) = &self.far else { return Ok(()) };
        for file in self.folder.files_from(first) {
            far.fetch(&file.name(), &file.path).await?;
        }
        Ok(())
    }

    /// Prunes what the archive has already, if it is what the store has.
    async fn end_last_run(&mut self, last: Version) -> Result<(), ArchiveError> {
        let made = self.store.version().await?;
        if made < last {
            let what = format!("it has changes up to version {last}, and the store is at version {made}");
            return Err(self.folder.foreign(what));
        }
        if self.is_in_both(last).await? {
            self.prune(last).await?;
        }
        self.archived.through = Some(last);
        Ok(())
    }

    /// Whether the store still has changes up to `last`: if it has, they are the last of the archive's.
    async fn is_in_both(&self, last: Version) -> Result<bool, ArchiveError> {
        let mut pages = Pages::new(self.store);
        let mut compare: Option<Compare> = None;
        while let Some(mut page) = pages.next().await? {
            let old = page.partition_point(|entry| entry.version <= last);
            let is_end = old < page.len();
            page.truncate(old);
            if !page.is_empty() {
                if compare.is_none() {
                    self.fetch(page[0].version).await?;
                }
                let (begun, folder) = (compare.take(), Arc::clone(&self.folder));
                let work = move || {
                    let mut compare = begun.unwrap_or_else(|| Compare::new(folder, page[0].version));
                    compare.page(&page)?;
                    Ok(compare)
                };
                compare = Some(off_thread(self.folder.path(), work).await?);
            }
            if is_end {
                break;
            }
        }
        let Some(compare) = compare else { return Ok(false) };
        off_thread(self.folder.path(), move || compare.end()).await?;
        Ok(true)
    }

    async fn write_what_is_old(&mut self, options: &ArchiveOptions) -> Result<(), ArchiveError> {
        let mut pages = Pages::new(self.store);
        let mut writer: Option<Writer> = None;
        let (mut current, mut is_end) = (None, false);
        while !is_end && let Some(page) = pages.next().await? {
            let mut batch = Vec::with_capacity(page.len());
            for entry in page {
                if current != Some(entry.version) {
                    // All entries of a change are of one time.
                    is_end = entry.at >= options.before;
                    if is_end {
                        break;
                    }
                    self.check_is_new(&entry)?;
                    let count = writer.as_ref().map_or(0, Writer::entries) + batch.len();
                    if count >= options.file_entries {
                        let full = self.write(writer.take(), std::mem::take(&mut batch)).await?;
                        self.finish(full).await?;
                    }
                    current = Some(entry.version);
                }
                batch.push(entry);
            }
            if !batch.is_empty() {
                writer = Some(self.write(writer.take(), batch).await?);
            }
        }
        match writer {
            Some(writer) => self.finish(writer).await,
            None => Ok(()),
        }
    }

    /// A store that says it has forgotten what it has not would have it archived twice.
    fn check_is_new(&self, entry: &Entry) -> Result<(), ArchiveError> {
        if self.archived.through.is_some_and(|through| entry.version <= through) {
            let what = format!("an entry of the audit of version {} that was pruned", entry.version);
            return Err(StoreError::Corrupt { what }.into());
        }
        Ok(())
    }

    /// Writes to a file that is begun, or begins one.
    async fn write(&self, writer: Option<Writer>, batch: Vec<Entry>) -> Result<Writer, ArchiveError> {
        let folder = Arc::clone(&self.folder);
        let work = move || {
            let mut writer = match writer {
                Some(writer) => writer,
                None => Writer::begin(folder, batch.first().map_or(Version::ZERO, |entry| entry.version))?,
            };
            writer.write(&batch)?;
            Ok(writer)
        };
        off_thread(self.folder.path(), work).await
    }

    /// Makes a file durable, and then prunes what it holds.
    async fn finish(&mut self, writer: Writer) -> Result<(), ArchiveError> {
        let (entries, last) = (writer.entries() as u64, writer.last());
        let path = off_thread(self.folder.path(), move || writer.finish()).await?;
        if let Some(far) = &self.far {
            far.hold().await?;
            far.put(&folder::name_of(&path), &path).await?;
            off_thread(&path.clone(), move || {
                std::fs::remove_file(&path).map_err(ArchiveError::io(&path, "remove"))
            })
            .await?;
        }
        self.archived.files += 1;
        self.archived.entries += entries;
        self.prune(last).await?;
        self.archived.through = Some(last);
        Ok(())
    }

    async fn prune(&mut self, through: Version) -> Result<(), ArchiveError> {
        loop {
            if let Some(far) = &self.far {
                far.hold().await?;
            }
            let pruned = self.store.prune(&Prune::Audit { through }, BATCH as usize).await?;
            self.archived.pruned += pruned;
            if pruned < u64::from(BATCH) {
                return Ok(());
            }
        }
    }
}

/// The store's audit from its beginning, page by page.
struct Pages<'a> {
    store: &'a dyn Store,
    next: Option<Paging>,
    latest: Version,
}

impl<'a> Pages<'a> {
    fn new(store: &'a dyn Store) -> Self {
        Self { store, next: Paging::first(BATCH).ok(), latest: Version::ZERO }
    }

    /// The next page; `None` after the last.
    async fn next(&mut self) -> Result<Option<Vec<Entry>>, ArchiveError> {
        // All of time: with the clock set back, an older time may stand behind a newer one, and a prune takes both.
        let always = AuditQuery { filed: None, range: Stamp::ZERO..Stamp::MAX };
        let Some(paging) = self.next.take() else { return Ok(None) };
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
        Ok(Some(page.items))
    }
}

/// Does what blocks outside the runtime's own threads.
async fn off_thread<T: Send + 'static>(
    path: &Path,
    work: impl FnOnce() -> Result<T, ArchiveError> + Send + 'static,
) -> Result<T, ArchiveError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(answer) => answer,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(stopped) => Err(ArchiveError::io(path, "go on with")(io::Error::other(stopped))),
        },
    }
}
