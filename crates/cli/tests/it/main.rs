//! Integration tests that run the program `tidegate` as its users do.

#[cfg_attr(
    not(all(
        feature = "dynamodb",
        feature = "envoy",
        feature = "fetch",
        feature = "postgres",
        feature = "redis",
        feature = "watch"
    )),
    allow(dead_code, unused_imports, reason = "tests of features that are off use some of it")
)]
mod kit;

mod acquire;
#[cfg(feature = "envoy")]
mod envoy;
mod errors;
#[cfg(feature = "fetch")]
mod fetch;
#[cfg(feature = "fetch")]
mod fetch_errors;
#[cfg(feature = "fetch")]
mod fetch_kill;
#[cfg(feature = "fetch")]
mod fetch_polite;
#[cfg(feature = "dynamodb")]
mod import;
mod kill;
mod lab;
mod limits;
mod manifest;
mod parity;
mod plot;
mod proxy;
mod records;
mod remote;
mod replay;
mod serve;
mod store;
#[cfg(feature = "dynamodb")]
mod store_dynamodb;
#[cfg(feature = "postgres")]
mod store_postgres;
#[cfg(feature = "redis")]
mod store_redis;
mod tls;
mod tokens;
mod tour;
#[cfg(feature = "dynamodb")]
mod tour_dynamodb;
#[cfg(feature = "postgres")]
mod tour_postgres;
#[cfg(feature = "redis")]
mod tour_redis;
mod upstream;
#[cfg(feature = "watch")]
mod watch;
