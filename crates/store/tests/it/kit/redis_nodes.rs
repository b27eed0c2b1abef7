//! A Redis Cluster of the test's own, whose nodes it can kill.

use std::cell::Cell;
use std::time::Duration;

use redis::FromRedisValue;
use redis::aio::MultiplexedConnection;

use crate::kit::common::eventually;
use crate::kit::connect_redis::connect;
use crate::kit::engine::free_port;
use crate::kit::private_redis::Server;

/// A node, and a connection to it.
pub(crate) struct Node {
    pub(crate) server: Server,
    bus: u16,
    connection: MultiplexedConnection,
}

impl Node {
    async fn start(lost_after: Duration) -> Self {
        let chosen = Cell::new(0);
        let server = Server::start_as(|port, _| {
            chosen.set(free_port());
            let (port, bus) = (port.to_string(), chosen.get().to_string());
            let args =
                ["--port", &port, "--bind", "127.0.0.1", "--save", "", "--repl-diskless-sync-delay", "0"];
            let timeout = lost_after.as_millis().to_string();
            let cluster =
                ["--cluster-enabled", "yes", "--cluster-node-timeout", &timeout, "--cluster-port", &bus];
            args.into_iter().chain(cluster).map(str::to_owned).collect()
        })
        .await;
        let bus = chosen.get();
        let connection = connect(&server.url()).await;
        Self { server, bus, connection }
    }

    pub(crate) async fn ask<T: FromRedisValue>(&mut self, call: &str) -> T {
        let mut command = redis::Cmd::new();
        for part in call.split(' ') {
            command.arg(part);
        }
        command.query_async(&mut self.connection).await.unwrap_or_else(|error| panic!("{call}: {error}"))
    }

    pub(crate) async fn wait_for(&mut self, call: &str, what: &str) {
        eventually(what, async || self.ask::<String>(call).await.contains(what)).await;
    }
}

/// Three primaries, the first with half of the slots, and a replica of the first. A node without a response
/// for `lost_after` is considered lost.
pub(crate) async fn form(lost_after: Duration) -> Vec<Node> {
    let mut nodes = Vec::new();
    for slots in ["0 8191", "8192 12287", "12288 16383", ""] {
        let mut node = Node::start(lost_after).await;
        if !slots.is_empty() {
            node.ask::<String>(&format!("CLUSTER ADDSLOTSRANGE {slots}")).await;
        }
        nodes.push(node);
    }
    let first = format!("127.0.0.1 {} {}", nodes[0].server.port, nodes[0].bus);
    for node in &mut nodes[1..] {
        node.ask::<String>(&format!("CLUSTER MEET {first}")).await;
    }
    for node in &mut nodes {
        node.wait_for("CLUSTER INFO", "cluster_known_nodes:4").await;
        node.wait_for("CLUSTER INFO", "cluster_state:ok").await;
    }
    let id: String = nodes[0].ask("CLUSTER MYID").await;
    nodes[3].ask::<String>(&format!("CLUSTER REPLICATE {id}")).await;
    nodes[3].wait_for("INFO replication", "master_link_status:up").await;
    // A replica that has just synced receives nothing until it has acknowledged that, once a second.
    let mut connection = nodes[0].connection.clone();
    for number in 0..1_000 {
        let mark = redis::cmd("SET").arg(format!("mark-{number}")).arg(1).exec_async(&mut connection).await;
        // Half of the keys belong to this node.
        if mark.is_ok() {
            break;
        }
    }
    assert_eq!(nodes[0].ask::<u64>("WAIT 1 60000").await, 1, "the replica acknowledges the write");
    for node in &mut nodes {
        node.wait_for("CLUSTER NODES", &format!("slave {id}")).await;
    }
    nodes
}

/// The address of the cluster.
pub(crate) fn url_of(nodes: &[Node]) -> String {
    let addresses: Vec<_> = nodes.iter().map(|node| format!("127.0.0.1:{}", node.server.port)).collect();
    format!("redis+cluster://{}", addresses.join(","))
}
