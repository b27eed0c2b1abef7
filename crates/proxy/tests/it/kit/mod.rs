//! Servers on their own ports, and a client for them.
#![allow(dead_code, reason = "each test program uses a part of it")]

pub(crate) mod client;
pub(crate) mod codec;
#[path = "../../../../server/tests/it/kit/frozen.rs"]
pub(crate) mod frozen;
#[path = "../../../../server/tests/it/kit/pki.rs"]
pub(crate) mod pki;
pub(crate) mod raw;
pub(crate) mod tenants;
