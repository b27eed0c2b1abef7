//! Leases and buckets as the trait asks for them.

use std::sync::Arc;
use std::time::Duration;

use tidegate_core::limit::lease::{LeaseId, Record};
use tidegate_core::limit::name::{EntityId, ResourceName, Subject};
use tidegate_core::time::Stamp;

use super::DynamoDb;
use super::draw::Kind;
use super::keys::{DUE_PARTS, GSI1, GSI2, Item, Key};
use super::link::Range;
use super::marks::{end_name, open_name};
use super::parts::{Apart, ApartState};
use super::phases::Turn;
use super::step::{Step, Used};
use super::view::View;
use crate::buckets::{
    Adjust, Bucket, Buckets, Cancel, Draw, Drawn, Extend, Held, Lookup, Moved, Renew, Renewed, Seen, Settle,
    Standing,
};
use crate::cursor::{entity_cursor, parse_entity};
use crate::desk::{check_levels, check_renewal, fits};
use crate::error::StoreError;
use crate::page::{Page, Paging};
use crate::reply::Reply;
use crate::store::Swept;

/// Buckets that are looked through at a time, for a lease that another process drew.
const SEARCHED_AT_ONCE: usize = 100;
/// An index follows its table within this, mostly.
const INDEXED_WITHIN: Duration = Duration::from_secs(10);
/// When it is looked through again for a lease that is younger.
const LOOKED_AGAIN_AFTER: [Duration; 3] =
    [Duration::from_millis(50), Duration::from_millis(200), Duration::from_millis(600)];

impl Buckets for DynamoDb {
    fn draw<'a>(&'a self, draw: &'a Draw) -> Reply<'a, Drawn> {
        Reply::later(self.within(self.take(draw, Kind::Lease)))
    }

    fn extend<'a>(&'a self, extend: &'a Extend) -> Reply<'a, Drawn> {
        Reply::later(self.within(async move {
            let Extend { lease, levels, units, .. } = extend;
            fits(levels, units.len())?;
            let _turn = self.inner.phases.enter(levels, Turn::Asking).await;
            let step = Step { lease: *lease, levels, asked: Some(units), used: Used::Nothing };
            self.step(&step, |desk| desk.extend(extend)).await
        }))
    }

    fn adjust<'a>(&'a self, adjust: &'a Adjust) -> Reply<'a, Moved> {
        Reply::later(self.within(async move {
            let Adjust { lease, levels, .. } = adjust;
            let _turn = self.inner.phases.enter(levels, Turn::Giving).await;
            let step = Step { lease: *lease, levels, asked: None, used: Used::Nothing };
            self.step(&step, |desk| desk.adjust(adjust)).await
        }))
    }

    fn renew<'a>(&'a self, renew: &'a Renew) -> Reply<'a, Renewed> {
        Reply::later(self.within(async move {
            check_renewal(renew)?;
            let Renew { lease, levels, .. } = renew;
            let step = Step { lease: *lease, levels, asked: None, used: Used::Nothing };
            self.step(&step, |desk| desk.renew(renew)).await
        }))
    }

    fn settle<'a>(&'a self, settle: &'a Settle) -> Reply<'a, Moved> {
        Reply::later(self.within(async move {
            let Settle { lease, levels, actual, .. } = settle;
            fits(levels, actual.len())?;
            // What is kept as it is gives nothing back.
            let is_giving = actual.iter().any(Option::is_some);
            let _turn =
                if is_giving { Some(self.inner.phases.enter(levels, Turn::Giving).await) } else { None };
            let step = Step { lease: *lease, levels, asked: None, used: Used::Actual(actual) };
            self.step(&step, |desk| desk.settle(settle)).await
        }))
    }

    fn cancel<'a>(&'a self, cancel: &'a Cancel) -> Reply<'a, Moved> {
        Reply::later(self.within(async move {
            let Cancel { lease, levels, .. } = cancel;
            let _turn = self.inner.phases.enter(levels, Turn::Giving).await;
            let step = Step { lease: *lease, levels, asked: None, used: Used::Nothing };
            self.step(&step, |desk| desk.cancel(cancel)).await
        }))
    }

