//! Steps of a lease after its draw, and its end: decided on what was seen, written if that still holds.

use std::collections::BTreeMap;
use std::sync::Arc;

use tidegate_core::limit::cascade::{Level, Levels};
use tidegate_core::limit::lease::{Ending, LeaseId, REMEMBERED, Record};
use tidegate_core::limit::meter::Meter;
use tidegate_core::limit::policy::OnExpiry;
use tidegate_core::time::Stamp;

use super::DynamoDb;
use super::apart::There;
use super::decide::{Decided, Slip, decide};
use super::expression::Write;
use super::forms::{self, Decision};
use super::link::Action;
use super::marks::{EndMark, OpenMark, end_name, open_name, used_at};
use super::parts::{Apart, ApartState, Part, Told, correct, take_in, write_of};
use super::trouble::Failed;
use super::undo::take_back;
use super::view::{ENDS, HORIZON, OPENS, View};
use crate::desk::Desk;
use crate::error::StoreError;

/// A step, but for what it decides.
pub(super) struct Step<'a> {
    pub(super) lease: LeaseId,
    pub(super) levels: &'a Arc<Levels>,
    /// What is asked for: it must be there.
    pub(super) asked: Option<&'a [Option<u64>]>,
    pub(super) used: Used<'a>,
}

/// What is counted of a lease that ends by a step.
#[derive(Clone, Copy)]
pub(super) enum Used<'a> {
    /// Nothing.
    Nothing,
    /// This, and what it holds of what is not named.
    Actual(&'a [Option<u64>]),
    /// What it holds, if it is not to be returned: the lease expires, whatever the step was.
    Held,
}

impl Used<'_> {
    /// What is counted of the limit numbered `name`, for a lease that held this.
    pub(super) fn of(&self, record: &Record, name: usize) -> Option<u64> {
        let held = || record.held().get(name).copied().flatten();
        match self {
            Self::Actual(actual) => actual.get(name).copied().flatten().or_else(held),
            Self::Held if record.on_expiry() == OnExpiry::Settle => held(),
            Self::Held | Self::Nothing => None,
        }
    }
}

/// Where the lease is.
enum Place {
    /// Marked in its own item.
    Marked(OpenMark),
    /// In an item of its own, with this text.
    Apart { text: String, record: Record },
    /// Nowhere, or not open any more.
    Nowhere,
}

