//! Usage reports and the audit log.

use std::collections::BTreeMap;

use tidegate_core::limit::name::{LimitKey, LimitName, Subject};
use tidegate_core::limit::{audit, entity, policy, token, usage};

use crate::entity::Entity;
use crate::policy::{Policy, Version, names, scope};
use crate::response::InvalidResponse;
use crate::text::{EntityId, ResourceName, Time};
use crate::token::{Token, TokenId};

wire! {
    /// The length of a usage window.
    #[derive(Copy, Eq, Default)]
    #[serde(rename_all = "snake_case")]
    pub enum Window {
        /// One minute, UTC.
        Minute,
        /// One hour, UTC.
        #[default]
        Hour,
        /// One day, UTC.
        Day,
        /// One calendar month, UTC.
        Month,
    }

    /// Usage of one limit of one bucket within a window.
    #[serde(deny_unknown_fields)]
    pub struct UsageLine {
        /// The entity; absent if all entities share the bucket (`across=entities` or `both`).
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub entity: Option<EntityId>,
        /// The resource; absent if all resources share the bucket (`across=resources` or `both`).
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub resource: Option<ResourceName>,
        /// The name of the limit.
        pub limit: String,
        /// The length of the window.
        pub window: Window,
        /// Start of the window.
        pub start: Time,
        /// Units settled, including those of cascading children.
        pub units: u64,
        /// Units settled by the subject's own leases.
        pub own: u64,
        /// Leases settled, including those of cascading children.
        pub leases: u64,
    }

    /// Usage summed over windows.
    #[serde(deny_unknown_fields)]
    pub struct UsageSummary {
        /// Usage by limit: `tpm`, or `tpm,across=resources` for a pooled limit. The same leases may count in
        /// several of them.
        pub limits: BTreeMap<String, UsageSum>,
        /// The number of windows summed.
        pub windows: u64,
    }

    /// Usage of one limit.
    #[derive(Copy, Eq)]
    #[serde(deny_unknown_fields)]
    pub struct UsageSum {
        /// Units settled, including those of cascading children.
        pub units: u64,
        /// Units settled by the subjects' own leases.
        pub own: u64,
        /// Leases settled, including those of cascading children.
        pub leases: u64,
    }

    /// An administrative change.
    #[serde(deny_unknown_fields)]
    pub struct AuditEntry {
        /// The number of changes, including this one; entries of the same change share it.
        pub version: Version,
        /// When the change was made.
        pub at: Time,
        /// Who made the change.
        pub actor: String,
        /// The key it is filed under: an entity, `$SYSTEM`, `$RESOURCE:name` or `$TOKEN:id`.
        pub filed: String,
        /// The change.
        pub change: Change,
    }

    /// A change with its states before and after; an absent state means that nothing was stored.
    #[serde(rename_all = "snake_case", deny_unknown_fields)]
    pub enum Change {
        /// An entity.
        Entity {
            /// The previous state.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            before: Option<Entity>,
            /// The new state.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            after: Option<Entity>,
        },
        /// A policy.
        Policy {
            /// The entity, for an entity's policy.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            entity: Option<EntityId>,
            /// The resource, for a resource's policy.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            resource: Option<ResourceName>,
            /// The previous state.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            before: Option<Policy>,
            /// The new state.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            after: Option<Policy>,
        },
        /// The units available in a bucket.
        Bucket {
            /// The entity; absent if all entities share the bucket.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            entity: Option<EntityId>,
            /// The resource; absent if all resources share the bucket.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            resource: Option<ResourceName>,
            /// The name of the limit.
            limit: String,
            /// The units available before; negative is debt.
            before: i64,
            /// The units that were set.
            after: u64,
        },
        /// A token. Tokens are never removed.
        Token {
            /// The previous state.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            before: Option<Token>,
            /// The new state.
            after: Token,
        },
    }
}

query! {
    /// Selects the usage of an entity or of a resource, or that of limits across all resources.
    #[serde(deny_unknown_fields)]
    pub struct UsageQuery {
        /// Usage of this entity, for all resources.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub entity: Option<EntityId>,
        /// Usage of this resource, by all entities.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub resource: Option<ResourceName>,
        /// Usage of limits across all resources, by all entities.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        pub system: bool,
        /// The length of the windows; default `hour`.
        #[serde(default)]
        pub window: Window,
        /// Only windows that begin at or after this time.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub from: Option<Time>,
        /// Only windows that begin before this time.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub to: Option<Time>,
        /// Where the page begins: the `next` of the previous page.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub after: Option<String>,
        /// Maximum number of items, in 1..=1000; default 100.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub max: Option<u32>,
    }

    /// Selects changes.
    #[serde(deny_unknown_fields)]
    pub struct AuditQuery {
        /// Changes of this entity and its policies.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub entity: Option<EntityId>,
        /// Changes of this resource's policy.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub resource: Option<ResourceName>,
        /// Changes of the system policy.
        #[serde(default)]
        pub system: bool,
        /// Changes of this token.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub token: Option<TokenId>,
        /// Changes made at or after this time.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub from: Option<Time>,
        /// Changes made before this time.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub to: Option<Time>,
        /// Where the page begins: the `next` of the previous page.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub after: Option<String>,
        /// Maximum number of items, in 1..=1000; default 100.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub max: Option<u32>,
    }
}

