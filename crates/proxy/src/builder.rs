//! Configures a proxy: its upstreams, their keys, its tenants and bounds.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http::uri::{Authority, Scheme, Uri};
use thiserror::Error;
use tidegate_core::duration::Exact;
use tidegate_core::limit::lease::RENEWAL_MAX;
use tidegate_core::retry::{Retries, RetryBudget};

use crate::headers::Key;
use crate::profile::{GENERIC, Profile, Profiles};
use crate::proxy::{Proxy, ProxyBounds};
use crate::tenant::Tenants;

/// The first part of the proxy's own paths, which no upstream may have as a name.
pub(crate) const OWN_NAME: &str = "tidegate";
/// The least time for which the limits of a tenant are drawn.
const LEASE_TIME_MIN: Duration = Duration::from_secs(1);
/// The most upstreams.
const UPSTREAMS_MAX: usize = 256;
/// The longest name of an upstream.
const NAME_MAX: usize = 64;

/// The error of an invalid configuration.
#[derive(Debug, Error)]
#[error("{0}")]
pub struct InvalidProxy(pub(crate) String);

/// An upstream: the first part of a path that leads to it, its address and its profile.
#[derive(Debug, Clone)]
pub struct Upstream {
    pub(crate) name: Arc<str>,
    pub(crate) profile: Arc<Profile>,
    pub(crate) scheme: Scheme,
    pub(crate) authority: Authority,
    /// The path of its address, without a slash at the end.
    pub(crate) base: String,
    /// The key for callers with a token.
    pub(crate) key: Option<Key>,
    /// Calls begun and repeated, in the window of the proxy's budget.
    pub(crate) retries: Arc<Mutex<Retries>>,
}

impl Upstream {
    /// Parses `NAME=URL` or `NAME:PROFILE=URL`. Without a profile it is the one of the same name, or else
    /// `generic`.
    ///
    /// # Errors
    /// [`InvalidProxy`] names the part that is invalid.
    pub fn parse(text: &str, profiles: &Profiles) -> Result<Self, InvalidProxy> {
        let wrong = |why: String| Err(InvalidProxy(why));
        let Some((left, url)) = text.split_once('=') else {
            return wrong(format!("upstream is `{text}`, and must be NAME=URL or NAME:PROFILE=URL"));
        };
        let (name, profile) =
            left.split_once(':').map_or((left, None), |(name, profile)| (name, Some(profile)));
        let is_good = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        if name.is_empty() || name.len() > NAME_MAX || !name.bytes().all(is_good) || name == OWN_NAME {
            return wrong(format!(
                "upstream name is `{name}`, and must be 1 to {NAME_MAX} letters, digits, `-`, `_` or `.`, and not `{OWN_NAME}`"
            ));
        }
        let known = || profiles.names().collect::<Vec<_>>().join(", ");
        let profile = match profile {
            Some(profile) => profiles.get(profile),
            None => profiles.get(name).or_else(|| profiles.get(GENERIC)),
        };
        let Some(profile) = profile else {
            return wrong(format!("profile of upstream `{name}` is unknown; it must be one of {}", known()));
        };
        let address = || {
            format!("address of upstream `{name}` must be http://HOST or https://HOST, with an optional path")
        };
        let uri: Uri = url.parse().map_err(|_| InvalidProxy(address()))?;
        let parts = uri.into_parts();
        let scheme = parts.scheme.filter(|scheme| *scheme == Scheme::HTTP || *scheme == Scheme::HTTPS);
        let path = parts.path_and_query.map(|path| (path.path().to_owned(), path.query().is_some()));
        match (scheme, parts.authority, path.unwrap_or_default()) {
            // Credentials in an address would end up in logs.
            (Some(scheme), Some(authority), (path, false)) if !authority.as_str().contains('@') => Ok(Self {
                name: name.into(),
                profile: Arc::clone(profile),
                scheme,
                authority,
                base: path.trim_end_matches('/').to_owned(),
                key: None,
                retries: Arc::new(Mutex::new(Retries::new(&RetryBudget::default()))),
            }),
            _ => wrong(address()),
        }
    }

    /// The name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The profile.
    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    /// Keeps a key for callers that send a token of tidegate instead.
    #[must_use]
    pub fn key(mut self, key: impl Into<String>) -> Self {
        self.key = Some(Key::new(key));
        self
    }
}

/// Configures a [`Proxy`].
#[must_use = "a builder does nothing until it is built"]
pub struct ProxyBuilder {
    pub(crate) upstreams: Vec<Upstream>,
    pub(crate) tenants: Option<Tenants>,
    pub(crate) requires_token: bool,
    pub(crate) bounds: ProxyBounds,
}