impl DynamoDb {
    /// Takes a step.
    pub(super) async fn step<T: Told>(
        &self,
        step: &Step<'_>,
        op: impl Fn(&mut Desk<'_, Slip>) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let mut patience = self.inner.link.patience();
        let is_guessed = self.inner.is_speculative && self.has_seen(step.levels);
        let (mut parts, mut apart) = if is_guessed {
            (self.guess(step.levels), None)
        } else {
            self.look_for(step, self.now()).await?
        };
        loop {
            let now = self.now();
            let is_fresh = parts.iter().all(|part| part.is_fresh);
            let home = &parts[0].view;
            if home.ended.contains_key(&step.lease) && home.end_of(step.lease, now).is_none() {
                // It is to be forgotten, and so it is counted first.
                self.count_item(&step.levels.subject().clone()).await?;
                (parts, apart) = self.look_for(step, now).await?;
                continue;
            }
            let (slip, place) = match find(step.lease, &parts, apart.as_ref(), now) {
                // What this process makes of what it saw proves nothing about the item.
                Err(_) if !is_fresh => {
                    (parts, apart) = self.look_for(step, now).await?;
                    continue;
                }
                found => found?,
            };
            let views: Vec<&View> = parts.iter().map(|part| &*part.view).collect();
            let decided = decide(&views, step.levels, slip, now, &op);
            let is_refusal = decided.answer.as_ref().is_ok_and(Told::is_refusal);
            let is_answer = decided.is_nothing(&views) || is_refusal || matches!(place, Place::Nowhere);
            if is_answer && !is_fresh {
                (parts, apart) = self.look_for(step, now).await?;
                continue;
            }
            if decided.is_nothing(&views) {
                if is_refusal && let Some(moved) = self.moved_on(step, (&parts, apart.as_ref()), now).await? {
                    (parts, apart) = moved;
                    continue;
                }
                return decided.answer;
            }
            let is_torn = |part: &Part| !part.is_fresh && !part.view.open.contains_key(&step.lease);
            if matches!(place, Place::Marked(_)) && parts.iter().any(is_torn) {
                // Others may have seen the bucket without its mark: only what is there now tells that it has none.
                (parts, apart) = self.look_for(step, now).await?;
                continue;
            }
            let is_expired = decided.slip.end().is_some_and(|ended| ended.how == Ending::Expired);
            let used = if is_expired { Used::Held } else { step.used };
            let step = &Step { asked: step.asked.filter(|_| !is_refusal && !is_expired), used, ..*step };
            let (actions, whose) = match &place {
                Place::Apart { text, record } => {
                    self.apart_writes(step, &parts, &decided, (text, record), now)
                }
                Place::Marked(mark) => self.marked_writes(step, &parts, &decided, mark, now),
                Place::Nowhere => self.tombstones(step, &parts, &decided, now),
            };
            match self.send(&actions).await {
                Ok(set) => return self.stepped(step, (&parts, &whose), decided, set.as_ref()),
                Err(Failed::Condition(unmet)) => {
                    take_in(unmet, &whose, |number, item| self.unmet(step.levels, number, &mut parts, item))?;
                    // A lease that is not where it was may be in an item of its own by now.
                    if !parts[0].is_fresh || !parts[0].view.open.contains_key(&step.lease) {
                        (parts, apart) = self.look_for(step, now).await?;
                    }
                }
                Err(failed) => {
                    patience.bear(failed).await?;
                    (parts, apart) = self.look_for(step, now).await?;
                }
            }
        }
    }

    /// What is there now, if the lease is not as it was: it may have been read before this very step was made, and a bucket after it.
    async fn moved_on(
        &self,
        step: &Step<'_>,
        (parts, apart): (&[Part], Option<&Apart>),
        now: Stamp,
    ) -> Result<Option<(Vec<Part>, Option<Apart>)>, StoreError> {
        if parts.len() == 1 && parts[0].view.open.contains_key(&step.lease) {
            // All of it is in one item.
            return Ok(None);
        }
        let again = self.look_for(step, now).await?;
        let is_same =
            record_of(step.lease, &again.0, again.1.as_ref()) == record_of(step.lease, parts, apart);
        Ok((!is_same).then_some(again))
    }

    /// The buckets of a step and its lease as they are now.
    async fn look_for(&self, step: &Step<'_>, now: Stamp) -> Result<(Vec<Part>, Option<Apart>), StoreError> {
        let (parts, apart) = self.look(step.levels, Some(step.lease), now).await?;
        if apart.is_some() || !parts[0].view.may_have_sent_away(step.lease) {
            return Ok((parts, apart));
        }
        // The engine reads one item after the other: what went from the bucket to its own item in between was in neither.
        Ok((parts, self.lease_item(step.lease, now).await?))
    }

    /// The writes of a step of a lease that is marked in its buckets, and the level of each.
    fn marked_writes<T>(
        &self,
        step: &Step<'_>,
        parts: &[Part],
        decided: &Decided<T>,
        mark: &OpenMark,
        now: Stamp,
    ) -> (Vec<Action>, Vec<Option<usize>>) {
        let (mut actions, mut whose) = (Vec::new(), Vec::new());
        let end = decided.slip.end();
        for (number, level) in step.levels.levels().iter().enumerate() {
            let seen = &*parts[number].view;
            let is_marked = seen.open.contains_key(&step.lease);
            let (open, ended) = (open_name(step.lease), end_name(step.lease));
            // A level that the draw never came to takes no part.
            let meters = if is_marked { &decided.meters[number] } else { &seen.meters };
            if number > 0 && end.is_none() && *meters == seen.meters {
                continue;
            }
            let mut write = self.limits_write(step, level, (seen, meters), now);
            match (number, is_marked) {
                (0, _) => write.only_if(&open, "=", mark.to_string()),
                (_, true) => write.only_with(&open),
                (_, false) if seen.is_there() => write.only_without(&open),
                (_, false) => {}
            }
            if let Some(end) = end {
                let used = if is_marked {
                    used_at(level, |name| step.used.of(&mark.record, name))
                } else {
                    Vec::new()
                };
                let end = EndMark { ended: end, drawn_at: mark.record.drawn_at(), is_own: number == 0, used };
                if is_marked {
                    write.remove(&open);
                    write.add(OPENS, -1_i64);
                }
                write.set(&ended, end.to_string());
                write.add(ENDS, i64::from(!seen.ended.contains_key(&step.lease)));
                forms::due_by(&mut write, seen, now + REMEMBERED, (&self.inner.keys, &level.subject));
            } else if let Some(record) = decided.slip.record().filter(|_| number == 0) {
                let record = record.clone();
                let until = record.deadline();
                let mark = OpenMark { level: 0, record, levels: mark.levels.clone() };
                write.set(&open, mark.to_string());
                if seen.ttl.is_some() {
                    forms::live(&mut write, seen, level, (now, until));
                }
            }
            actions.push(Action::Update(write));
            whose.push(Some(number));
        }
        (actions, whose)
    }

    /// The marks of a lease that is cancelled before it drew, in all buckets that it might draw from; what a draw left that
    /// was never ended is given back.
    fn tombstones<T>(
        &self,
        step: &Step<'_>,
        parts: &[Part],
        decided: &Decided<T>,
        now: Stamp,
    ) -> (Vec<Action>, Vec<Option<usize>>) {
        let (mut actions, mut whose) = (Vec::new(), Vec::new());
        let Some(ended) = decided.slip.end() else { return (actions, whose) };
        let (open_name, end_name) = (open_name(step.lease), end_name(step.lease));
        for (number, level) in step.levels.levels().iter().enumerate() {
            let seen = &*parts[number].view;
            let orphan = seen.open.get(&step.lease);
            let mut write = self.limits_write(step, level, (seen, &seen.meters), now);
            if let Some(mark) = orphan {
                take_back(&mut write, seen, mark, (level, None), now);
                write.only_if(&open_name, "=", mark.to_string());
                write.remove(&open_name);
                write.add(OPENS, -1_i64);
            } else if seen.is_there() {
                write.only_without(&open_name);
            }
            if seen.is_there() && !seen.ended.contains_key(&step.lease) {
                write.only_without(&end_name);
            }
            if seen.is_there() && !seen.may_be_apart(step.lease) {
                write.only_unless_or(HORIZON, "<", step.lease.millis());
            }
            let mark = EndMark { ended, drawn_at: now, is_own: number == 0, used: Vec::new() };
            write.set(&end_name, mark.to_string());
            write.add(ENDS, i64::from(!seen.ended.contains_key(&step.lease)));
            forms::due_by(&mut write, seen, now + REMEMBERED, (&self.inner.keys, &level.subject));
            if !seen.is_there() {
                // Nothing but the mark: it need not stay for ever.
                forms::live(&mut write, seen, &bare(level), (now, now + REMEMBERED));
            }
            actions.push(Action::Update(write));
            whose.push(Some(number));
        }
        if parts.iter().any(|part| part.view.may_be_apart(step.lease)) {
            let mark = EndMark { ended, drawn_at: now, is_own: true, used: Vec::new() };
            actions.push(Action::Update(self.end_item(step.lease, &mark, There::Nothing, now)));
            whose.push(None);
        }
        (actions, whose)
    }

    /// The write of a level's limits.
    pub(super) fn limits_write(
        &self,
        step: &Step<'_>,
        level: &Level,
        (seen, meters): (&View, &BTreeMap<String, Meter>),
        now: Stamp,
    ) -> Write {
        let (mut write, epoch) = (write_of(self, level), self.epoch());
        let asked = step.asked.map(|units| (level, units));
        let on = Decision { keys: &self.inner.keys, subject: &level.subject, now, asked, epoch: &epoch };
        forms::write_limits(&mut write, seen, meters, &on);
        write
    }

    /// The step was written: the answer, with what is there now as far as it was told.
    fn stepped<T: Told>(
        &self,
        step: &Step<'_>,
        (parts, whose): (&[Part], &[Option<usize>]),
        mut decided: Decided<T>,
        set: Option<&super::keys::Item>,
    ) -> Result<T, StoreError> {
        // What was not written is as it was: told as newer, it would hide what others write.
        let is_written = |(number, _): &(usize, &Level)| whose.contains(&Some(*number));
        for (number, level) in step.levels.levels().iter().enumerate().filter(is_written) {
            let seen =
                self.inner.cache.view(&level.subject).filter(|view| view.rules == parts[number].view.rules);
            let mut view = View::clone(seen.as_ref().unwrap_or(&parts[number].view));
            view.rules.get_or_insert_default();
            view.revision += 1;
            if number == 0 || view.open.contains_key(&step.lease) {
                view.meters.clone_from(&decided.meters[number]);
            }
            if let Some(ended) = decided.slip.end() {
                view.opens -= i64::from(view.open.remove(&step.lease).is_some());
                let mark = EndMark { ended, drawn_at: ended.at, is_own: number == 0, used: Vec::new() };
                view.ends += i64::from(view.ended.insert(step.lease, mark).is_none());
                let due = ended.at + REMEMBERED;
                view.due = Some(view.due.map_or(due, |known| known.min(due)));
            } else if let (Some(record), Some(mark)) = (decided.slip.record(), view.open.get_mut(&step.lease))
                && number == 0
            {
                mark.record = record.clone();
            }
            if let Some(set) = set.filter(|_| number == 0 && step.levels.levels().len() == 1) {
                view.absorb(set)?;
                if let Ok(answer) = &mut decided.answer
                    && let Some(readings) = answer.readings()
                {
                    correct(readings, step.levels, 0, &view.meters);
                }
            }
            self.inner.cache.saw(&level.subject, &Arc::new(view));
            if gives(&parts[number].view.meters, &decided.meters[number]) {
                self.inner.cache.gave(&level.subject);
            }
        }
        if decided.slip.end().is_some() {
            self.count_now_and_then(step.levels);
        }
        decided.answer
    }
}

/// Whether there is more of any limit after a step than before it.
fn gives(before: &BTreeMap<String, Meter>, after: &BTreeMap<String, Meter>) -> bool {
    before.iter().any(|(row, before)| after.get(row).is_none_or(|after| after.consumed() < before.consumed()))
}

/// What is known of the lease, and where it is.
fn find(
    lease: LeaseId,
    parts: &[Part],
    apart: Option<&Apart>,
    now: Stamp,
) -> Result<(Slip, Place), StoreError> {
    let home = &parts[0].view;
    if let Some(mark) = home.open.get(&lease) {
        let levels = home.levels_of(mark)?;
        return Ok((Slip::open(lease, mark.record.clone(), levels), Place::Marked(mark.clone())));
    }
    if let Some(mark) = home.end_of(lease, now) {
        return Ok((Slip::ended(lease, mark.ended), Place::Nowhere));
    }
    Ok(match apart {
        Some(Apart { text, state: ApartState::Open(mark, levels) }) => (
            Slip::open(lease, mark.record.clone(), Arc::clone(levels)),
            Place::Apart { text: text.clone(), record: mark.record.clone() },
        ),
        Some(Apart { state: ApartState::Ended(mark), .. }) => {
            (Slip::ended(lease, mark.ended), Place::Nowhere)
        }
        None => (Slip::unknown(lease), Place::Nowhere),
    })
}

/// What a lease is known by: it is another after each of its steps.
fn record_of(lease: LeaseId, parts: &[Part], apart: Option<&Apart>) -> Option<String> {
    let home = &parts[0].view;
    home.open.get(&lease).map(ToString::to_string).or_else(|| apart.map(|apart| apart.text.clone()))
}

/// A level without limits.
fn bare(level: &Level) -> Level {
    Level { subject: level.subject.clone(), limits: Box::default() }
}
