//! Engines that wrap other engines.
//!
//! [`Observed`] counts the calls of an engine and logs their movements for the exactness checker. [`Faulty`]
//! injects faults by a seed. [`Measured`] reports the duration of each call. All of them keep the engine's
//! contract, as far as the injected faults allow, and pass the conformance suite. Implement [`Wrapper`] to
//! write another one.

mod fault_plan;
mod faulty;
pub(crate) mod measured;
mod observed;
mod verb;
mod wrapper;

pub use fault_plan::{FaultPlan, Faults, InvalidFaultPlan};
pub use faulty::Faulty;
pub use measured::{CallEnd, Measured, Watcher};
pub use observed::Observed;
pub use verb::{Calls, Verb};
pub use wrapper::Wrapper;
