//! A clock whose reading costs one atomic load: a thread stores the time every millisecond.
//!
//! A reading is at most about one tick old, and an old `now` can only deny, so limits stay exact; admissions
//! are up to one tick late. All fast clocks of a process share the thread, which exits with the last of them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread;
use std::time::Duration;

use tidegate_core::time::{Instant, nanos};

use super::{Clock, Sleep};

/// How often the time is stored.
const TICK: Duration = Duration::from_millis(1);

/// The process's ticker, while a clock uses it.
static SHARED: Mutex<Weak<Ticker>> = Mutex::new(Weak::new());

/// A coarse clock for hot paths: a reading costs less than a nanosecond and is up to a millisecond old.
///
/// A background thread wakes a thousand times per second while any fast clock exists.
#[derive(Debug, Clone)]
pub struct FastClock {
    ticker: Arc<Ticker>,
}

#[derive(Debug)]
struct Ticker {
    origin: std::time::Instant,
    latest: AtomicU64,
}

impl FastClock {
    /// A clock on the process's ticker, which is started if it is not running.
    ///
    /// # Panics
    /// If the operating system cannot spawn a thread for the ticker.
    pub fn new() -> Self {
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(ticker) = shared.upgrade() {
            return Self { ticker };
        }
        let ticker = Arc::new(Ticker { origin: std::time::Instant::now(), latest: AtomicU64::new(0) });
        *shared = Arc::downgrade(&ticker);
        let weak = Arc::downgrade(&ticker);
        thread::Builder::new()
            .name("tidegate-clock".to_owned())
            .spawn(move || run(&weak))
            .expect("the operating system gives a thread for the clock");
        Self { ticker }
    }
}

impl Default for FastClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for FastClock {
    #[inline]
    fn now(&self) -> Instant {
        Instant::from_nanos(self.ticker.latest.load(Ordering::Relaxed))
    }

    fn sleep_until(&self, at: Instant) -> Sleep {
        // One tick past both: admissions are up to a tick late, and a late ticker must not cause a busy loop.
        let wanted = (at + TICK).max(self.ticker.exact() + TICK);
        let Some(deadline) = self.ticker.origin.checked_add(wanted.since(Instant::ZERO)) else {
            return Box::pin(std::future::pending());
        };
        let ticker = Arc::clone(&self.ticker);
        // Started here, not on the first poll: without a timer in the runtime, the panic then occurs in the
        // caller.
        let sleep = tokio::time::sleep_until(deadline.into());
        Box::pin(async move {
            sleep.await;
            // The ticker's thread may not have run yet: tick here, so that the woken task reads a time past
            // `at`.
            ticker.tick();
        })
    }

    fn park_until(&self, at: Instant) {
        thread::park_timeout(at.since(self.now()).max(TICK));
        self.ticker.tick();
    }
}

impl Ticker {
    /// Stores the current time.
    fn tick(&self) {
        self.latest.fetch_max(self.exact().as_nanos(), Ordering::Relaxed);
    }

    fn exact(&self) -> Instant {
        Instant::from_nanos(nanos(self.origin.elapsed()))
    }
}

fn run(ticker: &Weak<Ticker>) {
    while let Some(ticker) = ticker.upgrade() {
        ticker.tick();
        drop(ticker);
        thread::sleep(TICK);
    }
}
