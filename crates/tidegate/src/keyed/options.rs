//! Options for all keys of a registry: their number, idle time and shards.
//!
//! Plain data with defaults and bounds, so that the configuration file and the builder share validation and
//! messages.

use std::time::Duration;

use thiserror::Error;
use tidegate_core::bucket::PERIOD_MAX;
use tidegate_core::duration::Exact;
use tidegate_core::plan::{FieldValue, Problem};

/// Upper bound of `keys_max`.
pub(crate) const KEYS_MAX: usize = 1 << 30;
/// Learned state of a key is valid for 180 s, like a bad rate: an earlier eviction would be an amnesty.
pub(crate) const IDLE_TTL_MIN: Duration = Duration::from_secs(180);
/// Upper bound of `shards`: more cost more than they save.
pub(crate) const SHARDS_MAX: usize = 1_024;
const SPAN_MAX: Duration = PERIOD_MAX;

/// Options for the throttles of many keys.
///
/// ```
/// use tidegate::KeyedOptions;
///
/// let options = KeyedOptions::default().keys_max(5_000).shards(12);
/// assert_eq!(
///     options.check().unwrap_err().to_string(),
///     "`keyed.shards` is 12, and must be a power of two from 1 to 1024"
/// );
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct KeyedOptions {
    /// Whether the limits apply; if not, everything is admitted and still counted.
    pub enabled: bool,
    /// The maximum number of keys with their own throttle.
    pub keys_max: usize,
    /// How long a key may be idle before it may be evicted with everything learned of it.
    pub idle_ttl: Duration,
    /// The number of shards, each with its own lock: a power of two.
    pub shards: usize,
    /// A request that waited longer than this counts as throttled.
    pub throttled_after: Duration,
}

impl Default for KeyedOptions {
    /// Enabled, 100,000 keys in 16 shards, an idle time of 180 s, and waits over 10 ms count as throttled.
    fn default() -> Self {
        Self {
            enabled: true,
            keys_max: 100_000,
            idle_ttl: IDLE_TTL_MIN,
            shards: 16,
            throttled_after: Duration::from_millis(10),
        }
    }
}

impl KeyedOptions {
    /// Whether the limits apply.
    #[must_use]
    pub const fn enabled(mut self, enabled: bool) -> Self {
        self.enabled = enabled;
        self
    }

    /// The maximum number of keys with their own throttle.
    #[must_use]
    pub const fn keys_max(mut self, keys: usize) -> Self {
        self.keys_max = keys;
        self
    }

    /// How long a key may be idle before it may be evicted with everything learned of it.
    #[must_use]
    pub const fn idle_ttl(mut self, span: Duration) -> Self {
        self.idle_ttl = span;
        self
    }

    /// The number of shards.
    #[must_use]
    pub const fn shards(mut self, shards: usize) -> Self {
        self.shards = shards;
        self
    }

    /// A request that waited longer than this counts as throttled.
    #[must_use]
    pub const fn throttled_after(mut self, span: Duration) -> Self {
        self.throttled_after = span;
        self
    }

    /// Checks every number.
    ///
    /// # Errors
    /// [`InvalidKeyedOptions`] lists every invalid option, with field, value and bound.
    pub fn check(self) -> Result<Self, InvalidKeyedOptions> {
        let problems = self.problems();
        if problems.is_empty() { Ok(self) } else { Err(InvalidKeyedOptions { problems }) }
    }

