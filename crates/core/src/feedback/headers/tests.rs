//! Every row of the provider table with its pitfalls, and arbitrary bytes.

use proptest::prelude::*;

use super::*;
use crate::bucket::Shape;

/// 2026-01-31T09:30:00Z.
const NOW: Stamp = Stamp::from_secs(1_769_851_800);

fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn say(headers: &[(&str, &str)]) -> Signals {
    read(headers.iter().copied(), NOW)
}

fn counts(signals: &Signals) -> (u32, u32) {
    (signals.malformed, signals.ignored)
}

/// The only quota.
fn only(signals: &Signals) -> &Quota {
    assert_eq!(signals.quotas.len(), 1, "{signals:?}");
    &signals.quotas[0]
}

/// Limit, remaining and reset.
fn numbers(quota: &Quota) -> (Option<u64>, Option<u64>, Option<Reset>) {
    (quota.limit, quota.remaining, quota.reset)
}

#[test]
fn retry_after_is_read_in_every_form() {
    let table = [
        ("30", Some(secs(30))),
        ("0", Some(secs(0))),
        ("-0", Some(secs(0))),
        ("  7\t", Some(secs(7))),
        ("007", Some(secs(7))),
        ("1.5", Some(secs(2))),
        ("0.001", Some(secs(1))),
        ("2.0", Some(secs(2))),
        ("-5", Some(secs(0))),
        ("-0.5", Some(secs(0))),
        ("3, 8", Some(secs(8))),
        ("Sat, 31 Jan 2026 09:30:20 GMT", Some(secs(20))),
        ("Saturday, 31-Jan-26 09:30:20 GMT", Some(secs(20))),
        ("Sat Jan 31 09:30:20 2026", Some(secs(20))),
        ("Sat, 31 Jan 2026 09:29:59 GMT", Some(secs(0))),
        ("Sun, 06 Nov 1994 08:49:37 GMT", Some(secs(0))),
        ("Wed, 31 Dec 1969 23:59:59 GMT", Some(secs(0))),
        ("", None),
        (" ", None),
        ("soon", None),
        ("NaN", None),
        ("inf", None),
        ("1e3", None),
        ("+5", None),
        ("5s", None),
        ("5 6", None),
        ("3, soon", None),
        ("٣", None),
        ("Sat, 31 Jan 2026 09:30:20 CET", None),
    ];
    for (value, expected) in table {
        let signals = say(&[("Retry-After", value)]);
        assert_eq!(signals.retry_after.map(|hint| hint.wait), expected, "{value}");
        assert_eq!(retry_after(value, NOW), expected, "{value}");
        assert_eq!(counts(&signals), (u32::from(expected.is_none()), 0), "{value}");
    }
}

#[test]
fn date_wait_is_not_shortened_within_its_second() {
    let now = Stamp::from_micros(NOW.as_micros() + 250_000);
    let wait = retry_after("Sat, 31 Jan 2026 09:30:20 GMT", now).unwrap();
    assert_eq!(now + wait, Stamp::from_secs(NOW.as_micros() / 1_000_000 + 20));
}

#[test]
fn retry_after_ms_takes_precedence_if_valid() {
    let hint = |headers: &[(&str, &str)]| say(headers).retry_after.map(|hint| (hint.wait, hint.source));
    let table: [(&[(&str, &str)], _); 7] = [
        (&[("retry-after-ms", "250"), ("retry-after", "1")], Some((millis(250), HintSource::RetryAfterMs))),
        (
            &[("retry-after", "1"), ("Retry-After-Ms", "1250")],
            Some((millis(1_250), HintSource::RetryAfterMs)),
        ),
        (&[("retry-after-ms", "0"), ("retry-after", "9")], Some((millis(0), HintSource::RetryAfterMs))),
        (&[("retry-after-ms", "-7")], Some((millis(0), HintSource::RetryAfterMs))),
        (&[("retry-after-ms", "12.3")], Some((millis(13), HintSource::RetryAfterMs))),
        (&[("retry-after-ms", "soon"), ("retry-after", "1")], Some((secs(1), HintSource::RetryAfter))),
        (&[("retry-after-ms", "Sat, 31 Jan 2026 09:30:20 GMT")], None),
    ];
    for (headers, expected) in table {
        assert_eq!(hint(headers), expected, "{headers:?}");
    }
}

