//! How a client is made: where its server is, who it is, and how patient.

use std::sync::Arc;
use std::time::Duration;

use reqwest::Url;
use reqwest::header::HeaderValue;
use thiserror::Error;
use tidegate_core::backoff::{Backoff, Jitter};
use tidegate_core::retry::{Retry, RetryBudget};

use super::error::deepest;
use super::secret::{InvalidToken, Secret};
use super::trust::Trust;
use super::{Client, Inner};
use crate::tls;

/// The shortest and the longest that a call, or a part of it, may be given.
const SPANS: (Duration, Duration) = (Duration::from_millis(1), Duration::from_secs(86_400));
/// Shorter than a server keeps a connection that is idle: what is sent on a connection while the other side closes it may
/// have been heard or not.
const IDLE: Duration = Duration::from_secs(10);
/// What a client is called unless it is given a name.
const USER_AGENT: &str = concat!("tidegate-client/", env!("CARGO_PKG_VERSION"));

/// Why there is no client. No token is in it.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum InvalidClient {
    /// The address is none of a server.
    #[error("`{url}` is no address of a server: {why}")]
    Url {
        /// The address, at most 80 characters of it.
        url: String,
        /// What is wrong with it.
        why: String,
    },
    /// The token is empty, or has a character that cannot be sent.
    #[error("the token cannot be sent: it is empty, or holds a line break or another control character")]
    Token,
    /// The name of the client has a character that cannot be sent.
    #[error("the user agent `{name}` cannot be sent: it holds a line break or another control character")]
    UserAgent {
        /// The name, at most 80 characters of it.
        name: String,
    },
    /// A span is out of bounds.
    #[error("a {field} of {span:?}, outside {:?}..={:?}", SPANS.0, SPANS.1)]
    Span {
        /// Which.
        field: &'static str,
        /// The span.
        span: Duration,
    },
    /// A certificate or a key is none, or cannot be used. Nothing of a key is in it.
    #[error("the {what} cannot be used: {why}")]
    Tls {
        /// Which.
        what: &'static str,
        /// What is wrong with it.
        why: String,
    },
    /// The system does not let us.
    #[error("there can be no client here: {0}")]
    System(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// Makes a [`Client`].
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
/// assert_eq!(error.to_string(), "`ftp://127.0.0.1` is no address of a server: it begins with neither http:// nor https://");
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
#[must_use = "a builder does nothing until it builds"]
pub struct ClientBuilder {
    url: String,
    token: Option<Result<Secret, InvalidToken>>,
    user_agent: Option<String>,
    trust: Trust,
    pub(super) patience: Patience,
}

/// How patient a client is.
#[derive(Debug, Clone)]
pub(super) struct Patience {
    pub(super) connect: Duration,
    pub(super) request: Duration,
    pub(super) total: Duration,
    pub(super) retry: Retry,
    pub(super) endings_max: usize,
}

impl ClientBuilder {
    pub(super) fn new(url: &str) -> Self {
        let backoff = Backoff::exponential(Duration::from_millis(100), Duration::from_secs(5));
        let patience = Patience {
            connect: Duration::from_secs(3),
            request: Duration::from_secs(10),
            total: Duration::from_secs(30),
            retry: Retry::attempts(4).backoff(backoff.jitter(Jitter::Full)).budget(RetryBudget::default()),
            endings_max: 1_024,
        };
        Self { url: url.to_owned(), token: None, user_agent: None, trust: Trust::default(), patience }
    }

    /// The token that is sent with each call. It is shown nowhere.
    pub fn token(mut self, token: &str) -> Self {
        self.token = Some(Secret::new(token));
        self
    }

    /// Trusts a server whose certificate is signed by one of these, in PEM, and no other. Without them, those count that the
    /// system trusts. It needs the feature `rustls`.
    pub fn root_certificates(mut self, pem: &[u8]) -> Self {
        self.trust.roots = Some(pem.to_vec());
        self
    }

    /// The client's own certificate with its key, both in PEM, for a server that asks for one. It may stand for a token there. The
    /// key is shown nowhere. It needs the feature `rustls`.
    pub fn identity(mut self, certificate: &[u8], key: &[u8]) -> Self {
        self.trust.identify(certificate, key);
        self
    }

    /// How the client calls itself; by default by its name and version.
    pub fn user_agent(mut self, name: impl Into<String>) -> Self {
        self.user_agent = Some(name.into());
        self
    }

    /// How long a connection may take to be made. By default 3 seconds.
    pub fn connect_timeout(mut self, span: Duration) -> Self {
        self.patience.connect = span;
        self
    }

    /// How long one attempt may take, from the connection to the end of the answer. By default 10 seconds; an acquire that
    /// waits has that long on top of what it waits.
    pub fn request_timeout(mut self, span: Duration) -> Self {
        self.patience.request = span;
        self
    }

    /// How long a call may take in all, with its retries and the waits between them. By default 30 seconds; an acquire that
    /// waits has that long on top of what it waits.
    pub fn total_timeout(mut self, span: Duration) -> Self {
        self.patience.total = span;
        self
    }

    /// When and how often a call is tried again. By default four attempts in all, up to 100 ms after the first, up to twice that
    /// after the next, and so on, and retries are at most a fifth of the calls of the last ten seconds, or ten.
    ///
    /// With [`WhenRefused::Wait`](tidegate_core::retry::WhenRefused::Wait) a call that a limit refuses is asked again at the time
    /// that the refusal says, within the call's total time.
    pub fn retry(mut self, retry: Retry) -> Self {
        self.patience.retry = retry;
        self
    }

    /// How many leases that were dropped may be ended in the background at the same time. Further ones end by their deadline,
    /// and are [counted](super::ClientStats::endings_lost). By default 1,024.
    pub const fn endings_max(mut self, max: usize) -> Self {
        self.patience.endings_max = max;
        self
    }

    /// The client. Nothing is sent yet.
    ///
    /// # Errors
    /// [`InvalidClient`] says which of these is wrong, and how.
    pub fn build(self) -> Result<Client, InvalidClient> {
        let base = base(&self.url)?;
        let token = self.token.transpose().map_err(|InvalidToken| InvalidClient::Token)?;
        let name = self.user_agent.as_deref().unwrap_or(USER_AGENT);
        let agent =
            HeaderValue::from_str(name).map_err(|_| InvalidClient::UserAgent { name: shown(name) })?;
        let Patience { connect, request, total, .. } = self.patience;
        for (field, span) in
            [("connect timeout", connect), ("request timeout", request), ("total timeout", total)]
        {
            if !(SPANS.0..=SPANS.1).contains(&span) {
                return Err(InvalidClient::Span { field, span });
            }
        }
        let http = reqwest::Client::builder()
            .user_agent(agent)
            .connect_timeout(connect)
            .pool_idle_timeout(IDLE)
            .tcp_nodelay(true)
            // A token goes where its owner sends it, and nowhere else.
            .redirect(reqwest::redirect::Policy::none())
            .no_proxy();
        let http = tls::secured(http, &self.trust)?.build().map_err(|error| {
            let error = error.without_url();
            let is_given = self.trust.roots.is_some() || self.trust.identity.is_some();
            if is_given && error.is_builder() {
                return InvalidClient::Tls { what: "certificates", why: deepest(&error).to_string() };
            }
            InvalidClient::System(error.into())
        })?;
        Ok(Client { inner: Arc::new(Inner::new(http, base, self.patience)), token })
    }
}

/// The address of a server: `http://` or `https://`, a host, and nothing behind the path.
fn base(text: &str) -> Result<Url, InvalidClient> {
    let no = |url: &str, why: &str| Err(InvalidClient::Url { url: shown(url), why: why.to_owned() });
    let url = match Url::parse(text.trim()) {
        Ok(url) => url,
        // What is before an `@` may be a password.
        Err(error) => return no(text.rsplit('@').next().unwrap_or_default(), &error.to_string()),
    };
    if !url.username().is_empty() || url.password().is_some() {
        // A password is not shown, wherever it stands.
        return no(
            url.host_str().unwrap_or_default(),
            "it holds a user or a password: a token is sent instead",
        );
    }
    match url.scheme() {
        "http" => {}
        "https" if crate::HAS_TLS => {}
        "https" => return no(text, "https:// needs the feature `rustls` of tidegate-client"),
        _ => return no(text, "it begins with neither http:// nor https://"),
    }
    if url.query().is_some() {
        return no(text, "it has a query");
    }
    if url.fragment().is_some() {
        return no(text, "it has a fragment");
    }
    Ok(url)
}

/// At most 80 characters of a text.
fn shown(text: &str) -> String {
    text.chars().take(80).flat_map(char::escape_debug).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(builder: ClientBuilder) -> String {
        builder.build().unwrap_err().to_string()
    }

    #[test]
    fn an_address_that_is_none_of_a_server_is_refused_by_its_name() {
        let table = [
            ("127.0.0.1:8707", "`127.0.0.1:8707` is no address of a server: "),
            ("", "`` is no address of a server: relative URL without a base"),
            ("localhost:8707", "it begins with neither http:// nor https://"),
            ("http://h/?a=1", "`http://h/?a=1` is no address of a server: it has a query"),
            ("http://h/#a", "it has a fragment"),
            ("http://ops:hunter2@h/", "`h` is no address of a server: it holds a user or a password"),
            ("http://ops:hunter2@h:99999/", "`h:99999/` is no address of a server: invalid port number"),
        ];
        for (url, sentence) in table {
            let error = error(Client::builder(url));
            assert!(error.contains(sentence), "{error}");
            assert!(!error.contains("hunter2"), "{error}");
        }
    }

    #[test]
    fn an_address_with_tls_needs_its_feature() {
        assert_eq!(Client::new("https://limits.example").is_ok(), crate::HAS_TLS);
    }

    #[test]
    fn what_cannot_be_sent_or_waited_for_is_refused_with_its_bounds() {
        let builder = || Client::builder("http://127.0.0.1:8707");
        assert!(error(builder().token("tg_\n_1")).starts_with("the token cannot be sent"));
        assert!(error(builder().user_agent("a\nb")).starts_with("the user agent `a\\nb` cannot be sent"));
        assert_eq!(
            error(builder().request_timeout(Duration::ZERO)),
            "a request timeout of 0ns, outside 1ms..=86400s"
        );
        assert!(error(builder().total_timeout(Duration::MAX)).starts_with("a total timeout of "));
        assert!(error(builder().connect_timeout(Duration::ZERO)).starts_with("a connect timeout of 0ns"));
    }
}
