//! Servers on their own ports, and a client for them.

pub(crate) mod client;
pub(crate) mod codec;
pub(crate) mod raw;
pub(crate) mod tenants;
