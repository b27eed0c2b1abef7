//! Integration tests of the client, over real sockets.

mod kit;

mod api;
mod blocking;
mod faults;
mod lease;
mod restart;
mod secrets;
mod wire;
