//! What happens to throttles, as events of the `tracing` crate, under the target `tidegate`.
//!
//! Events are taken in under the throttle's lock and told after it, one at a time, so their order is the order in
//! which they happened. Under the lock only a number is compared: the most that any subscriber wants to hear. The
//! subscribers themselves are somebody's code, and are asked after it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tidegate_core::event::Event;
use tidegate_core::refused::Refused;
use tidegate_core::verdict::Gate;
use tracing::level_filters::LevelFilter;
use tracing::{Level, debug, info, warn};

use crate::events::Sinks;
use crate::outbox::Outbox;
use crate::throttle::Inner;

/// One event, about one throttle; nothing of it is worked out unless a subscriber wants it.
macro_rules! tell {
    ($level:ident, $whose:expr, $message:literal $(, $($fields:tt)+)?) => {
        $level!(
            target: "tidegate",
            throttle = $whose.name,
            key = $whose.key().as_deref(),
            $($($fields)+,)?
            $message
        )
    };
}

/// Events on their way to the subscribers.
pub(crate) struct Traces {
    outbox: Outbox<Told>,
}

enum Told {
    /// Something happened to a throttle; whose it is, where a registry knows its key.
    Happened { throttle: Option<Arc<Inner>>, event: Event },
    /// A registry has forgotten a key.
    Evicted { words: Box<dyn Fn() -> Option<String> + Send>, cause: &'static str },
    /// A registry has no room for a new key.
    Overflowed { keys_max: usize },
}

/// Whom an event is about.
struct Whose<'a> {
    name: &'a str,
    words: &'a dyn Fn() -> Option<String>,
}

impl Whose<'_> {
    /// The throttle's key in words, made only when somebody hears them.
    fn key(&self) -> Option<String> {
        (self.words)()
    }
}

impl Traces {
    pub(crate) fn new() -> Self {
        Self { outbox: Outbox::default() }
    }

    /// Takes in those of `events` that anybody may want to hear. Called under the throttle's lock.
    pub(crate) fn post(&self, throttle: &Inner, events: &[Event]) -> bool {
        let most = LevelFilter::current();
        let mut is_posted = false;
        for event in events.iter().filter(|event| level(event) <= most) {
            let throttle = throttle.setup().sinks.registry().and_then(|_| throttle.itself());
            self.outbox.put(Told::Happened { throttle, event: event.clone() });
            is_posted = true;
        }
        is_posted
    }

    /// Takes in that a key was forgotten, if anybody may want to hear.
    pub(crate) fn evicted(
        &self,
        cause: &'static str,
        words: impl Fn() -> Option<String> + Send + 'static,
    ) -> bool {
        let is_heard = LevelFilter::current() >= Level::DEBUG;
        if is_heard {
            self.outbox.put(Told::Evicted { words: Box::new(words), cause });
        }
        is_heard
    }

    /// Takes in that there is no room for a new key, if anybody may want to hear.
    pub(crate) fn overflowed(&self, keys_max: usize) -> bool {
        let is_heard = LevelFilter::current() >= Level::WARN;
        if is_heard {
            self.outbox.put(Told::Overflowed { keys_max });
        }
        is_heard
    }

    /// Tells the subscribers; their panics are caught and counted.
    pub(crate) fn tell(&self, name: &str, sinks: &Sinks) {
        self.outbox.deliver(|told| {
            sinks.guard(move || match told {
                Told::Happened { throttle, event } => {
                    tell(&Whose { name, words: &|| throttle.as_ref()?.label() }, &event);
                }
                Told::Evicted { words, cause } => {
                    tell!(debug, Whose { name, words: &words }, "evicted", cause);
                }
                Told::Overflowed { keys_max } => {
                    tell!(warn, Whose { name, words: &|| None }, "overflowed", keys_max);
                }
            });
        });
    }

    pub(crate) fn lost(&self) -> u64 {
        self.outbox.lost()
    }

    /// Whether waits and refusals may be heard.
    #[inline]
    pub(crate) fn hears_waits() -> bool {
        LevelFilter::current() >= Level::DEBUG
    }

