//! The shared limit: who may use how much of what, as values and functions of (state, now).
//!
//! A [`Subject`](name::Subject) is an entity's use of a resource. [`Policy`](policy::Policy)s written at four
//! scopes are [resolved](resolve) per limit name into [`Rule`](rule::Rule)s, and the rules of an entity and of
//! its parents into [`Levels`](cascade::Levels), which are drawn all or nothing. Each limit of a subject has a
//! [`Meter`](meter::Meter): its bucket, its rule and what it has consumed. A lease's
//! [`Record`](lease::Record) remembers what was drawn, and makes every step count once. [`usage`] and
//! [`audit`] are the ledger; [`plan`] turns declared policies into changes; [`check`] proves a log exact.

pub mod anchor;
pub mod audit;
pub mod balance;
pub mod cascade;
pub mod check;
pub mod entity;
pub mod lease;
pub mod meter;
pub mod name;
pub mod plan;
pub mod policy;
pub mod resolve;
pub mod rule;
pub mod token;
pub mod usage;
