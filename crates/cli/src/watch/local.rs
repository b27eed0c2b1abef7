//! A store as a source: it tells nothing by itself, and is looked at again and again.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tidegate::store::Listing;
use tidegate::{EntityId, Paging, Subject};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};

use super::model::{Health, Update};
use super::remote::{Focus, grouped};
use super::subjects::{Level, SUBJECTS_MAX};
use crate::backend::Backend;
use crate::failure::{Exit, Failure};

/// Entities that are looked at, those whose ids come first: more than a terminal shows, and few enough for any engine.
pub(crate) const ENTITIES_MAX: u32 = 100;
/// Of the time, at most one part in so many is spent in looking.
const SPARED: u32 = 4;

/// What a look has found.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) subjects: Vec<(Subject, Vec<Level>)>,
    /// There are more than were looked at.
    pub(crate) has_more: bool,
    pub(crate) health: Health,
}

/// Tells what is there until it cannot: a store that was never there, or that lets nobody in.
pub(crate) async fn run(store: &impl Backend, focus: Focus, tell: mpsc::Sender<Update>) -> Failure {
    let mut is_first = true;
    loop {
        let began = Instant::now();
        let updates = match look(store, focus.entity.as_ref()).await {
            Ok(Found { subjects, has_more, health }) => {
                vec![Update::Up, Update::Store(health), Update::Looked { subjects, has_more }]
            }
            Err(failure) if is_first || failure.exit != Exit::Away => return failure,
            Err(failure) => vec![Update::Lost { why: failure.what }],
        };
        is_first = false;
        for update in updates {
            if tell.send(update).await.is_err() {
                return Failure::failed("nobody listens any more");
            }
        }
        let took: Duration = began.elapsed();
        sleep(focus.every.max(took * SPARED)).await;
    }
}

/// Looks once.
pub(crate) async fn look(store: &impl Backend, entity: Option<&EntityId>) -> Result<Found, Failure> {
    let status = store.status().await?;
    let version = status.version.number();
    let health = Health::Good { engine: status.engine, version, took: status.took };
    let mut has_more = false;
    let entities: BTreeSet<EntityId> = if let Some(entity) = entity {
        BTreeSet::from([entity.clone()])
    } else {
        let paging = Paging::first(ENTITIES_MAX)?;
        let there = store.entities(&paging).await?;
        // Whoever has limits of their own need not be written down.
        let limited = store.policies(&Listing::All, &paging).await?;
        has_more = there.next.is_some() || limited.next.is_some();
        let there = there.items.iter().map(|entity| entity.value.id().clone());
        there.chain(limited.items.iter().filter_map(|(scope, _)| scope.entity().cloned())).collect()
    };
    let mut found = BTreeMap::new();
    for entity in entities.iter().take(ENTITIES_MAX as usize) {
        grouped(store.balances_of_entity(entity).await?, &mut found);
    }
    has_more |= entities.len() > ENTITIES_MAX as usize || found.len() > SUBJECTS_MAX;
    Ok(Found { subjects: found.into_iter().take(SUBJECTS_MAX).collect(), has_more, health })
}
