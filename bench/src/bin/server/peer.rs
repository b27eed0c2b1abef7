//! A minimal server of the API: parses the same JSON, checks a token, responds.

use std::collections::HashMap;
use std::io::{Write as _, stdout};
use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Result;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::routing::post;
use axum::{Json, Router};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tidegate_client::{Acquire, Settle};
use tokio::net::TcpListener;

/// The only token: its id and its secret.
pub(crate) const TOKEN: (&str, &str) = ("bench", "0123456789abcdefghijklmnopqrstuvwxyz0123456");

/// Hashes of secrets by token id, since no server stores secrets in the clear.
type Tokens = Arc<HashMap<String, [u8; 32]>>;

/// Serves until the process is killed.
pub(crate) async fn serve(listen: SocketAddr) -> Result<()> {
    let (id, secret) = TOKEN;
    let tokens: Tokens = Arc::new(HashMap::from([(id.to_owned(), Sha256::digest(secret).into())]));
    let app = Router::new()
        .route("/v1/acquire", post(acquire))
        .route("/v1/leases/{lease}/settle", post(settle))
        .with_state(tokens);
    let listener = TcpListener::bind(listen).await?;
    let url = format!("http://{}", listener.local_addr()?);
    writeln!(stdout(), "{}", json!({ "url": url, "token": format!("tg_{id}_{secret}") }))?;
    Ok(axum::serve(listener, app).await?)
}

fn check(tokens: &Tokens, headers: &HeaderMap) -> Result<(), StatusCode> {
    let value = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let token = value.and_then(|value| value.strip_prefix("Bearer tg_")?.split_once('_'));
    let is_good = |(id, secret): (&str, &str)| {
        tokens.get(id).is_some_and(|hash| *hash == <[u8; 32]>::from(Sha256::digest(secret)))
    };
    if token.is_some_and(is_good) { Ok(()) } else { Err(StatusCode::UNAUTHORIZED) }
}

async fn acquire(
    State(tokens): State<Tokens>,
    headers: HeaderMap,
    Json(request): Json<Acquire>,
) -> Result<Json<Value>, StatusCode> {
    check(&tokens, &headers)?;
    Ok(Json(json!({ "lease": request.entity.0.as_str(), "expires_in": 60 })))
}

async fn settle(
    State(tokens): State<Tokens>,
    headers: HeaderMap,
    Path(lease): Path<String>,
    Json(settle): Json<Settle>,
) -> Result<Json<Value>, StatusCode> {
    check(&tokens, &headers)?;
    Ok(Json(json!({ "lease": lease, "step": settle.step })))
}
