//! Records as JSON text: readable, and parsed back to equal values.
//!
//! Limits are written in limit text (`tpm:100k/min:150k`), and default values are omitted. Input is
//! untrusted: unknown keys, invalid names and numbers out of bounds are [`StoreError::Corrupt`] with the
//! reason, and never panic.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tidegate_core::limit::audit::{AuditKey, Change, Entry};
use tidegate_core::limit::cascade::{Level, Levels, Line};
use tidegate_core::limit::entity::Entity;
use tidegate_core::limit::name::{EntityId, LimitName, Namespace, ResourceName, Subject};
use tidegate_core::limit::policy::{OnExpiry, OnUnavailable, Policy, Scope, Share, Version};
use tidegate_core::limit::resolve::Source;
use tidegate_core::limit::rule::{Limit, Rule};
use tidegate_core::limit::token::{Token, TokenId, TokenScope};
use tidegate_core::time::Stamp;

use crate::error::StoreError;

/// The maximum characters of input in a message.
const SHOWN_MAX: usize = 300;
/// Precedes a limit that was given with a call. No limit name contains it.
const OF_CALL: char = '~';
/// Separates a limit from its debt bound. Neither contains it.
const DEBT: char = '!';

/// A policy: `{"limits":["tpm:100k/min:150k"],"only":true,"on_unavailable":{"local_share":0.25}}`.
pub(crate) fn policy_to_text(policy: &Policy) -> String {
    write(&PolicyText::of(policy))
}

/// Parses the text of [`policy_to_text`].
pub(crate) fn policy_from_text(text: &str) -> Result<Policy, StoreError> {
    let read = |text| read::<PolicyText<'_>>(text)?.policy();
    read(text).map_err(|why| corrupt("a policy", &why))
}

/// An entity: `{"id":"acme","name":"Acme","parent":"group","cascade":true,"metadata":{"tier":"gold"}}`, with
/// `"disabled":true` if it is.
pub(crate) fn entity_to_text(entity: &Entity) -> String {
    write(&EntityText::of(entity))
}

/// Parses the text of [`entity_to_text`].
pub(crate) fn entity_from_text(text: &str) -> Result<Entity, StoreError> {
    let read = |text| read::<EntityText<'_>>(text)?.entity();
    read(text).map_err(|why| corrupt("an entity", &why))
}

/// A token: `{"id":"ci","name":"the
/// build","namespace":"prod","scopes":["read"],"created_at":1,"created_by":"ops"}`.
pub(crate) fn token_to_text(token: &Token) -> String {
    write(&TokenText::of(token))
}

/// Parses the text of [`token_to_text`].
pub(crate) fn token_from_text(text: &str) -> Result<Token, StoreError> {
    let read = |text| read::<TokenText<'_>>(text)?.token();
    read(text).map_err(|why| corrupt("a token", &why))
}

/// A change: `{"entity":{"after":{..}}}`,
/// `{"policy":{"scope":{"resource":"gpt"},"before":{..},"after":{..}}}`,
/// `{"bucket":{"bucket":{"entity":"acme"},"limit":"tpm","before":-500,"after":100}}` or
/// `{"token":{"before":{..},"after":{..}}}`.
pub(crate) fn change_to_text(change: &Change) -> String {
    write(&ChangeText::of(change))
}

/// Parses the text of [`change_to_text`], and returns what the change is filed under. A change of an entity
/// or a token must have the same id before and after.
pub(crate) fn change_from_text(text: &str) -> Result<(Change, AuditKey), StoreError> {
    let read = |text| read::<ChangeText<'_>>(text)?.change();
    read(text).map_err(|why: String| corrupt("a change", &why))
}

/// An audit entry as one line, without the newline.
pub(crate) fn entry_to_line(entry: &Entry) -> String {
    write(&EntryText {
        version: entry.version.number(),
        at: Cow::Owned(entry.at.to_string()),
        at_micros: entry.at.as_micros(),
        actor: Cow::Borrowed(&entry.actor),
        filed: Cow::Borrowed(entry.filed.as_str()),
        change: ChangeText::of(&entry.change),
    })
}

