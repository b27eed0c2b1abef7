//! The pure core of tidegate: values and state machines, without I/O.
//!
//! A request has a [`Cost`](cost::Cost). Each gate decides from `now` whether to *admit, wait or refuse*,
//! without changing its state. When all gates admit, each takes its part, recorded on a
//! [`Charge`](cost::Charge). When the request completes, the charge is settled with an
//! [`Outcome`](outcome::Outcome): each gate gets back exactly what it lent, the controller learns and may
//! retune the gates, and [`Event`](event::Event)s report what happened.
//!
//! Nothing here reads a clock, entropy or the environment, and nothing waits: everything is a function of
//! (state, now) and can be tested with tables. The `tidegate` crate is the shell that brings time, tasks and
//! threads.
//!
//! ```
//! use std::time::Duration;
//! use tidegate_core::{bucket::{Bucket, Shape}, time::Instant};
//!
//! let shape = Shape::new(2, Duration::from_secs(1), 1)?;      // two per second, burst of one
//! let mut bucket = Bucket::full();
//! let start = Instant::ZERO;
//! assert!(bucket.take(&shape, 1, start).is_ok());
//! assert_eq!(bucket.take(&shape, 1, start), Err(start + Duration::from_millis(500)));
//! # Ok::<(), tidegate_core::bucket::InvalidShape>(())
//! ```

pub mod authority;
pub mod backoff;
pub mod bucket;
pub mod calendar;
pub mod cause;
pub mod classes;
#[cfg(feature = "serde")]
mod codec;
pub mod control;
pub mod cost;
pub mod duration;
pub mod event;
pub mod excerpt;
pub mod feedback;
pub mod gate;
pub mod latency;
pub mod limit;
pub mod outcome;
pub mod per_second;
pub mod plan;
pub mod progress;
pub mod random;
pub mod refused;
#[cfg(feature = "http")]
pub mod response;
pub mod retry;
pub mod snapshot;
pub mod statistics;
pub mod time;
pub mod verdict;
pub mod window;
