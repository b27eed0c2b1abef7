//! What stands in for metrics where the feature `metrics` is off: nothing, and nothing is left of it.

use std::time::Duration;

use tidegate_core::event::Event;
use tidegate_core::outcome::Outcome;
use tidegate_core::refused::Refused;

use crate::state::State;

#[derive(Debug)]
pub(crate) struct Meter;

#[derive(Debug)]
pub(crate) struct Gauged;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Reading;

#[expect(clippy::unused_self, reason = "its twin has something to show")]
impl Meter {
    pub(crate) const fn new(_: &str, _: bool) -> Self {
        Self
    }

    pub(crate) const fn gauged(&self) -> Gauged {
        Gauged
    }

    pub(crate) const fn answered(&self, _: Duration, _: Result<(), &Refused>) {}

    pub(crate) const fn ended(&self, _: Outcome, _: Option<Duration>) {}

    pub(crate) const fn publish(&self, _: &Gauged, _: Reading, _: u64) {}
}

#[derive(Debug, Clone)]
pub(crate) struct KeyedMeter;

#[expect(clippy::unused_self, reason = "its twin has something to show")]
impl KeyedMeter {
    pub(crate) const fn new(_: &str, _: bool) -> Self {
        Self
    }

    pub(crate) const fn added(&self) {}

    pub(crate) const fn evicted(&self, _: usize, _: usize) {}

    pub(crate) const fn forgotten(&self, _: u32) {}

    pub(crate) const fn overflowed(&self) {}
}

#[expect(clippy::unused_self, reason = "its twin knows")]
impl Gauged {
    #[inline]
    pub(crate) const fn is_measured(&self) -> bool {
        false
    }

    #[inline]
    pub(crate) const fn read(&self, _: &State, _: &[Event]) -> Reading {
        Reading
    }
}
