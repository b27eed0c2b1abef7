//! How a memory store is made, and what it says of itself.

use std::fmt;
use std::sync::Arc;

use super::Memory;
use crate::clock::{SystemWall, WallClock};
use crate::error::StoreError;
use crate::retention::Retention;

/// Subjects that may have a bucket, unless said otherwise: about half a gigabyte with what they used in one hour.
const SUBJECTS_MAX: usize = 1 << 20;
/// No store has more: it would not fit any machine.
const SUBJECTS_MOST: usize = 1 << 28;

/// How a [`Memory`] store is made.
///
/// ```
/// use tidegate_store::{Memory, MemoryOptions};
///
/// let store = Memory::with(MemoryOptions::new().subjects_max(10_000))?;
/// assert_eq!(store.stats().subjects, 0);
/// # Ok::<(), tidegate_store::StoreError>(())
/// ```
#[derive(Clone)]
pub struct MemoryOptions {
    pub(super) subjects_max: usize,
    pub(super) retention: Retention,
    pub(super) clock: Arc<dyn WallClock>,
}

/// What a namespace of a [`Memory`] store holds, and what it has let go of.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryStats {
    /// Subjects that have a bucket.
    pub subjects: u64,
    /// Buckets that were forgotten, because they were full and nothing else was known of them.
    pub subjects_forgotten: u64,
    /// Calls that were refused because no further subject has room.
    pub subjects_refused: u64,
    /// Leases that are open.
    pub leases_open: u64,
    /// Leases that have ended and are remembered.
    pub leases_ended: u64,
}

impl MemoryOptions {
    /// The system's clock, room for a million subjects, and usage kept as SQLite keeps it.
    pub fn new() -> Self {
        Self {
            subjects_max: SUBJECTS_MAX,
            retention: Retention::default(),
            clock: Arc::new(SystemWall::new()),
        }
    }

    /// How many subjects may have a bucket in each namespace; 1,048,576. A subject whose limits are full, that holds no
    /// lease and whose usage is no longer kept is forgotten, and has room again when it comes back. One more than these
    /// is refused ([`StoreError::Full`]); those that are there go on.
    #[must_use]
    pub const fn subjects_max(mut self, subjects: usize) -> Self {
        self.subjects_max = subjects;
        self
    }

    /// How long usage and audit are kept. A subject is not forgotten while any of its usage is.
    #[must_use]
    pub const fn retention(mut self, retention: Retention) -> Self {
        self.retention = retention;
        self
    }

    /// The clock that decides.
    #[must_use]
    pub fn clock(mut self, clock: impl WallClock) -> Self {
        self.clock = Arc::new(clock);
        self
    }

    pub(super) fn check(&self) -> Result<(), StoreError> {
        self.retention.check()?;
        if (1..=SUBJECTS_MOST).contains(&self.subjects_max) {
            return Ok(());
        }
        let what = format!("subjects_max is {}, outside 1..={SUBJECTS_MOST}", self.subjects_max);
        Err(StoreError::Invalid { what })
    }
}

impl Default for MemoryOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for MemoryOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryOptions")
            .field("subjects_max", &self.subjects_max)
            .field("retention", &self.retention)
            .field("clock", &self.clock)
            .finish()
    }
}

impl Memory {
    /// An empty store.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] for a bound that cannot be.
    pub fn with(options: MemoryOptions) -> Result<Self, StoreError> {
        options.check()?;
        Ok(Self::made(options))
    }

    /// What this namespace holds. It is counted: not for every request.
    pub fn stats(&self) -> MemoryStats {
        self.space.stats()
    }
}
