//! The address of a page, parsed once: an absolute HTTP(S) URL, normalized so that equal pages have equal
//! text.

use std::fmt;

use reqwest::Url;
use sha2::{Digest as _, Sha256};
use tidegate::Authority;

use crate::format;

/// The maximum length of an address. Longer ones are not plausible.
pub(crate) const ADDRESS_MAX: usize = 8_192;

/// How much of an invalid line is shown.
const SHOWN_MAX: usize = 200;

/// A URL that can be requested, and its host.
#[derive(Debug, Clone)]
pub(crate) struct Address {
    pub(crate) url: Url,
    pub(crate) host: Authority,
}

/// The identity of a page: a 128-bit hash of its address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Key(u128);

impl Key {
    /// The key of the page at this address.
    pub(crate) fn of(url: &Url) -> Self {
        let digest = Sha256::digest(url.as_str());
        let (half, _) = digest.split_at(size_of::<u128>());
        Self(half.iter().fold(0, |key, byte| key << 8 | u128::from(*byte)))
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl Address {
    /// Parses a line.
    pub(crate) fn parse(line: &str) -> Result<Self, String> {
        if line.len() > ADDRESS_MAX {
            return Err(format!("longer than {ADDRESS_MAX} bytes"));
        }
        let url = Url::parse(line).map_err(|error| {
            // The most common mistake: a missing scheme.
            let is_bare = !line.contains("://");
            if is_bare { "it must begin with https:// or http://".to_owned() } else { error.to_string() }
        })?;
        Self::of(url)
    }

    /// Validates a parsed URL, such as the target of a redirect.
    pub(crate) fn of(mut url: Url) -> Result<Self, String> {
        if !matches!(url.scheme(), "http" | "https") {
            return Err("the scheme must be https or http".to_owned());
        }
        if !url.username().is_empty() || url.password().is_some() {
            return Err("it must not contain a user name or password".to_owned());
        }
        if url.port() == Some(0) {
            return Err("the port must not be 0".to_owned());
        }
        // Fragments are never sent to a server.
        url.set_fragment(None);
        // A trailing dot does not change the host.
        if let Some(bare) = url.host_str().and_then(|host| host.strip_suffix('.')).map(str::to_owned) {
            url.set_host(Some(&bare)).map_err(|error| error.to_string())?;
        }
        let host = Authority::new(&url.origin().ascii_serialization()).map_err(|error| error.to_string())?;
        if url.as_str().len() > ADDRESS_MAX {
            return Err(format!("longer than {ADDRESS_MAX} bytes"));
        }
        Ok(Self { url, host })
    }

    pub(crate) fn is_https(&self) -> bool {
        self.url.scheme() == "https"
    }

    /// The address of the site's robots.txt.
    pub(crate) fn robots(&self) -> Self {
        let mut url = self.url.clone();
        url.set_path("/robots.txt");
        url.set_query(None);
        Self { url, host: self.host.clone() }
    }
}

/// A line for display and for the journal, without possible credentials.
pub(crate) fn shown_line(line: &str) -> String {
    if let Some(at) = line.rfind('@') {
        // The password in an invalid URL may contain a slash: everything before the last `@` is dropped,
        // except for the scheme.
        let scheme = line.find("://").map(|end| end + 3).filter(|end| *end <= at).unwrap_or_default();
        return cut(&line[..scheme]) + "…" + &cut(&line[at..]);
    }
    cut(line)
}

fn cut(line: &str) -> String {
    let end = line.char_indices().nth(SHOWN_MAX).map_or(line.len(), |(end, _)| end);
    let more = if end < line.len() { "…" } else { "" };
    format::escape(&line[..end]) + more
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_pages_have_equal_addresses() {
        let table = [
            ("HTTP://Example.COM:80/a/../b?q#frag", "http://example.com/b?q", "example.com"),
            ("https://example.com.", "https://example.com/", "example.com"),
            ("https://h:8443/%7ea", "https://h:8443/%7ea", "h:8443"),
            ("http://[2001:DB8::1]/", "http://[2001:db8::1]/", "[2001:db8::1]"),
            ("https://bücher.example/", "https://xn--bcher-kva.example/", "xn--bcher-kva.example"),
        ];
        for (text, url, host) in table {
            let address = Address::parse(text).unwrap();
            assert_eq!((address.url.as_str(), address.host.as_str()), (url, host), "{text}");
        }
    }

    #[test]
    fn invalid_address_is_rejected_with_a_reason() {
        let long = format!("https://h/{}", "a".repeat(ADDRESS_MAX));
        let table = [
            ("example.com/a", "it must begin with https:// or http://"),
            ("ftp://h/a", "the scheme must be https or http"),
            ("mailto:a@b", "the scheme must be https or http"),
            ("https://u:p@h/", "it must not contain a user name or password"),
            ("https://", "empty host"),
            ("https://h:0/", "the port must not be 0"),
            ("https://h:99999/", "invalid port number"),
            (&long, "longer than 8192 bytes"),
        ];
        for (text, why) in table {
            assert_eq!(Address::parse(text).unwrap_err(), why, "{}", shown_line(text));
        }
        assert_eq!(shown_line("a\u{1b}[2J"), "a\\u{1b}[2J");
    }

    #[test]
    fn displayed_line_has_no_password() {
        let table = [
            ("https://u:p@h/a", "https://…@h/a"),
            ("https://u:p/w@h:99999/a", "https://…@h:99999/a"),
            ("ftp://u:p@w@h/a", "ftp://…@h/a"),
            ("u:p@h/a", "…@h/a"),
            ("u:p@h/a://", "…@h/a://"),
        ];
        for (line, shown) in table {
            assert_eq!(shown_line(line), shown);
        }
    }
}
