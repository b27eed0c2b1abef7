//! Headers and addresses: what is forwarded, and where the key of a caller is.

use std::borrow::Cow;
use std::fmt;

use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::uri::{PathAndQuery, Uri};

use crate::profile::Profile;

/// How long the caller waits at most: seconds, or a duration such as `30s`.
pub(crate) const WITHIN: &str = "x-tidegate-within";

/// Headers that concern one connection only (RFC 9110 §7.6.1), and those that our own connection sets.
static HOP_BY_HOP: [HeaderName; 10] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    HeaderName::from_static("proxy-connection"),
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    header::EXPECT,
];

/// Where callers send keys to some provider.
static KEY_HEADERS: [HeaderName; 4] = [
    header::AUTHORIZATION,
    HeaderName::from_static("x-api-key"),
    HeaderName::from_static("api-key"),
    HeaderName::from_static("x-goog-api-key"),
];
/// How tokens of tidegate begin.
const TOKEN: &[u8] = b"tg_";

/// A key as a caller sent it.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Key(String);

impl Key {
    pub(crate) fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether it is a token of tidegate instead of a provider's key.
    pub(crate) fn is_token(&self) -> bool {
        self.0.as_bytes().starts_with(TOKEN)
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(…)")
    }
}

/// Removes what concerns the connection only.
pub(crate) fn remove_hop_by_hop(headers: &mut HeaderMap) {
    // Checked first: most responses have none of the rest.
    let named: Vec<HeaderName> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in named {
        headers.remove(name);
    }
    for name in &HOP_BY_HOP {
        headers.remove(name);
    }
}

/// The key of the caller: in one of the profile's headers, or in its query. Of several a token.
pub(crate) fn find_key(profile: &Profile, headers: &HeaderMap, uri: &Uri) -> Option<Key> {
    let of_value = |value: &HeaderValue| {
        let value = value.to_str().ok()?;
        Some(match value.split_once(' ') {
            Some((scheme, key)) if scheme.eq_ignore_ascii_case("bearer") => Key::new(key.trim()),
            _ => Key::new(value),
        })
    };
    let in_headers =
        profile.key_headers.iter().flat_map(|name| headers.get_all(name.as_str())).filter_map(of_value);
    let pairs =
        uri.query().into_iter().flat_map(|query| query.split('&')).filter_map(|pair| pair.split_once('='));
    let in_query = pairs.filter(|(name, _)| Some(*name) == profile.key_query.as_deref());
    let mut keys = in_headers.chain(in_query.map(|(_, value)| Key::new(value)));
    let first = keys.next()?;
    if first.is_token() { Some(first) } else { keys.find(Key::is_token).or(Some(first)) }
}

/// Removes tokens of tidegate, wherever a provider's key may be: no upstream is to see them.
pub(crate) fn remove_tokens(headers: &mut HeaderMap) {
    let is_token = |value: &HeaderValue| {
        value.as_bytes().split(|byte| matches!(byte, b' ' | b'\t' | b',')).any(|part| part.starts_with(TOKEN))
    };
    for name in &KEY_HEADERS {
        if headers.get_all(name).iter().any(is_token) {
            let kept: Vec<HeaderValue> =
                headers.get_all(name).iter().filter(|value| !is_token(value)).cloned().collect();
            headers.remove(name);
            for value in kept {
                headers.append(name, value);
            }
        }
    }
}

/// Replaces the caller's key by another.
pub(crate) fn replace_key(profile: &Profile, headers: &mut HeaderMap, key: &Key) -> bool {
    for name in &profile.key_headers {
        headers.remove(name.as_str());
    }
    let Some(name) = profile.key_headers.first().and_then(|name| HeaderName::try_from(name.as_str()).ok())
    else {
        return false;
    };
    let value = if name == header::AUTHORIZATION { format!("Bearer {}", key.0) } else { key.0.clone() };
    let Ok(mut value) = HeaderValue::from_str(&value) else { return false };
    value.set_sensitive(true);
    headers.insert(name, value);
    true
}

