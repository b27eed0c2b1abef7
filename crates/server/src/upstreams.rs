//! Throttles for upstreams that programs in any language call themselves: they ask for a permit before a call,
//! and report how it went.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use std::{fmt, mem};

use tidegate::{
    Cost, KeyView, Keyed, KeyedSnapshot, Lease, Limits, Outcome, Permit, Refused, ResourceName, Throttle,
};
use tidegate_core::limit::token::TokenId;
use tokio::time::{Instant, sleep};

use crate::slots::{AtCapacity, Slot, Slots};

/// The most upstreams; further ones share a throttle.
const UPSTREAMS_MAX: usize = 10_000;
/// How long an upstream must be unused before everything learned of it is evicted.
const IDLE_TTL: Duration = Duration::from_hours(6);
/// The most permits that are not settled. A token leaves some for others, as with [slots](crate::slots).
pub(crate) const PERMITS_MAX: usize = 65_536;
/// The most upstreams of a listing.
const LISTED_MAX: usize = 1_000;
/// How often a call that waits for an open circuit asks again.
const CIRCUIT_STEP: Duration = Duration::from_secs(1);
/// The most names in an error.
const NAMED_MAX: usize = 20;

/// The throttles, created on first use, and the permits that are not settled.
pub(crate) struct Upstreams {
    throttles: Keyed<String>,
    /// The only ones, if they are declared.
    declared: Option<Arc<BTreeMap<ResourceName, Limits>>>,
    held: Mutex<HashMap<u128, HeldCall>>,
    slots: Arc<Slots>,
}

/// A call that is not settled.
#[derive(Debug)]
pub(crate) struct HeldCall {
    pub(crate) upstream: ResourceName,
    pub(crate) permit: Permit<'static>,
    /// The limits of a subject that it holds.
    pub(crate) lease: Option<Lease>,
    /// Attempts of this call before.
    pub(crate) attempt: u32,
    pub(crate) expires_at: Instant,
    #[expect(dead_code, reason = "it returns on drop")]
    pub(crate) slot: Slot,
}

impl HeldCall {
    /// Ends it as ignored, and leaves its lease to its deadline. Returns its upstream.
    fn detach(self) -> ResourceName {
        self.permit.settle(Outcome::ignored());
        if let Some(lease) = self.lease {
            lease.detach();
        }
        self.upstream
    }
}

impl Drop for Upstreams {
    fn drop(&mut self) {
        self.detach_all();
    }
}

impl Upstreams {
    /// No upstream yet. If some are declared, they are the only ones.
    ///
    /// # Panics
    /// Never: the limits and the options are constants within their bounds.
    pub(crate) fn new(declared: Option<BTreeMap<ResourceName, Limits>>) -> Self {
        let limits = Throttle::host().limits().expect("the draft for hosts is within its bounds");
        let declared = declared.map(Arc::new);
        let of = declared.clone().unwrap_or_default();
        let throttles = Keyed::builder(limits.clone()).keys_max(UPSTREAMS_MAX).idle_ttl(IDLE_TTL);
        let throttles = throttles.named("upstreams").labelled(String::clone);
        let throttles = throttles.limits_by(move |name| of.get(name.as_str()).unwrap_or(&limits).clone());
        let throttles = throttles.build().expect("the options are within their bounds");
        Self { throttles, declared, held: Mutex::default(), slots: Slots::new(PERMITS_MAX) }
    }

    /// Checks that the upstream may be called.
    ///
    /// # Errors
    /// The names of the declared ones, if it is not among them.
    pub(crate) fn check(&self, upstream: &str) -> Result<(), String> {
        let Some(declared) = self.declared.as_deref().filter(|declared| !declared.contains_key(upstream))
        else {
            return Ok(());
        };
        let names: Vec<&str> = declared.keys().take(NAMED_MAX).map(ResourceName::as_str).collect();
        let more = if declared.len() > NAMED_MAX { ", …" } else { "" };
        Err(if names.is_empty() { "there are none".to_owned() } else { names.join(", ") + more })
    }

