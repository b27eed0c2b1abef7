//! The gates, in the order of evaluation: lifecycle, circuit, pause, pools, pace, rate, budget.
//!
//! Each gate is one file with only its mutable state; its limits come from the [`Plan`](crate::plan::Plan).
//! `gates.rs` evaluates all gates and takes from all, `settle.rs` returns capacity and learns, `pausing.rs`
//! pauses and resumes, `retune.rs` applies a new plan to the same state, and `idleness.rs` decides whether
//! the state may be evicted. `rate_state.rs` is the state of a plan with only a rate, for registries of many keys.

pub mod budget;
pub mod circuit;
mod eta;
pub mod gates;
mod idleness;
pub mod learn;
mod lifecycle;
mod named;
pub mod pace;
pub mod pause;
mod pausing;
pub mod pool;
pub mod rate;
mod rate_state;
mod retune;
mod settle;
mod view;

pub use gates::Gates;
pub use idleness::Idleness;
pub use rate_state::RateState;
pub use settle::Ending;

#[cfg(test)]
mod aimd_tests;
#[cfg(test)]
mod bad_rate_tests;
#[cfg(test)]
mod cases_tests;
#[cfg(test)]
mod probing_tests;
#[cfg(test)]
mod tests;
