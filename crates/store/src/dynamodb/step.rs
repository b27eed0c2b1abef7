//! Runs steps of leases: decides on a snapshot of their items, and writes on condition that it still holds
//! (optimistic locking).
//!
//! The snapshot comes from the cache first, and is corrected by the items that a failed condition returns. A
//! result without a write, such as a refusal or a repeat, is based on items that were read during the call.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::lease::{EndRecord, LeaseId, Record};
use tidegate_core::limit::meter::Meter;
use tidegate_core::limit::name::Subject;
use tidegate_core::limit::usage::{Usage, Window};
use tidegate_core::time::Stamp;

use super::DynamoDb;
use super::bucket_view::BucketView;
use super::client::Action;
use super::errors::RequestError;
use super::keys::Item;
use super::lease_marks::Used;
use super::snapshot::{Snapshot, Tombstone, correct, readings_of};
use crate::buckets::{Movement, Readings};
use crate::engine::{self, Change, StepResult, TakeMode};
use crate::error::StoreError;
use crate::shared_engine::{self, LeaseState};
use crate::store::SweepReport;

/// The most open leases of an item.
pub(super) const OPEN_MAX: usize = 1_000;
/// The most ended, uncounted leases of an item when another lease begins.
pub(super) const ENDED_MAX: usize = 256;
/// The most bytes of marks of an item when another lease begins: the engine allows 400 KB, and the mark of an
/// ended lease is longer than that of an open one.
const BYTES_MAX: usize = 200_000;

/// A step of a lease.
#[derive(Clone, Copy)]
pub(super) struct Step<'a> {
    pub(super) of: engine::Step<'a>,
    /// Whether it only ends the lease if that is past its deadline.
    pub(super) is_expiry: bool,
}

impl Step<'_> {
    /// Whether a lease begins.
    pub(super) const fn is_draw(&self) -> bool {
        matches!(self.of.change, Change::Take(_, TakeMode::Open(_) | TakeMode::Spend) | Change::Set(_))
    }

    /// The units that must be available.
    pub(super) fn requested(&self) -> Option<&[Option<u64>]> {
        match self.of.change {
            Change::Take(units, _) => Some(units),
            _ => None,
        }
    }

    /// Whether the lease may owe more of a limit after the step.
    pub(super) fn may_owe(&self, record: &Record, name: usize) -> bool {
        match self.of.change {
            Change::Shift(deltas) => deltas[name].is_some_and(|delta| delta > 0),
            Change::End(Some(actual)) => record.change(name, actual[name]).is_some_and(|more| more > 0),
            _ => false,
        }
    }
}

/// The state of a lease before a step.
fn state_of(lease: LeaseId, snapshot: &Snapshot, now: Stamp) -> Result<LeaseState, StoreError> {
    Ok(match (snapshot.home().lease(lease, now)?, snapshot.tombstone) {
        (LeaseState::Unknown, Tombstone::Ended(ended)) => LeaseState::Ended(ended),
        (state, _) => state,
    })
}

/// The result of a decision.
pub(super) struct Decision {
    pub(super) answer: Result<StepResult, StoreError>,
    /// The limits of each level after it, by row.
    pub(super) meters: Vec<BTreeMap<String, Meter>>,
    pub(super) before: LeaseState,
    after: LeaseState,
    /// The usage to count.
    usage: Vec<Usage>,
}

impl Decision {
    /// The lease before the step, if it is open.
    pub(super) const fn record_before(&self) -> Option<&Record> {
        open_record(&self.before)
    }

    /// The lease after the step, if it is open.
    pub(super) const fn record(&self) -> Option<&Record> {
        open_record(&self.after)
    }

    /// The levels that the lease draws from: an open one is changed by the rules that it drew by.
    pub(super) const fn levels<'a>(&'a self, step: &Step<'a>) -> &'a Arc<Levels> {
        match &self.before {
            LeaseState::Open(_, levels) => levels,
            LeaseState::Unknown | LeaseState::Ended(_) => step.of.levels,
        }
    }

