//! One request: every descriptor asked, all or nothing.
//!
//! One descriptor is one spend. Of several, each is drawn as a lease, in one order for all requests: if all are granted they are
//! settled, and at the first that is refused the others are returned before anybody is answered. Nothing is ever granted twice;
//! for as long as that takes, others may be refused what is about to return.

use std::cmp::Reverse;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use envoy_types::pb::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use futures_util::FutureExt as _;
use futures_util::future::{join_all, maybe_done};
use tidegate::{Balance, Lease, LimitError, Request, StoreError, Would};
use tidegate_core::limit::cascade::InvalidCost;
use tidegate_core::limit::name::Subject;
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tonic::Status;

use super::afterwards::{A_MOMENT, Afterwards, NoPlace};
use super::answer::answer;
use super::config::Unknown;
use super::meters::RlsMeters;
use super::refusal::status;
use super::rules::{Ask, Asked, ENTRIES_MAX, EnvoyRules};
use super::seldom::Seldom;
use crate::meters::Decision;
use crate::refusal::Refusal;
use crate::state::State;

/// A request has at most so many descriptors.
const DESCRIPTORS_MAX: usize = 64;
/// A lease is held for as long as the others are drawn. Should nobody end it, it ends soon.
const DEADLINE: Duration = Duration::from_secs(10);

/// What became of one descriptor.
#[derive(Debug)]
pub(super) enum Verdict {
    /// Nothing limits it, or nobody could say how.
    Open,
    Within(Vec<Balance>),
    Over(Over),
    /// A rule that only looks: whatever it found, nobody is told.
    Shadow,
}

/// Why a descriptor is over its limit.
#[derive(Debug, Default)]
pub(super) struct Over {
    pub(super) balances: Vec<Balance>,
    /// When to come back, if that helps.
    pub(super) retry_after: Option<Duration>,
    /// What is wrong with it, where no limit was asked.
    pub(super) why: Option<String>,
}

/// Decides what Envoy asks.
#[derive(Debug)]
pub(super) struct Decider {
    pub(super) state: State,
    pub(super) rules: EnvoyRules,
    pub(super) meters: RlsMeters,
    /// As many as may be under way. Those over HTTP have places of their own.
    pub(super) running: Semaphore,
    pub(super) afterwards: Afterwards,
    pub(super) seldom: Seldom,
}

impl Decider {
    /// Decides a request.
    ///
    /// # Cancel safety
    /// Dropping the future returns what several descriptors have drawn, as far as it is not settled; one that is alone may stay
    /// spent. Rules that only look are left out, if they have not been asked yet.
    pub(super) async fn decide(
        self: &Arc<Self>,
        request: &RateLimitRequest,
    ) -> Result<RateLimitResponse, Status> {
        check(request)?;
        let hits = u64::from(request.hits_addend.max(1));
        let asked: Vec<_> = request
            .descriptors
            .iter()
            .map(|descriptor| self.rules.ask(&request.domain, descriptor, hits))
            .collect();
        let mut verdicts: Vec<_> = asked.iter().map(|asked| self.without_store(asked)).collect();
        let drawn: Vec<_> = asked.iter().enumerate().filter_map(drawn).collect();
        if verdicts.iter().any(is_over) {
            // Nothing is drawn, so there is nothing to ask but what the others would say.
            let _ = timeout(A_MOMENT, Box::pin(self.look_at(&drawn, &mut verdicts))).await;
        } else {
            match drawn[..] {
                [] => {}
                [(place, ask)] => verdicts[place] = self.spend(ask).await?,
                // In a box, as all that is rare: every call would make room for it.
                _ => Box::pin(self.draw(&drawn, &mut verdicts)).await?,
            }
        }
        let has_shadow = verdicts.iter().any(|verdict| matches!(verdict, Verdict::Shadow));
        if has_shadow && !verdicts.iter().any(is_over) {
            Box::pin(self.shadows(request, hits, &verdicts)).await;
        }
        let answer = answer(&verdicts);
        self.meters.decided(verdicts.iter().any(is_over));
        Ok(answer)
    }

