//! Schemas on the shared PostgreSQL server.

use std::net::SocketAddr;
use std::time::Duration;

use tidegate_store::{Postgres, PostgresOptions};
use tokio_postgres::{Client, NoTls};

use crate::kit::engine::{POSTGRES, address, unique};

/// The server that all tests share.
pub(crate) fn url() -> String {
    address(POSTGRES)
}

/// A store whose server hangs if it takes longer to answer.
pub(crate) fn patient(url: impl Into<String>) -> PostgresOptions {
    const PATIENCE: Duration = Duration::from_secs(60);
    PostgresOptions::new(url).connected_within(PATIENCE).patience(PATIENCE)
}

/// A schema of a test's own on it.
pub(crate) fn options() -> PostgresOptions {
    patient(url()).schema(unique("t")).connections(4)
}

pub(crate) async fn open(options: PostgresOptions) -> Postgres {
    options.open().await.expect("the server is there")
}

/// A database of a test's own, for what the server counts by database, or lists of all schemas.
pub(crate) async fn database() -> String {
    let name = unique("d");
    outside(&url()).await.batch_execute(&format!("CREATE DATABASE \"{name}\"")).await.expect("it is created");
    url().replace("/postgres", &format!("/{name}"))
}

/// Looks into the database from outside, as another program could.
pub(crate) async fn outside(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.expect("the server is there");
    tokio::spawn(connection);
    client
}

/// Where the server at an address listens.
pub(crate) fn listens_at(url: &str) -> SocketAddr {
    let config: tokio_postgres::Config = url.parse().expect("an address");
    SocketAddr::from(([127, 0, 0, 1], config.get_ports()[0]))
}

/// The same address by way of another port.
pub(crate) fn by_way_of(url: &str, wire: SocketAddr) -> String {
    url.replace(&listens_at(url).to_string(), &wire.to_string())
}
