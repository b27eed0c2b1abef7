//! Broadcasts server events to a bounded number of listeners, each with a bounded backlog.
//!
//! Senders never wait. A slow listener loses events and receives their number.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tidegate::store::SweepReport;
use tidegate::{LimitError, LimitEvent, Limiter, Subject};
use tidegate_client::{EntityId, Event, ResourceName};
use tidegate_core::limit::token::TokenId;
use tokio::sync::{broadcast, watch};

use crate::slots::{AtCapacity, Slot, Slots};
use crate::top_subjects::TopSubjects;

/// Backlog of a listener, in events.
const BACKLOG_MAX: usize = 256;

/// The event broadcast.
pub(crate) struct EventBroadcast {
    events: broadcast::Sender<Arc<Event>>,
    slots: Arc<Slots>,
    is_closed: watch::Sender<bool>,
    expired: [AtomicU64; 2],
    busy: AtomicU64,
    top: TopSubjects,
}

/// A subscription and the slot it occupies.
pub(crate) struct Subscription {
    events: broadcast::Receiver<Arc<Event>>,
    is_closed: watch::Receiver<bool>,
    _slot: Slot,
}

impl EventBroadcast {
    /// Creates a broadcast that forwards the limiter's events.
    pub(crate) fn new(limiter: &Limiter, listeners_max: usize) -> Self {
        let (events, _) = broadcast::channel(BACKLOG_MAX);
        let sender = events.clone();
        limiter.on_event(move |event| {
            if sender.receiver_count() > 0
                && let Some(event) = convert(event)
            {
                let _ = sender.send(Arc::new(event));
            }
        });
        Self {
            events,
            slots: Slots::new(listeners_max),
            is_closed: watch::Sender::new(false),
            expired: Default::default(),
            busy: AtomicU64::new(0),
            top: TopSubjects::default(),
        }
    }

    /// Subscribes with this token, unless it has its share of the listeners.
    pub(crate) fn subscribe(&self, token: &TokenId) -> Result<Subscription, AtCapacity> {
        let slot = self.slots.take(token)?;
        let (events, is_closed) = (self.events.subscribe(), self.is_closed.subscribe());
        Ok(Subscription { events, is_closed, _slot: slot })
    }

    /// The current and the maximum number of listeners.
    pub(crate) fn listeners(&self) -> (usize, usize) {
        (self.slots.used(), self.slots.max())
    }

    /// Sends an event to all listeners. Without listeners, the event is not constructed.
    pub(crate) fn send(&self, event: impl FnOnce() -> Event) {
        if self.events.receiver_count() > 0 {
            let _ = self.events.send(Arc::new(event()));
        }
    }

    /// Counts a grant for the busiest subjects. They are counted only while a listener is connected, because each grant
    /// takes a lock.
    pub(crate) fn granted(&self, subject: impl FnOnce() -> Subject) {
        if self.events.receiver_count() > 0 {
            self.top.granted(subject());
        }
    }

    /// The busiest subjects, by the grants that were counted.
    pub(crate) const fn top(&self) -> &TopSubjects {
        &self.top
    }

    /// Broadcasts a refusal if a limit caused it; ignores other errors.
    pub(crate) fn refused(&self, error: &LimitError, entity: &EntityId, resource: &ResourceName) {
        if let Some(line) = error.limited().and_then(|limited| limited.primary()) {
            self.send(|| Event::Refused {
                entity: entity.clone(),
                resource: resource.clone(),
                of: line.balance.subject.one_entity().cloned().map(Into::into),
                limit: line.balance.key().to_string(),
                retry_after: line.balance.retry_after.map(Into::into),
            });
        }
    }

    pub(crate) fn swept(&self, swept: SweepReport) {
        let SweepReport { settled, returned, .. } = swept;
        if settled + returned > 0 {
            self.expired[0].fetch_add(settled, Ordering::Relaxed);
            self.expired[1].fetch_add(returned, Ordering::Relaxed);
            self.send(|| Event::LeasesExpired { settled, returned });
        }
    }

    /// The maximum number of concurrent requests is reached.
    pub(crate) fn busy(&self, requests_max: usize) {
        self.busy.fetch_add(1, Ordering::Relaxed);
        self.send(|| Event::Busy { requests_max: requests_max as u64 });
    }

