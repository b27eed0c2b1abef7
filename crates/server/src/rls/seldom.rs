//! Lines of the log that whoever calls the proxy can bring about: one now and then, so that nobody fills a disk with them.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// So long nothing is said after something was.
const QUIET: Duration = Duration::from_secs(10);

/// Says when something may be said again.
#[derive(Debug, Default)]
pub(super) struct Seldom(Mutex<(Option<Instant>, u64)>);

impl Seldom {
    /// How often it was not said since the last time, if it may be said now.
    pub(super) fn now(&self, now: Instant) -> Option<u64> {
        let (last, left_out) = &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if last.is_some_and(|last| now.saturating_duration_since(last) < QUIET) {
            *left_out = left_out.saturating_add(1);
            return None;
        }
        *last = Some(now);
        Some(std::mem::take(left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_said_at_once_then_seldom_and_with_how_often_it_was_not() {
        let (seldom, start) = (Seldom::default(), Instant::now());
        let at = |secs| seldom.now(start + Duration::from_secs(secs));
        assert_eq!(
            [at(0), at(0), at(9), at(10), at(11), at(30)],
            [Some(0), None, None, Some(2), None, Some(1)]
        );
    }
}
