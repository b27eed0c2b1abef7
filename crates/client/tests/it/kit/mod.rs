//! Shared test helpers: a real server, a scripted upstream and paused time.

#[path = "../../../../server/tests/it/kit/codec.rs"]
pub(crate) mod codec;
#[path = "../../../../server/tests/it/kit/frozen.rs"]
pub(crate) mod frozen;
#[path = "../../../../server/tests/it/kit/server.rs"]
pub(crate) mod server;
pub(crate) mod upstream;
