//! A store as a source of updates: it has no events, so it is polled.

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

/// Maximum entities per scan, in order of id: more than a terminal shows, and few enough for any engine.
pub(crate) const ENTITIES_MAX: u32 = 100;
/// Minimum pause after a scan, as a multiple of its duration.
const SPARED: u32 = 4;

/// The result of a scan.
#[derive(Debug)]
pub(crate) struct StoreScan {
    pub(crate) subjects: Vec<(Subject, Vec<Level>)>,
    /// Whether there are more subjects than were read.
    pub(crate) has_more: bool,
    pub(crate) health: Health,
}

/// Sends updates until the store fails for good: it was never available, or it denies access.
pub(crate) async fn run(store: &impl Backend, focus: Focus, sender: mpsc::Sender<Update>) -> Failure {
    let mut is_first = true;
    loop {
        let began = Instant::now();
        let updates = match scan(store, focus.entity.as_ref()).await {
            Ok(StoreScan { subjects, has_more, health }) => {
                vec![Update::Up, Update::Store(health), Update::Scan { subjects, has_more }]
            }
            Err(failure) if is_first || failure.exit != Exit::Unavailable => return failure,
            Err(failure) => vec![Update::Lost { why: failure.what }],
        };
        is_first = false;
        for update in updates {
            if sender.send(update).await.is_err() {
                return Failure::failed("the receiver was dropped");
            }
        }
        let took: Duration = began.elapsed();
        sleep(focus.every.max(took * SPARED)).await;
    }
}

/// Scans the store once.
pub(crate) async fn scan(store: &impl Backend, entity: Option<&EntityId>) -> Result<StoreScan, Failure> {
    let status = store.status().await?;
    let version = status.version.number();
    let health = Health::Good { engine: status.engine, version, took: status.took };
    let mut has_more = false;
    let entities: BTreeSet<EntityId> = if let Some(entity) = entity {
        BTreeSet::from([entity.clone()])
    } else {
        let paging = Paging::first(ENTITIES_MAX)?;
        let there = store.entities(&paging).await?;
        // Entities with limits of their own need no record.
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
    Ok(StoreScan { subjects: found.into_iter().take(SUBJECTS_MAX).collect(), has_more, health })
}
