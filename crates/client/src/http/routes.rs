//! One function for each route of the server: request, response and whether it is idempotent. Only
//! `/v1/events` is elsewhere, because it is a stream: see [`events`](super::events).
//!
//! The tables expand twice: to async functions here, and to blocking functions in
//! [`blocking`](crate::blocking).

use super::call::{Call, Idempotency};
use super::pages::Pages;
use super::{Client, ClientError};
#[allow(clippy::wildcard_imports, reason = "the tables name nearly every type of the wire")]
use crate::*;

/// The routes, each `name(arguments) -> Response, response format, call`.
macro_rules! routes {
    ($make:ident) => {
        $make! {
            /// Draws units of every limit of a subject and of the levels above it, all or nothing. The lease
            /// is not renewed: [`acquire`](Self::acquire) returns a handle that does. A request without an id
            /// is given a random one.
            draw(request: &Acquire) -> Granted,
                json Call::post("/v1/acquire", &with_id(request), Idempotency::Yes).with_queue_time(request.within);
            /// Draws for independent requests: each is granted or refused by itself. The leases are not
            /// renewed: [`acquire_batch`](Self::acquire_batch) returns handles that do. Requests without an
            /// id are given random ones.
            draw_batch(batch: &Batch) -> BatchDone,
                json Call::post("/v1/acquire/batch", &all_with_ids(batch), Idempotency::Yes);
            /// Draws and settles in one call, without a lease. A request without an id is given a random one.
            spend(request: &Spend) -> (), json Call::post("/v1/spend", &spend_with_id(request), Idempotency::Yes);
            /// Returns an open lease: held units, last step and remaining time.
            open_lease(lease: &LeaseRef) -> OpenLease, json Call::get("/v1/leases/{lease}").at(lease);
            /// Draws more units for a lease, all or nothing. On refusal the lease is unchanged.
            extend_lease(lease: &LeaseRef, extend: &Extend) -> StepDone,
                json Call::post("/v1/leases/{lease}/extend", extend, Idempotency::Yes).at(lease);
            /// Adjusts the units of a lease, up or down. Never refused: units beyond the limit become debt.
            adjust_lease(lease: &LeaseRef, adjust: &Adjust) -> StepDone,
                json Call::post("/v1/leases/{lease}/adjust", adjust, Idempotency::Yes).at(lease);
            /// Extends the deadline of a lease, counted from now; a later deadline is kept.
            renew_lease(lease: &LeaseRef, renew: &Renew) -> Renewed,
                json Call::post("/v1/leases/{lease}/renew", renew, Idempotency::Yes).at(lease);
            /// Ends a lease. Limits that `actual` names are settled at that amount, all others at what the
            /// lease holds.
            settle_lease(lease: &LeaseRef, settle: &Settle) -> StepDone,
                json Call::post("/v1/leases/{lease}/settle", settle, Idempotency::Yes).at(lease);
            /// Ends a lease and returns all its units.
            cancel_lease(lease: &LeaseRef, cancel: &Cancel) -> StepDone,
                json Call::post("/v1/leases/{lease}/cancel", cancel, Idempotency::Yes).at(lease);
            /// Asks for a permit to call an upstream. If the response is lost, the permit expires unsettled.
            acquire_call(upstream: &ResourceName, request: &AcquireCall) -> CallPermit,
                json Call::post("/v1/upstreams/{upstream}/acquire", request, Idempotency::No).at(upstream).with_queue_time(request.within);
            /// Reports how a call went. A permit is settled once.
            settle_call(permit: &LeaseRef, settle: &SettleCall) -> CallSettled,
                json Call::post("/v1/permits/{permit}/settle", settle, Idempotency::No).at(permit);
            /// Returns the upstreams that were called recently.
            upstreams() -> UpstreamList, json Call::get("/v1/upstreams");
            /// Returns the limits of a subject and of the levels above it that it draws from.
            balances(query: &BalanceQuery) -> Balances, json Call::get("/v1/balances").with_query(query);
            /// Returns the utilization of a resource's limits, over all buckets.
            capacity(query: &CapacityQuery) -> Capacities, json Call::get("/v1/capacity").with_query(query);
            /// Explains what would happen to an acquire, without drawing.
            explain(question: &Ask) -> Explanation, json Call::post("/v1/explain", question, Idempotency::Yes);
            /// Sets the units available in one bucket, after a wrong settlement put it into debt. Audited.
            put_bucket(put: &PutBucket) -> BucketWritten, json Call::put("/v1/bucket", put, Idempotency::No);
            /// Returns a page of all entities, by id.
            entities(query: &PageQuery) -> EntityPage, json Call::get("/v1/entities").with_query(query);
            /// Returns an entity.
            entity(id: &EntityId) -> Entity, json Call::get("/v1/entities/{entity}").at(id);
            /// Creates or replaces an entity.
            put_entity(id: &EntityId, put: &PutEntity) -> Written,
                json Call::put("/v1/entities/{entity}", put, Idempotency::yes_if(put.expect != Expect::Any)).at(id);
            /// Removes an entity and its policies. Rejected if the entity has children.
            remove_entity(id: &EntityId, query: &RemoveQuery) -> Written,
                json Call::delete("/v1/entities/{entity}", Idempotency::yes_if(expects(query.expect))).at(id).with_query(query);
            /// Returns a page of the children of an entity, by id.
            children(id: &EntityId, query: &PageQuery) -> EntityPage,
                json Call::get("/v1/entities/{entity}/children").at(id).with_query(query);
            /// Returns a page of policies in the order of their scopes: system, resources, entities, entities
            /// with a resource.
            policies(query: &PolicyQuery) -> PolicyPage, json Call::get("/v1/policies").with_query(query);
            /// Returns the policy at a scope.
            policy(scope: &ScopeQuery) -> PolicyAt, json Call::get("/v1/policy").with_query(scope);
            /// Creates or replaces the policy at a scope.
            put_policy(scope: &ScopeQuery, put: &PutPolicy) -> Written,
                json Call::put("/v1/policy", put, Idempotency::yes_if(put.expect != Expect::Any)).with_query(scope);
            /// Removes the policy at a scope. Removing a missing policy succeeds unless the write is
            /// conditional.
            remove_policy(scope: &ScopeQuery) -> Written,
                json Call::delete("/v1/policy", Idempotency::yes_if(expects(scope.expect))).with_query(scope);
            /// Compares the stored policies with a declaration and returns the changes that it needs. Nothing
            /// is changed.
            plan(declaration: &Declaration) -> PolicyChanges, json Call::post("/v1/plan", declaration, Idempotency::Yes);
            /// Applies all changes, or none.
            apply(apply: &Apply) -> Written,
                json Call::post("/v1/apply", apply, Idempotency::yes_if(apply.changes.iter().all(|change| change.expect != Expect::Any)));
            /// Returns a page of the usage of an entity or a resource, by subject, then limit, then window.
            usage(query: &UsageQuery) -> UsagePage, json Call::get("/v1/usage").with_query(query);
            /// Returns usage summed by limit.
            usage_summary(query: &UsageQuery) -> UsageSummary, json Call::get("/v1/usage/summary").with_query(query);
            /// Returns a page of administrative changes, oldest first.
            audit(query: &AuditQuery) -> AuditPage, json Call::get("/v1/audit").with_query(query);
            /// Returns a page of all tokens, by id, without secrets.
            tokens(query: &PageQuery) -> TokenPage, json Call::get("/v1/tokens").with_query(query);
            /// Creates a token. Its secret is returned only here.
            create_token(put: &PutToken) -> CreatedToken, json Call::post("/v1/tokens", put, Idempotency::No);
            /// Revokes a token. Revoking it again has no effect.
            revoke_token(id: &TokenId, query: &RemoveQuery) -> Written,
                json Call::delete("/v1/tokens/{token}", Idempotency::Yes).at(id).with_query(query);
            /// Returns the status of the server's store: engine, time and number of administrative changes.
            status() -> Status, json Call::get("/v1/status");
            /// Returns the server's counters and how close it is to its bounds.
            snapshot() -> Snapshot, json Call::get("/v1/snapshot");
            /// Returns the OpenAPI 3.1 document, in JSON.
            openapi() -> String, text Call::get("/v1/openapi.json");
            /// Liveness check: the process responds.
            live() -> (), json Call::get("/health/live");
            /// Readiness check: the store responds and the server is not stopping.
            ready() -> (), json Call::get("/health/ready");
            /// Returns the server's metrics in Prometheus text format.
            metrics() -> String, text Call::get("/metrics");
        }
    };
}

