//! Verdicts, and what Envoy is told of them.

use tidegate_core::limit::name::{LimitName, Subject};

use super::*;

fn balance(limit: &str, available: i64, retry_after: Option<u64>) -> Balance {
    Balance {
        subject: Subject::new("ada", "shop").expect("valid"),
        limit: LimitName::new(limit).expect("valid"),
        available,
        burst: 100,
        amount: 100,
        period: Duration::from_hours(1),
        consumed: 0,
        asked: 1,
        retry_after: retry_after.map(Duration::from_secs),
    }
}

fn over(balances: Vec<Balance>, retry_after: Option<u64>) -> Verdict {
    Verdict::Over(Over { balances, retry_after: retry_after.map(Duration::from_secs), why: None })
}

fn retry_after(verdicts: &[Verdict]) -> Option<String> {
    let answer = answer(verdicts);
    let mut headers = answer.response_headers_to_add.into_iter();
    headers.find(|header| header.key == "retry-after").map(|header| header.value)
}

#[test]
fn one_is_told_to_come_back_when_all_can_be_had_and_nothing_where_one_never_can() {
    assert_eq!(retry_after(&[Verdict::Open]), None);
    assert_eq!(
        retry_after(&[over(vec![], Some(3)), Verdict::Open, over(vec![], Some(7))]).as_deref(),
        Some("7")
    );
    assert_eq!(retry_after(&[over(vec![], Some(3)), over(vec![], None)]), None);
}

#[test]
fn the_limit_that_is_told_is_the_one_that_is_used_up_first() {
    let told = |verdict| {
        let status = status(&verdict);
        let limit = status.current_limit.expect("there is one");
        (limit.name, status.limit_remaining, status.duration_until_reset.expect("it is told").seconds)
    };
    let within = |balances| told(Verdict::Within(balances));
    let full = |limit| balance(limit, 100, Some(0));
    assert_eq!(within(vec![full("a"), balance("b", 50, Some(0))]), ("b".to_owned(), 50, 1_800));
    assert_eq!(within(vec![full("a"), full("b")]), ("a".to_owned(), 100, 0));
    let short = || vec![balance("a", 0, Some(5)), balance("b", -3, Some(9)), full("c")];
    assert_eq!(told(over(short(), Some(9))), ("b".to_owned(), 0, 9));
}

#[test]
fn one_who_is_over_is_told_whole_seconds_and_nothing_where_no_time_helps() {
    let told = |balances: Vec<Balance>, retry_after| {
        let status = status(&Verdict::Over(Over { balances, retry_after, why: None }));
        status.duration_until_reset.map(|span| (span.seconds, span.nanos))
    };
    for balances in [vec![], vec![balance("a", 0, None)]] {
        assert_eq!(told(balances.clone(), None), None);
        assert_eq!(told(balances.clone(), Some(Duration::from_millis(1_001))), Some((2, 0)));
        assert_eq!(told(balances, Some(Duration::from_secs(2))), Some((2, 0)));
    }
}

#[test]
fn periods_are_units_where_envoy_has_one() {
    let table =
        [(1, Unit::Second), (60, Unit::Minute), (3_600, Unit::Hour), (86_400, Unit::Day), (7, Unit::Unknown)];
    for (secs, expected) in table {
        assert_eq!(unit(Duration::from_secs(secs)), expected);
    }
    assert_eq!(unit(Duration::from_millis(1_500)), Unit::Unknown);
}
