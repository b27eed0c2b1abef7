//! The keys and their value ranges. Constraints between keys are in `assemble.rs`.

use std::ops::RangeInclusive;
use std::time::Duration;

use tidegate_core::bucket::{AMOUNT_MAX, PERIOD_MAX};
use tidegate_core::duration::Exact;

use crate::keyed::options::{IDLE_TTL_MIN, KEYS_MAX, SHARDS_MAX};

/// As in core: the maximum number of slots, probes or waiters.
const COUNT_MAX: u64 = 1 << 30;
/// As in core: bytes and tokens are exact up to this.
const UNITS_MAX: u64 = 1 << 53;
const ATTEMPTS_MAX: u64 = 1_000;
const SLICES_MAX: u64 = 1_024;
/// As in core: the range of rates and their steps, per second.
const LEAST: f64 = 1e-6;
const MOST: f64 = 1e6;
const NANO: Duration = Duration::from_nanos(1);

/// Keys with a larger edit distance are not suggested.
const DISTANCE_MAX: usize = 2;

/// All keys, in the order of output.
pub fn fields() -> &'static [Field] {
    &FIELDS
}

/// A key and its valid values.
///
/// ```
/// let field = tidegate::config::fields().iter().find(|field| field.key() == "slots.max").unwrap();
/// assert_eq!(field.variable("TIDEGATE"), "TIDEGATE_SLOTS_MAX");
/// assert_eq!(field.kind(), "a whole number");
/// assert_eq!(field.bounds(), "from 1 to 1073741824");
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Field {
    key: &'static str,
    kind: Kind,
}

impl Field {
    /// The key: `slots.max`.
    pub const fn key(&self) -> &'static str {
        self.key
    }

    /// The environment variable for the key: `TIDEGATE_SLOTS_MAX`.
    pub fn variable(&self, prefix: &str) -> String {
        format!("{prefix}_{}", self.key.replace('.', "_").to_ascii_uppercase())
    }

    /// The type of its value: `a time`.
    pub const fn kind(&self) -> &'static str {
        match self.kind {
            Kind::Whole { .. } | Kind::PowerOfTwo { .. } => "a whole number",
            Kind::Span { .. } => "a time",
            Kind::Fraction { .. } | Kind::Number { .. } => "a number",
            Kind::Word(_) => "a word",
            Kind::Flag => "true or false",
            Kind::Rates | Kind::Budgets => "a list",
        }
    }

    /// Its value range: `from 1 to 1000`.
    pub fn bounds(&self) -> String {
        self.kind.bounds()
    }

    pub(super) const fn shape(&self) -> &Kind {
        &self.kind
    }
}

/// The valid values of a key.
#[derive(Debug, Clone, Copy)]
pub(super) enum Kind {
    Whole {
        min: u64,
        max: u64,
    },
    PowerOfTwo {
        max: u64,
    },
    Span {
        min: Duration,
        max: Duration,
    },
    Fraction {
        min: f64,
    },
    Number {
        min: f64,
        max: f64,
    },
    Word(&'static [&'static str]),
    Flag,
    /// Named rates, by their text.
    Rates,
    /// Named budgets, by their text.
    Budgets,
}

impl Kind {
    /// The value range, in the same words as core.
    pub(super) fn bounds(&self) -> String {
        match self {
            Self::Whole { min, max } => format!("from {min} to {max}"),
            Self::PowerOfTwo { max } => format!("a power of two from 1 to {max}"),
            Self::Span { min, max } => format!("from {} to {}", Exact(*min), Exact(*max)),
            Self::Number { min, max } => format!("from {min} to {max}"),
            Self::Fraction { min } if *min > 0.0 => "above 0 and at most 1".to_owned(),
            Self::Fraction { .. } => "from 0 to 1".to_owned(),
            Self::Word(words) => {
                words.iter().map(|word| format!("`{word}`")).collect::<Vec<_>>().join(" or ")
            }
            Self::Flag => "`true` or `false`".to_owned(),
            Self::Rates => "of `name:amount/period[:burst]`".to_owned(),
            Self::Budgets => "of `name:tokens/window[:kind][:alone]`".to_owned(),
        }
    }

