//! What a tidegate server and its callers say to each other, and a client that says it.
//!
//! # The client
//!
//! With the feature `http` there is a [`Client`]: one function for each route of the server, which take and answer the types
//! below. Draw a [`Lease`], do the work, and settle the lease at what the work took.
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
//! #     expires_at: None,
//! # };
//! # tidegate::store::Tokens::create_token(limiter.store(), &new, secret.hash(), "docs").await?;
//! # let server = Server::bind(&ServerOptions::new("127.0.0.1:0".parse()?)).await?;
//! # let url = &format!("http://{}", server.local_addr());
//! # let (_stopper, shutdown) = Shutdown::new();
//! # tokio::spawn(server.run(State::new(limiter).await?, shutdown));
//! // `url` is http://127.0.0.1:8707 where nothing else was said, and `token` what `tidegate token create` shows.
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
//! // Dropped without an end, it is cancelled: all it drew returns.
//! drop(client.acquire(&request).await?);
//! client.drain().await;
//! # Ok(())
//! # }
//! ```
//!
//! - **Leases look after themselves.** A lease is renewed in the background each time a third of its time has passed, for as long
//!   as its handle lives. Dropped, it is cancelled in the background; at most so many endings are under way, and those that
//!   find no room, no runtime or no answer are [counted](ClientStats::endings_lost) and left to the lease's deadline. A lease that
//!   the server has ended is [lost](Lease::is_lost), and its next call says so. [`Lease::detach`] lets go of one,
//!   [`Client::resume`] takes it up.
//! - **Nothing is done twice.** A call is tried again only where that is certain: what only looks; steps of a lease, by their
//!   number; draws, by an id that the client chooses where its caller has not; changes that say what they expect; and anything of
//!   which the server says that it was not done, or that never reached it. Everything else answers [`ClientError::Away`] after
//!   its first attempt, and [`may_be_done`](ClientError::may_be_done) tells whether it was perhaps done.
//! - **Everything has a bound.** Attempts, their spacing and their share of the traffic are a [`Retry`] with a [`RetryBudget`]; a
//!   connection, an attempt and a whole call have their time ([`ClientBuilder`]); an answer has its size. Whoever says when to come
//!   back is heeded.
//! - **Errors say what to do next.** [`ClientError`] tells a refusal from a token that is not good, one that is not good for
//!   this, a lease that has ended, a server that is away and an answer that is none.
//! - **A token is shown nowhere**: not by `Debug`, not in an error, even where a server says it back. No redirect and no proxy
//!   of the environment is followed with it.
//!
//! [`blocking`] is the same client for code that does not await (feature `blocking`). Addresses that begin with `https://` need
//! the feature `rustls`. A server whose certificate no public authority has signed is asked with
//! [`root_certificates`](ClientBuilder::root_certificates), and one that wants to see a certificate with
//! [`identity`](ClientBuilder::identity).
//!
//! # The types
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
//! They are there without any feature, and bring no client. With the feature `openapi` each type has a schema.

/// A type that goes over the wire: read and written by its fields.
macro_rules! wire {
    ($($item:item)+) => {
        secret_wire! { $(#[derive(Debug)] $item)+ }
    };
}

/// The same for a type that says itself what of it is shown.
#[cfg(feature = "openapi")]
macro_rules! secret_wire {
    ($($item:item)+) => {
        $(
            #[derive(Clone, PartialEq, serde::Serialize, serde::Deserialize, utoipa::ToSchema)]
            $item
        )+
    };
}

/// The same for a type that says itself what of it is shown.
#[cfg(not(feature = "openapi"))]
macro_rules! secret_wire {
    ($($item:item)+) => {
        $(
            #[derive(Clone, PartialEq, serde::Serialize, serde::Deserialize)]
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
mod answer;
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
mod plan;
mod policy;
mod problem;
mod seconds;
mod status;
mod text;
#[cfg(feature = "rustls")]
mod tls;
#[cfg(all(feature = "http", not(feature = "rustls")))]
#[path = "no_tls.rs"]
mod tls;
mod token;

/// Whether servers at https:// addresses can be asked.
#[cfg(feature = "http")]
const HAS_TLS: bool = cfg!(feature = "rustls");

pub use acquire::{Acquire, BATCH_MAX, Batch, BatchDone, BatchResult, Degraded, Granted, Spend};
pub use amounts::{AMOUNTS_MAX, Amounts, Changes, Cost};
pub use answer::InvalidAnswer;
pub use entity::{Entity, PutEntity};
pub use event::{Event, Snapshot};
pub use expect::{Expect, InvalidExpect};
#[cfg(feature = "http")]
pub use http::{
    Away, Cause, Client, ClientBuilder, ClientError, ClientStats, Events, GaveUp, InvalidClient, Lease, Page,
    Pages, Query,
};
pub use lease::{Adjust, Cancel, Extend, OpenLease, Renew, Renewed, Settle, StepDone};
pub use ledger::{AuditEntry, AuditQuery, Change, UsageLine, UsageQuery, UsageSum, UsageSummary, Window};
pub use limit::{
    Ask, BalanceQuery, Balances, Behaviour, Capacities, Capacity, CapacityQuery, Explanation, LimitState,
    Would,
};
pub use page::{AuditPage, EntityPage, PageQuery, PolicyPage, RemoveQuery, TokenPage, UsagePage};
pub use plan::{Apply, Declaration, Declared, PLAN_MAX, Plan, PlanStep, PolicyChange};
pub use policy::{
    OnExpiry, OnUnavailable, Policy, PolicyAt, PolicyQuery, PutPolicy, ScopeQuery, Version, Written,
};
pub use problem::Problem;
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
