//! What administrators change, with its entries, by one script.
//!
//! Whoever changes something reads the namespace's version and what he needs, works out the change, and has it made if the
//! version is still the same. Every change raises the version, so that what was read has not changed either; whoever came
//! second begins anew.

use std::future::Future;

use ::redis::Value;
use tidegate_core::limit::audit::{Change, Filed};
use tidegate_core::limit::entity::{Entity, LEVELS_MAX};
use tidegate_core::limit::name::EntityId;
use tidegate_core::limit::policy::{Policy, Scope, Version, Versioned};
use tidegate_core::time::Stamp;

use super::Redis;
use super::index::{Prefix, member};
use super::places::{Layout, Places, moved};
use super::records::{entry_record, policy_record, read_entity, read_policy, scope_text};
use super::script::{CHAIN, COMMIT};
use crate::error::StoreError;
use crate::policies::check_actor;
use crate::tables::{WrittenPolicy, subject};

/// How often a change is worked out anew because others were faster.
const TRIES: usize = 64;
/// As far up as is ever looked: more than there may be levels.
const CHAIN_MAX: usize = LEVELS_MAX + 8;

/// A kind of record, by the place of its key among those of the script.
#[derive(Debug, Clone, Copy)]
pub(super) enum Records {
    Policies = 2,
    Entities = 3,
    Tokens = 4,
    Hashes = 5,
    Audit = 6,
    Index = 7,
}

impl Records {
    pub(super) const fn key(self) -> &'static str {
        match self {
            Self::Policies => "policies",
            Self::Entities => "entities",
            Self::Tokens => "tokens",
            Self::Hashes => "hashes",
            Self::Audit => "audit",
            Self::Index => "index",
        }
    }
}

/// What is kept of the namespace.
pub(super) const META: &str = "meta";

/// Changes that are to be made together.
pub(super) struct Log {
    actor: String,
    /// When they are made.
    pub(super) at: Stamp,
    pub(super) seen: Version,
    /// The version they are made at.
    pub(super) version: Version,
    /// The number of the next entry.
    next: u64,
    writes: Vec<(Records, String, String)>,
}

impl Log {
    /// Who makes them.
    pub(super) fn actor(&self) -> &str {
        &self.actor
    }

    pub(super) fn write(&mut self, records: Records, field: &str, value: String) {
        self.writes.push((records, field.to_owned(), value));
    }

    pub(super) fn remove(&mut self, records: Records, field: &str) {
        self.write(records, field, String::new());
    }

    pub(super) fn index(&mut self, parts: &[&str]) {
        self.write(Records::Index, &member(parts), "1".to_owned());
    }

    pub(super) fn unindex(&mut self, parts: &[&str]) {
        self.remove(Records::Index, &member(parts));
    }

    pub(super) fn note(&mut self, filed: &Filed, change: &Change) {
        let number = entry_number(self.next);
        self.write(Records::Audit, &number, entry_record(self.version, self.at, &self.actor, change));
        self.index(&["a", &number]);
        self.index(&["f", filed.as_str(), &number]);
        self.next += 1;
    }

    pub(super) fn write_policy(&mut self, scope: &Scope, before: Option<Policy>, after: Option<Policy>) {
        let text = scope_text(scope);
        let custom = match scope {
            Scope::Subject(subject) => Some(["x", subject.resource.as_str(), subject.entity.as_str()]),
            _ => None,
        };
        if let Some(policy) = &after {
            self.write(Records::Policies, &text, policy_record(self.version, policy));
            self.index(&["p", &text]);
            if let Some(parts) = custom {
                self.index(&parts);
            }
        } else {
            self.remove(Records::Policies, &text);
            self.unindex(&["p", &text]);
            if let Some(parts) = custom {
                self.unindex(&parts);
            }
        }
        self.note(&Filed::scope(scope), &Change::Policy { scope: scope.clone(), before, after });
    }
}

/// The number of an entry, in the order of numbers.
pub(super) fn entry_number(number: u64) -> String {
    format!("{number:020}")
}

impl Redis {
    /// The version, and the number of the next entry of the audit.
    pub(super) async fn audited(&self) -> Result<(Version, u64), StoreError> {
        let inner = &self.inner;
        let mut read = ::redis::cmd("HMGET");
        read.arg(inner.places.admin(META)).arg("version").arg("audited");
        let numbers = match inner.link.query(&read).await? {
            Value::Array(values) => values.iter().map(number).collect::<Result<Vec<u64>, _>>()?,
            other => return Err(inner.link.whose().unexpected(&other)),
        };
        let first = |place: usize| numbers.get(place).copied().unwrap_or(0);
        Ok((Version::new(first(0)), first(1)))
    }

    /// What is to be changed is begun: the version and the time are read.
    async fn begin(&self, actor: &str) -> Result<Log, StoreError> {
        let (seen, next) = self.audited().await?;
        let at = self.look(Places::center(), &[]).await?.at;
        Ok(Log { actor: actor.to_owned(), at, seen, version: seen.next(), next, writes: Vec::new() })
    }

    /// Makes the changes; `None` where others were faster.
    async fn commit(&self, log: Log) -> Result<Option<Version>, StoreError> {
        let inner = &self.inner;
        let keys = [META, "policies", "entities", "tokens", "hashes", "audit", "index"];
        let keys = keys.map(|key| inner.places.admin(key));
        let keys: Vec<&[u8]> = keys.iter().map(String::as_bytes).collect();
        let mut args = vec![
            self.next_change(),
            log.seen.to_string(),
            log.version.to_string(),
            log.next.to_string(),
            self.channel(),
        ];
        for (records, field, value) in log.writes {
            args.extend([(records as u8).to_string(), field, value]);
        }
        let args: Vec<&[u8]> = args.iter().map(String::as_bytes).collect();
        match inner.link.run(&COMMIT, &keys, &args).await? {
            Value::Int(1) => Ok(Some(log.version)),
            Value::Int(0) => Ok(None),
            other => Err(inner.link.whose().unexpected(&other)),
        }
    }

