//! Schemas on the shared PostgreSQL server.

use std::net::SocketAddr;
use std::time::Duration;

use tidegate_store::{Postgres, PostgresOptions};
use tokio_postgres::{Client, NoTls};

use crate::kit::engine::{POSTGRES, address, unique};

/// The address of the shared server.
pub(crate) fn url() -> String {
    address(POSTGRES)
}

/// Options with a timeout that only a hang exceeds.
pub(crate) fn options_at(url: impl Into<String>) -> PostgresOptions {
    const TIMEOUT: Duration = Duration::from_secs(60);
    PostgresOptions::new(url).connected_within(TIMEOUT).timeout(TIMEOUT)
}

/// Options for a schema of the test's own.
pub(crate) fn options() -> PostgresOptions {
    options_at(url()).schema(unique("t")).connections(4)
}

pub(crate) async fn open(options: PostgresOptions) -> Postgres {
    options.open().await.expect("the server responds")
}

/// A database of the test's own, for statistics per database and for listings of all schemas.
pub(crate) async fn database() -> String {
    let name = unique("d");
    outside(&url())
        .await
        .batch_execute(&format!("CREATE DATABASE \"{name}\""))
        .await
        .expect("the database is created");
    url().replace("/postgres", &format!("/{name}"))
}

/// A direct connection to the database, as another program would have.
pub(crate) async fn outside(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.expect("the server responds");
    tokio::spawn(connection);
    client
}

/// The socket address of the server at a URL.
pub(crate) fn socket_addr(url: &str) -> SocketAddr {
    let config: tokio_postgres::Config = url.parse().expect("an address");
    SocketAddr::from(([127, 0, 0, 1], config.get_ports()[0]))
}

/// The same URL through another socket address.
pub(crate) fn url_via(url: &str, wire: SocketAddr) -> String {
    url.replace(&socket_addr(url).to_string(), &wire.to_string())
}