/// Parses the line of [`entry_to_line`]. The date is informational; the microseconds count.
pub(crate) fn entry_from_line(line: &str) -> Result<Entry, StoreError> {
    let read = |line| read::<EntryText<'_>>(line)?.entry();
    read(line).map_err(|why| corrupt("an entry of the audit", &why))
}

/// The levels that a lease drew from, as a store keeps them to end the lease without its holder:
/// `{"v":3,"n":["rpm","tpm"],"l":[{"e":"acme","r":"gpt","l":["rpm:60/min!600","~tpm:7/s"]}]}`.
///
/// The sources of limits are not kept, except whether a limit was given with the call (`~`).
pub fn levels_to_text(levels: &Levels) -> String {
    write(&LevelsText::of(levels))
}

/// Parses the text of [`levels_to_text`].
///
/// # Errors
/// [`StoreError::Corrupt`] for any other text.
pub fn levels_from_text(text: &str) -> Result<Levels, StoreError> {
    let read = |text| read::<LevelsText<'_>>(text)?.levels();
    read(text).map_err(|why| corrupt("the levels of a lease", &why))
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PolicyText<'a> {
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    limits: Vec<Cow<'a, str>>,
    #[serde(default, skip_serializing_if = "is_false")]
    only: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    on_unavailable: Option<OnUnavailableText>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    on_expiry: Option<OnExpiryText>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum OnUnavailableText {
    Block,
    Allow,
    LocalShare(f64),
}

#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum OnExpiryText {
    Settle,
    Return,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct EntityText<'a> {
    id: Cow<'a, str>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    name: Option<Cow<'a, str>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    parent: Option<Cow<'a, str>>,
    #[serde(default, skip_serializing_if = "is_false")]
    cascade: bool,
    #[serde(default, skip_serializing_if = "is_false")]
    disabled: bool,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    metadata: BTreeMap<Cow<'a, str>, Cow<'a, str>>,
}

/// Times are microseconds since 1970.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct TokenText<'a> {
    id: Cow<'a, str>,
    name: Cow<'a, str>,
    namespace: Cow<'a, str>,
    scopes: Vec<Cow<'a, str>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    entity: Option<Cow<'a, str>>,
    created_at: u64,
    created_by: Cow<'a, str>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    expires_at: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    revoked_at: Option<u64>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
enum ChangeText<'a> {
    Entity {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        before: Option<EntityText<'a>>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        after: Option<EntityText<'a>>,
    },
    Policy {
        scope: ScopeText<'a>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        before: Option<PolicyText<'a>>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        after: Option<PolicyText<'a>>,
    },
    Bucket {
        /// Without an entity or a resource, all share the bucket.
        bucket: ScopeText<'a>,
        limit: Cow<'a, str>,
        before: i64,
        after: u64,
    },
    Token {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        before: Option<TokenText<'a>>,
        after: TokenText<'a>,
    },
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ScopeText<'a> {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    entity: Option<Cow<'a, str>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    resource: Option<Cow<'a, str>>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct EntryText<'a> {
    version: u64,
    at: Cow<'a, str>,
    at_micros: u64,
    actor: Cow<'a, str>,
    filed: Cow<'a, str>,
    change: ChangeText<'a>,
}

/// Short keys: a store writes one of these with every draw.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct LevelsText<'a> {
    #[serde(rename = "v")]
    version: u64,
    #[serde(rename = "n")]
    names: Vec<Cow<'a, str>>,
    #[serde(rename = "l")]
    levels: Vec<LevelText<'a>>,
    #[serde(rename = "x", default, skip_serializing_if = "Option::is_none")]
    on_expiry: Option<OnExpiryText>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct LevelText<'a> {
    #[serde(rename = "e")]
    entity: Cow<'a, str>,
    #[serde(rename = "r")]
    resource: Cow<'a, str>,
    #[serde(rename = "l")]
    limits: Vec<Cow<'a, str>>,
}

