//! Options and statistics of a memory store.

use std::sync::Arc;

use super::Memory;
use crate::clock::{SystemWall, WallClock};
use crate::error::StoreError;
use crate::retention::Retention;
use crate::setters::setters;

/// The default maximum number of subjects: about half a gigabyte if each has usage of one minute. A subject that
/// is used all day has 1,440 minutes per limit, unless the retention is shorter.
const SUBJECTS_MAX: usize = 1 << 20;
/// The upper bound of `subjects_max`.
const SUBJECTS_BOUND: usize = 1 << 28;

/// Options of a [`Memory`] store.
///
/// ```
/// use tidegate_store::{Memory, MemoryOptions};
///
/// let store = Memory::with(MemoryOptions::new().subjects_max(10_000))?;
/// assert_eq!(store.stats().subjects, 0);
/// # Ok::<(), tidegate_store::StoreError>(())
/// ```
#[derive(Debug, Clone)]
#[must_use = "options do nothing until a store is made with them"]
pub struct MemoryOptions {
    pub(super) subjects_max: usize,
    pub(super) retention: Retention,
    pub(super) clock: Arc<dyn WallClock>,
}

/// Statistics of a namespace of a [`Memory`] store.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryStats {
    /// Subjects with a bucket.
    pub subjects: u64,
    /// Buckets that were evicted because they equalled unused ones.
    pub subjects_forgotten: u64,
    /// Calls that were refused because the maximum number of subjects was reached.
    pub subjects_refused: u64,
    /// Open leases.
    pub leases_open: u64,
    /// Records of ended leases.
    pub leases_ended: u64,
}

impl MemoryOptions {
    /// The default options: the system's clock, a million subjects, and the default retention.
    pub fn new() -> Self {
        Self {
            subjects_max: SUBJECTS_MAX,
            retention: Retention::default(),
            clock: Arc::new(SystemWall::new()),
        }
    }

    setters! {
        /// Sets the maximum number of subjects with a bucket in each namespace; 1,048,576 by default. A subject
        /// whose limits are full, that has no open lease and whose usage has expired is evicted, and gets a new
        /// bucket when it is used again. Further subjects are refused ([`StoreError::Full`]); existing ones are
        /// not affected.
        subjects_max: usize,
        /// Sets how long usage and audit entries are kept. A subject is not evicted while it has usage.
        retention: Retention,
    }

    /// Sets the clock.
    pub fn clock(mut self, clock: impl WallClock) -> Self {
        self.clock = Arc::new(clock);
        self
    }

    pub(super) fn check(&self) -> Result<(), StoreError> {
        self.retention.check()?;
        if (1..=SUBJECTS_BOUND).contains(&self.subjects_max) {
            return Ok(());
        }
        let what = format!("subjects_max is {}, outside 1..={SUBJECTS_BOUND}", self.subjects_max);
        Err(StoreError::Invalid { what })
    }
}

impl Default for MemoryOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl Memory {
    /// An empty store.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] for an option out of bounds.
    pub fn with(options: MemoryOptions) -> Result<Self, StoreError> {
        options.check()?;
        Ok(Self::made(options))
    }

    /// The statistics of this namespace. They are counted on each call, so do not call it for every request.
    pub fn stats(&self) -> MemoryStats {
        self.space.stats()
    }
}
