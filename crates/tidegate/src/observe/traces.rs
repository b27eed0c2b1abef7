//! Events of throttles as events of the `tracing` crate, under the target `tidegate`.
//!
//! Events are enqueued under the throttle's lock and emitted after it, one at a time, so they keep their
//! order. Under the lock only the maximum level is compared. Subscribers are user code, and are called after
//! it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tidegate_core::event::Event;
use tidegate_core::refused::Refused;
use tidegate_core::verdict::Gate;
use tracing::level_filters::LevelFilter;
use tracing::{Level, debug, info, warn};

use crate::delivery_queue::DeliveryQueue;
use crate::events::Sinks;
use crate::throttle::Inner;

/// Emits one event about one throttle; its fields are only computed for a subscriber.
macro_rules! emit {
    ($level:ident, $source:expr, $message:literal $(, $($fields:tt)+)?) => {
        $level!(
            target: "tidegate",
            throttle = $source.name,
            key = $source.key().as_deref(),
            $($($fields)+,)?
            $message
        )
    };
}

/// Events that are queued for the subscribers.
pub(crate) struct Traces {
    queue: DeliveryQueue<TraceEvent>,
}

enum TraceEvent {
    /// An event of a throttle, with a handle if a registry knows its key.
    Throttle { throttle: Option<Arc<Inner>>, event: Event },
    /// A registry has evicted a key.
    Evicted { label: Box<dyn Fn() -> Option<String> + Send>, cause: &'static str },
    /// A registry is full.
    Overflowed { keys_max: usize },
}

/// The throttle an event is about.
struct Source<'a> {
    name: &'a str,
    label: &'a dyn Fn() -> Option<String>,
}

impl Source<'_> {
    /// The throttle's key as text, only created for a subscriber.
    fn key(&self) -> Option<String> {
        (self.label)()
    }
}

impl Traces {
    pub(crate) fn new() -> Self {
        Self { queue: DeliveryQueue::default() }
    }

    /// Enqueues those of `events` whose level is enabled. Called under the throttle's lock.
    pub(crate) fn post(&self, throttle: &Inner, events: &[Event]) -> bool {
        let most = LevelFilter::current();
        let mut has_events = false;
        for event in events.iter().filter(|event| level(event) <= most) {
            let throttle = throttle.setup().sinks.registry().and_then(|_| throttle.itself());
            self.queue.put(TraceEvent::Throttle { throttle, event: event.clone() });
            has_events = true;
        }
        has_events
    }

    /// Enqueues the eviction of a key, if its level is enabled.
    pub(crate) fn evicted(
        &self,
        cause: &'static str,
        label: impl Fn() -> Option<String> + Send + 'static,
    ) -> bool {
        let is_enabled = LevelFilter::current() >= Level::DEBUG;
        if is_enabled {
            self.queue.put(TraceEvent::Evicted { label: Box::new(label), cause });
        }
        is_enabled
    }

    /// Enqueues an overflow, if its level is enabled.
    pub(crate) fn overflowed(&self, keys_max: usize) -> bool {
        let is_enabled = LevelFilter::current() >= Level::WARN;
        if is_enabled {
            self.queue.put(TraceEvent::Overflowed { keys_max });
        }
        is_enabled
    }

    /// Emits the queued events; panics of subscribers are caught and counted.
    pub(crate) fn deliver(&self, name: &str, sinks: &Sinks) {
        self.queue.deliver(|trace_event| {
            sinks.guard(move || match trace_event {
                TraceEvent::Throttle { throttle, event } => {
                    emit(&Source { name, label: &|| throttle.as_ref()?.label() }, &event);
                }
                TraceEvent::Evicted { label, cause } => {
                    emit!(debug, Source { name, label: &label }, "evicted", cause);
                }
                TraceEvent::Overflowed { keys_max } => {
                    emit!(warn, Source { name, label: &|| None }, "overflowed", keys_max);
                }
            });
        });
    }

    pub(crate) fn lost(&self) -> u64 {
        self.queue.lost()
    }

    /// Whether waits and refusals are traced.
    #[inline]
    pub(crate) fn traces_waits() -> bool {
        LevelFilter::current() >= Level::DEBUG
    }

