//! Wire types of the tidegate HTTP API, and a client for it.
//!
//! # The client
//!
//! The feature `http` provides a [`Client`] with one function for each route of the server. Its functions
//! take and return the types below. Acquire a [`Lease`], do the work, and settle the lease at what the work
//! used.
//!
//! ```
//! # use tidegate::{Limit, Limiter, Memory, Policy, Scope};
//! # use tidegate_core::limit::{name::Namespace, token::{NewToken, TokenId, TokenScope, TokenScopes}};
//! # use tidegate_server::{Secret, Server, ServerOptions, Shutdown, State};
//! use tidegate_client::{Acquire, Client, ClientError, Cost};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let limiter = Limiter::new(Memory::new());
//! # limiter.admin("docs").set_policy(Scope::System, Policy::new([Limit::per_minute("tpm", 1_000)])?).await?;
//! # let id = TokenId::new("ci")?;
//! # let secret = Secret::generate(&id);
//! # let token = secret.reveal();
//! # let new = NewToken {
//! #     name: "ci".to_owned(),
//! #     id,
//! #     namespace: Namespace::new("default")?,
//! #     scopes: TokenScopes::new(TokenScope::ALL),
//! #     entity: None,
//! #     expires_at: None,
//! # };
//! # tidegate::store::Tokens::create_token(limiter.store(), &new, secret.hash(), "docs").await?;
//! # let server = Server::bind(&ServerOptions::new("127.0.0.1:0".parse()?)).await?;
//! # let url = &format!("http://{}", server.local_addr());
//! # let (_stopper, shutdown) = Shutdown::new();
//! # tokio::spawn(server.run(State::new(limiter).await?, shutdown));
//! // `url` is http://127.0.0.1:8707 by default; `tidegate token create` prints a `token`.
//! let client = Client::new(url)?.token(token)?;
//! let request = Acquire::new("acme".parse()?, "gpt-4".parse()?, Cost::of([("tpm", 800)])?);
//!
//! let lease = client.acquire(&request).await?;
//! match client.acquire(&request).await {
//!     Err(error @ ClientError::Refused { .. }) => {
//!         assert_eq!(error.short_limits().next().map(|limit| limit.limit.as_str()), Some("tpm"));
//!         assert!(error.retry_after().is_some());
//!     }
//!     other => panic!("{other:?}"),
//! }
//! lease.settle(Cost::of([("tpm", 150)])?).await?;
//!
//! // A lease that is dropped without being settled is cancelled: its units are returned.
//! drop(client.acquire(&request).await?);
//! client.drain().await;
//! # Ok(())
//! # }
//! ```
//!
//! - **Leases renew themselves.** A background task renews a lease each time a third of its duration has
//!   passed, for as long as its handle lives. Dropping the handle cancels the lease in the background. The
//!   number of concurrent background endings is bounded; an ending without a free slot, a runtime or a
//!   response is [counted](ClientStats::endings_lost), and the lease ends at its deadline. A lease that the
//!   server has ended is [lost](Lease::is_lost), and its next call fails. [`Lease::detach`] releases a handle
//!   without ending its lease, and [`Client::resume`] continues it.
//! - **Retries never execute a call twice.** The client retries reads, lease steps (idempotent by their
//!   number), draws (idempotent by their request id), writes with an expected version, and calls that the
//!   server reports as not executed or that never reached it. Every other call returns
//!   [`ClientError::Unavailable`] after its first attempt, and [`may_be_done`](ClientError::may_be_done)
//!   reports whether it may have been executed.
//! - **Everything is bounded.** [`Retry`] and [`RetryBudget`] bound the attempts, their delays and their
//!   share of the traffic. [`ClientBuilder`] sets timeouts for the connection, each attempt and the whole
//!   call. Response bodies have a maximum size. `Retry-After` is honored.
//! - **Errors are classified by what the caller does next.** [`ClientError`] distinguishes a refusal, an
//!   invalid token, a missing scope, an ended lease, an unavailable server and an invalid response.
//! - **Tokens never leak.** `Debug` and errors hide the token, even where the server echoes it. The client
//!   follows no redirects and ignores proxy environment variables.
//!
//! [`blocking`] is the same client for synchronous code (feature `blocking`). URLs that begin with `https://`
//! need the feature `rustls`. [`root_certificates`](ClientBuilder::root_certificates) configures a private
//! CA, and [`identity`](ClientBuilder::identity) a client certificate.
//!
//! # The types
//!
//! Every body of the HTTP API is a type in this crate, validated when it is deserialized: invalid names,
//! unknown fields and duplicate limits are rejected with the field and the bound. Amounts are integers,
//! durations are [`Seconds`], timestamps are [`Time`]s in RFC 3339 format, and limits are text such as
//! `tpm:100k/min:150k`. Errors are [`Problem`]s (RFC 9457).
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
//! assert!(refused.unwrap_err().to_string().starts_with("the entity `a#b` has '#' at byte 1"));
//! # Ok(())
//! # }
//! ```
//!
//! The types need no feature and do not pull in the client. The feature `openapi` adds a schema to each type.

