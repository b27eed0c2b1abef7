//! Shared limits: how much of a resource an entity may use, as plain values and pure functions of (state,
//! now).
//!
//! A [`Subject`](name::Subject) is an entity's use of a resource. [`Policy`](policy::Policy)s written at four
//! scopes are [resolved](resolve) for each limit name into [`Rule`](rule::Rule)s, and the rules of an entity
//! and of its parents into [`Levels`](cascade::Levels), which are drawn from all or nothing. Each limit of a
//! subject has a [`Meter`](meter::Meter): its bucket, its rule and what it has consumed. A lease's
//! [`Record`](lease::Record) keeps the units it drew and makes each step idempotent. [`usage`] and [`audit`]
//! are the ledger; [`policy_changes`] compares declared with stored policies; [`exactness`] verifies that a log
//! is exact.

pub mod anchor;
pub mod audit;
pub mod balance;
pub mod cascade;
pub mod entity;
pub mod exactness;
pub mod lease;
pub mod meter;
pub mod name;
pub mod policy;
pub mod policy_changes;
pub mod resolve;
pub mod rule;
pub mod token;
pub mod usage;
