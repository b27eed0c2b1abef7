//! Seeded randomness with the distributions of traffic.

/// SplitMix64: every run is reproducible from its seed.
#[derive(Debug, Clone)]
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) const fn seeded(seed: u64) -> Self {
        Self(seed)
    }

    /// Uniform in `[0, 1)`.
    #[expect(clippy::cast_precision_loss, reason = "53 bits are exact")]
    pub(crate) fn uniform(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((bits ^ (bits >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// The time to the next event of a Poisson process with `rate` per second.
    pub(crate) fn exponential(&mut self, rate: f64) -> f64 {
        -self.uniform().max(1e-300).ln() / rate
    }

    /// Lognormal with this mean; `sigma` is the deviation of the logarithm.
    pub(crate) fn lognormal(&mut self, mean: f64, sigma: f64) -> f64 {
        let (radius, angle) = (self.uniform().max(1e-300), self.uniform());
        let normal = (-2.0 * radius.ln()).sqrt() * (std::f64::consts::TAU * angle).cos();
        mean * (normal * sigma - sigma * sigma / 2.0).exp()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distributions_have_the_requested_means() {
        let mut rng = Rng::seeded(1);
        let mean = |draw: &mut dyn FnMut() -> f64| (0..100_000).map(|_| draw()).sum::<f64>() / 100_000.0;
        assert!((mean(&mut || rng.uniform()) - 0.5).abs() < 0.01);
        assert!((mean(&mut || rng.exponential(4.0)) - 0.25).abs() < 0.01);
        assert!((mean(&mut || rng.lognormal(3.0, 0.5)) - 3.0).abs() < 0.05);
    }
}
