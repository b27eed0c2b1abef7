//! Administration of a schema: init, check, upgrade and list. Checks run in read-only transactions.

use std::fmt;
use std::time::Duration;

use deadpool_postgres::{Client, Pool};
use tidegate_core::time::Stamp;
use tokio_postgres::tls::{MakeTlsConnect, TlsConnect};
use tokio_postgres::{NoTls, Row, Socket, Transaction};

use super::errors::{get, pool_error, server_error};
use super::options::{PostgresOptions, place, pool};
use super::schema::{self, CURRENT, MigrationTimeout};
use super::sql::Sql;
use crate::clock::{HostWall, WallClock};
use crate::error::StoreError;
use crate::lifecycle::{
    CheckReport, ClockDifference, InitPart, InitReport, LISTED_MAX, Lifecycle, NamespaceList, Part, Setting,
    Space, StoreLocation, UpgradePart, UpgradeReport, is_enough, namespace, not_there, other_version,
};
use crate::reply::Reply;

const WANTED: u64 = CURRENT.unsigned_abs();

/// Manages a schema.
pub(crate) struct PostgresLifecycle {
    /// A pool of one connection, opened when needed.
    pool: Pool,
    place: String,
    sql: Sql,
    namespace: String,
}

impl PostgresOptions {
    /// The administration of this store.
    pub(crate) fn lifecycle(self) -> Result<PostgresLifecycle, StoreError> {
        self.lifecycle_over(NoTls)
    }

    pub(crate) fn lifecycle_over<T>(self, tls: T) -> Result<PostgresLifecycle, StoreError>
    where
        T: MakeTlsConnect<Socket> + Clone + Sync + Send + 'static,
        T::Stream: Sync + Send,
        T::TlsConnect: Sync + Send,
        <T::TlsConnect as TlsConnect<Socket>>::Future: Send,
    {
        self.check()?;
        namespace(&self.namespace)?;
        let config = self.config()?;
        let (place, sql) = (place(&config), Sql::new(&self.schema));
        Ok(PostgresLifecycle { pool: pool(&config, tls, 1)?, place, sql, namespace: self.namespace })
    }
}

impl Lifecycle for PostgresLifecycle {
    fn init(&self) -> Reply<'_, InitReport> {
        Reply::later(self.init_schema())
    }

    fn check(&self) -> Reply<'_, CheckReport> {
        Reply::later(self.check_schema())
    }

    fn upgrade(&self) -> Reply<'_, UpgradeReport> {
        Reply::later(self.upgrade_schema())
    }

    fn list(&self) -> Reply<'_, NamespaceList> {
        Reply::later(self.list_namespaces())
    }
}

impl PostgresLifecycle {
    fn whereabouts(&self) -> StoreLocation {
        StoreLocation { engine: "postgres", place: self.place.clone() }
    }

    fn schema(&self) -> Part {
        Part::new("schema", self.sql.schema())
    }

    fn namespace(&self) -> Part {
        Part::new("namespace", &self.namespace)
    }

    fn store_error(&self) -> impl Fn(tokio_postgres::Error) -> StoreError {
        |error| server_error(&self.place, error)
    }

    async fn connect(&self) -> Result<Client, StoreError> {
        self.pool.get().await.map_err(|error| pool_error(&self.place, error))
    }

