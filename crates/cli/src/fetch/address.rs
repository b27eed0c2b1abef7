//! The address of a page, read once: absolute, of the web, and one text for what is the same page.

use std::fmt;

use reqwest::Url;
use sha2::{Digest as _, Sha256};
use tidegate::Authority;

use crate::words::shown;

/// No address is longer: what is longer is no address that somebody made on purpose.
pub(crate) const ADDRESS_MAX: usize = 8_192;

/// So much of a bad line is shown.
const SHOWN_MAX: usize = 200;

/// An address that can be asked for, and whose host it is.
#[derive(Debug, Clone)]
pub(crate) struct Address {
    pub(crate) url: Url,
    pub(crate) host: Authority,
}

/// A page, by its address: 128 bits of it, of which no two were ever seen to be the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Key(u128);

impl Key {
    /// The page at this address.
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
    /// Reads a line.
    pub(crate) fn parse(line: &str) -> Result<Self, String> {
        if line.len() > ADDRESS_MAX {
            return Err(format!("it has more than {ADDRESS_MAX} bytes"));
        }
        let url = Url::parse(line).map_err(|error| {
            // What people forget most.
            let is_bare = !line.contains("://");
            if is_bare { "it does not begin with https:// or http://".to_owned() } else { error.to_string() }
        })?;
        Self::of(url)
    }

    /// The same of what was read already, such as where a redirect leads.
    pub(crate) fn of(mut url: Url) -> Result<Self, String> {
        if !matches!(url.scheme(), "http" | "https") {
            return Err("it is neither https:// nor http://".to_owned());
        }
        if !url.username().is_empty() || url.password().is_some() {
            return Err("it holds a name or a password, which would be written down with it".to_owned());
        }
        if url.port() == Some(0) {
            return Err("its port is 0".to_owned());
        }
        // What is behind it never leaves the client.
        url.set_fragment(None);
        // With and without the last dot it is the same host.
        if let Some(bare) = url.host_str().and_then(|host| host.strip_suffix('.')).map(str::to_owned) {
            url.set_host(Some(&bare)).map_err(|error| error.to_string())?;
        }
        let host = Authority::new(&url.origin().ascii_serialization()).map_err(|error| error.to_string())?;
        if url.as_str().len() > ADDRESS_MAX {
            return Err(format!("it has more than {ADDRESS_MAX} bytes"));
        }
        Ok(Self { url, host })
    }

    pub(crate) fn is_https(&self) -> bool {
        self.url.scheme() == "https"
    }

    /// Where the rules of its site are.
    pub(crate) fn robots(&self) -> Self {
        let mut url = self.url.clone();
        url.set_path("/robots.txt");
        url.set_query(None);
        Self { url, host: self.host.clone() }
    }
}

/// A line as it may be shown, and written down: without what may be a name and a password.
pub(crate) fn shown_line(line: &str) -> String {
    if let Some(at) = line.rfind('@') {
        // What is no address may have a slash in its password: all before the last `@` is left out, but for the scheme.
        let scheme = line.find("://").map(|end| end + 3).filter(|end| *end <= at).unwrap_or_default();
        return cut(&line[..scheme]) + "…" + &cut(&line[at..]);
    }
    cut(line)
}

fn cut(line: &str) -> String {
    let end = line.char_indices().nth(SHOWN_MAX).map_or(line.len(), |(end, _)| end);
    let more = if end < line.len() { "…" } else { "" };
    shown(&line[..end]) + more
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_the_same_page_has_one_text() {
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
    fn what_cannot_be_asked_for_says_why() {
        let long = format!("https://h/{}", "a".repeat(ADDRESS_MAX));
        let table = [
            ("example.com/a", "it does not begin with https:// or http://"),
            ("ftp://h/a", "it is neither https:// nor http://"),
            ("mailto:a@b", "it is neither https:// nor http://"),
            ("https://u:p@h/", "it holds a name or a password, which would be written down with it"),
            ("https://", "empty host"),
            ("https://h:0/", "its port is 0"),
            ("https://h:99999/", "invalid port number"),
            (&long, "it has more than 8192 bytes"),
        ];
        for (text, why) in table {
            assert_eq!(Address::parse(text).unwrap_err(), why, "{}", shown_line(text));
        }
        assert_eq!(shown_line("a\u{1b}[2J"), "a\\u{1b}[2J");
    }

    #[test]
    fn a_line_is_shown_without_its_password() {
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
