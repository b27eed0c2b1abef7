//! The state of one limit of one subject: bucket, rule, rule version and units consumed.
//!
//! Every engine stores these four; engines in Rust use this type. A change of the rule keeps the level,
//! capped to the new burst. A call resolved before the last change is decided by the current rule, and the
//! response shows that the caller is stale.

use std::sync::Arc;

use crate::bucket::Bucket;
use crate::limit::policy::Version;
use crate::limit::rule::Rule;
use crate::time::Stamp;

/// The state of a limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Meter {
    bucket: Bucket<Stamp>,
    rule: Arc<Rule>,
    version: Version,
    consumed: i64,
}

impl Meter {
    /// A full bucket with this rule, which equals an unused one.
    pub const fn new(rule: Arc<Rule>, version: Version) -> Self {
        Self { bucket: Bucket::full(), rule, version, consumed: 0 }
    }

    /// A state read back from an engine.
    pub const fn restored(bucket: Bucket<Stamp>, rule: Arc<Rule>, version: Version, consumed: i64) -> Self {
        Self { bucket, rule, version, consumed }
    }

    /// Adopts the caller's rule unless its version is older. The level stays, capped to the new burst.
    #[inline]
    pub fn follow(&mut self, rule: &Arc<Rule>, version: Version, now: Stamp) {
        if version < self.version {
            return;
        }
        self.version = version;
        if Arc::ptr_eq(rule, &self.rule) {
            return;
        }
        if rule.shape() != self.rule.shape() {
            self.bucket.reshape(self.rule.shape(), rule.shape(), now);
        }
        self.rule = Arc::clone(rule);
    }

    /// When `units` will be available: `now` or earlier means at once, [`Stamp::MAX`] never. Zero units only
    /// require that there is no debt.
    #[inline]
    pub fn ready_at(&self, units: u64, now: Stamp) -> Stamp {
        self.bucket.ready_at(self.rule.shape(), units, now)
    }

    /// The bucket after taking `units`, if they are available; to [`put`](Self::put) once all other limits of
    /// the call can be taken too.
    #[inline]
    pub fn ask(&self, units: u64, now: Stamp) -> Option<Bucket<Stamp>> {
        self.bucket.taking(self.rule.shape(), units, now).ok()
    }

    /// Takes `units`, with the bucket that [`ask`](Self::ask) returned.
    #[inline]
    pub const fn put(&mut self, left: Bucket<Stamp>, units: u64) {
        self.bucket = left;
        self.consumed = self.consumed.saturating_add_unsigned(units);
    }

    /// Takes `units`, available or not. Missing units become debt.
    #[inline]
    pub fn take(&mut self, units: u64, now: Stamp) {
        self.bucket.debit(self.rule.shape(), units, now);
        self.consumed = self.consumed.saturating_add_unsigned(units);
    }

    /// Returns `units`, up to a full bucket.
    #[inline]
    pub fn give_back(&mut self, units: u64) {
        self.bucket.credit(self.rule.shape(), units);
        self.consumed = self.consumed.saturating_sub_unsigned(units);
    }

    /// Takes a positive `delta`, returns a negative one.
    pub fn adjust(&mut self, delta: i64, now: Stamp) {
        match u64::try_from(delta) {
            Ok(more) => self.take(more, now),
            Err(_) => self.give_back(delta.unsigned_abs()),
        }
    }

    /// Sets the units available, at most the burst. Units taken so far stay counted.
    pub fn set(&mut self, units: u64, now: Stamp) {
        self.bucket = Bucket::holding(self.rule.shape(), units, now);
    }

    /// Whole units that can be [taken](Self::take) at `now` before the debt is above `debt_max`.
    pub fn room(&self, debt_max: u64, now: Stamp) -> u64 {
        self.bucket.room(self.rule.shape(), debt_max, now)
    }

    /// Whole units available at `now`; below zero is debt.
    pub fn available(&self, now: Stamp) -> i64 {
        self.bucket.level(self.rule.shape(), now)
    }

