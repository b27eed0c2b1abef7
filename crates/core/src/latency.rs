//! How long successes took of late, in half a kilobyte, however many there were.
//!
//! Samples are counted in buckets whose width grows with the value: eight to each doubling, so that the middle
//! of a bucket is within a sixteenth of everything in it. When 1,024 samples are in, all counts are halved: what
//! was long ago fades, and what is new shows.

use std::time::Duration;

use crate::time::nanos;

/// Bits of a sample that its bucket keeps below the highest one.
const FINE_BITS: u32 = 3;
/// Buckets to each doubling.
const FINE: usize = 1 << FINE_BITS;
/// Samples are below 2 to this many microseconds, which is 71 minutes; longer ones count as just below.
const MICROS_BITS: u32 = 32;
const MICROS_MAX: u64 = (1 << MICROS_BITS) - 1;
/// The first [`FINE`] hold a microsecond each, and then come as many for each further bit.
const BUCKETS: usize = FINE * (MICROS_BITS - FINE_BITS + 1) as usize;
/// With this many samples all counts are halved.
const SAMPLES_MAX: u16 = 1_024;
const NANOS_PER_MICRO: u64 = 1_000;

/// The recent past of a latency: its mean and its quantiles.
///
/// A quantile is within a sixteenth of the sample that has that rank, or a microsecond. The mean is exact until
/// samples fade, and from then on weighs them alike. Samples over 71 minutes count as that.
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
    /// The sum of the buckets, always below [`SAMPLES_MAX`].
    samples: u16,
    /// Of the samples that count, in nanoseconds.
    sum: u64,
}

impl Default for Latency {
    fn default() -> Self {
        Self { buckets: [0; BUCKETS], samples: 0, sum: 0 }
    }
}

impl Latency {
    /// Counts one sample.
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

    /// The mean of the samples that count; `None` without any.
    pub fn mean(&self) -> Option<Duration> {
        self.sum.checked_div(u64::from(self.samples)).map(Duration::from_nanos)
    }

    /// The value that a share of `share` of the samples does not exceed, such as 0.95; `None` without any.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a rank among at most 1,024; a cast of what is no rank comes out at the nearest, or zero"
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
            // Down: a lone sample of long ago must not stay for good.
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
    // What is left after the shift has its highest bit set, and that bit counts as one doubling.
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
