//! Drawing: one request, many at once, and those that are settled as they are drawn.

use crate::amounts::Cost;
use crate::object;
use crate::problem::Problem;
use crate::seconds::Seconds;
use crate::text::{EntityId, LeaseRef, LimitText, RequestId, ResourceName};

/// A batch has at most so many requests.
pub const BATCH_MAX: usize = 100;

wire! {
    /// Asks for units of every limit of a subject and of those above it: all or nothing.
    #[serde(deny_unknown_fields)]
    pub struct Acquire {
        /// Who asks.
        pub entity: EntityId,
        /// For what.
        pub resource: ResourceName,
        /// How much of each limit; at least one above 0.
        pub cost: Cost,
        /// How long to wait for what is short. Without it, nobody waits.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub within: Option<Seconds>,
        /// How long after the draw the lease expires, unless it is ended or renewed.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub deadline: Option<Seconds>,
        /// Limits of this call, in the place of the subject's own of the same names. They need the scope `admin` too.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        pub limits: Vec<LimitText>,
        /// Chosen by the caller: the same again with the same id is answered with the same lease, and never charged twice.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub id: Option<RequestId>,
    }

    /// What was drawn, to be settled or cancelled before it expires.
    #[serde(deny_unknown_fields)]
    pub struct Granted {
        /// The lease. Its draw is its step 0; its next step is 1.
        pub lease: LeaseRef,
        /// How long it has.
        pub expires_in: Seconds,
        /// It was drawn before, by a request with the same id, and nothing was drawn now.
        #[serde(default)]
        pub is_repeat: bool,
        /// Why it does not stand for units of the store, if it does not.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub degraded: Option<Degraded>,
    }

    /// Why a lease was given while the store was away.
    #[derive(Copy, Eq)]
    #[serde(rename_all = "snake_case")]
    pub enum Degraded {
        /// The policy says to let everybody in. Nobody keeps the lease: there is nothing to settle.
        Allowed,
        /// The server keeps a share of each limit by itself.
        LocalShare,
    }

    /// Draws and settles in one call: no lease is kept.
    #[serde(deny_unknown_fields)]
    pub struct Spend {
        /// Who asks.
        pub entity: EntityId,
        /// For what.
        pub resource: ResourceName,
        /// How much of each limit; at least one above 0.
        pub cost: Cost,
        /// Limits of this call, in the place of the subject's own of the same names. They need the scope `admin` too.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        pub limits: Vec<LimitText>,
        /// Chosen by the caller: the same again with the same id is answered as the first time, and never charged twice.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub id: Option<RequestId>,
    }

    /// Requests that have nothing to do with each other: each is granted or refused by itself, in this order.
    #[serde(deny_unknown_fields)]
    pub struct Batch {
        /// At most 100; none of them waits.
        #[serde(deserialize_with = "object::many")]
        pub requests: Vec<Acquire>,
    }

    /// One answer for each request, in the same order.
    #[serde(deny_unknown_fields)]
    pub struct BatchDone {
        /// The answers.
        pub results: Vec<BatchResult>,
    }

    /// What became of one request of a batch.
    #[serde(rename_all = "snake_case")]
    pub enum BatchResult {
        /// It was granted.
        Granted(Granted),
        /// It was not.
        Refused(Box<Problem>),
    }
}

impl Acquire {
    /// A request that does not wait, for a lease with the deadline that the server gives by default.
    pub const fn new(entity: EntityId, resource: ResourceName, cost: Cost) -> Self {
        Self { entity, resource, cost, within: None, deadline: None, limits: Vec::new(), id: None }
    }
}

impl Spend {
    /// A request by the subject's own limits.
    pub const fn new(entity: EntityId, resource: ResourceName, cost: Cost) -> Self {
        Self { entity, resource, cost, limits: Vec::new(), id: None }
    }
}
