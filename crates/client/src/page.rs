//! Pages of listings, and the queries that select them.

use crate::entity::Entity;
use crate::expect::Expect;
use crate::ledger::{AuditEntry, UsageLine};
use crate::policy::PolicyAt;
use crate::token::Token;

macro_rules! page {
    ($($Page:ident of $Item:ident: $doc:literal),+) => {
        wire! {
            $(
                #[doc = $doc]
                #[serde(deny_unknown_fields)]
                pub struct $Page {
                    /// The items, in the listing's order.
                    pub items: Vec<$Item>,
                    /// Where the next page begins, for `after`; absent on the last page.
                    #[serde(default, skip_serializing_if = "Option::is_none")]
                    pub next: Option<String>,
                }
            )+
        }
    };
}

page!(
    EntityPage of Entity: "A page of entities, by id.",
    PolicyPage of PolicyAt: "A page of policies, in the order of their scopes.",
    UsagePage of UsageLine: "A page of usage, by subject, limit and window.",
    AuditPage of AuditEntry: "A page of changes, oldest first.",
    TokenPage of Token: "A page of tokens, by id."
);

query! {
    /// Selects a page.
    #[serde(deny_unknown_fields)]
    pub struct PageQuery {
        /// Where the page begins: the `next` of the previous page.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub after: Option<String>,
        /// Maximum number of items, in 1..=1000; default 100.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub max: Option<u32>,
    }

    /// Options of a removal.
    #[serde(deny_unknown_fields)]
    pub struct RemoveQuery {
        /// The expected current state: `any`, `absent` or a version.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub expect: Option<Expect>,
    }
}
