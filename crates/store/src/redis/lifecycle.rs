//! Administration of namespaces: init, check, upgrade and list, and a report on the server's settings.

use std::time::Duration;

use ::redis::{Cmd, Value};
use tidegate_core::limit::name::Namespace;
use tidegate_core::time::Stamp;

use super::connection::Connection;
use super::keyspace::{Keyspace, Layout};
use super::options::RedisOptions;
use super::records::{META, hash_of};
use super::schema::{self, CURRENT};
use super::script::{LOOK, NO_ARGS};
use crate::clock::{HostWall, WallClock};
use crate::error::StoreError;
use crate::lifecycle::{
    CheckReport, ClockDifference, InitPart, InitReport, Lifecycle, NamespaceList, Part, Setting, Space,
    StoreLocation, UpgradePart, UpgradeReport, is_enough, not_there,
};
use crate::record::Kind;
use crate::reply::Reply;

/// Manages the namespaces of a server.
#[derive(Debug)]
pub(crate) struct RedisLifecycle {
    options: RedisOptions,
    namespace: Namespace,
}

impl RedisOptions {
    /// The administration of this store.
    pub(crate) fn lifecycle(self) -> Result<RedisLifecycle, StoreError> {
        let namespace = self.check()?;
        Ok(RedisLifecycle { options: self, namespace })
    }
}

impl Lifecycle for RedisLifecycle {
    fn init(&self) -> Reply<'_, InitReport> {
        Reply::later(async move {
            let (connection, layout, _) = self.options.connect().await?;
            let (_, is_new) = schema::prepare(&connection, &self.namespace, layout).await?;
            let parts = vec![InitPart { part: self.part(), is_new }];
            Ok(InitReport { of: whereabouts(&connection), parts, schema: CURRENT })
        })
    }

    fn check(&self) -> Reply<'_, CheckReport> {
        Reply::later(async move {
            let (connection, _, _) = self.options.connect().await?;
            let found = schema::find(&connection, &self.namespace).await?;
            if let Some(newer) = found.filter(|found| found.version > CURRENT) {
                schema::check_version(&connection, &self.namespace, newer)?;
            }
            let server = ServerInfo::query(&connection).await?;
            Ok(CheckReport {
                of: whereabouts(&connection),
                server: server.version_text(),
                schema: found.map(|found| found.version),
                schema_wanted: CURRENT,
                namespace: self.namespace.to_string(),
                missing: if found.is_some() { Vec::new() } else { vec![self.part()] },
                durability: server.durability(),
                settings: server.settings(),
                clock: Some(self.clock(&connection).await?),
                clock_offset: match found.map(|found| found.layout) {
                    Some(Layout::One) => Some(self.clock_offset(&connection).await?),
                    // On a cluster every tree of entities has a clock of its own.
                    Some(Layout::Trees) | None => None,
                },
            })
        })
    }

    fn upgrade(&self) -> Reply<'_, UpgradeReport> {
        Reply::later(async move {
            let (connection, _, _) = self.options.connect().await?;
            // The namespace that the address names, or all of them.
            let names = if self.options.has_namespace() {
                vec![self.namespace.clone()]
            } else {
                schema::enrolled(&connection).await?
            };
            let mut existing = Vec::new();
            for name in names {
                if let Some(found) = schema::find(&connection, &name).await? {
                    if found.version > CURRENT {
                        schema::check_version(&connection, &name, found)?;
                    }
                    existing.push((name, found));
                }
            }
            if existing.is_empty() {
                return Err(not_there(&format!("{} at `{}`", self.part(), connection.context().place)));
            }
            let mut parts = Vec::new();
            for (name, found) in existing {
                schema::upgrade(&connection, &name, found).await?;
                parts.push(UpgradePart { part: part(&name), from: found.version });
            }
            Ok(UpgradeReport { of: whereabouts(&connection), parts, schema: CURRENT })
        })
    }

    fn list(&self) -> Reply<'_, NamespaceList> {
        Reply::later(async move {
            let (connection, _, _) = self.options.connect().await?;
            let mut spaces = Vec::new();
            for name in schema::enrolled(&connection).await? {
                if is_enough(&spaces) {
                    break;
                }
                let Some(found) = schema::find(&connection, &name).await? else { continue };
                let bare = Space {
                    namespace: Some(name.to_string()),
                    schema: Some(found.version),
                    ..Space::default()
                };
                // The layout of a newer version is unknown.
                spaces.push(if found.version > CURRENT {
                    bare
                } else {
                    with_counts(&connection, &name, bare).await?
                });
            }
            Ok(NamespaceList::cut(whereabouts(&connection), CURRENT, spaces))
        })
    }
}

impl RedisLifecycle {
    fn part(&self) -> Part {
        part(&self.namespace)
    }

    /// How far the namespace's time is ahead of the server's clock.
    async fn clock_offset(&self, connection: &Connection) -> Result<Duration, StoreError> {
        let key = Keyspace::new(&self.namespace, Layout::One).clock(Keyspace::admin_home());
        let found = connection.run(&LOOK, &[key], NO_ARGS).await?;
        let (_, ahead, _): (u64, u64, Vec<Option<Vec<u8>>>) = found;
        Ok(Duration::from_micros(ahead))
    }

