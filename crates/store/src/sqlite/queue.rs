//! What waits for a thread: jobs in the order they came, bounded.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::sync::lock;

/// Jobs that wait for one thread, or for several of a kind.
pub(super) struct Queue<J> {
    state: Mutex<State<J>>,
    changed: Condvar,
    max: usize,
}

struct State<J> {
    /// Each with when it came.
    jobs: VecDeque<(Instant, J)>,
    is_closed: bool,
    /// Threads that have nothing to do.
    idle: usize,
}

/// What a thread finds.
pub(super) enum Found<J> {
    Jobs(Vec<J>),
    /// Its time has come, and there is nothing else to do.
    Nothing,
    /// Nobody will ask for anything any more.
    Closed,
}

/// Why a job was not taken.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Rejected {
    Full {
        max: usize,
        /// How long the first job has waited.
        waited: Duration,
    },
    Closed,
}

impl<J> Queue<J> {
    pub(super) fn new(max: usize) -> Self {
        let state = State { jobs: VecDeque::new(), is_closed: false, idle: 0 };
        Self { state: Mutex::new(state), changed: Condvar::new(), max }
    }

    pub(super) fn push(&self, job: J) -> Result<(), Rejected> {
        let mut state = lock(&self.state);
        if state.is_closed {
            return Err(Rejected::Closed);
        }
        if state.jobs.len() >= self.max {
            let waited = state.jobs.front().map_or(Duration::ZERO, |(came, _)| came.elapsed());
            return Err(Rejected::Full { max: self.max, waited });
        }
        state.jobs.push_back((Instant::now(), job));
        let has_idle = state.idle > 0;
        drop(state);
        if has_idle {
            self.changed.notify_one();
        }
        Ok(())
    }

    /// Up to `max` jobs, as soon as there is one; none when `until` has come.
    pub(super) fn take(&self, max: usize, until: Option<Instant>) -> Found<J> {
        let mut state = lock(&self.state);
        loop {
            if !state.jobs.is_empty() {
                let count = state.jobs.len().min(max);
                return Found::Jobs(state.jobs.drain(..count).map(|(_, job)| job).collect());
            }
            if state.is_closed {
                return Found::Closed;
            }
            state.idle += 1;
            state = self.wait(state, until);
            state.idle -= 1;
            if state.jobs.is_empty() && until.is_some_and(|until| Instant::now() >= until) {
                return if state.is_closed { Found::Closed } else { Found::Nothing };
            }
        }
    }

    pub(super) fn len(&self) -> usize {
        lock(&self.state).jobs.len()
    }

    /// Takes what has come meanwhile, until there are `max`. Answers whether anything had.
    pub(super) fn take_more(&self, jobs: &mut Vec<J>, max: usize) -> bool {
        let mut state = lock(&self.state);
        let count = state.jobs.len().min(max.saturating_sub(jobs.len()));
        jobs.extend(state.jobs.drain(..count).map(|(_, job)| job));
        count > 0
    }

    fn wait<'a>(
        &'a self,
        state: MutexGuard<'a, State<J>>,
        until: Option<Instant>,
    ) -> MutexGuard<'a, State<J>> {
        match until {
            None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            Some(until) => {
                let span = until.saturating_duration_since(Instant::now());
                self.changed.wait_timeout(state, span).unwrap_or_else(PoisonError::into_inner).0
            }
        }
    }

    /// Takes no more jobs. Those that wait are done.
    pub(super) fn close(&self) {
        lock(&self.state).is_closed = true;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_come_in_order_within_a_bound_and_are_done_after_it_is_closed() {
        let queue = Queue::new(3);
        for job in 1..=3 {
            assert_eq!(queue.push(job), Ok(()));
        }
        assert!(matches!(queue.push(4), Err(Rejected::Full { max: 3, .. })));
        assert!(matches!(queue.take(2, None), Found::Jobs(jobs) if jobs == [1, 2]));
        let mut taken = vec![0];
        assert!(queue.take_more(&mut taken, 2) && !queue.take_more(&mut taken, 2));
        assert_eq!(taken, [0, 3]);
        assert_eq!(queue.push(6), Ok(()));
        queue.close();
        assert_eq!(queue.push(5), Err(Rejected::Closed));
        assert!(matches!(queue.take(9, None), Found::Jobs(jobs) if jobs == [6]));
        assert!(matches!(queue.take(9, None), Found::Closed));
    }

    #[test]
    fn a_time_that_has_come_is_an_answer() {
        let queue: Queue<u32> = Queue::new(1);
        assert!(matches!(queue.take(1, Some(Instant::now())), Found::Nothing));
    }
}
