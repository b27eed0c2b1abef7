//! A layer for HTTP servers: each request draws from a [`Limiter`](crate::Limiter), and gets a 429 if a limit
//! is exceeded.
//!
//! For axum and any other HTTP server built on tower services: axum itself is not required.
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
//! - **Key.** By a [header](LimitLayer::by_header), by a [token](LimitLayer::by_token), or by a
//!   [function](LimitLayer::by_key). A request without a key is rejected, or draws for a [fallback
//!   entity](LimitLayer::fallback).
//! - **Cost.** One unit of `rpm`, or the result of a [function](LimitLayer::cost).
//! - **Rejected.** 429 with `Retry-After`, a [`Problem`] of RFC 9457 as `application/problem+json`, and the
//!   fields `RateLimit` and `RateLimit-Policy`. Other errors get the status that [`problem`] assigns.
//!   [`ErrorDetail`] controls the level of detail.
//! - **Served.** The response has the fields too. The units drawn are spent, or [settled](LimitLayer::settle)
//!   by the response.
//!
//! The limiter's policies apply, including those for an unavailable store.

mod codec;
mod key;
mod layer;
mod problem;

pub use key::{ByHeader, ByKey, ByToken, Key, KeyExtractor, OneRequest, Price, Units};
pub use layer::{ErrorDetail, LimitLayer, LimitService, ServeFuture, UnitsUsed};
pub use problem::{problem, store_problem};
pub use tidegate_client::{LimitState, Problem};
