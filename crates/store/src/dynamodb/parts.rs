//! What a call knows of the buckets of its levels, and what came of writing them.

use std::collections::BTreeMap;
use std::sync::Arc;

use tidegate_core::limit::cascade::{Level, Levels};
use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::meter::Meter;
use tidegate_core::time::Stamp;
use tokio::time::Instant;

use super::DynamoDb;
use super::expression::Write;
use super::keys::{Item, Key};
use super::link::Action;
use super::marks::{EndMark, OpenMark};
use super::trouble::{Failed, Unmet};
use super::view::{View, is_remembered, text_of};
use crate::buckets::{Drawn, Moved, Reading, Readings, Renewed};
use crate::codec;
use crate::error::StoreError;
use crate::store::Swept;

/// A level's bucket, as far as the call knows it.
#[derive(Debug, Clone)]
pub(super) struct Part {
    pub(super) view: Arc<View>,
    /// It was seen during this call: what it says may be answered.
    pub(super) is_fresh: bool,
}

/// A lease that is kept apart from its buckets, in an item of its own.
#[derive(Debug, Clone)]
pub(super) struct Apart {
    /// Its mark, as the item has it.
    pub(super) text: String,
    pub(super) state: ApartState,
}

#[derive(Debug, Clone)]
pub(super) enum ApartState {
    Open(OpenMark, Arc<Levels>),
    Ended(EndMark),
}

impl Apart {
    /// What the item says; nothing where it is to be forgotten.
    pub(super) fn read(item: &Item, now: Stamp) -> Result<Option<Self>, StoreError> {
        let text = text_of(item, "s")?;
        let state = if item.contains_key("l") {
            ApartState::Open(text.parse()?, Arc::new(codec::levels_from_text(text_of(item, "l")?)?))
        } else {
            let mark: EndMark = text.parse()?;
            if !is_remembered(mark.ended.at, now) {
                return Ok(None);
            }
            ApartState::Ended(mark)
        };
        Ok(Some(Self { text: text.to_owned(), state }))
    }
}

/// Answers that tell of limits.
pub(super) trait Told {
    fn readings(&mut self) -> Option<&mut Readings>;

    /// Whether it says that something is short.
    fn is_refusal(&self) -> bool {
        false
    }
}

impl Told for Drawn {
    fn readings(&mut self) -> Option<&mut Readings> {
        let (Self::Granted(moved) | Self::Refused(moved)) = self;
        Some(&mut moved.readings)
    }

    fn is_refusal(&self) -> bool {
        matches!(self, Self::Refused(_))
    }
}

impl Told for Moved {
    fn readings(&mut self) -> Option<&mut Readings> {
        Some(&mut self.readings)
    }
}

impl Told for Renewed {
    fn readings(&mut self) -> Option<&mut Readings> {
        None
    }
}

impl Told for Swept {
    fn readings(&mut self) -> Option<&mut Readings> {
        None
    }
}

/// Readings of what was decided, made those of what is there: others may have moved the same limits meanwhile.
pub(super) fn correct(readings: &mut Readings, levels: &Levels, number: usize, is: &BTreeMap<String, Meter>) {
    for reading in readings.iter_mut().filter(|reading| reading.level == number) {
        let level: &Level = &levels.levels()[number];
        let line = level.limits.iter().find(|line| line.name == reading.name);
        if let Some((line, meter)) = line.and_then(|line| Some((line, is.get(line.rule.row())?))) {
            *reading = Reading::new(number, line, reading.moved, meter);
        }
    }
}

impl DynamoDb {
    /// What was seen last of the buckets of these levels, and nothing of those that were never seen.
    pub(super) fn guess(&self, levels: &Levels) -> Vec<Part> {
        let guess = |level: &Level| {
            let view = self.inner.cache.view(&level.subject).unwrap_or_default();
            Part { view, is_fresh: false }
        };
        levels.levels().iter().map(guess).collect()
    }

    /// Whether all of them were seen before.
    pub(super) fn has_seen(&self, levels: &Levels) -> bool {
        levels.levels().iter().all(|level| self.inner.cache.view(&level.subject).is_some())
    }

    /// The buckets of these levels as they are now, and a lease that is kept apart: one round trip.
    pub(super) async fn look(
        &self,
        levels: &Levels,
        lease: Option<LeaseId>,
        now: Stamp,
    ) -> Result<(Vec<Part>, Option<Apart>), StoreError> {
        let keys: Vec<Key> =
            levels.levels().iter().map(|level| self.inner.keys.bucket(&level.subject)).collect();
        let lease = lease.map(|lease| self.inner.keys.lease(lease));
        let asked: Vec<Key> = keys.iter().cloned().chain(lease.clone()).collect();
        let sent = Instant::now();
        let found = self.inner.link.get_all(&asked).await?;
        let mut parts = Vec::with_capacity(keys.len());
        for (level, key) in levels.levels().iter().zip(&keys) {
            let view = Arc::new(View::read(found.get(key))?);
            self.inner.cache.looked(&level.subject, &view, sent);
            parts.push(Part { view, is_fresh: true });
        }
        let apart = lease.and_then(|lease| found.get(&lease));
        Ok((parts, apart.map(|item| Apart::read(item, now)).transpose()?.flatten()))
    }

    /// Takes in what is there of a bucket whose write failed.
    pub(super) fn unmet(
        &self,
        levels: &Levels,
        number: usize,
        parts: &mut [Part],
        item: Option<&Item>,
    ) -> Result<(), StoreError> {
        let view = Arc::new(View::read(item)?);
        self.inner.cache.saw(&levels.levels()[number].subject, &view);
        parts[number] = Part { view, is_fresh: true };
        Ok(())
    }

    /// Makes writes of several items: one by itself, more of them together or not at all. What was set is answered where
    /// there was but one.
    pub(super) async fn send(&self, writes: &[Action]) -> Result<Option<Item>, Failed> {
        match writes {
            [Action::Update(write)] => self.inner.link.update(write).await.map(Some),
            writes => self.inner.link.transact(writes).await.map(|()| None),
        }
    }
}

/// A write that failed, of several that were sent together, each of them a level's or none's: what is there is taken in.
pub(super) fn take_in(
    unmet: Vec<Unmet>,
    whose: &[Option<usize>],
    mut see: impl FnMut(usize, Option<&Item>) -> Result<(), StoreError>,
) -> Result<(), StoreError> {
    for (unmet, whose) in unmet.into_iter().zip(whose) {
        if let (Unmet::Yes(item), Some(number)) = (unmet, whose) {
            see(*number, item.as_ref())?;
        }
    }
    Ok(())
}

/// A write of a level's item.
pub(super) fn write_of(store: &DynamoDb, level: &Level) -> Write {
    Write::new(store.inner.keys.bucket(&level.subject))
}