impl From<Window> for usage::Window {
    fn from(window: Window) -> Self {
        match window {
            Window::Minute => Self::Minute,
            Window::Hour => Self::Hour,
            Window::Day => Self::Day,
            Window::Month => Self::Month,
        }
    }
}

impl From<usage::Window> for Window {
    fn from(window: usage::Window) -> Self {
        match window {
            usage::Window::Minute => Self::Minute,
            usage::Window::Hour => Self::Hour,
            usage::Window::Day => Self::Day,
            usage::Window::Month => Self::Month,
        }
    }
}

impl From<&usage::Usage> for UsageLine {
    fn from(line: &usage::Usage) -> Self {
        Self {
            entity: line.subject.one_entity().cloned().map(EntityId),
            resource: line.subject.one_resource().cloned().map(ResourceName),
            limit: line.limit.to_string(),
            window: line.window.into(),
            start: line.start.into(),
            units: line.tally.units,
            own: line.tally.own,
            leases: line.tally.leases,
        }
    }
}

impl From<usage::Tally> for UsageSum {
    fn from(tally: usage::Tally) -> Self {
        Self { units: tally.units, own: tally.own, leases: tally.leases }
    }
}

impl From<&audit::Entry> for AuditEntry {
    fn from(entry: &audit::Entry) -> Self {
        let past = |entity: &Option<_>| entity.as_ref().map(|entity| Entity::new(entity, None));
        let converted = |policy: &Option<policy::Policy>| policy.as_ref().map(Policy::from);
        let change = match &entry.change {
            audit::Change::Entity { before, after } => {
                Change::Entity { before: past(before), after: past(after) }
            }
            audit::Change::Policy { scope, before, after } => {
                let (entity, resource) = names(scope);
                Change::Policy { entity, resource, before: converted(before), after: converted(after) }
            }
            audit::Change::Bucket { bucket, limit, before, after } => Change::Bucket {
                entity: bucket.one_entity().cloned().map(EntityId),
                resource: bucket.one_resource().cloned().map(ResourceName),
                limit: limit.to_string(),
                before: *before,
                after: *after,
            },
            audit::Change::Token { before, after } => {
                Change::Token { before: before.as_ref().map(Token::from), after: after.into() }
            }
        };
        Self {
            version: entry.version.number(),
            at: entry.at.into(),
            actor: entry.actor.clone(),
            filed: entry.filed.to_string(),
            change,
        }
    }
}

impl From<UsageSum> for usage::Tally {
    fn from(wire: UsageSum) -> Self {
        Self { units: wire.units, own: wire.own, leases: wire.leases }
    }
}

impl TryFrom<UsageLine> for usage::Usage {
    type Error = InvalidResponse;

    fn try_from(wire: UsageLine) -> Result<Self, InvalidResponse> {
        Ok(Self {
            subject: Subject::pool(wire.entity.map(|name| name.0), wire.resource.map(|name| name.0)),
            limit: LimitName::new(&wire.limit).map_err(InvalidResponse::of("limit"))?,
            window: wire.window.into(),
            start: wire.start.0,
            tally: UsageSum { units: wire.units, own: wire.own, leases: wire.leases }.into(),
        })
    }
}

impl UsageSummary {
    /// Converts into usage by limit.
    ///
    /// # Errors
    /// [`InvalidResponse`] for an invalid limit name.
    pub fn check(self) -> Result<BTreeMap<LimitKey, usage::Tally>, InvalidResponse> {
        let key = |text: String| text.parse().map_err(InvalidResponse::of("limits"));
        self.limits.into_iter().map(|(limit, sum)| Ok((key(limit)?, sum.into()))).collect()
    }
}

impl AuditQuery {
    /// Selects the changes filed under this key.
    #[must_use]
    pub fn filed(mut self, filed: &audit::AuditKey) -> Self {
        let text = filed.as_str();
        // Entity names never begin with `$`.
        if let Some(id) = text.strip_prefix("$TOKEN:") {
            self.token = id.parse().ok();
        } else if let Some(name) = text.strip_prefix("$RESOURCE:") {
            self.resource = name.parse().ok();
        } else if text == "$SYSTEM" {
            self.system = true;
        } else {
            self.entity = text.parse().ok();
        }
        self
    }
}

impl TryFrom<AuditEntry> for audit::Entry {
    type Error = InvalidResponse;

