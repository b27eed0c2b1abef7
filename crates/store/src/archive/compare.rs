//! Whether what a store still has is what its archive ends with.

use std::sync::Arc;

use tidegate_core::limit::audit::Entry;
use tidegate_core::limit::policy::Version;

use super::ArchiveError;
use super::folder::Folder;
use super::reader::Entries;

/// Goes through a store's oldest entries and the archive's last ones side by side.
///
/// Of the first change the store may have pruned a part. From the first entry that both have on they are the same, up
/// to the end of the archive.
#[derive(Debug)]
pub(super) struct Compare {
    folder: Arc<Folder>,
    archived: Entries,
    is_aligned: bool,
}

impl Compare {
    /// Begins where the archive may have the store's first change.
    pub(super) fn new(folder: Arc<Folder>, first: Version) -> Self {
        let archived = Entries::of(folder.files_from(first));
        Self { folder, archived, is_aligned: false }
    }

    /// The next entries of the store.
    pub(super) fn page(&mut self, page: &[Entry]) -> Result<(), ArchiveError> {
        page.iter().try_for_each(|entry| self.entry(entry))
    }

    fn entry(&mut self, entry: &Entry) -> Result<(), ArchiveError> {
        loop {
            let found = self.archived.next().transpose()?;
            match found {
                Some(found) if found == *entry => {
                    self.is_aligned = true;
                    return Ok(());
                }
                Some(found) if !self.is_aligned && found.version <= entry.version => {}
                _ => {
                    let version = entry.version;
                    let what = format!(
                        "the store's entry of version {version} for `{}`, \
                        made at {}, is not in it",
                        entry.filed, entry.at
                    );
                    return Err(self.folder.foreign(what));
                }
            }
        }
    }

    /// The store has no further ones.
    pub(super) fn end(mut self) -> Result<(), ArchiveError> {
        match self.archived.next().transpose()? {
            None => Ok(()),
            Some(entry) => {
                let (version, filed) = (entry.version, &entry.filed);
                Err(self
                    .folder
                    .foreign(format!("its entry of version {version} for `{filed}` is not in the store")))
            }
        }
    }
}