    /// What is clear before any limit is asked.
    fn without_store(&self, asked: &Asked<'_>) -> Verdict {
        match asked {
            Asked::Unlimited => {
                self.meters.unlimited.increment(1);
                Verdict::Open
            }
            Asked::Unknown(unknown) => {
                self.meters.unknown.increment(1);
                match unknown {
                    Unknown::Allow => Verdict::Open,
                    Unknown::Refuse => over("no rule knows this descriptor".to_owned()),
                }
            }
            Asked::Invalid { why, is_shadow } => {
                self.meters.invalid.increment(1);
                if *is_shadow {
                    self.meters.shadowed.increment(1);
                    return Verdict::Shadow;
                }
                over(why.clone())
            }
            Asked::Draw(ask) if ask.drawing.is_shadow => Verdict::Shadow,
            Asked::Draw(_) => Verdict::Open,
        }
    }

    /// One alone.
    async fn spend(&self, ask: &Ask<'_>) -> Result<Verdict, Status> {
        if ask.is_look {
            return Box::pin(self.look(ask)).await;
        }
        let began = Instant::now();
        let spent = self.request(ask).spend_and_tell().await;
        self.state.meters().decided(Decision::Spend, began.elapsed());
        match spent {
            Ok(balances) => {
                self.state.meters().granted(&balances);
                Ok(Verdict::Within(balances))
            }
            Err(error) => self.refused(ask, error),
        }
    }

