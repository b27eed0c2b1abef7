//! The connection to the engine, which all calls share and which is reopened when it is lost.
//!
//! Calls are pipelined on one connection, so that many callers need few packets. The next caller after a loss
//! reconnects, and others wait for that attempt. After a failure no attempt is made for a moment, so that a
//! server that restarts is not flooded.

use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ::redis::aio::{ConnectionLike, MultiplexedConnection};
use ::redis::cluster_async::ClusterConnection;
use ::redis::cluster_routing::{RoutingInfo, SingleNodeRoutingInfo};
use ::redis::sentinel::SentinelClient;
use ::redis::{
    AsyncConnectionConfig, Client, Cmd, ErrorKind, FromRedisValue, RedisError, ServerErrorKind, ToRedisArgs,
    Value,
};
use tokio::time::Instant;

use super::errors::ErrorContext;
use super::script::Script;
use crate::error::StoreError;
use crate::sync::lock;

/// How long no connection is attempted after a failure.
const RETRY_DELAY: Duration = Duration::from_millis(100);
/// A connection is taken to be dead after this many consecutive calls without a reply.
const UNANSWERED_MAX: usize = 3;

/// The connection to a server or a cluster.
pub(super) struct Connection {
    kind: Kind,
    context: ErrorContext,
}

enum Kind {
    SingleServer(Arc<SingleServer>),
    Cluster(ClusterConnection),
}

/// Where the connection to one server comes from.
pub(super) enum Source {
    /// The server at an address.
    Server(Box<Client>),
    /// The primary that the sentinels report.
    Sentinels(Box<SentinelClient>),
}

struct SingleServer {
    timeout: Duration,
    current: Mutex<CurrentConnection>,
    /// Held while connecting.
    source: tokio::sync::Mutex<Connector>,
}

#[derive(Default)]
struct CurrentConnection {
    connection: Option<MultiplexedConnection>,
    /// Counts connections, so that a late error does not end the next one.
    number: u64,
    unanswered: usize,
}

struct Connector {
    source: Source,
    failed: Option<(Instant, RedisError)>,
}

impl Connection {
    /// A connection to one server, opened by the first call.
    pub(super) fn single(source: Source, context: ErrorContext) -> Self {
        let source = tokio::sync::Mutex::new(Connector { source, failed: None });
        let single = SingleServer { timeout: context.timeout, current: Mutex::default(), source };
        Self { kind: Kind::SingleServer(Arc::new(single)), context }
    }

    /// A connection to a cluster.
    pub(super) const fn cluster(connection: ClusterConnection, context: ErrorContext) -> Self {
        Self { kind: Kind::Cluster(connection), context }
    }

    pub(super) const fn context(&self) -> &ErrorContext {
        &self.context
    }

    /// Runs a script. If the server does not have it, after a restart or a failover, its text is sent.
    pub(super) async fn run<T: FromRedisValue>(
        &self,
        script: &Script,
        keys: &[impl ToRedisArgs],
        args: &[impl ToRedisArgs],
    ) -> Result<T, StoreError> {
        let call = |name: &str, what: &str| {
            let mut call = Cmd::with_capacity(3 + keys.len() + args.len(), 1_024);
            call.arg(name).arg(what).arg(keys.len()).arg(keys).arg(args);
            call
        };
        self.read(self.try_run(script, 1, call).await)
    }

