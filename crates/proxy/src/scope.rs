//! The throttles: one for each upstream, key and group of models, because these share a quota.

use std::hash::{BuildHasher as _, RandomState};
use std::sync::Arc;
use std::time::Duration;

use tidegate::{Cost, KeyView, Keyed, PerSecond, Permit, Refused, Throttle};
use tidegate_core::control::Estimate;

use crate::builder::InvalidProxy;
use crate::headers::Key;

/// The most scopes at the same time; further ones share a throttle.
const SCOPES_MAX: usize = 10_000;
/// How long a scope must be unused before it is evicted with everything learned.
const IDLE_TTL: Duration = Duration::from_hours(6);
/// The most scopes of a listing.
const LISTED_MAX: usize = 1_000;

/// What shares a quota of the upstream.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Scope {
    upstream: Arc<str>,
    /// A hash with a key of this process: the caller's key is not kept.
    key: u64,
    group: String,
}

/// The throttles of all scopes.
#[derive(Clone)]
pub(crate) struct Scopes {
    throttles: Keyed<Scope>,
    hasher: RandomState,
}

/// The state of one throttle.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct ScopeView {
    /// The name of the upstream.
    pub upstream: String,
    /// The model, or the group of models that share a quota; empty for other calls.
    pub group: String,
    /// Calls in flight.
    pub in_flight: u32,
    /// Calls that wait.
    pub waiting: u32,
    /// Calls that were admitted.
    pub admitted: u64,
    /// The learned rate, per second.
    pub rate: Option<f64>,
    /// The requests per second that the upstream is estimated to grant; `None` before it has rejected one.
    pub quota: Option<f64>,
    /// The tokens per second that it is estimated to grant.
    pub tokens_quota: Option<f64>,
    /// How many calls may be in flight.
    pub slots: Option<u32>,
    /// What decides the rate now.
    pub reason: Option<String>,
}

impl Scopes {
    pub(crate) fn new() -> Result<Self, InvalidProxy> {
        let limits = Throttle::host().limits().map_err(|error| InvalidProxy(error.to_string()))?;
        let label = |scope: &Scope| format!("{} {}", scope.upstream, scope.group);
        let throttles =
            Keyed::builder(limits).keys_max(SCOPES_MAX).idle_ttl(IDLE_TTL).named("proxy").labelled(label);
        let throttles = throttles.build().map_err(|error| InvalidProxy(error.to_string()))?;
        Ok(Self { throttles, hasher: RandomState::new() })
    }

    /// The scope of a call with this key.
    pub(crate) fn scope(&self, upstream: &Arc<str>, key: Option<&Key>, group: &str) -> Scope {
        let key = key.map_or(0, |key| self.hasher.hash_one(key.as_str()));
        Scope { upstream: Arc::clone(upstream), key, group: group.to_owned() }
    }

    /// Waits until the upstream accepts a call.
    pub(crate) async fn acquire(
        &self,
        scope: &Scope,
        cost: Cost,
        within: Duration,
    ) -> Result<Permit<'static>, Refused> {
        self.throttles.acquire_within(scope, cost, within).await
    }

    pub(crate) fn views(&self) -> Vec<ScopeView> {
        let view = |KeyView { key, throttle, .. }: KeyView<Scope>| {
            let quota = |estimate: Estimate| estimate.quota.map(PerSecond::as_f64);
            let control = throttle.control;
            ScopeView {
                upstream: key.upstream.to_string(),
                group: key.group,
                in_flight: throttle.in_flight,
                waiting: throttle.waiting,
                admitted: throttle.admitted,
                rate: throttle.rate.map(PerSecond::as_f64),
                quota: control.and_then(|control| quota(control.requests)),
                tokens_quota: control.and_then(|control| quota(control.tokens)),
                slots: throttle.slots,
                reason: control.map(|control| control.reason.to_string()),
            }
        };
        self.throttles.snapshot(LISTED_MAX).top.into_iter().map(view).collect()
    }

    /// Admits no more calls; those in flight go on.
    pub(crate) fn close(&self) {
        self.throttles.close();
    }
}
