//! Levels with limits of their own for a call, cached: most calls bring the same limits again, and engines keep what
//! they derive from levels by their address.

use std::hash::{BuildHasher as _, Hash as _, Hasher as _};
use std::sync::Arc;

use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::policy::Policy;
use tidegate_core::limit::rule::Limit;
use tidegate_store::two_generations::{Hashed, TwoGenerations};

use super::error::LimitError;
use crate::sync::Mutex;

/// Levels by those they extend, and the limits that extend them.
pub(super) struct CallLevels {
    hasher: foldhash::fast::RandomState,
    entries: Mutex<TwoGenerations<Entry>>,
}

struct Entry {
    hash: u64,
    /// Kept alive, so that no other levels get its address.
    base: Arc<Levels>,
    limits: Box<[Limit]>,
    levels: Arc<Levels>,
}

impl Hashed for Entry {
    fn key_hash(&self) -> u64 {
        self.hash
    }
}

impl CallLevels {
    pub(super) fn new(entries_max: usize) -> Self {
        let entries = Mutex::new(TwoGenerations::new(entries_max));
        Self { hasher: foldhash::fast::RandomState::default(), entries }
    }

    /// `base` with these limits.
    pub(super) fn extended(&self, base: &Arc<Levels>, limits: &[Limit]) -> Result<Arc<Levels>, LimitError> {
        let hash = self.hash(base, limits);
        let is_it = |entry: &Entry| Arc::ptr_eq(&entry.base, base) && *entry.limits == *limits;
        if let Some(found) = self.entries.lock().find(hash, is_it) {
            return Ok(Arc::clone(&found.levels));
        }
        let policy = Policy::new(limits.iter().cloned())?;
        policy.check_call()?;
        let rules = policy.rules().iter().map(|rule| (**rule).clone());
        let levels = Arc::new(base.with_call_limits(rules));
        let entry =
            Entry { hash, base: Arc::clone(base), limits: limits.into(), levels: Arc::clone(&levels) };
        self.entries.lock().insert(entry, is_it);
        Ok(levels)
    }

    fn hash(&self, base: &Arc<Levels>, limits: &[Limit]) -> u64 {
        let mut hasher = self.hasher.build_hasher();
        Arc::as_ptr(base).hash(&mut hasher);
        for limit in limits {
            limit.name().hash(&mut hasher);
        }
        hasher.finish()
    }
}

#[cfg(test)]
mod tests {
    use tidegate_core::limit::name::Subject;
    use tidegate_core::limit::policy::Version;
    use tidegate_core::limit::resolve::resolve;

    use super::*;

    fn base() -> Arc<Levels> {
        let subject = Subject::new("acme", "gpt-4").unwrap();
        let resolved = resolve(&subject, [None, None, None, None], &Policy::default());
        Arc::new(Levels::new(Version::ZERO, vec![(subject, resolved)]))
    }

    #[test]
    fn equal_limits_of_a_call_share_their_levels() {
        let (cache, base, other) = (CallLevels::new(8), base(), base());
        let levels = |base: &Arc<Levels>, amount| {
            cache.extended(base, &[Limit::per_minute("rpm", amount)]).expect("a valid limit")
        };
        let first = levels(&base, 60);
        assert!(Arc::ptr_eq(&first, &levels(&base, 60)));
        assert!(!Arc::ptr_eq(&first, &levels(&base, 61)), "another limit");
        assert!(!Arc::ptr_eq(&first, &levels(&other, 60)), "other levels");
        assert!(cache.extended(&base, &[Limit::per_minute("rpm", 0)]).is_err());
    }
}
