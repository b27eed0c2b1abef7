//! Go as fast as the far side really allows, and no faster.
//!
//! A [`Throttle`] protects a callee: an LLM API, a crawled site, a back end. Ask it for a [`Permit`] with a
//! [`Cost`], do the work, and settle the permit with an [`Outcome`]. The throttle keeps slots, pace, rate,
//! token and byte budgets, a circuit breaker and pauses; it slows down when the far side fails and speeds up
//! again when it heals.
//!
//! ```
//! use std::time::Duration;
//! use tidegate::{Budget, Cost, Outcome, Slots, Throttle};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let throttle = Throttle::builder()
//!     .slots(Slots::adaptive(1..=16))
//!     .budget(Budget::tokens(90_000, Duration::from_secs(60)))
//!     .build()?;
//!
//! let permit = throttle.acquire(Cost::request().tokens(800)).await?;
//! let used = 640; // ... the call, and what it said it used ...
//! permit.settle(Outcome::success().spent(Cost::request().tokens(used)));
//!
//! assert_eq!(throttle.snapshot().tokens_used, 640);
//! # Ok(())
//! # }
//! ```
//!
//! [`Keyed`] is a throttle for each host, account or model: see [`guide::keyed`]. For reqwest and tower clients, and for axum servers,
//! there are layers that do all of it (features `reqwest`, `tower` and `axum`): see [`guide::http`].
//!
//! A `Limiter` (feature `shared`) protects a budget that many users, teams and processes share. It draws a `Lease` from a
//! store and settles it at what was used: see [`guide::shared_limits`], and [`guide::stores`] for where they live.
//! `Throttle::limited_by` joins the two, for requests of many tenants to one callee: see [`guide::joined`].
//!
//! Everything is a handle: clones of a throttle are the same throttle. Nothing polls, nothing sleeps while
//! holding anything, and whoever waits is served in the order of asking.

#![cfg_attr(
    not(feature = "shared"),
    allow(rustdoc::broken_intra_doc_links, reason = "the guide speaks of shared limits, built in or not")
)]

mod acquire;
#[cfg(feature = "axum")]
#[path = "http/axum/mod.rs"]
pub mod axum;
#[cfg(feature = "bar")]
mod bar;
mod builder;
mod clock;
#[cfg(feature = "config")]
pub mod config;
mod drain;
mod estimate;
mod events;
pub mod guide;
#[cfg(any(feature = "reqwest", feature = "tower"))]
#[path = "http/held.rs"]
mod held;
#[cfg(feature = "http")]
mod http;
#[cfg(feature = "shared")]
mod joined;
mod keeper;
mod keyed;
#[cfg(feature = "shared")]
mod limiter;
#[cfg(feature = "test-util")]
mod manual_clock;
#[cfg(feature = "metrics")]
#[path = "observe/meter.rs"]
mod meter;
#[cfg(not(feature = "metrics"))]
#[path = "observe/no_meter.rs"]
mod meter;
mod observe;
mod outbox;
mod permit;
#[cfg(not(tidegate_model))]
mod planted;
#[cfg(tidegate_model)]
#[doc(hidden)]
pub mod planted;
mod queue;
#[cfg(feature = "registrable")]
mod registrable;
#[cfg(feature = "reqwest")]
#[path = "http/reqwest/mod.rs"]
pub mod reqwest;
mod run;
mod settle;
mod state;
mod sync;
mod tally;
mod thread_waker;
mod throttle;
#[cfg(feature = "tower")]
#[path = "http/tower/mod.rs"]
pub mod tower;
#[cfg(not(feature = "tracing"))]
#[path = "observe/no_traces.rs"]
mod traces;
#[cfg(feature = "tracing")]
#[path = "observe/traces.rs"]
mod traces;
mod waiting;

