//! Integration tests of the proxy and the mock, over real sockets.

mod kit;

mod bodies;
mod estimates;
mod forward;
mod hostile;
mod leases;
mod listener;
mod mock;
mod quota;
mod tenants;
mod tls;
mod usage;
mod waiting;
