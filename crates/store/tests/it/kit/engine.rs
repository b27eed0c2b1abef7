//! Addresses of the engines under test, and unique names for what tests create on them.
//!
//! `cargo xtask test` starts the engines and sets their addresses in the environment. Bare `cargo test` has
//! none: tests of engines begin with [`skip_without!`], and one line per skipped engine is printed on stderr.

use std::collections::BTreeSet;
use std::env;
use std::io::Write as _;
use std::net::TcpListener;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// Set by `cargo xtask test`: the variables that a narrowed run leaves unset, separated by commas. A variable
/// that is neither set nor listed fails the test, so that a full run cannot skip an engine.
const MAY_SKIP: &str = "TIDEGATE_TEST_MAY_SKIP";

pub(crate) const REDIS: &str = "TIDEGATE_TEST_REDIS";
pub(crate) const VALKEY: &str = "TIDEGATE_TEST_VALKEY";
pub(crate) const CLUSTER: &str = "TIDEGATE_TEST_CLUSTER";
pub(crate) const POSTGRES: &str = "TIDEGATE_TEST_POSTGRES";
pub(crate) const DYNAMODB: &str = "TIDEGATE_TEST_DYNAMODB";
pub(crate) const DYNOXIDE: &str = "TIDEGATE_TEST_DYNOXIDE";
/// The program of a server, for tests that start their own. Not set, `redis-server` is looked up in `PATH`.
pub(crate) const REDIS_SERVER: &str = "TIDEGATE_TEST_REDIS_SERVER";
/// The same for PostgreSQL; `initdb` is beside it.
pub(crate) const POSTGRES_SERVER: &str = "TIDEGATE_TEST_POSTGRES_SERVER";

/// The engines whose skip was reported.
static REPORTED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// Returns from a test whose engine was not started.
macro_rules! skip_without {
    ($variable:expr) => {
        if !$crate::kit::engine::is_available($variable) {
            return;
        }
    };
}
pub(crate) use skip_without;

/// Whether the engine's variable is set, or its program is installed. Reports the first skip of each engine.
///
/// # Panics
/// Under `cargo xtask test`, if the run does not list this engine as left out.
pub(crate) fn is_available(variable: &str) -> bool {
    if env::var_os(variable).is_some() {
        return true;
    }
    let listed = env::var(MAY_SKIP).ok().map(|listed| listed.split(',').any(|listed| listed == variable));
    if variable == REDIS_SERVER && listed != Some(true) && is_installed("redis-server") {
        return true;
    }
    assert!(listed != Some(false), "{variable} is not set, and {MAY_SKIP} does not list it");
    if REPORTED.lock().expect("no test panics here").insert(variable.to_owned()) {
        report(&format!(
            "skipped: tests that need {variable}, which is not set (`cargo xtask test` starts the engines)"
        ));
    }
    false
}

/// Reports the features that the test program was built without. Their tests are not in it.
///
/// # Panics
/// Under `cargo xtask test`, which builds all of them.
pub(crate) fn report_unbuilt(features: &[(&str, bool)]) {
    for (feature, _) in features.iter().filter(|(_, is_built)| !is_built) {
        assert!(env::var_os(MAY_SKIP).is_none(), "the tests were built without the feature `{feature}`");
        report(&format!(
            "skipped: tests that need the feature `{feature}` (`cargo xtask test` builds all of them)"
        ));
    }
}

/// Writes a line to stderr. The test harness captures what the macros print, and does not capture this.
fn report(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Whether a program of this name is in `PATH`.
fn is_installed(program: &str) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

/// The address of an engine, by the name of its variable.
///
/// # Panics
/// If it is not set: the test did not begin with [`skip_without!`].
pub(crate) fn address(variable: &str) -> String {
    env::var(variable)
        .unwrap_or_else(|_| panic!("{variable} is not set: begin the test with `skip_without!`"))
}

/// A name that no other test uses, in this or another process, now or earlier.
pub(crate) fn unique(prefix: &str) -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("{prefix}_{:x}_{:x}_{number}", std::process::id(), since.as_micros())
}

/// A port for a server that a test starts, kills and starts again.
///
/// It is below the range from which systems assign ports to clients and to listeners on port 0, so that the
/// port stays free while the server is down. No other call in this process returns it.
pub(crate) fn free_port() -> u16 {
    const PORTS: std::ops::Range<u64> = 10_000..32_000;
    static NEXT: AtomicU64 = AtomicU64::new(0);
    loop {
        // Concurrent processes start at different offsets.
        let number = NEXT.fetch_add(1, Ordering::Relaxed) + u64::from(std::process::id()) * 211;
        let port = PORTS.start + number % (PORTS.end - PORTS.start);
        let port = u16::try_from(port).expect("it is below 32,000");
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}