#[test]
fn duplicate_headers_use_the_more_careful_value() {
    let signals = say(&[
        ("Retry-After", "3"),
        ("retry-after", "Sat, 31 Jan 2026 09:30:08 GMT"),
        ("RETRY-AFTER", "5"),
        ("x-ratelimit-limit", "100"),
        ("x-ratelimit-limit", "80"),
        ("x-ratelimit-remaining", "7, 9"),
        ("x-ratelimit-reset", "10"),
        ("x-ratelimit-reset", "5"),
    ]);
    assert_eq!(signals.retry_after.unwrap().wait, secs(8));
    assert_eq!(numbers(only(&signals)), (Some(80), Some(7), Some(Reset::More(secs(10)))));
}

#[test]
fn long_wait_is_capped_and_marked() {
    for value in ["86401", "99999999999999999999999", "Fri, 31 Dec 9999 23:59:59 GMT"] {
        let hint = say(&[("retry-after", value)]).retry_after.unwrap();
        assert_eq!((hint.wait, hint.is_capped), (WAIT_MAX, true), "{value}");
    }
    let hint = say(&[("retry-after", "86400")]).retry_after.unwrap();
    assert_eq!((hint.wait, hint.is_capped), (WAIT_MAX, false));
    let hint =
        read_within([("retry-after-ms", "99999999999999999999999")], NOW, secs(5)).retry_after.unwrap();
    assert_eq!((hint.wait, hint.is_capped), (secs(5), true));
}

#[test]
fn openai_reset_is_the_time_to_full() {
    let signals = say(&[
        ("x-ratelimit-limit-requests", "5000"),
        ("x-ratelimit-remaining-requests", "4999"),
        ("x-ratelimit-reset-requests", "12ms"),
        ("x-ratelimit-limit-tokens", "160000"),
        ("x-ratelimit-remaining-tokens", "100000"),
        ("x-ratelimit-reset-tokens", "6m0s"),
    ]);
    let requests = signals.quota(Dimension::Requests).unwrap();
    assert_eq!(requests.profile, Profile::OpenAi);
    assert_eq!(numbers(requests), (Some(5_000), Some(4_999), Some(Reset::Full(millis(12)))));
    assert_eq!(requests.refill(), Some(Refill { amount: 1, period: millis(12) }));
    let tokens = signals.quota(Dimension::Tokens).unwrap();
    let refill = tokens.refill().unwrap();
    assert_eq!(refill, Refill { amount: 60_000, period: secs(360) });
    assert_eq!(refill.interval(), millis(6));
    assert_eq!(tokens.time_to(100_000), Some(secs(0)));
    assert_eq!(tokens.time_to(100_500), Some(secs(3)));
    assert_eq!(tokens.time_to(160_000), Some(secs(360)));
    assert_eq!(tokens.time_to(160_001), None);
    assert!(Shape::<crate::time::Instant>::new(refill.amount, refill.period, 160_000).is_ok());
    assert_eq!(signals.hint(), None);
    assert_eq!(counts(&signals), (0, 0));
}

#[test]
fn empty_openai_quota_waits_for_one_unit() {
    let signals = say(&[
        ("x-ratelimit-limit-requests", "60"),
        ("x-ratelimit-remaining-requests", "0"),
        ("x-ratelimit-reset-requests", "1m0s"),
    ]);
    let hint = signals.hint().unwrap();
    assert_eq!((hint.wait, hint.source), (secs(1), HintSource::Quota(Profile::OpenAi, Dimension::Requests)));
}

