//! What the tests of stores over a server share: where the server is, and names that nobody else has.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// The address of an engine that `cargo xtask engines` has started, by the name of its variable.
pub(crate) fn address(variable: &str) -> String {
    std::env::var(variable).unwrap_or_else(|_| {
        panic!(
            "{variable} is not set, so that there is no engine to test on. Run `cargo xtask test`, or \
             `cargo xtask engines up` and `eval \"$(cargo xtask engines status --env)\"` before this."
        )
    })
}

/// A name that no other test has, in this process or another, now or earlier.
pub(crate) fn unique(prefix: &str) -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("{prefix}_{:x}_{:x}_{number}", std::process::id(), since.as_micros())
}
