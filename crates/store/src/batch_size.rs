//! Adaptive batch size: as many calls as the engine completes well within its deadline.

use std::time::Duration;

/// The smallest batch. Below this a round trip hardly gets faster.
const MIN: usize = 16;

/// The number of calls in a batch: halved when a full batch takes more than half of the deadline, doubled
/// when a full batch takes less. Smaller batches are ignored: if they are slow, their size is not the reason.
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

    /// The current size.
    pub(crate) const fn get(&self) -> usize {
        self.now
    }

    /// Records the duration of a batch of `calls`.
    pub(crate) fn learn(&mut self, calls: usize, took: Duration) {
        if calls < self.now {
            return;
        }
        self.now = if took > self.deadline / 2 {
            (self.now / 2).max(MIN.min(self.max))
        } else {
            (self.now * 2).min(self.max)
        };
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
            (255, 400, 256),
            (256, 60, 128),
            (128, 400, 64),
            (1, 400, 64),
            (64, 51, 32),
            (32, 51, 16),
            (16, 400, 16),
            (15, 1, 16),
            (16, 50, 32),
            (32, 40, 64),
        ];
        for (calls, millis, wanted) in table {
            size.learn(calls, Duration::from_millis(millis));
            assert_eq!(size.get(), wanted, "{calls} calls in {millis} ms");
        }
    }
}
