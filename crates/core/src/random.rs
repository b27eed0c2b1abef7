//! Randomness as an input: a seeded stream, or one fixed value for tests.
//!
//! Jitter needs no secrecy, so the stream is SplitMix64: eight bytes of state, no dependency, and
//! reproducible from its seed.

/// A source of fractions in `[0, 1)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Random(Source);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    Stream(u64),
    Fixed(u64),
}

impl Random {
    /// A stream that is determined by its seed.
    pub const fn seeded(seed: u64) -> Self {
        Self(Source::Stream(seed))
    }

    /// Always the same fraction, clamped to `[0, 1]`; NaN counts as 0. For tests.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "`as` from a float saturates, and a fraction needs no more than 53 bits"
    )]
    pub fn fixed(fraction: f64) -> Self {
        Self(Source::Fixed((fraction * u64::MAX as f64) as u64))
    }

    /// Derives an independent source for `number`: another stream, or the same fixed value.
    #[must_use]
    pub const fn fork(self, number: u64) -> Self {
        match self.0 {
            Source::Fixed(_) => self,
            // Streams with nearby states would overlap, so mix the number into all bits.
            Source::Stream(state) => Self(Source::Stream(mix(state ^ mix(number)))),
        }
    }

    /// A uniform draw from `[0, span)`: 0 when `span` is 0.
    pub fn below(&mut self, span: u64) -> u64 {
        let product = u128::from(self.next()) * u128::from(span);
        let high = product >> 64;
        // A fixed fraction has 53 bits; rounding to the nearest makes 0.4 of a second exactly 400 ms.
        let half = u128::from(matches!(self.0, Source::Fixed(_))) & ((product >> 63) & 1);
        u64::try_from(high + half).unwrap_or(u64::MAX)
    }

    /// A uniform draw from `[0, 1)`.
    #[expect(clippy::cast_precision_loss, reason = "53 bits are exact")]
    pub(crate) fn fraction(&mut self) -> f64 {
        const BITS: u64 = 1 << 53;
        self.below(BITS) as f64 / BITS as f64
    }

    fn next(&mut self) -> u64 {
        match &mut self.0 {
            Source::Fixed(value) => *value,
            Source::Stream(state) => {
                *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
                mix(*state)
            }
        }
    }
}

const fn mix(state: u64) -> u64 {
    let mut z = state;
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fixed_fraction_is_exact_to_the_nanosecond() {
        assert_eq!(Random::fixed(0.4).below(500_000_000), 200_000_000);
        assert_eq!(Random::fixed(0.0).below(1_000), 0);
        assert_eq!(Random::fixed(1.0).below(1_000), 1_000);
        assert_eq!(Random::fixed(f64::NAN).below(1_000), 0);
    }

    #[test]
    fn a_stream_stays_below_its_span_and_fills_it() {
        let mut random = Random::seeded(7);
        let draws: Vec<u64> = (0..10_000).map(|_| random.below(10)).collect();
        assert!(draws.iter().all(|draw| *draw < 10));
        for wanted in 0..10 {
            let seen = draws.iter().filter(|draw| **draw == wanted).count();
            assert!((800..1_200).contains(&seen), "{wanted} was drawn {seen} times in 10,000");
        }
        assert_eq!(random.below(0), 0);
    }

    #[test]
    fn the_same_seed_gives_the_same_stream() {
        let (mut one, mut two) = (Random::seeded(3), Random::seeded(3));
        assert!((0..100).all(|_| one.below(1 << 40) == two.below(1 << 40)));
    }
}
