//! Where an archive is, by its address.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use tidegate_core::excerpt::excerpt;

use object_store::ObjectStore;
use url::Url;

use super::ArchiveError;
use super::files::Files;
use super::lock::{self, LockedFiles};
use crate::archive_remote;
use crate::error::StoreError;

/// Where an archive is: a folder, or a prefix in an object store.
#[derive(Debug, Clone)]
pub struct ArchivePlace(Kind);

#[derive(Debug, Clone)]
enum Kind {
    Folder(PathBuf),
    Store(Files),
}

impl ArchivePlace {
    /// The place at an address. Nothing is requested yet.
    ///
    /// | address | place |
    /// |---|---|
    /// | a path, `file:///PATH` | a folder |
    /// | `s3://BUCKET/PREFIX?region=…&endpoint=…` | Amazon S3; an S3-compatible server by its `endpoint`, also over plain HTTP |
    /// | `gs://BUCKET/PREFIX` | Google Cloud Storage |
    /// | `az://CONTAINER/PREFIX?account_name=…&endpoint=…` | Azure Blob Storage |
    ///
    /// All but folders need the feature `archive-remote`, and get their keys from the environment as
    /// `object_store` does: `AWS_ACCESS_KEY_ID` and others, or the credentials of the machine.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] for an address of another form, or without the feature that it needs.
    pub fn open(address: &str) -> Result<Self, StoreError> {
        if !address.contains("://") {
            return Ok(Self::folder(address));
        }
        let invalid = |what: String| StoreError::Invalid { what: format!("`{}`: {what}", excerpt(address)) };
        let url = Url::parse(address).map_err(|error| invalid(error.to_string()))?;
        if url.scheme() == "file" {
            let path =
                url.to_file_path().map_err(|()| invalid("not the path of a local folder".to_owned()))?;
            return Ok(Self::folder(path));
        }
        let store = archive_remote::open(&url).map_err(invalid)?;
        let name = format!(
            "{}://{}{}",
            url.scheme(),
            url.host_str().unwrap_or_default(),
            url.path().trim_end_matches('/')
        );
        Ok(Self::from_store(store, name))
    }

    /// A folder of this machine.
    pub fn folder(path: impl Into<PathBuf>) -> Self {
        Self(Kind::Folder(path.into()))
    }

    /// The root of an object store that supports conditional puts, shown in errors by this name. To use a
    /// prefix, wrap the store in a [`PrefixStore`](object_store::prefix::PrefixStore).
    pub fn from_store(store: Arc<dyn ObjectStore>, name: impl Into<String>) -> Self {
        Self(Kind::Store(Files { store, root: name.into().into(), is_folder: false }))
    }

    /// Opens the archive for reading.
    pub(super) fn files(&self) -> Result<Files, ArchiveError> {
        match &self.0 {
            Kind::Folder(path) => {
                // A `LocalFileSystem` on a path that is not a folder would be empty.
                fs::read_dir(path).map_err(ArchiveError::io(path, "read"))?;
                lock::folder(path.clone())
            }
            Kind::Store(files) => Ok(files.clone()),
        }
    }

    /// Opens the archive for writing. Folders are prepared outside the runtime's worker threads.
    pub(super) async fn lock(&self) -> Result<LockedFiles, ArchiveError> {
        match &self.0 {
            Kind::Folder(path) => {
                let root = path.clone();
                let locked = tokio::task::spawn_blocking(move || LockedFiles::in_folder(root)).await;
                locked.map_err(std::io::Error::other).map_err(ArchiveError::io(path, "lock"))?
            }
            Kind::Store(files) => LockedFiles::in_store(files.clone()).await,
        }
    }
}
