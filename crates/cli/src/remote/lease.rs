//! A lease at a server. The client library renews it.

use std::time::Duration;

use tidegate::SettleStatus;
use tidegate_client::{Acquire, Client, ClientError, Cost, Lease};
use tokio::time::{Instant, sleep};

use super::errors;
use crate::backend::{AcquireRequest, Grant, LeaseHandle};
use crate::failure::Failure;

/// Maximum wait per request: servers bound it, and proxies cut long requests.
const WAIT_MAX: Duration = Duration::from_secs(30);
/// Minimum wait per request. If the server rejects even this, its error is reported.
const WAIT_MIN: Duration = Duration::from_millis(1);
/// Minimum delay between requests, and the delay before an end is retried.
const RETRY_DELAY: Duration = Duration::from_millis(100);

/// An open lease at a server.
pub(crate) struct RemoteLease {
    lease: Lease,
    timeout: Duration,
}

impl RemoteLease {
    /// Acquires units within the requested time: waits at the server up to its bound, and between requests
    /// here.
    pub(super) async fn acquire(
        client: &Client,
        wanted: &AcquireRequest,
        cost: Cost,
        timeout: Duration,
    ) -> Result<Self, Failure> {
        let (entity, resource) = (wanted.subject.entity.clone(), wanted.subject.resource.clone());
        let mut request = Acquire::new(entity.into(), resource.into(), cost);
        request.deadline = Some(wanted.deadline.into());
        let until = wanted.within.and_then(|within| Instant::now().checked_add(within));
        let mut wait_max = WAIT_MAX;
        loop {
            // A deadline beyond the clock's range means no deadline.
            let left = until.map(|until| until.saturating_duration_since(Instant::now())).or(wanted.within);
            request.within = left.map(|left| left.min(wait_max).into());
            let error = match client.acquire(&request).await {
                Ok(lease) => return Ok(Self { lease, timeout }),
                Err(error) => error,
            };
            let after = error.retry_after().filter(|_| matches!(error, ClientError::Refused { .. }));
            match (after, left) {
                (Some(after), Some(left)) if after <= left && left > wait_max => {
                    // Return early enough to queue at the server for the rest of the wait.
                    sleep(after.saturating_sub(wait_max / 2).max(RETRY_DELAY)).await;
                }
                (_, Some(_)) if is_too_long(&error) && wait_max > WAIT_MIN => wait_max /= 2,
                _ => return Err(errors::for_subject(error, &wanted.subject)),
            }
        }
    }

    /// Sends the end of the lease until the server confirms it, up to the timeout. Retries are idempotent:
    /// they carry the same step.
    async fn end(
        &self,
        end: impl AsyncFn(&Lease) -> Result<(), ClientError>,
    ) -> Result<SettleStatus, Failure> {
        let until = Instant::now() + self.timeout;
        loop {
            match end(&self.lease).await {
                Ok(()) => return Ok(SettleStatus::Now),
                Err(error) if error.is_unavailable() && Instant::now() < until => sleep(RETRY_DELAY).await,
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Whether the server rejected the wait as too long.
fn is_too_long(error: &ClientError) -> bool {
    error.problem().is_some_and(|problem| problem.is("invalid") && problem.field.as_deref() == Some("within"))
}

impl LeaseHandle for RemoteLease {
    fn grant(&self) -> Grant {
        if self.lease.degraded().is_some() { Grant::WithoutStore } else { Grant::ByStore }
    }

    /// Reports whether the client's own renewal works.
    async fn renew(&mut self, span: Duration) -> Result<(), Failure> {
        if self.lease.is_lost() {
            return Err(Failure::failed("the server has ended the lease"));
        }
        let left = self.lease.expires_in();
        if left < span / 3 {
            return Err(Failure::failed(format!(
                "the server does not respond, and the lease expires in {left:.1?}"
            )));
        }
        Ok(())
    }

    async fn settle(&mut self) -> Result<SettleStatus, Failure> {
        self.end(async |lease| lease.settle(Cost::default()).await).await
    }

    async fn cancel(&mut self) -> Result<SettleStatus, Failure> {
        self.end(async |lease| lease.cancel().await).await
    }
}
