//! The guide: how to use a throttle and a limiter, page by page. Every code block here is compiled and run as a test.
//!
//! | page | read it when |
//! |---|---|
//! | [`quick_start`] | you have five minutes |
//! | [`gates`] | you choose what is to be limited |
//! | [`outcomes`] | you tell the throttle how a request went |
//! | [`retry`] | failed work is to be tried again |
//! | [`layered`] | your requests differ a lot in size |
//! | [`keyed`] | you call many hosts, accounts or models, and each bears something else |
//! | [`http`] | you have a reqwest or tower client, or an axum server |
//! | [`progress`] | you run a batch and want to see how far it is |
//! | [`observability`] | you want logs, metrics, or a look at latency and errors |
//! | [`shared_limits`] | users, teams and processes share a budget |
//! | [`joined`] | requests for many tenants go to one callee |
//! | [`stores`] | you choose where shared limits live, or look after a file of them |
//! | [`testing`] | you test code of your own that uses a throttle |
//!
//! The examples are whole programs: `cargo run --example llm_batch`, and likewise `layered`, `per_host`,
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
