//! Shared test helpers: a server on its own port, clients, certificates and paused time.

pub(crate) mod codec;
pub(crate) mod frozen;
pub(crate) mod pki;
pub(crate) mod server;
pub(crate) mod tls;

pub(crate) use server::*;
