//! One API call before it is sent: method, path, query, body and whether it is idempotent.

use std::fmt;
use std::time::Duration;

use reqwest::{Method, Url};
use serde::Serialize;

use crate::seconds::Seconds;

/// Whether a call may be retried after an attempt with an unknown outcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Idempotency {
    /// A retry has no further effect.
    Yes,
    /// A retry might execute it twice.
    No,
}

impl Idempotency {
    /// Conditional writes are idempotent: a repeated one finds another version.
    pub(crate) const fn yes_if(is_idempotent: bool) -> Self {
        if is_idempotent { Self::Yes } else { Self::No }
    }
}

/// An API call.
#[derive(Clone)]
pub(crate) struct Call {
    pub(crate) method: Method,
    /// The path template without names, which is safe to log.
    pub(crate) route: &'static str,
    name: Option<String>,
    query: Option<String>,
    pub(crate) body: Option<Vec<u8>>,
    pub(crate) idempotency: Idempotency,
    /// How long the server may queue the request before it responds.
    pub(crate) queue_time: Duration,
    /// Why the call cannot be sent.
    error: Option<String>,
}

impl Call {
    fn new(method: Method, route: &'static str, idempotency: Idempotency) -> Self {
        let queue_time = Duration::ZERO;
        Self { method, route, name: None, query: None, body: None, idempotency, queue_time, error: None }
    }

    /// A read.
    pub(crate) fn get(route: &'static str) -> Self {
        Self::new(Method::GET, route, Idempotency::Yes)
    }

    /// A call with a body.
    pub(crate) fn post(route: &'static str, body: &impl Serialize, idempotency: Idempotency) -> Self {
        Self::new(Method::POST, route, idempotency).with_body(body)
    }

    /// A write.
    pub(crate) fn put(route: &'static str, body: &impl Serialize, idempotency: Idempotency) -> Self {
        Self::new(Method::PUT, route, idempotency).with_body(body)
    }

    /// A removal.
    pub(crate) fn delete(route: &'static str, idempotency: Idempotency) -> Self {
        Self::new(Method::DELETE, route, idempotency)
    }

    /// Fills the placeholder of the path.
    pub(crate) fn at(mut self, name: &impl fmt::Display) -> Self {
        let name = name.to_string();
        // URL parsers normalize dot segments, even percent-encoded ones.
        if name == "." || name == ".." {
            self.error = Some(format!("`{name}` is not a valid path segment"));
        }
        self.name = Some(name);
        self
    }

    /// Sets the query string.
    pub(crate) fn with_query(mut self, query: &impl Serialize) -> Self {
        match serde_urlencoded::to_string(query) {
            Ok(query) => self.query = Some(query).filter(|query| !query.is_empty()),
            Err(error) => self.error = Some(error.to_string()),
        }
        self
    }

    /// Extends the timeouts by the queueing time.
    pub(crate) fn with_queue_time(mut self, span: Option<Seconds>) -> Self {
        self.queue_time = span.unwrap_or_default().as_duration();
        self
    }

    fn with_body(mut self, body: &impl Serialize) -> Self {
        match serde_json::to_vec(body) {
            Ok(body) => self.body = Some(body),
            Err(error) => self.error = Some(error.to_string()),
        }
        self
    }

    /// Returns the URL below `base`, or why the call cannot be sent.
    pub(crate) fn url(&self, base: &Url) -> Result<Url, String> {
        if let Some(why) = &self.error {
            return Err(why.clone());
        }
        let mut url = base.clone();
        {
            let mut segments = url.path_segments_mut().map_err(|()| "the URL has no path".to_owned())?;
            segments.pop_if_empty();
            for segment in self.route.split('/').skip(1) {
                match &self.name {
                    Some(name) if segment.starts_with('{') => segments.push(name),
                    _ => segments.push(segment),
                };
            }
        }
        url.set_query(self.query.as_deref());
        Ok(url)
    }
}

impl fmt::Debug for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The URL and the body may contain a lease name or a secret.
        write!(f, "{} {}", self.method, self.route)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{PageQuery, Window};

    fn url(base: &str, call: &Call) -> Result<String, String> {
        call.url(&base.parse().unwrap()).map(String::from)
    }

    #[test]
    fn names_are_escaped_as_one_path_segment() {
        let table = [
            ("acme", "http://h/v1/entities/acme/children"),
            ("a/b", "http://h/v1/entities/a%2Fb/children"),
            ("a?b%20 ü", "http://h/v1/entities/a%3Fb%2520%20%C3%BC/children"),
            ("...", "http://h/v1/entities/.../children"),
        ];
        for (name, address) in table {
            let call = Call::get("/v1/entities/{entity}/children").at(&name);
            assert_eq!(url("http://h", &call).as_deref(), Ok(address), "{name}");
        }
        let call = Call::get("/v1/entities/{entity}").at(&"..");
        assert_eq!(url("http://h", &call), Err("`..` is not a valid path segment".to_owned()));
    }

    #[test]
    fn base_path_is_kept() {
        let query = PageQuery { after: Some("a b".to_owned()), max: Some(5) };
        let call = Call::get("/v1/entities").with_query(&query);
        assert_eq!(url("https://h/limits/", &call).unwrap(), "https://h/limits/v1/entities?after=a+b&max=5");
        let usage = crate::UsageQuery { window: Window::Day, ..crate::UsageQuery::default() };
        let call = Call::get("/v1/usage").with_query(&usage);
        assert_eq!(url("https://h/limits", &call).unwrap(), "https://h/limits/v1/usage?window=day");
    }
}
