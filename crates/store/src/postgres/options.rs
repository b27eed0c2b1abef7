//! How a server is reached.

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use deadpool_postgres::{Manager, ManagerConfig, Pool, RecyclingMethod, Runtime, Timeouts};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio_postgres::config::Host;
use tokio_postgres::tls::{MakeTlsConnect, TlsConnect};
use tokio_postgres::{Config, NoTls, Socket};

use super::lanes::PATIENCE;
use super::schema::Patience;
use super::sql::Sql;
use super::trouble::{of_pool, of_server};
use super::{Alive, Counters, DEADLINE, Inner, Postgres, listen, schema};
use crate::clock::WallClock;
use crate::error::StoreError;
use crate::retention::Retention;

/// Connections at a time, unless said otherwise.
const CONNECTIONS: usize = 8;
const CONNECTIONS_MAX: usize = 1_000;
/// One of so many connections is for draws and settles, which go together, and no more than so many: one computes while another
/// waits for the disk, and the fewer there are the more go together.
const LANES_SHARE: usize = 4;
const LANES_MAX: usize = 4;
/// A schema's name is at most this long: the server cuts longer ones, and the channel has it too.
const SCHEMA_MAX: usize = 40;
/// A connection is waited for and made within this, unless said otherwise.
const CONNECTED_WITHIN: Duration = Duration::from_secs(2);

/// How a server is reached.
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
    patience: Duration,
    clock: Option<Arc<dyn WallClock>>,
}

impl PostgresOptions {
    /// The database at `url`, as PostgreSQL's own programs write it.
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            schema: "tidegate".to_owned(),
            namespace: "default".to_owned(),
            connections: CONNECTIONS,
            retention: Retention::default(),
            connected_within: CONNECTED_WITHIN,
            deadline: DEADLINE,
            patience: PATIENCE,
            clock: None,
        }
    }

    /// The schema that all of it is in, `tidegate` unless said otherwise. It is made if it is not there.
    pub fn schema(mut self, name: impl Into<String>) -> Self {
        self.schema = name.into();
        self
    }

    /// The namespace, `default` unless said otherwise.
    pub fn namespace(mut self, name: impl Into<String>) -> Self {
        self.namespace = name.into();
        self
    }

    /// At most so many connections, by default 8, and one more that listens for changes. A quarter of them, at most four, are for
    /// draws and settles: they go together, and the fewer connections they have the more do. The others are for listings and
    /// changes.
    pub const fn connections(mut self, count: usize) -> Self {
        self.connections = count;
        self
    }

    /// How long usage and audit are kept.
    pub const fn retention(mut self, retention: Retention) -> Self {
        self.retention = retention;
        self
    }

    /// A connection is waited for and made within this: on a machine that has much else to do, tests wait longer.
    #[doc(hidden)]
    pub const fn connected_within(mut self, span: Duration) -> Self {
        self.connected_within = span;
        self
    }

    /// How long a statement may take before the server [counts as unavailable](crate::Capabilities::deadline); 50 ms unless set.
    pub const fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// A statement that takes longer is given up: on a machine that has much else to do, tests wait longer.
    #[doc(hidden)]
    pub const fn patience(mut self, span: Duration) -> Self {
        self.patience = span;
        self
    }

    /// The clock to go by in the place of the server's, for tests. Nothing is tidied in the background then.
    #[doc(hidden)]
    pub fn clock(mut self, clock: impl WallClock) -> Self {
        self.clock = Some(Arc::new(clock));
        self
    }

    /// Opens it, in the runtime that this is called in: what it does in the background runs there.
    ///
    /// # Errors
    /// As [`Postgres::open`].
    ///
    /// # Cancel safety
    /// Dropping the future leaves a schema that is whole, and perhaps new.
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
        let lanes = (self.connections / LANES_SHARE).clamp(1, LANES_MAX);
        let pool = |connections: usize| pool(&config, tls.clone(), connections);
        let inner = Arc::new(Inner {
            writers: pool(lanes)?,
            readers: pool((self.connections - lanes).max(1))?,
            place,
            sql,
            clock: self.clock,
            retention: self.retention,
            deadline: self.deadline,
            patience: self.patience,
            lanes,
            handle: Handle::current(),
            is_closed: AtomicBool::new(false),
            counters: Counters::default(),
            announced: Mutex::default(),
            stirred: Notify::new(),
        });
        {
            let mut client = inner.readers.get().await.map_err(|error| of_pool(&inner.place, error))?;
            schema::prepare(&mut client, &inner.sql, &inner.place, Patience::AsUsual).await?;
        }
        let alive = Arc::new(Alive(Arc::clone(&inner)));
        let store = Postgres::in_namespace(Arc::clone(&inner), Arc::clone(&alive), &self.namespace).await?;
        inner.handle.spawn(listen::run(config, tls, inner.clone(), Arc::downgrade(&alive)));
        Ok(store)
    }

    pub(super) fn check(&self) -> Result<(), StoreError> {
        let Self { schema, connections, retention, .. } = self;
        retention.check()?;
        let is_name = |letter: char| letter.is_ascii_alphanumeric() || letter == '_' || letter == '-';
        if schema.is_empty() || schema.len() > SCHEMA_MAX || !schema.chars().all(is_name) {
            let shown: String = schema.chars().take(80).flat_map(char::escape_debug).collect();
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
        let mut config = Config::from_str(&self.url).map_err(|error| of_server("the address", error))?;
        if config.get_hosts().is_empty() {
            return Err(StoreError::Invalid {
                what: "the address of a PostgreSQL server names no host".to_owned(),
            });
        }
        let ours = server_patience(self.patience);
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
    /// Without the address, which may have a password in it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresOptions")
            .field("schema", &self.schema)
            .field("namespace", &self.namespace)
            .field("connections", &self.connections)
            .field("retention", &self.retention)
            .finish_non_exhaustive()
    }
}

/// The server itself gives up what takes longer: we have by then.
fn server_patience(ours: Duration) -> String {
    let (lock, statement, idle) = (ours.as_millis(), ours.as_millis() + 1_000, 2 * ours.as_millis());
    format!(
        "-c statement_timeout={statement} -c lock_timeout={lock} -c idle_in_transaction_session_timeout={idle}"
    )
}

/// A pool of so many connections.
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

/// Where a server is, as it may be shown: `db.internal:5432/limits`.
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
    async fn what_cannot_be_is_refused_before_anything_is_asked() {
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
    fn the_server_gives_up_after_we_have() {
        let told =
            "-c statement_timeout=6000 -c lock_timeout=5000 -c idle_in_transaction_session_timeout=10000";
        assert_eq!(PostgresOptions::new("postgres://me@one/x").config().unwrap().get_options(), Some(told));
    }

    #[test]
    fn neither_a_place_nor_options_show_a_password() {
        let options = PostgresOptions::new("postgres://me:secret@one,two:7/x");
        assert_eq!(place(&options.config().unwrap()), "one:5432,two:7/x");
        assert!(!format!("{options:?}").contains("secret"));
    }
}
