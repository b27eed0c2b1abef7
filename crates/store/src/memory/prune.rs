//! Pruning usage of the memory store.

use std::collections::{BTreeMap, BTreeSet};

use tidegate_core::limit::name::LimitName;
use tidegate_core::limit::usage::Window;
use tidegate_core::time::Stamp;

use super::Space;
use crate::shared_engine::Bucket;
use crate::sync::lock;

/// Buckets visited under one lock, which delays draws from their shard.
const CHUNK: u32 = 256;

impl Space {
    /// Deletes up to `max` lines of usage whose window ended at `before` or earlier.
    pub(super) fn prune_usage(&self, window: Window, before: Stamp, max: usize) -> usize {
        if max == 0 {
            return 0;
        }
        // Leases past their deadline count before their window is pruned, not after.
        self.sweep_before_call(self.clock.now(), usize::MAX);
        let mut count = 0;
        for shard in &self.shards {
            let (mut epoch, mut next) = (0, 0);
            loop {
                let mut shard = lock(shard);
                if shard.table.epoch() != epoch {
                    // The table was compacted: indexes have changed.
                    (epoch, next) = (shard.table.epoch(), 0);
                }
                let end = u32::try_from(shard.table.places()).unwrap_or(u32::MAX).min(next + CHUNK);
                for place in next..end {
                    count += prune_bucket(shard.table.at_mut(place), window, before, max - count);
                    if count >= max {
                        return count;
                    }
                }
                if end < next + CHUNK {
                    break;
                }
                next = end;
            }
        }
        count
    }
}

/// Deletes up to `max` lines of a subject. Limits given with calls have separate rows, but share the lines of
/// their name.
fn prune_bucket(bucket: &mut Bucket, window: Window, before: Stamp, max: usize) -> usize {
    let range = Stamp::ZERO..before;
    let mut lines: BTreeMap<LimitName, BTreeSet<Stamp>> = BTreeMap::new();
    for row in &bucket.rows {
        let begun = row.usage.iter().flat_map(|usage| usage.within(window, &range));
        let ended = begun.map(|(start, _)| window.around(start).end).filter(|end| *end <= before);
        for end in ended {
            lines.entry(row.meter.rule().name().clone()).or_default().insert(end);
        }
    }
    let mut count = 0;
    for (name, ends) in lines {
        let old = ends.len().min(max - count);
        let Some(last) = ends.into_iter().take(old).next_back() else { break };
        for row in bucket.rows.iter_mut().filter(|row| *row.meter.rule().name() == name) {
            if let Some(usage) = &mut row.usage {
                usage.prune(window, last);
            }
        }
        count += old;
    }
    count
}
