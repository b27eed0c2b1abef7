//! What the tests share: a server on a port of its own, clients for it, certificates, and time that stands still.

pub(crate) mod codec;
pub(crate) mod frozen;
pub(crate) mod pki;
pub(crate) mod server;
pub(crate) mod tls;

pub(crate) use server::*;