    /// How the lease has ended after the step, if it has.
    pub(super) const fn end(&self) -> Option<EndRecord> {
        match self.after {
            LeaseState::Ended(ended) => Some(ended),
            LeaseState::Unknown | LeaseState::Open(..) => None,
        }
    }

    /// The units to count for a subject.
    pub(super) fn used(&self, subject: &Subject) -> Used {
        let of_subject = |line: &&Usage| line.window == Window::Hour && line.subject == *subject;
        let lines = self.usage.iter().filter(of_subject);
        lines.map(|line| (line.limit.clone(), line.tally.units)).collect()
    }

    /// Whether the step changes the lease.
    pub(super) fn is_changed(&self) -> bool {
        self.before != self.after
    }

    /// Whether nothing needs to be written.
    pub(super) fn is_nothing(&self, views: &[&BucketView]) -> bool {
        !self.is_changed() && views.iter().zip(&self.meters).all(|(view, after)| view.meters == *after)
    }
}

const fn open_record(state: &LeaseState) -> Option<&Record> {
    match state {
        LeaseState::Open(record, _) => Some(record),
        LeaseState::Unknown | LeaseState::Ended(_) => None,
    }
}

/// Decides a step on these buckets. An expiry that changes nothing is a repeat.
fn decide(views: &[&BucketView], step: &Step<'_>, before: LeaseState, now: Stamp) -> Decision {
    let buckets: Vec<Vec<Meter>> = views.iter().map(|view| view.meters.values().cloned().collect()).collect();
    let (answer, after, buckets, usage) = if step.is_expiry {
        let decision = shared_engine::expire(step.of.lease, before.clone(), &buckets, now);
        let moved = |swept| {
            let is_repeat = swept == SweepReport::default();
            StepResult::Granted(Movement { at: now, is_repeat, readings: Readings::new() })
        };
        (decision.answer.map(moved), decision.lease, decision.buckets, decision.usage)
    } else {
        let decision = shared_engine::decide(&step.of, before.clone(), &buckets, now, Duration::ZERO);
        (decision.answer, decision.lease, decision.buckets, decision.usage)
    };
    let by_row =
        |meters: Vec<Meter>| meters.into_iter().map(|meter| (meter.rule().row().to_owned(), meter)).collect();
    Decision { answer, meters: buckets.into_iter().map(by_row).collect(), before, after, usage }
}

/// What a call does next.
enum Next {
    Return(Result<StepResult, StoreError>),
    /// Reads the items and decides again.
    Read,
    /// Reads the lease again before the call reports that it has not drawn. The engine reads one item after
    /// the other: a level may have been read after the lease drew from it but the home before, or a tombstone
    /// before it was written but the home after its mark was counted.
    Confirm,
    /// Counts the marks of the home and decides again.
    Count,
    Write(Box<Decision>),
}