/// Defines wire types with the common derives.
macro_rules! wire {
    ($($item:item)+) => {
        secret_wire! { $(#[derive(Debug)] $item)+ }
    };
}

/// Like `wire!`, for types that implement `Debug` by hand to hide a secret.
#[cfg(feature = "openapi")]
macro_rules! secret_wire {
    ($($item:item)+) => {
        $(
            #[derive(Clone, PartialEq, serde::Serialize, serde::Deserialize, utoipa::ToSchema)]
            $item
        )+
    };
}

/// Like `wire!`, for types that implement `Debug` by hand to hide a secret.
#[cfg(not(feature = "openapi"))]
macro_rules! secret_wire {
    ($($item:item)+) => {
        $(
            #[derive(Clone, PartialEq, serde::Serialize, serde::Deserialize)]
            $item
        )+
    };
}

/// Defines query parameter types with the common derives.
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

/// Defines query parameter types with the common derives.
#[cfg(not(feature = "openapi"))]
macro_rules! query {
    ($($item:item)+) => {
        $(
            #[derive(Debug, Clone, Default, PartialEq, serde::Serialize, serde::Deserialize)]
            $item
        )+
    };
}

/// Like `wire!`, for a type whose OpenAPI schema is named `$schema`.
#[cfg(feature = "openapi")]
macro_rules! wire_as {
    ($schema:ident: $item:item) => {
        #[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize, utoipa::ToSchema)]
        #[schema(as = $schema)]
        $item
    };
}

/// Like `wire!`, for a type whose OpenAPI schema is named `$schema`.
#[cfg(not(feature = "openapi"))]
macro_rules! wire_as {
    ($schema:ident: $item:item) => {
        #[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
        $item
    };
}

mod acquire;
mod amounts;
mod entity;
mod event;
mod expect;
#[cfg(feature = "http")]
#[macro_use]
mod http;
#[cfg(feature = "blocking")]
pub mod blocking;
mod lease;
mod ledger;
mod limit;
mod object;
#[cfg(feature = "openapi")]
mod openapi;
mod page;
mod policy;
mod policy_changes;
mod problem;
mod response;
mod seconds;
mod status;
mod text;
#[cfg(feature = "rustls")]
mod tls;
#[cfg(all(feature = "http", not(feature = "rustls")))]
#[path = "no_tls.rs"]
mod tls;
mod token;
mod upstream;

/// Whether https:// URLs are supported.
#[cfg(feature = "http")]
const HAS_TLS: bool = cfg!(feature = "rustls");

pub use acquire::{Acquire, BATCH_MAX, Batch, BatchDone, BatchResult, Degraded, Granted, Spend};
pub use amounts::{AMOUNTS_MAX, Amounts, Changes, Cost};
pub use entity::{Entity, PutEntity};
pub use event::{Event, Snapshot, SubjectGrants};
pub use expect::{Expect, InvalidExpect};
#[cfg(feature = "http")]
pub use http::{
    Cause, Client, ClientBuilder, ClientError, ClientStats, Events, InvalidClient, Lease, Outage, Page,
    Pages, Query, StopReason,
};
pub use lease::{Adjust, Cancel, Extend, OpenLease, Renew, Renewed, Settle, StepDone};
pub use ledger::{AuditEntry, AuditQuery, Change, UsageLine, UsageQuery, UsageSum, UsageSummary, Window};
pub use limit::{
    Ask, BalanceQuery, Balances, Behaviour, BucketWritten, Capacities, Capacity, CapacityQuery, Explanation,
    Forecast, LimitState, PutBucket,
};
pub use page::{AuditPage, EntityPage, PageQuery, PolicyPage, RemoveQuery, TokenPage, UsagePage};
pub use policy::{
    OnExpiry, OnUnavailable, Policy, PolicyAt, PolicyQuery, PutPolicy, ScopeQuery, Version, Written,
};
pub use policy_changes::{Apply, Declaration, Declared, PLAN_MAX, PlanStep, PolicyChange, PolicyChanges};
pub use problem::Problem;
pub use response::InvalidResponse;
pub use seconds::{InvalidSeconds, SECONDS_MAX, Seconds};
pub use status::Status;
pub use text::{
    EntityId, InvalidRequestId, LeaseRef, LimitText, REQUEST_ID_MAX, REQUEST_ID_MIN, RequestId, ResourceName,
    Time,
};
#[cfg(feature = "http")]
pub use tidegate_core::backoff::{Backoff, Jitter};
#[cfg(feature = "http")]
pub use tidegate_core::retry::{Retry, RetryBudget, WhenRefused};
pub use token::{CreatedToken, PutToken, Token, TokenId, TokenScopes};
pub use upstream::{
    AcquireCall, CallPermit, CallSettled, RetryAdvice, SettleCall, UpstreamList, UpstreamState,
};
