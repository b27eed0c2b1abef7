//! One planted violation of each kind is reported, and the log of an exact store passes.

use std::time::Duration;

use super::*;
use crate::limit::rule::Limit;

const START: Stamp = Stamp::from_secs(1_800_000_000);

fn at(seconds: u64) -> Stamp {
    START + Duration::from_secs(seconds)
}

fn lease(number: u128) -> LeaseId {
    LeaseId::from_number(number)
}

fn bucket(entity: &str) -> BucketId {
    BucketId { subject: Subject::new(entity, "gpt").expect("valid"), row: "tpm".into() }
}

/// `amount` per minute, with the same burst.
fn shape(second: u64, entity: &str, amount: u64) -> Entry {
    let rule = Limit::per_minute("tpm", amount).check().expect("valid");
    Entry::shape(at(second), bucket(entity), *rule.shape())
}

fn moved(second: u64, kind: Kind, number: u128, step: u32, units: i64) -> Entry {
    Entry::moved(at(second), bucket("a"), Move::new(kind, lease(number), step, units))
}

/// The violations in a log of the bucket of `a`, 60 per minute.
fn violations_of(entries: &[Entry]) -> Vec<String> {
    let log = [&[shape(0, "a", 60)], entries].concat();
    check(&log).violations.iter().map(Violation::to_string).collect()
}

#[test]
fn a_clean_log_is_exact_and_summed_up() {
    let mut log = vec![
        shape(0, "a", 60),
        moved(0, Kind::Draw, 1, 0, 50),
        moved(0, Kind::Draw, 2, 0, 10),
        moved(5, Kind::Extend, 1, 1, 5),
        moved(6, Kind::Adjust, 1, 2, 100),
        moved(7, Kind::Adjust, 1, 3, -55),
        // Settled below the 100 it held, with the return logged separately, and above it without.
        moved(8, Kind::Return, 1, 4, -30),
        moved(8, Kind::Settle, 1, 4, 70),
        moved(9, Kind::Settle, 2, 1, 15),
        // 60 + 50 − 10 have been refilled by then, and 130 taken net.
        moved(50, Kind::Draw, 3, 0, 20),
        moved(51, Kind::Return, 3, STEP_MAX, -20),
        moved(60, Kind::Draw, 4, 0, 1),
        moved(60, Kind::Degraded, 5, 0, 1_000),
        // Cancelled before it drew.
        moved(60, Kind::Return, 6, 1, 0),
    ];
    let report = check(&log);
    assert_eq!(report.to_string(), "1 buckets, 1 leases open, 1 grants degraded: exact", "{report}");
    assert!(report.is_exact());
    let totals = Totals { drawn: 86, declared: 105, returned: 105, settled: 85, leases: 2 };
    assert_eq!(report.totals[&bucket("a")], totals);
    assert_eq!((report.open.as_slice(), report.degraded.len()), (&[lease(4)][..], 1));
    log.reverse();
    // In reverse, a settle would come before the return of its own step.
    log.swap(6, 7);
    assert!(check(&log).is_exact(), "{}", check(&log));
}

#[test]
fn bound_counts_from_a_repair() {
    let repair = |second, units| Entry::set(at(second), bucket("a"), units);
    let debt = [moved(0, Kind::Draw, 1, 0, 60), moved(0, Kind::Settle, 1, 1, 6_000)];
    let [first, second] = [moved(2, Kind::Draw, 2, 0, 30), moved(3, Kind::Draw, 3, 0, 2)];
    let repaired = |units, draws: &[Entry]| violations_of(&[&debt[..], &[repair(1, units)], draws].concat());
    // One unit refills in a second.
    assert_eq!(repaired(30, &[first.clone(), second.clone()]), [""; 0]);
    assert_eq!(repaired(29, &[first.clone(), second]).len(), 1, "one unit too many");
    assert_eq!(violations_of(&[&debt[..], &[first]].concat()).len(), 1, "without the repair it is in debt");
    // A repair may lower the level, too.
    let [before, after] = [moved(1, Kind::Draw, 4, 0, 60), moved(9, Kind::Draw, 5, 0, 9)];
    assert_eq!(violations_of(&[before, repair(1, 0), after.clone()]).len(), 1);
    assert_eq!(violations_of(&[repair(1, 0), after]).len(), 1);
}

/// Two bursts of work can run at the same time, which the bound allows.
#[test]
fn bound_is_on_draws_minus_returns() {
    let [draw, again] = [moved(0, Kind::Draw, 1, 0, 60), moved(60, Kind::Draw, 2, 0, 60)];
    let refund = moved(61, Kind::Return, 1, 1, -60);
    let third = moved(61, Kind::Draw, 3, 0, 60);
    assert_eq!(violations_of(&[draw.clone(), again.clone(), refund, third.clone()]), [""; 0]);
    assert_eq!(violations_of(&[draw, again, third]).len(), 1, "without the refund it is too much");
}