#[test]
fn azure_minus_one_and_zero_mean_unknown() {
    let signals = say(&[
        ("apim-request-id", "3f"),
        ("x-ratelimit-limit-requests", "-1"),
        ("x-ratelimit-remaining-requests", "0"),
        ("x-ratelimit-reset-requests", "-1"),
        ("x-ratelimit-limit-tokens", "0"),
        ("x-ratelimit-remaining-tokens", "-1"),
        ("x-ratelimit-reset-tokens", "10"),
    ]);
    assert_eq!(only(&signals).profile, Profile::Azure);
    assert_eq!(numbers(only(&signals)), (None, None, Some(Reset::Full(secs(10)))));
    assert_eq!(counts(&signals), (0, 5));
    assert_eq!((signals.hint(), only(&signals).refill()), (None, None));
    let signals = say(&[("x-ratelimit-remaining-requests", "0"), ("x-ratelimit-remaining-tokens", "9")]);
    assert_eq!(numbers(only(&signals)), (None, Some(9), None));
}

#[test]
fn empty_anthropic_quotas_wait_for_the_latest_reset() {
    let quotas = [
        ("anthropic-ratelimit-requests-limit", "50"),
        ("anthropic-ratelimit-requests-remaining", "0"),
        ("anthropic-ratelimit-requests-reset", "2026-01-31T09:30:05Z"),
        ("anthropic-ratelimit-input-tokens-limit", "40000"),
        ("anthropic-ratelimit-input-tokens-remaining", "0"),
        ("anthropic-ratelimit-input-tokens-reset", "2026-01-31T10:30:09.5+01:00"),
        ("anthropic-ratelimit-output-tokens-limit", "8000"),
        ("anthropic-ratelimit-output-tokens-remaining", "1"),
        ("anthropic-ratelimit-output-tokens-reset", "2026-01-31T09:31:00Z"),
        ("anthropic-ratelimit-tokens-limit", "48000"),
        ("anthropic-ratelimit-tokens-remaining", "1"),
        ("anthropic-ratelimit-tokens-reset", "2026-01-31T09:29:00Z"),
    ];
    let signals = say(&quotas);
    assert_eq!(signals.retry_after, None);
    let hint = signals.hint().unwrap();
    let source = HintSource::Quota(Profile::Anthropic, Dimension::InputTokens);
    assert_eq!((hint.wait, hint.source, hint.is_capped), (millis(9_500), source, false));
    let tokens = signals.quota(Dimension::Tokens).unwrap();
    assert_eq!(numbers(tokens), (Some(48_000), Some(1), Some(Reset::Full(secs(0)))));
    let explicit = say(&[&quotas[..], &[("retry-after", "2")]].concat());
    assert_eq!(explicit.hint().unwrap().wait, secs(2));
    assert_eq!(explicit.wait(secs(60)), secs(2));
}

#[test]
fn empty_quota_with_past_reset_is_no_hint() {
    let signals = say(&[
        ("anthropic-ratelimit-requests-remaining", "0"),
        ("anthropic-ratelimit-requests-reset", "2026-01-31T09:29:59Z"),
    ]);
    assert_eq!(only(&signals).reset, Some(Reset::Full(secs(0))));
    assert_eq!(signals.hint(), None);
    assert_eq!(signals.wait(secs(4)), secs(4));
}

#[test]
fn empty_quota_of_another_dimension_is_no_hint() {
    let signals = say(&[("x-ratelimit-remaining-images", "0"), ("x-ratelimit-reset-images", "30")]);
    assert_eq!(only(&signals).label.as_deref(), Some("images"));
    assert_eq!(signals.hint(), None);
}