    /// Several, all or nothing.
    async fn draw(&self, asks: &[(usize, &Ask<'_>)], verdicts: &mut [Verdict]) -> Result<(), Status> {
        let mut held: Vec<Lease> = Vec::with_capacity(asks.len());
        for (place, ask) in in_order(asks) {
            let verdict = if ask.is_look { self.look(ask).await? } else { self.hold(ask, &mut held).await? };
            let is_over = is_over(&verdict);
            verdicts[place] = verdict;
            if is_over {
                let others: Vec<_> = asks.iter().copied().filter(|(other, _)| *other != place).collect();
                let returned = async {
                    all(held.iter_mut().map(Lease::cancel)).await;
                    self.look_at(&others, verdicts).await;
                };
                // One that fails, or takes longer, is cancelled in the background.
                let _ = timeout(A_MOMENT, returned).await;
                return Ok(());
            }
        }
        // One that fails is settled in the background, or ends by its deadline.
        all(held.iter_mut().map(Lease::settle_as_held)).await;
        Ok(())
    }

    /// One of several.
    async fn hold(&self, ask: &Ask<'_>, held: &mut Vec<Lease>) -> Result<Verdict, Status> {
        let began = Instant::now();
        let lease = self.request(ask).deadline(DEADLINE).acquire().await;
        self.state.meters().decided(Decision::Acquire, began.elapsed());
        match lease {
            Ok(lease) => {
                let balances = lease.balances();
                held.push(lease);
                self.state.meters().granted(&balances);
                Ok(Verdict::Within(balances))
            }
            Err(error) => self.refused(ask, error),
        }
    }

    /// Asks the rules that only look, when nobody was refused. They refuse nobody, and the answer waits a moment for them.
    async fn shadows(self: &Arc<Self>, request: &RateLimitRequest, hits: u64, verdicts: &[Verdict]) {
        let domain: Arc<str> = request.domain.as_str().into();
        let looks = request.descriptors.iter().zip(verdicts);
        let works = looks.filter(|(_, verdict)| matches!(verdict, Verdict::Shadow)).map(|(descriptor, _)| {
            let (decider, domain, descriptor) = (Arc::clone(self), Arc::clone(&domain), descriptor.clone());
            self.afterwards.finish(async move {
                let asked = decider.rules.ask(&domain, &descriptor, hits);
                let Some(ask) = shadow(&asked) else { return };
                if AssertUnwindSafe(decider.shadow(ask)).catch_unwind().await.is_err() {
                    decider.state.meters().panicked();
                    tracing::error!("a rule that only looks panicked");
                }
            })
        });
        for NoPlace in join_all(works).await.into_iter().filter_map(Result::err) {
            self.meters.unasked.increment(1);
            if let Some(left_out) = self.seldom.now(Instant::now()) {
                tracing::warn!(left_out, "a rule that only looks was given up: {NoPlace}");
            }
        }
    }

    /// A rule that only looks draws as all others do.
    async fn shadow(&self, ask: &Ask<'_>) {
        match self.request(ask).spend().await {
            Ok(()) => {}
            Err(error) if over_by(&error).is_some() => self.meters.shadowed.increment(1),
            Err(error) => self.not_asked(ask, &error),
        }
    }

    /// A rule could not be asked, and its caller passes or is over its limit without it.
    fn not_asked(&self, ask: &Ask<'_>, error: &LimitError) {
        self.meters.unasked.increment(1);
        if let Some(left_out) = self.seldom.now(Instant::now()) {
            tracing::warn!(rule = ask.drawing.rule, %error, left_out, "a rule of Envoy's cannot be asked");
        }
    }

    /// What descriptors would be told, of a request that is refused in any case. Who does not say so stays as it was.
    async fn look_at(&self, asks: &[(usize, &Ask<'_>)], verdicts: &mut [Verdict]) {
        let looks = join_all(asks.iter().map(|(_, ask)| self.explained(ask)));
        for ((place, _), look) in asks.iter().zip(looks.await) {
            if let Ok(look) = look {
                verdicts[*place] = look;
            }
        }
    }

    /// What a descriptor of no hits is told.
    async fn look(&self, ask: &Ask<'_>) -> Result<Verdict, Status> {
        match self.explained(ask).await {
            Ok(verdict) => Ok(verdict),
            // Only who draws is told what the policy says of a store that is away.
            Err(LimitError::Unavailable { .. }) => match self.request(ask).deadline(DEADLINE).acquire().await
            {
                Ok(mut lease) => {
                    let _ = timeout(A_MOMENT, lease.cancel()).await;
                    Ok(Verdict::Open)
                }
                Err(error) if over_by(&error).is_some() => Ok(Verdict::Open),
                Err(error) => self.refused(ask, error),
            },
            Err(error) => self.refused(ask, error),
        }
    }

    /// What a descriptor would be told. One of no hits is over its limit where that is in debt.
    async fn explained(&self, ask: &Ask<'_>) -> Result<Verdict, LimitError> {
        let explanation = self.request(ask).explain().await?;
        let balances = || -> Vec<Balance> {
            let lines = explanation.lines.iter().map(|line| &line.balance);
            lines.filter(|balance| balance.asked > 0).cloned().collect()
        };
        let is_in_debt = || balances().iter().any(|balance| balance.available < 0);
        let retry_after = match explanation.would {
            Would::Wait(span) if !ask.is_look || is_in_debt() => Some(span),
            Would::Never if !ask.is_look => None,
            _ => return Ok(Verdict::Within(balances())),
        };
        Ok(Verdict::Over(Over { balances: balances(), retry_after, why: None }))
    }

    fn request<'a>(&'a self, ask: &'a Ask<'a>) -> Request<'a> {
        let request = self.state.limiter().request(&ask.subject, &ask.cost);
        if ask.drawing.limits.is_empty() {
            return request;
        }
        request.limits(ask.drawing.limits.iter().cloned())
    }

    /// What a descriptor is told that was not granted.
    fn refused(&self, ask: &Ask<'_>, error: LimitError) -> Result<Verdict, Status> {
        if let Some(over) = over_by(&error) {
            self.state.meters().refused(&error);
            let Subject { entity, resource } = ask.subject.clone();
            self.state.hub().refused(&error, &entity.into(), &resource.into());
            return Ok(Verdict::Over(over));
        }
        let why = match &error {
            LimitError::NoLimits { .. } | LimitError::Cost(_) | LimitError::Policy(_) => {
                "no limit is written for this"
            }
            LimitError::Store(StoreError::Full { .. }) => "there is no room to count this",
            _ => return Err(status(&Refusal::from(error))),
        };
        self.not_asked(ask, &error);
        // With a value that a caller of the proxy may have chosen it must not pass because of it.
        if ask.drawing.values > 0 {
            return Ok(over(why.to_owned()));
        }
        match error {
            LimitError::Store(_) => Err(Status::resource_exhausted(why)),
            error => Err(Status::failed_precondition(format!("rule {}: {error}", ask.drawing.rule))),
        }
    }
}

/// Why a descriptor is over its limit; `None` where it is not that.
fn over_by(error: &LimitError) -> Option<Over> {
    let why = || Some(error.to_string());
    match error {
        LimitError::Limited(limited) | LimitError::TooLarge(limited) => Some(Over {
            balances: limited.lines.iter().map(|line| line.balance.clone()).collect(),
            retry_after: error.retry_after(),
            why: None,
        }),
        LimitError::Waiting { retry_after, .. } => {
            Some(Over { retry_after: *retry_after, ..Over::default() })
        }
        // What a caller of the proxy can bring about must not let it through.
        LimitError::Name(_) => Some(Over { why: why(), ..Over::default() }),
        LimitError::Cost(cost) if matches!(**cost, InvalidCost::Units { .. }) => {
            Some(Over { why: why(), ..Over::default() })
        }
        _ => None,
    }
}

/// What only the proxy's own configuration can bring about is an error, and no verdict.
fn check(request: &RateLimitRequest) -> Result<(), Status> {
    let count = request.descriptors.len();
    if count == 0 || count > DESCRIPTORS_MAX {
        let why = format!("{count} descriptors, outside 1..={DESCRIPTORS_MAX}");
        return Err(Status::invalid_argument(why));
    }
    for (descriptor, place) in request.descriptors.iter().zip(1..) {
        let count = descriptor.entries.len();
        if count == 0 || count > ENTRIES_MAX {
            let why = format!("descriptor {place} has {count} entries, outside 1..={ENTRIES_MAX}");
            return Err(Status::invalid_argument(why));
        }
        if descriptor.is_negative_hits {
            let why = format!("descriptor {place} gives hits back, and what was spent is not returned");
            return Err(Status::unimplemented(why));
        }
    }
    Ok(())
}

fn over(why: String) -> Verdict {
    Verdict::Over(Over { why: Some(why), ..Over::default() })
}

fn is_over(verdict: &Verdict) -> bool {
    matches!(verdict, Verdict::Over(_))
}

/// Those that are drawn together.
fn drawn<'a, 'b>((place, asked): (usize, &'b Asked<'a>)) -> Option<(usize, &'b Ask<'a>)> {
    match asked {
        Asked::Draw(ask) if !ask.drawing.is_shadow => Some((place, ask)),
        _ => None,
    }
}

/// Those that only look.
fn shadow<'a, 'b>(asked: &'b Asked<'a>) -> Option<&'b Ask<'a>> {
    match asked {
        Asked::Draw(ask) if ask.drawing.is_shadow && !ask.is_look => Some(ask),
        _ => None,
    }
}

/// Those with more values first, so that what is of one caller is refused before what many share is held for it; of those one
/// order for all requests, so that no two hold what the other needs.
fn in_order<'a, 'b>(asks: &[(usize, &'b Ask<'a>)]) -> Vec<(usize, &'b Ask<'a>)> {
    let mut sorted = asks.to_vec();
    sorted.sort_by_key(|(_, ask)| (Reverse(ask.drawing.values), &ask.subject));
    sorted
}

/// Waits for all, and has begun with each of them before: what is under way goes on in the background if nobody waits.
async fn all<F: Future>(futures: impl Iterator<Item = F>) {
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
