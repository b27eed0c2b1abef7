//! Fuzz tests of untrusted text: nothing panics, hints stay within their bounds, implausible values are
//! dropped, and no credentials are shown.
//!
//! The same checks run on generated input (proptest) and on mutated real headers and URLs ([`mutate`]); with
//! `TIDEGATE_DEEP` set, on ten million of the latter.

use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue, Response};
use proptest::prelude::*;
use tidegate_core::authority::{Account, Authority, HOST_MAX, TEXT_MAX};
use tidegate_core::classes::{Classes, Completion};
use tidegate_core::feedback::headers::{
    LIMIT_MAX, QUOTAS_MAX, RESET_MAX, SKEW_MAX, Signals, WAIT_MAX, http_date, read, read_within, retry_after,
    sent_at,
};
use tidegate_core::outcome::{Kind, Outcome};
use tidegate_core::time::Stamp;

use self::mutate::Mutator;

mod mutate;
mod seeds;

/// 2026-01-31T09:30:00Z, the time of the seeds.
const NOW: Stamp = Stamp::from_secs(1_769_851_800);
/// Contains characters that no host can contain.
const PASSWORD: &str = "Hunter!2";

type Header = (Vec<u8>, Vec<u8>);

/// One header for each line.
fn lines(text: &[u8]) -> Vec<Header> {
    let split = |line: &[u8]| {
        let at = line.iter().position(|byte| *byte == b':').unwrap_or(line.len());
        (line[..at].to_vec(), line.get(at + 1..).unwrap_or_default().to_vec())
    };
    text.split(|byte| *byte == b'\n').map(split).collect()
}

fn pairs(headers: &[Header]) -> impl Iterator<Item = (&[u8], &[u8])> + Clone {
    headers.iter().map(|(name, value)| (name.as_slice(), value.as_slice()))
}

fn check_headers(headers: &[Header], now: Stamp) -> Signals {
    let sent = sent_at(pairs(headers), now);
    assert!(sent.since(now).max(now.since(sent)) <= SKEW_MAX, "{sent:?}");
    let signals = read(pairs(headers), sent);
    check_signals(&signals);
    assert_eq!(signals, read(pairs(headers), sent), "reading is deterministic");
    let backwards: Vec<_> = pairs(headers).collect();
    let backwards = read(backwards.into_iter().rev(), sent);
    assert_eq!(backwards.retry_after, signals.retry_after, "the order of headers does not matter");
    assert_eq!(backwards.amz_retry_after, signals.amz_retry_after);
    let short = read_within(pairs(headers), sent, Duration::from_secs(1));
    let cut = signals.hint().map(|hint| hint.wait.min(Duration::from_secs(1)));
    assert_eq!(short.hint().map(|hint| hint.wait), cut);
    signals
}

fn check_signals(signals: &Signals) {
    for hint in [signals.retry_after, signals.empty_quota].into_iter().flatten() {
        assert!(hint.wait <= WAIT_MAX && (!hint.is_capped || hint.wait == WAIT_MAX), "{hint:?}");
    }
    assert!(signals.until_more().is_none_or(|wait| wait <= RESET_MAX && !wait.is_zero()));
    assert!(signals.quotas.len() <= QUOTAS_MAX);
    let _ = (signals.wait(Duration::ZERO), signals.wait(Duration::MAX), signals.is_empty());
    for quota in &signals.quotas {
        assert!(quota.limit.is_none_or(|limit| (1..=LIMIT_MAX).contains(&limit)), "{quota:?}");
        assert!(quota.remaining.is_none_or(|left| left <= quota.limit.unwrap_or(LIMIT_MAX)), "{quota:?}");
        assert!(quota.reset.is_none_or(|reset| reset.after() <= RESET_MAX), "{quota:?}");
        assert!(quota.label.as_ref().is_none_or(|label| label.len() <= 96), "{quota:?}");
        assert!(
            quota.refill().is_none_or(|refill| refill.amount > 0 && !refill.period.is_zero()),
            "{quota:?}"
        );
        for units in [0, 1, quota.limit.unwrap_or(7), u64::MAX] {
            let _ = quota.time_to(units);
        }
    }
}

fn check_outcome(status: u16, signals: &Signals, outcome: Outcome) {
    let hint = outcome.hint();
    assert!(hint.is_none_or(|wait| wait <= WAIT_MAX), "{outcome:?}");
    let is_about_one_resource = matches!(status, 202 | 300..=399);
    if is_about_one_resource {
        assert_eq!(hint, signals.until_more(), "{status}: a delay for one resource does not delay others");
    } else if let Some(explicit) = signals.retry_after.filter(|hint| !hint.wait.is_zero()) {
        assert_eq!(hint, Some(explicit.wait), "{status}: an explicit delay is never shortened");
    }
    if outcome.kind() == Kind::Ignored {
        assert_eq!((hint, outcome.cause()), (None, None), "{status}");
    }
    let unread = signals.malformed.saturating_add(signals.ignored);
    assert_eq!(u32::from(outcome.malformed()), unread.min(u32::from(u16::MAX)));
}

/// Checks a response with those headers that the `http` crate accepts.
fn check_response(status: u16, headers: &[Header], now: Stamp) {
    let mut map = HeaderMap::new();
    for (name, value) in pairs(headers) {
        if let (Ok(name), Ok(value)) = (HeaderName::from_bytes(name), HeaderValue::from_bytes(value)) {
            map.append(name, value);
        }
    }
    let mut response = Response::new(());
    *response.status_mut() = http::StatusCode::from_u16(status).unwrap_or_default();
    *response.headers_mut() = map;
    let signals = read(response.headers(), sent_at(response.headers(), now));
    let outcome = Outcome::from_response(&response, now);
    check_outcome(response.status().as_u16(), &signals, outcome);
    assert_eq!(Classes::new().outcome_of(&response, now), outcome);
}

