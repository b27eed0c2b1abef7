//! How the store behind the server is.

use axum::extract::State as With;
use tidegate::store::Lookup;
use tidegate_client::Status;

use crate::codec::Done;
use crate::refusal::Refusal;
use crate::state::State;

/// The store behind the server: its engine, its time, and how many administrative changes there were.
#[utoipa::path(get, path = "/v1/status", responses((status = 200, description = "How it is.", body = Status)))]
pub(super) async fn show(With(state): With<State>) -> Result<Done<Status>, Refusal> {
    let capabilities = state.store().capabilities();
    let seen = state.ask(state.store().balances(&Lookup::Subjects(Vec::new()))).await?;
    let version = state.ask(state.store().version()).await?;
    Ok(Done(Status {
        namespace: state.namespace().to_string(),
        engine: capabilities.engine.to_owned(),
        is_durable: capabilities.is_durable,
        clock: capabilities.clock.as_str().to_owned(),
        at: seen.at.into(),
        clock_offset: Some(seen.clock_offset).filter(|offset| !offset.is_zero()).map(Into::into),
        version: version.number(),
    }))
}
