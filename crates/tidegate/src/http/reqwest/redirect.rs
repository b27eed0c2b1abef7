//! Redirects: each hop is a separate request, under the throttle of its host.
//!
//! According to the Fetch standard and RFC 9110 §15.4, a `POST` with a 301 or 302 response, and any request
//! with a 303, continues as a `GET` without a body; 307 and 308 repeat the request, if its body can be
//! cloned. Credentials stay with their origin, and those in the new address are dropped. No `Referer` is
//! added.

use ::http::header::{
    AUTHORIZATION, CONTENT_ENCODING, CONTENT_LANGUAGE, CONTENT_LENGTH, CONTENT_LOCATION, CONTENT_TYPE,
    COOKIE, LOCATION, PROXY_AUTHORIZATION, TRANSFER_ENCODING, WWW_AUTHENTICATE,
};
use ::http::{Extensions, HeaderMap, Method, StatusCode};
use ::reqwest::{Request, Response, Url};
use reqwest_middleware::{Error, Next};

use super::error::ThrottleError;
use super::{Throttling, Tries};

impl Throttling {
    /// Sends a request and follows its redirects.
    pub(super) async fn follow(
        &self,
        request: Request,
        extensions: &mut Extensions,
        next: Next<'_>,
        redirects_max: u32,
    ) -> Result<Response, Error> {
        let mut request = request;
        let mut redirects = 0;
        loop {
            let source = RedirectSource::of(&request);
            let mut response = self.send(request, extensions, &next).await?;
            if let Some(tries) = response.extensions_mut().get_mut::<Tries>() {
                tries.redirects = redirects;
            }
            let Some(target) = target(&response)? else { return Ok(response) };
            let Some(hop) = source.hop(response.status(), target) else { return Ok(response) };
            if redirects == redirects_max {
                return Err(ThrottleError::TooManyRedirects { redirects_max }.into());
            }
            redirects += 1;
            request = hop;
        }
    }
}

/// The redirect's target; `None` without a redirect or with an invalid address.
fn target(response: &Response) -> Result<Option<Url>, ThrottleError> {
    if !matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
        return Ok(None);
    }
    let location =
        response.headers().get(LOCATION).and_then(|value| std::str::from_utf8(value.as_bytes()).ok());
    let Some(mut url) = location.and_then(|location| response.url().join(location).ok()) else {
        return Ok(None);
    };
    if !matches!(url.scheme(), "http" | "https") {
        return Err(ThrottleError::RedirectScheme);
    }
    // The redirecting server must not choose the credentials. This cannot fail for an address with a host.
    let _ = url.set_username("");
    let _ = url.set_password(None);
    Ok(Some(url))
}

/// The parts of a request that the next hop needs.
struct RedirectSource {
    /// The request without its body.
    bare: Request,
    /// The request with its body, if that can be cloned.
    whole: Option<Request>,
}

impl RedirectSource {
    fn of(request: &Request) -> Self {
        let mut bare = Request::new(request.method().clone(), request.url().clone());
        *bare.headers_mut() = request.headers().clone();
        *bare.timeout_mut() = request.timeout().copied();
        *bare.version_mut() = request.version();
        Self { bare, whole: request.try_clone() }
    }

    /// The next request; `None` if it cannot be built, and the redirect is the result.
    fn hop(self, status: StatusCode, target: Url) -> Option<Request> {
        let method = self.bare.method();
        let becomes_get = match status.as_u16() {
            301 | 302 => *method == Method::POST,
            303 => !matches!(*method, Method::GET | Method::HEAD),
            _ => false,
        };
        let mut request = match self.whole {
            Some(whole) => whole,
            None if becomes_get => self.bare,
            None => return None,
        };
        if becomes_get {
            *request.method_mut() = Method::GET;
            *request.body_mut() = None;
            let headers = request.headers_mut();
            let content =
                [CONTENT_ENCODING, CONTENT_LANGUAGE, CONTENT_LENGTH, CONTENT_LOCATION, CONTENT_TYPE];
            content.into_iter().chain([TRANSFER_ENCODING]).for_each(|name| drop(headers.remove(name)));
        }
        if request.url().origin() != target.origin() {
            remove_credentials(request.headers_mut());
        }
        *request.url_mut() = target;
        Some(request)
    }
}

/// Removes headers that were meant for another origin.
fn remove_credentials(headers: &mut HeaderMap) {
    for name in [AUTHORIZATION, COOKIE, PROXY_AUTHORIZATION, WWW_AUTHENTICATE] {
        headers.remove(name);
    }
    headers.remove("cookie2");
    // It names the previous host.
    headers.remove(::http::header::HOST);
}
