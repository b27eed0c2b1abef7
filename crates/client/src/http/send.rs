//! One attempt: sends a request and classifies the outcome.

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

/// The maximum size of a response body.
const BODY_MAX: usize = 16 * 1_024 * 1_024;

/// A success response.
pub(super) struct Payload {
    pub(super) status: u16,
    pub(super) body: Vec<u8>,
}

/// The outcome of an attempt.
pub(super) enum Outcome {
    /// A success response.
    Success(Payload),
    /// An error response of the server.
    Problem { status: u16, problem: Box<Problem> },
    /// A permanent failure: a retry would not help.
    Fatal(ClientError),
    /// A transient failure: no response, or one from a proxy.
    Failed(Cause),
}

impl Inner {
    /// Sends a call once, within `span`.
    pub(super) async fn attempt(
        &self,
        token: Option<&Secret>,
        call: &Call,
        url: &Url,
        span: Duration,
    ) -> Outcome {
        match timeout(span, self.send(token, call, url.clone())).await {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(error)) => {
                // The URL may contain a lease name, which is a credential.
                let error = error.without_url();
                if error.is_builder() {
                    return Outcome::Fatal(invalid(call, error.to_string()));
                }
                transport_failure(call, error)
            }
            Err(_) => Outcome::Failed(Cause::Timeout(span)),
        }
    }

    async fn send(&self, token: Option<&Secret>, call: &Call, url: Url) -> Result<Outcome, reqwest::Error> {
        let mut request = self.http.request(call.method.clone(), url);
        if let Some(token) = token {
            request = request.header(AUTHORIZATION, token.header());
        }
        if let Some(body) = &call.body {
            let json = HeaderValue::from_static("application/json");
            request = request.header(CONTENT_TYPE, json).body(body.clone());
        }
        read_response(token, call, request.send().await?).await
    }
}

/// Reads and classifies a response.
pub(super) async fn read_response(
    token: Option<&Secret>,
    call: &Call,
    mut response: Response,
) -> Result<Outcome, reqwest::Error> {
    let (status, header) = (response.status(), retry_after(&response));
    let Some(body) = read_body(&mut response).await? else {
        let why = format!("its body has more than {BODY_MAX} bytes");
        return Ok(Outcome::Fatal(garbled(token, call, status.as_u16(), &why, header)));
    };
    if status.is_success() {
        return Ok(Outcome::Success(Payload { status: status.as_u16(), body }));
    }
    Ok(parse_problem(token, call, status.as_u16(), &body, header))
}

/// Reads the body. Returns `None` if it is too large.
async fn read_body(response: &mut Response) -> Result<Option<Vec<u8>>, reqwest::Error> {
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await? {
        if body.len() + chunk.len() > BODY_MAX {
            return Ok(None);
        }
        body.extend_from_slice(&chunk);
    }
    Ok(Some(body))
}

/// Classifies an error response.
fn parse_problem(
    token: Option<&Secret>,
    call: &Call,
    status: u16,
    body: &[u8],
    header: Option<Duration>,
) -> Outcome {
    let text = redact(token, &String::from_utf8_lossy(body));
    match serde_json::from_str::<Box<Problem>>(&text) {
        Ok(mut problem) => {
            problem.retry_after = problem.retry_after.or(header.map(Seconds::from));
            Outcome::Problem { status, problem }
        }
        // A proxy responds without a problem document.
        Err(_) if status >= 500 => {
            Outcome::Failed(Cause::Status { status, problem: None, retry_after: header })
        }
        Err(error) => {
            let why = format!("its body is not a problem document: {error}");
            Outcome::Fatal(garbled(token, call, status, &why, header))
        }
    }
}

/// Parses `Retry-After` in seconds. Dates are ignored, because they depend on both clocks.
fn retry_after(response: &Response) -> Option<Duration> {
    let seconds = response.headers().get(RETRY_AFTER)?.to_str().ok()?.trim().parse().ok()?;
    Some(Duration::from_secs(seconds))
}

fn redact(token: Option<&Secret>, text: &str) -> String {
    token.map_or_else(|| text.to_owned(), |token| token.redact(text))
}

pub(super) fn garbled(
    token: Option<&Secret>,
    call: &Call,
    status: u16,
    why: &str,
    retry_after: Option<Duration>,
) -> ClientError {
    let (method, why) = (call.method.to_string(), redact(token, why));
    ClientError::Garbled { method, route: call.route, status, why, retry_after }
}

/// Classifies an attempt without a response.
pub(super) fn transport_failure(call: &Call, error: reqwest::Error) -> Outcome {
    if let Some(why) = tls::certificate_error(&error) {
        let method = call.method.to_string();
        return Outcome::Fatal(ClientError::Untrusted { method, route: call.route, why });
    }
    if tls::is_plain_http(&error) {
        return Outcome::Fatal(ClientError::NoTls { method: call.method.to_string(), route: call.route });
    }
    let is_connect = error.is_connect();
    Outcome::Failed(if is_connect { Cause::Connect(error.into()) } else { Cause::Cut(error.into()) })
}

pub(super) fn invalid(call: &Call, why: String) -> ClientError {
    ClientError::Invalid { method: call.method.to_string(), route: call.route, why }
}
