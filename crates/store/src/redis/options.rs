//! How a store on Redis is opened: its address, its namespace, and how long an answer may take.

use std::fmt;
use std::time::Duration;

use ::redis::cluster::ClusterClientBuilder;
use ::redis::sentinel::{SentinelClient, SentinelClientBuilder, SentinelServerType};
use ::redis::{Client, ConnectionInfo, IntoConnectionInfo, TlsMode};
use tidegate_core::limit::name::Namespace;

use super::lifecycle::caution;
use super::link::{Link, Source};
use super::listen::Speaker;
use super::places::{Layout, Places};
use super::schema;
use super::trouble::Whose;
use super::{Opened, Redis, SWEPT_EVERY};
use crate::error::StoreError;
use crate::lifecycle::namespace;
use crate::open::{check_login, ready_for_tls};
use crate::retention::Retention;

/// How long an answer is waited for.
const TIMEOUT: Duration = Duration::from_secs(2);
/// How long a call may take before the engine counts as away.
const DEADLINE: Duration = Duration::from_millis(50);
/// How often a call to a cluster is made again when its slot has moved or its server has gone.
const CLUSTER_RETRIES: u32 = 3;

/// How a store on Redis or Valkey is opened.
///
/// | address | engine |
/// |---|---|
/// | `redis://[user:password@]host[:port][/db]` | one server |
/// | `redis+sentinel://[user:password@]host:port[,host:port…]/primary[/db]` | whoever the sentinels say is the primary |
/// | `redis+cluster://[user:password@]host:port[,host:port…]` | a cluster, by some of its servers |
///
/// With `rediss` in place of `redis` the connection is encrypted (feature `redis-tls`).
#[derive(Clone)]
pub struct RedisOptions {
    url: String,
    /// `default` where none is named.
    namespace: Option<String>,
    timeout: Duration,
    deadline: Duration,
    retention: Retention,
    swept_every: Duration,
}

/// An address, taken apart.
struct Address {
    is_tls: bool,
    kind: AddressKind,
    /// Each server, with user and password.
    nodes: Vec<ConnectionInfo>,
    /// What stands behind the first `/`.
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
            swept_every: SWEPT_EVERY,
        }
    }

    /// Another namespace.
    #[must_use]
    pub fn namespace(mut self, name: impl Into<String>) -> Self {
        self.namespace = Some(name.into());
        self
    }

    /// How long an answer is waited for; two seconds unless said otherwise. Whoever waits less asks with a deadline of his
    /// own.
    #[must_use]
    pub const fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// How long a call may take before the engine [counts as away](crate::Capabilities::deadline); 50 ms unless said
    /// otherwise.
    #[must_use]
    pub const fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// How long usage and audit are kept. What is too old is forgotten a little at a time, by whoever draws and by
    /// [`sweep`](crate::Store::sweep).
    #[must_use]
    pub const fn retention(mut self, retention: Retention) -> Self {
        self.retention = retention;
        self
    }

    /// How often whoever draws looks for leases that are past their deadline: what a draw asks is counted with a long one.
    #[doc(hidden)]
    #[must_use]
    pub const fn swept_every(mut self, span: Duration) -> Self {
        self.swept_every = span;
        self
    }

    /// Opens it: connects, and looks whether what is there is ours. A server that may evict keys is
    /// [told of](crate::Store::caution), and warned of by an event of the `tracing` crate.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] for an address or a namespace that cannot be and for what a newer version has written,
    /// [`StoreError::Denied`] for a password or a certificate that is wrong, and [`StoreError::Unavailable`] where nobody
    /// answers.
    ///
    /// # Cancel safety
    /// Dropping the future leaves a namespace that is there or not; opening it again finds it.
    pub async fn open(self) -> Result<Redis, StoreError> {
        let namespace = self.check()?;
        let (link, layout, speaker) = self.connect().await?;
        let (layout, _) = schema::prepare(&link, &namespace, layout).await?;
        let caution = caution(&link).await?;
        if let Some(caution) = &caution {
            tracing::warn!(target: "tidegate::store", "{caution}");
        }
        let Self { deadline, retention, swept_every, .. } = self;
        let opened = Opened { deadline, retention, swept_every, caution };
        Ok(Redis::new((link, speaker), Places::new(&namespace, layout), opened))
    }

    /// Whether it can be, before anything is asked.
    pub(super) fn check(&self) -> Result<Namespace, StoreError> {
        if self.timeout.is_zero() {
            return Err(StoreError::Invalid {
                what: "a timeout of 0 s, with which nothing is answered".to_owned(),
            });
        }
        Address::parse(&self.url)?;
        self.retention.check()?;
        namespace(self.namespace.as_deref().unwrap_or("default"))
    }

    /// Whether a namespace was named.
    pub(super) const fn names_one(&self) -> bool {
        self.namespace.is_some()
    }

    /// The way to the engine, how a new namespace is laid out there, and whom to listen to.
    pub(super) async fn connect(&self) -> Result<(Link, Layout, Speaker), StoreError> {
        let address = Address::parse(&self.url)?;
        let whose = Whose { place: address.place.clone(), timeout: self.timeout };
        let layout = if address.kind == AddressKind::Cluster { Layout::Trees } else { Layout::One };
        let (link, speaker) = self.link(address, whose).await?;
        Ok((link, layout, speaker))
    }

    async fn link(&self, address: Address, whose: Whose) -> Result<(Link, Speaker), StoreError> {
        let bad = |error| whose.trouble(error);
        match address.kind {
            AddressKind::Server => {
                let node = address.nodes.into_iter().next();
                let node = node
                    .ok_or_else(|| StoreError::Invalid { what: "an address without a server".to_owned() })?;
                let client = Client::open(node.clone()).map_err(bad)?;
                Ok((Link::one(Source::Server(Box::new(client)), whose), Speaker::Servers(vec![node])))
            }
            AddressKind::Cluster => {
                // Whether they are spoken to over TLS is in their addresses.
                let builder = ClusterClientBuilder::new(address.nodes.clone())
                    .retries(CLUSTER_RETRIES)
                    .connection_timeout(self.timeout)
                    .response_timeout(self.timeout);
                let client = builder.build().map_err(bad)?;
                let connection = client.get_async_connection().await.map_err(bad)?;
                Ok((Link::cluster(connection, whose), Speaker::Servers(address.nodes)))
            }
            AddressKind::Sentinels => {
                // One to ask who the primary is for calls, and one for what is heard.
                let [calls, heard] = [address.sentinels(&whose)?, address.sentinels(&whose)?].map(Box::new);
                Ok((Link::one(Source::Sentinels(calls), whose), Speaker::Sentinels(heard)))
            }
        }
    }
}

