//! Options of a store in PostgreSQL, and its address.

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tidegate_core::excerpt::excerpt;

use deadpool_postgres::{Manager, ManagerConfig, Pool, RecyclingMethod, Runtime, Timeouts};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio_postgres::config::Host;
use tokio_postgres::tls::{MakeTlsConnect, TlsConnect};
use tokio_postgres::{Config, NoTls, Socket};

use super::errors::{pool_error, server_error};
use super::schema::MigrationTimeout;
use super::sql::Sql;
use super::steps::TIMEOUT;
use super::{Counters, DEADLINE, Inner, Postgres, StoreGuard, listen, schema};
use crate::clock::WallClock;
use crate::error::StoreError;
use crate::retention::Retention;
use crate::setters::setters;

/// The default number of connections.
const CONNECTIONS: usize = 8;
const CONNECTIONS_MAX: usize = 1_000;
/// One in this many connections, within the maximum, is for draws and settles. Two or more let one batch
/// compute while another waits for the disk; fewer connections make larger batches.
const BATCHES_SHARE: usize = 4;
const BATCHES_MAX: usize = 4;
/// The longest name of a schema: the server truncates long identifiers, and the channel contains it too.
const SCHEMA_MAX: usize = 40;
/// The default time to get or open a connection.
const CONNECTED_WITHIN: Duration = Duration::from_secs(2);

/// Opens a store in PostgreSQL.
///
/// ```no_run
/// use tidegate_store::PostgresOptions;
///
/// # async fn example() -> Result<(), tidegate_store::StoreError> {
/// let url = "postgres://limits:secret@db.internal/limits";
/// let store = PostgresOptions::new(url).schema("limits").connections(16).namespace("prod").open().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
#[must_use = "options do nothing until they are opened"]
pub struct PostgresOptions {
    url: String,
    pub(super) schema: String,
    pub(super) namespace: String,
    connections: usize,
    retention: Retention,
    connected_within: Duration,
    deadline: Duration,
    timeout: Duration,
    clock: Option<Arc<dyn WallClock>>,
}

impl PostgresOptions {
    /// Options for the database at `url`, in the syntax of PostgreSQL's own programs.
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            schema: "tidegate".to_owned(),
            namespace: "default".to_owned(),
            connections: CONNECTIONS,
            retention: Retention::default(),
            connected_within: CONNECTED_WITHIN,
            deadline: DEADLINE,
            timeout: TIMEOUT,
            clock: None,
        }
    }

    /// Adds an option of the driver to the address.
    pub(crate) fn driver_option(mut self, key: &str, value: &str) -> Self {
        let separator = if self.url.contains('?') { '&' } else { '?' };
        self.url = format!("{}{separator}{key}={value}", self.url);
        self
    }

    /// Sets the schema, `tidegate` by default. It is created if it does not exist.
    pub fn schema(mut self, name: impl Into<String>) -> Self {
        self.schema = name.into();
        self
    }

    /// Sets the namespace, `default` by default.
    pub fn namespace(mut self, name: impl Into<String>) -> Self {
        self.namespace = name.into();
        self
    }

    setters! {
        /// Sets the most connections, 8 by default, besides the one that listens for changes. A quarter of them,
        /// at most four, are for draws and settles, which are sent in batches: fewer connections make larger
        /// batches. The others are for listings and changes.
        connections: usize,
        /// Sets how long usage and audit are kept.
        retention: Retention,
        /// Sets the time to get or open a connection; tests on busy machines need longer.
        #[doc(hidden)]
        connected_within: Duration,
        /// Sets how long a statement may take before the server [counts as
        /// unavailable](crate::Capabilities::deadline), 50 ms by default.
        deadline: Duration,
        /// Sets the timeout of a statement; tests on busy machines need longer.
        #[doc(hidden)]
        timeout: Duration,
    }

    /// Replaces the server's clock in tests. Disables background cleanup.
    #[doc(hidden)]
    pub fn clock(mut self, clock: impl WallClock) -> Self {
        self.clock = Some(Arc::new(clock));
        self
    }

    /// Opens the store. Its background tasks run on the current runtime.
    ///
    /// # Errors
    /// As [`Postgres::open`].
    ///
    /// # Cancel safety
    /// Dropping the future leaves the schema either as it was or complete.
    pub async fn open(self) -> Result<Postgres, StoreError> {
        self.open_over(NoTls).await
    }

    pub(crate) async fn open_over<T>(self, tls: T) -> Result<Postgres, StoreError>
    where
        T: MakeTlsConnect<Socket> + Clone + Sync + Send + 'static,
        T::Stream: Sync + Send,
        T::TlsConnect: Sync + Send,
        <T::TlsConnect as TlsConnect<Socket>>::Future: Send,
    {
        self.check()?;
        let config = self.config()?;
        let place = place(&config);
        let sql = Sql::new(&self.schema);
        let writers = (self.connections / BATCHES_SHARE).clamp(1, BATCHES_MAX);
        let pool = |connections: usize| pool(&config, tls.clone(), connections);
        let inner = Arc::new(Inner {
            writers: pool(writers)?,
            readers: pool((self.connections - writers).max(1))?,
            place,
            sql,
            clock: self.clock,
            retention: self.retention,
            deadline: self.deadline,
            timeout: self.timeout,
            batches_max: writers,
            handle: Handle::current(),
            is_closed: AtomicBool::new(false),
            counters: Counters::default(),
            open_namespaces: Mutex::default(),
            stop_signal: Notify::new(),
        });
        {
            let mut client = inner.readers.get().await.map_err(|error| pool_error(&inner.place, error))?;
            schema::prepare(&mut client, &inner.sql, &inner.place, MigrationTimeout::Default).await?;
        }
        let guard = Arc::new(StoreGuard(Arc::clone(&inner)));
        let store = Postgres::in_namespace(Arc::clone(&inner), Arc::clone(&guard), &self.namespace).await?;
        inner.handle.spawn(listen::run(config, tls, inner.clone(), Arc::downgrade(&guard)));
        Ok(store)
    }

    pub(super) fn check(&self) -> Result<(), StoreError> {
        let Self { schema, connections, retention, .. } = self;
        retention.check()?;
        let is_name = |letter: char| letter.is_ascii_alphanumeric() || letter == '_' || letter == '-';
        if schema.is_empty() || schema.len() > SCHEMA_MAX || !schema.chars().all(is_name) {
            let shown = excerpt(schema);
            let what = format!("the schema `{shown}`: it has 1..={SCHEMA_MAX} letters, digits, `_` and `-`");
            return Err(StoreError::Invalid { what });
        }
        if *connections < 2 || *connections > CONNECTIONS_MAX {
            let what = format!("{connections} connections, outside 2..={CONNECTIONS_MAX}");
            return Err(StoreError::Invalid { what });
        }
        Ok(())
    }

    pub(super) fn config(&self) -> Result<Config, StoreError> {
        let mut config = Config::from_str(&self.url).map_err(|error| server_error("the address", error))?;
        if config.get_hosts().is_empty() {
            return Err(StoreError::Invalid {
                what: "the address of a PostgreSQL server names no host".to_owned(),
            });
        }
        let ours = server_timeouts(self.timeout);
        let options = match config.get_options() {
            Some(theirs) => format!("{ours} {theirs}"),
            None => ours,
        };
        config.options(options).connect_timeout(self.connected_within);
        if config.get_application_name().is_none() {
            config.application_name("tidegate");
        }
        Ok(config)
    }
}