/// Text of an address without its percent-encoding.
pub(crate) fn percent_decoded(text: &str) -> Cow<'_, str> {
    if !text.contains('%') {
        return text.into();
    }
    let digit = |at: usize| char::from(*text.as_bytes().get(at)?).to_digit(16);
    let (mut decoded, mut at) = (Vec::with_capacity(text.len()), 0);
    while let Some(&byte) = text.as_bytes().get(at) {
        let pair = if byte == b'%' { digit(at + 1).zip(digit(at + 2)) } else { None };
        let value = pair.and_then(|(high, low)| u8::try_from(high * 16 + low).ok());
        decoded.push(value.unwrap_or(byte));
        at += if value.is_some() { 3 } else { 1 };
    }
    String::from_utf8_lossy(&decoded).into_owned().into()
}

/// The path and query for the upstream, whose own path is `base`; `without` is a parameter to leave out. A token
/// of tidegate is left out too.
pub(crate) fn upstream_path(
    base: &str,
    path: &str,
    query: Option<&str>,
    without: Option<&str>,
) -> Option<PathAndQuery> {
    let mut all = format!("{base}{path}");
    if let Some(query) = query {
        let kept = |pair: &&str| {
            let pair = percent_decoded(pair);
            let (name, value) = pair.split_once('=').unwrap_or((&pair, ""));
            Some(name) != without && !(name == "key" && value.as_bytes().starts_with(TOKEN))
        };
        let query: Vec<&str> = query.split('&').filter(kept).collect();
        if !query.is_empty() {
            all.push('?');
            all.push_str(&query.join("&"));
        }
    }
    PathAndQuery::try_from(all).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::Profiles;

    fn headers(list: &[(&str, &str)]) -> HeaderMap {
        let pair = |(name, value): &(&str, &str)| (name.parse().unwrap(), value.parse().unwrap());
        list.iter().map(pair).collect()
    }

    #[test]
    fn connection_headers_are_not_forwarded() {
        let mut all = headers(&[
            ("connection", "close, X-Own"),
            ("x-own", "1"),
            ("te", "trailers"),
            ("upgrade", "h2c"),
            ("x-kept", "2"),
        ]);
        remove_hop_by_hop(&mut all);
        assert_eq!(all, headers(&[("x-kept", "2")]));
    }

    #[test]
    fn keys_are_found_where_their_profile_says() {
        let profiles = Profiles::built_in();
        let key = |profile: &str, list: &[(&str, &str)], uri: &str| {
            let profile = profiles.get(profile).unwrap();
            find_key(profile, &headers(list), &uri.parse().unwrap()).map(|key| key.0)
        };
        assert_eq!(key("openai", &[("authorization", "Bearer sk-1")], "/").as_deref(), Some("sk-1"));
        assert_eq!(key("azure", &[("api-key", "k")], "/").as_deref(), Some("k"));
        assert_eq!(key("anthropic", &[("authorization", "bearer t")], "/").as_deref(), Some("t"));
        assert_eq!(key("gemini", &[], "/v1?alt=sse&key=g").as_deref(), Some("g"));
        assert_eq!(key("openai", &[], "/v1?key=g"), None);
        let several = [("api-key", "k"), ("authorization", "Bearer a"), ("authorization", "Bearer tg_t")];
        assert_eq!(key("azure", &several, "/").as_deref(), Some("tg_t"), "a token counts");
        assert_eq!(key("gemini", &[("x-goog-api-key", "g")], "/?key=tg_t").as_deref(), Some("tg_t"));
    }

    #[test]
    fn percent_encoding_is_decoded() {
        let pairs =
            [("a%2fB%3a", "a/B:"), ("%6Dodels", "models"), ("%2541", "%41"), ("%4", "%4"), ("%zz", "%zz")];
        for (text, wanted) in pairs {
            assert_eq!(percent_decoded(text), wanted);
        }
    }

    #[test]
    fn key_is_replaced_in_headers_and_query() {
        let profiles = Profiles::built_in();
        let gemini = profiles.get("gemini").unwrap();
        let mut all = headers(&[("authorization", "Bearer tg_x"), ("x-goog-api-key", "tg_x")]);
        assert!(replace_key(gemini, &mut all, &Key::new("real")));
        assert_eq!(all, headers(&[("x-goog-api-key", "real")]));
        let path = upstream_path("/base", "/v1", Some("alt=sse&key=tg_x"), gemini.key_query.as_deref());
        assert_eq!(path.unwrap(), "/base/v1?alt=sse");
        assert_eq!(upstream_path("", "/v1", Some("key=tg_x"), Some("key")).unwrap(), "/v1");
        assert!(!format!("{:?}", Key::new("secret")).contains("secret"));
    }
}
