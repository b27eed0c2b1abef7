//! Where shared limits live.
//!
//! A [`Store`] keeps the buckets, leases, policies, entities and the ledger of one namespace, and decides draws
//! by itself, all or nothing. [`Memory`] is the reference: it lives in the process and is what the others are
//! measured by. With the feature `conformance` comes the suite that every store passes, for stores of third
//! parties too.

mod buckets;
mod clock;
mod entities;
mod error;
mod ledger;
mod memory;
mod page;
mod policies;
mod reply;
mod store;
mod sync;
pub mod wrap;

#[cfg(feature = "conformance")]
pub mod conformance;

pub use buckets::{
    Adjust, Bucket, Buckets, Cancel, Draw, Drawn, Extend, Lookup, Moved, Reading, Readings, Seen, Settle,
    Terms,
};
pub use clock::{Anchored, ManualWall, SystemWall, WallClock};
pub use entities::Entities;
pub use error::StoreError;
pub use ledger::{AuditQuery, Ledger, UsageOf, UsageQuery};
pub use memory::Memory;
pub use page::{Cursor, Page, Paging};
pub use policies::{Listing, Policies, PolicyChange, Written};
pub use reply::Reply;
pub use store::{Capabilities, Clocked, Store, Swept};
