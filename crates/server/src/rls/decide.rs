//! Decides a request: all its descriptors are drawn, or none.
//!
//! A single descriptor is one spend. Several descriptors are drawn as leases in a global order. If all are
//! granted, they are settled; at the first refusal the others are cancelled before the response is sent.
//! Nothing is granted twice. Until then, concurrent requests may be refused units that are about to return.
//! Reports of usage are started first, whatever the others get, and the response does not wait for the store.

use std::cmp::Reverse;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use envoy_types::pb::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use futures_util::FutureExt as _;
use futures_util::future::{join_all, maybe_done};
use tidegate::{Balance, Lease, LimitError, OnExpiry, Request, StoreError, Would};
use tidegate_core::limit::cascade::InvalidCost;
use tidegate_core::limit::name::Subject;
use tokio::time::timeout;
use tonic::Status;

use super::background::{AtCapacity, BackgroundTasks, GRACE_PERIOD};
use super::config::Unknown;
use super::meters::RlsMeters;
use super::refunds::RefundableCharges;
use super::refusal::status;
use super::response::to_response;
use super::rules::{DrawAction, DrawRequest, ENTRIES_MAX, EnvoyRules, RuleMatch};
use crate::log_throttle::LogThrottle;
use crate::meters::Decision;
use crate::refusal::Refusal;
use crate::slots::Slots;
use crate::state::State;

/// The maximum number of descriptors of a request.
const DESCRIPTORS_MAX: usize = 64;
/// Deadline of a lease, which is held only while the others are drawn.
const DEADLINE: Duration = Duration::from_secs(10);

/// The verdict on one descriptor.
#[derive(Debug)]
pub(super) enum Verdict {
    /// Unlimited, or undecidable and allowed.
    Open,
    Within(Vec<Balance>),
    Over(OverLimit),
    /// A shadow rule, whose result is never reported.
    Shadow,
}

/// Why a descriptor is over its limit.
#[derive(Debug, Default)]
pub(super) struct OverLimit {
    pub(super) balances: Vec<Balance>,
    /// When to retry, if a retry may succeed.
    pub(super) retry_after: Option<Duration>,
    /// What is wrong with the descriptor, if no limit was evaluated.
    pub(super) why: Option<String>,
}

/// Decides Envoy's requests.
#[derive(Debug)]
pub(super) struct Decider {
    pub(super) state: State,
    pub(super) rules: EnvoyRules,
    pub(super) meters: RlsMeters,
    /// Bounds the concurrent requests, separately from those over HTTP.
    pub(super) running: Arc<Slots>,
    pub(super) background: BackgroundTasks,
    /// Reports that the store has not recorded yet.
    pub(super) reports: BackgroundTasks,
    pub(super) log_throttle: LogThrottle,
    pub(super) refundable: RefundableCharges,
}

impl Decider {
    /// Decides a request.
    ///
    /// # Cancel safety
    /// Dropping the future cancels the unsettled leases of several descriptors; a single spend may stay.
    /// Shadow rules that have not started are skipped.
    pub(super) async fn decide(
        self: &Arc<Self>,
        request: &RateLimitRequest,
    ) -> Result<RateLimitResponse, Status> {
        check(request)?;
        let hits = hits_of(request);
        let matched: Vec<_> = request
            .descriptors
            .iter()
            .map(|descriptor| self.rules.resolve(&request.domain, descriptor, hits))
            .collect();
        let mut verdicts: Vec<_> = matched.iter().map(|matched| self.decide_without_store(matched)).collect();
        let mut failed = None;
        for (index, report) in matched.iter().enumerate().filter_map(as_report) {
            match self.start_report(report, request, index) {
                Ok(verdict) => verdicts[index] = verdict,
                // The other reports are recorded nevertheless.
                Err(status) => failed = failed.or(Some(status)),
            }
        }
        if let Some(status) = failed {
            return Err(status);
        }
        let draws: Vec<_> = matched.iter().enumerate().filter_map(as_draw).collect();
        if verdicts.iter().any(is_over) {
            // Already over the limit: nothing is drawn, and the others are only explained.
            let _ = timeout(GRACE_PERIOD, Box::pin(self.explain_all(&draws, &mut verdicts))).await;
        } else {
            match draws[..] {
                [] => {}
                [(index, draw)] => verdicts[index] = self.spend(draw).await?,
                // Boxed because it is rare: every call would reserve space for it.
                _ => Box::pin(self.draw(&draws, &mut verdicts)).await?,
            }
        }
        let has_shadow = verdicts.iter().any(|verdict| matches!(verdict, Verdict::Shadow));
        if has_shadow && !verdicts.iter().any(is_over) {
            Box::pin(self.run_shadow_rules(request, hits, &verdicts)).await;
        }
        let response = to_response(&verdicts);
        self.meters.decided(verdicts.iter().any(is_over));
        Ok(response)
    }

