//! The Lua scripts and their hashes.

use std::sync::LazyLock;

/// A script.
#[derive(Debug)]
pub(super) struct Script {
    text: String,
    hash: String,
}

impl Script {
    fn new(parts: &[&str]) -> Self {
        let text = parts.concat();
        let hash = ::redis::Script::new(&text).get_hash().to_owned();
        Self { text, hash }
    }

    pub(super) fn text(&self) -> &str {
        &self.text
    }

    pub(super) fn hash(&self) -> &str {
        &self.hash
    }
}

/// No arguments for a script.
pub(super) const NO_ARGS: &[&str] = &[];

const FAST: &str = include_str!("script/fast.lua");
const BUCKET: &str = include_str!("script/bucket.lua");
const CLOCK: &str = include_str!("script/clock.lua");

/// Steps of leases, in a batch.
pub(super) static LEASE: LazyLock<Script> =
    LazyLock::new(|| Script::new(&[CLOCK, FAST, BUCKET, include_str!("script/lease.lua")]));
/// The time, and the values of keys.
pub(super) static LOOK: LazyLock<Script> =
    LazyLock::new(|| Script::new(&[CLOCK, include_str!("script/look.lua")]));
/// The time, and a lease.
pub(super) static FIND: LazyLock<Script> =
    LazyLock::new(|| Script::new(&[CLOCK, include_str!("script/find.lua")]));
/// Leases past their deadline.
pub(super) static DUE: LazyLock<Script> =
    LazyLock::new(|| Script::new(&[CLOCK, include_str!("script/due.lua")]));
/// Registers subjects and finds the home of their tree.
pub(super) static REGISTER: LazyLock<Script> =
    LazyLock::new(|| Script::new(&[include_str!("script/register.lua")]));
/// An entity and its ancestors.
pub(super) static CHAIN: LazyLock<Script> =
    LazyLock::new(|| Script::new(&[include_str!("script/chain.lua")]));
/// Commits changes of records with their audit entries.
pub(super) static COMMIT: LazyLock<Script> =
    LazyLock::new(|| Script::new(&[include_str!("script/commit.lua")]));
/// Compare-and-set of fields of one hash.
pub(super) static SWAP: LazyLock<Script> = LazyLock::new(|| Script::new(&[include_str!("script/swap.lua")]));
/// Creates a namespace unless it exists.
pub(super) static PREPARE: LazyLock<Script> =
    LazyLock::new(|| Script::new(&[include_str!("script/prepare.lua")]));
/// Records, the version and the time, at one moment.
pub(super) static READ: LazyLock<Script> =
    LazyLock::new(|| Script::new(&[CLOCK, include_str!("script/read.lua")]));
/// Deletes audit entries.
pub(super) static FORGET: LazyLock<Script> =
    LazyLock::new(|| Script::new(&[include_str!("script/forget.lua")]));
