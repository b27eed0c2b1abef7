//! Levels encoded for the lease script, and a cache of them.

use std::sync::{Arc, Mutex};

use foldhash::HashMap;
use sha2::{Digest, Sha256};
use tidegate_core::limit::cascade::Levels;
use tokio::time::Instant;

use super::batcher::Batcher;
use super::keyspace::{Home, Keyspace, REGISTRATION_TTL};
use super::lua_codec::{NONE, Packer, to_double};
use crate::codec::levels_to_text;
use crate::sync::lock;

/// The capacity of the cache.
const ENCODED_MAX: usize = 8_192;

/// Encoded levels: all that steps on the same levels have in common.
#[derive(Debug)]
pub(super) struct EncodedLevels {
    pub(super) levels: Arc<Levels>,
    /// The prefixes of the keys of open leases and of ended ones.
    pub(super) leases: String,
    pub(super) moments: String,
    pub(super) home: Home,
    /// The batcher of the home.
    pub(super) batcher: Arc<Batcher>,
    /// When its subjects were registered.
    at: Instant,
    pub(super) clock: String,
    pub(super) open_leases: String,
    pub(super) buckets: Vec<String>,
    pub(super) usage: Vec<String>,
    /// A digest of subjects, names and rows: a lease stores it to recognize its levels.
    pub(super) identity: [u8; 16],
    /// The levels as text, stored with a lease.
    pub(super) text: String,
    /// The encoded limits of each level.
    pub(super) limits: Vec<Vec<u8>>,
}

impl EncodedLevels {
    pub(super) fn new(levels: &Arc<Levels>, keyspace: &Keyspace, home: Home, batcher: Arc<Batcher>) -> Self {
        let subjects = || levels.levels().iter().map(|level| &level.subject);
        let (mut limits, mut identity) = (Vec::new(), Sha256::new());
        for name in levels.names() {
            identity.update(name.as_str());
            identity.update([0]);
        }
        for level in levels.levels() {
            for part in [level.subject.entity.as_str(), level.subject.resource.as_str()] {
                identity.update(part);
                identity.update([1]);
            }
            let mut packed = Packer::default();
            for line in &level.limits {
                let shape = line.rule.shape();
                let period = u64::try_from(shape.period().as_micros()).unwrap_or(u64::MAX);
                let numbers = [shape.amount(), period, shape.burst()];
                // The first bytes of a row with the same rule: the fast path compares them.
                let mut key = Packer::default();
                key.text(line.rule.row());
                for number in numbers {
                    key.number(number);
                }
                key.number(levels.version().number());
                packed.blob(&key.0).byte(u8::try_from(line.name).unwrap_or(u8::MAX));
                for number in numbers {
                    packed.number(number);
                }
                let capacity = shape.span(shape.burst());
                packed.number(capacity.whole / 1_000_000).number(capacity.whole % 1_000_000);
                packed.number(capacity.part).double(line.debt_max.map_or(NONE, to_double));
                packed.text(line.rule.name().as_str());
                identity.update(line.rule.row());
                identity.update([2]);
            }
            limits.push(packed.0.into_vec());
        }
        let mut short = [0; 16];
        short.copy_from_slice(&identity.finalize()[..16]);
        Self {
            levels: Arc::clone(levels),
            leases: keyspace.leases(home),
            moments: keyspace.moments(home),
            home,
            batcher,
            at: Instant::now(),
            clock: keyspace.clock(home),
            open_leases: keyspace.open_leases(home),
            buckets: subjects().map(|subject| keyspace.bucket(home, subject)).collect(),
            usage: subjects().map(|subject| keyspace.usage(home, subject)).collect(),
            identity: short,
            text: levels_to_text(levels),
            limits,
        }
    }
}

/// Encoded levels by the address of the levels, which stays valid because the entry holds them.
#[derive(Default)]
pub(super) struct LevelsCache(Mutex<HashMap<usize, Arc<EncodedLevels>>>);

impl LevelsCache {
    pub(super) fn get(&self, levels: &Arc<Levels>) -> Option<Arc<EncodedLevels>> {
        let found = lock(&self.0).get(&Arc::as_ptr(levels).addr()).cloned();
        found.filter(|found| found.at.elapsed() < REGISTRATION_TTL)
    }

    pub(super) fn insert(&self, encoded: &Arc<EncodedLevels>) {
        let mut all = lock(&self.0);
        if all.len() >= ENCODED_MAX {
            all.clear();
        }
        all.insert(Arc::as_ptr(&encoded.levels).addr(), Arc::clone(encoded));
    }
}
