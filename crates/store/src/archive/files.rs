//! The files of an archive in an object store, or in a folder by `object_store`'s `LocalFileSystem`.

use std::error::Error as _;
use std::iter::successors;
use std::path::PathBuf;
use std::sync::Arc;

use object_store::path::Path;
use object_store::{Error, ObjectMeta, ObjectStore, ObjectStoreExt as _, PutMode, UpdateVersion};
use tidegate_core::limit::policy::Version;

use super::ArchiveError;

const PREFIX: &str = "audit-";
const SUFFIX: &str = ".jsonl.gz";

/// A file of an archive, and the changes it holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ArchiveFile {
    pub(super) name: String,
    pub(super) first: Version,
    pub(super) last: Version,
}

/// The name of a file that holds these changes.
pub(super) fn file_name(first: Version, last: Version) -> String {
    format!("{PREFIX}{:020}-{:020}{SUFFIX}", first.number(), last.number())
}

/// Whether a killed run left this file in a folder: under the staging name of `LocalFileSystem`, or of
/// earlier versions.
pub(super) fn is_staged(name: &str) -> bool {
    name.strip_prefix(PREFIX)
        .is_some_and(|rest| rest.contains(".jsonl.gz#") || rest.ends_with(".jsonl.gz.tmp"))
}

/// The files of one archive.
#[derive(Debug, Clone)]
pub(super) struct Files {
    pub(super) store: Arc<dyn ObjectStore>,
    /// The folder, or the address of the object store.
    pub(super) root: PathBuf,
    pub(super) is_folder: bool,
}

impl Files {
    /// All files, in the order of their changes.
    pub(super) async fn list(&self) -> Result<Vec<ArchiveFile>, ArchiveError> {
        let found = self.store.list_with_delimiter(None).await;
        let found = found.map_err(|error| self.error("list", "", error))?;
        let mut files = Vec::new();
        for name in found.objects.iter().filter_map(|object| object.location.filename()) {
            if name.starts_with(PREFIX) && name.ends_with(SUFFIX) {
                let Some((first, last)) = versions(name) else {
                    return Err(self.corrupt(name, "its name has no versions".to_owned()));
                };
                files.push(ArchiveFile { name: name.to_owned(), first, last });
            }
        }
        files.sort_by_key(|file| file.first);
        match files.windows(2).find(|pair| pair[1].first <= pair[0].last) {
            Some([one, other]) => {
                Err(self.corrupt(&other.name, format!("it has changes that `{}` has too", one.name)))
            }
            _ => Ok(files),
        }
    }

    pub(super) async fn read(&self, name: &str) -> Result<Vec<u8>, ArchiveError> {
        let read = async { self.store.get(&Path::from(name)).await?.bytes().await };
        read.await.map(Into::into).map_err(|error| self.error("read", name, error))
    }

    /// Puts an object atomically. If a remote put fails, the response may have been lost: it succeeded if the
    /// object has the expected content.
    pub(super) async fn put(
        &self,
        name: &str,
        bytes: Vec<u8>,
        mode: PutMode,
    ) -> Result<UpdateVersion, Error> {
        let path = Path::from(name);
        let error = match self.store.put_opts(&path, bytes.clone().into(), mode.into()).await {
            Ok(done) => return Ok(done.into()),
            // The file may exist without being durable.
            Err(error) if self.is_folder => return Err(error),
            Err(error) => error,
        };
        let Ok(found) = self.store.get(&path).await else { return Err(error) };
        let version = version_of(&found.meta);
        match found.bytes().await {
            Ok(there) if there == bytes => Ok(version),
            _ => Err(error),
        }
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        if name.is_empty() { self.root.clone() } else { self.root.join(name) }
    }

    pub(super) fn corrupt(&self, name: &str, what: String) -> ArchiveError {
        ArchiveError::Corrupt { path: self.path(name), what }
    }

    pub(super) fn foreign(&self, what: String) -> ArchiveError {
        ArchiveError::Foreign { folder: self.root.clone(), what }
    }

    pub(super) fn locked(&self) -> ArchiveError {
        ArchiveError::Locked { folder: self.root.clone() }
    }

    pub(super) fn error(&self, doing: &'static str, name: &str, error: Error) -> ArchiveError {
        let path = self.path(name);
        if self.is_folder {
            return ArchiveError::Io { path, doing, source: error.into() };
        }
        ArchiveError::Remote { path, doing, is_transient: is_transient(&error), source: Box::new(error) }
    }
}

/// What a conditional put of this object must match.
pub(super) fn version_of(meta: &ObjectMeta) -> UpdateVersion {
    UpdateVersion { e_tag: meta.e_tag.clone(), version: meta.version.clone() }
}

/// Whether the same request may succeed later. `object_store` has no type for this, only text.
fn is_transient(error: &Error) -> bool {
    const STATUS: &str = "Server returned non-2xx status code: ";
    let mut causes = successors(error.source(), |&cause| cause.source()).map(ToString::to_string);
    let is_refused = causes.any(|cause| match cause.strip_prefix(STATUS) {
        Some(status) => status.starts_with('4') && !status.starts_with("429"),
        None => cause.starts_with("Received redirect"),
    });
    matches!(error, Error::Generic { .. }) && !is_refused
}

/// The first and the last change of the file with this name.
fn versions(name: &str) -> Option<(Version, Version)> {
    let (first, last) = name.strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?.split_once('-')?;
    let number = |digits: &str| -> Option<u64> {
        let is_number = digits.len() == 20 && digits.bytes().all(|digit| digit.is_ascii_digit());
        digits.parse().ok().filter(|_| is_number)
    };
    let (first, last) = (number(first)?, number(last)?);
    (first <= last).then(|| (Version::new(first), Version::new(last)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_parsed_from_the_name() {
        let name = |name: &str| versions(name).map(|(first, last)| (first.number(), last.number()));
        assert_eq!(name("audit-00000000000000000003-00000000000000000017.jsonl.gz"), Some((3, 17)));
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
