//! Wall time for stores that live in a process.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tidegate_core::limit::anchor::Anchor;
use tidegate_core::time::Stamp;
use tokio::time::Instant;

use crate::sync::lock;

/// A clock that tells wall time.
pub trait WallClock: fmt::Debug + Send + Sync + 'static {
    /// The time now. A store in memory needs one that never tells less than it told earlier; one in a file does not.
    fn now(&self) -> Stamp;

    /// How far [`now`](Self::now) is ahead of the wall clock, because the wall clock stepped back. Usage is booked at the wall
    /// clock.
    fn offset(&self) -> Duration {
        Duration::ZERO
    }
}

/// The machine's clock as it is, which may be set: for stores that keep the time with what they hold.
#[derive(Debug, Clone, Copy, Default)]
pub struct HostWall;

impl WallClock for HostWall {
    fn now(&self) -> Stamp {
        Stamp::ZERO + SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
    }
}

/// The wall time at which it was made, and monotonic time since: setting the system's clock does not move it.
///
/// It runs on tokio's time, so that a test that pauses time pauses this too.
#[derive(Debug, Clone)]
pub struct SystemWall {
    made: Stamp,
    at: Instant,
}

impl SystemWall {
    /// A clock set by the system's.
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
        // Whole microseconds, rounded down: a time that has not come is not told.
        let micros = passed.as_secs() * 1_000_000 + u64::from(passed.subsec_micros());
        Stamp::from_micros(self.made.as_micros().saturating_add(micros))
    }
}

/// A clock that may be set back, made into one that never runs back.
pub struct Anchored<C> {
    clock: C,
    anchor: Mutex<Anchor>,
    /// Readings that were taken in.
    readings: AtomicU64,
}

impl<C: Fn() -> Stamp> Anchored<C> {
    /// Goes by what `clock` reads.
    pub fn new(clock: C) -> Self {
        Self { clock, anchor: Mutex::default(), readings: AtomicU64::new(0) }
    }
}

impl<C: Fn() -> Stamp> Anchored<C> {
    fn read(&self) -> Stamp {
        let before = self.readings.load(Ordering::SeqCst);
        // Outside the lock, since it is somebody's code.
        let wall = (self.clock)();
        let mut anchor = lock(&self.anchor);
        let is_first = self.readings.fetch_add(1, Ordering::SeqCst) == before;
        // A reading that others have overtaken is old, which does not mean that the clock was set back.
        if is_first { anchor.read(wall) } else { anchor.read_late(wall) }
    }
}

impl<C: Fn() -> Stamp + Send + Sync + 'static> WallClock for Anchored<C> {
    fn now(&self) -> Stamp {
        self.read()
    }

    fn offset(&self) -> Duration {
        lock(&self.anchor).offset()
    }
}

impl<C> fmt::Debug for Anchored<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Anchored").field("anchor", &self.anchor).finish_non_exhaustive()
    }
}

/// A clock that moves only by hand, for tests. Clones share the time.
#[derive(Debug, Clone)]
pub struct ManualWall(Arc<AtomicU64>);

impl ManualWall {
    /// A clock that stands at `start`.
    pub fn new(start: Stamp) -> Self {
        Self(Arc::new(AtomicU64::new(start.as_micros())))
    }

    /// Lets time pass.
    pub fn advance(&self, span: Duration) {
        let micros = u64::try_from(span.as_micros()).unwrap_or(u64::MAX);
        let _ =
            self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |now| Some(now.saturating_add(micros)));
    }

    /// Sets the clock, back if need be: use it under an [`Anchored`] one then.
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
    fn a_reading_that_others_have_overtaken_is_no_step_back() {
        // The first to read is held up in the clock until another has read two seconds later.
        let clock = ManualWall::new(Stamp::from_secs(100));
        let (barrier, asked) = (std::sync::Barrier::new(2), AtomicU64::new(0));
        let anchored = Anchored::new(|| {
            let now = clock.now();
            if asked.fetch_add(1, Ordering::SeqCst) == 0 {
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
    async fn the_wall_clock_runs_on_tokios_time() {
        let clock = SystemWall::new();
        let before = clock.now();
        tokio::time::advance(Duration::from_secs(90)).await;
        assert_eq!(clock.now().since(before), Duration::from_secs(90));
        assert!(before > Stamp::from_secs(1_700_000_000));
    }
}