impl DynamoDb {
    /// Runs a step.
    pub(super) async fn step(&self, step: &Step<'_>) -> Result<StepResult, StoreError> {
        let engine::Step { lease, levels, .. } = step.of;
        let mut retries = self.inner.client.retries();
        // Whether a write of this call may have been applied although its response was lost.
        let mut is_unsure = false;
        let mut snapshot = if step.is_draw() || self.has_seen(levels) {
            self.cached_snapshot(levels)
        } else {
            self.read_items(levels, lease, self.now()).await?
        };
        loop {
            let now = self.now();
            let decision = match self.next(step, &snapshot, now, is_unsure)? {
                Next::Return(answer) => return answer,
                Next::Write(decision) => *decision,
                Next::Confirm => {
                    let again = self.read_items(levels, lease, now).await?;
                    if again.agree_on(lease, &snapshot) {
                        snapshot.is_confirmed = true;
                    } else {
                        snapshot = again;
                    }
                    continue;
                }
                Next::Count => {
                    self.count_item(levels.subject()).await?;
                    let what =
                        format!("`{}` has too many ended leases that are not counted", levels.subject());
                    retries.pause(StoreError::unavailable(what)).await?;
                    snapshot = self.read_items(levels, lease, now).await?;
                    continue;
                }
                Next::Read => {
                    snapshot = self.read_items(levels, lease, now).await?;
                    continue;
                }
            };
            let (actions, numbers) = self.writes(step, &snapshot, &decision, now);
            if actions.is_empty() {
                return decision.answer;
            }
            match self.send(&actions).await {
                Ok(set) => {
                    return self.finish_step(step, &snapshot, (&actions, &numbers), decision, set.as_ref());
                }
                Err(RequestError::Condition(unmet)) => {
                    let is_other = self.absorb_unmet(levels, &mut snapshot, unmet, &numbers)?;
                    let home = &snapshot.levels[0];
                    let is_gone = home.is_fresh && !home.view.open.contains_key(&lease);
                    if is_other || (is_gone && !step.is_draw()) {
                        snapshot = self.read_items(levels, lease, now).await?;
                    }
                }
                // Only newer rules would be written: the next call writes them.
                Err(RequestError::Unavailable { .. } | RequestError::Conflict) if !decision.is_changed() => {
                    return decision.answer;
                }
                Err(request_error) => {
                    if matches!(request_error, RequestError::Unavailable { is_undone: false, .. }) {
                        is_unsure = true;
                        snapshot.invalidate();
                        self.inner.cache.remember_home(lease, levels.subject());
                    }
                    retries.wait_or_fail(request_error).await?;
                }
            }
        }
    }

    /// The next action of a call, by its snapshot.
    fn next(
        &self,
        step: &Step<'_>,
        snapshot: &Snapshot,
        now: Stamp,
        is_unsure: bool,
    ) -> Result<Next, StoreError> {
        let (lease, home, is_fresh) = (step.of.lease, snapshot.home(), snapshot.is_fresh());
        if home.ended.contains_key(&lease) && home.end_of(lease, now).is_none() {
            // Its mark exists only to be counted.
            return Ok(Next::Count);
        }
        let before = match state_of(lease, snapshot, now) {
            Err(_) if !is_fresh => return Ok(Next::Read),
            before => before?,
        };
        let is_unknown = before == LeaseState::Unknown;
        let is_late = is_unknown && home.is_late(lease);
        if is_late && snapshot.tombstone == Tombstone::Unread {
            return Ok(Next::Read);
        }
        let decision = decide(&snapshot.views(), step, before, now);
        let is_changed = decision.is_changed();
        let is_refusal = matches!(decision.answer, Ok(StepResult::Refused(_)));
        let is_nothing = decision.is_nothing(&snapshot.views()) || (decision.answer.is_err() && !is_changed);
        if !is_fresh {
            if is_refusal && !is_unsure && self.may_refuse(step, snapshot, &decision) {
                self.inner.rejections.fetch_add(1, Ordering::Relaxed);
                return Ok(Next::Return(decision.answer));
            }
            if is_nothing || is_refusal || (is_unknown && !step.is_draw()) {
                return Ok(Next::Read);
            }
        }
        let may_have_moved =
            (is_refusal && (is_late || snapshot.levels.len() > 1)) || (is_nothing && is_late);
        if may_have_moved && !snapshot.is_confirmed {
            return Ok(Next::Confirm);
        }
        if is_nothing {
            return Ok(Next::Return(self.answer(step, snapshot, decision, is_unsure)));
        }
        if is_unknown && is_changed {
            let is_large = home.mark_bytes() > BYTES_MAX;
            if home.end_count() >= ENDED_MAX || (is_large && !home.ended.is_empty()) {
                return Ok(Next::Count);
            }
            if decision.record().is_some() && (is_large || home.open_count() >= OPEN_MAX) {
                return Ok(if is_fresh { Next::Return(Err(full(is_large))) } else { Next::Read });
            }
        }
        Ok(Next::Write(Box::new(decision)))
    }

