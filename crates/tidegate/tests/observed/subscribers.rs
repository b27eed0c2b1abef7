//! Subscribers that stay alive across tests, so that no callsite is cached as disabled.

use std::sync::LazyLock;

use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::Interest;
use tracing::{Dispatch, Event, Metadata, Subscriber};

/// A subscriber that is interested in nothing, decided per event.
struct Undecided;

impl Subscriber for Undecided {
    fn register_callsite(&self, _: &'static Metadata<'static>) -> Interest {
        Interest::sometimes()
    }

    fn enabled(&self, _: &Metadata<'_>) -> bool {
        false
    }

    /// Leaves the level filter to the test's own subscriber.
    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::OFF)
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &Event<'_>) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// Call this first in every test that emits events.
///
/// With fewer than two subscribers in the process, `tracing` evaluates a callsite only on the thread that
/// emits it first, and caches the result for the other threads.
pub(crate) fn keep_undecided() {
    static SUBSCRIBERS: LazyLock<[Dispatch; 2]> =
        LazyLock::new(|| [Dispatch::new(Undecided), Dispatch::new(Undecided)]);
    LazyLock::force(&SUBSCRIBERS);
}
