//! Where shared limits live.
//!
//! A [`Store`] keeps the buckets, leases, policies, entities, tokens and the ledger of one namespace, and decides draws
//! by itself, all or nothing. [`Memory`] is the reference: it lives in the process and is what the others are
//! measured by. `Sqlite` (feature `sqlite`) is a file that all processes of a machine share, `Postgres`
//! (feature `postgres`) a server that all machines share. [`open()`] takes each by its address. With the feature `conformance` comes the suite that every store passes, for stores of third
//! parties too.

#[cfg(any(feature = "postgres", feature = "redis"))]
mod batch_size;
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
#[allow(dead_code, reason = "which words are needed depends on what is built in")]
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
pub mod shared_engine;
#[cfg(feature = "sqlite")]
mod sqlite;
mod store;
mod sync;
#[cfg(feature = "codec")]
#[allow(
    dead_code,
    unreachable_pub,
    reason = "which records are kept in tables of ours depends on what is built in"
)]
mod tables;
mod tokens;
pub mod wrap;

#[cfg(feature = "codec")]
#[allow(dead_code, reason = "which records are kept as text depends on what is built in")]
mod codec;

#[cfg(feature = "codec")]
#[allow(dead_code, reason = "which records are kept as text depends on what is built in")]
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
pub use self::redis::{Redis, RedisOptions, Repaired};
#[cfg(feature = "codec")]
pub use codec::{levels_from_text, levels_to_text};

pub use buckets::{
    Adjust, Bucket, Buckets, Cancel, Draw, Drawn, Extend, Held, Lookup, Moved, Reading, Readings, Renew,
    Renewed, Seen, Settle, Standing, Terms,
};
pub use changes::{Announcer, Changes};
pub use clock::{Anchored, HostWall, ManualWall, SystemWall, WallClock};
pub use cursor::UsagePlace;
#[cfg(feature = "dynamodb")]
pub use dynamodb::{DynamoDb, DynamoDbOptions};
pub use engine::{Applied, Change, Engine, QueuedStep, Step, Taking};
pub use engine_time::EngineTime;
pub use entities::Entities;
pub use error::StoreError;
pub use ledger::{AuditQuery, Ledger, Prune, UsageOf, UsageQuery};
pub use memory::{Memory, MemoryOptions, MemoryStats};
pub use open::open;
pub use page::{Cursor, Page, Paging};
pub use policies::{Changed, Listing, Policies, PolicyChange, Written};
#[cfg(feature = "postgres")]
pub use postgres::{Postgres, PostgresOptions, PostgresStats};
pub use reply::Reply;
pub use retention::Retention;
#[cfg(feature = "sqlite")]
pub use sqlite::{Durable, Sqlite, SqliteOptions, SqliteStats};
pub use store::{Capabilities, Clocked, Store, Swept};
pub use tokens::Tokens;