#[test]
fn excess_is_reported_with_window_and_amount() {
    let excess =
        [moved(0, Kind::Draw, 1, 0, 1), moved(60, Kind::Draw, 2, 0, 50), moved(65, Kind::Extend, 2, 1, 18)];
    assert_eq!(
        violations_of(&excess),
        ["tpm of a on gpt: 68 taken from 2027-01-15T08:01:00Z to 2027-01-15T08:01:05Z, \
          3 more than the 65 that burst and rate allow"]
    );
    // A reported excess is deducted: the next one is reported by itself.
    let again = [&excess[..], &[moved(66, Kind::Draw, 3, 0, 1), moved(66, Kind::Draw, 4, 0, 1)]].concat();
    assert_eq!(violations_of(&again).len(), 2);
    assert!(violations_of(&again)[1].contains("67 taken"), "{:?}", violations_of(&again));
}

#[test]
fn debt_counts_against_every_draw_after_it() {
    let debt = [moved(0, Kind::Draw, 1, 0, 60), moved(1, Kind::Adjust, 1, 1, 100)];
    assert!(violations_of(&debt).is_empty());
    // 60 + 100 − 60 refilled: a deficit of 100, so that nothing is available for 40 more seconds.
    let early = [&debt[..], &[moved(99, Kind::Draw, 2, 0, 0)]].concat();
    assert!(violations_of(&early)[0].contains("160 taken"), "{:?}", violations_of(&early));
    let later = [&debt[..], &[moved(100, Kind::Draw, 2, 0, 0), moved(101, Kind::Draw, 3, 0, 1)]].concat();
    assert!(violations_of(&later).is_empty(), "{:?}", violations_of(&later));
    let settled = [moved(0, Kind::Draw, 1, 0, 60), moved(1, Kind::Settle, 1, 1, 160)];
    assert!(violations_of(&settled).is_empty());
    assert_eq!(violations_of(&[&settled[..], &[moved(99, Kind::Draw, 2, 0, 1)]].concat()).len(), 1);
}

#[test]
fn any_valid_order_within_one_time_is_accepted() {
    let draw = |number, units| moved(0, Kind::Draw, number, 0, units);
    let back = |number, units: i64| moved(0, Kind::Return, number, 1, -units);
    let adjust = |number, units| moved(0, Kind::Adjust, number, 1, units);
    let table: [(&str, &[Entry], usize); 7] = [
        ("one after the other", &[draw(1, 60), draw(2, 60), back(1, 60), back(2, 60)], 0),
        ("one too many", &[draw(1, 60), draw(2, 60), draw(3, 1), back(1, 60)], 1),
        ("the debt came last", &[draw(1, 10), adjust(1, 500), draw(2, 50)], 0),
        ("not even if it came last", &[draw(1, 10), adjust(1, 500), draw(2, 51)], 1),
        // Returning units after its own adjustment frees no capacity that was not free before it.
        (
            "adjusted and returned",
            &[draw(1, 30), adjust(1, 50), moved(0, Kind::Return, 1, 2, -80), draw(2, 60)],
            0,
        ),
        (
            "one unit more than was free",
            &[draw(1, 30), adjust(1, 50), moved(0, Kind::Return, 1, 2, -80), draw(2, 61)],
            1,
        ),
        ("more than the burst, and returned", &[draw(1, 61), back(1, 61)], 1),
    ];
    for (case, entries, expected) in table {
        assert_eq!(violations_of(entries).len(), expected, "{case}: {:?}", violations_of(entries));
    }
}

