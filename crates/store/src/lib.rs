//! Where shared limits live.
//!
//! A [`Store`] keeps the buckets, leases, policies, entities, tokens and the ledger of one namespace, and decides draws
//! by itself, all or nothing. [`Memory`] is the reference: it lives in the process and is what the others are
//! measured by. `Sqlite` (feature `sqlite`) is a file that all processes of a machine share. [`open()`] takes either by
//! its address. With the feature `conformance` comes the suite that every store passes, for stores of third
//! parties too.

mod buckets;
mod clock;
mod cursor;
mod desk;
mod entities;
mod error;
mod ledger;
mod memory;
mod open;
mod page;
mod policies;
mod reply;
mod retention;
#[cfg(feature = "sqlite")]
mod sqlite;
mod store;
mod sync;
mod tokens;
pub mod wrap;

#[cfg(feature = "codec")]
#[allow(dead_code, reason = "which records are kept as text depends on what is built in")]
mod codec;

#[cfg(feature = "archive")]
pub mod archive;

#[cfg(feature = "conformance")]
pub mod conformance;

pub use buckets::{
    Adjust, Bucket, Buckets, Cancel, Draw, Drawn, Extend, Held, Lookup, Moved, Reading, Readings, Renew,
    Renewed, Seen, Settle, Standing, Terms,
};
pub use clock::{Anchored, HostWall, ManualWall, SystemWall, WallClock};
pub use entities::Entities;
pub use error::StoreError;
pub use ledger::{AuditQuery, Ledger, Prune, UsageOf, UsageQuery};
pub use memory::{Memory, MemoryOptions, MemoryStats};
pub use open::open;
pub use page::{Cursor, Page, Paging};
pub use policies::{Listing, Policies, PolicyChange, Written};
pub use reply::Reply;
pub use retention::Retention;
#[cfg(feature = "sqlite")]
pub use sqlite::{Durable, Sqlite, SqliteOptions, SqliteStats};
pub use store::{Capabilities, Clocked, Store, Swept};
pub use tokens::Tokens;
