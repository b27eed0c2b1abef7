//! Options of a store on Redis or Valkey, and its address.

use std::fmt;
use std::time::Duration;

use ::redis::cluster::ClusterClientBuilder;
use ::redis::sentinel::{SentinelClient, SentinelClientBuilder, SentinelServerType};
use ::redis::{Client, ConnectionInfo, IntoConnectionInfo, TlsMode};
use tidegate_core::limit::name::Namespace;

use super::Redis;
use super::connection::{Connection, Source};
use super::errors::ErrorContext;
use super::keyspace::{Keyspace, Layout};
use super::lifecycle::caution;
use super::listen::ChangeSource;
use super::schema;
use crate::background::SweepTimer;
use crate::error::StoreError;
use crate::lifecycle::namespace;
use crate::open::{check_login, ready_for_tls};
use crate::retention::Retention;
use crate::setters::setters;

/// The default timeout of a call.
const TIMEOUT: Duration = Duration::from_secs(2);
/// The default deadline of a call, after which the engine counts as unavailable.
const DEADLINE: Duration = Duration::from_millis(50);
/// How often a call to a cluster is retried after its slot moved or its server failed.
const CLUSTER_RETRIES: u32 = 3;

/// Opens a store on Redis or Valkey.
///
/// | address | engine |
/// |---|---|
/// | `redis://[user:password@]host[:port][/db]` | one server |
/// | `redis+sentinel://[user:password@]host:port[,host:port…]/primary[/db]` | the primary that the sentinels report |
/// | `redis+cluster://[user:password@]host:port[,host:port…]` | a cluster, by some of its servers |
///
/// With `rediss` in place of `redis` the connection is encrypted (feature `redis-tls`).
#[derive(Clone)]
#[must_use = "options do nothing until they are opened"]
pub struct RedisOptions {
    url: String,
    /// `None` stands for `default`.
    namespace: Option<String>,
    timeout: Duration,
    pub(super) deadline: Duration,
    pub(super) retention: Retention,
    pub(super) swept_every: Duration,
}

