//! Mean and quantiles are close to the exact values for any samples.

use proptest::prelude::*;

use super::*;

fn of(samples: impl IntoIterator<Item = Duration>) -> Latency {
    let mut latency = Latency::default();
    samples.into_iter().for_each(|sample| latency.record(sample));
    latency
}

const fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

#[test]
fn no_samples_give_no_estimates() {
    let latency = Latency::default();
    assert_eq!((latency.mean(), latency.quantile(0.5), latency.quantile(0.0)), (None, None, None));
}

#[test]
fn buckets_are_contiguous_and_contain_their_middle() {
    let mut last = 0;
    for micros in (0..100_000).chain([MICROS_MAX / 2, MICROS_MAX / 2 + 1, MICROS_MAX - 1, MICROS_MAX]) {
        let found = index(micros);
        assert!(
            micros > 100_000 || found == last || found == last + 1,
            "{micros} is in {found} after {last}"
        );
        assert_eq!(index(middle(found)), found, "{micros}");
        last = found;
    }
    assert_eq!(last, BUCKETS - 1);
}

#[test]
fn extreme_samples_count_in_the_outermost_buckets() {
    let table = [
        (Duration::ZERO, Duration::ZERO, Duration::ZERO),
        (Duration::from_nanos(999), Duration::from_nanos(999), Duration::ZERO),
        (Duration::from_micros(7), Duration::from_micros(7), Duration::from_micros(7)),
        (millis(1), millis(1), Duration::from_micros(992)),
        (Duration::MAX, Duration::from_micros(MICROS_MAX), Duration::from_micros(31 << (MICROS_BITS - 5))),
    ];
    for (sample, mean, median) in table {
        let latency = of([sample]);
        assert_eq!((latency.mean(), latency.quantile(0.5)), (Some(mean), Some(median)), "{sample:?}");
    }
    let longest = of(std::iter::repeat_n(Duration::MAX, 10_000));
    assert_eq!(longest.mean(), Some(Duration::from_micros(MICROS_MAX)), "the sum does not overflow");
}

#[test]
fn quantile_clamps_an_invalid_share() {
    let latency = of([millis(8), millis(64)]);
    let (least, most) = (latency.quantile(0.5), latency.quantile(1.0));
    assert!(least < most);
    for (share, wanted) in
        [(0.0, least), (-1.0, least), (f64::NAN, least), (2.0, most), (f64::INFINITY, most)]
    {
        assert_eq!(latency.quantile(share), wanted, "{share}");
    }
}

#[test]
fn old_samples_fade() {
    let mut latency = of(std::iter::repeat_n(millis(10), 5_000));
    assert_eq!(latency.mean(), Some(millis(10)));
    (0..1_024).for_each(|_| latency.record(millis(1_000)));
    assert!(latency.quantile(0.5) > Some(millis(900)), "{:?}", latency.quantile(0.5));
    (0..20_480).for_each(|_| latency.record(millis(1_000)));
    let mean = latency.mean().unwrap();
    assert!(mean > millis(999) && mean <= millis(1_000), "{mean:?}");
    assert!(latency.quantile(0.001) > Some(millis(900)), "the old samples have faded");
}

#[test]
fn latency_takes_half_a_kilobyte() {
    assert!(size_of::<Latency>() <= 496, "{}", size_of::<Latency>());
}

/// From a nanosecond to weeks, log-uniform.
fn any_sample() -> impl Strategy<Value = Duration> {
    (0_u32..=50, any::<u64>()).prop_map(|(bits, noise)| Duration::from_nanos(noise & ((1 << bits) - 1)))
}

/// The sample of that rank, by sorting.
fn exact(samples: &[Duration], share: f64) -> Duration {
    let mut sorted = samples.to_vec();
    sorted.sort();
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted[rank.clamp(1, sorted.len()) - 1].min(Duration::from_micros(MICROS_MAX))
}

proptest! {
    #[test]
    fn a_quantile_is_within_a_sixteenth_of_the_exact_one(
        samples in prop::collection::vec(any_sample(), 1..1_000),
        share in 0.0..=1.0_f64,
    ) {
        let estimate = of(samples.iter().copied()).quantile(share).unwrap();
        let wanted = exact(&samples, share);
        prop_assert!(
            estimate.abs_diff(wanted) <= wanted / 16 + Duration::from_micros(1),
            "estimated {estimate:?}, exactly {wanted:?}"
        );
    }

    #[test]
    fn the_mean_is_exact_until_samples_fade(samples in prop::collection::vec(any_sample(), 1..1_000)) {
        let longest = Duration::from_micros(MICROS_MAX);
        let sum: Duration = samples.iter().map(|sample| (*sample).min(longest)).sum();
        let mean = sum / u32::try_from(samples.len()).unwrap();
        prop_assert_eq!(of(samples).mean(), Some(mean));
    }

    /// Counts and sum stay consistent and quantiles ordered, however many samples fade.
    #[test]
    fn quantiles_and_mean_stay_among_the_samples(
        few in prop::collection::vec(any_sample(), 1..20),
        rounds in 1_usize..400,
    ) {
        let latency = of(few.iter().copied().cycle().take(few.len() * rounds));
        prop_assert_eq!(latency.samples, latency.buckets.iter().sum::<u16>());
        prop_assert!(latency.samples < SAMPLES_MAX);
        let quantiles = [0.0, 0.5, 0.95, 1.0].map(|share| latency.quantile(share).unwrap());
        prop_assert!(quantiles.is_sorted(), "{quantiles:?}");
        let longest = Duration::from_micros(MICROS_MAX);
        let (least, most) = (few.iter().min().unwrap(), few.iter().max().unwrap().min(&longest));
        let slack = *most / 16 + Duration::from_micros(1);
        prop_assert!(quantiles[3] <= *most + slack && quantiles[0] + slack >= (*least).min(longest));
        prop_assert!(latency.mean().unwrap() <= *most + slack);
    }
}
