//! The no-op replacement of traces if the feature `tracing` is off.

use std::time::Duration;

use tidegate_core::event::Event;
use tidegate_core::refused::Refused;
use tidegate_core::verdict::Gate;

use crate::events::Sinks;
use crate::throttle::Inner;

#[derive(Debug)]
pub(crate) struct Traces;

impl Traces {
    pub(crate) const fn new() -> Self {
        Self
    }

    #[inline]
    #[expect(clippy::unused_self, reason = "its twin uses it")]
    pub(crate) const fn post(&self, _: &Inner, _: &[Event]) -> bool {
        false
    }

    #[expect(clippy::unused_self, reason = "its twin uses it")]
    pub(crate) fn evicted(&self, _: &'static str, _: impl Fn() -> Option<String> + Send + 'static) -> bool {
        false
    }

    #[expect(clippy::unused_self, reason = "its twin uses it")]
    pub(crate) const fn overflowed(&self, _: usize) -> bool {
        false
    }

    #[expect(clippy::unused_self, reason = "its twin uses it")]
    pub(crate) const fn deliver(&self, _: &str, _: &Sinks) {}

    #[expect(clippy::unused_self, reason = "its twin uses it")]
    pub(crate) const fn lost(&self) -> u64 {
        0
    }

    #[inline]
    pub(crate) const fn traces_waits() -> bool {
        false
    }

    pub(crate) const fn trace_acquire(
        _: &str,
        _: &Inner,
        _: Option<(Gate, Duration)>,
        _: Result<(), &Refused>,
    ) {
    }
}
