//! The changes of policies and entities of late: whether levels that were read before them still hold.

use std::collections::VecDeque;

use tidegate_core::limit::audit::About;
use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::policy::Version;

/// Changes that are remembered.
const RECENT_MAX: usize = 1_024;

/// What has changed of late, without gaps.
#[derive(Default)]
pub(super) struct Recent {
    /// Nothing is known of changes up to this version.
    from: Version,
    to: Version,
    /// Oldest first, each with a version at or after its own.
    changes: VecDeque<(Version, About)>,
}

impl Recent {
    /// The version up to which changes are known.
    pub(super) const fn to(&self) -> Version {
        self.to
    }

    /// Adds what has changed since `to`; without it all is forgotten.
    pub(super) fn add(&mut self, version: Version, changed: Option<Vec<About>>) {
        match changed {
            Some(_) if version <= self.to => return,
            Some(about) => self.changes.extend(about.into_iter().map(|about| (version, about))),
            None => *self = Self { from: version, to: version, changes: VecDeque::new() },
        }
        self.to = version;
        while self.changes.len() > RECENT_MAX {
            if let Some((version, _)) = self.changes.pop_front() {
                self.from = version;
            }
        }
    }

    /// Whether levels that held as of one version hold as of another.
    pub(super) fn still_holds(&self, levels: &Levels, as_of: Version, version: Version) -> bool {
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
        let (mut recent, levels) = (Recent::default(), levels());
        let holds = |recent: &Recent, as_of, version| {
            recent.still_holds(&levels, Version::new(as_of), Version::new(version))
        };
        recent.add(Version::new(5), None);
        assert!(holds(&recent, 5, 5) && !holds(&recent, 4, 5), "nothing is known of earlier changes");
        recent.add(Version::new(7), Some(vec![about("beta"), about("gamma")]));
        assert!(holds(&recent, 5, 7) && !holds(&recent, 5, 8), "nor of later ones");
        recent.add(Version::new(8), Some(vec![about("acme")]));
        assert!(!holds(&recent, 5, 8) && !holds(&recent, 7, 8) && holds(&recent, 8, 8));
        // An answer that was overtaken changes nothing.
        recent.add(Version::new(6), Some(Vec::new()));
        assert_eq!(recent.to(), Version::new(8));
        // The store was restored to an earlier state.
        recent.add(Version::new(6), None);
        assert!(!holds(&recent, 5, 6) && holds(&recent, 6, 6));
    }

    #[test]
    fn changes_that_are_forgotten_are_not_known() {
        let (mut recent, levels) = (Recent::default(), levels());
        recent.add(Version::new(1), None);
        for version in 2..=RECENT_MAX as u64 + 11 {
            recent.add(Version::new(version), Some(vec![about("beta")]));
        }
        let to = recent.to();
        assert!(!recent.still_holds(&levels, Version::new(10), to));
        assert!(recent.still_holds(&levels, Version::new(11), to));
    }
}