    /// Decides what needs no store.
    fn decide_without_store(&self, matched: &RuleMatch<'_>) -> Verdict {
        match matched {
            RuleMatch::Unlimited => {
                self.meters.unlimited.increment(1);
                Verdict::Open
            }
            RuleMatch::Unknown(unknown) => {
                self.meters.unknown.increment(1);
                match unknown {
                    Unknown::Allow => Verdict::Open,
                    Unknown::Refuse => over("no rule matches this descriptor".to_owned()),
                }
            }
            RuleMatch::Invalid { why, is_shadow } => {
                self.meters.invalid.increment(1);
                if *is_shadow {
                    self.meters.shadowed.increment(1);
                    return Verdict::Shadow;
                }
                over(why.clone())
            }
            RuleMatch::Draw(draw) if draw.rule.is_shadow => Verdict::Shadow,
            RuleMatch::Draw(_) => Verdict::Open,
        }
    }

    /// Spends for a single descriptor.
    async fn spend(&self, draw: &DrawRequest<'_>) -> Result<Verdict, Status> {
        if draw.is_query() {
            return Box::pin(self.query(draw)).await;
        }
        if draw.rule.refund_within.is_some() {
            return Box::pin(self.draw_refundable(draw)).await;
        }
        let began = Instant::now();
        let spent = self.request(draw).spend_with_balances().await;
        self.state.meters().decided(Decision::Spend, began.elapsed());
        match spent {
            Ok(balances) => {
                self.granted(draw, &balances);
                Ok(Verdict::Within(balances))
            }
            Err(error) => self.refused(draw, error),
        }
    }

