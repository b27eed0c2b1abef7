//! A namespace's life beside its use, and what the server's settings are worth.

use std::time::Duration;

use ::redis::Value;
use tidegate_core::limit::name::Namespace;
use tidegate_core::time::Stamp;

use super::link::Link;
use super::options::RedisOptions;
use super::pack::Unpack;
use super::places::{Layout, Places};
use super::records::{META, hash_of, number};
use super::schema::{self, CURRENT};
use crate::clock::{HostWall, WallClock};
use crate::error::StoreError;
use crate::lifecycle::{
    Checked, ClockDifference, Lifecycle, Listed, Made, MadePart, Part, Setting, Space, Upgraded,
    UpgradedPart, Whereabouts, is_enough, not_there,
};
use crate::record::Kind;
use crate::reply::Reply;

/// What an operator does with namespaces on a server.
#[derive(Debug)]
pub(crate) struct RedisLifecycle {
    options: RedisOptions,
    namespace: Namespace,
}

impl RedisOptions {
    /// What an operator does with it.
    pub(crate) fn lifecycle(self) -> Result<RedisLifecycle, StoreError> {
        let namespace = self.check()?;
        Ok(RedisLifecycle { options: self, namespace })
    }
}

impl Lifecycle for RedisLifecycle {
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

impl RedisLifecycle {
    fn part(&self) -> Part {
        part(&self.namespace)
    }

    async fn make(&self) -> Result<Made, StoreError> {
        let (link, layout, _) = self.options.connect().await?;
        let (_, is_new) = schema::prepare(&link, &self.namespace, layout).await?;
        let parts = vec![MadePart { part: self.part(), is_new }];
        Ok(Made { of: whereabouts(&link), parts, schema: CURRENT })
    }

    async fn look(&self) -> Result<Checked, StoreError> {
        let (link, _, _) = self.options.connect().await?;
        let found = schema::find(&link, &self.namespace).await?;
        if let Some(newer) = found.filter(|found| found.version > CURRENT) {
            schema::fits(&link, &self.namespace, newer)?;
        }
        let said = Said::ask(&link).await?;
        Ok(Checked {
            of: whereabouts(&link),
            server: said.server(),
            schema: found.map(|found| found.version),
            schema_wanted: CURRENT,
            namespace: self.namespace.to_string(),
            missing: if found.is_some() { Vec::new() } else { vec![self.part()] },
            durability: said.durability(),
            settings: said.settings(),
            clock: Some(self.clock(&link).await?),
            clock_offset: match found.map(|found| found.layout) {
                Some(Layout::One) => Some(self.clock_offset(&link).await?),
                // On a cluster every tree of entities has a time of its own.
                Some(Layout::Trees) | None => None,
            },
        })
    }

    /// How far the time is ahead of the server's clock.
    async fn clock_offset(&self, link: &Link) -> Result<Duration, StoreError> {
        let key = Places::new(&self.namespace, Layout::One).clock(Places::center());
        match link.query(::redis::cmd("GET").arg(key)).await? {
            Value::Nil => Ok(Duration::ZERO),
            Value::BulkString(kept) => {
                let mut kept = Unpack::new(&kept, "the clock");
                kept.stamp()?;
                Ok(kept.stamp()?.since(Stamp::ZERO))
            }
            other => Err(link.whose().unexpected(&other)),
        }
    }

    /// The clock of the server that has the namespace's records: it dates them.
    async fn clock(&self, link: &Link) -> Result<ClockDifference, StoreError> {
        let mut call = ::redis::cmd("EVAL");
        call.arg("return redis.call('TIME')")
            .arg(1)
            .arg(Places::new(&self.namespace, Layout::One).admin(META));
        // The first asks for the connection too.
        link.query(&call).await?;
        let before = HostWall.now();
        let there = link.query(&call).await?;
        let after = HostWall.now();
        let Value::Array(parts) = &there else { return Err(link.whose().unexpected(&there)) };
        let [seconds, micros] = &parts[..] else { return Err(link.whose().unexpected(&there)) };
        let micros = number(seconds)?.saturating_mul(1_000_000).saturating_add(number(micros)?);
        Ok(ClockDifference::between(before, Stamp::from_micros(micros), after))
    }