impl<'a> PolicyText<'a> {
    fn of(policy: &'a Policy) -> Self {
        let on_unavailable = policy.unavailable().map(|setting| match setting {
            OnUnavailable::Block => OnUnavailableText::Block,
            OnUnavailable::Allow => OnUnavailableText::Allow,
            OnUnavailable::LocalShare(share) => OnUnavailableText::LocalShare(share.fraction()),
        });
        Self {
            limits: policy.rules().iter().map(|rule| Cow::Owned(rule.to_string())).collect(),
            only: policy.is_only(),
            on_unavailable,
            on_expiry: policy.expiry().map(OnExpiryText::of),
        }
    }

    fn policy(self) -> Result<Policy, String> {
        let limits: Result<Vec<Limit>, _> = self.limits.iter().map(|limit| limit.parse()).collect();
        let mut policy = Policy::new(limits.map_err(message)?).map_err(message)?;
        if self.only {
            policy = policy.only();
        }
        if let Some(setting) = self.on_unavailable {
            policy = policy.on_unavailable(match setting {
                OnUnavailableText::Block => OnUnavailable::Block,
                OnUnavailableText::Allow => OnUnavailable::Allow,
                OnUnavailableText::LocalShare(share) => {
                    OnUnavailable::LocalShare(Share::new(share).map_err(message)?)
                }
            });
        }
        if let Some(setting) = self.on_expiry {
            policy = policy.on_expiry(setting.on_expiry());
        }
        Ok(policy)
    }
}

impl OnExpiryText {
    const fn of(on_expiry: OnExpiry) -> Self {
        match on_expiry {
            OnExpiry::Settle => Self::Settle,
            OnExpiry::Return => Self::Return,
        }
    }

    const fn on_expiry(self) -> OnExpiry {
        match self {
            Self::Settle => OnExpiry::Settle,
            Self::Return => OnExpiry::Return,
        }
    }
}

impl<'a> EntityText<'a> {
    fn of(entity: &'a Entity) -> Self {
        let note = |(key, value): (&'a String, &'a String)| (Cow::Borrowed(&**key), Cow::Borrowed(&**value));
        Self {
            id: Cow::Borrowed(entity.id().as_str()),
            name: entity.display_name().map(Cow::Borrowed),
            parent: entity.parent_id().map(|parent| Cow::Borrowed(parent.as_str())),
            cascade: entity.cascades(),
            disabled: entity.is_disabled(),
            metadata: entity.notes().iter().map(note).collect(),
        }
    }

    fn entity(self) -> Result<Entity, String> {
        let mut entity = Entity::new(EntityId::stored(&self.id).map_err(message)?);
        if let Some(name) = self.name {
            entity = entity.name(name);
        }
        if let Some(parent) = self.parent {
            entity = entity.parent(EntityId::stored(&parent).map_err(message)?);
        }
        if self.cascade {
            entity = entity.cascade();
        }
        entity = entity.disabled(self.disabled);
        for (key, value) in self.metadata {
            entity = entity.metadata(key, value);
        }
        entity.check().map_err(message)?;
        Ok(entity)
    }
}

impl<'a> TokenText<'a> {
    fn of(token: &'a Token) -> Self {
        Self {
            id: Cow::Borrowed(token.id.as_str()),
            name: Cow::Borrowed(&token.name),
            namespace: Cow::Borrowed(token.namespace.as_str()),
            scopes: token.scopes.iter().map(|scope| Cow::Borrowed(scope.as_str())).collect(),
            entity: token.entity.as_ref().map(|entity| Cow::Borrowed(entity.as_str())),
            created_at: token.created_at.as_micros(),
            created_by: Cow::Borrowed(&token.created_by),
            expires_at: token.expires_at.map(Stamp::as_micros),
            revoked_at: token.revoked_at.map(Stamp::as_micros),
        }
    }

    fn token(self) -> Result<Token, String> {
        let scopes: Result<_, _> = self.scopes.iter().map(|scope| scope.parse::<TokenScope>()).collect();
        Ok(Token {
            id: TokenId::new(&self.id).map_err(message)?,
            name: self.name.into_owned(),
            namespace: Namespace::stored(&self.namespace).map_err(message)?,
            scopes: scopes.map_err(message)?,
            entity: self.entity.map(|entity| EntityId::stored(&entity)).transpose().map_err(message)?,
            created_at: Stamp::from_micros(self.created_at),
            created_by: self.created_by.into_owned(),
            expires_at: self.expires_at.map(Stamp::from_micros),
            revoked_at: self.revoked_at.map(Stamp::from_micros),
        })
    }
}

