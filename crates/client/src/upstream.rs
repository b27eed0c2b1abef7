//! Permits for calls of an upstream: asked for before a call, settled with how it went.

use std::collections::BTreeMap;

use crate::amounts::Cost;
use crate::seconds::Seconds;
use crate::text::{EntityId, LeaseRef, ResourceName};

wire! {
    /// Asks for a permit to call an upstream, and for units of a subject's limits if it names one.
    #[derive(Default)]
    #[serde(deny_unknown_fields)]
    pub struct AcquireCall {
        /// The tokens that the call will use, by an estimate.
        #[serde(default)]
        pub tokens: u64,
        /// How long to wait until the upstream accepts the call. Without it, the request does not wait.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub within: Option<Seconds>,
        /// Attempts of this call before: 0 for the first. It decides whether another one may follow.
        #[serde(default, skip_serializing_if = "is_zero")]
        pub attempt: u32,
        /// How long the call may take. A permit that is not settled by then counts as ignored.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub deadline: Option<Seconds>,
        /// The entity whose limits are drawn too; needs `resource` and `cost`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub entity: Option<EntityId>,
        /// The resource whose limits are drawn too.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub resource: Option<ResourceName>,
        /// Units of each of these limits.
        #[serde(default, skip_serializing_if = "Cost::is_empty")]
        pub cost: Cost,
    }

    /// Permission to make one call.
    #[serde(deny_unknown_fields)]
    pub struct CallPermit {
        /// The permit, to be settled.
        pub permit: LeaseRef,
        /// Time until it expires.
        pub expires_in: Seconds,
    }

    /// How a call went.
    #[derive(Default)]
    #[serde(deny_unknown_fields)]
    pub struct SettleCall {
        /// The status of the response; absent if there was none.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub status: Option<u16>,
        /// The headers of the response that are about limits, such as `retry-after` and `x-ratelimit-…`. Others
        /// have no effect.
        #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
        pub headers: BTreeMap<String, String>,
        /// The beginning of the body of a rejection (429): it may name the limit that was exceeded. At most 16,384
        /// bytes are read.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub body: Option<String>,
        /// The tokens that the call used, if not those of the request.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub tokens: Option<u64>,
        /// The time from the request to the head of the response, if it is not the age of the permit.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub latency: Option<Seconds>,
        /// Units of limits that the call used; those that are not named are settled at what is held.
        #[serde(default, skip_serializing_if = "Cost::is_empty")]
        pub actual: Cost,
    }

    /// A settled call.
    #[serde(deny_unknown_fields)]
    pub struct CallSettled {
        /// Whether the call may be repeated.
        pub retry: RetryAdvice,
    }

    /// Whether a call may be repeated, by the attempts so far and the retry budget of its upstream.
    #[derive(Default)]
    #[serde(deny_unknown_fields)]
    pub struct RetryAdvice {
        /// Whether the failure is retryable, attempts are left, and the budget had a retry, which is
        /// taken.
        pub allowed: bool,
        /// How long to wait before the permit for the next attempt is acquired.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub after: Option<Seconds>,
    }

    /// The upstreams that were called recently.
    #[serde(deny_unknown_fields)]
    pub struct UpstreamList {
        /// The upstreams, the busiest first; at most 1,000.
        pub upstreams: Vec<UpstreamState>,
    }

    /// The state of one upstream.
    #[serde(deny_unknown_fields)]
    pub struct UpstreamState {
        /// Its name.
        pub name: ResourceName,
        /// Permits that are not settled.
        pub in_flight: u32,
        /// Requests that wait.
        pub waiting: u32,
        /// Permits granted.
        pub admitted: u64,
        /// The learned rate, per second.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub rate: Option<f64>,
        /// How many permits may be out.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub slots: Option<u32>,
        /// The requests per second that the upstream is estimated to grant; absent before its first rejection.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub quota: Option<f64>,
        /// Why the throttle grants this rate: probing, headers, ceiling, …
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub reason: Option<String>,
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it")]
const fn is_zero(count: &u32) -> bool {
    *count == 0
}
