//! Events of a server, and a snapshot of its state.

use crate::policy::Version;
use crate::seconds::Seconds;
use crate::text::{EntityId, ResourceName, Time};

wire! {
    /// A server event. On the wire, `type` is also the name of the server-sent event.
    #[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
    pub enum Event {
        /// A limit refused a request.
        Refused {
            /// The requesting entity.
            entity: EntityId,
            /// The requested resource.
            resource: ResourceName,
            /// The entity whose limit takes longest to recover: the requesting one or an ancestor; absent if all
            /// entities share that limit.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            of: Option<EntityId>,
            /// That limit: `tpm`, or `tpm,across=entities` for a pooled one.
            limit: String,
            /// When a retry may succeed; absent if it never will.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            retry_after: Option<Seconds>,
        },
        /// Leases passed their deadline and were ended.
        LeasesExpired {
            /// Leases settled at their held units.
            settled: u64,
            /// Leases whose units were returned.
            returned: u64,
        },
        /// An administrative change was made through this server. The audit log has the details.
        Changed {
            /// The number of administrative changes, including this one.
            version: Version,
            /// Who made the change.
            actor: String,
        },
        /// The circuit to the store opened after repeated failures.
        StoreAway {
            /// For how long.
            span: Seconds,
        },
        /// The store is available again.
        StoreBack,
        /// A lease was granted without the store.
        Degraded {
            /// The entity.
            entity: EntityId,
            /// The resource.
            resource: ResourceName,
        },
        /// A lease ending could not be delivered to the store: the lease stays spent until its deadline.
        Unsettled {
            /// Endings still queued for the store.
            waiting: u64,
        },
        /// A lease was settled or adjusted above the held units, and a bucket's debt is at its bound: the ledger has
        /// all of the usage, and the bucket takes no more of it.
        DebtBound {
            /// The entity; absent if all entities share the bucket.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            entity: Option<EntityId>,
            /// The resource; absent if all resources share the bucket.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            resource: Option<ResourceName>,
            /// The name of the limit.
            limit: String,
            /// The bound, in units.
            debt_max: u64,
        },
        /// The store decided a draw by newer rules than this server had cached; the cache is refreshed.
        RulesStale {
            /// The entity.
            entity: EntityId,
            /// The requested resource.
            resource: ResourceName,
        },
        /// The queue of waiting requests is full.
        QueueFull {
            /// The bound.
            waiters_max: u64,
        },
        /// The maximum number of concurrent requests is reached.
        Busy {
            /// The bound.
            requests_max: u64,
        },
        /// This listener was too slow and missed events.
        Lagged {
            /// How many events were dropped before this one.
            dropped: u64,
        },
        /// The server is stopping: this is the last event.
        Stopping,
    }

    /// State and counters of a server since it started. Each server over a store has its own.
    #[serde(deny_unknown_fields)]
    pub struct Snapshot {
        /// When the snapshot was taken.
        pub at: Time,
        /// When the server started.
        pub up_since: Time,
        /// The server's version.
        pub program: String,
        /// The served namespace.
        pub namespace: String,
        /// Whether the server is stopping.
        pub is_stopping: bool,
        /// How long the circuit to the store stays open; absent while it is closed.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub store_away: Option<Seconds>,
        /// Granted leases and spends, including those without the store.
        pub granted: u64,
        /// Acquires and spends refused by a limit.
        pub refused: u64,
        /// Leases granted while the store was unavailable.
        pub degraded: u64,
        /// Expired leases that this server settled at their held units.
        pub expired_settled: u64,
        /// Expired leases whose units this server returned.
        pub expired_returned: u64,
        /// Leases that stay spent until their deadline because their ending could not be delivered to the
        /// store.
        pub unsettled: u64,
        /// Leases granted by this server that have not ended here. Leases from before its start, or ended
        /// through another server, are not tracked.
        pub open_leases: u64,
        /// Requests waiting for a limit.
        pub waiting: u64,
        /// Lease endings still queued for the store.
        pub settling: u64,
        /// Requests in flight, including this one.
        pub requests: u64,
        /// The maximum number of requests in flight.
        pub requests_max: u64,
        /// Requests rejected because too many were in flight.
        pub busy: u64,
        /// Event listeners.
        pub listeners: u64,
        /// The maximum number of event listeners.
        pub listeners_max: u64,
        /// Entries of the policy cache.
        pub cache_entries: u64,
        /// Policy cache hits.
        pub cache_hits: u64,
        /// Policy cache misses.
        pub cache_misses: u64,
        /// The subjects with the most grants since events are listened to, the busiest first; at most 100.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        pub busiest: Vec<SubjectGrants>,
    }

    /// How often a subject was granted.
    #[serde(deny_unknown_fields)]
    pub struct SubjectGrants {
        /// The entity.
        pub entity: EntityId,
        /// The resource.
        pub resource: ResourceName,
        /// Granted leases and spends. Among more than 256 subjects, it may be too high by the count of a subject
        /// that is not listed.
        pub granted: u64,
    }
}

impl Event {
    /// The name of the event, same as `type`.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Refused { .. } => "refused",
            Self::LeasesExpired { .. } => "leases_expired",
            Self::Changed { .. } => "changed",
            Self::StoreAway { .. } => "store_away",
            Self::StoreBack => "store_back",
            Self::Degraded { .. } => "degraded",
            Self::Unsettled { .. } => "unsettled",
            Self::DebtBound { .. } => "debt_bound",
            Self::RulesStale { .. } => "rules_stale",
            Self::QueueFull { .. } => "queue_full",
            Self::Busy { .. } => "busy",
            Self::Lagged { .. } => "lagged",
            Self::Stopping => "stopping",
        }
    }
}
