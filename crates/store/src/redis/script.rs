//! The scripts, and what the server knows them by.

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

const FAST: &str = include_str!("script/fast.lua");
const BUCKET: &str = include_str!("script/bucket.lua");
const CLOCK: &str = include_str!("script/clock.lua");

/// One step of a lease.
pub(super) static LEASE: LazyLock<Script> =
    LazyLock::new(|| Script::new(&[FAST, BUCKET, CLOCK, include_str!("script/lease.lua")]));
/// What time it is, and buckets.
pub(super) static LOOK: LazyLock<Script> =
    LazyLock::new(|| Script::new(&[CLOCK, include_str!("script/look.lua")]));
/// Leases that are past their deadline.
pub(super) static DUE: LazyLock<Script> =
    LazyLock::new(|| Script::new(&[CLOCK, include_str!("script/due.lua")]));
/// Makes subjects known, and finds which tree they are of.
pub(super) static REGISTER: LazyLock<Script> =
    LazyLock::new(|| Script::new(&[include_str!("script/register.lua")]));
/// An entity and its ancestors.
pub(super) static CHAIN: LazyLock<Script> =
    LazyLock::new(|| Script::new(&[include_str!("script/chain.lua")]));
/// Changes of records, with their audit entries.
pub(super) static COMMIT: LazyLock<Script> =
    LazyLock::new(|| Script::new(&[include_str!("script/commit.lua")]));
/// Fields of one hash, if they are as they were.
pub(super) static SWAP: LazyLock<Script> = LazyLock::new(|| Script::new(&[include_str!("script/swap.lua")]));
/// A namespace that is there afterwards.
pub(super) static PREPARE: LazyLock<Script> =
    LazyLock::new(|| Script::new(&[include_str!("script/prepare.lua")]));
/// Records, the version and the time, as of one moment.
pub(super) static READ: LazyLock<Script> =
    LazyLock::new(|| Script::new(&[CLOCK, include_str!("script/read.lua")]));
/// Entries of the audit that go.
pub(super) static FORGET: LazyLock<Script> =
    LazyLock::new(|| Script::new(&[include_str!("script/forget.lua")]));
