//! Stores around stores.
//!
//! [`Observed`] counts the calls of a store and writes down what they move, for the exactness checker. [`Faulty`]
//! makes a store's network bad, on purpose and from a seed. Both keep the contract of what they wrap, as far as
//! the network lets them, and pass the conformance suite. [`Measured`] tells how long each call took, for metrics. A shared store (`Arc<dyn Store>`) is a store as well.

mod faulty;
pub(crate) mod measured;
mod observed;
mod plan;
mod shared;
mod verb;

pub use faulty::Faulty;
pub use measured::{CallEnd, Measured, Watcher};
pub use observed::Observed;
pub use plan::{Faults, InvalidPlan, Plan};
pub use verb::{Calls, Verb};
