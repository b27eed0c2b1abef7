//! Layers for clients that are tower services: they wait for admission, and learn from responses.
//!
//! | layer | for | `poll_ready` | inner service |
//! |---|---|---|---|
//! | [`ThrottleLayer`] | one throttle, requests of one unit | waits and reserves | any |
//! | [`ThrottleLayer::cost`] | one throttle, requests of different costs | ready at once; the call waits | `Clone` |
//! | [`WaitLayer::by_host`], [`WaitLayer::by_key`] | a throttle for each host, account, model | ready at once; the call waits | `Clone` |
//!
//! Each works for any [`Service<R>`](tower_service::Service) with `classifier`, which takes a
//! [`Classify`](crate::Classify): it sees the result of a call, and returns its outcome and what it used. The
//! slot then returns with the response. HTTP is the classifier that they begin with.
//!
//! For HTTP, all of them classify responses by status and headers according to [`HttpClasses`](crate::HttpClasses): a
//! 429 is an overload, its `Retry-After` a pause for all clones, a 503 a failure of the upstream, and a 404
//! neither. The outcome takes effect when the headers arrive, and the latency is measured up to then. The
//! slot returns when the body has ended, failed or is dropped; with [`Hold::Headers`] it returns at the
//! headers.
//!
//! - **Drop.** A service that is dropped while it is ready refunds its reservation in full: nothing was sent.
//!   A call that is dropped while it waits leaves the queue; one that is dropped in flight returns its slot,
//!   and nothing is learned.
//! - **Clone.** Clones share the throttle and nothing else: a clone of a ready service is not ready.
//! - **Late calls.** A pause or an open circuit that begins between `poll_ready` and `call` applies: the call
//!   is refused with a retry time, and nothing is sent.
//! - **Errors.** [`CallError`] distinguishes a refusal from the inner service's error. Calls return refusals:
//!   an error of `poll_ready` would mean to tower that the service is unusable.
//!
//! These layers do not retry: use tower's `retry` outside of them, so that every attempt is admitted anew. An
//! upstream's headers count for the throttle that the request was sent under. A client that follows redirects
//! by itself returns other hosts' headers, so place the layer below what follows redirects, not above it.

mod error;
mod future;
mod layer;
mod reservation;
mod response;
mod service;
mod terms;
mod wait;

pub use error::{BoxError, CallError};
pub use future::ResponseFuture;
pub use layer::{ThrottleLayer, WaitLayer};
pub use response::{HttpResponses, Results};
pub use service::ThrottleService;
pub use terms::{ByHost, ByKey, Choose, Unit, Weigh};
pub use wait::{CallFuture, WaitService};

pub use crate::permit_body::{Hold, PermitBody};