    /// The same for a value of the wrong type.
    pub(super) fn demand(&self) -> String {
        match self {
            Self::Whole { .. } => format!("a whole number {}", self.bounds()),
            Self::Span { .. } => {
                format!("a time {}, in seconds or with a unit, such as `200ms`, `1.5s`, `2m`", self.bounds())
            }
            Self::Fraction { .. } | Self::Number { .. } => format!("a number {}", self.bounds()),
            Self::Rates => format!("a list {}, such as `rpm:500/min, rpd:10k/day`", self.bounds()),
            Self::Budgets => format!("a list {}, such as `itpm:40k/min:input_tokens`", self.bounds()),
            Self::PowerOfTwo { .. } | Self::Word(_) | Self::Flag => self.bounds(),
        }
    }
}

/// The field of a key.
pub(super) fn field(key: &str) -> Option<&'static Field> {
    FIELDS.iter().find(|field| field.key == key)
}

/// Whether `key` is a group that contains keys.
pub(super) fn is_group(key: &str) -> bool {
    FIELDS.iter().any(|field| is_inside(field.key, key))
}

/// The name most similar to `name`.
pub(super) fn closest(name: &str, names: impl Iterator<Item = String>) -> Option<String> {
    let distances = names.filter_map(|known| {
        // Skip names of very different length: they are far from every key.
        let is_near = known.len().abs_diff(name.len()) <= 4 * DISTANCE_MAX;
        let distance = is_near.then(|| distance(name, &known)).filter(|distance| *distance <= DISTANCE_MAX);
        distance.map(|distance| (distance, known))
    });
    // The first of equally similar names.
    distances.min_by_key(|(distance, _)| *distance).map(|(_, known)| known)
}

/// The key most similar to an unknown one; for a group that was given a value, its first key.
pub(super) fn closest_key(key: &str) -> Option<String> {
    let inside = || FIELDS.iter().find(|field| is_inside(field.key, key)).map(|field| field.key.to_owned());
    closest(key, FIELDS.iter().map(|field| field.key.to_owned())).or_else(inside)
}

fn is_inside(key: &str, group: &str) -> bool {
    key.strip_prefix(group).is_some_and(|rest| rest.starts_with('.'))
}

/// The Levenshtein distance.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, letter) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, other) in b.iter().enumerate() {
            let changed = diagonal + usize::from(letter != *other);
            diagonal = row[j + 1];
            row[j + 1] = changed.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

const fn whole(key: &'static str, bounds: RangeInclusive<u64>) -> Field {
    Field { key, kind: Kind::Whole { min: *bounds.start(), max: *bounds.end() } }
}

const fn count(key: &'static str) -> Field {
    whole(key, 1..=COUNT_MAX)
}

const fn span(key: &'static str, min: Duration) -> Field {
    Field { key, kind: Kind::Span { min, max: PERIOD_MAX } }
}

const fn fraction(key: &'static str, min: f64) -> Field {
    Field { key, kind: Kind::Fraction { min } }
}

const fn number(key: &'static str, bounds: RangeInclusive<f64>) -> Field {
    Field { key, kind: Kind::Number { min: *bounds.start(), max: *bounds.end() } }
}

