//! Levels as the script reads them: worked out once for levels that are drawn from again.

use std::fmt::{self, Write as _};
use std::sync::{Arc, Mutex};

use foldhash::HashMap;
use sha2::{Digest, Sha256};
use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::lease::LeaseId;
use tokio::time::Instant;

use super::lanes::Lane;
use super::pack::{NONE, Packed, to_double};
use super::places::{Home, KNOWN_FOR, Places};
use crate::codec::levels_to_text;
use crate::sync::lock;

/// Levels that are remembered: mostly the same are drawn from again.
const ENCODED_MAX: usize = 8_192;

/// Levels, and all that calls about them have in common.
#[derive(Debug)]
pub(super) struct Encoded {
    pub(super) levels: Arc<Levels>,
    /// What the keys of leases begin with, and of those that have ended.
    leases: String,
    moments: String,
    /// How steps get there.
    pub(super) lane: Arc<Lane>,
    /// When its subjects were known.
    at: Instant,
    pub(super) clock: String,
    pub(super) open_leases: String,
    pub(super) buckets: Vec<String>,
    pub(super) usage: Vec<String>,
    /// The same for all levels of the same subjects, names and rows.
    pub(super) identity: [u8; 16],
    /// What is kept with a lease.
    pub(super) text: String,
    /// The limits of each level.
    pub(super) limits: Vec<Vec<u8>>,
}

impl Encoded {
    pub(super) fn new(levels: &Arc<Levels>, places: &Places, home: Home, lane: Arc<Lane>) -> Self {
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
            let mut packed = Packed::default();
            for line in &level.limits {
                let shape = line.rule.shape();
                let period = u64::try_from(shape.period().as_micros()).unwrap_or(u64::MAX);
                let numbers = [shape.amount(), period, shape.burst()];
                // What a row that is by the same rule begins with, byte for byte.
                let mut key = Packed::default();
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
            leases: places.leases(home),
            moments: places.moments(home),
            lane,
            at: Instant::now(),
            clock: places.clock(home),
            open_leases: places.open_leases(home),
            buckets: subjects().map(|subject| places.bucket(home, subject)).collect(),
            usage: subjects().map(|subject| places.usage(home, subject)).collect(),
            identity: short,
            text: levels_to_text(levels),
            limits,
        }
    }

    /// Makes `key` the key of a lease.
    pub(super) fn lease(&self, lease: LeaseId, key: &mut String) {
        Self::make(key, &self.leases, format_args!("{lease}"));
    }

    /// Makes `key` the one where leases of a moment are when they have ended.
    pub(super) fn moment(&self, moment: u64, key: &mut String) {
        Self::make(key, &self.moments, format_args!("{moment:x}"));
    }

    fn make(key: &mut String, prefix: &str, rest: fmt::Arguments<'_>) {
        key.clear();
        key.push_str(prefix);
        // Writing to a text does not fail.
        key.write_fmt(rest).unwrap_or_default();
    }
}

/// Levels by their address, which stays theirs while they are held here.
#[derive(Default)]
pub(super) struct Encodings(Mutex<HashMap<usize, Arc<Encoded>>>);

impl Encodings {
    pub(super) fn get(&self, levels: &Arc<Levels>) -> Option<Arc<Encoded>> {
        let found = lock(&self.0).get(&Arc::as_ptr(levels).addr()).cloned();
        found.filter(|found| found.at.elapsed() < KNOWN_FOR)
    }

    pub(super) fn insert(&self, encoded: &Arc<Encoded>) {
        let mut all = lock(&self.0);
        if all.len() >= ENCODED_MAX {
            all.clear();
        }
        all.insert(Arc::as_ptr(&encoded.levels).addr(), Arc::clone(encoded));
    }
}
