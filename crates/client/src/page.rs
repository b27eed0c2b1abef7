//! Listings come in pages.

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
                    /// Where the next page begins, for `after`; without it, this is the last.
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
    AuditPage of AuditEntry: "A page of changes, in the order they were made in.",
    TokenPage of Token: "A page of tokens, by id."
);

query! {
    /// Which page.
    #[serde(deny_unknown_fields)]
    pub struct PageQuery {
        /// Where the page begins: the `next` of the page before.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub after: Option<String>,
        /// How many at most, in 1..=1000; 100 unless said otherwise.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub max: Option<u32>,
    }

    /// What is to go.
    #[serde(deny_unknown_fields)]
    pub struct RemoveQuery {
        /// What the writer believes to be there: `any`, `absent` or a version.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub expect: Option<Expect>,
    }
}