    /// Compares the clock of the server that has the namespace's records, which it dates, with this host's.
    async fn clock(&self, connection: &Connection) -> Result<ClockDifference, StoreError> {
        let mut call = ::redis::cmd("EVAL");
        call.arg("return redis.call('TIME')")
            .arg(1)
            .arg(Keyspace::new(&self.namespace, Layout::One).admin(META));
        // The first call may have to connect.
        connection.query::<()>(&call).await?;
        let before = HostWall.now();
        let (seconds, micros): (u64, u64) = connection.query(&call).await?;
        let after = HostWall.now();
        let micros = seconds.saturating_mul(1_000_000).saturating_add(micros);
        Ok(ClockDifference::between(before, Stamp::from_micros(micros), after))
    }
}

fn whereabouts(connection: &Connection) -> StoreLocation {
    StoreLocation { engine: "redis", place: connection.context().place.clone() }
}

fn part(namespace: &Namespace) -> Part {
    Part::new("namespace", namespace.as_str())
}

/// Adds counts to a namespace.
async fn with_counts(connection: &Connection, name: &Namespace, bare: Space) -> Result<Space, StoreError> {
    let keyspace = Keyspace::new(name, Layout::One);
    let count =
        async |kind: Kind| connection.query(&Cmd::hlen(keyspace.admin(hash_of(kind)))).await.map(Some);
    let changes: Option<u64> = connection.query(&Cmd::hget(keyspace.admin(META), "version")).await?;
    Ok(Space {
        changes: Some(changes.unwrap_or(0)),
        entities: count(Kind::Entity).await?,
        policies: count(Kind::Policy).await?,
        ..bare
    })
}

/// What the servers report; a cluster has several.
struct ServerInfo {
    info: Vec<String>,
    /// Values of the setting on each server; empty if it is not readable.
    save: Vec<String>,
    fsync: Vec<String>,
}

impl ServerInfo {
    async fn query(connection: &Connection) -> Result<Self, StoreError> {
        let info = infos(connection).await?;
        let config = async |name: &str| {
            let mut call = ::redis::cmd("CONFIG");
            call.arg("GET").arg(name);
            let mut found = Vec::new();
            match connection.query(&call).await {
                Ok(value) => texts(value, &mut found),
                Err(error) if error.is_transient() => return Err(error),
                // Hosted servers may deny `CONFIG`.
                Err(_) => {}
            }
            Ok(found
                .windows(2)
                .filter(|pair| pair[0] == name)
                .map(|pair| pair[1].clone())
                .collect::<Vec<_>>())
        };
        Ok(Self { info, save: config("save").await?, fsync: config("appendfsync").await? })
    }

    /// The distinct values of a field.
    fn values(&self, field: &str) -> Vec<&str> {
        let values = self.info.iter().flat_map(|info| info.lines()).filter_map(|line| {
            let (name, value) = line.split_once(':')?;
            (name == field).then(|| value.trim_end())
        });
        let mut values: Vec<&str> = values.collect();
        values.sort_unstable();
        values.dedup();
        values
    }

    fn version_text(&self) -> String {
        let (name, versions) = match self.values("valkey_version") {
            valkey if !valkey.is_empty() => ("Valkey", valkey),
            _ => ("Redis", self.values("redis_version")),
        };
        let mode = self.values("redis_mode").contains(&"cluster");
        let servers =
            if mode { format!(", a cluster of {} primaries", self.info.len()) } else { String::new() };
        let version =
            if versions.is_empty() { "of an unknown version".to_owned() } else { versions.join(", ") };
        format!("{name} {version}{servers}")
    }

    /// Whether every server has an append-only file.
    fn has_aof(&self) -> bool {
        self.values("aof_enabled") == ["1"]
    }

    fn durability(&self) -> String {
        let fsync = self.fsync.first().map_or("unknown", String::as_str);
        if self.has_aof() {
            return match fsync {
                "always" => "acknowledged writes are on the server's disk".to_owned(),
                "everysec" => "acknowledged writes are on the server's disk within a second".to_owned(),
                other => format!(
                    "acknowledged writes are in the append-only file, flushed by the operating system (appendfsync {other})"
                ),
            };
        }
        match self.save.first().map(String::as_str) {
            None => "no append-only file; the server does not report whether it makes snapshots".to_owned(),
            Some("") => {
                "nothing survives a restart of the server: it has neither an append-only file nor snapshots"
                    .to_owned()
            }
            Some(_) => "writes after the last snapshot are lost when the server fails".to_owned(),
        }
    }

    /// The eviction policy of a server that evicts keys when its memory is full, if there is one.
    fn eviction_policy(&self) -> Option<&str> {
        let is_bounded = self.values("maxmemory").iter().any(|bytes| *bytes != "0");
        let policy = self.values("maxmemory_policy").into_iter().find(|policy| *policy != "noeviction");
        policy.filter(|_| is_bounded)
    }

