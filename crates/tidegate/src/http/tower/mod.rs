//! Layers for HTTP clients that are tower services: they wait their turn, and learn from what comes back.
//!
//! | layer | for | `poll_ready` | the service behind |
//! |---|---|---|---|
//! | [`ThrottleLayer`] | one throttle, requests of one unit | waits, and reserves | any |
//! | [`ThrottleLayer::cost`] | one throttle, requests of different costs | at once; the call waits | `Clone` |
//! | [`WaitLayer::by_host`], [`WaitLayer::by_key`] | a throttle for each host, account, model | at once; the call waits | `Clone` |
//!
//! All read responses by status and headers, as [`HttpClasses`](crate::HttpClasses) has it: a 429 is an overload, its
//! `Retry-After` a pause that all clones share, a 503 a failure of the far side, a 404 nobody's. What was read takes effect when the
//! headers have come, and the latency that is learned is the time until then. The slot returns when the body has ended, has
//! broken or is dropped; with [`Hold::Headers`] it returns at the headers.
//!
//! - **Drop.** A service that is dropped while it is ready gives back what it reserved, whole: nothing went out. A call that is
//!   dropped while it waits leaves the line; one that is dropped while it runs returns its slot, and nothing is learned.
//! - **Clone.** Clones share the throttle and nothing else: a clone of a ready service is not ready.
//! - **Late calls.** What has begun between `poll_ready` and `call`, a pause or an open circuit, holds: such a call is refused
//!   with when to come back, and nothing is sent.
//! - **Errors.** [`CallError`] tells a refusal from the inner service's own error. Refusals come out of calls: an error
//!   of `poll_ready` would mean to tower that the service is of no more use.
//!
//! Nothing is tried again here: that is for tower's own `retry`, outside of this layer, so that every attempt is admitted anew.
//! Headers of a far side count for the throttle that the request was sent under. A client that follows redirects by itself
//! brings the headers of other hosts, so put the layer under what follows redirects, not over it.

mod answer;
mod error;
mod reserve;
mod reserved;
mod wait;

pub use answer::Answering;
pub use error::{BoxError, CallError};
pub use reserve::{ThrottleLayer, Throttled};
pub use wait::{ByHost, ByKey, Calling, Choose, Unit, WaitLayer, Waits, Weigh};

pub use crate::held::{HeldBody, Hold};
