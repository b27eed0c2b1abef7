//! Stores of shared limits.
//!
//! A [`Store`] keeps the buckets, leases, policies, entities, tokens and the ledger of one namespace, and
//! decides draws itself, all or nothing. [`Memory`] is the in-process reference implementation. `Sqlite`
//! (feature `sqlite`) is a file shared by all processes of a machine; `Postgres`, `Redis` and `DynamoDb`
//! (features of the same names) are shared by all machines. [`open()`] opens each by its address. The feature
//! `conformance` adds the test suite that every store passes, including stores of third parties.

#[cfg(any(feature = "dynamodb", feature = "redis"))]
#[allow(dead_code, reason = "which items are used depends on the features")]
mod background;
#[cfg(any(feature = "postgres", feature = "redis"))]
mod batch_size;
#[cfg(any(feature = "postgres", feature = "redis"))]
mod batcher;
mod buckets;
mod changes;
mod clock;
mod cursor;
#[cfg(feature = "dynamodb")]
mod dynamodb;
mod engine;
mod engine_time;
mod entities;
mod error;
mod ledger;
#[allow(dead_code, reason = "which items are used depends on the features")]
pub mod lifecycle;
mod memory;
mod open;
mod page;
mod policies;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "postgres-tls")]
mod postgres_tls;
pub mod record;
mod records;
#[cfg(feature = "redis")]
mod redis;
mod reply;
mod retention;
mod setters;
pub mod shared_engine;
#[cfg(feature = "sqlite")]
mod sqlite;
mod store;
mod sync;
#[cfg(feature = "codec")]
#[allow(dead_code, unreachable_pub, reason = "which records are stored in tables depends on the features")]
mod tables;
mod tokens;
pub mod two_generations;
pub mod wrap;
mod zae_limiter;

#[cfg(feature = "codec")]
#[allow(dead_code, reason = "which records are stored as text depends on the features")]
mod codec;

#[cfg(feature = "codec")]
#[allow(dead_code, reason = "which records are stored as text depends on the features")]
mod record_text;

#[cfg(feature = "archive")]
pub mod archive;

#[cfg(feature = "archive-remote")]
mod archive_remote;
#[cfg(all(feature = "archive", not(feature = "archive-remote")))]
#[path = "no_archive_remote.rs"]
mod archive_remote;

#[cfg(feature = "conformance")]
pub mod conformance;

#[cfg(feature = "redis")]
pub use self::redis::{Redis, RedisOptions, RepairReport};
#[cfg(feature = "codec")]
pub use codec::{levels_from_text, levels_to_text};

pub use buckets::{
    Adjust, Bucket, BucketSnapshot, Buckets, Cancel, Draw, DrawResult, Extend, LeaseSnapshot, LeaseStatus,
    Lookup, Movement, Reading, Readings, Renew, Renewal, Repair, Settle, Terms,
};
pub use changes::{Announcer, Changes};
pub use clock::{AnchoredWall, HostWall, ManualWall, SystemWall, WallClock};
pub use cursor::UsagePlace;
#[cfg(feature = "dynamodb")]
pub use dynamodb::{DynamoDb, DynamoDbOptions};
pub use engine::{Change, Engine, QueuedStep, Step, StepResult, TakeMode};
pub use engine_time::EngineTime;
pub use entities::Entities;
pub use error::StoreError;
pub use ledger::{AuditQuery, Ledger, Prune, UsageOf, UsageQuery};
pub use memory::{Memory, MemoryOptions, MemoryStats};
pub use open::{open, read_zae_limiter};
pub use page::{Cursor, Page, Paging};
pub use policies::{ChangesSince, Listing, Policies, PolicyChange, PolicySnapshot};
#[cfg(feature = "postgres")]
pub use postgres::{Postgres, PostgresOptions, PostgresStats};
pub use reply::Reply;
pub use retention::Retention;
#[cfg(feature = "sqlite")]
pub use sqlite::{Durability, Sqlite, SqliteOptions, SqliteStats};
pub use store::{Capabilities, ClockSource, Store, SweepReport};
pub use tokens::Tokens;
pub use zae_limiter::ZaeLimiterContents;
