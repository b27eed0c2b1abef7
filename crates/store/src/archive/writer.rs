//! A file of an archive that is being written.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::PathBuf;
use std::sync::Arc;

use flate2::Compression;
use flate2::write::GzEncoder;
use tidegate_core::limit::audit::Entry;
use tidegate_core::limit::policy::Version;

use super::ArchiveError;
use super::folder::Folder;
use crate::codec::{entry_from_line, entry_to_line};
use crate::error::StoreError;

/// A file under a temporary name. Dropped, it is left to the next run to remove.
#[derive(Debug)]
pub(super) struct Writer {
    folder: Arc<Folder>,
    path: PathBuf,
    gzip: GzEncoder<BufWriter<File>>,
    first: Version,
    last: Version,
    entries: usize,
}

impl Writer {
    /// A file that begins with this change.
    pub(super) fn begin(folder: Arc<Folder>, first: Version) -> Result<Self, ArchiveError> {
        let path = folder.temporary(first);
        let file = File::options().write(true).create_new(true).open(&path);
        let file = file.map_err(ArchiveError::io(&path, "make"))?;
        let gzip = GzEncoder::new(BufWriter::new(file), Compression::default());
        Ok(Self { folder, path, gzip, first, last: first, entries: 0 })
    }

    pub(super) fn write(&mut self, batch: &[Entry]) -> Result<(), ArchiveError> {
        for entry in batch {
            let mut line = entry_to_line(entry);
            // What is written is pruned: it is looked at first, as whoever reads it will.
            if !entry_from_line(&line).is_ok_and(|read| read == *entry) {
                let what =
                    format!("an entry of the audit of version {} that cannot be written", entry.version);
                return Err(StoreError::Corrupt { what }.into());
            }
            line.push('\n');
            self.gzip.write_all(line.as_bytes()).map_err(ArchiveError::io(&self.path, "write"))?;
            self.last = entry.version;
            self.entries += 1;
        }
        Ok(())
    }

    pub(super) const fn entries(&self) -> usize {
        self.entries
    }

    pub(super) const fn last(&self) -> Version {
        self.last
    }

    /// Makes the file durable, then names it. Answers where it is.
    pub(super) fn finish(self) -> Result<PathBuf, ArchiveError> {
        let Self { folder, path, gzip, first, last, .. } = self;
        let close = || {
            let file = gzip.finish()?.into_inner().map_err(io::IntoInnerError::into_error)?;
            file.sync_all()
        };
        close().map_err(ArchiveError::io(&path, "write"))?;
        folder.name(&path, first, last)
    }
}
