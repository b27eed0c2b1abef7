//! The subjects with the most grants, by the Space-Saving algorithm (Metwally et al.).
//!
//! A bounded table: a new subject takes the place of the one with the fewest grants, and continues from its
//! count. So a count is at most too high by the fewest in the table, and a busy subject is never missed.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use tidegate::Subject;
use tidegate_client::SubjectGrants;

/// Counted subjects. A new one is compared with all of them.
const SUBJECTS_MAX: usize = 256;

/// The counts.
#[derive(Debug, Default)]
pub(crate) struct TopSubjects(Mutex<HashMap<Subject, u64>>);

impl TopSubjects {
    /// Counts a grant.
    pub(crate) fn granted(&self, subject: Subject) {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = counts.get_mut(&subject) {
            *count += 1;
            return;
        }
        let mut before = 0;
        if counts.len() >= SUBJECTS_MAX {
            let least = counts.iter().min_by_key(|(_, count)| **count);
            if let Some((least, count)) = least.map(|(subject, count)| (subject.clone(), *count)) {
                counts.remove(&least);
                before = count;
            }
        }
        counts.insert(subject, before + 1);
    }

    /// The `max` subjects with the most grants, the busiest first.
    pub(crate) fn busiest(&self, max: usize) -> Vec<SubjectGrants> {
        let counts = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut busiest: Vec<(Subject, u64)> = counts.into_iter().collect();
        busiest.sort_unstable_by(|(one, fewer), (other, more)| more.cmp(fewer).then_with(|| one.cmp(other)));
        busiest.truncate(max);
        let grants = |(subject, granted): (Subject, u64)| SubjectGrants {
            entity: subject.entity.into(),
            resource: subject.resource.into(),
            granted,
        };
        busiest.into_iter().map(grants).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(top: &TopSubjects, max: usize) -> Vec<(String, u64)> {
        top.busiest(max).into_iter().map(|grants| (grants.entity.0.to_string(), grants.granted)).collect()
    }

    #[test]
    fn busy_subjects_stay_among_many_others() {
        let top = TopSubjects::default();
        let granted = |entity: &str| top.granted(Subject::new(entity, "gpt").unwrap());
        for round in 0..200 {
            granted("acme");
            if round % 2 == 0 {
                granted("globex");
            }
        }
        assert_eq!(names(&top, 9), [("acme".to_owned(), 200), ("globex".to_owned(), 100)]);
        for stranger in 0..10_000 {
            granted(&format!("s{stranger}"));
        }
        assert_eq!(names(&top, 2), [("acme".to_owned(), 200), ("globex".to_owned(), 100)]);
        assert_eq!(names(&top, usize::MAX).len(), SUBJECTS_MAX);
    }
}
