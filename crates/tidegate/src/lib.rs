//! Send requests as fast as the upstream allows, and no faster.
//!
//! A [`Throttle`] protects an upstream: an LLM API, a crawled site, a back end. Acquire a [`Permit`] with a
//! [`Cost`], do the work, and settle the permit with an [`Outcome`]. The throttle enforces slots, pace, rate,
//! token and byte budgets, a circuit breaker and pauses; it slows down when the upstream fails and speeds up
//! again when it recovers.
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
//! let used = 640; // ... the call, and its reported usage ...
//! permit.settle(Outcome::success().spent(Cost::request().tokens(used)));
//!
//! assert_eq!(throttle.snapshot().tokens_used, 640);
//! # Ok(())
//! # }
//! ```
//!
//! [`Keyed`] is a throttle for each host, account or model: see [`guide::keyed`]. Layers for reqwest and
//! tower clients and for axum servers do all of this (features `reqwest`, `tower` and `axum`): see
//! [`guide::http`].
//!
//! A `Limiter` (feature `shared`) protects a budget that many users, teams and processes share. It draws a
//! `Lease` from a store and settles it at the actual usage: see [`guide::shared_limits`], and
//! [`guide::stores`] for the stores. `Throttle::limited_by` combines the two for requests of many tenants to
//! one upstream: see [`guide::joined`].
//!
//! Everything is a handle: clones of a throttle are the same throttle. Nothing polls, nothing sleeps while
//! holding capacity, and waiters are served in FIFO order.

#![cfg_attr(
    not(feature = "shared"),
    allow(
        rustdoc::broken_intra_doc_links,
        reason = "the guide covers shared limits whether or not they are built in"
    )
)]

mod acquire;
mod acquire_future;
#[cfg(feature = "axum")]
#[path = "http/axum/mod.rs"]
pub mod axum;
#[cfg(feature = "bar")]
mod bar;
mod builder;
mod clock;
#[cfg(feature = "config")]
pub mod config;
mod delivery_queue;
mod drain;
mod estimate;
mod events;
#[cfg(not(tidegate_model))]
mod fault_injection;
#[cfg(tidegate_model)]
#[doc(hidden)]
pub mod fault_injection;
pub mod guide;
#[cfg(feature = "http")]
mod http;
#[cfg(feature = "shared")]
mod joined;
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
mod permit;
#[cfg(any(feature = "reqwest", feature = "tower"))]
#[path = "http/permit_body.rs"]
mod permit_body;
mod queue;
#[cfg(feature = "registrable")]
mod registrable_domain;
#[cfg(feature = "reqwest")]
#[path = "http/reqwest/mod.rs"]
pub mod reqwest;
mod run;
mod settle;
mod state;
mod sync;
mod thread_waker;
mod throttle;
mod timer_task;
#[cfg(feature = "tower")]
#[path = "http/tower/mod.rs"]
pub mod tower;
#[cfg(not(feature = "tracing"))]
#[path = "observe/no_traces.rs"]
mod traces;
#[cfg(feature = "tracing")]
#[path = "observe/traces.rs"]
mod traces;
mod wait_counters;

