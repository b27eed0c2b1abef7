//! A schema's life beside its use. Whoever looks does so in transactions that can only read.

use std::fmt;
use std::time::Duration;

use deadpool_postgres::{Client, Pool};
use tidegate_core::time::Stamp;
use tokio_postgres::tls::{MakeTlsConnect, TlsConnect};
use tokio_postgres::{NoTls, Row, Socket, Transaction};

use super::options::{PostgresOptions, place, pool};
use super::schema::{self, CURRENT, Patience};
use super::sql::Sql;
use super::trouble::{get, of_pool, of_server};
use crate::clock::{HostWall, WallClock};
use crate::error::StoreError;
use crate::lifecycle::{
    Checked, ClockDifference, LISTED_MAX, Lifecycle, Listed, Made, MadePart, Part, Setting, Space, Upgraded,
    UpgradedPart, Whereabouts, is_enough, namespace, not_there, other_version,
};
use crate::reply::Reply;

const WANTED: u64 = CURRENT.unsigned_abs();

/// What an operator does with a schema.
pub(crate) struct PostgresLifecycle {
    /// Of one connection, which is made when it is needed.
    pool: Pool,
    place: String,
    sql: Sql,
    namespace: String,
}

impl PostgresOptions {
    /// What an operator does with it.
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
    fn init(&self) -> Reply<'_, Made> {
        Reply::later(self.make())
    }

    fn check(&self) -> Reply<'_, Checked> {
        Reply::later(self.look())
    }

    fn upgrade(&self) -> Reply<'_, Upgraded> {
        Reply::later(self.bring_up_to_date())
    }

    fn list(&self) -> Reply<'_, Listed> {
        Reply::later(self.spaces())
    }
}

impl PostgresLifecycle {
    fn whereabouts(&self) -> Whereabouts {
        Whereabouts { engine: "postgres", place: self.place.clone() }
    }

    fn schema(&self) -> Part {
        Part::new("schema", self.sql.schema())
    }

    fn namespace(&self) -> Part {
        Part::new("namespace", &self.namespace)
    }

    fn trouble(&self) -> impl Fn(tokio_postgres::Error) -> StoreError {
        |error| of_server(&self.place, error)
    }

    async fn connect(&self) -> Result<Client, StoreError> {
        self.pool.get().await.map_err(|error| of_pool(&self.place, error))
    }

