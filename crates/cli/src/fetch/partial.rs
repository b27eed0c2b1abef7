//! A body that broke off after its first bytes were written: how to request the rest of it.
//!
//! The rest is requested with `Range` and `If-Range`: if the page has changed, the server sends all of it.

use reqwest::header::{
    ACCEPT_ENCODING, CONTENT_RANGE, DATE, ETAG, HeaderMap, HeaderValue, IF_RANGE, LAST_MODIFIED, RANGE,
};
use reqwest::{StatusCode, Url};

/// The first bytes of a body, synced to a part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Partial {
    /// The name of the part.
    pub(crate) part: String,
    pub(crate) bytes: u64,
    /// The address that they came from, after redirects.
    pub(crate) url: Url,
    /// The value of `If-Range`: a strong `ETag`, or else `Last-Modified`.
    pub(crate) validator: String,
    /// Requests for the rest, in a row, of which nothing arrived.
    pub(crate) empty_rests: u32,
}

impl Partial {
    /// The headers that request the rest. Ranges count the bytes as sent, so the body must not be compressed.
    pub(crate) fn headers(&self) -> Option<HeaderMap> {
        let mut headers = HeaderMap::new();
        headers.insert(RANGE, HeaderValue::from_str(&format!("bytes={}-", self.bytes)).ok()?);
        headers.insert(IF_RANGE, HeaderValue::from_str(&self.validator).ok()?);
        headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        Some(headers)
    }

    /// Whether the response is the rest: all of it, and of the same page. Some servers send less than a range
    /// asks for, and some ignore `If-Range`.
    pub(crate) fn is_continued_by(&self, status: StatusCode, headers: &HeaderMap) -> bool {
        let range = headers.get(CONTENT_RANGE).and_then(|range| range.to_str().ok()).and_then(content_range);
        let is_rest = range.is_some_and(|(first, last, total)| first == self.bytes && last + 1 == total);
        let is_same = validator(headers).is_none_or(|validator| validator == self.validator);
        status == StatusCode::PARTIAL_CONTENT && is_rest && is_same
    }
}

/// The first byte, the last byte and the total of `bytes 5-9/10`; `None` if the total is unknown.
fn content_range(text: &str) -> Option<(u64, u64, u64)> {
    let (range, total) = text.strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let (first, last, total) = (first.parse().ok()?, last.parse().ok()?, total.parse().ok()?);
    (first <= last && last < total).then_some((first, last, total))
}

/// What a later `If-Range` can compare; `None` if nothing identifies these very bytes.
pub(crate) fn validator(headers: &HeaderMap) -> Option<String> {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
    let tag = text(ETAG).filter(|tag| tag.starts_with('"'));
    // RFC 9110: a date is strong only if the page was not changed in the second of the response.
    let date = || text(LAST_MODIFIED).filter(|date| text(DATE).is_none_or(|now| now != *date));
    tag.or_else(date).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fetch::header;

    #[test]
    fn validator_identifies_bytes() {
        let table = [
            ("etag: \"a\"\nlast-modified: then", Some("\"a\"")),
            ("etag: W/\"a\"\nlast-modified: then", Some("then")),
            ("last-modified: then\ndate: now", Some("then")),
            ("last-modified: now\ndate: now", None),
            ("", None),
        ];
        for (lines, wanted) in table {
            assert_eq!(validator(&headers(lines)).as_deref(), wanted, "{lines}");
        }
    }

    fn headers(lines: &str) -> HeaderMap {
        lines.lines().map(|line| header::parse(line).unwrap()).collect()
    }

    /// Regression: less than the rest was saved as the whole page, and so was the rest of another version.
    #[test]
    fn only_the_whole_rest_of_the_same_page_continues() {
        let partial = Partial {
            part: "1".to_owned(),
            bytes: 5,
            url: Url::parse("https://h/a").unwrap(),
            validator: "\"a\"".to_owned(),
            empty_rests: 0,
        };
        let table = [
            ("content-range: bytes 5-9/10\netag: \"a\"", true),
            ("content-range: bytes 5-9/10", true),
            ("content-range: bytes 5-9/10\netag: \"b\"", false),
            ("content-range: bytes 5-8/10\netag: \"a\"", false),
            ("content-range: bytes 5-9/*\netag: \"a\"", false),
            ("content-range: bytes 4-9/10\netag: \"a\"", false),
            ("content-range: bytes 5-18446744073709551615/10\netag: \"a\"", false),
            ("content-range: items 5-9/10", false),
            ("etag: \"a\"", false),
        ];
        for (lines, wanted) in table {
            let is_rest = |status| partial.is_continued_by(status, &headers(lines));
            assert_eq!(is_rest(StatusCode::PARTIAL_CONTENT), wanted, "{lines}");
            assert!(!is_rest(StatusCode::OK), "{lines}");
        }
    }
}
