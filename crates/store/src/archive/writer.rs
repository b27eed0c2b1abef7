//! A file of an archive in memory, compressed as it is written.

use std::io::Write as _;

use flate2::Compression;
use flate2::write::GzEncoder;
use tidegate_core::limit::audit::Entry;
use tidegate_core::limit::policy::Version;

use super::files::file_name;
use crate::codec::{entry_from_line, entry_to_line};
use crate::error::StoreError;

#[derive(Debug)]
pub(super) struct Writer {
    gzip: GzEncoder<Vec<u8>>,
    first: Version,
    last: Version,
    entries: usize,
}

impl Writer {
    /// A file that begins with this change.
    pub(super) fn new(first: Version) -> Self {
        let gzip = GzEncoder::new(Vec::new(), Compression::default());
        Self { gzip, first, last: first, entries: 0 }
    }

    /// Appends an entry, after checking that it can be read back: it will be pruned from the store.
    pub(super) fn write(&mut self, entry: &Entry) -> Result<(), StoreError> {
        let line = entry_to_line(entry);
        if !entry_from_line(&line).is_ok_and(|read| read == *entry) {
            let what = format!("an entry of the audit of version {} that cannot be written", entry.version);
            return Err(StoreError::Corrupt { what });
        }
        writeln!(self.gzip, "{line}").expect("writing to memory does not fail");
        self.last = entry.version;
        self.entries += 1;
        Ok(())
    }

    pub(super) const fn entries(&self) -> usize {
        self.entries
    }

    pub(super) const fn last(&self) -> Version {
        self.last
    }

    pub(super) fn name(&self) -> String {
        file_name(self.first, self.last)
    }

    pub(super) fn finish(self) -> Vec<u8> {
        self.gzip.finish().expect("writing to memory does not fail")
    }
}
