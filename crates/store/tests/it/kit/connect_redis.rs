//! Direct connections of a test to Redis, with a timeout for busy machines.

use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::cluster::ClusterClient;
use redis::cluster_async::ClusterConnection;
use redis::{AsyncConnectionConfig, Client, RedisResult};

const TIMEOUT: Duration = Duration::from_secs(60);

/// Connects to a server; fails if it refuses the connection.
pub(crate) async fn try_connect(url: &str) -> RedisResult<MultiplexedConnection> {
    let config = AsyncConnectionConfig::new()
        .set_connection_timeout(Some(TIMEOUT))
        .set_response_timeout(Some(TIMEOUT));
    Client::open(url).expect("an address").get_multiplexed_async_connection_with_config(&config).await
}

/// Connects to a server.
pub(crate) async fn connect(url: &str) -> MultiplexedConnection {
    try_connect(url).await.expect("the server responds")
}

/// Connects to the cluster at a store address.
pub(crate) async fn connect_cluster(url: &str) -> ClusterConnection {
    let nodes = url.trim_start_matches("redis+cluster://").split(',').map(|node| format!("redis://{node}"));
    let client = ClusterClient::builder(nodes.collect::<Vec<_>>())
        .connection_timeout(TIMEOUT)
        .response_timeout(TIMEOUT)
        .build();
    client.expect("an address").get_async_connection().await.expect("the cluster responds")
}
