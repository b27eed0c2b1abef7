//! Decodes problem responses (RFC 9457).

use axum::body::Body;
use axum::http::Response;
use http_body_util::BodyExt as _;
use serde_json::Value;

/// Returns the body of a problem response.
pub(crate) async fn problem_of(response: Response<Body>) -> Value {
    assert_eq!(response.headers()["content-type"], "application/problem+json");
    let body = response.into_body().collect().await.expect("a body").to_bytes();
    serde_json::from_slice(&body).expect("JSON")
}