    /// A transaction in which the server itself refuses to write.
    async fn reading<'a>(
        &self,
        client: &'a mut Client,
    ) -> Result<deadpool_postgres::Transaction<'a>, StoreError> {
        client.build_transaction().read_only(true).start().await.map_err(self.trouble())
    }

    async fn make(&self) -> Result<Made, StoreError> {
        let mut client = self.connect().await?;
        let found = {
            let reading = self.reading(&mut client).await?;
            schema::version_within(&reading, &self.sql, &self.place).await?
        };
        if found != 0 && found != CURRENT {
            return Err(self.other_version(found));
        }
        let from = schema::prepare(&mut client, &self.sql, &self.place, Patience::AsUsual).await?;
        let make = "INSERT INTO @.namespaces (name) SELECT $1
                    WHERE NOT EXISTS (SELECT 1 FROM @.namespaces WHERE name = $1) ON CONFLICT DO NOTHING";
        let rows = client.execute(&self.sql.text(make), &[&self.namespace]).await.map_err(self.trouble())?;
        let parts = vec![
            MadePart { part: self.schema(), is_new: from == 0 },
            MadePart { part: self.namespace(), is_new: rows > 0 },
        ];
        Ok(Made { of: self.whereabouts(), parts, schema: WANTED })
    }

    fn other_version(&self, found: i64) -> StoreError {
        let place = format!("`{}` at {}", self.sql.schema(), self.place);
        other_version(&place, found.unsigned_abs(), WANTED)
    }

    async fn look(&self) -> Result<Checked, StoreError> {
        let mut client = self.connect().await?;
        let reading = self.reading(&mut client).await?;
        let clock = "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint";
        let clock = reading.prepare(clock).await.map_err(self.trouble())?;
        let before = HostWall.now();
        let there = reading.query_one(&clock, &[]).await.map_err(self.trouble())?;
        let after = HostWall.now();
        let there: i64 = get(&there, 0)?;
        let settings = "SELECT current_setting('server_version'), current_setting('synchronous_commit'),
                        current_setting('fsync'), current_setting('full_page_writes'), pg_is_in_recovery()";
        let found = reading.query_one(settings, &[]).await.map_err(self.trouble())?;
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
            let row = reading.query_one(&clock, &[]).await.map_err(self.trouble())?;
            Some(Duration::from_micros(get::<i64>(&row, 0)?.unsigned_abs()))
        };
        let server: String = get(&found, 0)?;
        let settings = settings_of(&found)?;
        let is_lasting = settings.iter().all(|setting| setting.danger.is_none());
        let durability = if is_lasting {
            "what was answered is on the server's disk"
        } else {
            "what was answered may be lost: see what the settings endanger"
        };
        Ok(Checked {
            of: self.whereabouts(),
            server: format!("PostgreSQL {server}"),
            schema: (version > 0).then_some(version.unsigned_abs()),
            schema_wanted: WANTED,
            namespace: self.namespace.clone(),
            missing,
            durability: durability.to_owned(),
            settings,
            clock: Some(ClockDifference::between(before, Stamp::from_micros(there.unsigned_abs()), after)),
            clock_offset,
        })
    }

    async fn has_namespace(&self, reading: &Transaction<'_>) -> Result<bool, StoreError> {
        let find = self.sql.text("SELECT 1 FROM @.namespaces WHERE name = $1");
        let found = reading.query_opt(&find, &[&self.namespace]).await.map_err(self.trouble())?;
        Ok(found.is_some())
    }

    async fn bring_up_to_date(&self) -> Result<Upgraded, StoreError> {
        let mut client = self.connect().await?;
        let found = {
            let reading = self.reading(&mut client).await?;
            schema::version_within(&reading, &self.sql, &self.place).await?
        };
        if found == 0 {
            return Err(not_there(&format!("{} at {}", self.schema(), self.place)));
        }
        let from = schema::prepare(&mut client, &self.sql, &self.place, Patience::AsLongAsItTakes).await?;
        let parts = vec![UpgradedPart { part: self.schema(), from: from.unsigned_abs() }];
        Ok(Upgraded { of: self.whereabouts(), parts, schema: WANTED })
    }

    async fn spaces(&self) -> Result<Listed, StoreError> {
        let mut client = self.connect().await?;
        let reading = self.reading(&mut client).await?;
        // Others have tables of versions too: ours are beside limits, leases and namespaces, and where we may not look we do not.
        let schemas = "SELECT n.nspname::text, has_schema_privilege(n.oid, 'USAGE') AND
                              (SELECT bool_and(has_table_privilege(t.oid, 'SELECT')) FROM pg_class t
                               WHERE t.relnamespace = n.oid AND t.relname IN ('versions', 'namespaces', 'entities', 'policies'))
                       FROM pg_namespace n WHERE 4 = (SELECT count(*) FROM pg_class t WHERE t.relnamespace = n.oid
                            AND t.relkind = 'r' AND t.relname IN ('versions', 'namespaces', 'leases', 'meters'))
                       ORDER BY n.nspname LIMIT $1";
        let most = i64::from(LISTED_MAX) + 1;
        let schemas = reading.query(schemas, &[&most]).await.map_err(self.trouble())?;
        let mut spaces = Vec::new();
        for schema in &schemas {
            if is_enough(&spaces) {
                break;
            }
            let (name, may_look): (String, bool) = (get(schema, 0)?, get(schema, 1)?);
            let bare = Space { within: Some(name.clone()), ..Space::default() };
            if may_look {
                spaces.extend(self.spaces_in(&reading, &Sql::new(&name), bare).await?);
            } else {
                spaces.push(bare);
            }
        }
        Ok(Listed::cut(self.whereabouts(), WANTED, spaces))
    }

    /// The namespaces of a schema; the schema itself where it has none, or is newer than what we know.
    async fn spaces_in(
        &self,
        reading: &Transaction<'_>,
        sql: &Sql,
        bare: Space,
    ) -> Result<Vec<Space>, StoreError> {
        let version = sql.text("SELECT coalesce(max(version), 0) FROM @.versions");
        let version = reading.query_one(&version, &[]).await.map_err(self.trouble())?;
        let version: i64 = get(&version, 0)?;
        let bare = Space { schema: Some(version.unsigned_abs()), ..bare };
        if version > CURRENT {
            return Ok(vec![bare]);
        }
        let select = "SELECT n.name, n.version, (SELECT count(*) FROM @.entities e WHERE e.namespace = n.id),
                      (SELECT count(*) FROM @.policies p WHERE p.namespace = n.id)
                      FROM @.namespaces n ORDER BY n.name LIMIT $1";
        let most = i64::from(LISTED_MAX) + 1;
        let rows = reading.query(&sql.text(select), &[&most]).await.map_err(self.trouble())?;
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

/// What the server is set to, and what that endangers.
fn settings_of(found: &Row) -> Result<Vec<Setting>, StoreError> {
    let [commit, fsync, pages]: [String; 3] = [get(found, 1)?, get(found, 2)?, get(found, 3)?];
    let is_standby: bool = get(found, 4)?;
    let mut settings = vec![
        Setting::new("synchronous_commit", &commit)
            .danger_if(commit == "off", "what was answered last is lost when the server stops"),
        Setting::new("fsync", &fsync)
            .danger_if(fsync == "off", "the database may be damaged when the machine stops"),
        Setting::new("full_page_writes", &pages).danger_if(
            pages == "off",
            "pages may be half written when the machine stops, and nobody notices",
        ),
    ];
    if is_standby {
        let standby = Setting::new("in_recovery", "on");
        settings
            .push(standby.danger_if(true, "this server is a standby: nothing can be drawn or changed there"));
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
