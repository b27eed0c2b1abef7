//! Records reported usage in the background, with retries: it has happened, and its limits must learn of it.
//!
//! Envoy waits 20 ms by default, and ignores the response to a report. So a report outlives its call, up to a maximum
//! number of them, and is retried while the store is unavailable, whatever the policy says about draws.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use envoy_types::pb::envoy::service::ratelimit::v3::RateLimitRequest;
use futures_util::FutureExt as _;
use tidegate::{AdjustStatus, LimitError, OnUnavailable, StoreError};
use tidegate_core::backoff::{Backoff, Jitter};
use tidegate_core::limit::lease::Ending;
use tidegate_core::random::Random;
use tokio::time::{Instant as TokioInstant, sleep};
use tonic::Status;

use super::background::AtCapacity;
use super::decide::{Decider, Verdict, hits_of};
use super::refusal::status;
use super::rules::{DrawAction, DrawRequest, RuleMatch};
use crate::meters::Decision;
use crate::refusal::Refusal;

/// The maximum number of reports that the store has not recorded yet.
pub(super) const REPORTS_MAX: usize = 16_384;
/// How long a report is retried.
const RETRY_FOR: Duration = Duration::from_mins(10);
/// The minimum and the maximum delay between two attempts.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(5));

impl Decider {
    /// Starts to record reported usage, or to return units. Neither is over a limit.
    ///
    /// # Errors
    /// What is known without waiting for the store.
    pub(super) fn start_report(
        self: &Arc<Self>,
        report: &DrawRequest<'_>,
        request: &RateLimitRequest,
        index: usize,
    ) -> Result<Verdict, Status> {
        if report.action == DrawAction::Refund && report.rule.refund_within.is_none() {
            let why = format!("rule {}: negative hits need `refund_within`", report.rule.number);
            return Err(Status::failed_precondition(why));
        }
        let (domain, hits) = (request.domain.clone(), hits_of(request));
        let (decider, descriptor) = (Arc::clone(self), request.descriptors[index].clone());
        let work = async move {
            let matched = decider.rules.resolve(&domain, &descriptor, hits);
            let RuleMatch::Draw(report) = &matched else { return Ok(Verdict::Open) };
            let done = AssertUnwindSafe(decider.report(report)).catch_unwind().await;
            // The panic message may quote the request: it is not logged.
            done.unwrap_or_else(|_| {
                decider.state.meters().panicked();
                decider.lose("it panicked");
                Err(Status::internal("internal error; see the server's log"))
            })
        };
        match self.reports.start(work) {
            Ok(Some(done)) => done,
            Ok(None) => Ok(Verdict::Within(Vec::new())),
            Err(AtCapacity) => {
                self.lose("too many reports wait for the store");
                Err(Status::resource_exhausted("too many reports wait for the store"))
            }
        }
    }

    async fn report(&self, report: &DrawRequest<'_>) -> Result<Verdict, Status> {
        if report.action == DrawAction::Refund {
            let refunded = self.refundable.refund(self.state.limiter(), report).await;
            refunded.map_err(|error| status(&Refusal::from(error)))?;
            self.meters.refunded.increment(1);
            return Ok(Verdict::Within(Vec::new()));
        }
        match self.record(report).await {
            Ok(()) => {
                self.meters.reported.increment(1);
                Ok(Verdict::Within(Vec::new()))
            }
            Err(error) => {
                if is_transient(&error) || matches!(error, LimitError::Closed) {
                    self.lose(&error.to_string());
                }
                self.refused(report, error)
            }
        }
    }

    /// Records the usage once, with retries.
    async fn record(&self, report: &DrawRequest<'_>) -> Result<(), LimitError> {
        let (until, backoff) = (
            TokioInstant::now() + RETRY_FOR,
            Backoff::exponential(BACKOFF.0, BACKOFF.1).jitter(Jitter::Full),
        );
        let (mut id, mut attempts) = (rand::random(), 0);
        loop {
            let began = Instant::now();
            let recorded = self.record_as(id, report).await;
            self.state.meters().decided(Decision::Spend, began.elapsed());
            match recorded {
                Ok(()) => return Ok(()),
                // By an attempt whose reply was lost.
                Err(LimitError::Store(StoreError::Ended { how: Ending::Settled, .. })) if attempts > 0 => {
                    return Ok(());
                }
                // An attempt opened it, and its deadline passed before the next one.
                Err(LimitError::Store(StoreError::Ended { .. } | StoreError::NoLease { .. }))
                    if TokioInstant::now() < until =>
                {
                    id = rand::random();
                }
                Err(error) if is_transient(&error) && TokioInstant::now() < until => {}
                Err(error) => return Err(error),
            }
            attempts += 1;
            sleep(backoff.delay(attempts, &mut Random::seeded(rand::random()))).await;
        }
    }

    /// Records the usage by the lease of this id, which no retry charges twice.
    async fn record_as(&self, id: u128, report: &DrawRequest<'_>) -> Result<(), LimitError> {
        let blocking = OnUnavailable::Block;
        if report.rule.refund_within.is_none() {
            return self.request(report).id(id).on_unavailable(blocking).debit().await.map(drop);
        }
        match self.lease_request(report).id(id).on_unavailable(blocking).overdraw().await? {
            (lease, AdjustStatus::Now) => self.settle_all(vec![(report, lease)]).await,
            // An error is the limiter's to retry: the lease is open, and holds the units.
            (mut lease, _) => drop(lease.settle_full().await),
        }
        Ok(())
    }

    /// Records that usage is missing.
    fn lose(&self, why: &str) {
        self.meters.lost.increment(1);
        if let Some(left_out) = self.log_throttle.allow() {
            tracing::warn!(why, left_out, "lost a report of usage");
        }
    }
}

/// Whether a retry may record the usage: the store is unavailable, or can be repaired.
const fn is_transient(error: &LimitError) -> bool {
    match error {
        LimitError::Unavailable { .. } | LimitError::Busy { .. } => true,
        LimitError::Store(error) => {
            error.is_transient()
                || matches!(
                    error,
                    StoreError::Denied { .. } | StoreError::Corrupt { .. } | StoreError::Full { .. }
                )
        }
        _ => false,
    }
}