#[test]
fn aws_delay_is_bounded_by_own_backoff() {
    let wait = |value| say(&[("x-amz-retry-after", value)]).wait(secs(2));
    let table =
        [("0", 2_000), ("1500", 2_000), ("4500", 4_500), ("60000", 7_000), ("-1", 2_000), ("x", 2_000)];
    for (value, expected) in table {
        assert_eq!(wait(value), millis(expected), "{value}");
    }
    assert_eq!(amz_wait(Duration::MAX, Duration::MAX), Duration::MAX);
    let both = say(&[("x-amz-retry-after", "60000"), ("retry-after", "1")]);
    assert_eq!(both.wait(secs(2)), secs(1));
}

#[test]
fn ietf_fields_are_joined_by_policy_name() {
    let signals = say(&[
        ("RateLimit-Policy", r#""burst";q=100;w=60, "bytes";q=5000;w=3600;qu="content-bytes""#),
        ("RateLimit", r#""burst";r=50;t=30"#),
        ("RateLimit", "\"bytes\";r=0;t=7;pk=:aGk=:, \"day\";r=9"),
    ]);
    assert_eq!(signals.quotas.len(), 3);
    let burst = &signals.quotas[0];
    assert_eq!((burst.profile, burst.label.as_deref()), (Profile::Ietf, Some("burst")));
    assert_eq!(numbers(burst), (Some(100), Some(50), Some(Reset::More(secs(30)))));
    assert_eq!(burst.refill(), Some(Refill { amount: 100, period: secs(60) }));
    assert_eq!((burst.time_to(50), burst.time_to(51)), (Some(secs(0)), Some(secs(30))));
    let bytes = &signals.quotas[1];
    assert_eq!(bytes.dimension, Dimension::Other);
    assert_eq!(numbers(bytes), (Some(5_000), Some(0), Some(Reset::More(secs(7)))));
    assert_eq!(numbers(&signals.quotas[2]), (None, Some(9), None));
    assert_eq!(counts(&signals), (0, 0));
}

#[test]
fn older_drafts_of_the_ietf_are_read_too() {
    let signals =
        say(&[("RateLimit-Policy", "100;w=60"), ("RateLimit", "limit=100, remaining=50, reset=30")]);
    let expected = (Some(100), Some(50), Some(Reset::More(secs(30))));
    assert_eq!(numbers(only(&signals)), expected);
    assert_eq!(only(&signals).window, Some(secs(60)));
    let signals = say(&[
        ("RateLimit-Limit", "100, 100;w=60, 1000;w=3600"),
        ("RateLimit-Remaining", "50"),
        ("RateLimit-Reset", "30"),
    ]);
    assert_eq!(only(&signals).profile, Profile::IetfNumbers);
    assert_eq!(numbers(only(&signals)), expected);
}

#[test]
fn malformed_structured_fields_are_counted() {
    let table = [
        ("RateLimit", "\"p\";r=50;t=", (1, 0)),
        ("RateLimit", "\"p\";r=50, \"q", (1, 0)),
        ("RateLimit", "\"p\";t=30", (1, 0)),
        ("RateLimit", "\"p\";r=\"5\"", (1, 0)),
        ("RateLimit", "\"p\";r=1.5", (1, 0)),
        ("RateLimit", "\"p\";r=-1", (0, 1)),
        ("RateLimit", "50", (1, 0)),
        ("RateLimit", "", (1, 0)),
        ("RateLimit-Policy", "\"p\"", (1, 0)),
        ("RateLimit-Policy", "\"p\";q=5;qu=1", (1, 0)),
        ("RateLimit-Policy", "-5;w=1", (0, 1)),
        ("RateLimit-Policy", "\"p\";q=0", (0, 1)),
    ];
    for (name, value, expected) in table {
        let signals = say(&[(name, value)]);
        assert_eq!(counts(&signals), expected, "{name}: {value}");
        assert!(signals.quotas.is_empty(), "{name}: {value}");
    }
    let signals = say(&[("RateLimit", "\"bad\";r=-1, \"good\";r=5")]);
    assert_eq!((only(&signals).remaining, counts(&signals)), (Some(5), (0, 1)));
}

#[test]
fn common_reset_format_depends_on_its_size() {
    let table = [
        ("0", Some(millis(0))),
        ("60", Some(secs(60))),
        ("1.25", Some(millis(1_250))),
        ("86400", Some(secs(86_400))),
        ("86401", None),
        ("999999999", None),
        ("1769851860", Some(secs(60))),
        ("1769851860.5", Some(millis(60_500))),
        ("1769851860250", Some(millis(60_250))),
        ("1769851700", Some(secs(0))),
        ("1000000000", Some(secs(0))),
        ("1769938201", None),
        ("1769851860250000", None),
        ("99999999999999999999", None),
        ("-1", None),
        ("-1s", None),
        ("1m30s", Some(secs(90))),
        ("2026-01-31T09:31:00Z", Some(secs(60))),
        ("2026-02-02T09:31:00Z", None),
        ("Sat, 31 Jan 2026 09:31:00 GMT", Some(secs(60))),
    ];
    for (value, expected) in table {
        for name in ["X-RateLimit-Reset", "x-rate-limit-reset"] {
            let signals = say(&[(name, value)]);
            let read = signals.quotas.first().and_then(|quota| quota.reset);
            assert_eq!(read, expected.map(Reset::More), "{value}");
            assert_eq!(counts(&signals), (0, u32::from(expected.is_none())), "{value}");
        }
    }
    for value in ["", "NaN", "tomorrow", "1e9", "12:00"] {
        assert_eq!(counts(&say(&[("x-ratelimit-reset", value)])), (1, 0), "{value}");
    }
    let after = say(&[("x-ratelimit-reset-after", "1.5"), ("x-ratelimit-remaining", "0")]);
    assert_eq!(after.hint().unwrap().wait, millis(1_500));
}

#[test]
fn implausible_numbers_are_ignored_and_counted() {
    let table = [
        ("10", "11", (Some(10), None), (0, 1)),
        ("10", "10", (Some(10), Some(10)), (0, 0)),
        ("0", "5", (None, Some(5)), (0, 1)),
        ("-1", "5", (None, Some(5)), (0, 1)),
        ("10.9", "9.9", (Some(10), Some(9)), (0, 0)),
        ("9223372036854775807", "5", (None, Some(5)), (0, 1)),
        ("99999999999999999999999", "99999999999999999999999", (None, None), (0, 2)),
        ("NaN", "5", (None, Some(5)), (1, 0)),
        ("unlimited", "", (None, None), (2, 0)),
        ("10;w=60", "5", (Some(10), Some(5)), (0, 0)),
    ];
    for (limit, remaining, expected, counted) in table {
        let signals = say(&[("x-ratelimit-limit", limit), ("x-ratelimit-remaining", remaining)]);
        let read = signals.quotas.first().map_or((None, None), |quota| (quota.limit, quota.remaining));
        assert_eq!((read, counts(&signals)), (expected, counted), "{limit} {remaining}");
    }
}

#[test]
fn full_quota_or_immediate_reset_has_no_refill() {
    let refill = |remaining, reset| {
        let signals = say(&[
            ("x-ratelimit-limit-tokens", "100"),
            ("x-ratelimit-remaining-tokens", remaining),
            ("x-ratelimit-reset-tokens", reset),
        ]);
        only(&signals).refill()
    };
    assert_eq!(refill("100", "0s"), None);
    assert_eq!(refill("100", "5s"), None);
    assert_eq!(refill("50", "0s"), None);
    assert_eq!(refill("50", "25h"), None);
    assert_eq!(refill("50", "7ns"), Some(Refill { amount: 50, period: Duration::from_nanos(7) }));
}

#[test]
fn number_of_quotas_is_bounded() {
    let names: Vec<_> = (0..QUOTAS_MAX + 3).map(|number| format!("x-ratelimit-limit-kind{number}")).collect();
    let signals = read(names.iter().map(|name| (name, "5")), NOW);
    assert_eq!((signals.quotas.len(), signals.ignored), (QUOTAS_MAX, 3));
    let long = "1".repeat(VALUE_MAX + 1);
    assert_eq!(counts(&say(&[("retry-after", &long)])), (1, 0));
}

#[test]
fn upstream_clock_is_trusted_within_a_day() {
    let at = |seconds: u64| Stamp::from_secs(NOW.as_micros() / 1_000_000 + seconds);
    let table: [(&[(&str, &str)], Stamp); 9] = [
        (&[], NOW),
        (&[("Date", " Sat, 31 Jan 2026 09:30:20 GMT ")], at(20)),
        (&[("Age", "5"), ("DATE", "Saturday, 31-Jan-26 09:30:20 GMT")], at(25)),
        (&[("age", "soon"), ("date", "Sat, 31 Jan 2026 09:30:20 GMT")], at(20)),
        (&[("age", "5")], NOW),
        (&[("date", "soon")], NOW),
        (&[("date", "Sun, 01 Feb 2026 09:30:00 GMT")], at(86_400)),
        (&[("date", "Sun, 01 Feb 2026 09:30:01 GMT")], NOW),
        (&[("date", "Fri, 30 Jan 2026 09:29:59 GMT")], NOW),
    ];
    for (headers, expected) in table {
        assert_eq!(sent_at(headers.iter().copied(), NOW), expected, "{headers:?}");
    }
    let skewed = [("age", "18446744073709551615"), ("date", "Sat, 31 Jan 2026 09:30:20 GMT")];
    assert_eq!(sent_at(skewed, NOW), NOW);
}

#[test]
fn unknown_headers_and_bytes_are_ignored() {
    let signals = say(&[("date", "Sat, 31 Jan 2026 09:31:00 GMT"), ("x-ratelimit-used", "5"), ("", "")]);
    assert!(signals.is_empty());
    let signals = read([(b"retry-after".as_slice(), b"\xff\xfe".as_slice())], NOW);
    assert_eq!((signals.retry_after, counts(&signals)), (None, (1, 0)));
}

const NAMES: [&str; 18] = [
    "ratelimit",
    "RateLimit-Policy",
    "retry-after",
    "Retry-After-Ms",
    "x-amz-retry-after",
    "ratelimit-limit",
    "ratelimit-reset",
    "x-ratelimit-limit",
    "x-ratelimit-remaining",
    "x-rate-limit-reset",
    "x-ratelimit-reset-after",
    "x-ratelimit-limit-tokens",
    "x-ratelimit-remaining-tokens",
    "x-ratelimit-reset-tokens",
    "anthropic-ratelimit-tokens-limit",
    "anthropic-ratelimit-tokens-remaining",
    "anthropic-ratelimit-tokens-reset",
    "apim-request-id",
];

fn any_value() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        prop::collection::vec(any::<u8>(), 0..40),
        "[-+]?[0-9]{0,25}[.]?[0-9]{0,12}".prop_map(String::into_bytes),
        "-?([0-9]{1,22}(h|m|s|ms|us|µs|ns|d)){0,4}".prop_map(String::into_bytes),
        "[0-9]{4}-[0-1][0-9]-[0-3][0-9]T[0-2][0-9]:[0-6][0-9]:[0-6][0-9](\\.[0-9]{0,9})?(Z|[+-][0-9]{2}:[0-9]{2})?"
            .prop_map(String::into_bytes),
        "(Sun, |Sunday, )?[0-9]{2}[ -]Nov[ -][0-9]{2,4} [0-9]{2}:[0-9]{2}:[0-9]{2} GMT"
            .prop_map(String::into_bytes),
        "\"?[a-c]?\"?(;[rtqw]=-?[0-9]{0,16}){0,3}(, (limit|remaining|reset)=[0-9]{1,3})?"
            .prop_map(String::into_bytes),
    ]
}