#[cfg(feature = "bar")]
pub use bar::{Bar, BarGuard};
pub use builder::Builder;
pub use clock::{Clock, FastClock, Sleep, TokioClock};
#[cfg(feature = "config")]
pub use config::{Config, ConfigError, DeclaredToken, Manifest, ManifestError};
pub use estimate::{EstimateBytes, Part};
pub use events::Events;
#[cfg(feature = "http")]
pub use http::{
    HttpClasses, LimitField, LostConnection, RETRY_INFO_BODY_MAX, ReadError, RetryInfo, rate_limit_fields,
    rate_limit_texts, retry_after_field, retry_info,
};
#[cfg(feature = "shared")]
pub use joined::{Joined, JoinedError, JoinedPermit};
pub use keyed::{
    EvictCause, InvalidKeyedOptions, KeyView, Keyed, KeyedBuilder, KeyedEvent, KeyedEvents, KeyedNotice,
    KeyedOptions, KeyedSnapshot, Limits, Snapshots, TooManyOwnLimits,
};
#[cfg(feature = "shared")]
pub use limiter::blocking;
#[cfg(feature = "shared")]
pub use limiter::{
    AdjustStatus, Admin, BucketLimit, CacheStats, Capacity, Degraded, Explanation, InvalidBucketLimit,
    InvalidLimiter, Lease, LeaseStep, LimitError, LimitEvent, LimitLine, Limited, Limiter, LimiterBuilder,
    LimiterStats, OpenLease, Request, SettleStatus, SubjectRef, UsageSum, Would,
};
#[cfg(feature = "test-util")]
pub use manual_clock::ManualClock;
pub use permit::Permit;
#[cfg(feature = "registrable")]
pub use registrable_domain::registrable_domain;
pub use run::{Attempt, BoxedError, Class, Classify, EveryError, RunError, RunFuture, Runner, StopReason};
pub use throttle::Throttle;

pub use tidegate_core::authority::{Account, Authority, InvalidAccount, InvalidAuthority};
pub use tidegate_core::backoff::{Backoff, Jitter};
pub use tidegate_core::cause::Cause;
pub use tidegate_core::classes::{Classes, Completion, CompletionClass, EmptyQuota, InvalidStatus};
pub use tidegate_core::control::{Control, Estimate, Reason};
pub use tidegate_core::cost::Cost;
pub use tidegate_core::event::{Change, Event, Notice, Trip, Why};
pub use tidegate_core::feedback::headers::{Dimension, Reset};
pub use tidegate_core::limit::balance::Balance;
pub use tidegate_core::limit::entity::{Entity, InvalidEntity};
pub use tidegate_core::limit::lease::LeaseId;
pub use tidegate_core::limit::name::{
    Across, EntityId, InvalidAcross, InvalidLimitKey, InvalidName, LimitKey, LimitName, ResourceName, Subject,
};
pub use tidegate_core::limit::policy::{
    Expect, InvalidPolicy, OnExpiry, OnUnavailable, Policy, Scope, Share, Version, Versioned,
};
pub use tidegate_core::limit::policy_changes::{PolicyChanges, Step, Undeclared};
pub use tidegate_core::limit::resolve::Source;
pub use tidegate_core::limit::rule::{InvalidLimit, Limit};
pub use tidegate_core::limit::usage::{Tally, Usage, Window};
pub use tidegate_core::outcome::{Kind, Outcome, QuotaLevel};
pub use tidegate_core::per_second::PerSecond;
pub use tidegate_core::plan::{
    Aimd, Auto, Brake, Budget, Bytes, Circuit, Controller, Draft, InvalidNamed, InvalidPlan, NAMED_MAX,
    Named, Oversize, Pace, Pause, Problem, Rate, SizeRule, Slots,
};
pub use tidegate_core::random::Random;
pub use tidegate_core::refused::Refused;
pub use tidegate_core::retry::{Retry, RetryBudget, WhenRefused};
pub use tidegate_core::snapshot::{CircuitState, CircuitView, LimitView, Phase, Snapshot, State};
pub use tidegate_core::statistics::Outcomes;
pub use tidegate_core::time::{Instant, Stamp};
pub use tidegate_core::verdict::{Gate, GateName};
#[cfg(feature = "shared")]
pub use tidegate_store as store;
#[cfg(feature = "sqlite")]
pub use tidegate_store::{Durability, Sqlite, SqliteOptions};
#[cfg(feature = "dynamodb")]
pub use tidegate_store::{DynamoDb, DynamoDbOptions};
#[cfg(feature = "shared")]
pub use tidegate_store::{
    Memory, MemoryOptions, MemoryStats, Paging, Retention, Store, StoreError, UsageOf, UsageQuery,
};
#[cfg(feature = "postgres")]
pub use tidegate_store::{Postgres, PostgresOptions};
#[cfg(feature = "redis")]
pub use tidegate_store::{Redis, RedisOptions, RepairReport};
