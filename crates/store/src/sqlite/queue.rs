//! A bounded FIFO queue of jobs for threads.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::error::StoreError;
use crate::sync::lock;

/// A queue of jobs for one or several threads.
pub(super) struct Queue<J> {
    state: Mutex<State<J>>,
    changed: Condvar,
    max: usize,
    /// The path of the file, for errors.
    place: Arc<str>,
}

struct State<J> {
    /// Jobs with their arrival times.
    jobs: VecDeque<(Instant, J)>,
    is_closed: bool,
    /// The number of waiting threads.
    idle: usize,
}

/// The result of [`Queue::take`].
pub(super) enum NextJobs<J> {
    Jobs(Vec<J>),
    /// The time limit passed without a job.
    TimedOut,
    /// The queue is closed and empty.
    Closed,
}

impl<J> Queue<J> {
    pub(super) fn new(max: usize, place: &Arc<str>) -> Self {
        let state = State { jobs: VecDeque::new(), is_closed: false, idle: 0 };
        Self { state: Mutex::new(state), changed: Condvar::new(), max, place: Arc::clone(place) }
    }

    pub(super) fn push(&self, job: J) -> Result<(), StoreError> {
        let mut state = lock(&self.state);
        if state.is_closed {
            return Err(StoreError::Closed { what: format!("`{}` was closed", self.place) });
        }
        if state.jobs.len() >= self.max {
            let retry_after = state.jobs.front().map_or(Duration::ZERO, |(came, _)| came.elapsed());
            let place = format!("`{}`", self.place);
            return Err(StoreError::Busy { place, waiting_max: self.max, retry_after });
        }
        state.jobs.push_back((Instant::now(), job));
        let has_idle = state.idle > 0;
        drop(state);
        if has_idle {
            self.changed.notify_one();
        }
        Ok(())
    }

    /// Waits for up to `max` jobs, until `until` at most.
    pub(super) fn take(&self, max: usize, until: Option<Instant>) -> NextJobs<J> {
        let mut state = lock(&self.state);
        loop {
            if !state.jobs.is_empty() {
                let count = state.jobs.len().min(max);
                return NextJobs::Jobs(state.jobs.drain(..count).map(|(_, job)| job).collect());
            }
            if state.is_closed {
                return NextJobs::Closed;
            }
            state.idle += 1;
            state = self.wait(state, until);
            state.idle -= 1;
            if state.jobs.is_empty() && until.is_some_and(|until| Instant::now() >= until) {
                return if state.is_closed { NextJobs::Closed } else { NextJobs::TimedOut };
            }
        }
    }

    pub(super) fn len(&self) -> usize {
        lock(&self.state).jobs.len()
    }

    /// Takes the jobs that have arrived, up to `max` in all. Returns whether there were any.
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

    /// Refuses further jobs. Queued ones can still be taken.
    pub(super) fn close(&self) {
        lock(&self.state).is_closed = true;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closed_queue_still_drains_its_jobs_in_order() {
        let queue = Queue::new(3, &"limits.db".into());
        for job in 1..=3 {
            queue.push(job).unwrap();
        }
        assert!(matches!(queue.push(4), Err(StoreError::Busy { waiting_max: 3, .. })));
        assert!(matches!(queue.take(2, None), NextJobs::Jobs(jobs) if jobs == [1, 2]));
        let mut taken = vec![0];
        assert!(queue.take_more(&mut taken, 2) && !queue.take_more(&mut taken, 2));
        assert_eq!(taken, [0, 3]);
        queue.push(6).unwrap();
        queue.close();
        assert!(matches!(queue.push(5), Err(StoreError::Closed { .. })));
        assert!(matches!(queue.take(9, None), NextJobs::Jobs(jobs) if jobs == [6]));
        assert!(matches!(queue.take(9, None), NextJobs::Closed));
    }

    #[test]
    fn take_returns_when_its_time_limit_passes() {
        let queue: Queue<u32> = Queue::new(1, &"limits.db".into());
        assert!(matches!(queue.take(1, Some(Instant::now())), NextJobs::TimedOut));
    }
}
