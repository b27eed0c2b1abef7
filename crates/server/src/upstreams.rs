//! Throttles for upstreams that programs in any language call themselves: they ask for a permit before a call,
//! and report how it went.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tidegate::{
    Cost, KeyView, Keyed, KeyedSnapshot, Lease, Limits, Outcome, Permit, Refused, ResourceName, Throttle,
};
use tokio::time::Instant;

/// The most upstreams; further ones share a throttle.
const UPSTREAMS_MAX: usize = 10_000;
/// How long an upstream must be unused before everything learned of it is evicted.
const IDLE_TTL: Duration = Duration::from_hours(6);
/// The most permits that are not settled.
const PERMITS_MAX: usize = 65_536;
/// The most upstreams of a listing.
const LISTED_MAX: usize = 1_000;
/// The most names in an error.
const NAMED_MAX: usize = 20;

/// The throttles, created on first use, and the permits that are not settled.
pub(crate) struct Upstreams {
    throttles: Keyed<String>,
    /// The only ones, if they are declared.
    declared: Option<Arc<BTreeMap<ResourceName, Limits>>>,
    held: Mutex<HashMap<u128, HeldCall>>,
}

/// A call that is not settled.
#[derive(Debug)]
pub(crate) struct HeldCall {
    pub(crate) upstream: ResourceName,
    pub(crate) permit: Permit<'static>,
    /// The limits of a subject that it holds.
    pub(crate) lease: Option<Lease>,
    pub(crate) expires_at: Instant,
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
        Self { throttles, declared, held: Mutex::default() }
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

    /// Waits up to `within` until the upstream accepts a call.
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
        self.throttles.acquire_within(upstream, cost, within).await
    }

    /// Keeps a call until it is settled. Returns its number. If there are too many, all that it holds returns.
    pub(crate) fn hold(&self, call: HeldCall) -> Option<u128> {
        let mut held = self.lock();
        if held.len() >= PERMITS_MAX {
            drop(held);
            return None;
        }
        // 128 random bits do not repeat.
        let number = rand::random();
        held.insert(number, call);
        Some(number)
    }

    /// Takes a call to settle it.
    pub(crate) fn take(&self, number: u128) -> Option<HeldCall> {
        self.lock().remove(&number).filter(|call| call.expires_at > Instant::now())
    }

    /// Ends the calls that have expired: they count as ignored, and their leases end by their own deadline.
    /// Returns their upstreams.
    pub(crate) fn expire(&self) -> Vec<ResourceName> {
        let now = Instant::now();
        let expired: Vec<HeldCall> =
            self.lock().extract_if(|_, call| call.expires_at <= now).map(|(_, call)| call).collect();
        let end = |HeldCall { upstream, permit, lease, .. }: HeldCall| {
            permit.settle(Outcome::ignored());
            if let Some(lease) = lease {
                lease.detach();
            }
            upstream
        };
        expired.into_iter().map(end).collect()
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
