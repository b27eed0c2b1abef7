//! Tests that clients reconnect to a server that restarts on the same port.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tidegate::{Limit, Limiter, Memory, Policy, Scope, Store};
use tidegate_client::*;
use tidegate_core::limit::token::{TokenScope, TokenScopes};
use tidegate_server::{Server, ServerOptions, Shutdown, ShutdownOutcome, State, Stopper};
use tokio::task::JoinHandle;

use crate::kit::frozen::until;
use crate::kit::server::{make_token, reserved_port, soon};
use crate::kit::upstream::{cost, request};

/// Starts a server over this store, at this address.
async fn serve(store: &Arc<dyn Store>, addr: SocketAddr) -> (Stopper, JoinHandle<ShutdownOutcome>) {
    let limiter = Limiter::over(Arc::clone(store)).build().expect("a limiter");
    let state = State::new(limiter).await.expect("a state");
    let server = Server::bind(&ServerOptions::new(addr)).await.expect("it listens");
    let (stopper, shutdown) = Shutdown::new();
    (stopper, tokio::spawn(server.run(state, shutdown)))
}

#[tokio::test]
async fn clients_and_leases_survive_server_restart() {
    let store: Arc<dyn Store> = Arc::new(Memory::new());
    let limiter = Limiter::over(Arc::clone(&store)).build().unwrap();
    let policy = Policy::new([Limit::per_day("tpm", 1_000)]).unwrap();
    limiter.admin("test").set_policy(Scope::System, policy).await.unwrap();
    let token = make_token(&*store, "ci", TokenScopes::new(TokenScope::ALL), "default").await;

    // Reserves the port, so that no other test takes it while the server is down.
    let (_reserved, addr) = reserved_port();
    let (stopper, running) = serve(&store, addr).await;
    let persistent = Retry::attempts(u32::MAX)
        .backoff(Backoff::fixed(Duration::from_millis(1)))
        .budget(RetryBudget::unlimited());
    let builder = Client::builder(&format!("http://{addr}")).token(&token);
    let client = builder.clone().retry(persistent).build().unwrap();
    let no_retry = builder.retry(Retry::attempts(1)).build().unwrap();
    let lease = client.acquire(&request(&[("tpm", 500)])).await.unwrap();
    stopper.stop();
    stopper.stop();
    soon("the stop", running).await.unwrap();

    let error = no_retry.acquire(&request(&[("tpm", 1)])).await.unwrap_err();
    assert!(error.is_unavailable() && !error.may_be_done(), "{error}");
    let settling = tokio::spawn(async move { lease.settle(cost(&[("tpm", 300)])).await });
    until("a retry", || client.stats().retries > 3).await;
    let (stopper, running) = serve(&store, addr).await;
    soon("the settle", settling).await.unwrap().unwrap();
    let lease = no_retry.acquire(&request(&[("tpm", 700)])).await.unwrap();
    lease.settle(Cost::default()).await.unwrap();
    let query = UsageQuery { entity: "acme".parse().ok(), ..UsageQuery::default() };
    assert_eq!(client.usage_summary(&query).await.unwrap().limits["tpm"].units, 1_000);
    stopper.stop();
    stopper.stop();
    soon("the stop", running).await.unwrap();
}
