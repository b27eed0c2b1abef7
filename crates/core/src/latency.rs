//! Log-linear histogram of recent latencies in half a kilobyte, for any number of samples.
//!
//! Bucket widths grow with the value, eight buckets per doubling, so the middle of a bucket is within 1/16 of
//! every sample in it. At 1,024 samples all counts are halved, so that old samples fade.

use std::time::Duration;

use crate::time::nanos;

/// Bits below the highest one that select the bucket of a sample.
const FINE_BITS: u32 = 3;
/// Buckets per doubling.
const FINE: usize = 1 << FINE_BITS;
/// Samples are capped just below 2 to the power of this, in microseconds: 71 minutes.
const MICROS_BITS: u32 = 32;
const MICROS_MAX: u64 = (1 << MICROS_BITS) - 1;
/// The first [`FINE`] buckets hold a microsecond each; each further bit adds as many.
const BUCKETS: usize = FINE * (MICROS_BITS - FINE_BITS + 1) as usize;
/// At this many samples, all counts are halved.
const SAMPLES_MAX: u16 = 1_024;
const NANOS_PER_MICRO: u64 = 1_000;

/// Mean and quantiles of recent latencies.
///
/// A quantile is within 1/16 of the sample with that rank, or within a microsecond. The mean is exact until
/// samples fade, and weighs them alike from then on. Samples over 71 minutes count as 71 minutes.
///
/// ```
/// use std::time::Duration;
/// use tidegate_core::latency::Latency;
///
/// let mut latency = Latency::default();
/// for millis in 1..=100 {
///     latency.record(Duration::from_millis(millis));
/// }
/// assert_eq!(latency.mean(), Some(Duration::from_micros(50_500)));
/// let median = latency.quantile(0.5).unwrap().as_secs_f64();
/// assert!((median - 0.050).abs() <= 0.050 / 16.0);
/// ```
#[derive(Debug, Clone)]
pub struct Latency {
    buckets: [u16; BUCKETS],
    /// The sum of all buckets; always below [`SAMPLES_MAX`].
    samples: u16,
    /// The sum of the samples in nanoseconds, faded like the counts.
    sum: u64,
}

impl Default for Latency {
    fn default() -> Self {
        Self { buckets: [0; BUCKETS], samples: 0, sum: 0 }
    }
}

impl Latency {
    /// Records one sample.
    #[inline]
    pub fn record(&mut self, sample: Duration) {
        let sample = nanos(sample).min(MICROS_MAX * NANOS_PER_MICRO);
        self.buckets[index(sample / NANOS_PER_MICRO)] += 1;
        self.samples += 1;
        self.sum += sample;
        if self.samples == SAMPLES_MAX {
            self.fade();
        }
    }

    /// The mean of the samples; `None` without any.
    pub fn mean(&self) -> Option<Duration> {
        self.sum.checked_div(u64::from(self.samples)).map(Duration::from_nanos)
    }

    /// The value that a fraction `share` of the samples, such as 0.95, does not exceed; `None` without
    /// samples.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a rank of at most 1,024; a cast saturates, and turns NaN into zero"
    )]
    pub fn quantile(&self, share: f64) -> Option<Duration> {
        let rank = ((share * f64::from(self.samples)).ceil() as u16).clamp(1, self.samples.max(1));
        let mut below = 0;
        let found = self.buckets.iter().position(|count| {
            below += count;
            below >= rank
        });
        found.map(|index| Duration::from_micros(middle(index)))
    }

    /// Halves all counts, and the sum with them.
    #[cold]
    fn fade(&mut self) {
        let before = u128::from(self.samples);
        self.samples = 0;
        for count in &mut self.buckets {
            // Rounds down, so that a single old sample does not stay forever.
            *count /= 2;
            self.samples += *count;
        }
        let left = u128::from(self.sum) * u128::from(self.samples) / before;
        self.sum = u64::try_from(left).unwrap_or(u64::MAX);
    }
}

/// The bucket of a sample.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "three bits, and a number of bits")]
const fn index(micros: u64) -> usize {
    if micros < FINE as u64 {
        return micros as usize;
    }
    let shift = micros.ilog2() - FINE_BITS;
    // The shifted value keeps its highest bit, which counts as one doubling.
    shift as usize * FINE + (micros >> shift) as usize
}

/// The middle of a bucket, in microseconds.
const fn middle(index: usize) -> u64 {
    if index < FINE {
        return index as u64;
    }
    let shift = index / FINE - 1;
    let lowest = ((index % FINE + FINE) as u64) << shift;
    lowest + (1 << shift) / 2
}

#[cfg(test)]
#[path = "latency_tests.rs"]
mod tests;
