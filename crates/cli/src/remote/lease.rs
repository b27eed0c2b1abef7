//! A lease that a server has given. The client renews it by itself.

use std::time::Duration;

use tidegate::Settled;
use tidegate_client::{Acquire, Client, ClientError, Cost, Lease};
use tokio::time::{Instant, sleep};

use super::trouble;
use crate::backend::{Ask, Granted, Hold};
use crate::failure::Failure;

/// Nobody asks a server to wait for longer at once: it has a bound of its own, and connections are cut on the way.
const AT_ONCE: Duration = Duration::from_secs(30);
/// A server that lets nobody wait for even this is told as it is.
const AT_ONCE_MIN: Duration = Duration::from_millis(1);
/// Nobody asks again sooner, and an end that was not heard is said again after this.
const AGAIN: Duration = Duration::from_millis(100);

/// A lease that is held.
pub(crate) struct Held {
    lease: Lease,
    patience: Duration,
}

impl Held {
    /// Draws what is asked for, and waits for it as long as that was said: at the server for a while, and here for what comes
    /// later.
    pub(super) async fn draw(
        client: &Client,
        ask: &Ask,
        cost: Cost,
        patience: Duration,
    ) -> Result<Self, Failure> {
        let (entity, resource) = (ask.subject.entity.clone(), ask.subject.resource.clone());
        let mut request = Acquire::new(entity.into(), resource.into(), cost);
        request.deadline = Some(ask.deadline.into());
        let until = ask.within.and_then(|within| Instant::now().checked_add(within));
        let mut at_once = AT_ONCE;
        loop {
            // A time that cannot be counted up to is forever.
            let left = until.map(|until| until.saturating_duration_since(Instant::now())).or(ask.within);
            request.within = left.map(|left| left.min(at_once).into());
            let error = match client.acquire(&request).await {
                Ok(lease) => return Ok(Self { lease, patience }),
                Err(error) => error,
            };
            let after = error.retry_after().filter(|_| matches!(error, ClientError::Refused { .. }));
            match (after, left) {
                (Some(after), Some(left)) if after <= left && left > at_once => {
                    // Back in time to wait at the server for what is left, in the order of asking.
                    sleep(after.saturating_sub(at_once / 2).max(AGAIN)).await;
                }
                (_, Some(_)) if is_too_long(&error) && at_once > AT_ONCE_MIN => at_once /= 2,
                _ => return Err(trouble::of(error, &ask.subject)),
            }
        }
    }

    /// Says an end until it is heard, for as long as its user is patient. The same end again is the same step.
    async fn end(&self, end: impl AsyncFn(&Lease) -> Result<(), ClientError>) -> Result<Settled, Failure> {
        let until = Instant::now() + self.patience;
        loop {
            match end(&self.lease).await {
                Ok(()) => return Ok(Settled::Now),
                Err(error) if error.is_away() && Instant::now() < until => sleep(AGAIN).await,
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Whether the server lets nobody wait for as long as it was asked to.
fn is_too_long(error: &ClientError) -> bool {
    error.problem().is_some_and(|problem| problem.is("invalid") && problem.field.as_deref() == Some("within"))
}

impl Hold for Held {
    fn granted(&self) -> Granted {
        if self.lease.degraded().is_some() { Granted::WithoutStore } else { Granted::ByStore }
    }

    /// The client does it; what is told is whether it works.
    async fn renew(&mut self, span: Duration) -> Result<(), Failure> {
        if self.lease.is_lost() {
            return Err(Failure::failed("the server has ended it"));
        }
        let left = self.lease.expires_in();
        if left < span / 3 {
            return Err(Failure::failed(format!("the server was not heard of, and it ends in {left:.1?}")));
        }
        Ok(())
    }

    async fn settle(&mut self) -> Result<Settled, Failure> {
        self.end(async |lease| lease.settle(Cost::default()).await).await
    }

    async fn cancel(&mut self) -> Result<Settled, Failure> {
        self.end(async |lease| lease.cancel().await).await
    }
}
