//! Estimates of tokens before a call: input from bytes and a running ratio per model, output from recent calls
//! of the same tenant and model.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Bytes of a request per token, before anything is known of the model.
const BYTES_PER_TOKEN: f64 = 3.5;
/// Weight of the newest ratio. The first one is the ratio of the estimate.
const WEIGHT: f64 = 0.1;
/// Bytes of a form per token: most of it is audio or an image.
const FORM_BYTES_PER_TOKEN: f64 = 1_500.0;
/// The lowest ratio: of a form with much data.
const RATIO_MIN: f64 = 0.0005;
/// More tokens of input per byte are not in the request, but in a conversation, a file or an image that it names.
/// Text has at most one, and providers add the names of roles and the format of tools.
const INPUT_PER_BYTE: u64 = 4;
/// Input that a request can name without containing it: the largest context windows have 2M tokens.
const INPUT_NAMED_MAX: u64 = 1 << 21;
/// Output of a choice that the response need not contain: reasoning. No model produces more than 128k tokens.
const OUTPUT_HIDDEN_MAX: u64 = 1 << 18;
/// How often a call may produce its maximum: that counts for each turn, and a call that runs tools at the
/// provider has several.
const TURNS_MAX: u64 = 16;
/// The most choices of one call.
const CHOICES_MAX: u64 = 128;
/// Recent outputs that are kept of each tenant and model.
const RECENT: usize = 32;
/// Output of a call before anything is known.
const OUTPUT: u64 = 256;
/// The most models, and pairs of tenant and model, that are kept. When there are more, all are forgotten and
/// learned again.
const KEYS_MAX: usize = 4_096;

/// Estimates, learned from the usage of earlier calls.
#[derive(Debug, Default)]
pub(crate) struct Estimates {
    ratios: Mutex<HashMap<String, f64>>,
    outputs: Mutex<HashMap<(String, String), Recent>>,
}

/// The usage of a call, for its estimates to learn from.
#[derive(Debug, Clone, Copy)]
pub(crate) struct UsageSample {
    pub(crate) bytes: u64,
    /// The input that was estimated.
    pub(crate) estimate: u64,
    pub(crate) input: u64,
    pub(crate) output: u64,
}

/// The newest outputs, in a ring.
#[derive(Debug, Default)]
struct Recent {
    values: Vec<u64>,
    next: usize,
}

impl Estimates {
    /// The input tokens of a request of this many bytes, which may be a form.
    pub(crate) fn input(&self, model: &str, bytes: u64, is_form: bool) -> u64 {
        let start = if is_form { BYTES_PER_TOKEN / FORM_BYTES_PER_TOKEN } else { 1.0 };
        let ratio = lock(&self.ratios).get(model).copied().unwrap_or(start);
        whole(as_f64(bytes) / BYTES_PER_TOKEN * ratio)
    }

    /// The output that nine of ten calls do not exceed.
    pub(crate) fn output(&self, tenant: &str, model: &str) -> u64 {
        let outputs = lock(&self.outputs);
        outputs.get(&(tenant.to_owned(), model.to_owned())).map_or(OUTPUT, Recent::p90)
    }

    /// Learns from a call that reported its usage.
    pub(crate) fn learn(&self, tenant: &str, model: &str, sample: UsageSample) {
        let UsageSample { bytes, estimate, input, output } = sample;
        if bytes > 0 && input > 0 && input <= bytes.saturating_mul(INPUT_PER_BYTE) {
            let ratio_of = |tokens| (as_f64(tokens) * BYTES_PER_TOKEN / as_f64(bytes)).max(RATIO_MIN);
            let mut ratios = lock(&self.ratios);
            let ratio = bounded_entry(&mut ratios, model.to_owned(), || ratio_of(estimate));
            *ratio += WEIGHT * (ratio_of(input) - *ratio);
        }
        let mut outputs = lock(&self.outputs);
        bounded_entry(&mut outputs, (tenant.to_owned(), model.to_owned()), Recent::default).push(output);
    }
}

impl Recent {
    fn push(&mut self, value: u64) {
        if self.values.len() < RECENT {
            self.values.push(value);
        } else {
            self.values[self.next] = value;
            self.next = (self.next + 1) % RECENT;
        }
    }

    fn p90(&self) -> u64 {
        let mut sorted = self.values.clone();
        sorted.sort_unstable();
        let at = (sorted.len() * 9).div_ceil(10).saturating_sub(1);
        sorted.get(at).copied().unwrap_or(OUTPUT)
    }
}

