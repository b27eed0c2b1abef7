//! Bodies of the draw routes: acquire, batch and spend.

use crate::amounts::Cost;
use crate::object;
use crate::problem::Problem;
use crate::seconds::Seconds;
use crate::text::{EntityId, LeaseRef, LimitText, RequestId, ResourceName};

/// The maximum number of requests in a batch.
pub const BATCH_MAX: usize = 100;

wire! {
    /// Draws units of every limit of a subject and of the levels above it, all or nothing.
    #[serde(deny_unknown_fields)]
    pub struct Acquire {
        /// The requesting entity.
        pub entity: EntityId,
        /// The requested resource.
        pub resource: ResourceName,
        /// Units of each limit; at least one amount above 0.
        pub cost: Cost,
        /// How long to wait in the queue if a limit is exceeded. Without it, the request does not wait.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub within: Option<Seconds>,
        /// Duration of the lease, unless it is ended or renewed before.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub deadline: Option<Seconds>,
        /// Limits of this call, which replace the subject's own limits of the same names. They also require
        /// the scope `admin`.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        pub limits: Vec<LimitText>,
        /// Idempotency key chosen by the caller: a retry with the same id returns the same lease and is never
        /// charged twice.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub id: Option<RequestId>,
    }

    /// A granted lease, to be settled or cancelled before it expires.
    #[serde(deny_unknown_fields)]
    pub struct Granted {
        /// The lease. The draw is step 0; the next step is 1.
        pub lease: LeaseRef,
        /// Time until the lease expires.
        pub expires_in: Seconds,
        /// Whether this repeats an earlier request with the same id: nothing was drawn now.
        #[serde(default)]
        pub is_repeat: bool,
        /// Why the lease is not backed by the store, if it is not.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub degraded: Option<Degraded>,
    }

    /// Why a lease was granted while the store was unavailable.
    #[derive(Copy, Eq)]
    #[serde(rename_all = "snake_case")]
    pub enum Degraded {
        /// The policy allows every request. The lease is not stored: there is nothing to settle.
        Allowed,
        /// The server enforces its local share of each limit.
        LocalShare,
    }

    /// Draws and settles in one call, without a lease.
    #[serde(deny_unknown_fields)]
    pub struct Spend {
        /// The requesting entity.
        pub entity: EntityId,
        /// The requested resource.
        pub resource: ResourceName,
        /// Units of each limit; at least one amount above 0.
        pub cost: Cost,
        /// Limits of this call, which replace the subject's own limits of the same names. They also require
        /// the scope `admin`.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        pub limits: Vec<LimitText>,
        /// Idempotency key chosen by the caller: a retry with the same id returns the first response and is
        /// never charged twice.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub id: Option<RequestId>,
    }

    /// Independent requests: each is granted or refused by itself, in this order.
    #[serde(deny_unknown_fields)]
    pub struct Batch {
        /// At most 100 requests; none of them may wait.
        #[serde(deserialize_with = "object::many")]
        pub requests: Vec<Acquire>,
    }

    /// One result for each request, in the same order.
    #[serde(deny_unknown_fields)]
    pub struct BatchDone {
        /// The results.
        pub results: Vec<BatchResult>,
    }

    /// The result of one request of a batch.
    #[serde(rename_all = "snake_case")]
    pub enum BatchResult {
        /// Granted.
        Granted(Granted),
        /// Refused.
        Refused(Box<Problem>),
    }
}

impl Acquire {
    /// Creates a request that does not wait, for a lease with the server's default deadline.
    pub const fn new(entity: EntityId, resource: ResourceName, cost: Cost) -> Self {
        Self { entity, resource, cost, within: None, deadline: None, limits: Vec::new(), id: None }
    }
}

impl Spend {
    /// Creates a request against the subject's own limits.
    pub const fn new(entity: EntityId, resource: ResourceName, cost: Cost) -> Self {
        Self { entity, resource, cost, limits: Vec::new(), id: None }
    }
}
