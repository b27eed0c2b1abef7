//! The integration tests of the client, as one program: each module is one subject, over real sockets.

mod kit;

mod api;
mod blocking;
mod faults;
mod lease;
mod restart;
mod secrets;
mod wire;
