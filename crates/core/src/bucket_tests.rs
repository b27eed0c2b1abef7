//! The bucket stays within one unit of burst + rate·t, however it is polled.

use proptest::prelude::*;

use super::*;

const fn secs(seconds: u64) -> Instant {
    Instant::from_nanos(seconds * 1_000_000_000)
}

const fn millis(millis: u64) -> Instant {
    Instant::from_nanos(millis * 1_000_000)
}

fn shape(amount: u64, period: Duration, burst: u64) -> Shape {
    Shape::new(amount, period, burst).expect("a shape within the bounds")
}

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);
const DAY: Duration = Duration::from_secs(86_400);

#[test]
fn a_wait_is_the_time_the_next_unit_takes() {
    let shape = shape(2, SECOND, 1);
    let mut bucket = Bucket::full();
    assert_eq!(bucket.take(&shape, 1, millis(0)), Ok(()));
    assert_eq!(bucket.take(&shape, 1, millis(0)), Err(millis(500)));
    assert_eq!(bucket.take(&shape, 1, millis(250)), Err(millis(500)));
    assert_eq!(bucket.take(&shape, 1, millis(500)), Ok(()));
}

#[test]
fn refill_stops_at_the_burst() {
    let shape = shape(10, SECOND, 3);
    let mut bucket = Bucket::full();
    bucket.debit(&shape, 3, secs(0));
    assert_eq!(bucket.level(&shape, secs(0)), 0);
    assert_eq!(bucket.level(&shape, secs(10)), 3);
}

#[test]
fn leave_lowers_level_and_never_raises_it() {
    let shape = shape(2, SECOND, 5);
    // Units taken at the origin, left at 10 s, and the level then and a second later.
    for (taken, left, then, later) in [(0, 1, 1, 3), (5, 1, 1, 3), (5, 0, 0, 2), (0, 5, 5, 5), (27, 1, -2, 0)]
    {
        let mut bucket = Bucket::full();
        bucket.debit(&shape, taken, secs(0));
        bucket.leave(&shape, left, secs(10));
        let levels = [10, 11].map(|at| bucket.level(&shape, secs(at)));
        assert_eq!(levels, [then, later], "{taken} taken, {left} left");
    }
}

#[test]
fn an_empty_or_indebted_bucket_refills_at_its_rate() {
    let shape = shape(100_000, MINUTE, 100_000);
    let drained = |units| {
        let mut bucket = Bucket::full();
        bucket.debit(&shape, units, secs(0));
        bucket
    };
    let table = [
        (100_000, 30, 50_000),
        (100_000, 120, 100_000),
        (150_000, 0, -50_000),
        (150_000, 30, 0),
        (200_000, 30, -50_000),
    ];
    for (debit, at, level) in table {
        assert_eq!(drained(debit).level(&shape, secs(at)), level, "{debit} taken, {at} s later");
    }
}

#[test]
fn a_cost_above_the_burst_never_fits() {
    let shape = shape(100_000, MINUTE, 100_000);
    let mut bucket = Bucket::full();
    assert_eq!(bucket.take(&shape, 150_000, secs(5)), Err(Instant::MAX));
    assert_eq!(bucket.level(&shape, secs(5)), 100_000);
    assert_eq!(bucket.take(&shape, 100_000, secs(5)), Ok(()));
    assert_eq!(bucket.level(&shape, secs(5)), 0);
}

#[test]
fn returns_stop_at_the_burst() {
    let shape = shape(100_000, MINUTE, 100_000);
    let mut bucket = Bucket::full();
    bucket.debit(&shape, 150_000, secs(0));
    assert_eq!(bucket.level(&shape, secs(0)), -50_000);
    bucket.credit(&shape, 1_000_000);
    assert_eq!(bucket.level(&shape, secs(0)), 100_000);
    assert!(bucket.is_full(secs(0)));
}

#[test]
fn frequent_polling_causes_no_drift() {
    let shape = shape(1_000, Duration::from_secs(3), 1_000);
    let mut bucket = Bucket::full();
    bucket.debit(&shape, 1_000, secs(0));
    let taken = (1..=60_000).filter(|tick| bucket.take(&shape, 1, millis(*tick)).is_ok()).count();
    assert_eq!(taken, 20_000);
}

#[test]
fn one_a_day_polled_every_millisecond_of_a_day_is_one() {
    let shape = shape(1, DAY, 1);
    let mut bucket = Bucket::full();
    bucket.debit(&shape, 1, secs(0));
    assert_eq!(bucket.take(&shape, 1, Instant::from_nanos(86_400_000_000_000 - 1)), Err(secs(86_400)));
    assert_eq!(bucket.take(&shape, 1, secs(86_400)), Ok(()));
}

#[test]
fn a_stale_now_only_denies() {
    let shape = shape(1, SECOND, 1);
    let mut bucket = Bucket::full();
    assert!(bucket.take(&shape, 1, secs(100)).is_ok());
    assert_eq!(bucket.take(&shape, 1, secs(3)), Err(secs(101)));
    assert_eq!(bucket.level(&shape, secs(3)), -97, "a stale clock sees debt");
}

#[test]
fn suspended_bucket_does_not_refill() {
    let shape = shape(10, SECOND, 10);
    let mut bucket = Bucket::full();
    bucket.debit(&shape, 10, secs(0));
    bucket.suspend(millis(500), secs(30));
    assert_eq!(bucket.level(&shape, secs(30)), 5);
    bucket.unsuspend(secs(10), secs(30));
    assert_eq!(bucket.level(&shape, secs(10)), 5, "resumed by hand, it refills again");
    let mut full = Bucket::full();
    full.suspend(secs(1), secs(30));
    assert_eq!(full.level(&shape, secs(1)), 10, "suspending a full bucket changes nothing");
    full.unsuspend(secs(2), secs(30));
    assert_eq!(full.level(&shape, secs(2)), 10);
}

