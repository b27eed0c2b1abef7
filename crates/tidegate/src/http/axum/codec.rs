//! Serializes a problem into a response: body, status and header fields.

use ::http::{HeaderValue, Response, StatusCode, header};
use tidegate_client::Problem;

use crate::http::{LimitField, rate_limit_fields, retry_after_field};

/// The response for a problem.
pub(super) fn response_of<B: From<String>>(problem: &Problem, limits: &[LimitField<'_>]) -> Response<B> {
    // A problem consists of names, texts and numbers, which always serialize.
    let text = serde_json::to_string(problem).unwrap_or_default();
    let mut response = Response::new(B::from(text));
    *response.status_mut() =
        StatusCode::from_u16(problem.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(Problem::CONTENT_TYPE));
    if let Some(span) = problem.retry_after {
        retry_after_field(headers, span.as_duration());
    }
    rate_limit_fields(headers, limits.iter().copied());
    if problem.is("no-token") {
        headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    response
}
