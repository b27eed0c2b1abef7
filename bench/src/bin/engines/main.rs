//! Stores on servers, against hand-written queries on the same server: `cargo xtask bench engines`.
//!
//! `cargo xtask engines` starts the servers and prints their addresses.

mod crowd;
mod load;
mod postgres;
mod redis;

use anyhow::Result;
use clap::Parser;
use tidegate_bench::{Case, Options};

const CASES: [Case; 8] = [
    ("postgres_spread", postgres::spread),
    ("postgres_hot", postgres::hot),
    ("redis", redis::rows),
    ("pooled_hot_redis", redis::pooled),
    ("crowd_redis", crowd::redis),
    ("crowd_postgres", crowd::postgres),
    ("hiccup_redis", crowd::hiccup),
    ("policy_writes_redis", crowd::policy_writes),
];

/// Measures stores on servers.
#[derive(Debug, Parser)]
#[command(name = "engines")]
struct Arguments {
    #[command(flatten)]
    options: Options,
}

fn main() -> Result<()> {
    tidegate_bench::run("engines", &CASES, &Arguments::parse().options)
}
