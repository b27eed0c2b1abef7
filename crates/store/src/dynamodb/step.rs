//! Steps of leases: decided on what was seen of the items, and written if that still holds.
//!
//! A step is guessed from the cache and corrected by what a failed condition returns. An answer that writes nothing, a
//! refusal or a repeat, is based on items that were read during the call.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::lease::{Ended, Ending, LeaseId, Record};
use tidegate_core::limit::meter::Meter;
use tidegate_core::limit::policy::OnExpiry;
use tidegate_core::time::Stamp;

use super::DynamoDb;
use super::decide::{Decided, decide};
use super::keys::Item;
use super::link::Action;
use super::marks::OpenMark;
use super::parts::{Answer, Parts, Tombstone, correct, readings_of};
use super::trouble::Failed;
use super::view::View;
use crate::engine::{Change, Taking};
use crate::error::StoreError;
use crate::shared_engine::{LeaseState, OneLease, StepContext};

/// An item has the marks of at most so many open leases.
pub(super) const OPEN_MAX: usize = 1_000;
/// And of at most so many ended leases that are not counted yet, when a lease begins.
pub(super) const ENDED_MAX: usize = 256;
/// No lease begins in an item whose marks have more bytes: the engine allows 400 KB, and ends are longer than their leases.
const BYTES_MAX: usize = 200_000;

/// A step of a lease.
#[derive(Clone, Copy)]
pub(super) struct Step<'a> {
    pub(super) lease: LeaseId,
    pub(super) levels: &'a Arc<Levels>,
    /// What it does; `None` if it ends a lease that is past its deadline.
    pub(super) change: Option<Change<'a>>,
}

impl Step<'_> {
    /// Whether a lease begins.
    pub(super) const fn is_draw(&self) -> bool {
        matches!(self.change, Some(Change::Take(_, Taking::Open(_) | Taking::Spend)))
    }

    /// The units that must be available.
    pub(super) fn asked(&self) -> Option<&[Option<u64>]> {
        match self.change {
            Some(Change::Take(units, _)) => Some(units),
            _ => None,
        }
    }

    /// Whether the lease may owe more of a limit after the step.
    pub(super) fn may_owe(&self, record: &Record, name: usize) -> bool {
        match self.change {
            Some(Change::Shift(deltas)) => deltas[name].is_some_and(|delta| delta > 0),
            Some(Change::End(Some(actual))) => record.change(name, actual[name]).is_some_and(|more| more > 0),
            _ => false,
        }
    }

    /// What is counted of a limit if the step ends the lease.
    pub(super) fn used(&self, record: Option<&Record>, how: Ending, name: usize) -> Option<u64> {
        let held = |record: &Record| record.held().get(name).copied().flatten();
        match (how, self.change) {
            (Ending::Expired, _) => {
                record.filter(|record| record.on_expiry() == OnExpiry::Settle).and_then(held)
            }
            (_, Some(Change::End(Some(actual)))) => actual[name].or_else(|| record.and_then(held)),
            (_, Some(Change::Take(units, Taking::Spend))) => units[name],
            _ => None,
        }
    }
}

/// What is known of a lease before a step.
pub(super) enum Known {
    /// It has this mark in its home.
    Open(OpenMark, Arc<Levels>),
    Ended(Ended),
    Unknown,
}

impl Known {
    fn of(lease: LeaseId, parts: &Parts, now: Stamp) -> Result<Self, StoreError> {
        let home = parts.home();
        if let Some(mark) = home.open.get(&lease) {
            return Ok(Self::Open(mark.clone(), home.levels_of(mark)?));
        }
        Ok(match (home.end_of(lease, now), parts.tombstone) {
            (Some(mark), _) => Self::Ended(mark.ended),
            (None, Tombstone::Ended(ended)) => Self::Ended(ended),
            (None, _) => Self::Unknown,
        })
    }

    fn state(&self) -> LeaseState {
        match self {
            Self::Open(mark, levels) => LeaseState::Open(mark.record.clone(), Arc::clone(levels)),
            Self::Ended(ended) => LeaseState::Ended(*ended),
            Self::Unknown => LeaseState::Unknown,
        }
    }
}

/// What a call does next.
enum Next<T> {
    Return(Result<T, StoreError>),
    /// Reads the items and decides again.
    Look,
    /// Reads the lease again before it is said that it has not drawn. The engine reads one item after the other: a level may
    /// have been read after the lease drew from it and the home before, or a tombstone before it was written and the home
    /// after its mark was counted.
    Confirm,
    /// Counts the marks of the home and decides again.
    Count,
    Write(Box<(Decided<T>, Known)>),
}

