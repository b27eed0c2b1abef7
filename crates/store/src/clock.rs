//! Wall clocks for stores that decide in this process.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tidegate_core::limit::anchor::Anchor;
use tidegate_core::time::Stamp;
use tokio::time::Instant;

use crate::sync::lock;

/// A wall clock.
pub trait WallClock: fmt::Debug + Send + Sync + 'static {
    /// The current time. A store in memory needs a monotonic clock; a file store does not.
    fn now(&self) -> Stamp;

    /// How far [`now`](Self::now) is ahead of the wall clock because the wall clock was set back. Usage is
    /// counted by the wall clock.
    fn offset(&self) -> Duration {
        Duration::ZERO
    }
}

/// The machine's clock, which may be set back: for stores that persist the time.
#[derive(Debug, Clone, Copy, Default)]
pub struct HostWall;

impl WallClock for HostWall {
    fn now(&self) -> Stamp {
        Stamp::ZERO + SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
    }
}

/// The wall time at creation plus monotonic time since: setting the system clock does not affect it.
///
/// It uses tokio's time, so that a test that pauses time pauses this clock too.
#[derive(Debug, Clone)]
pub struct SystemWall {
    made: Stamp,
    at: Instant,
}

impl SystemWall {
    /// A clock that starts at the system time.
    pub fn new() -> Self {
        Self { made: HostWall.now(), at: Instant::now() }
    }
}

impl Default for SystemWall {
    fn default() -> Self {
        Self::new()
    }
}

impl WallClock for SystemWall {
    #[inline]
    fn now(&self) -> Stamp {
        let passed = Instant::now().saturating_duration_since(self.at);
        // Rounded down to whole microseconds: never ahead of time.
        let micros = passed.as_secs() * 1_000_000 + u64::from(passed.subsec_micros());
        Stamp::from_micros(self.made.as_micros().saturating_add(micros))
    }
}

/// Makes a clock monotonic that may be set back.
pub struct AnchoredWall<C> {
    clock: C,
    anchor: Mutex<Anchor>,
    /// The number of readings applied.
    readings: AtomicU64,
}

impl<C: Fn() -> Stamp> AnchoredWall<C> {
    /// Wraps `clock`.
    pub fn new(clock: C) -> Self {
        Self { clock, anchor: Mutex::default(), readings: AtomicU64::new(0) }
    }
}

impl<C: Fn() -> Stamp> AnchoredWall<C> {
    fn read(&self) -> Stamp {
        let before = self.readings.load(Ordering::SeqCst);
        // User code: called outside the lock.
        let wall = (self.clock)();
        let mut anchor = lock(&self.anchor);
        let is_first = self.readings.fetch_add(1, Ordering::SeqCst) == before;
        // Another reading was applied in between: this one is old, but the clock was not set back.
        if is_first { anchor.read(wall) } else { anchor.read_late(wall) }
    }
}

impl<C: Fn() -> Stamp + Send + Sync + 'static> WallClock for AnchoredWall<C> {
    fn now(&self) -> Stamp {
        self.read()
    }

    fn offset(&self) -> Duration {
        lock(&self.anchor).offset()
    }
}

impl<C> fmt::Debug for AnchoredWall<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AnchoredWall").field("anchor", &self.anchor).finish_non_exhaustive()
    }
}

/// A manually advanced clock, for tests. Clones share the time.
#[derive(Debug, Clone)]
pub struct ManualWall(Arc<AtomicU64>);

impl ManualWall {
    /// A clock at `start`.
    pub fn new(start: Stamp) -> Self {
        Self(Arc::new(AtomicU64::new(start.as_micros())))
    }

    /// Advances the clock.
    pub fn advance(&self, span: Duration) {
        let micros = u64::try_from(span.as_micros()).unwrap_or(u64::MAX);
        let _ =
            self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |now| Some(now.saturating_add(micros)));
    }

    /// Sets the clock. If it may be set back, wrap it in an [`AnchoredWall`].
    pub fn set(&self, now: Stamp) {
        self.0.store(now.as_micros(), Ordering::SeqCst);
    }
}

impl WallClock for ManualWall {
    fn now(&self) -> Stamp {
        Stamp::from_micros(self.0.load(Ordering::SeqCst))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overtaken_reading_is_no_step_back() {
        // The first reader blocks in the clock until another has read two seconds later.
        let clock = ManualWall::new(Stamp::from_secs(100));
        let (barrier, readings) = (std::sync::Barrier::new(2), AtomicU64::new(0));
        let anchored = AnchoredWall::new(|| {
            let now = clock.now();
            if readings.fetch_add(1, Ordering::SeqCst) == 0 {
                barrier.wait();
                barrier.wait();
            }
            now
        });
        std::thread::scope(|scope| {
            let late = scope.spawn(|| anchored.read());
            barrier.wait();
            clock.advance(Duration::from_secs(2));
            assert_eq!(anchored.read(), Stamp::from_secs(102));
            barrier.wait();
            assert_eq!(late.join().unwrap(), Stamp::from_secs(102));
        });
        clock.advance(Duration::from_secs(1));
        assert_eq!(anchored.read(), Stamp::from_secs(103));
    }

    #[tokio::test(start_paused = true)]
    async fn system_wall_uses_tokio_time() {
        let clock = SystemWall::new();
        let before = clock.now();
        tokio::time::advance(Duration::from_secs(90)).await;
        assert_eq!(clock.now().since(before), Duration::from_secs(90));
        assert!(before > Stamp::from_secs(1_700_000_000));
    }
}
