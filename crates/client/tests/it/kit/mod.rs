//! What the tests share: a real server, an upstream that fails by a script, and time that stands still.

#[path = "../../../../server/tests/it/kit/codec.rs"]
pub(crate) mod codec;
#[path = "../../../../server/tests/it/kit/frozen.rs"]
pub(crate) mod frozen;
#[path = "../../../../server/tests/it/kit/server.rs"]
pub(crate) mod server;
pub(crate) mod upstream;