    async fn bring_up_to_date(&self) -> Result<Upgraded, StoreError> {
        let (link, _, _) = self.options.connect().await?;
        // One that the address names, or all there are.
        let names =
            if self.options.names_one() { vec![self.namespace.clone()] } else { schema::all(&link).await? };
        let mut there = Vec::new();
        for name in names {
            if let Some(found) = schema::find(&link, &name).await? {
                if found.version > CURRENT {
                    schema::fits(&link, &name, found)?;
                }
                there.push((name, found));
            }
        }
        if there.is_empty() {
            return Err(not_there(&format!("{} at `{}`", self.part(), link.whose().place)));
        }
        let mut parts = Vec::new();
        for (name, found) in there {
            schema::upgrade(&link, &name, found).await?;
            parts.push(UpgradedPart { part: part(&name), from: found.version });
        }
        Ok(Upgraded { of: whereabouts(&link), parts, schema: CURRENT })
    }

    async fn spaces(&self) -> Result<Listed, StoreError> {
        let (link, _, _) = self.options.connect().await?;
        let mut spaces = Vec::new();
        for name in schema::enrolled(&link).await? {
            if is_enough(&spaces) {
                break;
            }
            let Some(found) = schema::find(&link, &name).await? else { continue };
            let bare =
                Space { namespace: Some(name.to_string()), schema: Some(found.version), ..Space::default() };
            // What a newer program keeps where is not ours to know.
            spaces.push(if found.version > CURRENT { bare } else { counted(&link, &name, bare).await? });
        }
        Ok(Listed::cut(whereabouts(&link), CURRENT, spaces))
    }
}

fn whereabouts(link: &Link) -> Whereabouts {
    Whereabouts { engine: "redis", place: link.whose().place.clone() }
}

fn part(namespace: &Namespace) -> Part {
    Part::new("namespace", namespace.as_str())
}

/// A namespace with what is in it.
async fn counted(link: &Link, name: &Namespace, bare: Space) -> Result<Space, StoreError> {
    let places = Places::new(name, Layout::One);
    let count = async |kind: Kind| {
        let mut call = ::redis::cmd("HLEN");
        call.arg(places.admin(hash_of(kind)));
        match link.query(&call).await? {
            Value::Int(count) => Ok(Some(count.unsigned_abs())),
            other => Err(link.whose().unexpected(&other)),
        }
    };
    let mut changes = ::redis::cmd("HGET");
    changes.arg(places.admin(META)).arg("version");
    Ok(Space {
        changes: Some(number(&link.query(&changes).await?)?),
        entities: count(Kind::Entity).await?,
        policies: count(Kind::Policy).await?,
        ..bare
    })
}

/// What the servers say of themselves: there are several in a cluster.
struct Said {
    info: Vec<String>,
    /// What is set to which values; none where a server does not tell.
    save: Vec<String>,
    fsync: Vec<String>,
}

impl Said {
    async fn ask(link: &Link) -> Result<Self, StoreError> {
        let info = infos(link).await?;
        let config = async |name: &str| {
            let mut call = ::redis::cmd("CONFIG");
            call.arg("GET").arg(name);
            let mut found = Vec::new();
            match link.query(&call).await {
                Ok(value) => texts(value, &mut found),
                Err(error) if error.is_transient() => return Err(error),
                // Some who run servers for others do not let them ask.
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

    /// The values of a field, each once.
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

    fn server(&self) -> String {
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

    /// Whether every server has it on.
    fn has_log(&self) -> bool {
        self.values("aof_enabled") == ["1"]
    }

    fn durability(&self) -> String {
        let fsync = self.fsync.first().map_or("unknown", String::as_str);
        if self.has_log() {
            return match fsync {
                "always" => "what was answered is on the server's disk".to_owned(),
                "everysec" => "what was answered is on the server's disk within a second".to_owned(),
                other => format!(
                    "what was answered is in the server's log, written as it likes (appendfsync {other})"
                ),
            };
        }
        match self.save.first().map(String::as_str) {
            None => "without a log; whether it makes snapshots the server does not tell".to_owned(),
            Some("") => "nothing survives the server: it keeps neither a log nor snapshots".to_owned(),
            Some(_) => "what came after the last snapshot is lost with the server".to_owned(),
        }
    }

    /// How some server chooses what it forgets when its memory is full, if it forgets anything.
    fn evicting(&self) -> Option<&str> {
        let is_bounded = self.values("maxmemory").iter().any(|bytes| *bytes != "0");
        let policy = self.values("maxmemory_policy").into_iter().find(|policy| *policy != "noeviction");
        policy.filter(|_| is_bounded)
    }

    fn settings(&self) -> Vec<Setting> {
        let (memory, policy) = (self.values("maxmemory"), self.values("maxmemory_policy"));
        let evicts = self.evicting().is_some();
        let forgets = !self.has_log() && self.save.iter().any(String::is_empty);
        let mut settings = vec![
            Setting::new("maxmemory", memory.join(", ")),
            Setting::new("maxmemory-policy", policy.join(", ")).danger_if(
                evicts,
                "when memory is short the server forgets what was used, and gives it again: set noeviction",
            ),
            Setting::new("appendonly", if self.has_log() { "yes" } else { "no" }).danger_if(
                forgets,
                "limits, tokens and what was used are gone when the server stops: set appendonly, or save",
            ),
        ];
        let mut said = |name: &'static str, values: &[String]| {
            let mut values = values.to_vec();
            values.sort_unstable();
            values.dedup();
            let value = if values.is_empty() { "not told".to_owned() } else { values.join(", ") };
            settings.push(Setting::new(name, if value.is_empty() { "never".to_owned() } else { value }));
        };
        said("appendfsync", &self.fsync);
        said("save", &self.save);
        let roles = self.values("role");
        if roles.iter().any(|role| *role != "master") {
            let role = Setting::new("role", roles.join(", "));
            settings.push(
                role.danger_if(true, "this server is a replica: nothing can be drawn or changed there"),
            );
        }
        settings
    }
}

/// What the server's settings may break: one that evicts keys when its memory is full forgets what was used. Nothing where
/// it does not, or does not tell.
pub(super) async fn caution(link: &Link) -> Result<Option<String>, StoreError> {
    let info = match infos(link).await {
        Ok(info) => info,
        Err(error) if error.is_transient() => return Err(error),
        // Whoever may not ask goes on without knowing.
        Err(_) => return Ok(None),
    };
    let said = Said { info, save: Vec::new(), fsync: Vec::new() };
    let place = &link.whose().place;
    Ok(said.evicting().map(|policy| {
        format!(
            "`{place}` evicts keys when its memory is full (maxmemory-policy {policy}), and then forgets what was used: \
             set it to noeviction"
        )
    }))
}

/// What each server says of itself.
async fn infos(link: &Link) -> Result<Vec<String>, StoreError> {
    let mut info = Vec::new();
    texts(link.query(&::redis::cmd("INFO")).await?, &mut info);
    // Between them are the addresses of those who say so.
    info.retain(|said| said.contains("redis_version:"));
    Ok(info)
}

/// All texts in an answer, in their order: one server answers with one, several with each one's behind its address.
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

    fn said(info: &str, save: &[&str], fsync: &[&str]) -> Said {
        let owned = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        Said { info: vec![info.replace(' ', "\r\n")], save: owned(save), fsync: owned(fsync) }
    }

    fn dangers(said: &Said) -> Vec<&'static str> {
        let settings = said.settings();
        settings.iter().filter(|setting| setting.danger.is_some()).map(|setting| setting.name).collect()
    }

    #[test]
    fn a_server_that_may_forget_is_told_apart_from_one_that_does_not() {
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
            assert_eq!(dangers(&said(info, &[save], &["always"])), expected, "{info}");
        }
        // A server that does not tell is not accused.
        let quiet = said("redis_version:7.0.15 aof_enabled:0", &[], &[]);
        assert!(dangers(&quiet).is_empty());
        assert_eq!(quiet.durability(), "without a log; whether it makes snapshots the server does not tell");
        assert_eq!(quiet.server(), "Redis 7.0.15");
    }

    #[test]
    fn a_valkey_is_called_by_its_own_version() {
        let valkey =
            said("redis_version:7.2.4 server_name:valkey valkey_version:9.0.1 redis_mode:cluster", &[], &[]);
        assert_eq!(valkey.server(), "Valkey 9.0.1, a cluster of 1 primaries");
    }
}