    fn spend<'a>(&'a self, draw: &'a Draw) -> Reply<'a, Drawn> {
        Reply::later(self.within(self.take(draw, Kind::Spend)))
    }

    fn lease(&self, lease: LeaseId) -> Reply<'_, Standing> {
        Reply::later(async move {
            match self.standing(lease).await? {
                Standing::Open(held) if held.record.is_due(held.at) => {
                    self.expire(lease, &held.levels, &mut Swept::default()).await?;
                    self.standing(lease).await
                }
                standing => Ok(standing),
            }
        })
    }

    fn balances<'a>(&'a self, lookup: &'a Lookup) -> Reply<'a, Seen> {
        Reply::later(self.within(async move {
            let at = self.now();
            let buckets = match lookup {
                Lookup::Subjects(subjects) => self.buckets_of(subjects).await?,
                Lookup::Entities(entities) => self.buckets_of_entities(entities).await?,
                Lookup::Lineage(entity) => {
                    let lineage = self.chain(entity, false).await?;
                    let above = lineage.iter().filter_map(|above| above.value.next().cloned());
                    let entities: Vec<EntityId> = std::iter::once(entity.clone()).chain(above).collect();
                    self.buckets_of_entities(&entities).await?
                }
            };
            let at = at.max(self.now());
            Ok(Seen {
                at,
                // Buckets are kept at the callers' clocks: a step back only refuses.
                clock_offset: Duration::ZERO,
                buckets: buckets.into_iter().map(|(subject, view)| bucket(subject, &view, at)).collect(),
            })
        }))
    }

    fn buckets<'a>(&'a self, resource: &'a ResourceName, paging: &'a Paging) -> Reply<'a, Page<Bucket>> {
        Reply::later(async move {
            let after = paging.cursor().map(parse_entity).transpose()?;
            let mut after = after.map(|entity| format!("BUCKET#{entity}"));
            let mut found = Vec::new();
            while found.len() <= paging.max() {
                let range = Range::new(Some(GSI2), self.inner.keys.resource(resource), "BUCKET#".to_owned());
                let keys = self.inner.link.range(&range.after(after), paging.max() + 1).await?;
                let is_last = keys.len() <= paging.max();
                after = keys.last().and_then(|item| item.get("GSI2SK")?.as_s().ok().cloned());
                let subjects =
                    keys.iter().filter_map(Key::of).filter_map(|key| self.inner.keys.subject(&key));
                let at = self.now();
                let buckets = self.buckets_of(&subjects.collect::<Vec<_>>()).await?;
                found.extend(buckets.into_iter().map(|(subject, view)| bucket(subject, &view, at)));
                if is_last {
                    break;
                }
            }
            Ok(Page::cut(found, paging, |bucket| entity_cursor(&bucket.subject.entity)))
        })
    }
}

impl DynamoDb {
    async fn take(&self, draw: &Draw, kind: Kind) -> Result<Drawn, StoreError> {
        check_levels(&draw.levels)?;
        fits(&draw.levels, draw.units.len())?;
        self.sweep_now_and_then();
        let _turn = self.inner.phases.enter(&draw.levels, Turn::Asking).await;
        if self.inner.is_speculative {
            self.draw_marked(draw, kind).await
        } else {
            self.draw_apart(draw, kind).await
        }
    }

    /// Buckets that are there and have limits, in the order they are asked for, each once.
    async fn buckets_of(&self, subjects: &[Subject]) -> Result<Vec<(Subject, View)>, StoreError> {
        let keys: Vec<Key> = subjects.iter().map(|subject| self.inner.keys.bucket(subject)).collect();
        let mut items = self.inner.link.get_all(&keys).await?;
        let mut found = Vec::new();
        for (subject, key) in subjects.iter().zip(&keys) {
            let Some(item) = items.remove(key) else { continue };
            let view = View::read(Some(&item))?;
            if !view.meters.is_empty() {
                found.push((subject.clone(), view));
            }
        }
        Ok(found)
    }

