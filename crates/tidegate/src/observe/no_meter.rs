//! The no-op replacement of metrics if the feature `metrics` is off.

use std::time::Duration;

use tidegate_core::event::Event;
use tidegate_core::outcome::Outcome;
use tidegate_core::refused::Refused;

use crate::state::State;

#[derive(Debug)]
pub(crate) struct Meter;

#[derive(Debug)]
pub(crate) struct GaugeHandle;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Reading;

#[expect(clippy::unused_self, reason = "its twin uses it")]
impl Meter {
    pub(crate) const fn new(_: &str, _: bool) -> Self {
        Self
    }

    pub(crate) const fn gauge_handle(&self) -> GaugeHandle {
        GaugeHandle
    }

    pub(crate) const fn record_acquire(&self, _: Duration, _: Result<(), &Refused>) {}

    pub(crate) const fn record_outcome(&self, _: Outcome, _: Option<Duration>) {}

    pub(crate) const fn publish(&self, _: &GaugeHandle, _: Reading, _: u64) {}
}

#[derive(Debug, Clone)]
pub(crate) struct KeyedMeter;

#[expect(clippy::unused_self, reason = "its twin uses it")]
impl KeyedMeter {
    pub(crate) const fn new(_: &str, _: bool) -> Self {
        Self
    }

    pub(crate) const fn added(&self) {}

    pub(crate) const fn evicted(&self, _: usize, _: usize) {}

    pub(crate) const fn registry_dropped(&self, _: u32) {}

    pub(crate) const fn overflowed(&self) {}
}

#[expect(clippy::unused_self, reason = "its twin uses it")]
impl GaugeHandle {
    #[inline]
    pub(crate) const fn is_measured(&self) -> bool {
        false
    }

    #[inline]
    pub(crate) const fn read(&self, _: &State, _: &[Event]) -> Reading {
        Reading
    }
}