impl fmt::Debug for RedisOptions {
    /// Without the address, which may have a password in it.
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
        let (is_tls, kind) = match scheme {
            "redis" => (false, AddressKind::Server),
            "rediss" => (true, AddressKind::Server),
            "redis+sentinel" => (false, AddressKind::Sentinels),
            "rediss+sentinel" => (true, AddressKind::Sentinels),
            "redis+cluster" => (false, AddressKind::Cluster),
            "rediss+cluster" => (true, AddressKind::Cluster),
            other => return Err(invalid(format!("`{}` is no scheme of Redis", other.escape_debug()))),
        };
        if is_tls {
            ready_for_tls()?;
        }
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        // A password may hold `@`, a host does not.
        let (login, hosts) = authority.rsplit_once('@').unwrap_or(("", authority));
        let place = format!("{scheme}://{hosts}{}{path}", if path.is_empty() { "" } else { "/" });
        if kind == AddressKind::Cluster && !path.is_empty() {
            return Err(invalid(format!("`{place}`: a cluster has one database, and no `/{path}`")));
        }
        let node = |host: &str| {
            let login = if login.is_empty() { String::new() } else { format!("{login}@") };
            let path = if kind == AddressKind::Server { path } else { "" };
            let url = format!("{}://{login}{host}/{path}", if is_tls { "rediss" } else { "redis" });
            // The error may quote the address, and with it the password.
            let bad = |_| invalid(format!("`{place}` is no address of Redis"));
            url.into_connection_info().map_err(bad)
        };
        let hosts: Vec<&str> = hosts.split(',').filter(|host| !host.is_empty()).collect();
        if hosts.is_empty() || (kind == AddressKind::Server && hosts.len() > 1) {
            return Err(invalid(format!("`{place}` names {} servers", hosts.len())));
        }
        let nodes = hosts.into_iter().map(node).collect::<Result<Vec<_>, _>>()?;
        Ok(Self { is_tls, kind, nodes, path: path.to_owned(), place })
    }

    /// Whoever can say which server is the primary.
    fn sentinels(&self, whose: &Whose) -> Result<SentinelClient, StoreError> {
        let bad = |error| whose.trouble(error);
        let (primary, db) = self.path.split_once('/').unwrap_or((&self.path, "0"));
        if primary.is_empty() {
            let what = format!("`{}` names no primary: write it behind a `/`", self.place);
            return Err(StoreError::Invalid { what });
        }
        let Ok(db) = db.parse() else {
            let what = format!("`{}` names the database `{db}`, which is no number", self.place);
            return Err(StoreError::Invalid { what });
        };
        let nodes = self.nodes.iter().map(|node| node.addr().clone());
        let builder = SentinelClientBuilder::new(nodes, primary, SentinelServerType::Master);
        let mut builder = builder.map_err(bad)?.set_client_to_redis_db(db);
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
        builder.build().map_err(bad)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_taken_apart_and_its_password_is_not_shown() {
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
            ("mysql://x", "`mysql` is no scheme of Redis"),
            ("redis://", "`redis://` names 0 servers"),
            ("redis://:pw@a,b", "`redis://a,b` names 2 servers"),
            ("redis://:pw@a:port", "`redis://a:port` is no address of Redis"),
            ("redis+cluster://a/1", "`redis+cluster://a/1`: a cluster has one database, and no `/1`"),
        ];
        for (url, sentence) in table {
            assert_eq!(Address::parse(url).err().expect("an error").to_string(), sentence);
        }
        let whose = Whose { place: String::new(), timeout: TIMEOUT };
        for (url, sentence) in [
            ("redis+sentinel://a:1", "`redis+sentinel://a:1` names no primary: write it behind a `/`"),
            (
                "redis+sentinel://a:1/m/x",
                "`redis+sentinel://a:1/m/x` names the database `x`, which is no number",
            ),
        ] {
            let error = Address::parse(url).unwrap().sentinels(&whose).err().expect("an error");
            assert_eq!(error.to_string(), sentence);
        }
    }
}
