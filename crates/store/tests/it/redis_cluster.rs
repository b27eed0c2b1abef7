//! Runs the suite on the store on Redis Cluster, where each tree of entities has a home slot.

use tidegate_store::conformance::{self, Fixture};

use crate::kit::engine::CLUSTER;
use crate::kit::redis;

async fn open(namespace: &str) -> Option<Fixture> {
    redis::open(CLUSTER, namespace).await
}

conformance::suite!(suite, open);

mod trees {
    use std::sync::Arc;
    use std::time::Duration;

    use tidegate_core::limit::cascade::Levels;
    use tidegate_core::limit::entity::Entity;
    use tidegate_core::limit::lease::LeaseId;
    use tidegate_core::limit::name::{EntityId, Subject};
    use tidegate_core::limit::policy::{Expect, OnExpiry, Policy, Version};
    use tidegate_core::limit::resolve::resolve;
    use tidegate_core::limit::rule::Limit;
    use tidegate_store::{Draw, DrawResult, Lookup, Store, StoreError, Terms};

    use super::{Fixture, open};

    fn draw(number: u128, entities: &[&str]) -> Draw {
        let level = |entity: &&str| {
            let subject = Subject::new(entity, "gpt").expect("valid");
            let policy = Policy::new([Limit::per_day("rpm", 1).burst(100)]).expect("valid");
            let resolved = resolve(&subject, [Some(&policy), None, None, None], &Policy::default());
            (subject, resolved)
        };
        let levels = Arc::new(Levels::new(Version::ZERO, entities.iter().map(level).collect()));
        let terms = Terms { deadline: Duration::from_secs(3_600), on_expiry: OnExpiry::Settle };
        let units = levels.units(&[("rpm", 1)]).expect("valid");
        Draw { lease: LeaseId::new(1_800_000_000_000, number), levels, units, terms, is_watched: true }
    }

    async fn put(store: &Arc<dyn Store>, id: &str, parent: Option<&str>) -> Result<Version, StoreError> {
        let mut entity = Entity::new(EntityId::new(id).expect("valid")).cascade();
        if let Some(parent) = parent {
            entity = entity.parent(EntityId::new(parent).expect("valid"));
        }
        store.put(&entity, Expect::Any, "ops").await
    }

    #[tokio::test]
    async fn entity_that_has_drawn_stays_in_its_tree() {
        let Some(Fixture { store, .. }) = open("trees").await else { return };
        for root in ["acme", "globex"] {
            put(&store, root, None).await.unwrap();
        }
        put(&store, "ann", Some("acme")).await.unwrap();
        put(&store, "bob", Some("acme")).await.unwrap();
        assert!(matches!(store.draw(&draw(1, &["ann", "acme"])).await, Ok(DrawResult::Granted(_))));
        assert!(matches!(store.draw(&draw(2, &["globex"])).await, Ok(DrawResult::Granted(_))));
        // An entity that has not drawn yet has no home.
        put(&store, "bob", Some("globex")).await.unwrap();
        assert!(matches!(store.draw(&draw(3, &["bob", "globex"])).await, Ok(DrawResult::Granted(_))));
        let error = put(&store, "ann", Some("globex")).await.unwrap_err().to_string();
        assert!(error.starts_with("`ann` and `globex` have drawn as parts of different trees"), "{error}");
        let error = store.draw(&draw(4, &["ann", "globex"])).await.unwrap_err();
        assert!(matches!(error, StoreError::Invalid { .. }), "{error}");
        // The refused change had no effect.
        put(&store, "ann", Some("acme")).await.unwrap();
        let entities = ["ann", "acme", "bob", "globex"].map(|name| EntityId::new(name).unwrap());
        let seen = store.balances(&Lookup::Entities(entities.to_vec())).await.unwrap();
        let consumed: Vec<i64> = seen.buckets.iter().map(|bucket| bucket.meters[0].consumed()).collect();
        assert_eq!(consumed, [1, 1, 1, 2]);
    }
}
