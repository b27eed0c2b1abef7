//! Leases in items of their own: all of a step is one transaction, of the lease, its buckets and its usage.
//!
//! So is a lease kept whose bucket has too many open ones already, one that the buckets alone do not tell of, and every one of
//! a store that is not speculative.

use std::sync::Arc;

use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::lease::{LeaseId, REMEMBERED, Record};
use tidegate_core::time::Stamp;

use super::DynamoDb;
use super::decide::{Decided, Slip, decide};
use super::draw::{Kind, under_way};
use super::expression::Write;
use super::forms;
use super::keys::{TTL, padded};
use super::link::{Action, Patience};
use super::marks::{EndMark, OpenMark, end_name, open_name, used_at};
use super::parts::{Apart, ApartState, Part, take_in};
use super::step::{Step, Used};
use super::trouble::Failed;
use super::undo::Whose;
use super::view::{HORIZON, View};
use crate::buckets::{Draw, Drawn, Moved, Readings};
use crate::error::StoreError;

/// The item of a lease that has ended is forgotten at this time.
const UNTIL: &str = "u";

/// What must be there of a lease for its end to be written.
#[derive(Clone, Copy)]
pub(super) enum There<'a> {
    /// An item with this text.
    Text(&'a str),
    /// None, or one that is to be forgotten.
    Nothing,
    /// Anything: what is written is known to be so.
    Whatever,
}

impl DynamoDb {
    /// Reads, decides, and writes if what was read still holds.
    pub(super) async fn draw_apart(&self, draw: &Draw, kind: Kind) -> Result<Drawn, StoreError> {
        let mut patience = self.inner.link.patience();
        let mut is_unsure = false;
        let (mut parts, mut apart) = self.look(&draw.levels, Some(draw.lease), self.now()).await?;
        loop {
            let now = self.now();
            let home = &parts[0].view;
            if let Some(mark) = home.open.get(&draw.lease) {
                let is_whole = parts.iter().all(|part| part.view.open.contains_key(&draw.lease));
                if !is_whole {
                    return Box::pin(self.draw_marked(draw, kind)).await;
                }
                let slip = Slip::open(draw.lease, mark.record.clone(), home.levels_of(mark)?);
                self.inner.cache.drew(draw.lease, draw.levels.subject());
                return ask(draw, kind, &parts, slip, now).answer;
            }
            let slip = match (home.end_of(draw.lease, now), &apart) {
                (Some(mark), _) | (None, Some(Apart { state: ApartState::Ended(mark), .. })) => {
                    Slip::ended(draw.lease, mark.ended)
                }
                (None, Some(Apart { state: ApartState::Open(mark, levels), .. })) => {
                    Slip::open(draw.lease, mark.record.clone(), levels.clone())
                }
                (None, None) => Slip::unknown(draw.lease),
            };
            let is_unknown = apart.is_none() && home.end_of(draw.lease, now).is_none();
            if is_unknown && parts.iter().any(|part| part.view.is_marked(draw.lease)) {
                self.mend_apart(draw, &parts, now, &mut patience).await?;
                (parts, apart) = self.look(&draw.levels, Some(draw.lease), now).await?;
                continue;
            }
            let decided = ask(draw, kind, &parts, slip, now);
            let views: Vec<&View> = parts.iter().map(|part| &*part.view).collect();
            let is_drawn = decided.slip.is_changed();
            if is_unknown && !is_drawn && parts.iter().any(|part| part.view.may_be_apart(draw.lease)) {
                // Who draws has the lease in its condition, and who is refused does not. One request reads one item after the
                // other: whatever came to the buckets meanwhile is in the lease's own item now.
                apart = self.lease_item(draw.lease, now).await?;
                if apart.is_some() {
                    continue;
                }
            }
            if decided.is_nothing(&views) || (!is_drawn && decided.answer.is_err()) {
                return decided.answer.map(|answer| if is_unsure { ours(answer) } else { answer });
            }
            let (actions, whose) = self.draw_actions(draw, &parts, &decided, now);
            if actions.is_empty() {
                return decided.answer;
            }
            match self.send(&actions).await {
                Ok(_) => {
                    self.saw_predicted(draw, &parts, &decided);
                    return decided.answer;
                }
                Err(Failed::Condition(unmet)) => {
                    let is_lease = unmet.len() > parts.len() || whose.len() != unmet.len();
                    take_in(unmet, &whose, |number, item| {
                        self.unmet(&draw.levels, number, &mut parts, item)
                    })?;
                    if is_lease || whose.contains(&None) {
                        (parts, apart) = self.look(&draw.levels, Some(draw.lease), now).await?;
                    }
                }
                Err(failed) => {
                    is_unsure |= matches!(failed, Failed::Away { is_undone: false, .. });
                    patience.bear(failed).await?;
                    (parts, apart) = self.look(&draw.levels, Some(draw.lease), now).await?;
                }
            }
        }
    }