proptest! {
    #[test]
    fn any_header_values_respect_all_bounds(
        headers in prop::collection::vec((prop::sample::select(&NAMES[..]), any_value()), 0..40),
        now in prop_oneof![Just(NOW.as_micros()), any::<u64>()],
        own in any::<u32>(),
    ) {
        let signals = read(headers.iter().map(|(name, value)| (*name, value)), Stamp::from_micros(now));
        for hint in [signals.retry_after, signals.empty_quota].into_iter().flatten() {
            prop_assert!(hint.wait <= WAIT_MAX);
            prop_assert!(!hint.is_capped || hint.wait == WAIT_MAX);
        }
        prop_assert!(signals.quotas.len() <= QUOTAS_MAX);
        for quota in &signals.quotas {
            prop_assert!(quota.limit.is_none_or(|limit| (1..=LIMIT_MAX).contains(&limit)));
            prop_assert!(quota.remaining.is_none_or(|remaining| remaining <= quota.limit.unwrap_or(LIMIT_MAX)));
            prop_assert!(quota.reset.is_none_or(|reset| reset.after() <= RESET_MAX));
            if let Some(refill) = quota.refill() {
                prop_assert!(refill.amount > 0 && !refill.period.is_zero() && !refill.interval().is_zero());
            }
            let _ = quota.time_to(u64::from(own));
        }
        prop_assert!(signals.wait(secs(u64::from(own))) <= WAIT_MAX.max(secs(u64::from(own)) + AMZ_BEYOND));
    }

    #[test]
    fn arbitrary_bytes_do_not_panic(
        headers in prop::collection::vec((any::<Vec<u8>>(), any::<Vec<u8>>()), 0..8),
        now in any::<u64>(),
    ) {
        let pairs = || headers.iter().map(|(name, value)| (name, value));
        let _ = (read(pairs(), Stamp::from_micros(now)), sent_at(pairs(), Stamp::from_micros(now)));
    }

    #[test]
    fn the_order_of_headers_with_numbers_does_not_matter(
        mut headers in prop::collection::vec((prop::sample::select(&NAMES[2..]), any_value()), 0..12),
    ) {
        let sorted = |headers: &[(&str, Vec<u8>)]| {
            let mut signals = read(headers.iter().map(|(name, value)| (*name, value)), NOW);
            signals.quotas.sort_by_key(|quota| format!("{quota:?}"));
            // Of two quotas that are empty for equally long, either may be the source.
            let waits = (signals.wait(secs(1)), signals.retry_after, signals.empty_quota.map(|hint| hint.wait));
            (waits, signals.amz_retry_after, signals.quotas, signals.malformed, signals.ignored)
        };
        let before = sorted(&headers);
        headers.reverse();
        prop_assert_eq!(before, sorted(&headers));
    }

    #[test]
    fn whole_seconds_are_exact(seconds in 0_u64..=86_400) {
        let hint = say(&[("retry-after", &seconds.to_string())]).retry_after.expect("a number");
        prop_assert_eq!(hint.wait, secs(seconds));
        let millis = (seconds * 1_000).to_string();
        prop_assert_eq!(say(&[("retry-after-ms", &millis)]).retry_after.expect("a number").wait, secs(seconds));
    }

    #[test]
    fn refill_restores_missing_units_in_time_to_full(
        limit in 1_u64..1_000_000, left in any::<prop::sample::Index>(), millis in 1_u64..86_400_000,
    ) {
        let remaining = u64::try_from(left.index(usize::try_from(limit).expect("small"))).expect("small");
        let signals = say(&[
            ("x-ratelimit-limit-tokens", &limit.to_string()),
            ("x-ratelimit-remaining-tokens", &remaining.to_string()),
            ("x-ratelimit-reset-tokens", &format!("{millis}ms")),
        ]);
        let quota = only(&signals);
        let refill = quota.refill().expect("something is missing");
        prop_assert_eq!(refill.time_for(limit - remaining), Duration::from_millis(millis));
        prop_assert_eq!(quota.time_to(limit), Some(Duration::from_millis(millis)));
    }
}
