//! One call of the API, before it is sent: where to, with what, and whether it may be said again.

use std::fmt;
use std::time::Duration;

use reqwest::{Method, Url};
use serde::Serialize;

use crate::seconds::Seconds;

/// Whether a call may be sent again when nobody knows what became of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Repeat {
    /// To say it twice is to say it once.
    Freely,
    /// Not after it may have been done.
    Untouched,
}

impl Repeat {
    /// Freely, where the writer said what is to be there.
    pub(crate) const fn freely_if(is_certain: bool) -> Self {
        if is_certain { Self::Freely } else { Self::Untouched }
    }
}

/// A call.
#[derive(Clone)]
pub(crate) struct Call {
    pub(crate) method: Method,
    /// The address without the names in it: it may be shown.
    pub(crate) route: &'static str,
    part: Option<String>,
    query: Option<String>,
    pub(crate) body: Option<Vec<u8>>,
    pub(crate) repeat: Repeat,
    /// How long the server waits before it answers, because it was asked to.
    pub(crate) waits: Duration,
    /// Why it cannot be sent.
    invalid: Option<String>,
}

impl Call {
    fn new(method: Method, route: &'static str, repeat: Repeat) -> Self {
        let waits = Duration::ZERO;
        Self { method, route, part: None, query: None, body: None, repeat, waits, invalid: None }
    }

    /// Looks, and changes nothing.
    pub(crate) fn get(route: &'static str) -> Self {
        Self::new(Method::GET, route, Repeat::Freely)
    }

    /// Sends a body.
    pub(crate) fn post(route: &'static str, body: &impl Serialize, repeat: Repeat) -> Self {
        Self::new(Method::POST, route, repeat).sending(body)
    }

    /// Writes something in the place of what is there.
    pub(crate) fn put(route: &'static str, body: &impl Serialize, repeat: Repeat) -> Self {
        Self::new(Method::PUT, route, repeat).sending(body)
    }

    /// Removes something.
    pub(crate) fn delete(route: &'static str, repeat: Repeat) -> Self {
        Self::new(Method::DELETE, route, repeat)
    }

    /// The part of the address that is in braces.
    pub(crate) fn at(mut self, part: &impl fmt::Display) -> Self {
        let part = part.to_string();
        // Such a part is read as the folder itself, or the one above, by everybody on the way.
        if part == "." || part == ".." {
            self.invalid = Some(format!("`{part}` cannot be named in an address"));
        }
        self.part = Some(part);
        self
    }

    /// What stands behind the `?`.
    pub(crate) fn asking(mut self, query: &impl Serialize) -> Self {
        match serde_urlencoded::to_string(query) {
            Ok(query) => self.query = Some(query).filter(|query| !query.is_empty()),
            Err(error) => self.invalid = Some(error.to_string()),
        }
        self
    }

    /// The server may take so much longer.
    pub(crate) fn waiting(mut self, span: Option<Seconds>) -> Self {
        self.waits = span.unwrap_or_default().as_duration();
        self
    }

    fn sending(mut self, body: &impl Serialize) -> Self {
        match serde_json::to_vec(body) {
            Ok(body) => self.body = Some(body),
            Err(error) => self.invalid = Some(error.to_string()),
        }
        self
    }

    /// The whole address, below `base`; else why there is none.
    pub(crate) fn url(&self, base: &Url) -> Result<Url, String> {
        if let Some(why) = &self.invalid {
            return Err(why.clone());
        }
        let mut url = base.clone();
        {
            let mut segments = url.path_segments_mut().map_err(|()| "the address has no path".to_owned())?;
            segments.pop_if_empty();
            for segment in self.route.split('/').skip(1) {
                match &self.part {
                    Some(part) if segment.starts_with('{') => segments.push(part),
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
        // Neither the address nor the body: they may name a lease, or hold a secret.
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
    fn names_stand_in_an_address_as_one_part_whatever_they_hold() {
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
        assert_eq!(url("http://h", &call), Err("`..` cannot be named in an address".to_owned()));
    }

    #[test]
    fn a_server_below_a_path_is_asked_below_it() {
        let query = PageQuery { after: Some("a b".to_owned()), max: Some(5) };
        let call = Call::get("/v1/entities").asking(&query);
        assert_eq!(url("https://h/limits/", &call).unwrap(), "https://h/limits/v1/entities?after=a+b&max=5");
        let usage = crate::UsageQuery { window: Window::Day, ..crate::UsageQuery::default() };
        let call = Call::get("/v1/usage").asking(&usage);
        assert_eq!(url("https://h/limits", &call).unwrap(), "https://h/limits/v1/usage?window=day");
    }
}
