//! Handlers of health checks, metrics and the OpenAPI document.

use axum::extract::State as With;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use tidegate_client::Problem;

use crate::refusal::Refusal;
use crate::state::State;

/// Liveness check: the process responds.
#[utoipa::path(get, path = "/health/live", responses((status = 204, description = "The process responds.")))]
pub(super) async fn live() -> StatusCode {
    StatusCode::NO_CONTENT
}

/// Readiness check: the store responds and the server is not stopping.
#[utoipa::path(get, path = "/health/ready", responses(
    (status = 204, description = "Ready."),
    (status = 503, description = "Not ready.", body = Problem),
))]
pub(super) async fn ready(With(state): With<State>) -> Result<StatusCode, Refusal> {
    if state.limiter().is_closed() {
        return Err(tidegate::LimitError::Closed.into());
    }
    state.query(state.store().version()).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Returns the server's metrics in Prometheus text format.
#[utoipa::path(get, path = "/metrics", responses(
    (status = 200, description = "Counters, gauges and histograms.", body = String, content_type = "text/plain"),
))]
pub(super) async fn metrics(With(state): With<State>) -> Response {
    let text = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    ([(header::CONTENT_TYPE, text)], state.meters().show(&state)).into_response()
}

/// Returns this document.
#[utoipa::path(get, path = "/v1/openapi.json", responses(
    (status = 200, description = "The API as OpenAPI 3.1.", content_type = "application/json"),
))]
pub(super) async fn openapi() -> Response {
    crate::codec::json_response(StatusCode::OK, crate::openapi::document())
}
