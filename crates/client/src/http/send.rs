//! One attempt: a request goes out, and what came of it.

use std::time::Duration;

use reqwest::header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use reqwest::{Response, Url};
use tokio::time::timeout;

use super::Inner;
use super::call::Call;
use super::error::{Cause, ClientError};
use super::secret::Secret;
use crate::problem::Problem;
use crate::seconds::Seconds;
use crate::tls;

/// An answer has at most so many bytes.
const ANSWER_MAX: usize = 16 * 1_024 * 1_024;

/// A good answer.
pub(super) struct Answer {
    pub(super) status: u16,
    pub(super) body: Vec<u8>,
}

/// What came of an attempt.
pub(super) enum Heard {
    /// What was hoped for.
    Done(Answer),
    /// The server says no.
    Said { status: u16, problem: Box<Problem> },
    /// An answer that is none, and that asking again would not make one.
    Strange(ClientError),
    /// No answer, or one that says that there is none for now.
    Nothing(Cause),
}

impl Inner {
    /// Sends a call once, and waits for at most `span`.
    pub(super) async fn attempt(
        &self,
        token: Option<&Secret>,
        call: &Call,
        url: &Url,
        span: Duration,
    ) -> Heard {
        match timeout(span, self.send(token, call, url.clone())).await {
            Ok(Ok(heard)) => heard,
            Ok(Err(error)) => {
                // The address names a lease, with its proof.
                let error = error.without_url();
                if error.is_builder() {
                    return Heard::Strange(invalid(call, error.to_string()));
                }
                unsent(call, error)
            }
            Err(_) => Heard::Nothing(Cause::Timeout(span)),
        }
    }

    async fn send(&self, token: Option<&Secret>, call: &Call, url: Url) -> Result<Heard, reqwest::Error> {
        let mut request = self.http.request(call.method.clone(), url);
        if let Some(token) = token {
            request = request.header(AUTHORIZATION, token.header());
        }
        if let Some(body) = &call.body {
            let json = HeaderValue::from_static("application/json");
            request = request.header(CONTENT_TYPE, json).body(body.clone());
        }
        said(token, call, request.send().await?).await
    }
}

/// What an answer says, once it is all there.
pub(super) async fn said(
    token: Option<&Secret>,
    call: &Call,
    mut response: Response,
) -> Result<Heard, reqwest::Error> {
    let (status, header) = (response.status(), retry_after(&response));
    let Some(body) = whole(&mut response).await? else {
        let why = format!("its body has more than {ANSWER_MAX} bytes");
        return Ok(Heard::Strange(garbled(token, call, status.as_u16(), &why, header)));
    };
    if status.is_success() {
        return Ok(Heard::Done(Answer { status: status.as_u16(), body }));
    }
    Ok(no(token, call, status.as_u16(), &body, header))
}

/// The body, unless it is too large.
async fn whole(response: &mut Response) -> Result<Option<Vec<u8>>, reqwest::Error> {
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await? {
        if body.len() + chunk.len() > ANSWER_MAX {
            return Ok(None);
        }
        body.extend_from_slice(&chunk);
    }
    Ok(Some(body))
}

/// What an answer says that is none of success.
fn no(token: Option<&Secret>, call: &Call, status: u16, body: &[u8], header: Option<Duration>) -> Heard {
    let text = hidden(token, &String::from_utf8_lossy(body));
    match serde_json::from_str::<Box<Problem>>(&text) {
        Ok(mut problem) => {
            problem.retry_after = problem.retry_after.or(header.map(Seconds::from));
            Heard::Said { status, problem }
        }
        // Whatever stands before the server speaks for itself.
        Err(_) if status >= 500 => {
            Heard::Nothing(Cause::Status { status, problem: None, retry_after: header })
        }
        Err(error) => {
            let why = format!("its body is no problem of the API: {error}");
            Heard::Strange(garbled(token, call, status, &why, header))
        }
    }
}

/// When to come back, in whole seconds. A date is not read: nobody's clock is trusted here.
fn retry_after(response: &Response) -> Option<Duration> {
    let seconds = response.headers().get(RETRY_AFTER)?.to_str().ok()?.trim().parse().ok()?;
    Some(Duration::from_secs(seconds))
}

fn hidden(token: Option<&Secret>, text: &str) -> String {
    token.map_or_else(|| text.to_owned(), |token| token.hide(text))
}

pub(super) fn garbled(
    token: Option<&Secret>,
    call: &Call,
    status: u16,
    why: &str,
    retry_after: Option<Duration>,
) -> ClientError {
    let (method, why) = (call.method.to_string(), hidden(token, why));
    ClientError::Garbled { method, route: call.route, status, why, retry_after }
}

/// What an attempt comes to that was not answered.
pub(super) fn unsent(call: &Call, error: reqwest::Error) -> Heard {
    if let Some(why) = tls::distrust(&error) {
        let method = call.method.to_string();
        return Heard::Strange(ClientError::Untrusted { method, route: call.route, why });
    }
    let is_connect = error.is_connect();
    Heard::Nothing(if is_connect { Cause::Connect(error.into()) } else { Cause::Cut(error.into()) })
}

pub(super) fn invalid(call: &Call, why: String) -> ClientError {
    ClientError::Invalid { method: call.method.to_string(), route: call.route, why }
}
