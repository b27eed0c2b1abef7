//! Status of a server and its store.

use crate::policy::Version;
use crate::seconds::Seconds;
use crate::text::Time;

wire! {
    /// The status of a server and its store.
    #[serde(deny_unknown_fields)]
    pub struct Status {
        /// The served namespace.
        pub namespace: String,
        /// The name of the store's engine.
        pub engine: String,
        /// Whether settled usage survives a process restart.
        pub is_durable: bool,
        /// The clock that decides: `process`, `host`, `engine` or `caller`.
        pub clock: String,
        /// The time of that clock.
        pub at: Time,
        /// How far `at` is ahead of the clock because the clock stepped back; absent if it is not.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub clock_offset: Option<Seconds>,
        /// The number of administrative changes.
        pub version: Version,
    }
}