    fn settings(&self) -> Vec<Setting> {
        let (memory, policy) = (self.values("maxmemory"), self.values("maxmemory_policy"));
        let evicts = self.eviction_policy().is_some();
        let forgets = !self.has_aof() && self.save.iter().any(String::is_empty);
        let mut settings = vec![
            Setting::new("maxmemory", memory.join(", ")),
            Setting::new("maxmemory-policy", policy.join(", ")).danger_if(
                evicts,
                "the server may evict keys when its memory is full, which resets limits: set noeviction",
            ),
            Setting::new("appendonly", if self.has_aof() { "yes" } else { "no" }).danger_if(
                forgets,
                "limits, tokens and usage are lost when the server stops: set appendonly or save",
            ),
        ];
        let mut push = |name: &'static str, values: &[String]| {
            let mut values = values.to_vec();
            values.sort_unstable();
            values.dedup();
            let value = if values.is_empty() { "unknown".to_owned() } else { values.join(", ") };
            settings.push(Setting::new(name, if value.is_empty() { "never".to_owned() } else { value }));
        };
        push("appendfsync", &self.fsync);
        push("save", &self.save);
        let roles = self.values("role");
        if roles.iter().any(|role| *role != "master") {
            let role = Setting::new("role", roles.join(", "));
            settings.push(role.danger_if(true, "this server is a replica and rejects writes"));
        }
        settings
    }
}

/// Warns of a server that evicts keys when its memory is full, which resets limits. `None` if it does not, or
/// does not report its settings.
pub(super) async fn caution(connection: &Connection) -> Result<Option<String>, StoreError> {
    let info = match infos(connection).await {
        Ok(info) => info,
        Err(error) if error.is_transient() => return Err(error),
        // Without permission to read the settings there is no warning.
        Err(_) => return Ok(None),
    };
    let server = ServerInfo { info, save: Vec::new(), fsync: Vec::new() };
    let place = &connection.context().place;
    Ok(server.eviction_policy().map(|policy| {
        format!(
            "`{place}` evicts keys when its memory is full (maxmemory-policy {policy}), which resets limits: set it \
             to noeviction"
        )
    }))
}

/// The `INFO` text of each server.
async fn infos(connection: &Connection) -> Result<Vec<String>, StoreError> {
    let mut info = Vec::new();
    texts(connection.query(&::redis::cmd("INFO")).await?, &mut info);
    // Replies of a cluster have addresses between the texts.
    info.retain(|text| text.contains("redis_version:"));
    Ok(info)
}

/// Collects all texts of a reply in order: a server replies with one, a cluster with one per address.
fn texts(value: Value, into: &mut Vec<String>) {
    match value {
        Value::BulkString(text) => into.push(String::from_utf8_lossy(&text).into_owned()),
        Value::SimpleString(text) | Value::VerbatimString { text, .. } => into.push(text),
        Value::Array(parts) | Value::Set(parts) => parts.into_iter().for_each(|part| texts(part, into)),
        Value::Map(pairs) => pairs.into_iter().for_each(|(name, part)| {
            texts(name, into);
            texts(part, into);
        }),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(info: &str, save: &[&str], fsync: &[&str]) -> ServerInfo {
        let owned = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        ServerInfo { info: vec![info.replace(' ', "\r\n")], save: owned(save), fsync: owned(fsync) }
    }

    fn dangers(server: &ServerInfo) -> Vec<&'static str> {
        let settings = server.settings();
        settings.iter().filter(|setting| setting.danger.is_some()).map(|setting| setting.name).collect()
    }

    #[test]
    fn settings_that_may_lose_data_are_dangers() {
        let table = [
            ("maxmemory:0 maxmemory_policy:allkeys-lru aof_enabled:1 role:master", "", vec![]),
            ("maxmemory:9 maxmemory_policy:noeviction aof_enabled:1 role:master", "", vec![]),
            (
                "maxmemory:9 maxmemory_policy:volatile-ttl aof_enabled:1 role:master",
                "",
                vec!["maxmemory-policy"],
            ),
            ("maxmemory:0 maxmemory_policy:noeviction aof_enabled:0 role:master", "3600 1", vec![]),
            ("maxmemory:0 maxmemory_policy:noeviction aof_enabled:0 role:master", "", vec!["appendonly"]),
            ("maxmemory:0 maxmemory_policy:noeviction aof_enabled:1 role:slave", "", vec!["role"]),
        ];
        for (info, save, expected) in table {
            assert_eq!(dangers(&server(info, &[save], &["always"])), expected, "{info}");
        }
        // Unknown settings are not reported as dangers.
        let quiet = server("redis_version:7.0.15 aof_enabled:0", &[], &[]);
        assert!(dangers(&quiet).is_empty());
        assert_eq!(
            quiet.durability(),
            "no append-only file; the server does not report whether it makes snapshots"
        );
        assert_eq!(quiet.version_text(), "Redis 7.0.15");
    }

    #[test]
    fn valkey_reports_its_own_version() {
        let valkey = server(
            "redis_version:7.2.4 server_name:valkey valkey_version:9.0.1 redis_mode:cluster",
            &[],
            &[],
        );
        assert_eq!(valkey.version_text(), "Valkey 9.0.1, a cluster of 1 primaries");
    }
}
