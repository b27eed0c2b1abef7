//! tidegate's shared limits over HTTP, for programs in any language.
//!
//! [`app`] makes a router of a [`State`]: a [`Limiter`](tidegate::Limiter), who may use it (a [`Keyring`]), and the bounds of
//! what one request may ask. [`Server`] listens and serves it, and stops without losing what is under way. Every route
//! and what it needs stands in one table, from which the router is made, and against which the document at
//! `/v1/openapi.json` is checked. Every error is a [`Problem`](tidegate_client::Problem).
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
//! stopper.stop(); // by a signal, in earnest
//! server.run(state, shutdown).await;
//! # Ok(())
//! # }
//! ```

mod calls;
mod codec;
mod gate;
mod handshake;
mod hub;
mod keyring;
mod meters;
mod openapi;
mod options;
mod owner;
mod patience;
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
mod state;
mod tls;
mod token;

pub use keyring::{Key, Keyring, StoreKeyring};
pub use meters::StoreMeters;
pub use openapi::document;
pub use options::Bounds;
pub use owner::LeaseKey;
pub use peer::PeerCertificate;
pub use rls::EnvoyRules;
#[cfg(feature = "envoy")]
pub use rls::{EntryConfig, EnvoyConfig, InvalidRules, RuleConfig, Unknown};
pub use routes::{Access, RouteInfo, app, metrics_app, routes};
pub use server::{ServeError, Server, ServerOptions, Shutdown, Stopped, Stopper};
pub use state::{State, StateOptions};
pub use tls::{Tls, TlsError, TlsOptions};
pub use token::{InvalidSecret, Secret};
