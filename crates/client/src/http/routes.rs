//! One function for each route of the server's table: what is sent there, what is answered, and whether it may be repeated.
//! Only `/v1/events` is elsewhere: it never ends, and [`events`](super::events) hears it one by one.
//!
//! The tables are read twice: here they become functions to be awaited, in [`blocking`](crate::blocking) the same functions
//! for code that does not await.

use super::call::{Call, Repeat};
use super::pages::Pages;
use super::{Client, ClientError};
#[allow(clippy::wildcard_imports, reason = "the tables name nearly every type of the wire")]
use crate::*;

/// Routes, each `name(arguments) -> Answer, by how it is asked, call`.
macro_rules! routes {
    ($make:ident) => {
        $make! {
            /// Draws units of every limit of a subject and of those above it, all or nothing. The lease is left to its deadline:
            /// [`acquire`](Self::acquire) makes a handle of it. A request without an id is given one.
            draw(request: &Acquire) -> Granted,
                ask Call::post("/v1/acquire", &drawing(request), Repeat::Freely).waiting(request.within);
            /// Draws for many who have nothing to do with each other: each is granted or refused by itself. The leases are left to
            /// their deadlines: [`acquire_batch`](Self::acquire_batch) makes handles of them. Requests without an id are given one.
            draw_batch(batch: &Batch) -> BatchDone,
                ask Call::post("/v1/acquire/batch", &all_drawing(batch), Repeat::Freely);
            /// Draws and settles in one call: no lease is kept. A request without an id is given one.
            spend(request: &Spend) -> (), ask Call::post("/v1/spend", &spending(request), Repeat::Freely);
            /// An open lease: what it holds, its last step, and how long it has.
            open_lease(lease: &LeaseRef) -> OpenLease, ask Call::get("/v1/leases/{lease}").at(lease);
            /// Draws more for a lease, all or nothing. Refused, it stays as it is.
            extend_lease(lease: &LeaseRef, extend: &Extend) -> StepDone,
                ask Call::post("/v1/leases/{lease}/extend", extend, Repeat::Freely).at(lease);
            /// Takes what turned out to be needed, or gives back what was not: never refused, and what is missing is debt.
            adjust_lease(lease: &LeaseRef, adjust: &Adjust) -> StepDone,
                ask Call::post("/v1/leases/{lease}/adjust", adjust, Repeat::Freely).at(lease);
            /// Gives a lease more time from now on; one that has more is left with it.
            renew_lease(lease: &LeaseRef, renew: &Renew) -> Renewed,
                ask Call::post("/v1/leases/{lease}/renew", renew, Repeat::Freely).at(lease);
            /// Ends a lease at what was used of the limits named, and at what it holds of the others.
            settle_lease(lease: &LeaseRef, settle: &Settle) -> StepDone,
                ask Call::post("/v1/leases/{lease}/settle", settle, Repeat::Freely).at(lease);
            /// Ends a lease as if it had never been: all of it returns.
            cancel_lease(lease: &LeaseRef, cancel: &Cancel) -> StepDone,
                ask Call::post("/v1/leases/{lease}/cancel", cancel, Repeat::Freely).at(lease);
            /// The limits of a subject and of those above it that it draws from, as they are.
            balances(query: &BalanceQuery) -> Balances, ask Call::get("/v1/balances").asking(query);
            /// How much of a resource's limits is in use, over all buckets.
            capacity(query: &CapacityQuery) -> Capacities, ask Call::get("/v1/capacity").asking(query);
            /// What would happen to an acquire, and why: nothing is taken.
            explain(question: &Ask) -> Explanation, ask Call::post("/v1/explain", question, Repeat::Freely);
            /// A page of all entities, by id.
            entities(query: &PageQuery) -> EntityPage, ask Call::get("/v1/entities").asking(query);
            /// An entity.
            entity(id: &EntityId) -> Entity, ask Call::get("/v1/entities/{entity}").at(id);
            /// Writes an entity, in the place of what was there.
            put_entity(id: &EntityId, put: &PutEntity) -> Written,
                ask Call::put("/v1/entities/{entity}", put, Repeat::freely_if(put.expect != Expect::Any)).at(id);
            /// Removes an entity and its policies. One with others below it is refused.
            remove_entity(id: &EntityId, query: &RemoveQuery) -> Written,
                ask Call::delete("/v1/entities/{entity}", Repeat::freely_if(expects(query.expect))).at(id).asking(query);
            /// A page of those directly below an entity, by id.
            children(id: &EntityId, query: &PageQuery) -> EntityPage,
                ask Call::get("/v1/entities/{entity}/children").at(id).asking(query);
            /// A page of policies in the order of their scopes: system, resources, entities, entities with a resource.
            policies(query: &PolicyQuery) -> PolicyPage, ask Call::get("/v1/policies").asking(query);
            /// The policy at a scope.
            policy(scope: &ScopeQuery) -> PolicyAt, ask Call::get("/v1/policy").asking(scope);
            /// Writes the policy at a scope, in the place of what was there.
            put_policy(scope: &ScopeQuery, put: &PutPolicy) -> Written,
                ask Call::put("/v1/policy", put, Repeat::freely_if(put.expect != Expect::Any)).asking(scope);
            /// Removes the policy at a scope. To remove what is not there is no error, unless something was expected.
            remove_policy(scope: &ScopeQuery) -> Written,
                ask Call::delete("/v1/policy", Repeat::freely_if(expects(scope.expect))).asking(scope);
            /// What has to change so that what is written is what is declared. Nothing is changed.
            plan(declaration: &Declaration) -> Plan, ask Call::post("/v1/plan", declaration, Repeat::Freely);
            /// Makes all of these changes, or none.
            apply(apply: &Apply) -> Written,
                ask Call::post("/v1/apply", apply, Repeat::freely_if(apply.changes.iter().all(|change| change.expect != Expect::Any)));
            /// A page of the usage of an entity or of a resource, by subject, then limit, then window.
            usage(query: &UsageQuery) -> UsagePage, ask Call::get("/v1/usage").asking(query);
            /// The same, summed per limit name.
            usage_summary(query: &UsageQuery) -> UsageSummary, ask Call::get("/v1/usage/summary").asking(query);
            /// A page of administrative changes, in the order they were made in.
            audit(query: &AuditQuery) -> AuditPage, ask Call::get("/v1/audit").asking(query);
            /// A page of all tokens, by id. Their secrets are nowhere.
            tokens(query: &PageQuery) -> TokenPage, ask Call::get("/v1/tokens").asking(query);
            /// Makes a token. Its secret is in this answer, and never told again.
            create_token(put: &PutToken) -> CreatedToken, ask Call::post("/v1/tokens", put, Repeat::Untouched);
            /// Makes a token good no more. To revoke it again changes nothing.
            revoke_token(id: &TokenId, query: &RemoveQuery) -> Written,
                ask Call::delete("/v1/tokens/{token}", Repeat::Freely).at(id).asking(query);
            /// The store behind the server: its engine, its time, and how many administrative changes there were.
            status() -> Status, ask Call::get("/v1/status");
            /// What the server knows of itself: what it counted, and how close it is to its bounds.
            snapshot() -> Snapshot, ask Call::get("/v1/snapshot");
            /// The API as OpenAPI 3.1, in JSON.
            openapi() -> String, read Call::get("/v1/openapi.json");
            /// Whether the process answers at all.
            live() -> (), ask Call::get("/health/live");
            /// Whether it is worth sending requests: the store answers, and the server is not stopping.
            ready() -> (), ask Call::get("/health/ready");
            /// What the server counts, for Prometheus.
            metrics() -> String, read Call::get("/metrics");
        }
    };
}

