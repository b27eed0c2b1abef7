//! What a server tells those who listen, and what it knows of itself.

use crate::policy::Version;
use crate::seconds::Seconds;
use crate::text::{EntityId, ResourceName, Time};

wire! {
    /// Something that happened to a server. Over the wire its `type` is the name of the event, too.
    #[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
    pub enum Event {
        /// A limit refused somebody.
        Refused {
            /// Who asked.
            entity: EntityId,
            /// For what.
            resource: ResourceName,
            /// Whose limit is short for longest: the one who asked, or one above.
            of: EntityId,
            /// Which limit.
            limit: String,
            /// When it is worth asking again; without it, never.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            retry_after: Option<Seconds>,
        },
        /// Leases came past their deadline, and were ended.
        LeasesExpired {
            /// At what they held.
            settled: u64,
            /// With everything returned.
            returned: u64,
        },
        /// An administrative change was made at this server. The audit tells what it was.
        Changed {
            /// The count of administrative changes, this one included.
            version: Version,
            /// By whom.
            actor: String,
        },
        /// The store failed so often in a row that it is left alone for a while.
        StoreAway {
            /// For how long.
            span: Seconds,
        },
        /// The store answers again.
        StoreBack,
        /// A lease was given without the store.
        Degraded {
            /// To whom.
            entity: EntityId,
            /// Of what.
            resource: ResourceName,
        },
        /// A lease stays spent until its deadline: the store did not hear of its end.
        Unsettled {
            /// Endings that are waiting.
            waiting: u64,
        },
        /// A draw was decided by newer rules than this server knew; they are read again.
        RulesStale {
            /// Whose.
            entity: EntityId,
            /// For what.
            resource: ResourceName,
        },
        /// As many callers wait for a limit as may.
        QueueFull {
            /// The bound.
            waiters_max: u64,
        },
        /// As many requests are under way as may.
        Busy {
            /// The bound.
            requests_max: u64,
        },
        /// This listener was too slow: so many events before this one were not told.
        Lagged {
            /// How many.
            dropped: u64,
        },
        /// The server is stopping: this is the last event.
        Stopping,
    }

    /// What a server knows of itself since it was started. Other servers over the same store have numbers of their own.
    #[serde(deny_unknown_fields)]
    pub struct Snapshot {
        /// When this was.
        pub at: Time,
        /// Since when it serves.
        pub up_since: Time,
        /// The version of the program.
        pub program: String,
        /// The namespace that it serves.
        pub namespace: String,
        /// Whether it is stopping.
        pub is_stopping: bool,
        /// How long the store is left alone, since it failed too often in a row; without it, it is asked.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub store_away: Option<Seconds>,
        /// Leases and spends that were granted, those without the store included.
        pub granted: u64,
        /// Acquires and spends that were refused by a limit.
        pub refused: u64,
        /// Leases that were given while the store was away.
        pub degraded: u64,
        /// Leases that this server ended because their deadline had passed, at what they held.
        pub expired_settled: u64,
        /// The same, with everything returned.
        pub expired_returned: u64,
        /// Leases that stay spent until their deadline, since the store did not hear of their end.
        pub unsettled: u64,
        /// Leases that this server has handed out and has not seen end. Those of before it started, and those that end at another
        /// server, are not known to it.
        pub open_leases: u64,
        /// Callers that wait for a limit.
        pub waiting: u64,
        /// Endings that the store has yet to hear of.
        pub settling: u64,
        /// Requests that are under way, this one included.
        pub requests: u64,
        /// How many may be.
        pub requests_max: u64,
        /// Requests that were refused because as many were under way as may.
        pub busy: u64,
        /// Those who listen to events.
        pub listeners: u64,
        /// How many may.
        pub listeners_max: u64,
        /// Subjects whose limits are remembered.
        pub cache_entries: u64,
        /// Acquires whose limits were remembered.
        pub cache_hits: u64,
        /// Acquires whose limits were read from the store.
        pub cache_misses: u64,
    }
}

impl Event {
    /// What it is called, as `type` says too.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Refused { .. } => "refused",
            Self::LeasesExpired { .. } => "leases_expired",
            Self::Changed { .. } => "changed",
            Self::StoreAway { .. } => "store_away",
            Self::StoreBack => "store_back",
            Self::Degraded { .. } => "degraded",
            Self::Unsettled { .. } => "unsettled",
            Self::RulesStale { .. } => "rules_stale",
            Self::QueueFull { .. } => "queue_full",
            Self::Busy { .. } => "busy",
            Self::Lagged { .. } => "lagged",
            Self::Stopping => "stopping",
        }
    }
}
