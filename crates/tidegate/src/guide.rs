//! The guide: how to use a throttle and a limiter, page by page. Every code block is compiled and run as a
//! test.
//!
//! | page | read it when |
//! |---|---|
//! | [`quick_start`] | you have five minutes |
//! | [`gates`] | you choose what to limit |
//! | [`outcomes`] | you report the outcome of a request |
//! | [`retry`] | failed work should be retried |
//! | [`layered`] | your requests differ a lot in size |
//! | [`keyed`] | you call many hosts, accounts or models, each with its own capacity |
//! | [`http`] | you have a reqwest or tower client, or an axum server |
//! | [`progress`] | you run a batch and want to see its progress |
//! | [`observability`] | you want logs, metrics, latency or error rates |
//! | [`shared_limits`] | users, teams and processes share a budget |
//! | [`joined`] | requests of many tenants go to one upstream |
//! | [`stores`] | you choose a store for shared limits, or operate one |
//! | [`testing`] | you test code that uses a throttle |
//!
//! The examples are complete programs: `cargo run --example llm_batch`, and likewise `layered`, `per_host`,
//! `shutdown`, `blocking`, `tenants`, `gateway`, `polite_client`, `tower_client`, `limited_server` and `hello`.

#[doc = include_str!("guide/quick_start.md")]
pub mod quick_start {}

#[doc = include_str!("guide/gates.md")]
pub mod gates {}

#[doc = include_str!("guide/outcomes.md")]
pub mod outcomes {}

#[doc = include_str!("guide/retry.md")]
pub mod retry {}

#[doc = include_str!("guide/layered.md")]
pub mod layered {}

#[doc = include_str!("guide/keyed.md")]
pub mod keyed {}

#[doc = include_str!("guide/http.md")]
pub mod http {}

#[doc = include_str!("guide/progress.md")]
pub mod progress {}

#[doc = include_str!("guide/observability.md")]
pub mod observability {}

#[doc = include_str!("guide/shared_limits.md")]
pub mod shared_limits {}

#[doc = include_str!("guide/joined.md")]
pub mod joined {}

#[doc = include_str!("guide/stores.md")]
pub mod stores {}

#[doc = include_str!("guide/testing.md")]
pub mod testing {}

/// The examples of the README are tests too.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
mod readme {}