    /// All options by name, as in [`Problem::field`].
    pub fn fields(&self) -> [(&'static str, FieldValue); 5] {
        // Destructured completely, so that a new field cannot be forgotten here.
        let Self { enabled, keys_max, idle_ttl, shards, throttled_after } = *self;
        [
            ("keyed.enabled", FieldValue::Flag(enabled)),
            ("keyed.keys_max", FieldValue::Count(keys_max as u64)),
            ("keyed.idle_ttl", FieldValue::Span(idle_ttl)),
            ("keyed.shards", FieldValue::Count(shards as u64)),
            ("keyed.throttled_after", FieldValue::Span(throttled_after)),
        ]
    }

    /// One entry for each number that is out of bounds.
    pub(crate) fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        let mut unless = |is_fine: bool, field, value: String, bound: String| {
            if !is_fine {
                problems.push(Problem { field, value, bound });
            }
        };
        let Self { enabled: _, keys_max, idle_ttl, shards, throttled_after } = *self;
        let is_fine = (1..=KEYS_MAX).contains(&keys_max);
        unless(is_fine, "keyed.keys_max", keys_max.to_string(), format!("from 1 to {KEYS_MAX}"));
        let is_fine = (IDLE_TTL_MIN..=SPAN_MAX).contains(&idle_ttl);
        let bound = format!("from {} to {}", Exact(IDLE_TTL_MIN), Exact(SPAN_MAX));
        unless(is_fine, "keyed.idle_ttl", Exact(idle_ttl).to_string(), bound);
        let is_fine = shards.is_power_of_two() && shards <= SHARDS_MAX;
        unless(is_fine, "keyed.shards", shards.to_string(), format!("a power of two from 1 to {SHARDS_MAX}"));
        let bound = format!("from 0s to {}", Exact(SPAN_MAX));
        unless(
            throttled_after <= SPAN_MAX,
            "keyed.throttled_after",
            Exact(throttled_after).to_string(),
            bound,
        );
        problems
    }
}

/// The invalid options of keyed throttles.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{}", problems.iter().map(Problem::to_string).collect::<Vec<_>>().join("; "))]
pub struct InvalidKeyedOptions {
    problems: Vec<Problem>,
}

impl InvalidKeyedOptions {
    /// One entry for each number that is out of bounds.
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_documented_and_within_bounds() {
        let options = KeyedOptions::default();
        let wanted = KeyedOptions {
            enabled: true,
            keys_max: 100_000,
            idle_ttl: Duration::from_secs(180),
            shards: 16,
            throttled_after: Duration::from_millis(10),
        };
        assert_eq!(options, wanted);
        assert_eq!(options.check(), Ok(wanted));
    }

    #[test]
    fn both_ends_of_every_bound_are_valid() {
        let least = KeyedOptions::default().keys_max(1).shards(1).throttled_after(Duration::ZERO);
        assert_eq!(least.idle_ttl(IDLE_TTL_MIN).check(), Ok(least));
        let most = KeyedOptions::default().keys_max(KEYS_MAX).shards(SHARDS_MAX);
        let most = most.idle_ttl(SPAN_MAX).throttled_after(SPAN_MAX);
        assert_eq!(most.check(), Ok(most));
    }

    #[test]
    fn out_of_bounds_option_is_named_in_the_error() {
        let usual = KeyedOptions::default();
        let table = [
            (usual.keys_max(0), "`keyed.keys_max` is 0, and must be from 1 to 1073741824"),
            (usual.keys_max(usize::MAX), "and must be from 1 to 1073741824"),
            (usual.idle_ttl(Duration::from_secs(179)), "and must be from 3m to 366d"),
            (usual.idle_ttl(Duration::MAX), "and must be from 3m to 366d"),
            (usual.shards(0), "`keyed.shards` is 0, and must be a power of two from 1 to 1024"),
            (usual.shards(48), "`keyed.shards` is 48, and must be a power of two from 1 to 1024"),
            (usual.shards(2_048), "`keyed.shards` is 2048, and must be a power of two from 1 to 1024"),
            (usual.throttled_after(Duration::MAX), "and must be from 0s to 366d"),
        ];
        for (options, wanted) in table {
            let invalid = options.check().expect_err(wanted);
            assert_eq!(invalid.problems().len(), 1);
            assert!(invalid.to_string().ends_with(wanted), "{invalid}");
        }
        let all = usual.keys_max(0).shards(3).idle_ttl(Duration::ZERO).throttled_after(Duration::MAX);
        let fields: Vec<_> = all.problems().iter().map(|problem| problem.field).collect();
        assert_eq!(fields, ["keyed.keys_max", "keyed.idle_ttl", "keyed.shards", "keyed.throttled_after"]);
    }
}
