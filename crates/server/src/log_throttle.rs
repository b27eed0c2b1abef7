//! Throttles log lines that clients can trigger, so that they cannot fill the disk.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The minimum interval between two lines.
const INTERVAL: Duration = Duration::from_secs(10);

/// The suppressed lines of all throttles: the log belongs to the process.
static SUPPRESSED: AtomicU64 = AtomicU64::new(0);

/// A throttle for one kind of log line.
#[derive(Debug)]
pub struct LogThrottle(Mutex<(Option<Instant>, u64)>);

impl LogThrottle {
    /// No line was logged yet.
    #[expect(clippy::new_without_default, reason = "each is a static or a field")]
    pub const fn new() -> Self {
        Self(Mutex::new((None, 0)))
    }

    /// Returns the number of lines suppressed since the last one, or `None` if this line is suppressed too.
    pub fn allow(&self) -> Option<u64> {
        let left_out = self.allow_at(Instant::now());
        if left_out.is_none() {
            SUPPRESSED.fetch_add(1, Ordering::Relaxed);
        }
        left_out
    }

    fn allow_at(&self, now: Instant) -> Option<u64> {
        let (last, suppressed) = &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if last.is_some_and(|last| now.saturating_duration_since(last) < INTERVAL) {
            *suppressed = suppressed.saturating_add(1);
            return None;
        }
        *last = Some(now);
        Some(std::mem::take(suppressed))
    }
}

/// The number of suppressed lines of this process.
pub(crate) fn suppressed() -> u64 {
    SUPPRESSED.load(Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn throttle_allows_first_line_and_counts_suppressed() {
        let (throttle, start) = (LogThrottle::new(), Instant::now());
        let at = |secs| throttle.allow_at(start + Duration::from_secs(secs));
        assert_eq!(
            [at(0), at(0), at(9), at(10), at(11), at(30)],
            [Some(0), None, None, Some(2), None, Some(1)]
        );
    }
}
