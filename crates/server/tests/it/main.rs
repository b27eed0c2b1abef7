//! The integration tests of the server, as one program: each module is one subject, over real sockets.

mod kit;
#[cfg(feature = "envoy")]
#[path = "kit/rls.rs"]
mod rls_kit;

mod again;
mod api;
mod away;
mod bounds;
mod events;
mod grafana;
mod metrics;
mod openapi;
#[cfg(feature = "envoy")]
mod rls;
#[cfg(feature = "envoy")]
mod rls_away;
#[cfg(feature = "envoy")]
mod rls_bounds;
#[cfg(feature = "envoy")]
mod rls_frames;
#[cfg(feature = "envoy")]
mod rls_services;
#[cfg(feature = "envoy")]
mod rls_tls;
mod security;
mod slow;
mod tls;
mod tls_sessions;
mod tokens;
