//! The ledger: what was used, and who changed what.

use std::collections::BTreeMap;

use tidegate_core::limit::{audit, policy, usage};

use crate::entity::Entity;
use crate::policy::{Policy, Version, names};
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

impl From<&usage::Usage> for UsageLine {
    fn from(line: &usage::Usage) -> Self {
        Self {
            entity: line.subject.entity.clone().into(),
            resource: line.subject.resource.clone().into(),
            limit: line.limit.to_string(),
            window: match line.window {
                usage::Window::Hour => Window::Hour,
                usage::Window::Day => Window::Day,
                usage::Window::Month => Window::Month,
            },
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
