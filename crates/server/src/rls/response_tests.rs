//! Tests of the conversion of verdicts to responses.

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
    Verdict::Over(OverLimit { balances, retry_after: retry_after.map(Duration::from_secs), why: None })
}

fn retry_after(verdicts: &[Verdict]) -> Option<String> {
    let response = to_response(verdicts);
    let mut headers = response.response_headers_to_add.into_iter();
    headers.find(|header| header.key == "retry-after").map(|header| header.value)
}

#[test]
fn retry_after_is_maximum_and_absent_if_one_is_never() {
    assert_eq!(retry_after(&[Verdict::Open]), None);
    assert_eq!(
        retry_after(&[over(vec![], Some(3)), Verdict::Open, over(vec![], Some(7))]).as_deref(),
        Some("7")
    );
    assert_eq!(retry_after(&[over(vec![], Some(3)), over(vec![], None)]), None);
}

#[test]
fn status_reports_tightest_limit() {
    let reported = |verdict| {
        let status = status(&verdict);
        let limit = status.current_limit.expect("there is one");
        (limit.name, status.limit_remaining, status.duration_until_reset.expect("it is reported").seconds)
    };
    let within = |balances| reported(Verdict::Within(balances));
    let full = |limit| balance(limit, 100, Some(0));
    assert_eq!(within(vec![full("a"), balance("b", 50, Some(0))]), ("b".to_owned(), 50, 1_800));
    assert_eq!(within(vec![full("a"), full("b")]), ("a".to_owned(), 100, 0));
    let short = || vec![balance("a", 0, Some(5)), balance("b", -3, Some(9)), full("c")];
    assert_eq!(reported(over(short(), Some(9))), ("b".to_owned(), 0, 9));
}

#[test]
fn over_limit_reset_is_whole_seconds_or_absent() {
    let reported = |balances: Vec<Balance>, retry_after| {
        let status = status(&Verdict::Over(OverLimit { balances, retry_after, why: None }));
        status.duration_until_reset.map(|span| (span.seconds, span.nanos))
    };
    for balances in [vec![], vec![balance("a", 0, None)]] {
        assert_eq!(reported(balances.clone(), None), None);
        assert_eq!(reported(balances.clone(), Some(Duration::from_millis(1_001))), Some((2, 0)));
        assert_eq!(reported(balances, Some(Duration::from_secs(2))), Some((2, 0)));
    }
}

#[test]
fn periods_map_to_envoy_units() {
    let table =
        [(1, Unit::Second), (60, Unit::Minute), (3_600, Unit::Hour), (86_400, Unit::Day), (7, Unit::Unknown)];
    for (secs, expected) in table {
        assert_eq!(unit(Duration::from_secs(secs)), expected);
    }
    assert_eq!(unit(Duration::from_millis(1_500)), Unit::Unknown);
}
