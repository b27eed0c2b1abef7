//! tidegate's shared limits over HTTP, for programs in any language.
//!
//! [`app`] builds a router from a [`State`]: a [`Limiter`](tidegate::Limiter), a [`TokenCache`] that authenticates
//! callers, and the [`Bounds`] of a request. [`Server`] listens and serves it, and shuts down gracefully. One
//! table lists every route and its required scope; the router is built from it, and the document at
//! `/v1/openapi.json` is checked against it. Every error is a [`Problem`](tidegate_client::Problem).
//!
//! ```
//! use tidegate::{Limiter, Memory};
//! use tidegate_server::{Server, ServerOptions, Shutdown, State};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let state = State::new(Limiter::new(Memory::new())).await?;
//! let server = Server::bind(&ServerOptions::new("127.0.0.1:0".parse()?)).await?;
//! println!("listening on http://{}", server.local_addr());
//!
//! let (stopper, shutdown) = Shutdown::new();
//! stopper.stop(); // in production, on a signal
//! server.run(state, shutdown).await;
//! # Ok(())
//! # }
//! ```

mod auth;
mod codec;
mod connections;
mod endpoint;
mod event_broadcast;
mod frame_budget;
mod guarded_body;
mod handshake;
mod inline_executor;
mod io_timeout;
mod lease_key;
mod listener;
mod log_throttle;
mod meters;
mod openapi;
mod options;
mod peer;
mod pem;
mod refusal;
#[cfg(feature = "envoy")]
mod rls;
#[cfg(not(feature = "envoy"))]
#[path = "no_rls.rs"]
mod rls;
mod routes;
mod server;
mod slots;
mod state;
mod tls;
mod token;
mod token_cache;
mod top_subjects;
mod upstreams;

pub use connections::{Activity, Call, Connection, Connections};
pub use guarded_body::GuardedBody;
pub use io_timeout::TimeoutStream;
pub use lease_key::LeaseKey;
pub use listener::Listener;
pub use log_throttle::LogThrottle;
pub use meters::{ConnectionCounts, ConnectionMeters, StoreMeters};
pub use openapi::document;
pub use options::Bounds;
pub use peer::PeerCertificate;
pub use rls::EnvoyRules;
#[cfg(feature = "envoy")]
pub use rls::{Charge, EntryConfig, EnvoyConfig, InvalidRules, RuleConfig, Unknown};
pub use routes::{Access, RouteInfo, app, metrics_app, routes};
pub use server::{ServeError, Server, ServerOptions, Shutdown, ShutdownOutcome, Stopper};
pub use slots::{AtCapacity, Slot, Slots};
pub use state::{State, StateOptions};
pub use tls::{Tls, TlsError, TlsOptions};
pub use token::{InvalidSecret, Secret};
pub use token_cache::{StoreTokenCache, StoredToken, TokenCache};
