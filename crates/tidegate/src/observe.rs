//! Telling those who watch from outside: traces and metrics, both after the lock is gone.
//!
//! Each is a feature with a twin that does nothing, so that this file, and all that calls it, is the same whether
//! they are built in or not. A throttle that nobody measures takes the short way in as before; one that is
//! measured takes the long one, where everything is counted.

use std::sync::Arc;
use std::time::Duration;

use tidegate_core::event::Event;
use tidegate_core::outcome::Outcome;
use tidegate_core::refused::Refused;
use tidegate_core::time::Instant;
use tidegate_core::verdict::Gate;

use crate::events::Sinks;
use crate::meter::{Gauged, Meter, Reading};
use crate::throttle::Inner;
use crate::traces::Traces;

/// Who watches the throttles of a kind, and what these are called.
#[derive(Debug)]
pub(crate) struct Observer {
    name: Arc<str>,
    traces: Traces,
    meter: Meter,
}

/// Since when a caller has waited, and for which gate.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Watch {
    since: Instant,
    by: Gate,
}

impl Observer {
    /// Registers what is to be measured, once for all throttles that share it.
    pub(crate) fn new(name: &str, is_measured: bool) -> Self {
        Self { name: name.into(), traces: Traces::new(), meter: Meter::new(name, is_measured) }
    }

    /// What one throttle adds to the gauges.
    pub(crate) fn gauged(&self) -> Gauged {
        self.meter.gauged()
    }

    /// Takes events in to be traced, under the throttle's lock. Answers whether there is anything to tell.
    #[inline]
    pub(crate) fn post(&self, throttle: &Inner, events: &[Event]) -> bool {
        self.traces.post(throttle, events)
    }

    /// Tells what was taken in, in order, unless somebody is doing so already.
    pub(crate) fn tell(&self, sinks: &Sinks) {
        self.traces.tell(&self.name, sinks);
    }

    /// A registry has forgotten a key, which is put into words only if somebody hears. Called without any lock.
    pub(crate) fn evicted(
        &self,
        sinks: &Sinks,
        cause: &'static str,
        words: impl Fn() -> Option<String> + Send + 'static,
    ) {
        if self.traces.evicted(cause, words) {
            self.tell(sinks);
        }
    }

    /// A registry has no room for a new key. Called without any lock.
    pub(crate) fn overflowed(&self, sinks: &Sinks, keys_max: usize) {
        if self.traces.overflowed(keys_max) {
            self.tell(sinks);
        }
    }

    /// Events lost to subscribers that were too slow.
    pub(crate) fn lost(&self) -> u64 {
        self.traces.lost()
    }
}

impl Inner {
    /// Starts to time a wait, if anybody wants to know.
    #[inline]
    pub(crate) fn watch(&self, by: Gate) -> Option<Watch> {
        let is_counted = self.gauged.is_measured() || self.setup().tally.is_some();
        (is_counted || Traces::hears_waits()).then(|| Watch { since: self.clock().now(), by })
    }

    /// A caller has its answer: at once, or after a wait.
    #[inline]
    pub(crate) fn answered(&self, watch: Option<Watch>, answer: Result<(), &Refused>) {
        let is_measured = self.gauged.is_measured();
        if is_measured || watch.is_some() || answer.is_err() {
            self.tell_answer(watch, answer, is_measured);
        }
    }

    /// A caller has left the line without an answer: it has waited all the same.
    pub(crate) fn gave_up(&self, watch: Option<Watch>) {
        if let (Some(watch), Some(tally)) = (watch, &self.setup().tally) {
            tally.answered(Some(self.clock().now().since(watch.since)), false);
        }
    }

    #[cold]
    #[inline(never)]
    fn tell_answer(&self, watch: Option<Watch>, answer: Result<(), &Refused>, is_measured: bool) {
        let waited = watch.map(|watch| (watch.by, self.clock().now().since(watch.since)));
        let setup = self.setup();
        if let Some(tally) = &setup.tally {
            tally.answered(waited.map(|(_, span)| span), answer.is_err());
        }
        let is_heard = Traces::hears_waits() && (waited.is_some() || answer.is_err());
        if !is_measured && !is_heard {
            return;
        }
        setup.sinks.guard(|| {
            if is_measured {
                setup.observer.meter.answered(waited.map_or(Duration::ZERO, |(_, span)| span), answer);
            }
            if is_heard {
                Traces::answered(&setup.observer.name, self, waited, answer);
            }
        });
    }

    /// A request ended, or a part of one.
    #[inline]
    pub(crate) fn ended(&self, outcome: Outcome, since_entry: Option<Duration>) {
        if self.gauged.is_measured() {
            let setup = self.setup();
            let latency = outcome.latency().or(since_entry);
            setup.sinks.guard(|| setup.observer.meter.ended(outcome, latency));
        }
    }

    /// Shows what there is to see now, where it is measured.
    pub(crate) fn show(&self) {
        if self.gauged.is_measured() {
            let reading = self.gauged.read(&self.lock(), &[]);
            self.publish(reading);
        }
    }

    /// Shows what was read under the lock.
    #[inline]
    pub(crate) fn publish(&self, reading: Reading) {
        if self.gauged.is_measured() {
            let setup = self.setup();
            let lost = setup.all_events_lost();
            setup.sinks.guard(|| setup.observer.meter.publish(&self.gauged, reading, lost));
        }
    }
}
