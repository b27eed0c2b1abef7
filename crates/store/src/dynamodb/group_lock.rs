//! A group mutual exclusion lock per bucket: calls that take units and calls that return them exclude each
//! other, but not their own kind.
//!
//! The engine has no clock, so a call is decided at the time at which it was sent, and of two concurrent
//! calls the first may arrive last. Among calls that take units this is harmless, because an older time only
//! denies. But such a call must not find units that were returned at a later time than its own, so a process
//! never has calls of both kinds in flight on one bucket.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::name::Subject;
use tokio::sync::{Notify, Semaphore};
use tokio::time::Instant;

use crate::engine_time::EngineTime;
use crate::error::StoreError;
use crate::sync::lock;

/// The most calls that may wait.
const WAITING_MAX: usize = 1 << 16;

/// The group of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Group {
    /// Calls that take units.
    Takers,
    /// Calls that may return units.
    Returners,
}

/// The lock state of each bucket in use.
#[derive(Debug)]
pub(super) struct GroupLock {
    states: Mutex<HashMap<Subject, GroupState>>,
    /// Permits of the calls that may wait.
    waiting: Semaphore,
    /// The engine, for errors.
    place: String,
}

#[derive(Debug)]
struct GroupState {
    group: Group,
    count: usize,
    /// Since when the other group waits: no more calls of this group enter.
    ending_since: Option<Instant>,
    ended: Arc<Notify>,
}

/// Holds the lock of some buckets for a group.
#[derive(Debug)]
pub(super) struct GroupGuard<'a> {
    lock: &'a GroupLock,
    subjects: Vec<Subject>,
}

impl GroupLock {
    pub(super) fn new(place: &str) -> Self {
        let waiting = Semaphore::new(WAITING_MAX);
        Self { states: Mutex::default(), waiting, place: place.to_owned() }
    }

    /// Waits until the group may enter all buckets of these levels.
    pub(super) async fn enter(&self, levels: &Levels, group: Group) -> Result<GroupGuard<'_>, StoreError> {
        let mut subjects: Vec<Subject> = levels.levels().iter().map(|level| level.subject.clone()).collect();
        // In a fixed order, which prevents deadlocks.
        subjects.sort_unstable_by(|one, other| {
            (&one.entity, &one.resource).cmp(&(&other.entity, &other.resource))
        });
        subjects.dedup();
        let mut guard = GroupGuard { lock: self, subjects: Vec::with_capacity(subjects.len()) };
        for subject in subjects {
            self.enter_one(&subject, group).await?;
            guard.subjects.push(subject);
        }
        Ok(guard)
    }

    async fn enter_one(&self, subject: &Subject, group: Group) -> Result<(), StoreError> {
        let mut waiting = None;
        loop {
            let ended = {
                let mut states = lock(&self.states);
                let Some(state) = states.get_mut(subject) else {
                    let state = GroupState { group, count: 1, ending_since: None, ended: Arc::default() };
                    states.insert(subject.clone(), state);
                    break;
                };
                if state.group == group && state.ending_since.is_none() {
                    state.count += 1;
                    break;
                }
                let since = *state.ending_since.get_or_insert_with(Instant::now);
                if waiting.is_none() {
                    let permit = self.waiting.try_acquire().map_err(|_| StoreError::Busy {
                        place: self.place.clone(),
                        waiting_max: WAITING_MAX,
                        retry_after: since.elapsed(),
                    })?;
                    let time = EngineTime::current();
                    time.wait("locks");
                    waiting = Some((permit, time));
                }
                Arc::clone(&state.ended).notified_owned()
            };
            ended.await;
        }
        if let Some((_, time)) = waiting {
            time.send();
        }
        Ok(())
    }

    fn leave(&self, subject: &Subject) {
        let mut states = lock(&self.states);
        let Some(state) = states.get_mut(subject) else { return };
        state.count -= 1;
        if state.count == 0
            && let Some(state) = states.remove(subject)
        {
            state.ended.notify_waiters();
        }
    }
}

impl Drop for GroupGuard<'_> {
    fn drop(&mut self) {
        for subject in &self.subjects {
            self.lock.leave(subject);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicI64, Ordering};

    use futures_util::FutureExt as _;
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
    async fn takers_and_returners_exclude_each_other() {
        let group_lock = Arc::new(GroupLock::new("here"));
        // Positive while takers are inside, negative while returners are.
        let inside: Arc<AtomicI64> = Arc::default();
        let callers = (0..8).map(|number| {
            let (group_lock, inside) = (Arc::clone(&group_lock), Arc::clone(&inside));
            tokio::spawn(async move {
                let names = if number % 4 < 2 { ["a", "b"] } else { ["b", "a"] };
                let (levels, step, group) = match number % 2 {
                    0 => (levels(&names), 1, Group::Takers),
                    _ => (levels(&names), -1, Group::Returners),
                };
                for _ in 0..200 {
                    let guard = group_lock.enter(&levels, group).await.unwrap();
                    let before = inside.fetch_add(step, Ordering::SeqCst);
                    assert!(before * step >= 0, "the other group is inside");
                    tokio::task::yield_now().await;
                    inside.fetch_sub(step, Ordering::SeqCst);
                    drop(guard);
                }
            })
        });
        for caller in callers.collect::<Vec<_>>() {
            caller.await.unwrap();
        }
        assert!(lock(&group_lock.states).is_empty(), "no state is left");
    }

    #[tokio::test]
    async fn wait_for_the_other_group_is_not_the_engines_time() {
        let (group_lock, time) = (GroupLock::new("here"), EngineTime::default());
        let levels = levels(&["a"]);
        let takers = group_lock.enter(&levels, Group::Takers).await.unwrap();
        let mut returners = Box::pin(time.follow(group_lock.enter(&levels, Group::Returners)));
        assert!(returners.as_mut().now_or_never().is_none());
        assert!(time.queued_for().is_some());
        drop(takers);
        let _returners = returners.await.unwrap();
        assert!(time.elapsed().is_some(), "the engine has it");
    }

    #[tokio::test]
    async fn full_lock_is_busy() {
        let group_lock = GroupLock { waiting: Semaphore::new(1), ..GroupLock::new("here") };
        let levels = levels(&["a"]);
        let _takers = group_lock.enter(&levels, Group::Takers).await.unwrap();
        let mut first = Box::pin(group_lock.enter(&levels, Group::Returners));
        assert!(first.as_mut().now_or_never().is_none());
        let busy = group_lock.enter(&levels, Group::Returners).await.unwrap_err();
        assert!(matches!(busy, StoreError::Busy { .. }), "{busy}");
        drop(first);
        let mut next = Box::pin(group_lock.enter(&levels, Group::Returners));
        assert!(next.as_mut().now_or_never().is_none(), "a dropped call leaves its place");
    }
}