    /// Whether the bucket is full at `now`.
    pub fn is_full(&self, now: Stamp) -> bool {
        self.bucket.is_full(now)
    }

    /// The bucket.
    pub const fn bucket(&self) -> &Bucket<Stamp> {
        &self.bucket
    }

    /// The rule it follows.
    pub const fn rule(&self) -> &Arc<Rule> {
        &self.rule
    }

    /// The newest version that a caller has brought.
    pub const fn version(&self) -> Version {
        self.version
    }

    /// Units taken minus units returned, since the bucket was created.
    pub const fn consumed(&self) -> i64 {
        self.consumed
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::limit::rule::Limit;

    const START: Stamp = Stamp::from_secs(1_800_000_000);

    fn rule(amount: u64, burst: u64) -> Arc<Rule> {
        Arc::new(Limit::per_minute("tpm", amount).burst(burst).check().expect("valid"))
    }

    #[test]
    fn newer_rule_keeps_level_up_to_its_burst() {
        let mut meter = Meter::new(rule(100, 100), Version::new(1));
        meter.take(30, START);
        meter.follow(&rule(200, 200), Version::new(2), START);
        assert_eq!(meter.available(START), 70);
        meter.follow(&rule(2, 2), Version::new(3), START);
        assert_eq!(meter.available(START), 2);
        assert_eq!((meter.consumed(), meter.version()), (30, Version::new(3)));
    }

    #[test]
    fn stale_caller_changes_nothing() {
        let new = rule(200, 200);
        let mut meter = Meter::new(Arc::clone(&new), Version::new(5));
        let before = meter.clone();
        meter.follow(&rule(1, 1), Version::new(4), START);
        assert_eq!(meter, before);
        // The same rule at a newer version raises the version: versions in between are stale from now on.
        meter.follow(&new, Version::new(9), START);
        meter.follow(&rule(1, 1), Version::new(7), START);
        assert_eq!((meter.rule().shape().burst(), meter.version()), (200, Version::new(9)));
    }

    #[test]
    fn ask_then_put_equals_take() {
        let mut asked = Meter::new(rule(100, 100), Version::ZERO);
        let mut taken = asked.clone();
        let left = asked.ask(60, START).expect("it is full");
        assert_eq!(asked, taken);
        asked.put(left, 60);
        taken.take(60, START);
        assert_eq!(asked, taken);
        assert_eq!((asked.ask(41, START), asked.ask(101, START)), (None, None));
    }

    #[test]
    fn debt_is_below_zero_and_is_repaid_by_time() {
        let mut meter = Meter::new(rule(100_000, 100_000), Version::ZERO);
        meter.adjust(150_000, START);
        assert_eq!(meter.available(START), -50_000);
        assert!(meter.ready_at(0, START) > START);
        let later = START + Duration::from_secs(30);
        assert_eq!((meter.available(later), meter.ready_at(0, later)), (0, later));
        meter.adjust(-150_000, later);
        assert!(meter.is_full(later));
        assert_eq!(meter.consumed(), 0);
    }

    #[test]
    fn set_level_replaces_a_debt_and_an_excess() {
        let mut meter = Meter::new(rule(7, 100), Version::ZERO);
        meter.take(5_000, START);
        meter.set(33, START);
        assert_eq!((meter.available(START), meter.consumed()), (33, 5_000));
        meter.set(0, START);
        assert_eq!((meter.available(START), meter.ready_at(0, START)), (0, START));
        meter.set(101, START);
        assert!(meter.is_full(START) && meter.available(START) == 100);
    }

    #[test]
    fn restored_meter_equals_the_original() {
        let mut meter = Meter::new(rule(7, 9), Version::new(2));
        meter.take(3, START);
        let bucket = Bucket::from_full_at(meter.bucket().full_at());
        let restored = Meter::restored(bucket, Arc::clone(meter.rule()), meter.version(), meter.consumed());
        assert_eq!(restored, meter);
    }
}