    /// Makes something of marks of a lease whose own level has none: those that are past are counted, what somebody has left who is
    /// gone is taken back, and who is at it is waited for.
    async fn mend_apart(
        &self,
        draw: &Draw,
        parts: &[Part],
        now: Stamp,
        patience: &mut Patience,
    ) -> Result<(), StoreError> {
        let (lease, mut is_mended) = (draw.lease, false);
        for (level, part) in draw.levels.levels().iter().zip(parts) {
            if part.view.ended.contains_key(&lease) && part.view.end_of(lease, now).is_none() {
                self.count_item(&level.subject).await?;
                is_mended = true;
            }
            if let Some(mark) = part.view.open.get(&lease)
                && self.is_torn(&mark.record, now)
            {
                let at = mark.record.drawn_at();
                self.undo(lease, (level, None), Whose::Drawn(&[at]), self.attempt()).await?;
                is_mended = true;
            }
        }
        if is_mended { Ok(()) } else { patience.pause(under_way(lease)).await }
    }

    /// The item of a lease's own, as it is now.
    pub(super) async fn lease_item(&self, lease: LeaseId, now: Stamp) -> Result<Option<Apart>, StoreError> {
        let item = self.inner.link.get(&self.inner.keys.lease(lease)).await?;
        Ok(item.map(|item| Apart::read(&item, now)).transpose()?.flatten())
    }

    /// The writes of a draw: every bucket that it moves, and the lease. One that is refused leaves the newer rules.
    fn draw_actions(
        &self,
        draw: &Draw,
        parts: &[Part],
        decided: &Decided<Drawn>,
        now: Stamp,
    ) -> (Vec<Action>, Vec<Option<usize>>) {
        let Draw { lease, levels, units, terms, .. } = draw;
        let is_drawn = decided.slip.is_changed();
        let asked = is_drawn.then_some(&units[..]);
        let step = Step { lease: *lease, levels, asked, used: Used::Nothing };
        let (mut actions, mut whose) = (Vec::new(), Vec::new());
        for (number, level) in levels.levels().iter().enumerate() {
            let (seen, meters) = (&*parts[number].view, &decided.meters[number]);
            if !is_drawn && (seen.meters == *meters || !seen.is_there()) {
                continue;
            }
            let mut write = self.limits_write(&step, level, (seen, meters), now);
            if is_drawn {
                if seen.is_there() {
                    write.only_without(&open_name(*lease));
                    write.only_without(&end_name(*lease));
                }
                raise(&mut write, seen, lease.millis());
                forms::live(&mut write, seen, level, (now, now + terms.deadline));
                if decided.slip.record().is_some() {
                    forms::keep(&mut write, seen, (now, now + terms.deadline));
                }
            }
            actions.push(Action::Update(write));
            whose.push(Some(number));
        }
        if let Some(record) = decided.slip.record().filter(|_| is_drawn) {
            actions.push(Action::Update(self.open_item(*lease, levels, record, now)));
            whose.push(None);
        } else if let Some(ended) = decided.slip.end().filter(|_| is_drawn) {
            let mark = |number: usize| EndMark {
                ended,
                drawn_at: now,
                is_own: number == 0,
                used: used_at(&levels.levels()[number], |name| units[name]),
            };
            actions.push(Action::Update(self.end_item(*lease, &mark(0), There::Nothing, now)));
            whose.push(None);
            for (number, level) in levels.levels().iter().enumerate() {
                for write in self.usage_writes(&level.subject, &[&mark(number)]) {
                    actions.push(Action::Update(write));
                    whose.push(None);
                }
            }
        }
        (actions, whose)
    }