/// The listings, each `name(arguments; query) -> Page, call of a page without its query`.
macro_rules! listings {
    ($make:ident) => {
        $make! {
            /// Lists all entities, by id.
            all_entities(; query: PageQuery) -> EntityPage, Call::get("/v1/entities");
            /// Lists the children of an entity, by id.
            all_children(id: &EntityId; query: PageQuery) -> EntityPage, Call::get("/v1/entities/{entity}/children").at(id);
            /// Lists policies in the order of their scopes.
            all_policies(; query: PolicyQuery) -> PolicyPage, Call::get("/v1/policies");
            /// Lists usage by subject, then limit, then window.
            all_usage(; query: UsageQuery) -> UsagePage, Call::get("/v1/usage");
            /// Lists administrative changes, oldest first.
            all_audit(; query: AuditQuery) -> AuditPage, Call::get("/v1/audit");
            /// Lists all tokens, by id.
            all_tokens(; query: PageQuery) -> TokenPage, Call::get("/v1/tokens");
        }
    };
}

macro_rules! awaited {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $Arg:ty),*) -> $Answer:ty, $how:ident $call:expr;)+) => {
        /// One function for each route.
        impl Client {
            $(
                $(#[$doc])*
                ///
                /// # Errors
                /// See [`ClientError`].
                ///
                /// # Cancel safety
                /// Dropping the future leaves the outcome unknown: the request may already have been sent. It
                /// is not retried.
                pub async fn $name(&self, $($arg: $Arg),*) -> Result<$Answer, ClientError> {
                    self.$how($call).await
                }
            )+
        }
    };
}

macro_rules! awaited_pages {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $Arg:ty)?; $query:ident: $Query:ty) -> $Page:ty, $call:expr;)+) => {
        /// Listings as a sequence of pages.
        impl Client {
            $(
                $(#[$doc])*
                pub fn $name(&self, $($arg: $Arg,)? $query: $Query) -> Pages<$Query, $Page> {
                    Pages::new(self.clone(), $call, $query)
                }
            )+
        }
    };
}

routes!(awaited);
listings!(awaited_pages);

/// Adds an id, which makes retries return the same lease.
fn with_id(request: &Acquire) -> Acquire {
    Acquire { id: Some(request.id.clone().unwrap_or_else(random_id)), ..request.clone() }
}

fn all_with_ids(batch: &Batch) -> Batch {
    Batch { requests: batch.requests.iter().map(with_id).collect() }
}

/// Adds an id, which makes retries spend once.
fn spend_with_id(request: &Spend) -> Spend {
    Spend { id: Some(request.id.clone().unwrap_or_else(random_id)), ..request.clone() }
}

/// A random request id.
fn random_id() -> RequestId {
    RequestId::from(rand::random::<u128>())
}

/// Whether a write is conditional.
fn expects(expect: Option<Expect>) -> bool {
    expect.is_some_and(|expect| expect != Expect::Any)
}