impl DynamoDb {
    /// Takes a step.
    pub(super) async fn step<T: Answer>(
        &self,
        step: &Step<'_>,
        op: impl Fn(&mut StepContext<'_, OneLease>) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let Step { lease, levels, .. } = *step;
        let mut retries = self.inner.link.retries();
        // A write of this call may have been made though its response was lost.
        let mut is_unsure = false;
        let mut parts = if step.is_draw() || self.has_seen(levels) {
            self.guess(levels)
        } else {
            self.look_at(levels, lease, self.now()).await?
        };
        loop {
            let now = self.now();
            let (decided, known) = match self.next(step, &parts, now, is_unsure, &op)? {
                Next::Return(answer) => return answer,
                Next::Write(write) => *write,
                Next::Confirm => {
                    let again = self.look_at(levels, lease, now).await?;
                    if again.agree_on(lease, &parts) {
                        parts.is_confirmed = true;
                    } else {
                        parts = again;
                    }
                    continue;
                }
                Next::Count => {
                    self.count_item(levels.subject()).await?;
                    let what =
                        format!("`{}` has too many ended leases that are not counted", levels.subject());
                    retries.pause(StoreError::unavailable(what)).await?;
                    parts = self.look_at(levels, lease, now).await?;
                    continue;
                }
                Next::Look => {
                    parts = self.look_at(levels, lease, now).await?;
                    continue;
                }
            };
            let (actions, numbers) = self.writes(step, &parts, &decided, &known, now);
            if actions.is_empty() {
                return decided.answer;
            }
            match self.send(&actions).await {
                Ok(set) => return self.stepped(step, &parts, (&actions, &numbers), decided, set.as_ref()),
                Err(Failed::Condition(unmet)) => {
                    let is_other = self.take_in(levels, &mut parts, unmet, &numbers)?;
                    let home = &parts.levels[0];
                    let is_gone = home.is_fresh && !home.view.open.contains_key(&lease);
                    if is_other || (is_gone && !step.is_draw()) {
                        parts = self.look_at(levels, lease, now).await?;
                    }
                }
                // Only newer rules were to be written: the next call writes them.
                Err(Failed::Unavailable { .. } | Failed::Conflict) if !decided.is_changed() => {
                    return decided.answer;
                }
                Err(failed) => {
                    if matches!(failed, Failed::Unavailable { is_undone: false, .. }) {
                        is_unsure = true;
                        parts.invalidate();
                        self.inner.cache.drew(lease, levels.subject());
                    }
                    retries.bear(failed).await?;
                }
            }
        }
    }

    /// What a call does next with what it knows.
    fn next<T: Answer>(
        &self,
        step: &Step<'_>,
        parts: &Parts,
        now: Stamp,
        is_unsure: bool,
        op: impl Fn(&mut StepContext<'_, OneLease>) -> Result<T, StoreError>,
    ) -> Result<Next<T>, StoreError> {
        let (lease, home, is_fresh) = (step.lease, parts.home(), parts.is_fresh());
        if home.ended.contains_key(&lease) && home.end_of(lease, now).is_none() {
            // Its mark is kept only to be counted.
            return Ok(Next::Count);
        }
        let known = match Known::of(lease, parts, now) {
            Err(_) if !is_fresh => return Ok(Next::Look),
            known => known?,
        };
        let is_unknown = matches!(known, Known::Unknown);
        let is_late = is_unknown && home.is_late(lease);
        if is_late && parts.tombstone == Tombstone::Unread {
            return Ok(Next::Look);
        }
        let decided = decide(&parts.views(), step.levels, (lease, known.state()), now, op);
        let is_changed = decided.is_changed();
        let is_refusal = decided.answer.as_ref().is_ok_and(Answer::is_refusal);
        let is_nothing = decided.is_nothing(&parts.views()) || (decided.answer.is_err() && !is_changed);
        if !is_fresh {
            if is_refusal && !is_unsure && self.may_refuse(step, parts, &decided) {
                self.inner.rejections.fetch_add(1, Ordering::Relaxed);
                return Ok(Next::Return(decided.answer));
            }
            if is_nothing || is_refusal || (is_unknown && !step.is_draw()) {
                return Ok(Next::Look);
            }
        }
        let may_have_moved = (is_refusal && (is_late || parts.levels.len() > 1)) || (is_nothing && is_late);
        if may_have_moved && !parts.is_confirmed {
            return Ok(Next::Confirm);
        }
        if is_nothing {
            return Ok(Next::Return(self.answer(step, parts, decided, is_unsure)));
        }
        if is_unknown && is_changed {
            let is_large = home.mark_bytes() > BYTES_MAX;
            if home.end_count() >= ENDED_MAX || (is_large && !home.ended.is_empty()) {
                return Ok(Next::Count);
            }
            if decided.record().is_some() && (is_large || home.open_count() >= OPEN_MAX) {
                return Ok(if is_fresh { Next::Return(Err(full(is_large))) } else { Next::Look });
            }
        }
        Ok(Next::Write(Box::new((decided, known))))
    }

    /// Whether the cache may refuse a draw: all items were read a moment ago, the rules are the draw's own, and no earlier call
    /// of this process may have drawn it.
    fn may_refuse<T>(&self, step: &Step<'_>, parts: &Parts, decided: &Decided<T>) -> bool {
        let span = self.inner.rejected_for;
        let levels = step.levels.levels().iter();
        step.is_draw()
            && self.inner.cache.home(step.lease).is_none()
            && levels.zip(parts.views()).zip(&decided.meters).all(|((level, view), after)| {
                view.meters == *after && self.inner.cache.was_read_within(&level.subject, span)
            })
    }

    /// The answer of a step that writes nothing. A draw that finds what it wrote itself is no repeat.
    fn answer<T: Answer>(
        &self,
        step: &Step<'_>,
        parts: &Parts,
        mut decided: Decided<T>,
        is_unsure: bool,
    ) -> Result<T, StoreError> {
        let Some(units) = step.asked().filter(|_| step.is_draw()) else { return decided.answer };
        if decided.record().is_some() {
            self.inner.cache.drew(step.lease, step.levels.subject());
        }
        let is_own = |record: &Record| record.step() == 0 && record.held() == units;
        if let (true, Ok(answer)) = (is_unsure && decided.record().is_none_or(is_own), &mut decided.answer) {
            answer.claim(readings_of(step.levels, parts, units));
        }
        decided.answer
    }

    /// The answer of a step that was written, with the limits as they are now where the engine returned them.
    fn stepped<T: Answer>(
        &self,
        step: &Step<'_>,
        parts: &Parts,
        (actions, numbers): (&[Action], &[Option<usize>]),
        mut decided: Decided<T>,
        set: Option<&Item>,
    ) -> Result<T, StoreError> {
        let cache = &self.inner.cache;
        for (action, number) in actions.iter().zip(numbers) {
            let (Action::Update(write), Some(number)) = (action, *number) else { continue };
            let (subject, seen) = (&step.levels.levels()[number].subject, &parts.levels[number].view);
            let newest = cache.view(subject).filter(|view| view.rules == seen.rules);
            let mut view = View::clone(newest.as_ref().unwrap_or(seen));
            let (opens, ends) = (view.open.len(), view.ended.len());
            view.rules.get_or_insert_default();
            view.revision += 1;
            view.meters.clone_from(&decided.meters[number]);
            if number == 0 && decided.end().is_some() {
                view.open.remove(&step.lease);
            }
            if view.absorb(set.unwrap_or(&write.set_values())).is_err() {
                // The step is made all the same; the next one reads the item.
                cache.evict(subject);
                continue;
            }
            if set.is_none() {
                view.opens += difference(opens, view.open.len());
                view.ends += difference(ends, view.ended.len());
            } else if let Ok(answer) = &mut decided.answer
                && let Some(readings) = answer.readings()
            {
                correct(readings, step.levels, number, &view.meters);
            }
            cache.saw(subject, &Arc::new(view));
            let after = &decided.meters[number];
            let gives = |(row, before): (&String, &Meter)| {
                after.get(row).is_none_or(|after| after.consumed() < before.consumed())
            };
            if seen.meters.iter().any(gives) {
                cache.gave(subject);
            }
        }
        if step.is_draw() && decided.is_changed() {
            cache.drew(step.lease, step.levels.subject());
        }
        self.count_now_and_then(step.levels.subject());
        decided.answer
    }
}

fn difference(before: usize, after: usize) -> i64 {
    let count = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
    count(after) - count(before)
}

/// The error of a draw from a bucket that has as many open leases as its item has space for.
const fn full(is_large: bool) -> StoreError {
    if is_large {
        StoreError::Full {
            what: "bytes of open leases in one DynamoDB item, the most there are",
            max: BYTES_MAX as u64,
        }
    } else {
        StoreError::Full {
            what: "open leases of one subject, the most that a DynamoDB item holds",
            max: OPEN_MAX as u64,
        }
    }
}