impl ProxyBuilder {
    pub(crate) fn new() -> Self {
        Self { upstreams: Vec::new(), tenants: None, requires_token: false, bounds: ProxyBounds::default() }
    }

    /// Adds an upstream.
    ///
    /// # Errors
    /// [`InvalidProxy`] if the name is taken, or there are too many.
    pub fn upstream(mut self, upstream: Upstream) -> Result<Self, InvalidProxy> {
        if self.upstreams.iter().any(|other| other.name == upstream.name) {
            return Err(InvalidProxy(format!("upstream `{}` is given twice", upstream.name)));
        }
        if self.upstreams.len() >= UPSTREAMS_MAX {
            return Err(InvalidProxy(format!("more than {UPSTREAMS_MAX} upstreams")));
        }
        self.upstreams.push(upstream);
        Ok(self)
    }

    /// Accepts tokens of these tenants in place of keys.
    pub fn tenants(mut self, tenants: Tenants) -> Self {
        self.tenants = Some(tenants);
        self
    }

    /// Refuses callers without a token.
    pub const fn require_token(mut self) -> Self {
        self.requires_token = true;
        self
    }

    /// Sets the bounds.
    pub const fn bounds(mut self, bounds: ProxyBounds) -> Self {
        self.bounds = bounds;
        self
    }

    /// Checks the configuration.
    ///
    /// # Errors
    /// [`InvalidProxy`] if there is no upstream, if tokens are required but there are no tenants, if a bound is out
    /// of its range, or if the system's root certificates cannot be loaded.
    pub fn build(self) -> Result<Proxy, InvalidProxy> {
        if self.upstreams.is_empty() {
            return Err(InvalidProxy("there is no upstream: name at least one, as NAME=URL".to_owned()));
        }
        if self.requires_token && self.tenants.is_none() {
            return Err(InvalidProxy("tokens are required, but there is no store that has them".to_owned()));
        }
        let lease_time = self.bounds.lease_time;
        if !(LEASE_TIME_MIN..=RENEWAL_MAX).contains(&lease_time) {
            let lease_time = Exact(lease_time);
            return Err(InvalidProxy(format!("lease_time is {lease_time}, and must be from 1s to 24h")));
        }
        Proxy::of(self)
    }
}

impl fmt::Debug for ProxyBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProxyBuilder").field("upstreams", &self.upstreams).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn upstreams_are_parsed_with_their_profile() {
        let profiles = Profiles::built_in();
        let table = [
            ("openai=https://api.openai.com", "openai", "openai", "api.openai.com", ""),
            ("groq:openai=https://api.groq.com/openai/", "groq", "openai", "api.groq.com", "/openai"),
            ("local=http://127.0.0.1:8000", "local", "generic", "127.0.0.1:8000", ""),
        ];
        for (text, name, profile, authority, base) in table {
            let upstream = Upstream::parse(text, &profiles).unwrap();
            assert_eq!((upstream.name(), upstream.profile().name()), (name, profile));
            assert_eq!((upstream.authority.as_str(), upstream.base.as_str()), (authority, base));
        }
    }

    #[test]
    fn invalid_upstreams_are_refused_with_their_part() {
        let table = [
            ("openai", "upstream is `openai`, and must be NAME=URL"),
            ("a b=https://x", "upstream name is `a b`"),
            ("tidegate=https://x", "upstream name is `tidegate`"),
            ("a:nope=https://x", "profile of upstream `a` is unknown; it must be one of anthropic, azure"),
            ("a=ftp://x", "address of upstream `a` must be http://HOST"),
            ("a=https://u:p@x", "address of upstream `a`"),
            ("a=https://x/?q=1", "address of upstream `a`"),
            ("a=x", "address of upstream `a`"),
        ];
        for (text, sentence) in table {
            let error = Upstream::parse(text, &Profiles::built_in()).unwrap_err().to_string();
            assert!(error.starts_with(sentence), "{error}");
            assert!(!error.contains("u:p@"), "no credentials in an error");
        }
        let twice = || Upstream::parse("a=http://x", &Profiles::built_in()).unwrap();
        let error = Proxy::builder().upstream(twice()).unwrap().upstream(twice()).unwrap_err();
        assert_eq!(error.to_string(), "upstream `a` is given twice");
        assert!(Proxy::builder().build().unwrap_err().to_string().starts_with("there is no upstream"));
        let bounds = ProxyBounds { lease_time: Duration::ZERO, ..ProxyBounds::default() };
        let error = Proxy::builder().upstream(twice()).unwrap().bounds(bounds).build().unwrap_err();
        assert_eq!(error.to_string(), "lease_time is 0s, and must be from 1s to 24h");
    }
}
