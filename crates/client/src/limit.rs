//! Limits as they are: balances, and what would happen.

use tidegate_core::limit::balance::Balance;
use tidegate_core::limit::resolve::Source;

use crate::amounts::Cost;
use crate::policy::{OnExpiry, OnUnavailable, Version};
use crate::seconds::Seconds;
use crate::text::{EntityId, LimitText, ResourceName};

wire! {
    /// One limit of one subject, as it is.
    #[serde(deny_unknown_fields)]
    pub struct LimitState {
        /// Whose.
        pub entity: EntityId,
        /// Of what.
        pub resource: ResourceName,
        /// The limit's name.
        pub limit: String,
        /// Where it is written: `system`, `resource gpt-4`, `entity acme`, `entity acme, resource gpt-4`, `defaults` or
        /// `this call`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub source: Option<String>,
        /// Whole units there; below zero is debt.
        pub available: i64,
        /// What a full bucket holds.
        pub burst: u64,
        /// Units per period.
        pub amount: u64,
        /// The period.
        pub period: Seconds,
        /// What was asked of it.
        pub asked: u64,
        /// How long until that can be had: 0 is now, and without it never.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub retry_after: Option<Seconds>,
    }

    /// The limits of a subject and of those above it.
    #[serde(deny_unknown_fields)]
    pub struct Balances {
        /// The limits, the subject's own first.
        pub limits: Vec<LimitState>,
    }

    /// Asks what would happen.
    #[serde(deny_unknown_fields)]
    pub struct Ask {
        /// Who would ask.
        pub entity: EntityId,
        /// For what.
        pub resource: ResourceName,
        /// How much of each limit; at least one above 0.
        pub cost: Cost,
        /// Limits of this call, in the place of the subject's own of the same names.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        pub limits: Vec<LimitText>,
    }

    /// What would happen, and why: nothing was taken.
    #[serde(deny_unknown_fields)]
    pub struct Explanation {
        /// What would happen.
        pub would: Would,
        /// How long until it can be had, where it would have to wait.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub retry_after: Option<Seconds>,
        /// Every limit that would be asked, or could be, the subject's own first.
        pub limits: Vec<LimitState>,
        /// What happens when the store is away.
        pub on_unavailable: OnUnavailable,
        /// Where that is written.
        pub on_unavailable_source: String,
        /// What becomes of leases that are never ended.
        pub on_expiry: OnExpiry,
        /// Where that is written.
        pub on_expiry_source: String,
        /// The count of administrative changes that this is as of.
        pub version: Version,
    }

    /// What would happen.
    #[derive(Copy, Eq)]
    #[serde(rename_all = "snake_case")]
    pub enum Would {
        /// It would be granted.
        Grant,
        /// It would have to wait.
        Wait,
        /// It can never be had.
        Never,
    }
}

query! {
    /// Whose balances.
    #[serde(deny_unknown_fields)]
    pub struct BalanceQuery {
        /// Whose.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub entity: Option<EntityId>,
        /// Of what; without it, of everything the entity and those it draws from have used.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub resource: Option<ResourceName>,
    }
}

impl LimitState {
    /// A limit's state, and where the limit is written if that is known.
    pub fn new(balance: &Balance, source: Option<&Source>) -> Self {
        Self {
            entity: balance.subject.entity.clone().into(),
            resource: balance.subject.resource.clone().into(),
            limit: balance.limit.to_string(),
            source: source.map(Source::to_string),
            available: balance.available,
            burst: balance.burst,
            amount: balance.amount,
            period: balance.period.into(),
            asked: balance.asked,
            retry_after: balance.retry_after.map(Seconds::from),
        }
    }
}