const fn word(key: &'static str, words: &'static [&'static str]) -> Field {
    Field { key, kind: Kind::Word(words) }
}

/// The schema: one line per key, in the order of `Draft`, followed by the keys of keyed throttles.
static FIELDS: [Field; 67] = [
    word("preset", &["auto", "gentle", "layered", "host", "empty"]),
    count("slots.min"),
    count("slots.start"),
    count("slots.max"),
    count("recovery_slots"),
    whole("bytes.capacity", 1..=UNITS_MAX),
    whole("bytes.recovering_price", 1..=u16::MAX as u64),
    span("pace.interval_min", Duration::ZERO),
    span("pace.interval_max", Duration::ZERO),
    fraction("pace.jitter", 0.0),
    whole("rate.amount", 1..=AMOUNT_MAX),
    span("rate.period", NANO),
    whole("rate.burst", 1..=u64::MAX),
    Field { key: "rates", kind: Kind::Rates },
    whole("budget.tokens", 1..=UNITS_MAX),
    span("budget.window", NANO),
    word("budget.oversize", &["refuse", "alone"]),
    Field { key: "budgets", kind: Kind::Budgets },
    count("circuit.failures"),
    fraction("circuit.error_rate", f64::MIN_POSITIVE),
    count("circuit.samples_min"),
    span("circuit.window", NANO),
    whole("circuit.slices", 1..=SLICES_MAX),
    span("circuit.open_for", Duration::ZERO),
    count("circuit.probes"),
    span("pause.max", Duration::ZERO),
    span("pause.tail", Duration::ZERO),
    whole("pause.sizes.small_max", 0..=u64::MAX),
    span("pause.sizes.small", Duration::ZERO),
    span("pause.sizes.large", Duration::ZERO),
    word("controller", &["fixed", "brake", "aimd", "auto"]),
    count("brake.failures"),
    fraction("brake.share", 0.0),
    span("brake.within", NANO),
    span("brake.cooling", NANO),
    count("brake.ceiling_periods"),
    number("aimd.rate_min", LEAST..=MOST),
    number("aimd.rate_max", LEAST..=MOST),
    number("aimd.increase", LEAST..=MOST),
    number("aimd.decrease", LEAST..=1.0 - LEAST),
    span("aimd.latency_target", NANO),
    number("aimd.latency_factor", 1.0..=1_000.0),
    number("aimd.latency_weight", LEAST..=1.0),
    word("aimd.slow_start", &["off", "on"]),
    span("aimd.memory", Duration::ZERO),
    number("auto.rate_min", LEAST..=1e9),
    number("auto.rate_start", LEAST..=1e9),
    number("auto.rate_max", LEAST..=1e9),
    whole("retry.attempts", 1..=ATTEMPTS_MAX),
    word("retry.backoff", &["exponential", "fixed"]),
    span("retry.backoff_base", Duration::ZERO),
    span("retry.backoff_max", Duration::ZERO),
    word("retry.jitter", &["none", "full", "range"]),
    fraction("retry.jitter_min", 0.0),
    fraction("retry.jitter_max", 0.0),
    fraction("retry.budget.share", 0.0),
    whole("retry.budget.at_least", 0..=COUNT_MAX),
    span("retry.budget.window", NANO),
    word("retry.when_refused", &["stop", "wait"]),
    whole("total", 0..=u64::MAX),
    whole("milestone_percent", 1..=100),
    count("waiters_max"),
    Field { key: "keyed.enabled", kind: Kind::Flag },
    whole("keyed.keys_max", 1..=KEYS_MAX as u64),
    span("keyed.idle_ttl", IDLE_TTL_MIN),
    Field { key: "keyed.shards", kind: Kind::PowerOfTwo { max: SHARDS_MAX as u64 } },
    span("keyed.throttled_after", Duration::ZERO),
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn no_two_keys_share_a_variable() {
        let variables: BTreeSet<_> = FIELDS.iter().map(|field| field.variable("T")).collect();
        assert_eq!(variables.len(), FIELDS.len());
    }

    #[test]
    fn no_key_is_a_group() {
        assert!(FIELDS.iter().all(|field| !is_group(field.key)));
    }

    #[test]
    fn closest_key_is_at_most_two_edits_away() {
        let table = [
            ("slots.maks", Some("slots.max")),
            ("slot.max", Some("slots.max")),
            ("budget.windows", Some("budget.window")),
            ("circuit.slice", Some("circuit.slices")),
            ("keyed", Some("keyed.enabled")),
            ("keyed.shard", Some("keyed.shards")),
            ("waitersmax", Some("waiters_max")),
            ("slots", Some("slots.min")),
            ("pause.sizes", Some("pause.sizes.small_max")),
            ("concurrency", None),
            ("", None),
        ];
        for (given, wanted) in table {
            assert_eq!(closest_key(given).as_deref(), wanted, "{given}");
        }
    }

    #[test]
    fn distance_counts_edits() {
        for (a, b, wanted) in [("", "", 0), ("a", "", 1), ("kitten", "sitting", 3), ("ab", "ba", 2)] {
            assert_eq!(distance(a, b), wanted);
        }
    }
}
