//! Delays between attempts: fixed or exponential backoff, with optional jitter.

use std::ops::RangeInclusive;
use std::time::Duration;

use crate::random::Random;
use crate::time::nanos;

/// Delays between attempts.
///
/// ```
/// use std::time::Duration;
/// use tidegate_core::{backoff::Backoff, random::Random};
///
/// let backoff = Backoff::exponential(Duration::from_millis(500), Duration::from_secs(60));
/// assert_eq!(backoff.delay(2, &mut Random::seeded(1)), Duration::from_secs(2));
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Backoff {
    growth: Growth,
    jitter: Jitter,
}

#[derive(Debug, Clone, PartialEq)]
enum Growth {
    Fixed(Duration),
    Exponential { base: Duration, max: Duration },
}

/// How a delay is randomized, so that requests that failed together do not retry together.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Jitter {
    /// The delay as it is.
    None,
    /// Full jitter: uniform between zero and the delay.
    Full,
    /// The delay times a uniform fraction from this range, such as `0.75..=1.0`.
    Range(RangeInclusive<f64>),
}

impl Backoff {
    /// The same delay every time.
    pub const fn fixed(delay: Duration) -> Self {
        Self { growth: Growth::Fixed(delay), jitter: Jitter::None }
    }

    /// `base`, twice that, four times that, and so on up to `max`.
    pub const fn exponential(base: Duration, max: Duration) -> Self {
        Self { growth: Growth::Exponential { base, max }, jitter: Jitter::None }
    }

    /// The same with jitter.
    #[must_use]
    pub const fn jitter(mut self, jitter: Jitter) -> Self {
        self.jitter = jitter;
        self
    }

    /// The first delay and the longest.
    pub const fn span(&self) -> (Duration, Duration) {
        match self.growth {
            Growth::Fixed(delay) => (delay, delay),
            Growth::Exponential { base, max } => (base, max),
        }
    }

    /// The jitter.
    pub const fn spread(&self) -> &Jitter {
        &self.jitter
    }

    /// Whether delays grow.
    pub const fn is_exponential(&self) -> bool {
        matches!(self.growth, Growth::Exponential { .. })
    }

    /// The delay after the attempt numbered `attempt`, counted from 0.
    pub fn delay(&self, attempt: u32, random: &mut Random) -> Duration {
        let delay = match self.growth {
            Growth::Fixed(delay) => delay,
            Growth::Exponential { base, max } => {
                base.saturating_mul(1_u32.checked_shl(attempt).unwrap_or(u32::MAX)).min(max)
            }
        };
        match &self.jitter {
            Jitter::None => delay,
            Jitter::Full => Duration::from_nanos(random.below(nanos(delay))),
            Jitter::Range(range) => {
                let (low, high) = (share(delay, *range.start()), share(delay, *range.end()));
                Duration::from_nanos(low.saturating_add(random.below(high.saturating_sub(low))))
            }
        }
    }
}

/// A fraction of a delay in nanoseconds; outside `[0, 1]` it is clamped, and NaN counts as 0.
fn share(delay: Duration, fraction: f64) -> u64 {
    Random::fixed(fraction).below(nanos(delay))
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn millis(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    fn delay(backoff: &Backoff, attempt: u32) -> Duration {
        backoff.delay(attempt, &mut Random::seeded(1))
    }

    #[test]
    fn exponential_delays_double_up_to_their_maximum() {
        let slow = Backoff::exponential(millis(500), millis(60_000));
        assert_eq!([0, 1, 2].map(|attempt| delay(&slow, attempt)), [500, 1_000, 2_000].map(millis));
        let capped = Backoff::exponential(millis(1_000), millis(10_000));
        assert_eq!([3, 4, 10].map(|attempt| delay(&capped, attempt)), [8_000, 10_000, 10_000].map(millis));
        assert_eq!(delay(&capped, u32::MAX), millis(10_000));
    }

    #[test]
    fn a_range_of_jitter_stays_in_its_range() {
        let http = Backoff::exponential(millis(500), millis(10_000)).jitter(Jitter::Range(0.75..=1.0));
        let mut random = Random::seeded(42);
        for _ in 0..1_000 {
            assert!((millis(375)..=millis(500)).contains(&http.delay(0, &mut random)));
            assert!((millis(7_500)..=millis(10_000)).contains(&http.delay(10, &mut random)));
        }
    }

    #[test]
    fn full_jitter_is_anything_up_to_the_delay() {
        let full = Backoff::fixed(millis(100)).jitter(Jitter::Full);
        let mut random = Random::seeded(42);
        let drawn: Vec<Duration> = (0..1_000).map(|_| full.delay(0, &mut random)).collect();
        assert!(drawn.iter().all(|delay| *delay < millis(100)));
        assert!(
            drawn.iter().any(|delay| *delay < millis(10)) && drawn.iter().any(|delay| *delay > millis(90))
        );
    }
}