/// The most input that a request of this many bytes can have. More is an error of the upstream.
pub(crate) const fn input_max(bytes: u64) -> u64 {
    bytes.saturating_mul(INPUT_PER_BYTE).saturating_add(INPUT_NAMED_MAX)
}

/// The most output that a call can have which received this many bytes. More is an error of the upstream.
pub(crate) fn output_max(received: u64, requested: Option<u64>, choices: u64) -> u64 {
    let choices = choices.clamp(1, CHOICES_MAX);
    let most = received.saturating_add(OUTPUT_HIDDEN_MAX * choices);
    // Some servers take zero for no maximum.
    match requested {
        Some(max @ 1..) => most.min(max.saturating_mul(TURNS_MAX * choices)),
        _ => most,
    }
}

/// The bytes of text that count as many tokens as these bytes, of which `blobs` are encoded data.
pub(crate) const fn text_bytes(bytes: u64, blobs: u64) -> u64 {
    /// Bytes of data per byte of text, as with forms.
    const BLOB: u64 = 428;
    bytes.saturating_sub(blobs).saturating_add(blobs / BLOB)
}

fn bounded_entry<K: Hash + Eq, V>(map: &mut HashMap<K, V>, key: K, new: impl FnOnce() -> V) -> &mut V {
    if map.len() >= KEYS_MAX && !map.contains_key(&key) {
        map.clear();
    }
    map.entry(key).or_insert_with(new)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[expect(clippy::cast_precision_loss, reason = "an estimate")]
const fn as_f64(count: u64) -> f64 {
    count as f64
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "`as` from a float saturates")]
fn whole(tokens: f64) -> u64 {
    tokens.ceil() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(bytes: u64, input: u64, output: u64) -> UsageSample {
        UsageSample { bytes, estimate: bytes.div_ceil(4), input, output }
    }

    /// The first sample was the ratio, for all tenants.
    #[test]
    fn one_call_moves_no_ratio_far() {
        let estimates = Estimates::default();
        estimates.learn("acme", "m", sample(700, 2_800, 1));
        assert!(estimates.input("m", 700, false) <= 450);
        let other = Estimates::default();
        other.learn("acme", "m", sample(700, 2_801, 1));
        assert_eq!(other.input("m", 700, false), 200, "input that is not in the request teaches nothing");
    }

    #[test]
    fn usage_has_a_maximum() {
        assert_eq!(input_max(1_000), 4_000 + (1 << 21), "images, files and conversations by their name");
        // Received bytes, the maximum, choices, and the most output.
        let table = [
            (1_000, None, 1, 1_000 + (1 << 18)),
            (1_000, None, 0, 1_000 + (1 << 18)),
            (1_000, Some(50), 2, 1_600),
            (1_000, Some(0), 2, 1_000 + (1 << 19)),
            (1_000, Some(u64::MAX), u64::MAX, 1_000 + (1 << 25)),
        ];
        for (received, max, choices, wanted) in table {
            assert_eq!(output_max(received, max, choices), wanted, "{received} {max:?} {choices}");
        }
    }

    #[test]
    fn input_follows_the_ratio_of_its_model() {
        let estimates = Estimates::default();
        assert_eq!(estimates.input("m", 700, false), 200);
        for _ in 0..80 {
            estimates.learn("acme", "m", sample(700, 400, 1));
        }
        assert_eq!(estimates.input("m", 700, false), 400);
        assert_eq!(estimates.input("other", 700, false), 200);
        assert_eq!(estimates.input("audio", 15_000, true), 10);
    }

    #[test]
    fn output_is_the_p90_of_recent_calls() {
        let estimates = Estimates::default();
        assert_eq!(estimates.output("acme", "m"), OUTPUT);
        for output in [100_000, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10] {
            estimates.learn("acme", "m", sample(0, 0, output));
        }
        assert_eq!(estimates.output("acme", "m"), 10);
        for _ in 0..RECENT {
            estimates.learn("acme", "m", sample(0, 0, 50));
        }
        assert_eq!(estimates.output("acme", "m"), 50, "old calls are forgotten");
        assert_eq!(estimates.output("other", "m"), OUTPUT);
    }

    #[test]
    fn memory_is_bounded() {
        let estimates = Estimates::default();
        for number in 0..3 * KEYS_MAX {
            estimates.learn(&number.to_string(), &number.to_string(), sample(10, 3, 3));
        }
        assert!(lock(&estimates.ratios).len() <= KEYS_MAX && lock(&estimates.outputs).len() <= KEYS_MAX);
    }
}
