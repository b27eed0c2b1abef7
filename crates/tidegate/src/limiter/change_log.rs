//! The recent changes of policies and entities, to decide whether levels read before them are still current.

use std::collections::VecDeque;

use tidegate_core::limit::audit::About;
use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::policy::Version;

/// Changes that are kept.
const CHANGES_MAX: usize = 1_024;

/// The recent changes, without gaps.
#[derive(Default)]
pub(super) struct ChangeLog {
    /// Changes up to this version are unknown.
    from: Version,
    to: Version,
    /// Oldest first; each version is at or after the change's own.
    changes: VecDeque<(Version, About)>,
}

impl ChangeLog {
    /// The version up to which changes are known.
    pub(super) const fn to(&self) -> Version {
        self.to
    }

    /// Adds the changes since `to`; `None` clears the log.
    pub(super) fn add(&mut self, version: Version, changed: Option<Vec<About>>) {
        match changed {
            Some(_) if version <= self.to => return,
            Some(about) => self.changes.extend(about.into_iter().map(|about| (version, about))),
            None => *self = Self { from: version, to: version, changes: VecDeque::new() },
        }
        self.to = version;
        while self.changes.len() > CHANGES_MAX {
            if let Some((version, _)) = self.changes.pop_front() {
                self.from = version;
            }
        }
    }

    /// Whether levels that were current as of one version are current as of another.
    pub(super) fn is_current(&self, levels: &Levels, as_of: Version, version: Version) -> bool {
        let mut later = self.changes.iter().filter(|(changed_at, _)| *changed_at > as_of);
        as_of >= self.from && version <= self.to && !later.any(|(_, about)| levels.depend_on(about))
    }
}

#[cfg(test)]
mod tests {
    use tidegate_core::limit::name::{EntityId, Subject};
    use tidegate_core::limit::policy::{Policy, Scope};
    use tidegate_core::limit::resolve::resolve;

    use super::*;

    fn levels() -> Levels {
        let subject = Subject::new("acme", "gpt").unwrap();
        let resolved = resolve(&subject, [None; 4], &Policy::default());
        Levels::new(Version::new(1), vec![(subject, resolved)])
    }

    fn about(entity: &str) -> About {
        About::Policy(Scope::Entity(EntityId::new(entity).unwrap()))
    }

    #[test]
    fn levels_hold_while_nothing_they_depend_on_changes() {
        let (mut log, levels) = (ChangeLog::default(), levels());
        let holds = |log: &ChangeLog, as_of, version| {
            log.is_current(&levels, Version::new(as_of), Version::new(version))
        };
        log.add(Version::new(5), None);
        assert!(holds(&log, 5, 5) && !holds(&log, 4, 5), "earlier changes are unknown");
        log.add(Version::new(7), Some(vec![about("beta"), about("gamma")]));
        assert!(holds(&log, 5, 7) && !holds(&log, 5, 8), "later changes are unknown");
        log.add(Version::new(8), Some(vec![about("acme")]));
        assert!(!holds(&log, 5, 8) && !holds(&log, 7, 8) && holds(&log, 8, 8));
        // An overtaken response changes nothing.
        log.add(Version::new(6), Some(Vec::new()));
        assert_eq!(log.to(), Version::new(8));
        // The store was restored to an earlier state.
        log.add(Version::new(6), None);
        assert!(!holds(&log, 5, 6) && holds(&log, 6, 6));
    }

    #[test]
    fn dropped_changes_are_unknown() {
        let (mut log, levels) = (ChangeLog::default(), levels());
        log.add(Version::new(1), None);
        for version in 2..=CHANGES_MAX as u64 + 11 {
            log.add(Version::new(version), Some(vec![about("beta")]));
        }
        let to = log.to();
        assert!(!log.is_current(&levels, Version::new(10), to));
        assert!(log.is_current(&levels, Version::new(11), to));
    }
}
