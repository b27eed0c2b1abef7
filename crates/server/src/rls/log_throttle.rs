//! Throttles log lines that clients of the proxy can trigger, so that they cannot fill the disk.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The minimum interval between two lines.
const INTERVAL: Duration = Duration::from_secs(10);

/// A throttle for one kind of log line.
#[derive(Debug, Default)]
pub(super) struct LogThrottle(Mutex<(Option<Instant>, u64)>);

impl LogThrottle {
    /// Returns the number of lines suppressed since the last one, or `None` if this line is suppressed too.
    pub(super) fn allow(&self, now: Instant) -> Option<u64> {
        let (last, suppressed) = &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if last.is_some_and(|last| now.saturating_duration_since(last) < INTERVAL) {
            *suppressed = suppressed.saturating_add(1);
            return None;
        }
        *last = Some(now);
        Some(std::mem::take(suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn throttle_allows_first_line_and_counts_suppressed() {
        let (throttle, start) = (LogThrottle::default(), Instant::now());
        let at = |secs| throttle.allow(start + Duration::from_secs(secs));
        assert_eq!(
            [at(0), at(0), at(9), at(10), at(11), at(30)],
            [Some(0), None, None, Some(2), None, Some(1)]
        );
    }
}