    async fn buckets_of_entities(&self, entities: &[EntityId]) -> Result<Vec<(Subject, View)>, StoreError> {
        let mut found = Vec::new();
        for entity in entities {
            let range = Range::new(None, self.inner.keys.entity_pk(entity), "#BUCKET#".to_owned());
            for item in self.inner.link.range(&range, usize::MAX).await? {
                let subject = Key::of(&item).and_then(|key| self.inner.keys.subject(&key));
                let view = View::read(Some(&item))?;
                if let Some(subject) = subject.filter(|_| !view.meters.is_empty()) {
                    found.push((subject, view));
                }
            }
        }
        Ok(found)
    }

    /// What is known of a lease, by its id alone.
    async fn standing(&self, lease: LeaseId) -> Result<Standing, StoreError> {
        let now = self.now();
        if let Some(home) = self.inner.cache.home(lease) {
            let item = self.inner.link.get(&self.inner.keys.bucket(&home)).await?;
            if let Some(standing) = marked(item.as_ref(), lease, now)? {
                return Ok(standing);
            }
        }
        if let Some(apart) = self.lease_item(lease, now).await? {
            return Ok(standing_apart(apart, now));
        }
        // Another process drew it, and the bucket is not known: it is looked for. The index follows the table with a delay.
        // An id that its caller has chosen does not say when.
        let made_at = Stamp::from_micros(lease.millis().saturating_mul(1_000));
        let is_young = lease.millis() == 0 || now < made_at + INDEXED_WITHIN;
        for pause in std::iter::once(Duration::ZERO).chain(LOOKED_AGAIN_AFTER) {
            if !pause.is_zero() && !is_young {
                break;
            }
            tokio::time::sleep(pause).await;
            if let Some(standing) = self.search(lease, now).await? {
                return Ok(standing);
            }
            // What is counted goes from its bucket to the lease's own item, perhaps while it was searched for.
            if let Some(apart) = self.lease_item(lease, now).await? {
                return Ok(standing_apart(apart, now));
            }
        }
        Err(StoreError::NoLease { lease })
    }

    /// Looks for the mark of a lease in all buckets that have any: these are in the index of what is to be looked at.
    async fn search(&self, lease: LeaseId, now: Stamp) -> Result<Option<Standing>, StoreError> {
        let (open, end) = (open_name(lease), end_name(lease));
        for part in 0..DUE_PARTS {
            let range = Range::new(Some(GSI1), self.inner.keys.due(part), String::new());
            let found = self.inner.link.range(&range, usize::MAX).await?;
            let keys: Vec<Key> = found.iter().filter_map(Key::of).collect();
            for keys in keys.chunks(SEARCHED_AT_ONCE) {
                for (key, item) in self.inner.link.get_all(keys).await? {
                    let is_marked = item.contains_key(&open) || item.contains_key(&end);
                    let Some(subject) = self.inner.keys.subject(&key).filter(|_| is_marked) else { continue };
                    if let Some(standing) = marked(Some(&item), lease, now)? {
                        self.inner.cache.drew(lease, &subject);
                        return Ok(Some(standing));
                    }
                }
            }
        }
        Ok(None)
    }
}

/// What the item of a lease's own says of it.
fn standing_apart(apart: Apart, now: Stamp) -> Standing {
    match apart.state {
        ApartState::Open(mark, levels) => Standing::Open(Held { at: now, levels, record: mark.record }),
        ApartState::Ended(mark) => Standing::Ended(mark.ended),
    }
}

/// What a bucket's item says of a lease whose own level it is.
fn marked(item: Option<&Item>, lease: LeaseId, now: Stamp) -> Result<Option<Standing>, StoreError> {
    let view = View::read(item)?;
    if let Some(mark) = view.open.get(&lease).filter(|mark| mark.level == 0) {
        let levels = view.levels_of(mark)?;
        let record: Record = mark.record.clone();
        return Ok(Some(Standing::Open(Held { at: now, levels: Arc::clone(&levels), record })));
    }
    let own = view.end_of(lease, now).filter(|mark| mark.is_own);
    Ok(own.map(|mark| Standing::Ended(mark.ended)))
}

fn bucket(subject: Subject, view: &View, at: Stamp) -> Bucket {
    Bucket { subject, at, meters: view.meters.values().cloned().collect() }
}