/// A parsed address.
struct Address {
    is_tls: bool,
    kind: AddressKind,
    /// Each server, with user and password.
    nodes: Vec<ConnectionInfo>,
    /// What follows the first `/` after the hosts.
    path: String,
    /// The address without user and password.
    place: String,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum AddressKind {
    Server,
    Sentinels,
    Cluster,
}

impl RedisOptions {
    /// A store at an address, in the namespace `default`.
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            namespace: None,
            timeout: TIMEOUT,
            deadline: DEADLINE,
            retention: Retention::default(),
            swept_every: SweepTimer::INTERVAL,
        }
    }

    /// Sets the namespace.
    pub fn namespace(mut self, name: impl Into<String>) -> Self {
        self.namespace = Some(name.into());
        self
    }

    setters! {
        /// Sets the timeout of a call, two seconds by default. Callers that wait less set a deadline of their
        /// own.
        timeout: Duration,
        /// Sets how long a call may take before the engine [counts as
        /// unavailable](crate::Capabilities::deadline), 50 ms by default.
        deadline: Duration,
        /// Sets how long usage and audit are kept. Older data is deleted in small steps, by processes that draw
        /// and by [`sweep`](crate::Store::sweep).
        retention: Retention,
        /// Sets how often a process that draws sweeps expired leases; tests that count calls use a long interval.
        #[doc(hidden)]
        swept_every: Duration,
    }

    /// Connects, and creates the namespace or checks its schema. A server that may evict keys is reported by
    /// [`caution`](crate::Store::caution) and by a warning of the `tracing` crate.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] for an invalid address or namespace and for a namespace of a newer version,
    /// [`StoreError::Denied`] for a wrong password or an untrusted certificate, and
    /// [`StoreError::Unavailable`] if no server responds.
    ///
    /// # Cancel safety
    /// Dropping the future may leave a new namespace behind, which the next call opens.
    pub async fn open(self) -> Result<Redis, StoreError> {
        let namespace = self.check()?;
        let (connection, layout, change_source) = self.connect().await?;
        let (layout, _) = schema::prepare(&connection, &namespace, layout).await?;
        let caution = caution(&connection).await?;
        if let Some(caution) = &caution {
            tracing::warn!(target: "tidegate::store", "{caution}");
        }
        Ok(Redis::new((connection, change_source), Keyspace::new(&namespace, layout), self, caution))
    }

    /// Validates the options before any call.
    pub(super) fn check(&self) -> Result<Namespace, StoreError> {
        if self.timeout.is_zero() {
            return Err(StoreError::Invalid { what: "`timeout` is 0s, and must be longer".to_owned() });
        }
        Address::parse(&self.url)?;
        self.retention.check()?;
        namespace(self.namespace.as_deref().unwrap_or("default"))
    }

    /// Whether a namespace was set.
    pub(super) const fn has_namespace(&self) -> bool {
        self.namespace.is_some()
    }

    /// The connection, the layout of a new namespace, and the source of change messages.
    pub(super) async fn connect(&self) -> Result<(Connection, Layout, ChangeSource), StoreError> {
        let address = Address::parse(&self.url)?;
        let context = ErrorContext { place: address.place.clone(), timeout: self.timeout };
        let store_error = |error| context.store_error(error);
        let (connection, change_source) = match address.kind {
            AddressKind::Server => {
                let client = Client::open(address.nodes[0].clone()).map_err(store_error)?;
                let source = Source::Server(Box::new(client));
                (Connection::single(source, context), ChangeSource::Servers(address.nodes))
            }
            AddressKind::Cluster => {
                // The addresses say whether to use TLS.
                let builder = ClusterClientBuilder::new(address.nodes.clone())
                    .retries(CLUSTER_RETRIES)
                    .connection_timeout(self.timeout)
                    .response_timeout(self.timeout);
                let client = builder.build().map_err(store_error)?;
                let connection = client.get_async_connection().await.map_err(store_error)?;
                let connection = Connection::cluster(connection, context);
                return Ok((connection, Layout::Trees, ChangeSource::Servers(address.nodes)));
            }
            AddressKind::Sentinels => {
                // One client for calls, and one for change messages.
                let [calls, messages] =
                    [address.sentinels(&context)?, address.sentinels(&context)?].map(Box::new);
                (Connection::single(Source::Sentinels(calls), context), ChangeSource::Sentinels(messages))
            }
        };
        Ok((connection, Layout::One, change_source))
    }
}

impl fmt::Debug for RedisOptions {
    /// Omits the address, which may contain a password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisOptions")
            .field("namespace", &self.namespace)
            .field("timeout", &self.timeout)
            .field("deadline", &self.deadline)
            .field("retention", &self.retention)
            .finish_non_exhaustive()
    }
}

impl Address {
    fn parse(url: &str) -> Result<Self, StoreError> {
        let invalid = |what: String| StoreError::Invalid { what };
        check_login(url)?;
        let (scheme, rest) =
            url.split_once("://").ok_or_else(|| invalid("an address without `://`".to_owned()))?;
        let is_tls = scheme.starts_with("rediss");
        let kind = match scheme.strip_prefix(if is_tls { "rediss" } else { "redis" }) {
            Some("") => AddressKind::Server,
            Some("+sentinel") => AddressKind::Sentinels,
            Some("+cluster") => AddressKind::Cluster,
            _ => return Err(invalid(format!("`{}` is not a scheme of Redis", scheme.escape_debug()))),
        };
        if is_tls {
            ready_for_tls()?;
        }
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        // A password may contain `@`, a host does not.
        let (login, hosts) = authority.rsplit_once('@').unwrap_or(("", authority));
        let place = format!("{scheme}://{hosts}{}{path}", if path.is_empty() { "" } else { "/" });
        if kind == AddressKind::Cluster && !path.is_empty() {
            return Err(invalid(format!("`{place}`: a cluster has one database, and no `/{path}`")));
        }
        let node = |host: &str| {
            let login = if login.is_empty() { String::new() } else { format!("{login}@") };
            let path = if kind == AddressKind::Server { path } else { "" };
            let url = format!("{}://{login}{host}/{path}", if is_tls { "rediss" } else { "redis" });
            // The original error may quote the address with its password.
            let invalid_address = |_| invalid(format!("`{place}` is not an address of Redis"));
            url.into_connection_info().map_err(invalid_address)
        };
        let hosts: Vec<&str> = hosts.split(',').filter(|host| !host.is_empty()).collect();
        if hosts.is_empty() || (kind == AddressKind::Server && hosts.len() > 1) {
            return Err(invalid(format!("`{place}` names {} servers", hosts.len())));
        }
        let nodes = hosts.into_iter().map(node).collect::<Result<Vec<_>, _>>()?;
        Ok(Self { is_tls, kind, nodes, path: path.to_owned(), place })
    }