#[cfg(feature = "bar")]
pub use bar::{Bar, Watching};
pub use builder::Builder;
pub use clock::{Clock, FastClock, Sleep, TokioClock};
#[cfg(feature = "config")]
pub use config::{Config, ConfigError, Manifest, ManifestError};
pub use estimate::{EstimateBytes, Part};
pub use events::Events;
#[cfg(feature = "http")]
pub use http::{
    HttpClasses, LimitField, Lost, RETRY_INFO_BODY_MAX, ReadError, RetryInfo, rate_limit_fields,
    rate_limit_texts, retry_after_field, retry_info,
};
#[cfg(feature = "shared")]
pub use joined::{Joined, JoinedError, JoinedPermit};
pub use keyed::{
    Evict, InvalidKeyedOptions, KeyView, Keyed, KeyedBuilder, KeyedEvent, KeyedEvents, KeyedNotice,
    KeyedOptions, KeyedSnapshot, Limits, NoRoom, Snapshots,
};
#[cfg(feature = "shared")]
pub use limiter::blocking;
#[cfg(feature = "shared")]
pub use limiter::{
    Adjusted, Admin, CacheStats, Capacity, Degraded, Explanation, InvalidLimiter, Lease, LeaseStep,
    LimitError, LimitEvent, LimitLine, Limited, Limiter, LimiterBuilder, LimiterStats, OpenLease, Request,
    Settled, SubjectRef, UsageSum, Would,
};
#[cfg(feature = "test-util")]
pub use manual_clock::ManualClock;
pub use permit::Permit;
#[cfg(feature = "registrable")]
pub use registrable::registrable;
pub use run::{Attempt, Class, Classify, EveryError, RunError, Runner, Running, Stopped};
pub use throttle::Throttle;

pub use tidegate_core::authority::{Account, Authority, InvalidAccount, InvalidAuthority};
pub use tidegate_core::backoff::{Backoff, Jitter};
pub use tidegate_core::cause::Cause;
pub use tidegate_core::classes::{Classes, Drained, Ended, InvalidStatus, Sort};
pub use tidegate_core::control::{Control, Estimate, Reason};
pub use tidegate_core::cost::Cost;
pub use tidegate_core::event::{Change, Event, Notice, Trip, Why};
pub use tidegate_core::feedback::headers::{Dimension, Reset};
pub use tidegate_core::limit::balance::Balance;
pub use tidegate_core::limit::entity::{Entity, InvalidEntity};
pub use tidegate_core::limit::lease::LeaseId;
pub use tidegate_core::limit::name::{EntityId, InvalidName, LimitName, ResourceName, Subject};
pub use tidegate_core::limit::plan::{Extra, Plan, Step};
pub use tidegate_core::limit::policy::{
    Expect, InvalidPolicy, OnExpiry, OnUnavailable, Policy, Scope, Share, Version, Versioned,
};
pub use tidegate_core::limit::resolve::Source;
pub use tidegate_core::limit::rule::{InvalidLimit, Limit};
pub use tidegate_core::limit::usage::{Tally, Usage, Window};
pub use tidegate_core::observed::Outcomes;
pub use tidegate_core::outcome::{Kind, Outcome, QuotaLevel};
pub use tidegate_core::per_second::PerSecond;
pub use tidegate_core::plan::{
    Aimd, Auto, Brake, Budget, Bytes, Circuit, Controller, Draft, InvalidPlan, Oversize, Pace, Pause,
    Problem, Rate, SizeRule, Slots,
};
pub use tidegate_core::random::Random;
pub use tidegate_core::refused::Refused;
pub use tidegate_core::retry::{Retry, RetryBudget, WhenRefused};
pub use tidegate_core::snapshot::{CircuitState, CircuitView, Phase, Snapshot, State};
pub use tidegate_core::time::{Instant, Stamp};
pub use tidegate_core::verdict::Gate;
#[cfg(feature = "shared")]
pub use tidegate_store as store;
#[cfg(feature = "sqlite")]
pub use tidegate_store::{Durable, Sqlite, SqliteOptions};
#[cfg(feature = "dynamodb")]
pub use tidegate_store::{DynamoDb, DynamoDbOptions};
#[cfg(feature = "shared")]
pub use tidegate_store::{
    Memory, MemoryOptions, MemoryStats, Paging, Retention, Store, StoreError, UsageOf, UsageQuery,
};
#[cfg(feature = "postgres")]
pub use tidegate_store::{Postgres, PostgresOptions};
#[cfg(feature = "redis")]
pub use tidegate_store::{Redis, RedisOptions, Repaired};
