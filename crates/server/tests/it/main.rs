//! Integration tests of the server, over real sockets.

mod kit;
#[cfg(feature = "envoy")]
#[path = "kit/rls.rs"]
mod rls_kit;

mod api;
mod bounds;
mod events;
mod grafana;
mod idempotency;
mod metrics;
mod old_client;
mod openapi;
mod outage;
#[cfg(feature = "envoy")]
mod rls;
#[cfg(feature = "envoy")]
mod rls_after;
#[cfg(feature = "envoy")]
mod rls_bounds;
#[cfg(feature = "envoy")]
mod rls_frames;
#[cfg(feature = "envoy")]
mod rls_outage;
#[cfg(feature = "envoy")]
mod rls_services;
#[cfg(feature = "envoy")]
mod rls_tls;
mod security;
mod slow;
mod starvation;
mod tls;
mod tls_sessions;
mod tokens;
mod upstreams;