impl<'a> ChangeText<'a> {
    fn of(change: &'a Change) -> Self {
        match change {
            Change::Entity { before, after } => Self::Entity {
                before: before.as_ref().map(EntityText::of),
                after: after.as_ref().map(EntityText::of),
            },
            Change::Policy { scope, before, after } => Self::Policy {
                scope: ScopeText::of(scope),
                before: before.as_ref().map(PolicyText::of),
                after: after.as_ref().map(PolicyText::of),
            },
            Change::Bucket { bucket, limit, before, after } => Self::Bucket {
                bucket: ScopeText {
                    entity: bucket.one_entity().map(|entity| Cow::Borrowed(entity.as_str())),
                    resource: bucket.one_resource().map(|resource| Cow::Borrowed(resource.as_str())),
                },
                limit: Cow::Borrowed(limit.as_str()),
                before: *before,
                after: *after,
            },
            Change::Token { before, after } => {
                Self::Token { before: before.as_ref().map(TokenText::of), after: TokenText::of(after) }
            }
        }
    }

    /// The change, and what it is filed under.
    fn change(self) -> Result<(Change, AuditKey), String> {
        match self {
            Self::Entity { before, after } => {
                let before = before.map(EntityText::entity).transpose()?;
                let after = after.map(EntityText::entity).transpose()?;
                let filed = match (&before, &after) {
                    (Some(before), Some(after)) if before.id() != after.id() => {
                        return Err(format!("`{}` cannot become `{}`", before.id(), after.id()));
                    }
                    (Some(entity), _) | (None, Some(entity)) => AuditKey::entity(entity.id()),
                    (None, None) => return Err("no entity, before or after".to_owned()),
                };
                Ok((Change::Entity { before, after }, filed))
            }
            Self::Policy { scope, before, after } => {
                let scope = scope.scope()?;
                let before = before.map(PolicyText::policy).transpose()?;
                let after = after.map(PolicyText::policy).transpose()?;
                let filed = AuditKey::scope(&scope);
                Ok((Change::Policy { scope, before, after }, filed))
            }
            Self::Bucket { bucket, limit, before, after } => {
                let (entity, resource) = bucket.names()?;
                let bucket = Subject::pool(entity, resource);
                let limit = LimitName::new(&limit).map_err(message)?;
                let filed = AuditKey::bucket(&bucket);
                Ok((Change::Bucket { bucket, limit, before, after }, filed))
            }
            Self::Token { before, after } => {
                let (before, after) = (before.map(TokenText::token).transpose()?, after.token()?);
                if let Some(before) = before.as_ref().filter(|before| before.id != after.id) {
                    return Err(format!("the token `{}` cannot become `{}`", before.id, after.id));
                }
                let filed = AuditKey::token(&after.id);
                Ok((Change::Token { before, after }, filed))
            }
        }
    }
}

impl<'a> ScopeText<'a> {
    fn of(scope: &'a Scope) -> Self {
        Self {
            entity: scope.entity().map(|entity| Cow::Borrowed(entity.as_str())),
            resource: scope.resource().map(|resource| Cow::Borrowed(resource.as_str())),
        }
    }

    fn names(self) -> Result<(Option<EntityId>, Option<ResourceName>), String> {
        let entity = self.entity.map(|entity| EntityId::stored(&entity)).transpose().map_err(message)?;
        let resource =
            self.resource.map(|resource| ResourceName::stored(&resource)).transpose().map_err(message)?;
        Ok((entity, resource))
    }

    fn scope(self) -> Result<Scope, String> {
        Ok(match self.names()? {
            (None, None) => Scope::System,
            (None, Some(resource)) => Scope::Resource(resource),
            (Some(entity), None) => Scope::Entity(entity),
            (Some(entity), Some(resource)) => Scope::Subject(Subject { entity, resource }),
        })
    }
}

impl EntryText<'_> {
    fn entry(self) -> Result<Entry, String> {
        let (change, filed) = self.change.change()?;
        if filed.as_str() != self.filed {
            return Err(format!("a change of `{filed}` is filed under `{}`", self.filed));
        }
        Ok(Entry {
            version: Version::new(self.version),
            at: Stamp::from_micros(self.at_micros),
            actor: self.actor.into_owned(),
            filed,
            change,
        })
    }
}

