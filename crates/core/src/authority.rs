//! The upstream as a key: every spelling of an authority becomes the same canonical text.
//!
//! Limits belong to a host and port. `http://API.example.com:80/v1`, `api.example.com.` and
//! `https://user:secret@api.example.com` are the same upstream and must share one throttle. An [`Authority`]
//! is therefore the host in lower case, without a trailing dot, and the port unless it is the scheme's
//! default. Credentials, path and query are dropped, and no error shows any of the text.
//!
//! - Without a scheme, 80 and 443 are default ports; with `http` or `ws` only 80, with `https` or `wss` only
//!   443, and with any other scheme none.
//! - An IPv6 address is bracketed and in its shortest form. An IPv4 address has four decimal numbers; other
//!   notations (`127.1`, `0x7f.0.0.1`) are refused, because parsers disagree on whether they are names or
//!   addresses.
//! - Non-ASCII letters become lower-case punycode. Only letters with a single encoding are accepted: Latin,
//!   Greek, Cyrillic, Armenian, Hebrew, Arabic, Devanagari, Georgian, kana, Han and Hangul. Combining marks,
//!   wide and compatibility forms and other scripts would need the Unicode tables and are refused; written as
//!   `xn--…` they are accepted. Registration rules are not checked.
//! - Percent signs, backslashes, blanks and control characters are refused, not decoded.
//!
//! Hosts are not grouped by registrable domain (`a.example.co.uk` with `b.example.co.uk`) here: that needs
//! the public suffix list, which changes every week. `tidegate::registrable_domain` does it, behind the
//! feature `registrable`.
//!
//! Where an upstream limits each customer separately, [`Account`] is the key, or a tuple of an authority and
//! a name.

mod host;
mod punycode;

use std::borrow::Borrow;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use thiserror::Error;

/// The longest text that is parsed, in bytes.
pub const TEXT_MAX: usize = 8_192;
/// The longest host in bytes, as in the DNS.
pub const HOST_MAX: usize = 253;
/// The longest label between two dots, in bytes.
pub const LABEL_MAX: usize = 63;
/// The longest account name in bytes.
pub const ACCOUNT_MAX: usize = 256;

/// A host, and a port unless it is the scheme's default: the key of an upstream.
///
/// ```
/// use tidegate_core::authority::Authority;
///
/// for text in ["http://h:80", "h", "H.", "https://u:p@h/x", "wss://h:443?q#f"] {
///     assert_eq!(Authority::new(text)?.as_str(), "h");
/// }
/// assert_eq!(Authority::new("[0:0::1]:80")?.as_str(), "[::1]");
/// assert_eq!(Authority::new("https://Bücher.example:8443/")?.as_str(), "xn--bcher-kva.example:8443");
/// # Ok::<(), tidegate_core::authority::InvalidAuthority>(())
/// ```
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Authority(Arc<str>);