    /// Works a change out until nobody was faster.
    pub(super) async fn change<P: Plan>(&self, actor: &str, plan: &P) -> Result<P::Answer, StoreError> {
        check_actor(actor)?;
        for _ in 0..TRIES {
            match plan.plan(self, self.begin(actor).await?).await? {
                Planned::Nothing(answer) => return Ok(answer),
                Planned::Change(log, answer) => {
                    if self.commit(log).await?.is_some() {
                        return Ok(answer);
                    }
                }
            }
        }
        Err(StoreError::unavailable(format!("others changed something {TRIES} times meanwhile")))
    }

    /// On a cluster, whoever has drawn stays in the tree he drew in.
    pub(super) async fn check_home(
        &self,
        id: &EntityId,
        above: &[Versioned<Entity>],
    ) -> Result<(), StoreError> {
        let (places, link) = (&self.inner.places, &self.inner.link);
        if places.layout() == Layout::One || above.is_empty() {
            return Ok(());
        }
        let Some(home) = places.home_of(link, id).await? else { return Ok(()) };
        for above in above {
            let other = above.value.id();
            if places.home_of(link, other).await?.is_some_and(|other| other != home) {
                return Err(moved(id.as_str(), other.as_str()));
            }
        }
        Ok(())
    }

    /// The scopes that an entity may have a policy at, its own first.
    pub(super) async fn scopes_of(&self, id: &EntityId) -> Result<Vec<Scope>, StoreError> {
        let mut scopes = vec![Scope::Entity(id.clone())];
        for resource in self.range_all(&Prefix::of(&["p", "3", id.as_str()])).await? {
            scopes.push(Scope::Subject(subject(id.as_str(), &resource)?));
        }
        Ok(scopes)
    }

    pub(super) async fn policies_at(
        &self,
        scopes: &[Scope],
    ) -> Result<Vec<Option<WrittenPolicy>>, StoreError> {
        let fields: Vec<String> = scopes.iter().map(scope_text).collect();
        let found = self.records(Records::Policies, &fields).await?;
        found.iter().map(|found| found.as_deref().map(read_policy).transpose()).collect()
    }

    pub(super) async fn entity(&self, id: &EntityId) -> Result<Option<Versioned<Entity>>, StoreError> {
        let found = self.records(Records::Entities, &[id.as_str().to_owned()]).await?;
        found.into_iter().flatten().next().map(|found| read_entity(&found)).transpose()
    }

    /// An entity and those above it: all of them, or as far as each cascades.
    pub(super) async fn chain(
        &self,
        id: &EntityId,
        is_whole: bool,
    ) -> Result<Vec<Versioned<Entity>>, StoreError> {
        let max = if is_whole { CHAIN_MAX } else { LEVELS_MAX + 1 }.to_string();
        let key = self.inner.places.admin(Records::Entities.key());
        let args = [id.as_str().as_bytes(), max.as_bytes(), if is_whole { b"1" } else { b"0" }];
        let chain = self.inner.link.run(&CHAIN, &[key.as_bytes()], &args).await?;
        let chain = self.values(chain)?;
        chain.iter().flatten().map(|record| read_entity(record)).collect()
    }

    /// Records by their names, each in its place.
    pub(super) async fn records(
        &self,
        records: Records,
        fields: &[String],
    ) -> Result<Vec<Option<Vec<u8>>>, StoreError> {
        if fields.is_empty() {
            return Ok(Vec::new());
        }
        let mut read = ::redis::cmd("HMGET");
        read.arg(self.inner.places.admin(records.key())).arg(fields);
        self.values(self.inner.link.query(&read).await?)
    }

    /// The parts of an answer.
    pub(super) fn values(&self, answer: Value) -> Result<Vec<Option<Vec<u8>>>, StoreError> {
        let whose = self.inner.link.whose();
        let Value::Array(values) = answer else { return Err(whose.unexpected(&answer)) };
        let value = |value| match value {
            Value::Nil => Ok(None),
            Value::BulkString(value) => Ok(Some(value)),
            other => Err(whose.unexpected(&other)),
        };
        values.into_iter().map(value).collect()
    }
}

/// How a change is worked out.
pub(super) trait Plan: Sync {
    /// What whoever makes it is told.
    type Answer: Send;

    /// What is to be done, given what is there: nothing of it has been done yet.
    fn plan(
        &self,
        store: &Redis,
        log: Log,
    ) -> impl Future<Output = Result<Planned<Self::Answer>, StoreError>> + Send;
}

/// What is to be done about a change.
pub(super) enum Planned<T> {
    Change(Log, T),
    Nothing(T),
}

/// A number that is kept as text; none is zero.
pub(super) fn number(value: &Value) -> Result<u64, StoreError> {
    match value {
        Value::Nil => Ok(0),
        Value::BulkString(text) => {
            let number = std::str::from_utf8(text).ok().and_then(|text| text.parse().ok());
            number.ok_or_else(|| StoreError::Corrupt { what: format!("a number: `{}`", text.escape_ascii()) })
        }
        other => Err(StoreError::Corrupt { what: format!("a number: {other:?}") }),
    }
}
