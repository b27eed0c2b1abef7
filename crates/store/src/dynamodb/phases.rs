//! Those of this process who ask of a bucket, and those who give back to it, take turns.
//!
//! The engine tells no time, and a call is decided at the time that was read when it was sent. Of two calls under way at once
//! the one that was sent first may arrive last. Among those who ask it does not matter, since a time that is behind only
//! denies. But whoever asks must not find what is given back at a later time than his own. So no two of different kinds are
//! under way at once in one process; any number of one kind is.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::name::Subject;
use tokio::sync::Notify;

use crate::sync::lock;

/// What a call is about to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    /// It asks for units.
    Asking,
    /// It may give units back.
    Giving,
}

/// Whose turn it is at each bucket that somebody is at.
#[derive(Debug, Default)]
pub(super) struct Phases(Mutex<HashMap<Subject, Phase>>);

#[derive(Debug)]
struct Phase {
    turn: Turn,
    count: usize,
    /// Somebody of the other kind waits: no more of this kind enter.
    is_ending: bool,
    ended: Arc<Notify>,
}

/// A turn at some buckets, for as long as it is held.
#[derive(Debug)]
pub(super) struct Held<'a> {
    phases: &'a Phases,
    subjects: Vec<Subject>,
}

impl Phases {
    /// Comes back when it is this turn at all buckets of these levels.
    pub(super) async fn enter(&self, levels: &Levels, turn: Turn) -> Held<'_> {
        let mut subjects: Vec<Subject> = levels.levels().iter().map(|level| level.subject.clone()).collect();
        // In one order, so that nobody waits for somebody who waits for him.
        subjects.sort_unstable_by(|one, other| {
            (&one.entity, &one.resource).cmp(&(&other.entity, &other.resource))
        });
        subjects.dedup();
        let mut held = Held { phases: self, subjects: Vec::with_capacity(subjects.len()) };
        for subject in subjects {
            self.enter_one(&subject, turn).await;
            held.subjects.push(subject);
        }
        held
    }

    async fn enter_one(&self, subject: &Subject, turn: Turn) {
        loop {
            let ended = {
                let mut phases = lock(&self.0);
                let Some(phase) = phases.get_mut(subject) else {
                    let phase = Phase { turn, count: 1, is_ending: false, ended: Arc::default() };
                    phases.insert(subject.clone(), phase);
                    return;
                };
                if phase.turn == turn && !phase.is_ending {
                    phase.count += 1;
                    return;
                }
                phase.is_ending |= phase.turn != turn;
                Arc::clone(&phase.ended).notified_owned()
            };
            ended.await;
        }
    }

    fn leave(&self, subject: &Subject) {
        let mut phases = lock(&self.0);
        let Some(phase) = phases.get_mut(subject) else { return };
        phase.count -= 1;
        if phase.count == 0
            && let Some(phase) = phases.remove(subject)
        {
            phase.ended.notify_waiters();
        }
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        for subject in &self.subjects {
            self.phases.leave(subject);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicI64, Ordering};

    use tidegate_core::limit::policy::{Policy, Version};
    use tidegate_core::limit::resolve::resolve;
    use tidegate_core::limit::rule::Limit;

    use super::*;

    fn levels(names: &[&str]) -> Levels {
        let row = |name: &&str| {
            let subject = Subject::new(name, "gpt").unwrap();
            let policy = Policy::new([Limit::per_second("rpm", 1)]).unwrap();
            let resolved = resolve(&subject, [Some(&policy), None, None, None], &Policy::default());
            (subject, resolved)
        };
        Levels::new(Version::ZERO, names.iter().map(row).collect())
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn takers_and_returners_take_turns() {
        let phases: Arc<Phases> = Arc::default();
        // Above zero while somebody asks, below while somebody gives back.
        let inside: Arc<AtomicI64> = Arc::default();
        let callers = (0..8).map(|number| {
            let (phases, inside) = (Arc::clone(&phases), Arc::clone(&inside));
            tokio::spawn(async move {
                let names = if number % 4 < 2 { ["a", "b"] } else { ["b", "a"] };
                let (levels, step, turn) = match number % 2 {
                    0 => (levels(&names), 1, Turn::Asking),
                    _ => (levels(&names), -1, Turn::Giving),
                };
                for _ in 0..200 {
                    let held = phases.enter(&levels, turn).await;
                    let before = inside.fetch_add(step, Ordering::SeqCst);
                    assert!(before * step >= 0, "somebody of the other kind is there");
                    tokio::task::yield_now().await;
                    inside.fetch_sub(step, Ordering::SeqCst);
                    drop(held);
                }
            })
        });
        for caller in callers.collect::<Vec<_>>() {
            caller.await.unwrap();
        }
        assert!(lock(&phases.0).is_empty(), "nothing is left of it");
    }
}