    /// Waits up to `within` until the upstream accepts a call, also for a probe of an open circuit.
    pub(crate) async fn acquire(
        &self,
        upstream: &str,
        tokens: u64,
        within: Duration,
    ) -> Result<Permit<'static>, Refused> {
        let cost = Cost::request().tokens(tokens);
        if within.is_zero() {
            return self.throttles.try_acquire(upstream, cost);
        }
        let until = Instant::now() + within;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.throttles.acquire_within(upstream, cost, left).await {
                // In steps, because a stop ends the wait.
                Err(Refused::CircuitOpen { retry_after }) if retry_after < left => {
                    sleep(retry_after.min(CIRCUIT_STEP)).await;
                }
                result => return result,
            }
        }
    }

    /// Takes a slot for a permit of this token.
    ///
    /// # Errors
    /// [`AtCapacity`] if the token has its share.
    pub(crate) fn slot(&self, token: &TokenId) -> Result<Slot, AtCapacity> {
        self.slots.take(token)
    }

    /// Keeps a call until it is settled. Returns its number.
    pub(crate) fn hold(&self, call: HeldCall) -> u128 {
        // 128 random bits do not repeat.
        let number = rand::random();
        self.lock().insert(number, call);
        number
    }

    /// Takes a call to settle it.
    /// One that has expired remains until [`expire`](Self::expire).
    pub(crate) fn take(&self, number: u128) -> Option<HeldCall> {
        match self.lock().entry(number) {
            Entry::Occupied(call) if call.get().expires_at > Instant::now() => Some(call.remove()),
            _ => None,
        }
    }

    /// Ends the calls that have expired: they count as ignored, and their leases end by their own deadline.
    /// Returns their upstreams.
    pub(crate) fn expire(&self) -> Vec<ResourceName> {
        let now = Instant::now();
        let expired: Vec<HeldCall> =
            self.lock().extract_if(|_, call| call.expires_at <= now).map(|(_, call)| call).collect();
        expired.into_iter().map(HeldCall::detach).collect()
    }

    /// Ends all calls as if they had [expired](Self::expire): they may have been made, so nothing is returned.
    pub(crate) fn detach_all(&self) {
        let held = mem::take(&mut *self.lock());
        for call in held.into_values() {
            call.detach();
        }
    }

    /// Every upstream, the busiest first.
    pub(crate) fn all(&self) -> Vec<KeyView<String>> {
        self.throttles.snapshot(UPSTREAMS_MAX).top
    }

    pub(crate) fn snapshot(&self) -> KeyedSnapshot<String> {
        self.throttles.snapshot(LISTED_MAX)
    }

    /// Refuses those that wait, and further ones.
    pub(crate) fn close(&self) {
        self.throttles.close();
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u128, HeldCall>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Upstreams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Upstreams").field("held", &self.lock().len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use tidegate::{Limit, Limiter, Memory, Policy, Scope};

    use super::*;

    #[test]
    fn one_token_leaves_permits_for_others() {
        let upstreams = Upstreams::new(None);
        let token = |id: &str| TokenId::new(id).unwrap();
        let greedy = token("greedy");
        let held: Vec<Slot> = std::iter::from_fn(|| upstreams.slot(&greedy).ok()).collect();
        assert_eq!(held.len(), PERMITS_MAX / 16 * 15);
        assert!(upstreams.slot(&token("other")).is_ok());
    }

    /// Taking one dropped it, which cancelled its lease.
    #[tokio::test]
    async fn expired_call_remains_until_it_is_detached() {
        let upstreams = Upstreams::new(None);
        let permit = upstreams.acquire("u", 0, Duration::ZERO).await.unwrap();
        let limiter = Limiter::new(Memory::new());
        let limits = Policy::new([Limit::per_minute("rpm", 10)]).unwrap();
        limiter.admin("test").set_policy(Scope::System, limits).await.unwrap();
        let lease = limiter.try_acquire(("acme", "gpt-4"), [("rpm", 4)]).await.unwrap();
        let (slot, upstream) =
            (upstreams.slot(&TokenId::new("a").unwrap()).unwrap(), ResourceName::new("u").unwrap());
        let call =
            HeldCall { upstream, permit, lease: Some(lease), attempt: 0, expires_at: Instant::now(), slot };
        let number = upstreams.hold(call);
        assert!(upstreams.take(number).is_none());
        assert_eq!(upstreams.expire().len(), 1);
        limiter.drain().await;
        let left = limiter.balances(("acme", "gpt-4")).await.unwrap();
        assert_eq!((left[0].balance.available, upstreams.slots.used()), (6, 0));
    }
}
