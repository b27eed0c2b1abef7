//! A server that stops and starts again on the same port: its clients reconnect.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tidegate::{Limit, Limiter, Memory, Policy, Scope, Store};
use tidegate_client::*;
use tidegate_core::limit::token::{TokenScope, TokenScopes};
use tidegate_server::{Server, ServerOptions, Shutdown, State, Stopped, Stopper};
use tokio::task::JoinHandle;

use crate::kit::frozen::until;
use crate::kit::server::{make_token, reserved_port, soon};
use crate::kit::upstream::{cost, request};

/// A server over this store, at this address.
async fn serve(store: &Arc<dyn Store>, addr: SocketAddr) -> (Stopper, JoinHandle<Stopped>) {
    let limiter = Limiter::over(Arc::clone(store)).build().expect("a limiter");
    let state = State::new(limiter).await.expect("a state");
    let server = Server::bind(&ServerOptions::new(addr)).await.expect("it listens");
    let (stopper, shutdown) = Shutdown::new();
    (stopper, tokio::spawn(server.run(state, shutdown)))
}

#[tokio::test]
async fn clients_and_their_leases_survive_a_restart_on_the_same_port() {
    let store: Arc<dyn Store> = Arc::new(Memory::new());
    let limiter = Limiter::over(Arc::clone(&store)).build().unwrap();
    let policy = Policy::new([Limit::per_day("tpm", 1_000)]).unwrap();
    limiter.admin("test").set_policy(Scope::System, policy).await.unwrap();
    let token = make_token(&*store, "ci", TokenScopes::new(TokenScope::ALL), "default").await;

    // No other test is given the port while the server is down.
    let (_reserved, addr) = reserved_port();
    let (stopper, running) = serve(&store, addr).await;
    let patient = Retry::attempts(u32::MAX).backoff(Backoff::fixed(Duration::from_millis(1)));
    let builder = Client::builder(&format!("http://{addr}")).token(&token);
    let client = builder.clone().retry(patient).build().unwrap();
    let hasty = builder.retry(Retry::attempts(1)).build().unwrap();
    let lease = client.acquire(&request(&[("tpm", 500)])).await.unwrap();
    stopper.stop();
    stopper.stop();
    soon("the stop", running).await.unwrap();

    let error = hasty.acquire(&request(&[("tpm", 1)])).await.unwrap_err();
    assert!(error.is_away() && !error.may_be_done(), "{error}");
    let settling = tokio::spawn(async move { lease.settle(cost(&[("tpm", 300)])).await });
    until("a retry", || client.stats().retries > 3).await;
    let (stopper, running) = serve(&store, addr).await;
    soon("the settle", settling).await.unwrap().unwrap();
    let lease = hasty.acquire(&request(&[("tpm", 700)])).await.unwrap();
    lease.settle(Cost::default()).await.unwrap();
    let query = UsageQuery { entity: "acme".parse().ok(), ..UsageQuery::default() };
    assert_eq!(client.usage_summary(&query).await.unwrap().limits["tpm"].units, 1_000);
    stopper.stop();
    stopper.stop();
    soon("the stop", running).await.unwrap();
}
