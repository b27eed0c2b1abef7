//! The ledger: what was used, and who changed what.

use std::collections::BTreeMap;

use tidegate_core::limit::name::{LimitName, Subject};
use tidegate_core::limit::{audit, entity, policy, token, usage};

use crate::answer::InvalidAnswer;
use crate::entity::Entity;
use crate::policy::{Policy, Version, names, scope};
use crate::text::{EntityId, ResourceName, Time};
use crate::token::{Token, TokenId};

wire! {
    /// Over how long a span usage is summed.
    #[derive(Copy, Eq, Default)]
    #[serde(rename_all = "snake_case")]
    pub enum Window {
        /// From a full hour to the next, UTC.
        #[default]
        Hour,
        /// From midnight to midnight, UTC.
        Day,
        /// From the first of a month to the next, UTC.
        Month,
    }

    /// What was used of one limit of one subject within a window.
    #[serde(deny_unknown_fields)]
    pub struct UsageLine {
        /// Whose.
        pub entity: EntityId,
        /// Of what.
        pub resource: ResourceName,
        /// Of which limit.
        pub limit: String,
        /// Over how long a span.
        pub window: Window,
        /// When it began.
        pub start: Time,
        /// Units settled, those of children that cascade included.
        pub units: u64,
        /// Units settled by the subject's own leases.
        pub own: u64,
        /// Leases settled, those of children that cascade included.
        pub leases: u64,
    }

    /// Usage summed over its windows.
    #[serde(deny_unknown_fields)]
    pub struct UsageSummary {
        /// Per limit name, what was used.
        pub limits: BTreeMap<String, UsageSum>,
        /// Windows that were summed.
        pub windows: u64,
    }

    /// What was used of one limit.
    #[derive(Copy, Eq)]
    #[serde(deny_unknown_fields)]
    pub struct UsageSum {
        /// Units settled, those of children that cascade included.
        pub units: u64,
        /// Units settled by the subjects' own leases.
        pub own: u64,
        /// Leases settled, those of children that cascade included.
        pub leases: u64,
    }

    /// An administrative change.
    #[serde(deny_unknown_fields)]
    pub struct AuditEntry {
        /// The count of changes, this one included; several entries of one change have the same.
        pub version: Version,
        /// When.
        pub at: Time,
        /// Who.
        pub actor: String,
        /// What it is filed under: an entity, `$SYSTEM`, `$RESOURCE:name` or `$TOKEN:id`.
        pub filed: String,
        /// What was changed.
        pub change: Change,
    }

    /// What was changed, from what to what; what is left out was, or is, not there.
    #[serde(rename_all = "snake_case", deny_unknown_fields)]
    pub enum Change {
        /// An entity.
        Entity {
            /// What was there.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            before: Option<Entity>,
            /// What is there now.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            after: Option<Entity>,
        },
        /// A policy.
        Policy {
            /// Whose, if it is one entity's.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            entity: Option<EntityId>,
            /// For which resource, if it is for one.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            resource: Option<ResourceName>,
            /// What was there.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            before: Option<Policy>,
            /// What is there now.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            after: Option<Policy>,
        },
        /// A token, which is never removed.
        Token {
            /// What was there.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            before: Option<Token>,
            /// What is there now.
            after: Token,
        },
    }
}

query! {
    /// Which usage: of an entity or of a resource, one of the two.
    #[serde(deny_unknown_fields)]
    pub struct UsageQuery {
        /// An entity's, of every resource.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub entity: Option<EntityId>,
        /// Every entity's, of a resource.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub resource: Option<ResourceName>,
        /// Over how long a span it is summed: `hour` unless said otherwise.
        #[serde(default)]
        pub window: Window,
        /// Windows that begin at this time or later.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub from: Option<Time>,
        /// Windows that begin before this time.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub to: Option<Time>,
        /// Where the page begins: the `next` of the page before.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub after: Option<String>,
        /// How many at most, in 1..=1000; 100 unless said otherwise.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub max: Option<u32>,
    }

    /// Which changes.
    #[serde(deny_unknown_fields)]
    pub struct AuditQuery {
        /// Those of an entity and its policies.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub entity: Option<EntityId>,
        /// Those of the policy of a resource.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub resource: Option<ResourceName>,
        /// Those of the system's policy.
        #[serde(default)]
        pub system: bool,
        /// Those of a token.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub token: Option<TokenId>,
        /// Those made at this time or later.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub from: Option<Time>,
        /// Those made before this time.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub to: Option<Time>,
        /// Where the page begins: the `next` of the page before.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub after: Option<String>,
        /// How many at most, in 1..=1000; 100 unless said otherwise.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub max: Option<u32>,
    }
}

impl From<Window> for usage::Window {
    fn from(window: Window) -> Self {
        match window {
            Window::Hour => Self::Hour,
            Window::Day => Self::Day,
            Window::Month => Self::Month,
        }
    }
}

