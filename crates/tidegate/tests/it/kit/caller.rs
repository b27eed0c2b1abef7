//! Futures polled by hand, and shorthands for costs and durations.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use tidegate::{Cost, Permit, Random, Refused, Slots, Throttle};
use tokio::task::coop::unconstrained;

pub(crate) const REQUEST: Cost = Cost::request();

pub(crate) const fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

pub(crate) const fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// A throttle with slots alone, and without randomness.
pub(crate) fn slots(slots: u32) -> Throttle {
    let builder = Throttle::builder().slots(Slots::fixed(slots)).random(Random::fixed(0.0));
    builder.build().expect("within the bounds")
}

/// A future of `acquire` that the test polls by hand, with a count of its wake-ups.
pub(crate) struct Caller<'a> {
    future: Pin<Box<dyn Future<Output = Result<Permit<'a>, Refused>> + 'a>>,
    wakes: Arc<Wakes>,
}

/// Counts how often its waker was called.
#[derive(Default)]
pub(crate) struct Wakes(AtomicUsize);

impl Wakes {
    pub(crate) fn count(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

impl<'a> Caller<'a> {
    /// Without a cooperative budget: a test that polls by hand does not return to the runtime, which would renew it.
    pub(crate) fn new(future: impl Future<Output = Result<Permit<'a>, Refused>> + 'a) -> Self {
        Self { future: Box::pin(unconstrained(future)), wakes: Arc::default() }
    }

    /// A caller that has been polled once and is queued.
    pub(crate) fn queued(throttle: &'a Throttle, cost: Cost) -> Self {
        let mut caller = Self::new(throttle.acquire(cost));
        assert!(caller.poll().is_pending(), "the caller must wait");
        caller
    }

    pub(crate) fn poll(&mut self) -> Poll<Result<Permit<'a>, Refused>> {
        let waker = Waker::from(Arc::clone(&self.wakes));
        self.future.as_mut().poll(&mut Context::from_waker(&waker))
    }

    pub(crate) fn wakes(&self) -> usize {
        self.wakes.count()
    }

    /// The permit, if it has been granted.
    pub(crate) fn permit(&mut self) -> Option<Permit<'a>> {
        match self.poll() {
            Poll::Ready(Ok(permit)) => Some(permit),
            Poll::Ready(Err(refused)) => panic!("refused: {refused}"),
            Poll::Pending => None,
        }
    }

    /// The refusal, if there is one.
    pub(crate) fn refused(&mut self) -> Option<Refused> {
        match self.poll() {
            Poll::Ready(Err(refused)) => Some(refused),
            Poll::Ready(Ok(_)) => panic!("admitted"),
            Poll::Pending => None,
        }
    }
}

/// Runs every task that can make progress, without advancing the clock.
pub(crate) async fn settle_tasks() {
    for _ in 0..50 {
        tokio::task::yield_now().await;
    }
}
