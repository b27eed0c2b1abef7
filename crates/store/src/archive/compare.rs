//! Compares the entries that a store still has with the end of its archive.

use tidegate_core::limit::audit::Entry;
use tidegate_core::limit::policy::Version;

use super::ArchiveError;
use super::files::{ArchiveFile, Files};
use super::reader::Entries;

/// Reads a store's oldest entries and the archive's last ones side by side.
///
/// The store may have pruned a part of its first change. From the first common entry on, both must have the
/// same entries up to the end of the archive.
#[derive(Debug)]
pub(super) struct Compare {
    files: Files,
    archived: Entries,
    is_aligned: bool,
}

impl Compare {
    /// Begins at the file that may have the store's first change.
    pub(super) fn new(files: Files, mut list: Vec<ArchiveFile>, first: Version) -> Self {
        list.retain(|file| file.last >= first);
        let archived = Entries::new(files.clone(), list);
        Self { files, archived, is_aligned: false }
    }

    /// Compares the next entry of the store.
    pub(super) async fn entry(&mut self, entry: &Entry) -> Result<(), ArchiveError> {
        loop {
            match self.archived.next_entry().await? {
                Some(found) if found == *entry => {
                    self.is_aligned = true;
                    return Ok(());
                }
                Some(found) if !self.is_aligned && found.version <= entry.version => {}
                _ => {
                    let Entry { version, filed, at, .. } = entry;
                    let what = format!(
                        "the store's entry of version {version} for `{filed}`, made at {at}, is not in it"
                    );
                    return Err(self.files.foreign(what));
                }
            }
        }
    }

    /// Checks that the archive ends where the store's entries end.
    pub(super) async fn end(mut self) -> Result<(), ArchiveError> {
        match self.archived.next_entry().await? {
            None => Ok(()),
            Some(Entry { version, filed, .. }) => {
                let what = format!("its entry of version {version} for `{filed}` is not in the store");
                Err(self.files.foreign(what))
            }
        }
    }
}
