//! Connections of a test's own to Redis, which wait as long as a machine takes that has much else to do.

use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::cluster::ClusterClient;
use redis::cluster_async::ClusterConnection;
use redis::{AsyncConnectionConfig, Client, RedisResult};

const PATIENCE: Duration = Duration::from_secs(60);

/// A connection to a server, if it lets us in.
pub(crate) async fn try_connect(url: &str) -> RedisResult<MultiplexedConnection> {
    let config = AsyncConnectionConfig::new()
        .set_connection_timeout(Some(PATIENCE))
        .set_response_timeout(Some(PATIENCE));
    Client::open(url).expect("an address").get_multiplexed_async_connection_with_config(&config).await
}

/// A connection to a server.
pub(crate) async fn connect(url: &str) -> MultiplexedConnection {
    try_connect(url).await.expect("the server is there")
}

/// A connection to the cluster at an address of the store's.
pub(crate) async fn connect_cluster(url: &str) -> ClusterConnection {
    let nodes = url.trim_start_matches("redis+cluster://").split(',').map(|node| format!("redis://{node}"));
    let client = ClusterClient::builder(nodes.collect::<Vec<_>>())
        .connection_timeout(PATIENCE)
        .response_timeout(PATIENCE)
        .build();
    client.expect("an address").get_async_connection().await.expect("the cluster is there")
}