impl From<usage::Window> for Window {
    fn from(window: usage::Window) -> Self {
        match window {
            usage::Window::Hour => Self::Hour,
            usage::Window::Day => Self::Day,
            usage::Window::Month => Self::Month,
        }
    }
}

impl From<&usage::Usage> for UsageLine {
    fn from(line: &usage::Usage) -> Self {
        Self {
            entity: line.subject.entity.clone().into(),
            resource: line.subject.resource.clone().into(),
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
        let said = |policy: &Option<policy::Policy>| policy.as_ref().map(Policy::from);
        let change = match &entry.change {
            audit::Change::Entity { before, after } => {
                Change::Entity { before: past(before), after: past(after) }
            }
            audit::Change::Policy { scope, before, after } => {
                let (entity, resource) = names(scope);
                Change::Policy { entity, resource, before: said(before), after: said(after) }
            }
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
    type Error = InvalidAnswer;

    fn try_from(wire: UsageLine) -> Result<Self, InvalidAnswer> {
        Ok(Self {
            subject: Subject { entity: wire.entity.0, resource: wire.resource.0 },
            limit: LimitName::new(&wire.limit).map_err(InvalidAnswer::of("limit"))?,
            window: wire.window.into(),
            start: wire.start.0,
            tally: UsageSum { units: wire.units, own: wire.own, leases: wire.leases }.into(),
        })
    }
}

impl UsageSummary {
    /// What was used, per limit.
    ///
    /// # Errors
    /// [`InvalidAnswer`] for a name that cannot be.
    pub fn check(self) -> Result<BTreeMap<LimitName, usage::Tally>, InvalidAnswer> {
        let name = |name: String| LimitName::new(&name).map_err(InvalidAnswer::of("limits"));
        self.limits.into_iter().map(|(limit, sum)| Ok((name(limit)?, sum.into()))).collect()
    }
}

impl AuditQuery {
    /// Asks for what is filed under this.
    #[must_use]
    pub fn filed(mut self, filed: &audit::Filed) -> Self {
        let text = filed.as_str();
        // No name of an entity begins with `$`.
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
    type Error = InvalidAnswer;

    fn try_from(wire: AuditEntry) -> Result<Self, InvalidAnswer> {
        let said = |policy: Option<Policy>| policy.map(policy::Policy::try_from).transpose();
        let invalid = InvalidAnswer::of("change");
        let (filed, change) = match wire.change {
            Change::Entity { before, after } => {
                let [before, after] = [before, after].map(|entity| entity.map(entity::Entity::from));
                let whose = after.as_ref().or(before.as_ref());
                let nobody =
                    || InvalidAnswer { field: "change", why: "it is of nothing to nothing".to_owned() };
                (
                    audit::Filed::entity(whose.ok_or_else(nobody)?.id()),
                    audit::Change::Entity { before, after },
                )
            }
            Change::Policy { entity, resource, before, after } => {
                let scope = scope(entity, resource);
                let (before, after) = (said(before).map_err(&invalid)?, said(after).map_err(&invalid)?);
                (audit::Filed::scope(&scope), audit::Change::Policy { scope, before, after })
            }
            Change::Token { before, after } => {
                let after = token::Token::try_from(after)?;
                let before = before.map(token::Token::try_from).transpose()?;
                (audit::Filed::token(&after.id), audit::Change::Token { before, after })
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
    fn usage_is_read_back_as_it_was_written() {
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
        assert_eq!(summary.check().unwrap(), BTreeMap::from([(line.limit, line.tally)]));
        let bad = UsageLine { limit: "r m".to_owned(), ..wire };
        assert_eq!(usage::Usage::try_from(bad).unwrap_err().field, "limit");
    }

    #[test]
    fn a_change_is_read_back_as_it_was_written_and_is_found_where_it_is_filed() {
        let subject = Subject::new("acme", "gpt").unwrap();
        let policy = policy::Policy::new(["rpm:5/s".parse().unwrap()]).unwrap();
        let made = token::Token {
            id: token::TokenId::new("ci").unwrap(),
            name: "ci".to_owned(),
            namespace: name::Namespace::new("default").unwrap(),
            scopes: token::TokenScopes::new([token::TokenScope::Read]),
            created_at: Stamp::from_secs(5),
            created_by: "ops".to_owned(),
            expires_at: None,
            revoked_at: None,
        };
        let of = |scope: Scope| {
            (
                audit::Filed::scope(&scope),
                audit::Change::Policy { scope, before: None, after: Some(policy.clone()) },
            )
        };
        let changes = [
            (audit::Filed::token(&made.id), audit::Change::Token { before: Some(made.clone()), after: made }),
            (
                audit::Filed::entity(&subject.entity),
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
            let asked =
                [query.entity.is_some(), query.resource.is_some(), query.system, query.token.is_some()];
            assert_eq!(asked.iter().filter(|is_asked| **is_asked).count(), 1, "{filed}");
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