    /// Draws several descriptors, all or nothing.
    async fn draw(
        &self,
        draws: &[(usize, &DrawRequest<'_>)],
        verdicts: &mut [Verdict],
    ) -> Result<(), Status> {
        let mut leases = Vec::with_capacity(draws.len());
        for (index, draw) in in_lock_order(draws) {
            let verdict = if draw.is_query() {
                self.query(draw).await?
            } else {
                self.acquire_one(draw, &mut leases).await?
            };
            let is_over = is_over(&verdict);
            verdicts[index] = verdict;
            if is_over {
                let others: Vec<_> = draws.iter().copied().filter(|(other, _)| *other != index).collect();
                let returned = async {
                    join_all_started(leases.iter_mut().map(|(_, lease): &mut (_, Lease)| lease.cancel()))
                        .await;
                    self.explain_all(&others, verdicts).await;
                };
                // A cancellation that fails or takes longer continues in the background.
                let _ = timeout(GRACE_PERIOD, returned).await;
                return Ok(());
            }
        }
        // A settle that fails is retried in the background; otherwise the lease expires.
        self.settle_all(leases).await;
        Ok(())
    }

    /// Draws a single descriptor whose units can be refunded.
    async fn draw_refundable(&self, draw: &DrawRequest<'_>) -> Result<Verdict, Status> {
        let mut leases = Vec::with_capacity(1);
        let verdict = self.acquire_one(draw, &mut leases).await?;
        self.settle_all(leases).await;
        Ok(verdict)
    }

    /// Settles leases, except those that can be refunded: they settle themselves at their deadline.
    pub(super) async fn settle_all(&self, leases: Vec<(&DrawRequest<'_>, Lease)>) {
        let keep = |(draw, lease): (&DrawRequest<'_>, Lease)| self.refundable.keep(draw, lease);
        let mut settled: Vec<_> = leases.into_iter().filter_map(keep).collect();
        join_all_started(settled.iter_mut().map(Lease::settle_full)).await;
    }

    /// Acquires the lease of one of several descriptors.
    async fn acquire_one<'a, 'b>(
        &self,
        draw: &'b DrawRequest<'a>,
        leases: &mut Vec<(&'b DrawRequest<'a>, Lease)>,
    ) -> Result<Verdict, Status> {
        let began = Instant::now();
        let lease = self.lease_request(draw).try_acquire().await;
        self.state.meters().decided(Decision::Acquire, began.elapsed());
        match lease {
            Ok(lease) => {
                let balances = lease.balances();
                leases.push((draw, lease));
                self.granted(draw, &balances);
                Ok(Verdict::Within(balances))
            }
            Err(error) => self.refused(draw, error),
        }
    }

    /// Runs the shadow rules if nothing was refused. The response waits for them only for the grace period.
    async fn run_shadow_rules(self: &Arc<Self>, request: &RateLimitRequest, hits: u64, verdicts: &[Verdict]) {
        let domain: Arc<str> = request.domain.as_str().into();
        let lookups = request.descriptors.iter().zip(verdicts);
        let works =
            lookups.filter(|(_, verdict)| matches!(verdict, Verdict::Shadow)).map(|(descriptor, _)| {
                let (decider, domain, descriptor) =
                    (Arc::clone(self), Arc::clone(&domain), descriptor.clone());
                self.background.run(async move {
                    let matched = decider.rules.resolve(&domain, &descriptor, hits);
                    let Some(draw) = as_shadow(&matched) else { return };
                    if AssertUnwindSafe(decider.run_shadow_rule(draw)).catch_unwind().await.is_err() {
                        decider.state.meters().panicked();
                        tracing::error!("a shadow rule panicked");
                    }
                })
            });
        for AtCapacity in join_all(works).await.into_iter().filter_map(Result::err) {
            self.meters.unasked.increment(1);
            if let Some(left_out) = self.log_throttle.allow() {
                tracing::warn!(left_out, "dropped a shadow rule: {AtCapacity}");
            }
        }
    }

    /// Evaluates a shadow rule, which draws like any other rule.
    async fn run_shadow_rule(&self, draw: &DrawRequest<'_>) {
        let decided = match draw.action {
            DrawAction::Query | DrawAction::Refund => return,
            DrawAction::Draw => self.request(draw).spend().await,
            DrawAction::Report => self.request(draw).debit().await.map(drop),
            DrawAction::Check => match self.explain(draw).await {
                Ok(verdict) if is_over(&verdict) => return self.meters.shadowed.increment(1),
                looked => looked.map(drop),
            },
        };
        match decided {
            Ok(()) => {}
            Err(error) if as_over_limit(&error).is_some() => self.meters.shadowed.increment(1),
            Err(error) => self.record_unasked(draw, &error),
        }
    }

    /// Records that a rule could not be evaluated.
    fn record_unasked(&self, draw: &DrawRequest<'_>, error: &LimitError) {
        self.meters.unasked.increment(1);
        if let Some(left_out) = self.log_throttle.allow() {
            tracing::warn!(rule = draw.rule.number, %error, left_out, "failed to evaluate an Envoy rule");
        }
    }

    /// Explains the descriptors of a request that is refused anyway. Failed lookups keep their verdict.
    async fn explain_all(&self, draws: &[(usize, &DrawRequest<'_>)], verdicts: &mut [Verdict]) {
        let lookups = join_all(draws.iter().map(|(_, draw)| self.explain(draw)));
        for ((index, _), look) in draws.iter().zip(lookups.await) {
            if let Ok(look) = look {
                verdicts[*index] = look;
            }
        }
    }

    /// Decides a descriptor with zero hits, without drawing.
    async fn query(&self, draw: &DrawRequest<'_>) -> Result<Verdict, Status> {
        match self.explain(draw).await {
            Ok(verdict) => Ok(verdict),
            // The outage policy applies to draws only, so try one and cancel it.
            Err(LimitError::Unavailable { .. }) => {
                match self.request(draw).deadline(DEADLINE).try_acquire().await {
                    Ok(mut lease) => {
                        let _ = timeout(GRACE_PERIOD, lease.cancel()).await;
                        Ok(Verdict::Open)
                    }
                    Err(error) if draw.action == DrawAction::Query && as_over_limit(&error).is_some() => {
                        Ok(Verdict::Open)
                    }
                    Err(error) => self.refused(draw, error),
                }
            }
            Err(error) => self.refused(draw, error),
        }
    }

    /// Explains a descriptor. A query is over its limit only if a limit is in debt.
    async fn explain(&self, draw: &DrawRequest<'_>) -> Result<Verdict, LimitError> {
        let explanation = self.request(draw).explain().await?;
        let balances = || -> Vec<Balance> {
            let lines = explanation.lines.iter().map(|line| &line.balance);
            lines.filter(|balance| balance.asked > 0).cloned().collect()
        };
        let is_in_debt = || balances().iter().any(|balance| balance.available < 0);
        let is_query = draw.action == DrawAction::Query;
        let retry_after = match explanation.would {
            Would::Wait(span) if !is_query || is_in_debt() => Some(span),
            Would::Never if !is_query => None,
            _ => return Ok(Verdict::Within(balances())),
        };
        Ok(Verdict::Over(OverLimit { balances: balances(), retry_after, why: None }))
    }

    pub(super) fn request<'a>(&'a self, draw: &'a DrawRequest<'a>) -> Request<'a> {
        let request = self.state.limiter().request(&draw.subject, &draw.cost);
        request.limits(draw.rule.limits.iter().chain(&draw.limit).cloned())
    }

    /// A request for a lease, which is held only briefly, or until its units can no longer be refunded.
    pub(super) fn lease_request<'a>(&'a self, draw: &'a DrawRequest<'a>) -> Request<'a> {
        match draw.rule.refund_within {
            None => self.request(draw).deadline(DEADLINE),
            Some(within) => self.request(draw).deadline(within).on_expiry(OnExpiry::Settle),
        }
    }

    /// Counts a grant.
    fn granted(&self, draw: &DrawRequest<'_>, left: &[Balance]) {
        self.state.meters().granted(left);
        self.state.events().granted(|| draw.subject.clone());
    }

    /// Converts a refusal or error into a verdict or status.
    pub(super) fn refused(&self, draw: &DrawRequest<'_>, error: LimitError) -> Result<Verdict, Status> {
        if let Some(over) = as_over_limit(&error) {
            self.state.meters().refused(&error);
            let Subject { entity, resource } = draw.subject.clone();
            self.state.events().refused(&error, &entity.into(), &resource.into());
            return Ok(Verdict::Over(over));
        }
        let why = match &error {
            LimitError::NoLimits { .. } | LimitError::Cost(_) | LimitError::Policy(_) => {
                "no limit is defined for this"
            }
            LimitError::Store(StoreError::Full { .. }) => "the store is full",
            _ => return Err(status(&Refusal::from(error))),
        };
        self.record_unasked(draw, &error);
        // Fail closed if a client chose a value of the subject: an error would allow the request.
        if draw.rule.values > 0 {
            return Ok(over(why.to_owned()));
        }
        match error {
            LimitError::Store(_) => Err(Status::resource_exhausted(why)),
            error => Err(Status::failed_precondition(format!("rule {}: {error}", draw.rule.number))),
        }
    }
}

/// Converts an error that means "over the limit".
fn as_over_limit(error: &LimitError) -> Option<OverLimit> {
    let why = || Some(error.to_string());
    match error {
        LimitError::Limited(limited) | LimitError::TooLarge(limited) => Some(OverLimit {
            balances: limited.lines.iter().map(|line| line.balance.clone()).collect(),
            retry_after: error.retry_after(),
            why: None,
        }),
        LimitError::Waiting { retry_after, .. } => {
            Some(OverLimit { retry_after: *retry_after, ..OverLimit::default() })
        }
        // Errors that clients can provoke must not allow a request.
        LimitError::Name(_) | LimitError::Disabled { .. } => {
            Some(OverLimit { why: why(), ..OverLimit::default() })
        }
        LimitError::Cost(cost) if matches!(**cost, InvalidCost::Units { .. }) => {
            Some(OverLimit { why: why(), ..OverLimit::default() })
        }
        _ => None,
    }
}

/// The hits of a descriptor that sets none.
pub(super) fn hits_of(request: &RateLimitRequest) -> u64 {
    u64::from(request.hits_addend.max(1))
}

/// Rejects requests that only a misconfigured proxy sends.
fn check(request: &RateLimitRequest) -> Result<(), Status> {
    let count = request.descriptors.len();
    if count == 0 || count > DESCRIPTORS_MAX {
        let why = format!("{count} descriptors, outside 1..={DESCRIPTORS_MAX}");
        return Err(Status::invalid_argument(why));
    }
    for (descriptor, index) in request.descriptors.iter().zip(1..) {
        let count = descriptor.entries.len();
        if count == 0 || count > ENTRIES_MAX {
            let why = format!("descriptor {index} has {count} entries, outside 1..={ENTRIES_MAX}");
            return Err(Status::invalid_argument(why));
        }
    }
    Ok(())
}

fn over(why: String) -> Verdict {
    Verdict::Over(OverLimit { why: Some(why), ..OverLimit::default() })
}

fn is_over(verdict: &Verdict) -> bool {
    matches!(verdict, Verdict::Over(_))
}

/// Selects the descriptors that are drawn.
fn as_draw<'a, 'b>((index, matched): (usize, &'b RuleMatch<'a>)) -> Option<(usize, &'b DrawRequest<'a>)> {
    match matched {
        RuleMatch::Draw(draw) if !draw.rule.is_shadow && !draw.is_report() => Some((index, draw)),
        _ => None,
    }
}

/// Selects the descriptors that report usage or return units.
fn as_report<'a, 'b>((index, matched): (usize, &'b RuleMatch<'a>)) -> Option<(usize, &'b DrawRequest<'a>)> {
    match matched {
        RuleMatch::Draw(draw) if !draw.rule.is_shadow && draw.is_report() => Some((index, draw)),
        _ => None,
    }
}

/// Selects the shadow draws.
fn as_shadow<'a, 'b>(matched: &'b RuleMatch<'a>) -> Option<&'b DrawRequest<'a>> {
    match matched {
        RuleMatch::Draw(draw) if draw.rule.is_shadow => Some(draw),
        _ => None,
    }
}

/// Sorts draws by descending number of template values, so that limits of a single client are drawn before
/// shared ones, and then by subject. A global order prevents requests from holding what each other needs.
fn in_lock_order<'a, 'b>(draws: &[(usize, &'b DrawRequest<'a>)]) -> Vec<(usize, &'b DrawRequest<'a>)> {
    let mut sorted = draws.to_vec();
    sorted.sort_by_key(|(_, draw)| (Reverse(draw.rule.values), &draw.subject));
    sorted
}

/// Awaits all futures after polling each of them once: all are started, even if the caller stops waiting.
async fn join_all_started<F: Future>(futures: impl Iterator<Item = F>) {
    let mut futures: Vec<_> = futures.map(|future| Box::pin(maybe_done(future))).collect();
    std::future::poll_fn(|context| {
        let mut is_done = true;
        for future in &mut futures {
            is_done &= future.as_mut().poll(context).is_ready();
        }
        if is_done { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

#[cfg(test)]
#[path = "decide_tests.rs"]
mod tests;