    /// Runs a script for `callers` callers. `call` builds the command from its name and the script's hash or
    /// text.
    pub(super) async fn try_run(
        &self,
        script: &Script,
        callers: usize,
        call: impl Fn(&str, &str) -> Cmd,
    ) -> Result<Value, RedisError> {
        match self.try_query(&call("EVALSHA", script.hash()), callers).await {
            Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript) => {
                self.try_query(&call("EVAL", script.text()), callers).await
            }
            answer => answer,
        }
    }

    /// Makes one call.
    pub(super) async fn query<T: FromRedisValue>(&self, call: &Cmd) -> Result<T, StoreError> {
        self.read(self.try_query(call, 1).await)
    }

    /// Converts a reply. One of another type is corrupt.
    fn read<T: FromRedisValue>(&self, reply: Result<Value, RedisError>) -> Result<T, StoreError> {
        let read = reply.and_then(|reply| Ok(::redis::from_redis_value(reply)?));
        read.map_err(|error| self.context.store_error(error))
    }

    /// The addresses of all servers that have keys; `None` for a single server.
    pub(super) async fn servers(&self) -> Result<Vec<Option<(String, u16)>>, StoreError> {
        let Kind::Cluster(_) = &self.kind else { return Ok(vec![None]) };
        let nodes: String = self.query(::redis::cmd("CLUSTER").arg("NODES")).await?;
        let server = |line: &str| {
            let mut words = line.split(' ').skip(1);
            let (address, flags) = (words.next()?, words.next()?);
            // A node without slots has no keys and no connection.
            words.nth(5)?;
            let (host, port) = address.split('@').next()?.rsplit_once(':')?;
            let is_primary = flags.split(',').any(|flag| flag == "master") && !flags.contains("fail");
            is_primary.then_some(Some((host.to_owned(), port.parse().ok()?)))
        };
        Ok(nodes.lines().filter_map(server).collect())
    }

    /// Some keys of a server, and the next cursor; zero at the end.
    pub(super) async fn scan(
        &self,
        server: Option<&(String, u16)>,
        cursor: u64,
        pattern: &str,
        count: usize,
    ) -> Result<(u64, Vec<String>), StoreError> {
        let mut call = ::redis::cmd("SCAN");
        call.arg(cursor).arg("MATCH").arg(pattern).arg("COUNT").arg(count);
        let answer = match (&self.kind, server) {
            (Kind::Cluster(connection), Some((host, port))) => {
                let node = SingleNodeRoutingInfo::ByAddress { host: host.clone(), port: *port };
                let answer = connection.clone().route_command(call, RoutingInfo::SingleNode(node)).await;
                answer.and_then(Value::extract_error)
            }
            _ => self.try_query(&call, 1).await,
        };
        let (next, keys): (u64, Vec<Vec<u8>>) = self.read(answer)?;
        // A key that is not UTF-8 is not ours.
        Ok((next, keys.into_iter().filter_map(|key| String::from_utf8(key).ok()).collect()))
    }

    async fn try_query(&self, call: &Cmd, callers: usize) -> Result<Value, RedisError> {
        let answer = match &self.kind {
            Kind::Cluster(connection) => connection.clone().req_packed_command(call).await,
            Kind::SingleServer(single) => single.call(call, callers).await,
        };
        answer.and_then(Value::extract_error)
    }
}

impl SingleServer {
    async fn call(self: &Arc<Self>, call: &Cmd, callers: usize) -> Result<Value, RedisError> {
        let (mut connection, number) = self.connection().await?;
        let answer = connection.req_packed_command(call).await;
        let mut current = lock(&self.current);
        if current.number != number {
            return answer;
        }
        match &answer {
            Err(error) if is_lost(error) => current.connection = None,
            Err(error) if error.is_timeout() => {
                current.unanswered = current.unanswered.saturating_add(callers);
                if current.unanswered >= UNANSWERED_MAX {
                    current.connection = None;
                }
            }
            Ok(_) | Err(_) => current.unanswered = 0,
        }
        answer
    }

    fn connected(&self) -> Option<(MultiplexedConnection, u64)> {
        let current = lock(&self.current);
        current.connection.clone().map(|connection| (connection, current.number))
    }

    async fn connection(self: &Arc<Self>) -> Result<(MultiplexedConnection, u64), RedisError> {
        if let Some(connected) = self.connected() {
            return Ok(connected);
        }
        // Connects in a task of its own: others wait for it, even if this caller is not polled.
        let single = Arc::clone(self);
        let connecting = tokio::spawn(async move { single.connect().await });
        connecting.await.unwrap_or_else(|error| Err(io::Error::other(error).into()))
    }

    async fn connect(&self) -> Result<(MultiplexedConnection, u64), RedisError> {
        let mut connector = self.source.lock().await;
        // Another caller may have connected while this one waited for the lock.
        if let Some(connected) = self.connected() {
            return Ok(connected);
        }
        if let Some((at, error)) = &connector.failed
            && at.elapsed() < RETRY_DELAY
        {
            return Err(error.clone());
        }
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.timeout))
            .set_response_timeout(Some(self.timeout));
        let connected = match &mut connector.source {
            Source::Server(client) => client.get_multiplexed_async_connection_with_config(&config).await,
            Source::Sentinels(client) => client.get_async_connection_with_config(&config).await,
        };
        match connected {
            Ok(connection) => {
                connector.failed = None;
                let mut current = lock(&self.current);
                current.number += 1;
                current.unanswered = 0;
                current.connection = Some(connection.clone());
                Ok((connection, current.number))
            }
            Err(error) => {
                connector.failed = Some((Instant::now(), error.clone()));
                Err(error)
            }
        }
    }
}

/// Whether a connection is unusable: it was cut, or its server is not a primary any more.
fn is_lost(error: &RedisError) -> bool {
    error.is_connection_dropped()
        || error.kind() == ErrorKind::Parse
        || error.is_unrecoverable_error()
        || matches!(error.kind(), ErrorKind::Server(ServerErrorKind::ReadOnly | ServerErrorKind::MasterDown))
}
