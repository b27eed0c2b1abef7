//! A body that broke off after its first bytes were written: how to request the rest of it.
//!
//! The rest is requested with `Range` and `If-Range`: if the page has changed, the server sends all of it.

use reqwest::header::{
    ACCEPT_ENCODING, CONTENT_RANGE, DATE, ETAG, HeaderMap, HeaderValue, IF_RANGE, LAST_MODIFIED, RANGE,
};
use reqwest::{Response, StatusCode, Url};

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

    /// Whether the response is the rest.
    pub(crate) fn is_continued_by(&self, response: &Response) -> bool {
        let range = response.headers().get(CONTENT_RANGE).and_then(|range| range.to_str().ok());
        let first = range.and_then(|range| range.strip_prefix("bytes ")?.split('-').next()?.parse().ok());
        response.status() == StatusCode::PARTIAL_CONTENT && first == Some(self.bytes)
    }
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
            let headers: HeaderMap = lines.lines().map(|line| header::parse(line).unwrap()).collect();
            assert_eq!(validator(&headers).as_deref(), wanted, "{lines}");
        }
    }
}
