//! The way to the engine: one connection that all calls share, made anew when it is lost.
//!
//! Calls are written one behind the other on one connection and answered in that order, so that many callers cost few
//! packets. A connection that was lost is made again by whoever calls next; others wait for that one try, and for a moment
//! after a failure nobody tries: a server that comes back is not met by everybody at once.

use std::future::Future;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ::redis::aio::{ConnectionLike, MultiplexedConnection};
use ::redis::cluster_async::ClusterConnection;
use ::redis::cluster_routing::{RoutingInfo, SingleNodeRoutingInfo};
use ::redis::sentinel::SentinelClient;
use ::redis::{AsyncConnectionConfig, Client, Cmd, ErrorKind, RedisError, ServerErrorKind, Value};
use tokio::time::Instant;

use super::script::Script;
use super::trouble::Whose;
use crate::error::StoreError;
use crate::sync::lock;

/// How long nobody tries to connect after a try has failed.
const REST: Duration = Duration::from_millis(100);
/// A connection that has left so many callers in a row without an answer is taken to be dead.
const UNANSWERED_MAX: usize = 3;

/// The way to the engine.
pub(super) struct Link {
    kind: Kind,
    whose: Whose,
}

enum Kind {
    One(Arc<One>),
    Cluster(ClusterConnection),
}

/// Where the connection to one server comes from.
pub(super) enum Source {
    /// A server by its address.
    Server(Box<Client>),
    /// Whoever the sentinels say is the primary.
    Sentinels(Box<SentinelClient>),
}

struct One {
    timeout: Duration,
    current: Mutex<Current>,
    /// Held by whoever connects.
    source: tokio::sync::Mutex<Tried>,
}

#[derive(Default)]
struct Current {
    connection: Option<MultiplexedConnection>,
    /// Counts connections, so that a late error does not end the next one.
    number: u64,
    unanswered: usize,
}

struct Tried {
    source: Source,
    failed: Option<(Instant, RedisError)>,
}

impl Link {
    /// The way to one server, which is not connected to yet.
    pub(super) fn one(source: Source, whose: Whose) -> Self {
        let source = tokio::sync::Mutex::new(Tried { source, failed: None });
        let one = One { timeout: whose.timeout, current: Mutex::default(), source };
        Self { kind: Kind::One(Arc::new(one)), whose }
    }

    /// The way to a cluster.
    pub(super) const fn cluster(connection: ClusterConnection, whose: Whose) -> Self {
        Self { kind: Kind::Cluster(connection), whose }
    }

    pub(super) const fn whose(&self) -> &Whose {
        &self.whose
    }

    /// Runs a script. One that the server does not have, after a restart or a failover, is sent along.
    pub(super) async fn run(
        &self,
        script: &Script,
        keys: &[&[u8]],
        args: &[&[u8]],
    ) -> Result<Value, StoreError> {
        let call = |name: &str, what: &str| {
            let mut call = Cmd::with_capacity(3 + keys.len() + args.len(), 1_024);
            call.arg(name).arg(what).arg(keys.len());
            for arg in keys.iter().chain(args) {
                call.arg(*arg);
            }
            call
        };
        self.try_run(script, 1, call).await.map_err(|error| self.whose.trouble(error))
    }

    /// Runs a script for so many callers, by a call of it by its hash or its text.
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
    pub(super) async fn query(&self, call: &Cmd) -> Result<Value, StoreError> {
        self.try_query(call, 1).await.map_err(|error| self.whose.trouble(error))
    }

    /// The servers that have keys, by their addresses; one without where there is but one.
    pub(super) async fn servers(&self) -> Result<Vec<Option<(String, u16)>>, StoreError> {
        let Kind::Cluster(_) = &self.kind else { return Ok(vec![None]) };
        let mut call = ::redis::cmd("CLUSTER");
        call.arg("NODES");
        let nodes: String = match self.query(&call).await? {
            Value::BulkString(nodes) => String::from_utf8_lossy(&nodes).into_owned(),
            Value::VerbatimString { text, .. } => text,
            other => return Err(self.whose.unexpected(&other)),
        };
        let server = |line: &str| {
            let mut words = line.split(' ').skip(1);
            let (address, flags) = (words.next()?, words.next()?);
            // One without slots has no keys, and no connection either.
            words.nth(5)?;
            let (host, port) = address.split('@').next()?.rsplit_once(':')?;
            let is_it = flags.split(',').any(|flag| flag == "master") && !flags.contains("fail");
            is_it.then_some(Some((host.to_owned(), port.parse().ok()?)))
        };
        Ok(nodes.lines().filter_map(server).collect())
    }

    /// Some of the keys that a server has, and where to go on; zero is the end.
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
                answer.and_then(Value::extract_error).map_err(|error| self.whose.trouble(error))?
            }
            _ => self.query(&call).await?,
        };
        let (next, keys): (u64, Vec<Vec<u8>>) =
            ::redis::from_redis_value(answer).map_err(|error| self.whose.trouble(error.into()))?;
        // What is no text is no key of ours.
        Ok((next, keys.into_iter().filter_map(|key| String::from_utf8(key).ok()).collect()))
    }

    async fn try_query(&self, call: &Cmd, callers: usize) -> Result<Value, RedisError> {
        let answer = match &self.kind {
            Kind::Cluster(connection) => connection.clone().req_packed_command(call).await,
            Kind::One(one) => {
                let ask = |mut connection: MultiplexedConnection| async move {
                    connection.req_packed_command(call).await
                };
                one.call(callers, ask).await
            }
        };
        answer.and_then(Value::extract_error)
    }
}

impl One {
    async fn call<T, F: Future<Output = Result<T, RedisError>>>(
        self: &Arc<Self>,
        callers: usize,
        call: impl FnOnce(MultiplexedConnection) -> F,
    ) -> Result<T, RedisError> {
        let (connection, number) = self.connection().await?;
        let answer = call(connection).await;
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
        // By a task of its own: others wait for it, and must not for a caller that looks away.
        let one = Arc::clone(self);
        let connecting = tokio::spawn(async move { one.connect().await });
        connecting.await.unwrap_or_else(|error| Err(io::Error::other(error).into()))
    }

    async fn connect(&self) -> Result<(MultiplexedConnection, u64), RedisError> {
        let mut tried = self.source.lock().await;
        // Another may have done it meanwhile.
        if let Some(connected) = self.connected() {
            return Ok(connected);
        }
        if let Some((at, error)) = &tried.failed
            && at.elapsed() < REST
        {
            return Err(error.clone());
        }
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.timeout))
            .set_response_timeout(Some(self.timeout));
        let connected = match &mut tried.source {
            Source::Server(client) => client.get_multiplexed_async_connection_with_config(&config).await,
            Source::Sentinels(client) => client.get_async_connection_with_config(&config).await,
        };
        match connected {
            Ok(connection) => {
                tried.failed = None;
                let mut current = lock(&self.current);
                current.number += 1;
                current.unanswered = 0;
                current.connection = Some(connection.clone());
                Ok((connection, current.number))
            }
            Err(error) => {
                tried.failed = Some((Instant::now(), error.clone()));
                Err(error)
            }
        }
    }
}

/// Whether a connection is no good any more: it was cut, or it leads to a server that is no primary now.
fn is_lost(error: &RedisError) -> bool {
    error.is_connection_dropped()
        || error.kind() == ErrorKind::Parse
        || error.is_unrecoverable_error()
        || matches!(error.kind(), ErrorKind::Server(ServerErrorKind::ReadOnly | ServerErrorKind::MasterDown))
}
