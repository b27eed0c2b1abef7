//! Handler of the status route.

use axum::extract::State as With;
use tidegate::store::Lookup;
use tidegate_client::Status;

use crate::codec::OkJson;
use crate::refusal::Refusal;
use crate::state::State;

/// Returns the status of the server's store: engine, time and number of administrative changes.
#[utoipa::path(get, path = "/v1/status", responses((status = 200, description = "The status.", body = Status)))]
pub(super) async fn show(With(state): With<State>) -> Result<OkJson<Status>, Refusal> {
    let capabilities = state.store().capabilities();
    let seen = state.query(state.store().balances(&Lookup::Subjects(Vec::new()))).await?;
    let version = state.query(state.store().version()).await?;
    Ok(OkJson(Status {
        namespace: state.namespace().to_string(),
        engine: capabilities.engine.to_owned(),
        is_durable: capabilities.is_durable,
        clock: capabilities.clock.as_str().to_owned(),
        at: seen.at.into(),
        clock_offset: Some(seen.clock_offset).filter(|offset| !offset.is_zero()).map(Into::into),
        version: version.number(),
    }))
}
