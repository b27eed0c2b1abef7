//! Renews a lease in the background, for as long as its handle lives.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::lease::LeaseInner;
use super::steps::{Dispatch, Verb};
use super::{count, lock};
use crate::seconds::Seconds;

/// The minimum interval between renewals.
const INTERVAL_MIN: Duration = Duration::from_millis(100);

/// Renews a lease that expires in `left`, for `span` at a time, each time a third of that has passed, until
/// it ends.
pub(super) async fn run(inner: Arc<LeaseInner>, left: Duration, span: Duration) {
    let mut next = left;
    loop {
        sleep((next / 3).max(INTERVAL_MIN)).await;
        next = span;
        let _guard = inner.step_lock.lock().await;
        if lock(&inner.steps).is_closed() {
            return;
        }
        inner.retry_unconfirmed().await;
        inner.renew(span).await;
    }
}

impl LeaseInner {
    /// Repeats an unconfirmed step of the holder: a renewal with a higher number would make it stale.
    async fn retry_unconfirmed(&self) {
        let unconfirmed = lock(&self.steps).unconfirmed();
        // The holder repeats an unconfirmed ending, or dropping the handle does.
        let Some((verb, step)) = unconfirmed.filter(|_| lock(&self.steps).is_open()) else { return };
        let result = self.send(&verb, step).await;
        self.record(&verb, &result);
        if let Ok(done) = result {
            lock(&self.steps).store_result(verb, done);
        }
    }

    /// Renews the lease for `span` if it is open and has no unconfirmed step.
    async fn renew(&self, span: Duration) {
        let verb = Verb::Renew(Seconds::from(span));
        let step = {
            let mut steps = lock(&self.steps);
            if !steps.is_open() || steps.unconfirmed().is_some() {
                return;
            }
            match steps.begin(&verb) {
                Dispatch::Send(step) => step,
                Dispatch::Done(_) | Dispatch::Rejected(_) => return,
            }
        };
        let sent = Instant::now();
        let result = self.send_renewal(&verb, step).await;
        self.record(&verb, &result);
        if let Ok(renewed) = result {
            count(&self.client.inner.counters.renewals);
            self.set_expiry(sent, renewed.expires_in.as_duration());
        }
    }
}