impl fmt::Debug for PostgresOptions {
    /// Omits the address, which may contain a password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresOptions")
            .field("schema", &self.schema)
            .field("namespace", &self.namespace)
            .field("connections", &self.connections)
            .field("retention", &self.retention)
            .finish_non_exhaustive()
    }
}

/// Server-side timeouts that end abandoned statements, shortly after our own.
fn server_timeouts(ours: Duration) -> String {
    let (lock, statement, idle) = (ours.as_millis(), ours.as_millis() + 1_000, 2 * ours.as_millis());
    format!(
        "-c statement_timeout={statement} -c lock_timeout={lock} -c idle_in_transaction_session_timeout={idle}"
    )
}

/// A pool of `connections` connections.
pub(super) fn pool<T>(config: &Config, tls: T, connections: usize) -> Result<Pool, StoreError>
where
    T: MakeTlsConnect<Socket> + Clone + Sync + Send + 'static,
    T::Stream: Sync + Send,
    T::TlsConnect: Sync + Send,
    <T::TlsConnect as TlsConnect<Socket>>::Future: Send,
{
    let recycling = ManagerConfig { recycling_method: RecyclingMethod::Fast };
    let manager = Manager::from_config(config.clone(), tls, recycling);
    let wait = config.get_connect_timeout().copied();
    Pool::builder(manager)
        .max_size(connections)
        .timeouts(Timeouts { wait, create: wait, recycle: wait })
        .runtime(Runtime::Tokio1)
        .build()
        .map_err(|error| StoreError::Invalid { what: error.to_string() })
}

/// The address without user and password: `db.internal:5432/limits`.
pub(super) fn place(config: &Config) -> String {
    let host = |host: &Host| match host {
        Host::Tcp(name) => name.clone(),
        Host::Unix(path) => path.display().to_string(),
    };
    let ports = config.get_ports();
    let port = |number: usize| ports.get(number).or(ports.first()).copied().unwrap_or(5_432);
    let hosts = config.get_hosts().iter().enumerate();
    let hosts: Vec<_> = hosts.map(|(number, name)| format!("{}:{}", host(name), port(number))).collect();
    let database = config.get_dbname().or(config.get_user()).unwrap_or_default();
    format!("{}/{database}", hosts.join(","))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn invalid_options_are_refused_without_connecting() {
        let url = "postgres://me:secret@localhost/x";
        let table = [
            (PostgresOptions::new("postgres:///x"), "the address of a PostgreSQL server names no host"),
            (PostgresOptions::new("postgres://a:port/x"), "the address: invalid"),
            (PostgresOptions::new(url).schema("a\"b"), "the schema `a\\\"b`: it has 1..=40 letters"),
            (PostgresOptions::new(url).schema(""), "the schema ``"),
            (PostgresOptions::new(url).connections(1), "1 connections, outside 2..=1000"),
        ];
        for (options, sentence) in table {
            let error = options.open().await.unwrap_err();
            assert!(matches!(error, StoreError::Invalid { .. }), "{error:?}");
            assert!(error.to_string().starts_with(sentence), "{error}");
        }
    }

    #[test]
    fn server_timeouts_follow_client_timeout() {
        let expected =
            "-c statement_timeout=6000 -c lock_timeout=5000 -c idle_in_transaction_session_timeout=10000";
        assert_eq!(
            PostgresOptions::new("postgres://me@one/x").config().unwrap().get_options(),
            Some(expected)
        );
    }

    #[test]
    fn password_is_never_shown() {
        let options = PostgresOptions::new("postgres://me:secret@one,two:7/x");
        assert_eq!(place(&options.config().unwrap()), "one:5432,two:7/x");
        assert!(!format!("{options:?}").contains("secret"));
    }
}