    /// The writes of a step of a lease that is kept apart.
    pub(super) fn apart_writes<T>(
        &self,
        step: &Step<'_>,
        parts: &[Part],
        decided: &Decided<T>,
        (text, record): (&str, &Record),
        now: Stamp,
    ) -> (Vec<Action>, Vec<Option<usize>>) {
        let (mut actions, mut whose) = (Vec::new(), Vec::new());
        for (number, level) in step.levels.levels().iter().enumerate() {
            let (seen, meters) = (&*parts[number].view, &decided.meters[number]);
            // One that is renewed takes its buckets with it.
            let until = decided
                .slip
                .record()
                .map(Record::deadline)
                .filter(|until| *until > record.deadline() && seen.is_there());
            if seen.meters == *meters && until.is_none() {
                continue;
            }
            let mut write = self.limits_write(step, level, (seen, meters), now);
            if let Some(until) = until {
                forms::keep(&mut write, seen, (now, until));
                if seen.ttl.is_some() {
                    forms::live(&mut write, seen, level, (now, until));
                }
            }
            actions.push(Action::Update(write));
            whose.push(Some(number));
        }
        if let Some(ended) = decided.slip.end() {
            let used =
                |number: usize| used_at(&step.levels.levels()[number], |name| step.used.of(record, name));
            let mark = |number: usize| EndMark {
                ended,
                drawn_at: record.drawn_at(),
                is_own: number == 0,
                used: used(number),
            };
            actions.push(Action::Update(self.end_item(step.lease, &mark(0), There::Text(text), now)));
            whose.push(None);
            for (number, level) in step.levels.levels().iter().enumerate() {
                for write in self.usage_writes(&level.subject, &[&mark(number)]) {
                    actions.push(Action::Update(write));
                    whose.push(None);
                }
            }
        } else if let Some(record) = decided.slip.record() {
            let mut write = Write::new(self.inner.keys.lease(step.lease));
            write.only_if("s", "=", text);
            let mark = OpenMark { level: 0, record: record.clone(), levels: "-".to_owned() };
            write.set("s", mark.to_string());
            write.set("GSI1SK", padded(record.deadline().as_micros()));
            actions.push(Action::Update(write));
            whose.push(None);
        }
        (actions, whose)
    }

    /// The item of a lease that has drawn.
    fn open_item(&self, lease: LeaseId, levels: &Arc<Levels>, record: &Record, now: Stamp) -> Write {
        let mut write = Write::new(self.inner.keys.lease(lease));
        write.only_if_new_or(UNTIL, "<=", now.as_micros());
        let deadline = record.deadline();
        let mark = OpenMark { level: 0, record: record.clone(), levels: "-".to_owned() };
        write.set("s", mark.to_string());
        write.set("l", &*self.inner.cache.text(levels).text);
        write.set("GSI1PK", self.inner.keys.due(lease_part(lease)));
        write.set("GSI1SK", padded(deadline.as_micros()));
        write.remove(UNTIL);
        write.remove(TTL);
        write
    }

    /// The item of a lease that has ended.
    pub(super) fn end_item(&self, lease: LeaseId, mark: &EndMark, there: There<'_>, now: Stamp) -> Write {
        let mut write = Write::new(self.inner.keys.lease(lease));
        match there {
            There::Text(text) => write.only_if("s", "=", text),
            There::Nothing => write.only_if_new_or(UNTIL, "<=", now.as_micros()),
            There::Whatever => {}
        }
        // Whatever was used is counted with this, or was before.
        let bare = EndMark { used: Vec::new(), ..mark.clone() };
        write.set("s", bare.to_string());
        let until = mark.ended.at + REMEMBERED;
        write.set(UNTIL, until.as_micros());
        write.set(TTL, until.as_micros().div_ceil(1_000_000));
        for name in ["l", "GSI1PK", "GSI1SK"] {
            write.remove(name);
        }
        write
    }

    /// What was decided is what there is now, as far as is known.
    fn saw_predicted(&self, draw: &Draw, parts: &[Part], decided: &Decided<Drawn>) {
        for (number, level) in draw.levels.levels().iter().enumerate() {
            let mut view = View::clone(&parts[number].view);
            // Its rules may have another name by now: then the next write finds out.
            view.meters.clone_from(&decided.meters[number]);
            if view.is_there() {
                view.horizon = view.horizon.max(Some(draw.lease.millis()));
                self.inner.cache.saw(&level.subject, &Arc::new(view));
            } else {
                self.inner.cache.forget(&level.subject);
            }
        }
        self.inner.cache.drew(draw.lease, draw.levels.subject());
    }
}

/// Decides a draw with what was read.
fn ask(draw: &Draw, kind: Kind, parts: &[Part], slip: Slip, now: Stamp) -> Decided<Drawn> {
    let views: Vec<&View> = parts.iter().map(|part| &*part.view).collect();
    decide(&views, &draw.levels, slip, now, |desk| match kind {
        Kind::Lease => desk.draw(draw),
        Kind::Spend => desk.spend(draw),
    })
}

/// Leases made up to `millis` may be kept apart from now on.
pub(super) fn raise(write: &mut Write, seen: &View, millis: u64) {
    if seen.horizon.is_none_or(|horizon| horizon < millis) {
        if seen.is_there() {
            write.only_unless_or(HORIZON, "<=", millis);
        }
        write.set(HORIZON, millis);
    }
}

/// Which of the partitions of what is due a lease is in.
fn lease_part(lease: LeaseId) -> u64 {
    u64::try_from(lease.number() & 0xFFFF).unwrap_or(0)
}

/// A repeat of what this very call did is none.
fn ours(answer: Drawn) -> Drawn {
    match answer {
        Drawn::Granted(moved) => {
            Drawn::Granted(Moved { is_repeat: false, readings: Readings::new(), ..moved })
        }
        refused @ Drawn::Refused(_) => refused,
    }
}
