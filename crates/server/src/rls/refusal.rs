//! Converts problems to gRPC statuses. Envoy treats every status as a failure of the service, and applies its
//! failure mode.

use axum::http::StatusCode;
use tonic::{Code, Status};

use crate::refusal::Refusal;

/// Returns the gRPC status of a problem.
pub(super) fn status(refusal: &Refusal) -> Status {
    let problem = &refusal.problem;
    let code = match StatusCode::from_u16(problem.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR) {
        StatusCode::UNAUTHORIZED => Code::Unauthenticated,
        StatusCode::FORBIDDEN => Code::PermissionDenied,
        StatusCode::SERVICE_UNAVAILABLE => Code::Unavailable,
        StatusCode::INSUFFICIENT_STORAGE => Code::ResourceExhausted,
        code if code.is_client_error() => Code::FailedPrecondition,
        _ => Code::Internal,
    };
    Status::new(code, problem.detail.clone())
}
