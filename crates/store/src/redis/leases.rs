//! Leases in the format of the lease script.

use std::sync::Arc;

use tidegate_core::limit::cascade::{Levels, Units};
use tidegate_core::limit::lease::{EndRecord, Ending, Record, Shortfall};

use super::lua_codec::Unpacker;
use crate::codec::levels_from_text;
use crate::error::StoreError;
use crate::tables;

/// A stored lease.
pub(super) enum StoredLease {
    Open(Arc<Levels>, Record),
    Ended(EndRecord),
}

impl StoredLease {
    /// Decodes a lease.
    pub(super) fn read(bytes: &[u8]) -> Result<Self, StoreError> {
        let mut read = Unpacker::new(bytes, "a lease");
        let how = read.byte()?;
        let step = read.word()?;
        if how > 0 {
            let (at, digest) = (read.stamp()?, u64::from_le_bytes(read.array()?));
            return Ok(Self::Ended(EndRecord { how: ending(how)?, step, at, digest }));
        }
        let (drawn_at, stepped_at, deadline) = (read.stamp()?, read.stamp()?, read.stamp()?);
        let on_expiry = tables::on_expiry(read.byte()?.into())?;
        let _identity: [u8; 16] = read.array()?;
        let held: Units = (0..read.byte()?).map(|_| read.units()).collect::<Result<_, _>>()?;
        let mut shortfalls = Vec::new();
        // A shortfall begins with byte 1, which no level's text does.
        while read.rest().first() == Some(&1) {
            let [_, name, level] = read.array()?;
            shortfalls.push(Shortfall { level: level.saturating_sub(1), name, units: read.number()? });
        }
        let levels = levels(read.rest())?;
        if held.len() != levels.names().len() {
            return Err(read.corrupt(&format!("it holds {} of {} limits", held.len(), levels.names().len())));
        }
        let record = Record::restored(step, held, drawn_at, stepped_at, deadline, on_expiry)
            .with_shortfalls(shortfalls.into());
        Ok(Self::Open(levels, record))
    }
}

/// Decodes the levels of a lease.
pub(super) fn levels(text: &[u8]) -> Result<Arc<Levels>, StoreError> {
    let text = std::str::from_utf8(text)
        .map_err(|_| StoreError::Corrupt { what: "the levels of a lease are not UTF-8".to_owned() })?;
    Ok(Arc::new(levels_from_text(text)?))
}

/// An ending by the script's number, which is 0 for an open lease.
pub(super) fn ending(how: u8) -> Result<Ending, StoreError> {
    tables::ending(i64::from(how) - 1)
}
