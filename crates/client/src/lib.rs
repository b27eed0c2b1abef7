//! What a tidegate server and its callers say to each other.
//!
//! Every body of the HTTP API is a type here, and every type is checked when it is read: a name that cannot be, a field
//! that nobody knows, a limit asked for twice are refused with the field and the bound before anything is done. Amounts
//! are integers, spans are [`Seconds`], points in time are [`Time`]s as RFC 3339 writes them, limits are text such as
//! `tpm:100k/min:150k`. An error is a [`Problem`] (RFC 9457).
//!
//! ```
//! use tidegate_client::Acquire;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let ask: Acquire =
//!     serde_json::from_str(r#"{"entity": "acme", "resource": "gpt-4", "cost": {"rpm": 1, "tpm": 800}}"#)?;
//! assert_eq!(ask.cost.get("tpm"), Some(800));
//!
//! let refused = serde_json::from_str::<Acquire>(r#"{"entity": "a#b", "resource": "gpt-4", "cost": {}}"#);
//! assert!(refused.unwrap_err().to_string().starts_with("the entity `a#b` holds '#' at byte 1"));
//! # Ok(())
//! # }
//! ```
//!
//! With the feature `openapi` each type has a schema.

/// A type that goes over the wire: read and written by its fields.
#[cfg(feature = "openapi")]
macro_rules! wire {
    ($($item:item)+) => {
        $(
            #[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize, utoipa::ToSchema)]
            $item
        )+
    };
}

/// A type that goes over the wire: read and written by its fields.
#[cfg(not(feature = "openapi"))]
macro_rules! wire {
    ($($item:item)+) => {
        $(
            #[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
            $item
        )+
    };
}

/// What is asked in an address behind the `?`.
#[cfg(feature = "openapi")]
macro_rules! query {
    ($($item:item)+) => {
        $(
            #[derive(Debug, Clone, Default, PartialEq, serde::Serialize, serde::Deserialize, utoipa::IntoParams)]
            #[into_params(parameter_in = Query)]
            $item
        )+
    };
}

/// What is asked in an address behind the `?`.
#[cfg(not(feature = "openapi"))]
macro_rules! query {
    ($($item:item)+) => {
        $(
            #[derive(Debug, Clone, Default, PartialEq, serde::Serialize, serde::Deserialize)]
            $item
        )+
    };
}

mod acquire;
mod amounts;
mod entity;
mod expect;
mod lease;
mod ledger;
mod limit;
#[cfg(feature = "openapi")]
mod openapi;
mod page;
mod plan;
mod policy;
mod problem;
mod seconds;
mod text;
mod token;

pub use acquire::{Acquire, BATCH_MAX, Batch, BatchDone, BatchResult, Degraded, Granted, Spend};
pub use amounts::{AMOUNTS_MAX, Amounts, Changes, Cost};
pub use entity::{Entity, PutEntity};
pub use expect::{Expect, InvalidExpect};
pub use lease::{Adjust, Cancel, Extend, OpenLease, Renew, Renewed, Settle, StepDone};
pub use ledger::{AuditEntry, AuditQuery, Change, UsageLine, UsageQuery, UsageSum, UsageSummary, Window};
pub use limit::{Ask, BalanceQuery, Balances, Explanation, LimitState, Would};
pub use page::{AuditPage, EntityPage, PageQuery, PolicyPage, RemoveQuery, TokenPage, UsagePage};
pub use plan::{Apply, Declaration, Declared, PLAN_MAX, Plan, PlanStep, PolicyChange};
pub use policy::{
    OnExpiry, OnUnavailable, Policy, PolicyAt, PolicyQuery, PutPolicy, ScopeQuery, Version, Written,
};
pub use problem::Problem;
pub use seconds::{InvalidSeconds, SECONDS_MAX, Seconds};
pub use text::{EntityId, LeaseRef, LimitText, ResourceName, Time};
pub use token::{CreatedToken, PutToken, Token, TokenId, TokenScopes};
