//! How a server is, and what stands behind it.

use crate::policy::Version;
use crate::seconds::Seconds;
use crate::text::Time;

wire! {
    /// What a server says of itself and of its store.
    #[serde(deny_unknown_fields)]
    pub struct Status {
        /// The namespace that it serves.
        pub namespace: String,
        /// What the store's engine is called.
        pub engine: String,
        /// What is settled survives the process.
        pub is_durable: bool,
        /// Whose clock decides: `process`, `host`, `engine` or `caller`.
        pub clock: String,
        /// The time by that clock.
        pub at: Time,
        /// How far that time is ahead of the clock, because the clock stepped back; left out where it is not.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub clock_offset: Option<Seconds>,
        /// The count of administrative changes.
        pub version: Version,
    }
}
