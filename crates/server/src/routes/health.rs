//! How the server is, what it counts, and what it understands.

use axum::extract::State as With;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use tidegate_client::Problem;

use crate::refusal::Refusal;
use crate::state::State;

/// Whether the process answers at all.
#[utoipa::path(get, path = "/health/live", responses((status = 204, description = "It does.")))]
pub(super) async fn live() -> StatusCode {
    StatusCode::NO_CONTENT
}

/// Whether it is worth sending requests: the store answers, and the server is not stopping.
#[utoipa::path(get, path = "/health/ready", responses(
    (status = 204, description = "It is."),
    (status = 503, description = "It is not.", body = Problem),
))]
pub(super) async fn ready(With(state): With<State>) -> Result<StatusCode, Refusal> {
    if state.limiter().is_closed() {
        return Err(tidegate::LimitError::Closed.into());
    }
    state.ask(state.store().version()).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// What the server counts, for Prometheus.
#[utoipa::path(get, path = "/metrics", responses(
    (status = 200, description = "Counters, gauges and histograms.", body = String, content_type = "text/plain"),
))]
pub(super) async fn metrics(With(state): With<State>) -> Response {
    let text = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    ([(header::CONTENT_TYPE, text)], state.meters().show(&state)).into_response()
}

/// This document.
#[utoipa::path(get, path = "/v1/openapi.json", responses(
    (status = 200, description = "The API as OpenAPI 3.1.", content_type = "application/json"),
))]
pub(super) async fn openapi() -> Response {
    crate::codec::answer(StatusCode::OK, crate::openapi::document())
}
