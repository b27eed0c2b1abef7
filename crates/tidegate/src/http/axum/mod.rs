//! A layer for HTTP servers: each request draws from a [`Limiter`](crate::Limiter), and 429 is answered where a limit is used up.
//!
//! For axum, and for whatever else serves HTTP as a tower service: axum itself is not needed.
//!
//! ```
//! use axum::Router;
//! use axum::routing::get;
//! use tidegate::axum::LimitLayer;
//! use tidegate::{Limit, Limiter, Memory, ResourceName};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let limiter = Limiter::builder(Memory::new()).defaults([Limit::per_minute("rpm", 600)]).build()?;
//! let limit = LimitLayer::by_header(limiter, ResourceName::new("api")?, "x-tenant".parse()?);
//! let app: Router = Router::new().route("/", get(|| async { "hello" })).layer(limit);
//! # Ok(())
//! # }
//! ```
//!
//! - **Who.** By a [header](LimitLayer::by_header), by a [token](LimitLayer::by_token), or by a [function](LimitLayer::by_key).
//!   A request of which nobody can tell whose it is is refused, or draws for [somebody else](LimitLayer::otherwise).
//! - **How much.** One unit of `rpm`, or what a function [says](LimitLayer::cost).
//! - **Refused.** 429 with `Retry-After`, a [`Problem`] of RFC 9457 as `application/problem+json`, and the fields `RateLimit` and
//!   `RateLimit-Policy`. Other errors have the status that [`problem`] gives them. [`Tell`] says how much strangers learn.
//! - **Served.** The answer has the fields too. What was drawn is spent; or the answer [says](LimitLayer::settle) what was used.
//!
//! The limiter's own rules hold: limits are those of its policies, and where its store is away, they say what to do.

mod codec;
mod layer;
mod problem;
mod who;

pub use layer::{LimitLayer, Limits, Serving, Tell, Used};
pub use problem::{problem, store_problem};
pub use tidegate_client::{LimitState, Problem};
pub use who::{ByHeader, ByKey, ByToken, Key, OneRequest, Price, Units, Who};