/// The text is no authority. None of it is kept or shown: it may hold a password.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum InvalidAuthority {
    /// The host is empty.
    #[error("the host is empty")]
    Empty,
    /// The text, the host or a label is too long.
    #[error("{part} has {bytes} bytes, more than {max}")]
    Long {
        /// Which part.
        part: &'static str,
        /// Its bytes.
        bytes: usize,
        /// The bound.
        max: usize,
    },
    /// The text before `://` is not a scheme.
    #[error("the scheme is not a letter followed by letters, digits, `+`, `-` and `.`")]
    Scheme,
    /// The port is not a number within 1..=65535.
    #[error("the port is not a number within 1..=65535")]
    Port,
    /// The host contains a percent sign.
    #[error("the host contains a percent sign; write it decoded, and an IPv6 address without a zone")]
    Percent,
    /// A backslash precedes the path. Some parsers read it as a slash and others do not.
    #[error("a backslash precedes the path")]
    Backslash,
    /// A character that is not allowed in a host.
    #[error("label {label} of the host contains a character that is not allowed in a host")]
    Letter {
        /// Which label, from 1.
        label: usize,
    },
    /// A non-ASCII letter that cannot be normalized without the Unicode tables.
    #[error(
        "label {label} of the host contains a letter with several encodings; write the label as punycode, xn--…"
    )]
    Script {
        /// Which label, from 1.
        label: usize,
    },
    /// A label is empty.
    #[error("label {label} of the host is empty")]
    EmptyLabel {
        /// Which label, from 1.
        label: usize,
    },
    /// A label begins or ends with a hyphen.
    #[error("label {label} of the host begins or ends with a hyphen")]
    Hyphen {
        /// Which label, from 1.
        label: usize,
    },
    /// A label begins with `xn--`, and the rest is not canonical punycode.
    #[error("label {label} of the host begins with xn-- and is not punycode of lower-case letters")]
    Punycode {
        /// Which label, from 1.
        label: usize,
    },
    /// The last label is a number, and the host is not an IPv4 address.
    #[error("the host ends in a number and is not an IPv4 address of four decimal numbers")]
    Ipv4,
    /// Brackets without an IPv6 address in them, or an IPv6 address without brackets.
    #[error("the host is not an IPv6 address in brackets")]
    Ipv6,
}

impl Authority {
    /// Parses the authority of a URL, or a `host` or `host:port`.
    ///
    /// # Errors
    /// [`InvalidAuthority`] names the problem and shows none of the text.
    pub fn new(text: &str) -> Result<Self, InvalidAuthority> {
        if text.len() > TEXT_MAX {
            return Err(InvalidAuthority::Long { part: "the text", bytes: text.len(), max: TEXT_MAX });
        }
        let (scheme, rest) = split_scheme(text)?;
        let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
        let authority = &rest[..end];
        if authority.contains('\\') {
            return Err(InvalidAuthority::Backslash);
        }
        // A password may contain an unencoded `@`; a host never does.
        let place = authority.rsplit_once('@').map_or(authority, |(_, place)| place);
        let (host, port) = split_port(place)?;
        // By the URL standard `http:/h` has no host; it must not become the host `http`.
        if scheme.is_none() && place.ends_with(':') {
            return Err(InvalidAuthority::Port);
        }
        let host = host::canonical(host)?;
        let port = port.filter(|port| !is_default_port(scheme, *port));
        Ok(Self(port.map_or_else(|| host.as_str().into(), |port| format!("{host}:{port}").into())))
    }

    /// The authority as text: `host` or `host:port`.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The host; an IPv6 address is in brackets.
    ///
    /// ```
    /// use tidegate_core::authority::Authority;
    ///
    /// let authority = Authority::new("http://[::1]:8080/")?;
    /// assert_eq!((authority.host(), authority.port()), ("[::1]", Some(8080)));
    /// # Ok::<(), tidegate_core::authority::InvalidAuthority>(())
    /// ```
    pub fn host(&self) -> &str {
        self.parts().0
    }

    /// The port, unless it is the scheme's default.
    pub fn port(&self) -> Option<u16> {
        self.parts().1.and_then(|port| port.parse().ok())
    }

    fn parts(&self) -> (&str, Option<&str>) {
        match self.0.rsplit_once(':') {
            Some((host, port)) if !port.ends_with(']') => (host, Some(port)),
            _ => (&self.0, None),
        }
    }
}

impl FromStr for Authority {
    type Err = InvalidAuthority;

    fn from_str(text: &str) -> Result<Self, InvalidAuthority> {
        Self::new(text)
    }
}

impl TryFrom<&str> for Authority {
    type Error = InvalidAuthority;

    fn try_from(text: &str) -> Result<Self, InvalidAuthority> {
        Self::new(text)
    }
}

impl Borrow<str> for Authority {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl AsRef<str> for Authority {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", &*self.0)
    }
}

