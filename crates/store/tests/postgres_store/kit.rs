//! What the tests of the store in a server are written with.

use std::net::SocketAddr;
use std::time::Duration;

use tidegate_store::{Postgres, PostgresOptions};
use tokio_postgres::{Client, NoTls};

use crate::engine_kit::{address, unique};

/// The server that all of them share.
pub(crate) fn url() -> String {
    address("TIDEGATE_TEST_POSTGRES")
}

/// A store that waits as long as a machine takes that has much else to do.
pub(crate) fn patient(url: impl Into<String>) -> PostgresOptions {
    const PATIENCE: Duration = Duration::from_mins(1);
    PostgresOptions::new(url).connected_within(PATIENCE).patience(PATIENCE)
}

/// A schema of a test's own on it.
pub(crate) fn options() -> PostgresOptions {
    patient(url()).schema(unique("t")).connections(4)
}

pub(crate) async fn open(options: PostgresOptions) -> Postgres {
    options.open().await.expect("the server is there")
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