#[test]
fn a_new_shape_keeps_the_level_capped() {
    let drained = [moved(0, Kind::Draw, 1, 0, 50)];
    let back = moved(1, Kind::Return, 1, 1, -50);
    let table: [(&str, &[Entry], usize); 12] = [
        ("raised, the level stays", &[shape(0, "a", 600), moved(0, Kind::Draw, 2, 0, 10)], 0),
        ("raised, and refilled at once", &[shape(1, "a", 600), moved(1, Kind::Draw, 2, 0, 12)], 1),
        ("raised, and refills faster from then on", &[shape(1, "a", 600), moved(2, Kind::Draw, 2, 0, 21)], 0),
        ("lowered after the level was used", &[shape(0, "a", 6), moved(0, Kind::Draw, 2, 0, 10)], 0),
        ("lowered, and capped", &[shape(1, "a", 6), moved(2, Kind::Draw, 2, 0, 7)], 1),
        ("lowered, and no further", &[shape(1, "a", 6), moved(2, Kind::Draw, 2, 0, 6)], 0),
        // A full bucket may be evicted, and is then new.
        ("raised while full", &[shape(60, "a", 600), moved(60, Kind::Draw, 2, 0, 600)], 0),
        ("full by a return", &[back.clone(), shape(1, "a", 600), moved(1, Kind::Draw, 2, 0, 600)], 0),
        ("and no fuller", &[back, shape(1, "a", 600), moved(1, Kind::Draw, 2, 0, 602)], 1),
        // Of two shapes at one time the last is unknown: the bucket may be full under the smaller.
        (
            "full of the smaller one",
            &[
                shape(1, "a", 600),
                shape(1, "a", 60),
                shape(51, "a", 1_200),
                moved(51, Kind::Draw, 2, 0, 1_200),
            ],
            0,
        ),
        (
            "filled by the larger one",
            &[shape(1, "a", 60), shape(1, "a", 600), moved(11, Kind::Draw, 2, 0, 111)],
            0,
        ),
        ("and no faster", &[shape(1, "a", 60), shape(1, "a", 600), moved(11, Kind::Draw, 2, 0, 112)], 1),
    ];
    for (case, entries, expected) in table {
        let entries = [&drained[..], entries].concat();
        assert_eq!(violations_of(&entries).len(), expected, "{case}: {:?}", violations_of(&entries));
    }
}

#[test]
fn bucket_without_shape_is_reported_once() {
    let log = [moved(1, Kind::Draw, 1, 0, 5), moved(2, Kind::Draw, 2, 0, 5), shape(3, "a", 60)];
    let found: Vec<String> = check(&log).violations.iter().map(Violation::to_string).collect();
    assert_eq!(found, ["tpm of a on gpt: 5 units moved at 2027-01-15T08:00:01Z before its shape was known"]);
}

#[test]
fn step_applied_twice_is_reported() {
    let twice = [moved(1, Kind::Draw, 1, 0, 5), moved(2, Kind::Draw, 1, 0, 5)];
    assert_eq!(
        violations_of(&twice),
        ["tpm of a on gpt: step 0 of the lease 00000000000000000000000000000001 was applied again at \
          2027-01-15T08:00:02Z, for 5 units"]
    );
    for kind in [Kind::Extend, Kind::Adjust] {
        let twice = [moved(1, Kind::Draw, 1, 0, 5), moved(2, kind, 1, 1, 5), moved(2, kind, 1, 1, 5)];
        assert!(
            matches!(violations_of(&twice)[..], [ref one] if one.contains("step 1")),
            "{:?}",
            violations_of(&twice)
        );
    }
}

#[test]
fn lease_returning_more_than_it_holds_is_reported() {
    let expected = "tpm of a on gpt: the lease 00000000000000000000000000000001 returned 8 at \
                  2027-01-15T08:00:02Z, 3 more than the 5 it held";
    for (kind, step) in [(Kind::Return, 1), (Kind::Adjust, 1)] {
        assert_eq!(violations_of(&[moved(1, Kind::Draw, 1, 0, 5), moved(2, kind, 1, step, -8)]), [expected]);
    }
}

#[test]
fn lease_keeping_units_after_its_end_is_reported() {
    let kept = "tpm of a on gpt: the lease 00000000000000000000000000000001 ended at 2027-01-15T08:00:02Z and \
                neither returned nor settled 3 of the units it held";
    assert_eq!(violations_of(&[moved(1, Kind::Draw, 1, 0, 5), moved(2, Kind::Return, 1, 1, -2)]), [kept]);
    // Returned or settled in one bucket and not in the other.
    for (kind, units) in [(Kind::Return, -5), (Kind::Settle, 5)] {
        let parent = |second, kind, step, units| {
            Entry::moved(at(second), bucket("b"), Move::new(kind, lease(1), step, units))
        };
        let mut log = vec![
            shape(0, "b", 60),
            moved(1, Kind::Draw, 1, 0, 5),
            parent(1, Kind::Draw, 0, 5),
            moved(2, kind, 1, 1, units),
        ];
        assert!(
            violations_of(&log)[0].starts_with("tpm of b on gpt: the lease"),
            "{:?}",
            violations_of(&log)
        );
        log.push(parent(2, kind, 1, units));
        assert!(violations_of(&log).is_empty());
    }
}

#[test]
fn lease_that_never_drew_is_reported() {
    for kind in [Kind::Extend, Kind::Adjust, Kind::Settle] {
        let found = violations_of(&[moved(1, kind, 1, 1, 5)]);
        assert!(
            found[0].ends_with("for the lease 00000000000000000000000000000001, which never drew"),
            "{found:?}"
        );
    }
}