/// An account at an authority: the key where an upstream limits each customer separately.
///
/// You choose the name. It is shown wherever keys are shown, so it must not be the account's secret.
///
/// ```
/// use tidegate_core::authority::{Account, Authority};
///
/// let account = Account::new(Authority::new("https://api.example.com/v1")?, "team-a")?;
/// assert_eq!(account.to_string(), "team-a at api.example.com");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Account {
    authority: Authority,
    name: Arc<str>,
}

/// An invalid account name. The name is not shown: it may be a secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum InvalidAccount {
    /// The name is empty.
    #[error("the name of the account is empty")]
    Empty,
    /// The name is too long.
    #[error("the name of the account has {bytes} bytes, more than {ACCOUNT_MAX}")]
    Long {
        /// Its bytes.
        bytes: usize,
    },
    /// The name contains a control character.
    #[error("the name of the account contains a control character at byte {at}")]
    Letter {
        /// Where it is.
        at: usize,
    },
}

impl Account {
    /// Creates the key of the account `name` at `authority`.
    ///
    /// # Errors
    /// [`InvalidAccount`] where the name is empty, longer than [`ACCOUNT_MAX`], or contains control
    /// characters.
    pub fn new(authority: Authority, name: &str) -> Result<Self, InvalidAccount> {
        if name.is_empty() {
            return Err(InvalidAccount::Empty);
        }
        if name.len() > ACCOUNT_MAX {
            return Err(InvalidAccount::Long { bytes: name.len() });
        }
        match name.char_indices().find(|(_, letter)| letter.is_control()) {
            Some((at, _)) => Err(InvalidAccount::Letter { at }),
            None => Ok(Self { authority, name: name.into() }),
        }
    }

    /// The authority the account belongs to.
    pub const fn authority(&self) -> &Authority {
        &self.authority
    }

    /// The account's name.
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl fmt::Display for Account {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {}", self.name, self.authority)
    }
}

/// Splits off the scheme, if any; the rest starts after `//`.
fn split_scheme(text: &str) -> Result<(Option<&str>, &str), InvalidAuthority> {
    // A `://` in a path or query does not end a scheme.
    let end = text.find(['/', '?', '#', '@']).unwrap_or(text.len());
    let Some(scheme) = text[..end].strip_suffix(':').filter(|_| text[end..].starts_with("//")) else {
        return Ok((None, text.strip_prefix("//").unwrap_or(text)));
    };
    let fits = |letter: char| letter.is_ascii_alphanumeric() || "+-.".contains(letter);
    if !scheme.starts_with(|letter: char| letter.is_ascii_alphabetic()) || !scheme.chars().all(fits) {
        return Err(InvalidAuthority::Scheme);
    }
    Ok((Some(scheme), &text[end + 2..]))
}

/// Splits `host:port`. An empty port counts as none.
fn split_port(place: &str) -> Result<(&str, Option<u16>), InvalidAuthority> {
    let (host, port) = match place.rfind(']') {
        Some(end) => place.split_at(end + 1),
        None if place.starts_with('[') || host::is_bare_ipv6(place) => return Err(InvalidAuthority::Ipv6),
        None => place.split_at(place.find(':').unwrap_or(place.len())),
    };
    let digits = match port.strip_prefix(':') {
        None if port.is_empty() => return Ok((host, None)),
        None => return Err(InvalidAuthority::Ipv6),
        Some("") => return Ok((host, None)),
        Some(digits) => digits,
    };
    let is_number = digits.bytes().all(|byte| byte.is_ascii_digit());
    let number = digits.trim_start_matches('0').parse().ok().filter(|port: &u16| is_number && *port > 0);
    number.map(|port| (host, Some(port))).ok_or(InvalidAuthority::Port)
}

/// Whether `port` is the default port of `scheme`.
fn is_default_port(scheme: Option<&str>, port: u16) -> bool {
    let is = |name: &str| scheme.is_some_and(|scheme| scheme.eq_ignore_ascii_case(name));
    match port {
        80 => scheme.is_none() || is("http") || is("ws"),
        443 => scheme.is_none() || is("https") || is("wss"),
        _ => false,
    }
}

#[cfg(test)]
mod tests;
