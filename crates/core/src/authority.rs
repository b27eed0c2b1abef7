//! The far side as a key: one text for each authority, however it was written.
//!
//! Limits belong to a host and port. `http://API.example.com:80/v1`, `api.example.com.` and
//! `https://user:secret@api.example.com` are the same far side and must share one throttle, so an [`Authority`]
//! is what they have in common: the host in lower case, without a trailing dot, and the port if it is not the
//! scheme's own. Credentials, path and query are no part of it, and no error shows any of the text.
//!
//! - Without a scheme 80 and 443 are both left out; with `http` or `ws` only 80, with `https` or `wss` only
//!   443, and with any other scheme none.
//! - An address of IPv6 is in brackets and in its shortest form. An address of IPv4 has four decimal numbers;
//!   the other ways to write one (`127.1`, `0x7f.0.0.1`) are refused, as they are names to some and addresses
//!   to others.
//! - Letters beyond ASCII become punycode in lower case. Only letters are taken that mean the same however they
//!   were typed: Latin, Greek, Cyrillic, Armenian, Hebrew, Arabic, Devanagari, Georgian, kana, Han and Hangul.
//!   Combining marks, wide and compatibility forms and other scripts would need the tables of Unicode, and are
//!   refused; written as `xn--…` they are taken. The rules for who may register what are not checked.
//! - Percent signs, backslashes, blanks and control characters are refused, not decoded.
//!
//! Hosts are not grouped here by the domain somebody registered (`a.example.co.uk` with `b.example.co.uk`): that needs
//! the public suffix list, which changes every week. `tidegate::registrable` does it, behind the feature `registrable`.
//!
//! Where a far side counts each of its customers apart, [`Account`] is the key, or a tuple of an authority and a name.

mod host;
mod punycode;

use std::borrow::Borrow;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use thiserror::Error;

/// A text of more bytes is not looked at.
pub const TEXT_MAX: usize = 8_192;
/// A host has at most so many bytes, as the domain name system has it.
pub const HOST_MAX: usize = 253;
/// A label between two dots has at most so many bytes.
pub const LABEL_MAX: usize = 63;
/// The name of an account has at most so many bytes.
pub const ACCOUNT_MAX: usize = 256;

/// A host, and a port if it is not the usual one: the key of a far side.
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

/// Text that names no authority. None of the text is kept or shown: it may hold a password.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum InvalidAuthority {
    /// There is no host.
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
    /// What is before `://` is no scheme.
    #[error("the scheme is no letter followed by letters, digits, `+`, `-` and `.`")]
    Scheme,
    /// The port is no number, or none that there is.
    #[error("the port is no number within 1..=65535")]
    Port,
    /// The host has percent signs.
    #[error("the host holds a percent sign; write it decoded, and an IPv6 address without a zone")]
    Percent,
    /// A backslash is before the path. It is a slash to some and not to others.
    #[error("there is a backslash before the path")]
    Backslash,
    /// A character that no host has.
    #[error("label {label} of the host holds a character that no host has")]
    Letter {
        /// Which label, from 1.
        label: usize,
    },
    /// A letter beyond ASCII whose one form is not known without the tables of Unicode.
    #[error(
        "label {label} of the host holds a letter with more than one form; write the label as punycode, xn--…"
    )]
    Script {
        /// Which label, from 1.
        label: usize,
    },
    /// There is nothing between two dots.
    #[error("label {label} of the host is empty")]
    EmptyLabel {
        /// Which label, from 1.
        label: usize,
    },
    /// A hyphen at an end.
    #[error("label {label} of the host begins or ends with a hyphen")]
    Hyphen {
        /// Which label, from 1.
        label: usize,
    },
    /// It begins with `xn--` and what follows is no punycode, or not the only one for its letters.
    #[error("label {label} of the host begins with xn-- and is no punycode of lower-case letters")]
    Punycode {
        /// Which label, from 1.
        label: usize,
    },
    /// The last label is a number, and the host no address.
    #[error("the host ends in a number and is no IPv4 address of four decimal numbers")]
    Ipv4,
    /// There are brackets and no address in them, or an address and no brackets.
    #[error("the host is no IPv6 address in brackets")]
    Ipv6,
}

impl Authority {
    /// The authority of a URL, or of a `host` or `host:port`.
    ///
    /// # Errors
    /// [`InvalidAuthority`] says what is wrong, and shows none of the text.
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
        // A password may hold an `@` that nobody encoded; a host never does.
        let place = authority.rsplit_once('@').map_or(authority, |(_, place)| place);
        let (host, port) = split_port(place)?;
        // `http:/h` has no host by the standard; it must not become the host `http`.
        if scheme.is_none() && place.ends_with(':') {
            return Err(InvalidAuthority::Port);
        }
        let host = host::canonical(host)?;
        let port = port.filter(|port| !is_usual(scheme, *port));
        Ok(Self(port.map_or_else(|| host.as_str().into(), |port| format!("{host}:{port}").into())))
    }

    /// The authority as text: `host` or `host:port`.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The host; an address of IPv6 is in brackets.
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

    /// The port, where it is not the usual one.
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

/// An account at an authority: where a far side counts each of its customers apart, the key has both.
///
/// The name is one of your own choosing, and is shown wherever keys are. It is not the account's secret.
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

/// A name that no account has. The name is not shown: it may have been a secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum InvalidAccount {
    /// There is none.
    #[error("the name of the account is empty")]
    Empty,
    /// It has too many bytes.
    #[error("the name of the account has {bytes} bytes, more than {ACCOUNT_MAX}")]
    Long {
        /// Its bytes.
        bytes: usize,
    },
    /// It has control characters.
    #[error("the name of the account holds a control character at byte {at}")]
    Letter {
        /// Where it is.
        at: usize,
    },
}

impl Account {
    /// The account of this name at `authority`.
    ///
    /// # Errors
    /// [`InvalidAccount`] where the name is empty, longer than [`ACCOUNT_MAX`], or holds control characters.
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

    /// Where the account is.
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

/// The scheme, if there is one, and what is behind its `//`.
fn split_scheme(text: &str) -> Result<(Option<&str>, &str), InvalidAuthority> {
    // A `://` in a path or a query is no scheme's.
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

/// The host and the port that is behind it. An empty port is none.
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

/// Whether the port is what one gets without saying so.
fn is_usual(scheme: Option<&str>, port: u16) -> bool {
    let is = |name: &str| scheme.is_some_and(|scheme| scheme.eq_ignore_ascii_case(name));
    match port {
        80 => scheme.is_none() || is("http") || is("ws"),
        443 => scheme.is_none() || is("https") || is("wss"),
        _ => false,
    }
}

#[cfg(test)]
mod tests;