    /// Expired leases (settled, returned) and requests rejected because the server was at capacity.
    pub(crate) fn counters(&self) -> ([u64; 2], u64) {
        let expired = [0, 1].map(|how: usize| self.expired[how].load(Ordering::Relaxed));
        (expired, self.busy.load(Ordering::Relaxed))
    }

    /// Ends all current and future subscriptions.
    pub(crate) fn close(&self) {
        self.is_closed.send_replace(true);
    }
}

impl Subscription {
    /// The next event; after the last one, [`Event::Stopping`].
    pub(crate) async fn next(&mut self) -> Arc<Event> {
        tokio::select! {
            biased;
            () = closed(&mut self.is_closed) => Arc::new(Event::Stopping),
            event = self.events.recv() => match event {
                Ok(event) => event,
                Err(broadcast::error::RecvError::Lagged(dropped)) => Arc::new(Event::Lagged { dropped }),
                Err(broadcast::error::RecvError::Closed) => Arc::new(Event::Stopping),
            },
        }
    }

    /// Returns the output of `work`, or `None` if the broadcast closes first.
    pub(crate) async fn unless_closed<T>(&mut self, work: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            () = closed(&mut self.is_closed) => None,
            done = work => Some(done),
        }
    }
}

async fn closed(is_closed: &mut watch::Receiver<bool>) {
    // A dropped sender counts as closed.
    let _ = is_closed.wait_for(|is_closed| *is_closed).await;
}

/// Converts a limiter event. Lease ids are omitted: they are half of the credential that lease holders keep.
fn convert(event: &LimitEvent) -> Option<Event> {
    Some(match event {
        LimitEvent::StoreAway { span } => Event::StoreAway { span: (*span).into() },
        LimitEvent::StoreBack => Event::StoreBack,
        LimitEvent::Degraded { subject, .. } => Event::Degraded {
            entity: subject.entity.clone().into(),
            resource: subject.resource.clone().into(),
        },
        LimitEvent::Unsettled { waiting, .. } => Event::Unsettled { waiting: *waiting as u64 },
        LimitEvent::DebtBound { bucket, limit, debt_max } => Event::DebtBound {
            entity: bucket.one_entity().cloned().map(Into::into),
            resource: bucket.one_resource().cloned().map(Into::into),
            limit: limit.to_string(),
            debt_max: *debt_max,
        },
        LimitEvent::RulesStale { subject } => Event::RulesStale {
            entity: subject.entity.clone().into(),
            resource: subject.resource.clone().into(),
        },
        LimitEvent::QueueFull { waiters_max } => Event::QueueFull { waiters_max: *waiters_max as u64 },
        // An event type newer than this server.
        _ => return None,
    })
}

impl fmt::Debug for EventBroadcast {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EventBroadcast").field("listeners", &self.listeners()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use tidegate::Memory;

    use super::*;

    fn token(id: &str) -> TokenId {
        TokenId::new(id).expect("valid")
    }

    fn busy(events: &EventBroadcast) {
        events.send(|| Event::Busy { requests_max: 1 });
    }

    #[tokio::test]
    async fn slow_listener_gets_lag_count_and_continues() {
        let events = EventBroadcast::new(&Limiter::new(Memory::new()), 2);
        let (mut slow, mut quick) =
            (events.subscribe(&token("slow")).unwrap(), events.subscribe(&token("quick")).unwrap());
        for _ in 0..BACKLOG_MAX + 7 {
            busy(&events);
            assert_eq!(quick.next().await.name(), "busy");
        }
        assert_eq!(*slow.next().await, Event::Lagged { dropped: 7 });
        for _ in 0..BACKLOG_MAX {
            assert_eq!(slow.next().await.name(), "busy");
        }
    }

    #[tokio::test]
    async fn dropped_listener_frees_slot_and_close_ends_all() {
        let events = EventBroadcast::new(&Limiter::new(Memory::new()), 1);
        let subscribe = || events.subscribe(&token("ci"));
        let first = subscribe().unwrap();
        assert_eq!((subscribe().err(), events.listeners()), (Some(AtCapacity::Full), (1, 1)));
        drop(first);
        let mut second = subscribe().unwrap();
        busy(&events);
        events.close();
        assert_eq!(*second.next().await, Event::Stopping, "before pending events");
        drop(second);
        assert_eq!(*subscribe().unwrap().next().await, Event::Stopping);
    }
}
