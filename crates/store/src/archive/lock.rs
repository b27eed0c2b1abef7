//! The lock of an archive: one run writes to it at a time.
//!
//! A folder has a file lock, which the system releases with the process. An object store has the object
//! `archive.lock`: created or replaced by a conditional put, renewed while the run works, and empty when
//! released. A lock that was not renewed for [`EXPIRES`] may be replaced.

use std::fs::{self, File, TryLockError};
use std::hash::{BuildHasher as _, RandomState};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use object_store::local::LocalFileSystem;
use object_store::{Error, ObjectStoreExt as _, PutMode, UpdateVersion};
use tokio::time::{Instant, timeout_at};

use super::ArchiveError;
use super::files::{Files, is_staged, version_of};

const NAME: &str = "archive.lock";
/// How long a lock object is valid after its last renewal.
const EXPIRES: Duration = Duration::from_secs(120);

/// The files of an archive, locked by this run.
#[derive(Debug)]
pub(super) struct LockedFiles {
    pub(super) files: Files,
    lock: Lock,
}

#[derive(Debug)]
enum Lock {
    /// Unlocked when the last clone is dropped.
    File(Arc<File>),
    Object {
        version: UpdateVersion,
        renewed: Instant,
    },
}

impl LockedFiles {
    /// Creates and locks a folder, and removes what a killed run left half written.
    pub(super) fn in_folder(root: PathBuf) -> Result<Self, ArchiveError> {
        let parent = root.parent().filter(|parent| !parent.as_os_str().is_empty());
        let parent = parent.unwrap_or(Path::new("."));
        match fs::create_dir(&root) {
            Ok(()) => sync_folder(parent)?,
            // A run that was killed may have created it just now. The parent may not be readable.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => drop(sync_folder(parent)),
            Err(error) => return Err(ArchiveError::io(&root, "create the folder")(error)),
        }
        let path = root.join(NAME);
        let lock = File::options().create(true).truncate(false).write(true).open(&path);
        let lock = lock.map_err(ArchiveError::io(&path, "open"))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(ArchiveError::Locked { folder: root }),
            Err(TryLockError::Error(error)) => return Err(ArchiveError::io(&path, "lock")(error)),
        }
        for found in fs::read_dir(&root).map_err(ArchiveError::io(&root, "list"))? {
            let found = found.map_err(ArchiveError::io(&root, "list"))?;
            if found.file_name().to_str().is_some_and(is_staged) {
                fs::remove_file(found.path()).map_err(ArchiveError::io(&found.path(), "remove"))?;
            }
        }
        // A run that was killed may have linked its last file without syncing the folder.
        sync_folder(&root)?;
        Ok(Self { files: folder(root)?, lock: Lock::File(Arc::new(lock)) })
    }

    /// Creates the lock object, or replaces one that is released or expired.
    pub(super) async fn in_store(files: Files) -> Result<Self, ArchiveError> {
        let mode = match files.store.head(&NAME.into()).await {
            Err(Error::NotFound { .. }) => PutMode::Create,
            Err(error) => return Err(files.error("read", NAME, error)),
            Ok(found) => {
                let age = SystemTime::now().duration_since(found.last_modified.into()).unwrap_or_default();
                if found.size > 0 && age < EXPIRES {
                    return Err(files.locked());
                }
                PutMode::Update(version_of(&found))
            }
        };
        let lock = write_lock(&files, mode).await?;
        Ok(Self { files, lock })
    }

    /// Adds a file, durable when this returns. A file of the same name is never replaced.
    pub(super) async fn add(&mut self, name: &str, bytes: Vec<u8>) -> Result<(), ArchiveError> {
        self.renew().await?;
        let done = match &self.lock {
            // The put completes even if this future is dropped; the folder stays locked until then.
            Lock::File(lock) => {
                let (files, lock, name) = (self.files.clone(), Arc::clone(lock), name.to_owned());
                let put = tokio::spawn(async move {
                    let done = files.put(&name, bytes, PutMode::Create).await;
                    drop(lock);
                    done
                });
                put.await.unwrap_or_else(|error| Err(error.into()))
            }
            // The put ends before the lock expires.
            Lock::Object { renewed, .. } => {
                let put = self.files.put(name, bytes, PutMode::Create);
                timeout_at(*renewed + EXPIRES * 3 / 4, put).await.unwrap_or_else(|elapsed| {
                    Err(Error::Generic { store: "archive", source: elapsed.into() })
                })
            }
        };
        done.map(drop).map_err(|error| self.files.error("write", name, error))
    }

    /// Renews a lock object that is a third of the way to its expiration.
    pub(super) async fn renew_if_old(&mut self) -> Result<(), ArchiveError> {
        match &self.lock {
            Lock::Object { renewed, .. } if renewed.elapsed() >= EXPIRES / 3 => self.renew().await,
            _ => Ok(()),
        }
    }

    async fn renew(&mut self) -> Result<(), ArchiveError> {
        if let Lock::Object { version, .. } = &self.lock {
            self.lock = write_lock(&self.files, PutMode::Update(version.clone())).await?;
        }
        Ok(())
    }

    /// Empties the lock object, unless another run has replaced it. If this fails the lock expires.
    pub(super) async fn release(self) {
        if let Lock::Object { version, .. } = self.lock {
            drop(self.files.put(NAME, Vec::new(), PutMode::Update(version)).await);
        }
    }
}

/// The files of a folder, synced to disk before a put returns.
pub(super) fn folder(root: PathBuf) -> Result<Files, ArchiveError> {
    let store = LocalFileSystem::new_with_prefix(&root).map_err(io::Error::from);
    let store = store.map_err(ArchiveError::io(&root, "open"))?.with_fsync(true);
    Ok(Files { store: Arc::new(store), root, is_folder: true })
}

async fn write_lock(files: &Files, mode: PutMode) -> Result<Lock, ArchiveError> {
    // Unique content: a put whose response was lost is recognized by it, and it changes the ETag.
    let content = format!("{:016x}", RandomState::new().hash_one(SystemTime::now()));
    let renewed = Instant::now();
    match files.put(NAME, content.into_bytes(), mode).await {
        Ok(version) => Ok(Lock::Object { version, renewed }),
        Err(Error::AlreadyExists { .. } | Error::Precondition { .. }) => Err(files.locked()),
        Err(error) => Err(files.error("lock", NAME, error)),
    }
}

/// Makes the names in a folder durable, where the system lets a folder be opened.
fn sync_folder(folder: &Path) -> Result<(), ArchiveError> {
    match File::open(folder) {
        Ok(opened) => opened.sync_all().map_err(ArchiveError::io(folder, "sync")),
        Err(_) if cfg!(windows) => Ok(()),
        Err(error) => Err(ArchiveError::io(folder, "open")(error)),
    }
}
