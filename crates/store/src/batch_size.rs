//! How many calls go to the engine together: as many as it does well within its deadline.

use std::time::Duration;

/// A batch is not cut below this: fewer calls are hardly quicker.
const MIN: usize = 4;

/// The number of calls in a batch. It is halved when a batch takes more than half of the deadline, and doubles while full
/// batches take less than a quarter.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BatchSize {
    max: usize,
    now: usize,
    deadline: Duration,
}

impl BatchSize {
    pub(crate) const fn new(max: usize, deadline: Duration) -> Self {
        Self { max, now: max, deadline }
    }

    /// How many calls go together now.
    pub(crate) const fn get(&self) -> usize {
        self.now
    }

    /// A batch of `calls` took the engine so long.
    pub(crate) fn learn(&mut self, calls: usize, took: Duration) {
        if took > self.deadline / 2 {
            // A small batch was slow for another reason.
            self.now = self.now.min((calls / 2).max(MIN));
        } else if took < self.deadline / 4 && calls >= self.now {
            self.now = (self.now * 2).min(self.max);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_shrink_when_slow_and_grow_when_full() {
        let mut size = BatchSize::new(256, Duration::from_millis(100));
        // Calls, milliseconds, and the size after them.
        let table = [
            (256, 10, 256),
            (256, 60, 128),
            (128, 400, 64),
            (10, 80, 5),
            (1, 80, 4),
            (4, 30, 4),
            (3, 1, 4),
            (4, 1, 8),
            (8, 24, 16),
            (16, 26, 16),
            (16, 1, 32),
        ];
        for (calls, millis, wanted) in table {
            size.learn(calls, Duration::from_millis(millis));
            assert_eq!(size.get(), wanted, "{calls} calls in {millis} ms");
        }
    }
}
