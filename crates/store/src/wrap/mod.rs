//! Engines around engines.
//!
//! [`Observed`] counts the calls of an engine and records what they move, for the exactness checker. [`Faulty`] puts an engine
//! behind a bad network, from a seed. [`Measured`] reports how long each call took. All of them keep the engine's contract,
//! as far as the network lets them, and pass the conformance suite. [`Wrapper`] is how to write another one.

mod faulty;
pub(crate) mod measured;
mod observed;
mod plan;
mod verb;
mod wrapper;

pub use faulty::Faulty;
pub use measured::{CallEnd, Measured, Watcher};
pub use observed::Observed;
pub use plan::{Faults, InvalidPlan, Plan};
pub use verb::{Calls, Verb};
pub use wrapper::Wrapper;
