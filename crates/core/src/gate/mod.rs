//! The gates, in the order in which they are asked: lifecycle, circuit, pause, pools, pace, rate, budget.
//!
//! Each gate is one question in one file, with the state that changes and nothing else; its limits come from
//! the [`Plan`](crate::plan::Plan). `gates.rs` asks all and takes from all, `settle.rs` gives back and learns,
//! `pausing.rs` pauses and resumes, `retune.rs` puts a new plan under the same state,
//! `rest.rs` says what would be lost with it.

pub mod budget;
pub mod circuit;
pub mod gates;
pub mod lifecycle;
pub mod pace;
pub mod pause;
mod pausing;
pub mod pool;
pub mod rate;
mod rest;
mod retune;
mod settle;
mod view;

pub use gates::Gates;
pub use rest::Rest;
pub use settle::Ending;

#[cfg(test)]
mod aimd_tests;
#[cfg(test)]
mod cases_tests;
#[cfg(test)]
mod memory_tests;
#[cfg(test)]
mod probing_tests;
#[cfg(test)]
mod tests;