    /// A caller has waited or was refused.
    pub(crate) fn trace_acquire(
        name: &str,
        throttle: &Inner,
        waited: Option<(Gate, Duration)>,
        answer: Result<(), &Refused>,
    ) {
        let throttle = throttle.itself();
        let source = Source { name, label: &|| throttle.as_ref()?.label() };
        match answer {
            Ok(()) => emit!(
                debug,
                source,
                "waited",
                gate = waited.map(|(gate, _)| tracing::field::display(gate)),
                waited_seconds = waited.map(|(_, span)| span.as_secs_f64())
            ),
            Err(refused) => emit!(
                debug,
                source,
                "refused",
                gate = waited.map(|(gate, _)| tracing::field::display(gate)),
                waited_seconds = waited.map(|(_, span)| span.as_secs_f64()),
                reason = %refused
            ),
        }
    }
}

impl fmt::Debug for Traces {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Traces").finish_non_exhaustive()
    }
}

/// The level of an event: a warning if callers notice it at once, info if an operator would want to know, and
/// debug otherwise.
const fn level(event: &Event) -> Level {
    match event {
        Event::CircuitOpened { .. } => Level::WARN,
        Event::Slowed { .. }
        | Event::SpedUp { .. }
        | Event::Controlled { .. }
        | Event::Recovered { .. }
        | Event::CircuitHalfOpened
        | Event::CircuitClosed
        | Event::Paused { .. }
        | Event::PauseCapped { .. }
        | Event::Resumed
        | Event::Retuned
        | Event::Closed { .. }
        | Event::Drained => Level::INFO,
        _ => Level::DEBUG,
    }
}

fn emit(source: &Source<'_>, event: &Event) {
    match event {
        Event::CircuitOpened { span, why } => {
            emit!(warn, source, "circuit opened", span_seconds = span.as_secs_f64(), why = ?why);
        }
        Event::CircuitHalfOpened => emit!(info, source, "circuit half-opened"),
        Event::CircuitClosed => emit!(info, source, "circuit closed"),
        Event::Paused { span, .. } => {
            emit!(info, source, "paused", span_seconds = span.as_secs_f64());
        }
        Event::PauseCapped { asked, capped } => emit!(
            info,
            source,
            "pause capped",
            asked_seconds = asked.as_secs_f64(),
            capped_seconds = capped.as_secs_f64()
        ),
        Event::Resumed => emit!(info, source, "resumed"),
        Event::Retuned => emit!(info, source, "retuned"),
        Event::Closed { in_flight } => emit!(info, source, "closed", in_flight),
        Event::Drained => emit!(info, source, "drained"),
        Event::QueueFull { waiters_max } => emit!(debug, source, "queue full", waiters_max),
        Event::BudgetCoarsened => emit!(debug, source, "budget coarsened"),
        Event::GrantUnseen { span } => {
            emit!(debug, source, "grant unseen", span_seconds = span.as_secs_f64());
        }
        Event::Progressed { percent, completed, total } => {
            emit!(debug, source, "progressed", percent, completed, total);
        }
        other => emit_controller_event(source, other),
    }
}

/// Emits the event of a controller.
fn emit_controller_event(source: &Source<'_>, event: &Event) {
    match event {
        Event::Slowed { slots, interval, rate, why } => emit!(
            info,
            source,
            "slowed",
            slots_from = slots.from,
            slots_to = slots.to,
            interval_from_seconds = interval.from.as_secs_f64(),
            interval_to_seconds = interval.to.as_secs_f64(),
            rate_from = rate.map(|rate| rate.from.as_f64()),
            rate_to = rate.map(|rate| rate.to.as_f64()),
            why = ?why
        ),
        Event::SpedUp { slots, interval, rate } => emit!(
            info,
            source,
            "sped up",
            slots_from = slots.from,
            slots_to = slots.to,
            interval_from_seconds = interval.from.as_secs_f64(),
            interval_to_seconds = interval.to.as_secs_f64(),
            rate_from = rate.map(|rate| rate.from.as_f64()),
            rate_to = rate.map(|rate| rate.to.as_f64())
        ),
        Event::Controlled { reason } => emit!(
            info,
            source,
            "reason changed",
            reason_from = reason.from.as_str(),
            reason_to = reason.to.as_str()
        ),
        Event::Recovered { rate } => emit!(info, source, "recovered", rate = rate.as_f64()),
        Event::CeilingLifted { ceiling } => {
            emit!(debug, source, "ceiling lifted", ceiling_from = ceiling.from, ceiling_to = ceiling.to);
        }
        // Future events are emitted before they have a message here.
        other => emit!(debug, source, "other event", event = ?other),
    }
}
