//! Builds a client: URL, credentials, certificates, timeouts and retries.

use std::sync::Arc;
use std::time::Duration;
use tidegate_core::excerpt::excerpt;

use reqwest::Url;
use reqwest::header::HeaderValue;
use thiserror::Error;
use tidegate_core::backoff::{Backoff, Jitter};
use tidegate_core::duration::Exact;
use tidegate_core::retry::Retry;

use super::certificates::Certificates;
use super::error::root_cause;
use super::secret::{InvalidToken, Secret};
use super::{Client, Inner};
use crate::tls;

/// The range of the timeouts.
const TIMEOUTS: (Duration, Duration) = (Duration::from_millis(1), Duration::from_secs(86_400));
/// Shorter than the idle timeout of the server: a request sent while the server closes the connection may or
/// may not have been received.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);
/// The default user agent.
const USER_AGENT: &str = concat!("tidegate-client/", env!("CARGO_PKG_VERSION"));

/// An invalid option of a client. It never contains the token.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum InvalidClient {
    /// The URL is not that of a server.
    #[error("invalid server URL `{url}`: {why}")]
    Url {
        /// The URL, truncated to 80 characters.
        url: String,
        /// What is wrong with it.
        why: String,
    },
    /// The token is empty or contains a control character.
    #[error("invalid token: it is empty or contains a control character")]
    Token,
    /// The user agent contains a control character.
    #[error("invalid user agent `{name}`: it contains a control character")]
    UserAgent {
        /// The user agent, truncated to 80 characters.
        name: String,
    },
    /// A timeout is out of bounds.
    #[error("a {field} of {}, outside {}..={}", Exact(*.span), Exact(TIMEOUTS.0), Exact(TIMEOUTS.1))]
    Span {
        /// Which option.
        field: &'static str,
        /// The value.
        span: Duration,
    },
    /// A certificate or a key cannot be used. It never contains the key.
    #[error("the {what} cannot be used: {why}")]
    Tls {
        /// Which option.
        what: &'static str,
        /// What is wrong with it.
        why: String,
    },
    /// The HTTP client or its runtime could not be created.
    #[error("cannot create the client: {0}")]
    System(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// Builds a [`Client`].
///
/// ```
/// use std::time::Duration;
/// use tidegate_client::{Client, Retry};
///
/// # fn main() -> Result<(), tidegate_client::InvalidClient> {
/// let client = Client::builder("http://127.0.0.1:8707")
///     .token("tg_ci_0123")
///     .request_timeout(Duration::from_secs(2))
///     .retry(Retry::attempts(6))
///     .build()?;
/// assert!(!format!("{client:?}").contains("0123"));
///
/// let error = Client::builder("ftp://127.0.0.1").build().unwrap_err();
/// assert_eq!(error.to_string(), "invalid server URL `ftp://127.0.0.1`: it begins with neither http:// nor https://");
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
#[must_use = "a builder does nothing until it builds"]
pub struct ClientBuilder {
    url: String,
    token: Option<Result<Secret, InvalidToken>>,
    user_agent: Option<String>,
    certificates: Certificates,
    pub(super) settings: Settings,
}

/// Timeouts and retries of a client.
#[derive(Debug, Clone)]
pub(super) struct Settings {
    pub(super) connect: Duration,
    pub(super) request: Duration,
    pub(super) total: Duration,
    pub(super) retry: Retry,
    pub(super) endings_max: usize,
}

impl ClientBuilder {
    pub(super) fn new(url: &str) -> Self {
        let backoff = Backoff::exponential(Duration::from_millis(100), Duration::from_secs(5));
        let settings = Settings {
            connect: Duration::from_secs(3),
            request: Duration::from_secs(10),
            total: Duration::from_secs(30),
            retry: Retry::attempts(4).backoff(backoff.jitter(Jitter::Full)),
            endings_max: 1_024,
        };
        Self {
            url: url.to_owned(),
            token: None,
            user_agent: None,
            certificates: Certificates::default(),
            settings,
        }
    }

    /// Sets the token that is sent with each call. `Debug` and errors hide it.
    pub fn token(mut self, token: &str) -> Self {
        self.token = Some(Secret::new(token));
        self
    }

    /// Trusts only servers whose certificate is signed by one of these root certificates, in PEM. By default
    /// the system's roots are trusted. Requires the feature `rustls`.
    pub fn root_certificates(mut self, pem: &[u8]) -> Self {
        self.certificates.roots = Some(pem.to_vec());
        self
    }

    /// Sets the client certificate and its key, both in PEM, for servers that require one. The server may map
    /// the certificate to a token. The key is never truncated. Requires the feature `rustls`.
    pub fn identity(mut self, certificate: &[u8], key: &[u8]) -> Self {
        self.certificates.identify(certificate, key);
        self
    }

    /// Sets the user agent. Defaults to the crate's name and version.
    pub fn user_agent(mut self, name: impl Into<String>) -> Self {
        self.user_agent = Some(name.into());
        self
    }

    /// Sets the timeout for connecting. Defaults to 3 seconds.
    pub fn connect_timeout(mut self, span: Duration) -> Self {
        self.settings.connect = span;
        self
    }

    /// Sets the timeout of one attempt, from connecting to the end of the response. Defaults to 10 seconds.
    /// The queueing time of a waiting acquire is added.
    pub fn request_timeout(mut self, span: Duration) -> Self {
        self.settings.request = span;
        self
    }

    /// Sets the timeout of a whole call, including retries and their delays. Defaults to 30 seconds. The
    /// queueing time of a waiting acquire is added.
    pub fn total_timeout(mut self, span: Duration) -> Self {
        self.settings.total = span;
        self
    }

    /// Sets when and how often a call is retried. By default a call has four attempts with exponential
    /// backoff and full jitter, starting at 100 ms, and a retry budget allows a fifth of the calls of the
    /// last ten seconds to be retries, but at least ten.
    ///
    /// With [`WhenRefused::Wait`](tidegate_core::retry::WhenRefused::Wait) a call that a limit refuses is
    /// retried at the time that the refusal names, within the total timeout.
    pub fn retry(mut self, retry: Retry) -> Self {
        self.settings.retry = retry;
        self
    }

    /// Sets how many dropped leases may be cancelled in the background at the same time. Further ones end at
    /// their deadline and are [counted](super::ClientStats::endings_lost). Defaults to 1,024.
    pub const fn endings_max(mut self, max: usize) -> Self {
        self.settings.endings_max = max;
        self
    }

    /// Builds the client without sending anything.
    ///
    /// # Errors
    /// [`InvalidClient`] names the invalid option.
    pub fn build(self) -> Result<Client, InvalidClient> {
        let base = base(&self.url)?;
        let token = self.token.transpose().map_err(|InvalidToken| InvalidClient::Token)?;
        let name = self.user_agent.as_deref().unwrap_or(USER_AGENT);
        let agent =
            HeaderValue::from_str(name).map_err(|_| InvalidClient::UserAgent { name: excerpt(name) })?;
        let Settings { connect, request, total, .. } = self.settings;
        for (field, span) in
            [("connect timeout", connect), ("request timeout", request), ("total timeout", total)]
        {
            if !(TIMEOUTS.0..=TIMEOUTS.1).contains(&span) {
                return Err(InvalidClient::Span { field, span });
            }
        }
        let http = reqwest::Client::builder()
            .user_agent(agent)
            .connect_timeout(connect)
            .pool_idle_timeout(IDLE_TIMEOUT)
            .tcp_nodelay(true)
            // The token is sent to the configured server only.
            .redirect(reqwest::redirect::Policy::none())
            .no_proxy();
        let http = tls::apply(http, &self.certificates)?.build().map_err(|error| {
            let error = error.without_url();
            let has_certificates = self.certificates.roots.is_some() || self.certificates.identity.is_some();
            if has_certificates && error.is_builder() {
                return InvalidClient::Tls { what: "certificates", why: root_cause(&error).to_string() };
            }
            InvalidClient::System(error.into())
        })?;
        Ok(Client { inner: Arc::new(Inner::new(http, base, self.settings)), token })
    }
}

/// Parses a server URL: `http://` or `https://`, a host and a path, without query and fragment.
fn base(text: &str) -> Result<Url, InvalidClient> {
    let no = |url: &str, why: &str| Err(InvalidClient::Url { url: excerpt(url), why: why.to_owned() });
    // The part before an `@` may be a password.
    let shown = text.rsplit('@').next().unwrap_or_default();
    let has_scheme = |scheme: &str| {
        text.trim().get(..scheme.len()).is_some_and(|start| start.eq_ignore_ascii_case(scheme))
    };
    if !has_scheme("http://") && !has_scheme("https://") {
        return no(shown, "it begins with neither http:// nor https://");
    }
    let url = match Url::parse(text.trim()) {
        Ok(url) => url,
        Err(error) => return no(shown, &error.to_string()),
    };
    if !url.username().is_empty() || url.password().is_some() {
        return no(
            url.host_str().unwrap_or_default(),
            "it contains a user or a password: use a token instead",
        );
    }
    if url.scheme() == "https" && !crate::HAS_TLS {
        return no(text, "https:// needs the feature `rustls` of tidegate-client");
    }
    if url.query().is_some() {
        return no(text, "it has a query");
    }
    if url.fragment().is_some() {
        return no(text, "it has a fragment");
    }
    Ok(url)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(builder: ClientBuilder) -> String {
        builder.build().unwrap_err().to_string()
    }

    #[test]
    fn invalid_url_error_hides_password() {
        let table = [
            (
                "127.0.0.1:8707",
                "invalid server URL `127.0.0.1:8707`: it begins with neither http:// nor https://",
            ),
            ("", "invalid server URL ``: it begins with neither http:// nor https://"),
            ("localhost:8707", "it begins with neither http:// nor https://"),
            ("ops:hunter2@localhost:8707", "invalid server URL `localhost:8707`: it begins with neither"),
            ("http://", "invalid server URL `http://`: empty host"),
            ("http://h/?a=1", "invalid server URL `http://h/?a=1`: it has a query"),
            ("http://h/#a", "it has a fragment"),
            ("http://ops:hunter2@h/", "invalid server URL `h`: it contains a user or a password"),
            ("http://ops:hunter2@h:99999/", "invalid server URL `h:99999/`: invalid port number"),
        ];
        for (url, sentence) in table {
            let error = error(Client::builder(url));
            assert!(error.contains(sentence), "{error}");
            assert!(!error.contains("hunter2"), "{error}");
        }
    }

    #[test]
    fn https_url_requires_rustls_feature() {
        assert_eq!(Client::new("https://limits.example").is_ok(), crate::HAS_TLS);
    }

    #[test]
    fn builder_rejects_invalid_token_agent_and_timeouts() {
        let builder = || Client::builder("http://127.0.0.1:8707");
        assert!(error(builder().token("tg_\n_1")).starts_with("invalid token"));
        assert!(error(builder().user_agent("a\nb")).starts_with("invalid user agent `a\\nb`"));
        assert_eq!(
            error(builder().request_timeout(Duration::ZERO)),
            "a request timeout of 0s, outside 1ms..=1d"
        );
        assert!(error(builder().total_timeout(Duration::MAX)).starts_with("a total timeout of "));
        assert!(error(builder().connect_timeout(Duration::ZERO)).starts_with("a connect timeout of 0s"));
    }
}