#[test]
fn a_bucket_is_full_at_the_origin_of_time_too() {
    // A unit of a third of a nanosecond needs rounding, which must not go below the origin.
    let shape = shape(3_000_000_000, SECOND, 3_000_000_000);
    assert_eq!(Bucket::full().take(&shape, 1, Instant::ZERO), Ok(()));
    assert_eq!(Bucket::full().take(&shape, 3_000_000_000, Instant::ZERO), Ok(()));
}

#[test]
fn shape_out_of_bounds_is_refused_with_the_number() {
    let table = [
        (Shape::<Instant>::new(0, SECOND, 1), "0 units per period, outside 1..=1099511627776"),
        (Shape::new(AMOUNT_MAX + 1, SECOND, 1), "1099511627777 units per period, outside 1..=1099511627776"),
        (Shape::new(1, Duration::ZERO, 1), "a period of 0s, not a multiple of 1ns within 1ns..=366d"),
        (
            Shape::new(1, PERIOD_MAX + SECOND, 1),
            "a period of 31622401s, not a multiple of 1ns within 1ns..=366d",
        ),
        (Shape::new(1, SECOND, 0), "a burst of 0 units, which must be at least 1 and refill within 36525d"),
        (
            Shape::new(1, DAY, 1_000_000),
            "a burst of 1000000 units, which must be at least 1 and refill within 36525d",
        ),
    ];
    for (shape, sentence) in table {
        assert_eq!(shape.expect_err("beyond a bound").to_string(), sentence);
    }
    let good = shape(5, SECOND, 9);
    assert_eq!((good.amount(), good.period(), good.burst()), (5, SECOND, 9));
}

#[test]
fn huge_debt_saturates() {
    let shape = shape(1, PERIOD_MAX, 1);
    let mut bucket = Bucket::full();
    bucket.debit(&shape, u64::MAX, secs(0));
    assert_eq!(bucket.ready_at(&shape, 1, secs(0)).since(secs(0)).as_secs() / (365 * 86_400), 583);
    bucket.credit(&shape, u64::MAX);
    assert!(bucket.is_full(secs(1)));
}

fn any_shape() -> impl Strategy<Value = Shape> {
    (1_u64..=1_000_000, prop_oneof![Just(SECOND), Just(MINUTE), Just(DAY)], 1_u64..=5_000)
        .prop_map(|(amount, period, burst)| shape(amount, period, burst))
}

proptest! {
    /// Invariant 3, upper bound: however it is polled, at most burst + rate·t is admitted.
    #[test]
    fn never_more_than_burst_and_rate(shape in any_shape(), steps in prop::collection::vec((0_u64..2_000_000_000, 1_u64..50), 1..200)) {
        let mut bucket = Bucket::full();
        let (mut now, mut taken) = (Instant::ZERO, 0_u128);
        for (step, units) in steps {
            now = now.plus_nanos(step);
            if bucket.take(&shape, units, now).is_ok() {
                taken += u128::from(units);
            }
            // taken ≤ burst + now·amount/period, with nothing rounded
            let allowed = u128::from(shape.burst) * u128::from(shape.period)
                + u128::from(now.as_nanos()) * u128::from(shape.amount);
            prop_assert!(taken * u128::from(shape.period) <= allowed);
        }
    }

    /// Invariant 3, lower bound: a caller that retries at the returned times gets burst + rate·t, less one
    /// unit.
    #[test]
    fn saturated_bucket_grants_all_but_one_unit(shape in any_shape(), grants in 1_u64..500) {
        let mut bucket = Bucket::full();
        let (mut now, mut taken) = (Instant::ZERO, 0_u128);
        for _ in 0..grants {
            match bucket.take(&shape, 1, now) {
                Ok(()) => {}
                Err(ready) => {
                    prop_assert!(ready > now, "a wait is never zero");
                    now = ready;
                    prop_assert!(bucket.take(&shape, 1, now).is_ok(), "the wait is enough");
                }
            }
            taken += 1;
        }
        let allowed = u128::from(shape.burst) * u128::from(shape.period)
            + u128::from(now.as_nanos()) * u128::from(shape.amount);
        // Waits end on whole nanoseconds, so at a million a second the last may end up to a nanosecond late.
        prop_assert!((taken + 1) * u128::from(shape.period) + u128::from(shape.amount) > allowed
            || taken <= u128::from(shape.burst));
    }

    /// A new shape keeps the level, capped to the new burst, to within one unit and never above.
    #[test]
    fn a_new_shape_keeps_the_level(old in any_shape(), new in any_shape(), taken in 0_u64..10_000, later in 0_u64..5_000_000_000) {
        let mut bucket = Bucket::full();
        bucket.debit(&old, taken, Instant::ZERO);
        let now = Instant::from_nanos(later);
        let before = bucket.level(&old, now);
        bucket.reshape(&old, &new, now);
        let after = bucket.level(&new, now);
        let wanted = before.min(i64::try_from(new.burst).unwrap());
        prop_assert!(after == wanted || after == wanted - 1, "{before} became {after} under a burst of {}", new.burst);
    }

    /// Taking units and giving them back, in any order, restores the bucket exactly.
    #[test]
    fn taking_and_giving_back_is_exact(shape in any_shape(), parts in prop::collection::vec(1_u64..1_000, 1..40)) {
        let mut bucket = Bucket::full();
        bucket.debit(&shape, 7, secs(1));
        let before = bucket;
        for part in &parts { bucket.debit(&shape, *part, secs(1)); }
        for part in parts.iter().rev() { bucket.credit(&shape, *part); }
        prop_assert_eq!(bucket, before);
    }
}