    /// The client that asks the sentinels for the primary.
    fn sentinels(&self, context: &ErrorContext) -> Result<SentinelClient, StoreError> {
        let store_error = |error| context.store_error(error);
        let (primary, db) = self.path.split_once('/').unwrap_or((&self.path, "0"));
        if primary.is_empty() {
            let what = format!("`{}` names no primary: write it behind a `/`", self.place);
            return Err(StoreError::Invalid { what });
        }
        let Ok(db) = db.parse() else {
            let what = format!("`{}` names the database `{db}`, which is not a number", self.place);
            return Err(StoreError::Invalid { what });
        };
        let nodes = self.nodes.iter().map(|node| node.addr().clone());
        let builder = SentinelClientBuilder::new(nodes, primary, SentinelServerType::Master);
        let mut builder = builder.map_err(store_error)?.set_client_to_redis_db(db);
        if let Some(settings) = self.nodes.first().map(ConnectionInfo::redis_settings) {
            if let Some(user) = settings.username() {
                builder = builder.set_client_to_redis_username(user);
            }
            if let Some(password) = settings.password() {
                builder = builder.set_client_to_redis_password(password);
            }
        }
        if self.is_tls {
            builder = builder.set_client_to_redis_tls_mode(TlsMode::Secure);
            builder = builder.set_client_to_sentinel_tls_mode(TlsMode::Secure);
        }
        builder.build().map_err(store_error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_parses_and_hides_its_password() {
        let address = Address::parse("redis://me:s3cr%40t@h:7000/2").unwrap();
        assert_eq!(address.place, "redis://h:7000/2");
        assert!(!format!("{:?}", RedisOptions::new("redis://me:s3cr%40t@h")).contains("s3cr"));
        let settings = address.nodes[0].redis_settings();
        assert_eq!(
            (settings.username(), settings.password(), settings.db()),
            (Some("me"), Some("s3cr@t"), 2)
        );
        let address = Address::parse("redis+sentinel://:pw@a:1,b:2/main/3").unwrap();
        assert_eq!((address.nodes.len(), address.path.as_str()), (2, "main/3"));
        assert_eq!(address.place, "redis+sentinel://a:1,b:2/main/3");
        assert!(Address::parse("redis+cluster://a:1,b:2").unwrap().kind == AddressKind::Cluster);
        let table = [
            ("redis", "an address without `://`"),
            ("mysql://x", "`mysql` is not a scheme of Redis"),
            ("redis://", "`redis://` names 0 servers"),
            ("redis://:pw@a,b", "`redis://a,b` names 2 servers"),
            ("redis://:pw@a:port", "`redis://a:port` is not an address of Redis"),
            ("redis+cluster://a/1", "`redis+cluster://a/1`: a cluster has one database, and no `/1`"),
        ];
        for (url, sentence) in table {
            assert_eq!(Address::parse(url).err().expect("an error").to_string(), sentence);
        }
        let context = ErrorContext { place: String::new(), timeout: TIMEOUT };
        for (url, sentence) in [
            ("redis+sentinel://a:1", "`redis+sentinel://a:1` names no primary: write it behind a `/`"),
            (
                "redis+sentinel://a:1/m/x",
                "`redis+sentinel://a:1/m/x` names the database `x`, which is not a number",
            ),
        ] {
            let error = Address::parse(url).unwrap().sentinels(&context).err().expect("an error");
            assert_eq!(error.to_string(), sentence);
        }
    }
}
