//! A place for an archive that is no folder of this machine.

use std::fmt;
use std::fs;
use std::future::Future;
use std::path::Path;
use std::pin::Pin;

use super::ArchiveError;
use super::folder::is_name;

/// What a place answers, in time.
pub type Later<'a, T> = Pin<Box<dyn Future<Output = Result<T, ArchiveError>> + Send + 'a>>;

/// A place that keeps whole files by their names: a bucket.
///
/// Files are put there once, and never changed. One who archives holds the place, so that nobody else does.
pub trait ArchivePlace: fmt::Debug + Send + Sync {
    /// Its address, as messages show it.
    fn shown(&self) -> String;

    /// Takes the place, or goes on holding it: [`ArchiveError::Locked`] where somebody else does. Whoever stops without
    /// [releasing](Self::release) it loses it after a while.
    fn hold(&self) -> Later<'_, ()>;

    /// Lets others take it.
    fn release(&self) -> Later<'_, ()>;

    /// The names of all files of the archive that are there, in any order; of others too, if there are.
    fn names(&self) -> Later<'_, Vec<String>>;

    /// Writes the file of this name to `to`.
    fn fetch<'a>(&'a self, name: &'a str, to: &'a Path) -> Later<'a, ()>;

    /// Keeps the file at `from` under this name, whole and for good, before it answers. A name that is there already is refused,
    /// unless what it has is the same.
    fn put<'a>(&'a self, name: &'a str, from: &'a Path) -> Later<'a, ()>;
}

/// Copies all files of an archive to a folder, where [`read_archive`](super::read_archive) reads them. What is there already
/// stays. Answers how many were copied.
///
/// # Errors
/// What the place or the file system says.
///
/// # Cancel safety
/// Dropping the future may leave a file half copied.
pub async fn copy_archive(place: &dyn ArchivePlace, folder: &Path) -> Result<u64, ArchiveError> {
    fs::create_dir_all(folder).map_err(ArchiveError::io(folder, "make the folder"))?;
    let mut copied = 0;
    for name in place.names().await?.iter().filter(|name| is_name(name)) {
        let to = folder.join(name);
        if !to.exists() {
            place.fetch(name, &to).await?;
            copied += 1;
        }
    }
    Ok(copied)
}
