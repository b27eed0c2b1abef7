//! A live progress line on the terminal: completed, rate, slots, state and ETA. Prints nothing into a pipe.

use std::collections::VecDeque;
use std::fmt;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tidegate_core::duration::Rounded;
use tidegate_core::snapshot::Snapshot;

use crate::throttle::Throttle;

/// How often the line is drawn.
const TICK: Duration = Duration::from_millis(100);
/// Ticks per second: the window over which the rate is counted.
const LOOKS: usize = 10;

/// A progress line for a batch under a throttle.
///
/// Create it before the throttle, so that listeners can print above it, then let it watch the throttle:
///
/// ```
/// use tidegate::{Bar, Throttle};
///
/// let bar = Bar::new();
/// let above = bar.clone();
/// let throttle = Throttle::gentle()
///     .total(120)
///     .on_state_change(move |notice| above.suspend(|| println!("{:?}", notice.event)))
///     .build()?;
/// let guard = bar.watch(&throttle);
/// // ... the batch ...
/// drop(guard); // clears the line
/// # Ok::<(), tidegate::InvalidPlan>(())
/// ```
#[derive(Clone)]
pub struct Bar {
    bar: ProgressBar,
}

impl Bar {
    /// A line on stderr; hidden if stderr is not a terminal.
    pub fn new() -> Self {
        Self::on(ProgressDrawTarget::stderr())
    }

    /// A line on another target.
    pub fn on(target: ProgressDrawTarget) -> Self {
        let bar = ProgressBar::with_draw_target(None, target);
        if let Ok(style) = ProgressStyle::with_template("[{bar:20}] {pos}/{len}  {msg}") {
            bar.set_style(style.progress_chars("=> "));
        }
        Self { bar }
    }

    /// Draws `seen` at `rate` completions per second.
    pub fn show(&self, seen: &Snapshot, rate: u64) {
        if seen.total > 0 {
            self.bar.set_length(seen.total);
        }
        self.bar.set_position(seen.completed);
        self.bar.set_message(message(seen, rate));
    }

    /// Runs `print` with the line cleared, then redraws it.
    pub fn suspend<T>(&self, print: impl FnOnce() -> T) -> T {
        self.bar.suspend(print)
    }

    /// Draws the line ten times per second from its own thread until the returned guard is dropped.
    ///
    /// # Panics
    /// If the operating system cannot spawn a thread.
    pub fn watch(&self, throttle: &Throttle) -> BarGuard {
        let (stop, stopped) = mpsc::channel::<()>();
        let (bar, throttle) = (self.clone(), throttle.clone());
        let thread = thread::Builder::new()
            .name("tidegate-bar".to_owned())
            .spawn(move || {
                let mut past: VecDeque<u64> = VecDeque::new();
                while stopped.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) {
                    let seen = throttle.snapshot();
                    bar.show(&seen, past.front().map_or(0, |before| seen.completed.saturating_sub(*before)));
                    past.push_back(seen.completed);
                    if past.len() > LOOKS {
                        past.pop_front();
                    }
                }
            })
            .expect("the operating system gives a thread for the bar");
        BarGuard { bar: self.clone(), stop: Some(stop), thread: Some(thread) }
    }
}

impl Default for Bar {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Bar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bar").field("position", &self.bar.position()).finish_non_exhaustive()
    }
}

/// Guard of a bar that is being drawn. Dropping it stops the drawing and clears the line.
#[derive(Debug)]
#[must_use = "dropping the guard stops the bar at once"]
pub struct BarGuard {
    bar: Bar,
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for BarGuard {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panic in the drawing thread affects nothing else.
            let _ = thread.join();
        }
        self.bar.bar.finish_and_clear();
    }
}

fn message(seen: &Snapshot, rate: u64) -> String {
    let slots = match (seen.slots, seen.slots_max) {
        (Some(slots), Some(max)) => format!("{slots} of {max} slots"),
        _ => format!("{} in flight", seen.in_flight),
    };
    let eta = match seen.eta {
        None => "?".to_owned(),
        Some(eta) if eta < Duration::from_secs(60) => format!("{:.1} s", eta.as_secs_f64()),
        Some(eta) => Rounded(eta).to_string(),
    };
    format!("{rate:>2}/s  {slots}  {:<10}  ETA {eta}", seen.state)
}

#[cfg(test)]
mod tests {
    use indicatif::InMemoryTerm;
    use tidegate_core::cost::Cost;
    use tidegate_core::outcome::Outcome;
    use tidegate_core::plan::Slots;

    use super::*;

    fn batch(total: u64) -> Throttle {
        Throttle::builder().slots(Slots::fixed(4)).total(total).build().expect("within the bounds")
    }

    #[test]
    fn the_line_shows_done_rate_slots_state_and_time_left() {
        let term = InMemoryTerm::new(5, 100);
        let bar = Bar::on(ProgressDrawTarget::term_like(Box::new(term.clone())));
        let throttle = batch(8);
        for _ in 0..2 {
            let permit = throttle.try_acquire(Cost::request()).expect("there are slots");
            permit.settle(Outcome::success().took(Duration::from_secs(6)));
        }
        bar.show(&throttle.snapshot(), 7);
        bar.bar.force_draw();
        assert_eq!(term.contents(), "[=====>              ] 2/8   7/s  4 of 4 slots  running     ETA 9.0 s");
    }

    #[test]
    fn without_slots_or_total_it_shows_what_there_is() {
        let throttle = Throttle::builder().build().expect("within the bounds");
        assert_eq!(message(&throttle.snapshot(), 0), " 0/s  0 in flight  running     ETA ?");
    }

    #[test]
    fn long_time_left_is_rounded_to_seconds() {
        let throttle = batch(8_001);
        let permit = throttle.try_acquire(Cost::request()).expect("there are slots");
        permit.settle(Outcome::success().took(Duration::from_millis(6_100)));
        assert!(message(&throttle.snapshot(), 7).ends_with("ETA 3h23m20s"));
    }

    #[test]
    fn dropping_the_guard_clears_the_line() {
        let term = InMemoryTerm::new(5, 100);
        let bar = Bar::on(ProgressDrawTarget::term_like(Box::new(term.clone())));
        let guard = bar.watch(&batch(3));
        drop(guard);
        assert_eq!(term.contents(), "");
        assert_eq!(bar.suspend(|| 5), 5);
    }
}