/// Listings, each `name(arguments; query) -> Page, the call of a page without its query`.
macro_rules! listings {
    ($make:ident) => {
        $make! {
            /// All entities, by id, page by page.
            all_entities(; query: PageQuery) -> EntityPage, Call::get("/v1/entities");
            /// Those directly below an entity, by id, page by page.
            all_children(id: &EntityId; query: PageQuery) -> EntityPage, Call::get("/v1/entities/{entity}/children").at(id);
            /// Policies in the order of their scopes, page by page.
            all_policies(; query: PolicyQuery) -> PolicyPage, Call::get("/v1/policies");
            /// Usage by subject, then limit, then window, page by page.
            all_usage(; query: UsageQuery) -> UsagePage, Call::get("/v1/usage");
            /// Administrative changes, in the order they were made in, page by page.
            all_audit(; query: AuditQuery) -> AuditPage, Call::get("/v1/audit");
            /// All tokens, by id, page by page.
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
                /// Every [`ClientError`] says what to do next.
                ///
                /// # Cancel safety
                /// Dropping the future leaves it done or not: what was sent may be on its way. Nothing is sent any more.
                pub async fn $name(&self, $($arg: $Arg),*) -> Result<$Answer, ClientError> {
                    self.$how($call).await
                }
            )+
        }
    };
}

macro_rules! awaited_pages {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $Arg:ty)?; $query:ident: $Query:ty) -> $Page:ty, $call:expr;)+) => {
        /// Listings as a whole.
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

/// The same request with an id: to send it again is to ask for the same lease.
fn drawing(request: &Acquire) -> Acquire {
    Acquire { id: Some(request.id.clone().unwrap_or_else(chosen)), ..request.clone() }
}

fn all_drawing(batch: &Batch) -> Batch {
    Batch { requests: batch.requests.iter().map(drawing).collect() }
}

/// The same request with an id: to send it again is to spend once.
fn spending(request: &Spend) -> Spend {
    Spend { id: Some(request.id.clone().unwrap_or_else(chosen)), ..request.clone() }
}

/// An id that nobody else chooses.
fn chosen() -> RequestId {
    RequestId::from(rand::random::<u128>())
}

/// Whether a writer says what is to be there.
fn expects(expect: Option<Expect>) -> bool {
    expect.is_some_and(|expect| expect != Expect::Any)
}
