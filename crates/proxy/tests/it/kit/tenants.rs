//! Tenants with limits in a store in memory.

use std::sync::Arc;

use tidegate::store::ManualWall;
use tidegate::{EntityId, Limiter, Memory, Paging, Policy, Scope, Stamp, Usage, Window};
use tidegate_core::limit::name::Namespace;
use tidegate_core::limit::token::{NewToken, TokenId, TokenScope, TokenScopes};
use tidegate_proxy::Tenants;
use tidegate_server::{Secret, StoreTokenCache};

/// A store with limits for all entities.
pub(crate) struct Store {
    pub(crate) limiter: Limiter,
}

impl Store {
    pub(crate) async fn new(limits: &[&str]) -> Self {
        Self::over(Memory::new(), limits).await
    }

    /// A store whose time is this clock's.
    pub(crate) async fn with_clock(clock: ManualWall, limits: &[&str]) -> Self {
        Self::over(Memory::with_clock(clock), limits).await
    }

    async fn over(memory: Memory, limits: &[&str]) -> Self {
        let limiter = Limiter::new(memory);
        if !limits.is_empty() {
            let policy =
                Policy::new(limits.iter().map(|text| text.parse().expect("a limit"))).expect("a policy");
            limiter.admin("test").set_policy(Scope::System, policy).await.expect("written");
        }
        Self { limiter }
    }

    pub(crate) fn tenants(&self) -> Tenants {
        let tokens = Arc::new(StoreTokenCache::new(self.limiter.clone()));
        Tenants::new(self.limiter.clone(), tokens, namespace())
    }

    /// Creates a token with this scope.
    pub(crate) async fn token(&self, id: &str, scope: TokenScope) -> String {
        self.bound_token(id, scope, None).await
    }

    /// Creates a token with this scope, bound to an entity.
    pub(crate) async fn bound_token(&self, id: &str, scope: TokenScope, entity: Option<&str>) -> String {
        let id = TokenId::new(id).expect("an id");
        let secret = Secret::generate(&id);
        let scopes = TokenScopes::new([scope]);
        let token = NewToken {
            name: id.to_string(),
            id,
            namespace: namespace(),
            scopes,
            entity: entity.map(|id| EntityId::new(id).expect("an id")),
            expires_at: None,
        };
        self.limiter.store().create_token(&token, secret.hash(), "test").await.expect("made");
        secret.reveal().to_owned()
    }

    /// The units that are available of a limit.
    pub(crate) async fn available(&self, entity: &str, resource: &str, limit: &str) -> i64 {
        let lines = self.limiter.balances((entity, resource)).await.expect("balances");
        let line = lines.iter().find(|line| line.balance.limit.as_str() == limit).expect("the limit");
        line.balance.available
    }

    /// The units of a limit in the ledger.
    pub(crate) async fn used(&self, entity: &str, resource: &str, limit: &str) -> u64 {
        let range = Stamp::ZERO..Stamp::from_secs(4_000_000_000);
        let paging = Paging::first(1_000).expect("a page");
        let page = self.limiter.usage_of_entity(entity, Window::Month, range, &paging).await.expect("usage");
        let is_it =
            |usage: &&Usage| usage.subject.resource.as_str() == resource && usage.limit.as_str() == limit;
        page.items.iter().filter(is_it).map(|usage| usage.tally.own).sum()
    }
}

fn namespace() -> Namespace {
    Namespace::new("default").expect("a name")
}
