//! Redirects: each hop is a request of its own, under the throttle of where it goes.
//!
//! As the Fetch standard and RFC 9110 §15.4 have it: a `POST` that is answered 301 or 302, and whatever is answered 303, goes
//! on as a `GET` without a body; 307 and 308 send the same again, if the body can be sent twice. Credentials stay with the
//! origin that they were meant for, and those in the new address are left out. No `Referer` is made up.

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
    /// Sends a request and follows where it is sent.
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
            let again = Again::of(&request);
            let mut response = self.send(request, extensions, &next).await?;
            if let Some(tries) = response.extensions_mut().get_mut::<Tries>() {
                tries.redirects = redirects;
            }
            let Some(target) = target(&response)? else { return Ok(response) };
            let Some(hop) = again.hop(response.status(), target) else { return Ok(response) };
            if redirects == redirects_max {
                return Err(ThrottleError::TooManyRedirects { redirects_max }.into());
            }
            redirects += 1;
            request = hop;
        }
    }
}

/// Where a response sends its caller; `None` where it does not, or to an address that is none.
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
    // Whoever redirects does not choose with whose name we go there. It cannot fail where there is a host.
    let _ = url.set_username("");
    let _ = url.set_password(None);
    Ok(Some(url))
}

/// What is needed to go on from a request.
struct Again {
    /// Without its body.
    bare: Request,
    /// With it, where it can be sent twice.
    whole: Option<Request>,
}

impl Again {
    fn of(request: &Request) -> Self {
        let mut bare = Request::new(request.method().clone(), request.url().clone());
        *bare.headers_mut() = request.headers().clone();
        *bare.timeout_mut() = request.timeout().copied();
        *bare.version_mut() = request.version();
        Self { bare, whole: request.try_clone() }
    }

    /// The next request; `None` where it cannot be made, and the redirect is the answer.
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
            forget_credentials(request.headers_mut());
        }
        *request.url_mut() = target;
        Some(request)
    }
}

/// Leaves out what was meant for another origin.
fn forget_credentials(headers: &mut HeaderMap) {
    for name in [AUTHORIZATION, COOKIE, PROXY_AUTHORIZATION, WWW_AUTHENTICATE] {
        headers.remove(name);
    }
    headers.remove("cookie2");
    // It names the host that was asked before.
    headers.remove(::http::header::HOST);
}