    /// Whether the cache may refuse a draw: all items were read a moment ago, the rules are those of the
    /// draw, and no earlier call of this process may have drawn the lease.
    fn may_refuse(&self, step: &Step<'_>, snapshot: &Snapshot, decision: &Decision) -> bool {
        let span = self.inner.options.rejections;
        let levels = step.of.levels.levels().iter();
        step.is_draw()
            && self.inner.cache.home(step.of.lease).is_none()
            && levels.zip(snapshot.views()).zip(&decision.meters).all(|((level, view), after)| {
                view.meters == *after && self.inner.cache.was_read_within(&level.subject, span)
            })
    }

    /// The result of a step that writes nothing. A draw that finds its own write is not a repeat.
    fn answer(
        &self,
        step: &Step<'_>,
        snapshot: &Snapshot,
        mut decision: Decision,
        is_unsure: bool,
    ) -> Result<StepResult, StoreError> {
        let Some(units) = step.requested().filter(|_| step.is_draw()) else { return decision.answer };
        let engine::Step { lease, levels, .. } = step.of;
        if decision.record().is_some() {
            self.inner.cache.remember_home(lease, levels.subject());
        }
        let is_own = |record: &Record| record.step() == 0 && record.held() == units;
        if is_unsure
            && decision.record().is_none_or(is_own)
            && let Ok(StepResult::Granted(moved)) = &mut decision.answer
            && moved.is_repeat
        {
            (moved.is_repeat, moved.readings) = (false, readings_of(levels, snapshot, units));
        }
        decision.answer
    }

    /// The result of a step that was written, with the current limits if the engine returned them.
    fn finish_step(
        &self,
        step: &Step<'_>,
        snapshot: &Snapshot,
        (actions, numbers): (&[Action], &[Option<usize>]),
        mut decision: Decision,
        set: Option<&Item>,
    ) -> Result<StepResult, StoreError> {
        let cache = &self.inner.cache;
        let engine::Step { lease, levels, .. } = step.of;
        for (action, number) in actions.iter().zip(numbers) {
            let (Action::Update(write), Some(number)) = (action, *number) else { continue };
            let (subject, seen) = (&levels.levels()[number].subject, &snapshot.levels[number].view);
            let newest = cache.view(subject).filter(|view| view.rules == seen.rules);
            let mut view = BucketView::clone(newest.as_ref().unwrap_or(seen));
            let (opens, ends) = (view.open.len(), view.ended.len());
            view.rules.get_or_insert_default();
            view.revision += 1;
            view.meters.clone_from(&decision.meters[number]);
            if number == 0 && decision.end().is_some() {
                view.open.remove(&lease);
            }
            if view.absorb(set.unwrap_or(&write.set_values())).is_err() {
                // The step was applied; the next one reads the item.
                cache.evict(subject);
                continue;
            }
            if set.is_none() {
                view.opens += difference(opens, view.open.len());
                view.ends += difference(ends, view.ended.len());
            } else if let Ok(StepResult::Granted(moved) | StepResult::Refused(moved)) = &mut decision.answer {
                correct(&mut moved.readings, levels, number, &view.meters);
            }
            cache.update_view(subject, &Arc::new(view));
            let after = &decision.meters[number];
            let gives = |(row, before): (&String, &Meter)| {
                after.get(row).is_none_or(|after| after.consumed() < before.consumed())
            };
            if seen.meters.iter().any(gives) {
                cache.record_return(subject);
            }
        }
        if step.is_draw() && decision.is_changed() {
            cache.remember_home(lease, levels.subject());
        }
        self.count_if_many(levels.subject());
        decision.answer
    }
}

fn difference(before: usize, after: usize) -> i64 {
    let count = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
    count(after) - count(before)
}

/// The error of a draw from a bucket whose item has the most open leases.
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
