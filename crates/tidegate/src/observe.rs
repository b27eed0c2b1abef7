//! Observability: traces and metrics, both emitted after the lock is released.
//!
//! Each is a feature with a no-op twin, so that this file and its callers are the same with and without it.
//! An unmeasured throttle keeps its fast path; a measured one takes the slow path, where everything is
//! counted.

use std::sync::Arc;
use std::time::Duration;

use tidegate_core::event::Event;
use tidegate_core::outcome::Outcome;
use tidegate_core::refused::Refused;
use tidegate_core::time::Instant;
use tidegate_core::verdict::Gate;

use crate::events::Sinks;
use crate::meter::{GaugeHandle, Meter, Reading};
use crate::throttle::Inner;
use crate::traces::Traces;

/// The observers of throttles of one kind, and their name.
#[derive(Debug)]
pub(crate) struct Observer {
    name: Arc<str>,
    traces: Traces,
    meter: Meter,
}

/// Since when a caller has waited, and for which gate.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WaitTimer {
    since: Instant,
    by: Gate,
}

impl Observer {
    /// Registers the metrics, once for all throttles that share it.
    pub(crate) fn new(name: &str, is_measured: bool) -> Self {
        Self { name: name.into(), traces: Traces::new(), meter: Meter::new(name, is_measured) }
    }

    /// One throttle's contribution to the gauges.
    pub(crate) fn gauge_handle(&self) -> GaugeHandle {
        self.meter.gauge_handle()
    }

    /// Enqueues events for tracing, under the throttle's lock. Returns whether there is anything to deliver.
    #[inline]
    pub(crate) fn post(&self, throttle: &Inner, events: &[Event]) -> bool {
        self.traces.post(throttle, events)
    }

    /// Delivers the enqueued events in order, unless another thread is already delivering.
    pub(crate) fn deliver(&self, sinks: &Sinks) {
        self.traces.deliver(&self.name, sinks);
    }

    /// Reports an evicted key, whose label is only created for subscribers. Called without any lock.
    pub(crate) fn evicted(
        &self,
        sinks: &Sinks,
        cause: &'static str,
        label: impl Fn() -> Option<String> + Send + 'static,
    ) {
        if self.traces.evicted(cause, label) {
            self.deliver(sinks);
        }
    }

    /// Reports that a registry is full. Called without any lock.
    pub(crate) fn overflowed(&self, sinks: &Sinks, keys_max: usize) {
        if self.traces.overflowed(keys_max) {
            self.deliver(sinks);
        }
    }

    /// Events lost to slow subscribers.
    pub(crate) fn lost(&self) -> u64 {
        self.traces.lost()
    }
}

impl Inner {
    /// Starts to time a wait, if it is observed.
    #[inline]
    pub(crate) fn start_wait_timer(&self, by: Gate) -> Option<WaitTimer> {
        let is_counted = self.gauge_handle.is_measured() || self.setup().counters.is_some();
        (is_counted || Traces::traces_waits()).then(|| WaitTimer { since: self.clock().now(), by })
    }

    /// An acquire completed, at once or after a wait.
    #[inline]
    pub(crate) fn observe_acquire(&self, wait_timer: Option<WaitTimer>, answer: Result<(), &Refused>) {
        let is_measured = self.gauge_handle.is_measured();
        if is_measured || wait_timer.is_some() || answer.is_err() {
            self.report_acquire(wait_timer, answer, is_measured);
        }
    }

    /// A caller has left the queue without a result: its wait counts.
    pub(crate) fn observe_abandoned(&self, wait_timer: Option<WaitTimer>) {
        if let (Some(wait_timer), Some(counters)) = (wait_timer, &self.setup().counters) {
            counters.record_acquire(Some(self.clock().now().since(wait_timer.since)), false);
        }
    }

    #[cold]
    #[inline(never)]
    fn report_acquire(&self, wait_timer: Option<WaitTimer>, answer: Result<(), &Refused>, is_measured: bool) {
        let waited = wait_timer.map(|wait_timer| (wait_timer.by, self.clock().now().since(wait_timer.since)));
        let setup = self.setup();
        if let Some(counters) = &setup.counters {
            counters.record_acquire(waited.map(|(_, span)| span), answer.is_err());
        }
        let is_traced = Traces::traces_waits() && (waited.is_some() || answer.is_err());
        if !is_measured && !is_traced {
            return;
        }
        setup.sinks.guard(|| {
            if is_measured {
                setup.observer.meter.record_acquire(waited.map_or(Duration::ZERO, |(_, span)| span), answer);
            }
            if is_traced {
                Traces::trace_acquire(&setup.observer.name, self, waited, answer);
            }
        });
    }

    /// A request, or a part of one, completed.
    #[inline]
    pub(crate) fn observe_outcome(&self, outcome: Outcome, since_entry: Option<Duration>) {
        if self.gauge_handle.is_measured() {
            let setup = self.setup();
            let latency = outcome.latency().or(since_entry);
            setup.sinks.guard(|| setup.observer.meter.record_outcome(outcome, latency));
        }
    }

    /// Updates the metrics, if it is measured.
    pub(crate) fn show(&self) {
        if self.gauge_handle.is_measured() {
            let reading = self.gauge_handle.read(&self.lock(), &[]);
            self.publish(reading);
        }
    }

    /// Publishes a reading that was taken under the lock.
    #[inline]
    pub(crate) fn publish(&self, reading: Reading) {
        if self.gauge_handle.is_measured() {
            let setup = self.setup();
            let lost = setup.all_events_lost();
            setup.sinks.guard(|| setup.observer.meter.publish(&self.gauge_handle, reading, lost));
        }
    }
}
