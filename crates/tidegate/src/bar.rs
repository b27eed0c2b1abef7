//! A live line on the terminal: done, rate, slots, state and time left. Nothing in a pipe.

use std::collections::VecDeque;
use std::fmt;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tidegate_core::snapshot::Snapshot;

use crate::throttle::Throttle;

/// How often the line is drawn.
const TICK: Duration = Duration::from_millis(100);
/// Looks that make a second, over which the rate is counted.
const LOOKS: usize = 10;

/// A line that shows how a batch under a throttle is doing.
///
/// Make it before the throttle, so that listeners can print above it, and let it watch the throttle afterwards:
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
/// let watching = bar.watch(&throttle);
/// // ... the batch ...
/// drop(watching); // clears the line
/// # Ok::<(), tidegate::InvalidPlan>(())
/// ```
#[derive(Clone)]
pub struct Bar {
    bar: ProgressBar,
}

impl Bar {
    /// A line on the standard error; none where that is not a terminal.
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

    /// Draws what `seen` shows, at `rate` completions per second.
    pub fn show(&self, seen: &Snapshot, rate: u64) {
        if seen.total > 0 {
            self.bar.set_length(seen.total);
        }
        self.bar.set_position(seen.completed);
        self.bar.set_message(message(seen, rate));
    }

    /// Runs `print` while the line is out of the way.
    pub fn suspend<T>(&self, print: impl FnOnce() -> T) -> T {
        self.bar.suspend(print)
    }

    /// Draws the line ten times a second, from a thread of its own, until the answer is dropped.
    ///
    /// # Panics
    /// When the operating system gives no thread.
    pub fn watch(&self, throttle: &Throttle) -> Watching {
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
        Watching { bar: self.clone(), stop: Some(stop), thread: Some(thread) }
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

/// A bar that is drawn; dropped, it clears the line.
#[derive(Debug)]
#[must_use = "dropping it ends the watching"]
pub struct Watching {
    bar: Bar,
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Watching {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panic in there has drawn nothing, and that is all.
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
    let eta = seen.eta.map_or_else(|| "?".to_owned(), |eta| format!("{:.1} s", eta.as_secs_f64()));
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
    fn watching_ends_when_it_is_dropped_and_clears_the_line() {
        let term = InMemoryTerm::new(5, 100);
        let bar = Bar::on(ProgressDrawTarget::term_like(Box::new(term.clone())));
        let watching = bar.watch(&batch(3));
        drop(watching);
        assert_eq!(term.contents(), "");
        assert_eq!(bar.suspend(|| 5), 5);
    }
}
