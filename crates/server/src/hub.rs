//! What happens to a server, told to those who listen: at most so many, each with so many events that it has not heard.
//!
//! Whoever tells never waits. A listener that is too slow misses events, and is told how many.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tidegate::store::Swept;
use tidegate::{LimitError, LimitEvent, Limiter};
use tidegate_client::{EntityId, Event, ResourceName};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, broadcast, watch};

/// Events that a listener may be behind.
const BEHIND_MAX: usize = 256;

/// Where events meet those who listen.
pub(crate) struct Hub {
    events: broadcast::Sender<Arc<Event>>,
    places: Arc<Semaphore>,
    listeners_max: usize,
    is_closed: watch::Sender<bool>,
    expired: [AtomicU64; 2],
    busy: AtomicU64,
}

/// One who listens, and the place that it takes.
pub(crate) struct Listening {
    events: broadcast::Receiver<Arc<Event>>,
    is_closed: watch::Receiver<bool>,
    _place: OwnedSemaphorePermit,
}

impl Hub {
    /// A hub that hears the limiter.
    pub(crate) fn new(limiter: &Limiter, listeners_max: usize) -> Self {
        let (events, _) = broadcast::channel(BEHIND_MAX);
        let listeners_max = listeners_max.min(Semaphore::MAX_PERMITS);
        let heard = events.clone();
        limiter.on_event(move |event| {
            if heard.receiver_count() > 0
                && let Some(event) = told(event)
            {
                let _ = heard.send(Arc::new(event));
            }
        });
        Self {
            events,
            places: Arc::new(Semaphore::new(listeners_max)),
            listeners_max,
            is_closed: watch::Sender::new(false),
            expired: Default::default(),
            busy: AtomicU64::new(0),
        }
    }

    /// A place among those who listen, unless as many do as may.
    pub(crate) fn listen(&self) -> Result<Listening, usize> {
        let place = Arc::clone(&self.places).try_acquire_owned().map_err(|_| self.listeners_max)?;
        let (events, is_closed) = (self.events.subscribe(), self.is_closed.subscribe());
        Ok(Listening { events, is_closed, _place: place })
    }

    /// How many listen, and how many may.
    pub(crate) fn listeners(&self) -> (usize, usize) {
        (self.listeners_max - self.places.available_permits(), self.listeners_max)
    }

    /// Tells all who listen. Without anybody, the event is not even made.
    pub(crate) fn tell(&self, event: impl FnOnce() -> Event) {
        if self.events.receiver_count() > 0 {
            let _ = self.events.send(Arc::new(event()));
        }
    }

    /// A limit refused somebody, or something else did.
    pub(crate) fn refused(&self, error: &LimitError, entity: &EntityId, resource: &ResourceName) {
        if let Some(line) = error.limited().and_then(|limited| limited.primary()) {
            self.tell(|| Event::Refused {
                entity: entity.clone(),
                resource: resource.clone(),
                of: line.balance.subject.entity.clone().into(),
                limit: line.balance.limit.to_string(),
                retry_after: line.balance.retry_after.map(Into::into),
            });
        }
    }

    pub(crate) fn swept(&self, swept: Swept) {
        let Swept { settled, returned, .. } = swept;
        if settled + returned > 0 {
            self.expired[0].fetch_add(settled, Ordering::Relaxed);
            self.expired[1].fetch_add(returned, Ordering::Relaxed);
            self.tell(|| Event::LeasesExpired { settled, returned });
        }
    }

    /// As many requests are under way as may.
    pub(crate) fn busy(&self, requests_max: usize) {
        self.busy.fetch_add(1, Ordering::Relaxed);
        self.tell(|| Event::Busy { requests_max: requests_max as u64 });
    }

    /// Leases that were settled and returned by their deadlines, and requests that found too many others.
    pub(crate) fn counted(&self) -> ([u64; 2], u64) {
        let expired = [0, 1].map(|how: usize| self.expired[how].load(Ordering::Relaxed));
        (expired, self.busy.load(Ordering::Relaxed))
    }

    /// Ends all listening, now and from now on.
    pub(crate) fn close(&self) {
        self.is_closed.send_replace(true);
    }
}

impl Listening {
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

    /// What comes of `work`, unless the hub is closed meanwhile.
    pub(crate) async fn unless_closed<T>(&mut self, work: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            () = closed(&mut self.is_closed) => None,
            done = work => Some(done),
        }
    }
}

async fn closed(is_closed: &mut watch::Receiver<bool>) {
    // A hub that is gone is closed.
    let _ = is_closed.wait_for(|is_closed| *is_closed).await;
}

/// What is told of what happened to the limiter. Ids of leases are left out: they are half of what their holders keep.
fn told(event: &LimitEvent) -> Option<Event> {
    Some(match event {
        LimitEvent::StoreAway { span } => Event::StoreAway { span: (*span).into() },
        LimitEvent::StoreBack => Event::StoreBack,
        LimitEvent::Degraded { subject, .. } => Event::Degraded {
            entity: subject.entity.clone().into(),
            resource: subject.resource.clone().into(),
        },
        LimitEvent::Unsettled { waiting, .. } => Event::Unsettled { waiting: *waiting as u64 },
        LimitEvent::RulesStale { subject } => Event::RulesStale {
            entity: subject.entity.clone().into(),
            resource: subject.resource.clone().into(),
        },
        LimitEvent::QueueFull { waiters_max } => Event::QueueFull { waiters_max: *waiters_max as u64 },
        // One that is newer than this server.
        _ => return None,
    })
}

impl fmt::Debug for Hub {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hub").field("listeners", &self.listeners()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use tidegate::Memory;

    use super::*;

    fn busy(hub: &Hub) {
        hub.tell(|| Event::Busy { requests_max: 1 });
    }

    #[tokio::test]
    async fn a_listener_that_is_too_slow_is_told_how_much_it_missed_and_goes_on() {
        let hub = Hub::new(&Limiter::new(Memory::new()), 2);
        let (mut slow, mut quick) = (hub.listen().unwrap(), hub.listen().unwrap());
        for _ in 0..BEHIND_MAX + 7 {
            busy(&hub);
            assert_eq!(quick.next().await.name(), "busy");
        }
        assert_eq!(*slow.next().await, Event::Lagged { dropped: 7 });
        for _ in 0..BEHIND_MAX {
            assert_eq!(slow.next().await.name(), "busy");
        }
    }

    #[tokio::test]
    async fn a_place_is_free_again_when_its_listener_is_gone_and_none_outlives_the_close() {
        let hub = Hub::new(&Limiter::new(Memory::new()), 1);
        let first = hub.listen().unwrap();
        assert_eq!((hub.listen().err(), hub.listeners()), (Some(1), (1, 1)));
        drop(first);
        let mut second = hub.listen().unwrap();
        busy(&hub);
        hub.close();
        assert_eq!(*second.next().await, Event::Stopping, "before what it has not heard");
        drop(second);
        assert_eq!(*hub.listen().unwrap().next().await, Event::Stopping);
    }
}
