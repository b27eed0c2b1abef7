//! Integration tests of the lab: our strategies against healthy upstreams of any kind.

mod healthy;