    /// A caller has waited, or was refused.
    pub(crate) fn answered(
        name: &str,
        throttle: &Inner,
        waited: Option<(Gate, Duration)>,
        answer: Result<(), &Refused>,
    ) {
        let throttle = throttle.itself();
        let whose = Whose { name, words: &|| throttle.as_ref()?.label() };
        match answer {
            Ok(()) => tell!(
                debug,
                whose,
                "waited",
                gate = waited.map(|(gate, _)| tracing::field::display(gate)),
                waited_seconds = waited.map(|(_, span)| span.as_secs_f64())
            ),
            Err(refused) => tell!(
                debug,
                whose,
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

/// How loud an event is: a warning for what callers feel at once, information for what an operator would ask about,
/// and the rest for whoever looks closely.
const fn level(event: &Event) -> Level {
    match event {
        Event::CircuitOpened { .. } => Level::WARN,
        Event::Slowed { .. }
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

fn tell(whose: &Whose<'_>, event: &Event) {
    match event {
        Event::CircuitOpened { span, why } => {
            tell!(warn, whose, "circuit opened", span_seconds = span.as_secs_f64(), why = ?why);
        }
        Event::CircuitHalfOpened => tell!(info, whose, "circuit half-opened"),
        Event::CircuitClosed => tell!(info, whose, "circuit closed"),
        Event::Paused { span, .. } => {
            tell!(info, whose, "paused", span_seconds = span.as_secs_f64());
        }
        Event::PauseCapped { asked, capped } => tell!(
            info,
            whose,
            "pause capped",
            asked_seconds = asked.as_secs_f64(),
            capped_seconds = capped.as_secs_f64()
        ),
        Event::Resumed => tell!(info, whose, "resumed"),
        Event::Retuned => tell!(info, whose, "retuned"),
        Event::Closed { in_flight } => tell!(info, whose, "closed", in_flight),
        Event::Drained => tell!(info, whose, "drained"),
        Event::QueueFull { waiters_max } => tell!(debug, whose, "queue full", waiters_max),
        Event::BudgetCoarsened => tell!(debug, whose, "budget coarsened"),
        Event::GrantUnseen { span } => {
            tell!(debug, whose, "grant unseen", span_seconds = span.as_secs_f64());
        }
        Event::Progressed { percent, completed, total } => {
            tell!(debug, whose, "progressed", percent, completed, total);
        }
        tuned => tell_tuned(whose, tuned),
    }
}

/// What a controller did.
fn tell_tuned(whose: &Whose<'_>, event: &Event) {
    match event {
        Event::Slowed { slots, interval, rate, why } => tell!(
            info,
            whose,
            "slowed",
            slots_from = slots.from,
            slots_to = slots.to,
            interval_from_seconds = interval.from.as_secs_f64(),
            interval_to_seconds = interval.to.as_secs_f64(),
            rate_from = rate.map(|rate| rate.from.as_f64()),
            rate_to = rate.map(|rate| rate.to.as_f64()),
            why = ?why
        ),
        Event::SpedUp { slots, interval, rate } => tell!(
            debug,
            whose,
            "sped up",
            slots_from = slots.from,
            slots_to = slots.to,
            interval_from_seconds = interval.from.as_secs_f64(),
            interval_to_seconds = interval.to.as_secs_f64(),
            rate_from = rate.map(|rate| rate.from.as_f64()),
            rate_to = rate.map(|rate| rate.to.as_f64())
        ),
        Event::Controlled { reason } => tell!(
            info,
            whose,
            "reason changed",
            reason_from = reason.from.as_str(),
            reason_to = reason.to.as_str()
        ),
        Event::Recovered { rate } => tell!(info, whose, "recovered", rate = rate.as_f64()),
        Event::CeilingLifted { ceiling } => {
            tell!(debug, whose, "ceiling lifted", ceiling_from = ceiling.from, ceiling_to = ceiling.to);
        }
        // Events that come to be later are heard before they have a name of their own here.
        other => tell!(debug, whose, "something happened", event = ?other),
    }
}