fn check_value(text: &str, now: Stamp) {
    let _ = retry_after(text, now);
    if let Some(date) = http_date(text, now) {
        assert_eq!(date.as_micros() % 1_000_000, 0, "{text}");
        assert!(http_date(&text.to_ascii_uppercase(), now) == Some(date), "{text}: case does not matter");
    }
}

/// The key is plain and idempotent, does not change with a password, and never shows it.
fn check_place(place: &str) {
    let plain = Authority::new(&format!("https://{place}"));
    let text = format!("https://{PASSWORD}:{PASSWORD}@{place}");
    let with_password = Authority::new(&text);
    let shown = with_password.as_ref().map_or_else(ToString::to_string, ToString::to_string);
    assert!(!format!("{with_password:?} {shown}").contains(PASSWORD), "{shown}");
    // The password may make the text too long.
    if text.len() <= TEXT_MAX {
        assert_eq!(plain.ok(), with_password.ok(), "{place}");
    }
    if let Ok(authority) = Authority::new(place) {
        let key = authority.as_str();
        let fits = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-_.:[]".contains(&byte);
        assert!(key.bytes().all(fits) && (1..=HOST_MAX).contains(&authority.host().len()), "{key}");
        // A default port of another scheme survives only with a scheme that has no default.
        let again = match authority.port() {
            Some(80 | 443) => Authority::new(&format!("any://{key}")),
            _ => Authority::new(key),
        };
        assert_eq!(again.as_ref(), Ok(&authority), "{place}");
        let account = Account::new(authority.clone(), place);
        assert!(account.is_err() || account.is_ok_and(|account| *account.authority() == authority));
    }
}

/// Any status, mostly a common one.
fn status(salt: u64) -> u16 {
    let common = [200, 404, 408, 429, 500, 501, 503];
    let low = u16::try_from(salt % 65_536).expect("below 65,536");
    if salt.is_multiple_of(2) { common[usize::from(low) % common.len()] } else { low % 1_000 }
}

/// Mostly the time of the seeds, otherwise any time.
fn time(salt: u64) -> Stamp {
    if salt.is_multiple_of(3) { Stamp::from_micros(salt) } else { NOW }
}

#[test]
fn mutated_headers_are_read_within_bounds() {
    Mutator::new(1, seeds::HEADERS, seeds::HEADER_WORDS).run(4_000, |input, salt| {
        let headers = lines(input);
        let signals = check_headers(&headers, time(salt));
        let status = status(salt);
        check_outcome(status, &signals, Classes::new().outcome_with(Completion::Status(status), &signals));
    });
}

#[test]
fn mutated_responses_have_outcomes_within_bounds() {
    Mutator::new(2, seeds::HEADERS, seeds::HEADER_WORDS).run(2_000, |input, salt| {
        check_response(status(salt), &lines(input), time(salt));
    });
}

#[test]
fn mutated_values_and_dates_do_not_panic() {
    let values: Vec<_> = seeds::HEADERS.iter().flat_map(|seed| seed.lines()).collect();
    let values: Vec<_> =
        values.iter().filter_map(|line| line.split_once(": ")).map(|(_, value)| value).collect();
    Mutator::new(3, &values, seeds::HEADER_WORDS).run(2_000, |input, salt| {
        check_value(&String::from_utf8_lossy(input), time(salt));
    });
}

#[test]
fn mutated_urls_have_one_key_and_show_no_password() {
    Mutator::new(4, seeds::PLACES, seeds::PLACE_WORDS).run(2_000, |input, _| {
        check_place(&String::from_utf8_lossy(input));
    });
}

/// Known header names, and others.
fn any_name() -> impl Strategy<Value = Vec<u8>> {
    let known: Vec<_> = seeds::HEADERS.iter().flat_map(|seed| seed.lines()).collect();
    let known: Vec<_> =
        known.iter().filter_map(|line| line.split_once(':')).map(|(name, _)| name.into()).collect();
    prop_oneof![4 => prop::sample::select(known), 1 => prop::collection::vec(any::<u8>(), 0..100)]
}

fn any_value() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        prop::collection::vec(any::<u8>(), 0..64),
        any::<i128>().prop_map(|number| number.to_string().into()),
        "[-0-9.,;:=\"a-zA-Z ]{0,40}".prop_map(Into::into),
        "\"[a-z]{0,3}\"(;[rtqw]=-?[0-9]{0,18}){0,3}(, ?\"[a-z]{0,3}\"(;[rtqw]=[0-9]{0,4}){0,3}){0,3}"
            .prop_map(Into::into),
        "[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\\.[0-9]{0,9})?(Z|[+-][0-9]{2}:[0-9]{2})"
            .prop_map(Into::into),
        prop::collection::vec(any::<u8>(), 4_000..4_200),
    ]
}

proptest! {
    #[test]
    fn arbitrary_headers_are_read_within_bounds(
        headers in prop::collection::vec((any_name(), any_value()), 0..40),
        micros in prop_oneof![Just(NOW.as_micros()), any::<u64>()],
        status in any::<u16>(),
    ) {
        let now = Stamp::from_micros(micros);
        let signals = check_headers(&headers, now);
        check_outcome(status, &signals, Classes::new().outcome_with(Completion::Status(status), &signals));
        check_response(status, &headers, now);
    }

    #[test]
    fn arbitrary_values_do_not_panic(text in any::<String>(), micros in any::<u64>()) {
        check_value(&text, Stamp::from_micros(micros));
    }

    #[test]
    fn arbitrary_places_do_not_panic(text in any::<String>()) {
        check_place(&text);
    }
}