    fn try_from(wire: AuditEntry) -> Result<Self, InvalidResponse> {
        let converted = |policy: Option<Policy>| policy.map(policy::Policy::try_from).transpose();
        let invalid = InvalidResponse::of("change");
        let (filed, change) = match wire.change {
            Change::Entity { before, after } => {
                let [before, after] = [before, after].map(|entity| entity.map(entity::Entity::from));
                let changed = after.as_ref().or(before.as_ref());
                let empty = || InvalidResponse {
                    field: "change",
                    why: "it has neither `before` nor `after`".to_owned(),
                };
                (
                    audit::AuditKey::entity(changed.ok_or_else(empty)?.id()),
                    audit::Change::Entity { before, after },
                )
            }
            Change::Policy { entity, resource, before, after } => {
                let scope = scope(entity, resource);
                let (before, after) =
                    (converted(before).map_err(&invalid)?, converted(after).map_err(&invalid)?);
                (audit::AuditKey::scope(&scope), audit::Change::Policy { scope, before, after })
            }
            Change::Bucket { entity, resource, limit, before, after } => {
                let bucket = Subject::pool(entity.map(|name| name.0), resource.map(|name| name.0));
                let limit = LimitName::new(&limit).map_err(InvalidResponse::of("limit"))?;
                let filed = audit::AuditKey::bucket(&bucket);
                (filed, audit::Change::Bucket { bucket, limit, before, after })
            }
            Change::Token { before, after } => {
                let after = token::Token::try_from(after)?;
                let before = before.map(token::Token::try_from).transpose()?;
                (audit::AuditKey::token(&after.id), audit::Change::Token { before, after })
            }
        };
        let version = policy::Version::new(wire.version);
        Ok(Self { version, at: wire.at.0, actor: wire.actor, filed, change })
    }
}

#[cfg(test)]
mod tests {
    use tidegate_core::limit::name;
    use tidegate_core::limit::policy::Scope;
    use tidegate_core::time::Stamp;

    use super::*;

    fn entity(text: &str) -> entity::Entity {
        entity::Entity::new(name::EntityId::new(text).expect("a name"))
    }

    #[test]
    fn usage_round_trips() {
        let line = usage::Usage {
            subject: Subject::new("acme", "gpt").unwrap(),
            limit: LimitName::new("rpm").unwrap(),
            window: usage::Window::Month,
            start: Stamp::from_secs(0),
            tally: usage::Tally { units: 7, own: 5, leases: 2 },
        };
        let wire = UsageLine::from(&line);
        assert_eq!(usage::Usage::try_from(wire.clone()).unwrap(), line);
        let limits = BTreeMap::from([("rpm".to_owned(), UsageSum::from(line.tally))]);
        let summary = UsageSummary { limits, windows: 1 };
        assert_eq!(summary.check().unwrap(), BTreeMap::from([(line.limit.into(), line.tally)]));
        let bad = UsageLine { limit: "r m".to_owned(), ..wire };
        assert_eq!(usage::Usage::try_from(bad).unwrap_err().field, "limit");
    }

    #[test]
    fn audit_entry_round_trips_and_matches_its_query() {
        let subject = Subject::new("acme", "gpt").unwrap();
        let policy = policy::Policy::new(["rpm:5/s".parse().unwrap()]).unwrap();
        let made = token::Token {
            id: token::TokenId::new("ci").unwrap(),
            name: "ci".to_owned(),
            namespace: name::Namespace::new("default").unwrap(),
            scopes: token::TokenScopes::new([token::TokenScope::Read]),
            entity: None,
            created_at: Stamp::from_secs(5),
            created_by: "ops".to_owned(),
            expires_at: None,
            revoked_at: None,
        };
        let of = |scope: Scope| {
            (
                audit::AuditKey::scope(&scope),
                audit::Change::Policy { scope, before: None, after: Some(policy.clone()) },
            )
        };
        let changes = [
            (
                audit::AuditKey::token(&made.id),
                audit::Change::Token { before: Some(made.clone()), after: made },
            ),
            (
                audit::AuditKey::entity(&subject.entity),
                audit::Change::Entity { before: Some(entity("acme")), after: None },
            ),
            of(Scope::System),
            of(Scope::Resource(subject.resource.clone())),
            of(Scope::Subject(subject)),
        ];
        for (filed, change) in changes {
            let (version, at) = (policy::Version::new(3), Stamp::from_secs(9));
            let entry = audit::Entry { version, at, actor: "ops".to_owned(), filed: filed.clone(), change };
            assert_eq!(audit::Entry::try_from(AuditEntry::from(&entry)).unwrap(), entry);
            let query = AuditQuery::default().filed(&filed);
            let filters =
                [query.entity.is_some(), query.resource.is_some(), query.system, query.token.is_some()];
            assert_eq!(filters.iter().filter(|is_set| **is_set).count(), 1, "{filed}");
        }
        let nothing = Change::Entity { before: None, after: None };
        let wire = AuditEntry {
            version: 1,
            at: Stamp::from_secs(1).into(),
            actor: "ops".to_owned(),
            filed: "acme".to_owned(),
            change: nothing,
        };
        assert_eq!(audit::Entry::try_from(wire).unwrap_err().field, "change");
    }
}