impl<'a> LevelsText<'a> {
    fn of(levels: &'a Levels) -> Self {
        let level = |level: &'a Level| LevelText {
            entity: Cow::Borrowed(level.subject.entity.as_str()),
            resource: Cow::Borrowed(level.subject.resource.as_str()),
            limits: level.limits.iter().map(|line| Cow::Owned(line_text(line))).collect(),
        };
        let on_expiry = levels.on_expiry().0;
        Self {
            version: levels.version().number(),
            names: levels.names().iter().map(|name| Cow::Borrowed(name.as_str())).collect(),
            levels: levels.levels().iter().map(level).collect(),
            on_expiry: (on_expiry != OnExpiry::default()).then(|| OnExpiryText::of(on_expiry)),
        }
    }

    fn levels(self) -> Result<Levels, String> {
        let names: Result<Vec<LimitName>, _> = self.names.iter().map(|name| LimitName::new(name)).collect();
        let names = names.map_err(message)?;
        let levels: Result<Vec<Level>, String> =
            self.levels.into_iter().map(|level| level.level(&names)).collect();
        let on_expiry = self.on_expiry.map(OnExpiryText::on_expiry).unwrap_or_default();
        Levels::restored(Version::new(self.version), names, levels?, on_expiry).map_err(message)
    }
}

impl LevelText<'_> {
    fn level(self, names: &[LimitName]) -> Result<Level, String> {
        let line = |text: &Cow<'_, str>| {
            let (text, debt_max) = match text.split_once(DEBT) {
                Some((text, debt_max)) => (text, Some(debt_max.parse().map_err(message)?)),
                None => (&**text, None),
            };
            let (rule, source) = match text.strip_prefix(OF_CALL) {
                Some(text) => (checked(text)?.of_call(), Source::Call),
                None => (checked(text)?, Source::Defaults),
            };
            let found = names.iter().position(|name| name == rule.name());
            let name = found.ok_or_else(|| format!("the limit `{}` is not among the names", rule.name()))?;
            Ok(Line { name, rule: Arc::new(rule), source, debt_max })
        };
        let limits: Result<Box<[Line]>, String> = self.limits.iter().map(line).collect();
        let subject = Subject::stored(&self.entity, &self.resource).map_err(message)?;
        Ok(Level { subject, limits: limits? })
    }
}

fn line_text(line: &Line) -> String {
    let of_call = if line.rule.is_of_call() { OF_CALL.to_string() } else { String::new() };
    let debt_max = line.debt_max.map(|debt_max| format!("{DEBT}{debt_max}")).unwrap_or_default();
    // The level says whether it is a pool, and the line how far it may be in debt.
    let rule = Rule::stored(line.rule.name().clone(), *line.rule.shape());
    format!("{of_call}{rule}{debt_max}")
}

fn checked(text: &str) -> Result<Rule, String> {
    text.parse::<Limit>().and_then(|limit| limit.check()).map_err(message)
}

fn write(record: &impl Serialize) -> String {
    serde_json::to_string(record).unwrap_or_else(|_| unreachable!("strings, numbers and string keys"))
}

fn read<'a, T: Deserialize<'a>>(text: &'a str) -> Result<T, String> {
    serde_json::from_str(text).map_err(message)
}

fn message(error: impl fmt::Display) -> String {
    error.to_string()
}

/// A `Corrupt` error. The reason may quote input, so it is escaped and truncated.
fn corrupt(what: &str, why: &str) -> StoreError {
    let mut shown = String::new();
    for letter in why.chars().take(SHOWN_MAX) {
        if letter.is_control() { shown.extend(letter.escape_default()) } else { shown.push(letter) }
    }
    if why.chars().nth(SHOWN_MAX).is_some() {
        shown.push('…');
    }
    StoreError::Corrupt { what: format!("{what}: {shown}") }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it by reference")]
const fn is_false(is: &bool) -> bool {
    !*is
}

#[cfg(test)]
#[path = "codec_tests.rs"]
mod tests;
