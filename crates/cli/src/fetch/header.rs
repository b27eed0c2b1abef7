//! Headers of the user: which are allowed, and to which addresses they are sent.

use reqwest::header::{HeaderMap, HeaderName, HeaderValue};

use super::address::Address;

/// Headers of the connection and of the framing, and those that the program sets itself.
const RESERVED: [&str; 15] = [
    "connection",
    "content-length",
    "expect",
    "host",
    "if-range",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "range",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "user-agent",
];

/// Parses `Name: value`.
pub(crate) fn parse(text: &str) -> Result<(HeaderName, HeaderValue), String> {
    let (name, value) = text.split_once(':').ok_or("must be `Name: value`")?;
    let name: HeaderName =
        name.trim().parse().map_err(|_| "the name must consist of letters, digits and -")?;
    match name.as_str() {
        "user-agent" => return Err("set it with --user-agent".to_owned()),
        reserved if RESERVED.contains(&reserved) => {
            return Err(format!("`{reserved}` is set by the connection, and cannot be chosen"));
        }
        _ => {}
    }
    let mut value: HeaderValue =
        value.trim().parse().map_err(|_| "the value must consist of visible ASCII characters")?;
    // It may be a password: never logged, nor compressed with others.
    value.set_sensitive(true);
    Ok((name, value))
}

/// The headers for a request to `to`, for a page that was requested at `from`.
///
/// They may be credentials: none is sent to another host after a redirect, nor in the clear after HTTPS.
pub(crate) fn allowed(headers: &HeaderMap, from: &Address, to: &Address) -> HeaderMap {
    let is_allowed = from.host == to.host && (to.is_https() || !from.is_https());
    if is_allowed { headers.clone() } else { HeaderMap::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_is_a_name_and_a_value() {
        let (name, value) = parse("X-Token:  a:b ").unwrap();
        assert_eq!((name.as_str(), value.to_str().unwrap(), value.is_sensitive()), ("x-token", "a:b", true));
        for text in ["", "X-Token", ": a", "a b: c", "X: a\nb", "X: \u{7f}"] {
            assert!(parse(text).is_err(), "{text:?}");
        }
        for name in RESERVED {
            assert!(parse(&format!("{}: 1", name.to_uppercase())).is_err(), "{name}");
        }
    }

    #[test]
    fn header_stays_with_its_host() {
        let headers: HeaderMap = [parse("authorization: Bearer 1").unwrap()].into_iter().collect();
        let table = [
            ("https://h/a", "https://h/b", true),
            ("http://h/a", "https://h/a", true),
            ("https://h/a", "http://h/a", false),
            ("https://h/a", "https://h:8443/a", false),
            ("https://h/a", "https://www.h/a", false),
        ];
        for (from, to, is_allowed) in table {
            let (page, at) = (Address::parse(from).unwrap(), Address::parse(to).unwrap());
            assert_eq!(
                allowed(&headers, &page, &at).contains_key("authorization"),
                is_allowed,
                "{from} {to}"
            );
        }
    }
}