#[test]
fn movement_after_the_end_is_reported() {
    for (kind, units) in [(Kind::Return, -5), (Kind::Settle, 5)] {
        let ended = [moved(1, Kind::Draw, 1, 0, 5), moved(2, kind, 1, 1, units)];
        assert!(violations_of(&ended).is_empty());
        let moves = [&ended[..], &[moved(3, Kind::Adjust, 1, 2, 1)]].concat();
        assert_eq!(
            violations_of(&moves)[0],
            "tpm of a on gpt: adjustment of 1 units at 2027-01-15T08:00:03Z as step 2 of the lease \
             00000000000000000000000000000001, which ended at 2027-01-15T08:00:02Z"
        );
        let ends = [&ended[..], &[moved(3, Kind::Settle, 1, 2, 5)]].concat();
        assert!(
            violations_of(&ends)[0].contains("again, which ended at 2027-01-15T08:00:02Z"),
            "{:?}",
            violations_of(&ends)
        );
        let repeats = [&ended[..], &[moved(2, kind, 1, 1, 0)]].concat();
        assert!(violations_of(&repeats)[0].contains("ends the lease"), "{:?}", violations_of(&repeats));
    }
    // A draw that arrives after its lease was cancelled.
    let late = [moved(1, Kind::Return, 1, 1, 0), moved(2, Kind::Draw, 1, 0, 5)];
    assert!(violations_of(&late)[0].contains("draw of 5 units"), "{:?}", violations_of(&late));
}

#[test]
fn partial_step_is_reported() {
    let part =
        |entity: &str, kind| Entry::moved(at(1), bucket(entity), Move::new(kind, lease(1), 0, 5).one_of(2));
    let whole = [shape(0, "a", 60), shape(0, "b", 60), part("a", Kind::Draw), part("b", Kind::Draw)];
    assert!(check(&whole).is_exact());
    let violations = check(&whole[..3]).violations;
    assert_eq!(
        violations.iter().map(Violation::to_string).collect::<Vec<_>>(),
        ["step 0 of the lease 00000000000000000000000000000001 took from 1 of the 2 buckets it named, at \
          2027-01-15T08:00:01Z"]
    );
}

#[test]
fn ledger_that_differs_from_settlements_is_reported() {
    let of_call = |number, units| {
        let bucket = BucketId { row: "tpm~5/1000000/5".into(), ..bucket("a") };
        Entry::moved(at(2), bucket, Move::new(Kind::Settle, lease(number), 1, units))
    };
    let log = [moved(1, Kind::Settle, 1, 1, 30), of_call(2, 4), moved(1, Kind::Draw, 3, 0, 9)];
    let usage = |entity: &str, units| {
        let limit = LimitName::new("tpm").expect("valid");
        BTreeMap::from([((bucket(entity).subject, limit), units)])
    };
    assert!(check_ledger(&log, &usage("a", 34)).is_empty());
    let violations_of =
        |usage| check_ledger(&log, &usage).iter().map(Violation::to_string).collect::<Vec<_>>();
    assert_eq!(
        violations_of(usage("a", 30)),
        ["tpm of a on gpt: the ledger has 30 units, and leases were settled at 34"]
    );
    assert_eq!(violations_of(usage("b", 1)).len(), 2);
}

#[test]
fn extreme_numbers_do_not_panic() {
    let numbers = [i64::MIN, i64::MIN + 1, -1, 0, 1, i64::MAX - 1, i64::MAX];
    let kinds = [Kind::Draw, Kind::Adjust, Kind::Extend, Kind::Return, Kind::Settle, Kind::Degraded];
    let rule = |amount, period, burst| Limit::per("tpm", amount, period).burst(burst).check().expect("valid");
    let rules = [
        rule(1 << 40, Duration::from_micros(1), u64::MAX),
        rule(1, Duration::from_secs(366 * 24 * 3_600), 50),
        rule(1 << 40, Duration::from_secs(366 * 24 * 3_600), 1 << 40),
    ];
    let mut log = Vec::new();
    for (number, (place, units)) in (0..).zip((0..600).zip(numbers.iter().cycle())) {
        let at = [Stamp::ZERO, Stamp::from_micros(number), Stamp::MAX][place % 3];
        if place % 5 == 0 {
            log.push(Entry::shape(at, bucket("a"), *rules[place % 3].shape()));
        }
        let movement = Move::new(
            kinds[place % 6],
            lease(u128::from(number % 4)),
            u32::try_from(place % 3).expect("small"),
            *units,
        );
        log.push(Entry::moved(at, bucket("a"), movement.one_of(u32::MAX)));
    }
    assert!(!check(&log).to_string().is_empty());
}