    /// A read-only transaction.
    async fn reading<'a>(
        &self,
        client: &'a mut Client,
    ) -> Result<deadpool_postgres::Transaction<'a>, StoreError> {
        client.build_transaction().read_only(true).start().await.map_err(self.store_error())
    }

    async fn init_schema(&self) -> Result<InitReport, StoreError> {
        let mut client = self.connect().await?;
        let found = schema::version(&mut client, &self.sql, &self.place).await?;
        if found != 0 && found != CURRENT {
            return Err(self.other_version(found));
        }
        let from = schema::prepare(&mut client, &self.sql, &self.place, MigrationTimeout::Default).await?;
        let make = "INSERT INTO @.namespaces (name) SELECT $1
                    WHERE NOT EXISTS (SELECT 1 FROM @.namespaces WHERE name = $1) ON CONFLICT DO NOTHING";
        let rows =
            client.execute(&self.sql.text(make), &[&self.namespace]).await.map_err(self.store_error())?;
        let parts = vec![
            InitPart { part: self.schema(), is_new: from == 0 },
            InitPart { part: self.namespace(), is_new: rows > 0 },
        ];
        Ok(InitReport { of: self.whereabouts(), parts, schema: WANTED })
    }

    fn other_version(&self, found: i64) -> StoreError {
        let place = format!("`{}` at {}", self.sql.schema(), self.place);
        other_version(&place, found.unsigned_abs(), WANTED)
    }

    async fn check_schema(&self) -> Result<CheckReport, StoreError> {
        let mut client = self.connect().await?;
        let reading = self.reading(&mut client).await?;
        let clock = "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint";
        let clock = reading.prepare(clock).await.map_err(self.store_error())?;
        let before = HostWall.now();
        let row = reading.query_one(&clock, &[]).await.map_err(self.store_error())?;
        let after = HostWall.now();
        let server_micros: i64 = get(&row, 0)?;
        let settings = "SELECT current_setting('server_version'), current_setting('synchronous_commit'),
                        current_setting('fsync'), current_setting('full_page_writes'), pg_is_in_recovery()";
        let found = reading.query_one(settings, &[]).await.map_err(self.store_error())?;
        let version = schema::version_within(&reading, &self.sql, &self.place).await?;
        let mut missing = Vec::new();
        if version == 0 {
            missing.push(self.schema());
        }
        if version == 0 || !self.has_namespace(&reading).await? {
            missing.push(self.namespace());
        }
        let clock_offset = if version == 0 {
            None
        } else {
            let clock = self.sql.text("SELECT ahead FROM @.clock WHERE id = 1");
            let row = reading.query_one(&clock, &[]).await.map_err(self.store_error())?;
            Some(Duration::from_micros(get::<i64>(&row, 0)?.unsigned_abs()))
        };
        let server: String = get(&found, 0)?;
        let settings = settings_of(&found)?;
        let is_durable = settings.iter().all(|setting| setting.danger.is_none());
        let durability = if is_durable {
            "acknowledged writes are on the server's disk"
        } else {
            "acknowledged writes may be lost: see the dangers of the settings"
        };
        Ok(CheckReport {
            of: self.whereabouts(),
            server: format!("PostgreSQL {server}"),
            schema: (version > 0).then_some(version.unsigned_abs()),
            schema_wanted: WANTED,
            namespace: self.namespace.clone(),
            missing,
            durability: durability.to_owned(),
            settings,
            clock: Some(ClockDifference::between(
                before,
                Stamp::from_micros(server_micros.unsigned_abs()),
                after,
            )),
            clock_offset,
        })
    }

    async fn has_namespace(&self, reading: &Transaction<'_>) -> Result<bool, StoreError> {
        let find = self.sql.text("SELECT 1 FROM @.namespaces WHERE name = $1");
        let found = reading.query_opt(&find, &[&self.namespace]).await.map_err(self.store_error())?;
        Ok(found.is_some())
    }

    async fn upgrade_schema(&self) -> Result<UpgradeReport, StoreError> {
        let mut client = self.connect().await?;
        let found = schema::version(&mut client, &self.sql, &self.place).await?;
        if found == 0 {
            return Err(not_there(&format!("{} at {}", self.schema(), self.place)));
        }
        let from = schema::prepare(&mut client, &self.sql, &self.place, MigrationTimeout::Unlimited).await?;
        let parts = vec![UpgradePart { part: self.schema(), from: from.unsigned_abs() }];
        Ok(UpgradeReport { of: self.whereabouts(), parts, schema: WANTED })
    }

    async fn list_namespaces(&self) -> Result<NamespaceList, StoreError> {
        let mut client = self.connect().await?;
        let reading = self.reading(&mut client).await?;
        // Other programs have tables of versions too; ours are beside limits, leases and namespaces. A schema
        // that we may not read is only named.
        let schemas = "SELECT n.nspname::text, has_schema_privilege(n.oid, 'USAGE') AND
                              (SELECT bool_and(has_table_privilege(t.oid, 'SELECT')) FROM pg_class t
                               WHERE t.relnamespace = n.oid AND t.relname IN ('versions', 'namespaces', 'entities', 'policies'))
                       FROM pg_namespace n WHERE 4 = (SELECT count(*) FROM pg_class t WHERE t.relnamespace = n.oid
                            AND t.relkind = 'r' AND t.relname IN ('versions', 'namespaces', 'leases', 'meters'))
                       ORDER BY n.nspname LIMIT $1";
        let most = i64::from(LISTED_MAX) + 1;
        let schemas = reading.query(schemas, &[&most]).await.map_err(self.store_error())?;
        let mut spaces = Vec::new();
        for schema in &schemas {
            if is_enough(&spaces) {
                break;
            }
            let (name, is_readable): (String, bool) = (get(schema, 0)?, get(schema, 1)?);
            let bare = Space { within: Some(name.clone()), ..Space::default() };
            if is_readable {
                spaces.extend(self.namespaces_in(&reading, &Sql::new(&name), bare).await?);
            } else {
                spaces.push(bare);
            }
        }
        Ok(NamespaceList::cut(self.whereabouts(), WANTED, spaces))
    }

    /// The namespaces of a schema; the schema alone if it has none or is of a newer version.
    async fn namespaces_in(
        &self,
        reading: &Transaction<'_>,
        sql: &Sql,
        bare: Space,
    ) -> Result<Vec<Space>, StoreError> {
        let version = sql.text("SELECT coalesce(max(version), 0) FROM @.versions");
        let version = reading.query_one(&version, &[]).await.map_err(self.store_error())?;
        let version: i64 = get(&version, 0)?;
        let bare = Space { schema: Some(version.unsigned_abs()), ..bare };
        if version > CURRENT {
            return Ok(vec![bare]);
        }
        let select = "SELECT n.name, n.version, (SELECT count(*) FROM @.entities e WHERE e.namespace = n.id),
                      (SELECT count(*) FROM @.policies p WHERE p.namespace = n.id)
                      FROM @.namespaces n ORDER BY n.name LIMIT $1";
        let most = i64::from(LISTED_MAX) + 1;
        let rows = reading.query(&sql.text(select), &[&most]).await.map_err(self.store_error())?;
        if rows.is_empty() {
            return Ok(vec![bare]);
        }
        let space = |row: &Row| {
            let number = |place| get::<i64>(row, place).map(|number| Some(number.unsigned_abs()));
            Ok(Space {
                namespace: get(row, 0)?,
                changes: number(1)?,
                entities: number(2)?,
                policies: number(3)?,
                ..bare.clone()
            })
        };
        rows.iter().map(space).collect()
    }
}

/// The server's settings and their dangers.
fn settings_of(found: &Row) -> Result<Vec<Setting>, StoreError> {
    let [commit, fsync, pages]: [String; 3] = [get(found, 1)?, get(found, 2)?, get(found, 3)?];
    let is_standby: bool = get(found, 4)?;
    let mut settings = vec![
        Setting::new("synchronous_commit", &commit)
            .danger_if(commit == "off", "the last acknowledged writes are lost when the server crashes"),
        Setting::new("fsync", &fsync)
            .danger_if(fsync == "off", "the database may be damaged when the machine stops"),
        Setting::new("full_page_writes", &pages)
            .danger_if(pages == "off", "pages may be half written, unnoticed, when the machine stops"),
    ];
    if is_standby {
        let standby = Setting::new("in_recovery", "on");
        settings.push(standby.danger_if(true, "this server is a standby and rejects writes"));
    }
    Ok(settings)
}

impl fmt::Debug for PostgresLifecycle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresLifecycle")
            .field("place", &self.place)
            .field("schema", &self.sql.schema())
            .field("namespace", &self.namespace)
            .finish_non_exhaustive()
    }
}
