//! Draws by one write for each level: guessed from what was seen last, corrected by what is there.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use futures_util::future::join_all;
use tidegate_core::limit::cascade::Units;
use tidegate_core::limit::lease::{Ended, Ending, LeaseId, REMEMBERED, Record, Turn};
use tidegate_core::limit::meter::Meter;
use tidegate_core::time::Stamp;

use super::DynamoDb;
use super::decide::{Decided, Slip, decide};
use super::expression::Write;
use super::forms::{self, Decision};
use super::link::{Action, Patience};
use super::marks::{EndMark, OpenMark, end_name, open_name, undone_name, used_at};
use super::parts::{Part, Told, correct, take_in, write_of};
use super::trouble::{Failed, Unmet};
use super::undo::Whose;
use super::view::{ENDS, HORIZON, OPENS, View};
use crate::buckets::{Draw, Drawn, Moved, Readings};
use crate::error::StoreError;

/// A bucket has at most so many open leases in its item; further ones have items of their own.
pub(super) const OPEN_MAX: usize = 64;
/// And at most so many that have ended and could not be counted yet.
const ENDED_MAX: usize = 256;

/// A draw of several levels that is not whole after so many timeouts is nobody's any more.
const TORN_AFTER: u32 = 3;
/// Whoever draws for longer than so many neither has drawn nor takes anything back.
const LATE_AFTER: u32 = 2;

/// What a draw is to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A lease begins.
    Lease,
    /// It begins and is settled.
    Spend,
}

/// A draw under way.
struct Under<'a> {
    draw: &'a Draw,
    kind: Kind,
    parts: Vec<Part>,
    /// The limits of each level after its write, once that is made.
    done: Vec<Option<BTreeMap<String, Meter>>>,
    /// When it is decided: what is begun is ended at the same time.
    at: Option<Stamp>,
    attempt: u64,
    /// A write of this call may have been made though nobody said so.
    is_unsure: bool,
    begun: Stamp,
    /// The times at which writes of this call were sent: those of its marks.
    sent: Vec<Stamp>,
    /// Its own bucket as it was when its write was sent.
    tried: Option<Part>,
}

/// What the buckets say of the lease.
enum Known {
    Nothing,
    /// It is open in its own item.
    Open,
    Ended(EndMark),
    /// The bucket of this level says that it ended so long ago that it is to be forgotten.
    Forgettable(usize),
    /// The buckets alone do not tell.
    Apart,
}

impl DynamoDb {
    /// Draws by writes of the buckets alone, if these can tell.
    pub(super) async fn draw_marked(&self, draw: &Draw, kind: Kind) -> Result<Drawn, StoreError> {
        let parts = self.guess(&draw.levels);
        let done = parts.iter().map(|_| None).collect();
        let mut under = Under {
            draw,
            kind,
            parts,
            done,
            at: None,
            attempt: self.attempt(),
            is_unsure: false,
            begun: self.now(),
            sent: Vec::new(),
            tried: None,
        };
        match self.drawing(&mut under).await {
            Ok(answer) => answer,
            Err(trouble) => {
                if !trouble.is_transient() {
                    // Nobody goes on from there. Where this fails too, the trouble that was first is told.
                    drop(self.undo_sent(&under).await);
                }
                Err(trouble)
            }
        }
    }

    /// Draws, and tells what is answered, or what trouble there was before anything could be.
    async fn drawing(&self, under: &mut Under<'_>) -> Result<Result<Drawn, StoreError>, StoreError> {
        let (draw, kind) = (under.draw, under.kind);
        let mut patience = self.inner.link.patience();
        loop {
            under.recognise();
            let now = under.at.unwrap_or_else(|| self.now());
            match under.known(now) {
                Known::Apart => {
                    self.undo_sent(under).await?;
                    return Ok(self.draw_apart(draw, kind).await);
                }
                Known::Forgettable(number) => {
                    self.count_item(&draw.levels.levels()[number].subject).await?;
                    self.look_again(under, now).await?;
                    continue;
                }
                Known::Open | Known::Ended(_) if !under.is_fresh() => {
                    self.look_again(under, now).await?;
                    continue;
                }
                Known::Ended(mark) => {
                    self.undo_sent(under).await?;
                    return Ok(under.ended(mark.ended, now));
                }
                Known::Open if under.is_complete() || under.is_stepped() => {
                    self.inner.cache.drew(draw.lease, draw.levels.subject());
                    return Ok(under.repeated(now));
                }
                Known::Open => {
                    self.mend_or_wait(under, now, &mut patience).await?;
                    continue;
                }
                Known::Nothing => {}
            }
            let decided = under.decide(now);
            match &decided.answer {
                Ok(Drawn::Granted(_)) => {}
                Ok(Drawn::Refused(_)) if self.may_refuse(under, &decided) => {
                    self.inner.rejections.fetch_add(1, Ordering::Relaxed);
                    return Ok(decided.answer);
                }
                _ if !under.is_fresh() => {
                    self.look_again(under, now).await?;
                    continue;
                }
                Ok(Drawn::Refused(_)) if under.is_in_its_own_way() => {
                    self.mend_or_wait(under, now, &mut patience).await?;
                    continue;
                }
                Ok(Drawn::Refused(_)) if !self.follow(under, &decided, now).await? => continue,
                Ok(Drawn::Refused(_)) | Err(_) => {
                    self.undo_sent(under).await?;
                    return Ok(decided.answer);
                }
            }
            if self.write(under, &decided, now, &mut patience).await? {
                if self.is_late(under) {
                    let millis = u64::try_from(self.inner.link.timeout.as_millis()).unwrap_or(u64::MAX);
                    return Err(StoreError::TimedOut { millis });
                }
                return Ok(self.granted(under, decided));
            }
        }
    }

    /// Whether a refusal is answered though nobody was asked: everything was read a moment ago, by rules that are the draw's
    /// own, and nothing was sent yet.
    fn may_refuse(&self, under: &Under<'_>, decided: &Decided<Drawn>) -> bool {
        let span = self.inner.rejected_for;
        let levels = under.draw.levels.levels();
        !under.is_unsure
            && !under.is_in_its_own_way()
            && under.done.iter().all(Option::is_none)
            && levels.iter().zip(&under.parts).zip(&decided.meters).all(|((level, part), after)| {
                part.view.meters == *after && self.inner.cache.was_read_within(&level.subject, span)
            })
    }

    /// Makes the writes of those levels that were not written yet. Answers whether all are.
    async fn write(
        &self,
        under: &mut Under<'_>,
        decided: &Decided<Drawn>,
        now: Stamp,
        patience: &mut Patience,
    ) -> Result<bool, StoreError> {
        let left: Vec<usize> = (0..under.parts.len()).filter(|number| under.is_left(*number)).collect();
        under.sent.push(now);
        if left.first() == Some(&0) {
            under.tried = Some(under.parts[0].clone());
        }
        let writes: Vec<Write> =
            left.iter().map(|number| self.draw_write(under, decided, *number, now)).collect();
        let results = if under.kind == Kind::Spend && writes.len() > 1 {
            // What is counted cannot be taken back: all or nothing.
            let actions: Vec<Action> = writes.into_iter().map(Action::Update).collect();
            self.apart_results(under, decided, &actions).await
        } else {
            join_all(writes.iter().map(|write| self.inner.link.update(write))).await
        };
        let (mut answered, mut failed) = (None, None);
        for (number, result) in left.iter().copied().zip(results) {
            match result {
                Ok(set) => {
                    under.at = Some(now);
                    // It is made, whatever can be read of it.
                    let view = self.wrote(under, decided, number, &set);
                    let meters = view.as_ref().map_or(&decided.meters[number], |view| &view.meters);
                    under.done[number] = Some(meters.clone());
                    answered = answered.or(view.err());
                }
                Err(Failed::Condition(unmet)) => {
                    let taken = take_in(unmet, &[Some(number)], |number, item| {
                        self.unmet(&under.draw.levels, number, &mut under.parts, item)
                    });
                    answered = answered.or(taken.err());
                    let undone = under.parts[number].view.undone.get(&under.draw.lease).copied();
                    if let Some(last) = undone.filter(|last| *last >= under.attempt) {
                        under.attempt = last + 1;
                    }
                }
                Err(Failed::Answer(error)) => answered = answered.or(Some(error)),
                Err(trouble) => {
                    under.is_unsure |= matches!(trouble, Failed::Away { is_undone: false, .. });
                    failed = Some(trouble);
                }
            }
        }
        // Only now is it known what became of every level.
        if let Some(error) = answered {
            return Err(error);
        }
        if let Some(failed) = failed {
            // What was drawn stays, and is taken back with the lease: whoever asks again goes on from there.
            patience.bear(failed).await?;
            return Ok(false);
        }
        // Of several that draw the same, the one that wrote its own level is the first.
        Ok(under.done[0].is_some() && under.is_complete())
    }

    /// The same with a transaction, as if each write had been made by itself.
    async fn apart_results(
        &self,
        under: &Under<'_>,
        decided: &Decided<Drawn>,
        actions: &[Action],
    ) -> Vec<Result<super::keys::Item, Failed>> {
        match self.inner.link.transact(actions).await {
            Ok(()) => actions.iter().map(|_| Ok(super::keys::Item::new())).collect(),
            Err(Failed::Condition(unmet)) => {
                // Those that would have been made were not: they are tried again with the others.
                let result = |unmet: Unmet| match unmet {
                    Unmet::Yes(item) => Err(Failed::Condition(vec![Unmet::Yes(item)])),
                    Unmet::No => Err(Failed::Condition(Vec::new())),
                };
                debug_assert_eq!(under.parts.len(), decided.meters.len(), "a view of each level");
                unmet.into_iter().map(result).collect()
            }
            Err(failed) => vec![Err(failed)],
        }
    }

    /// The write of one level.
    fn draw_write(&self, under: &Under<'_>, decided: &Decided<Drawn>, number: usize, now: Stamp) -> Write {
        let Draw { lease, levels, units, terms, .. } = under.draw;
        let (level, seen) = (&levels.levels()[number], &*under.parts[number].view);
        let mut write = write_of(self, level);
        let (keys, epoch) = (&self.inner.keys, self.epoch());
        let on = Decision { keys, subject: &level.subject, now, asked: Some((level, units)), epoch: &epoch };
        forms::write_limits(&mut write, seen, &decided.meters[number], &on);
        if seen.is_there() {
            write.only_without(&open_name(*lease));
            write.only_without(&end_name(*lease));
            write.only_unless_or(HORIZON, "<", lease.millis());
            // Others leave marks in it that nobody has told us of.
            write.only_unless_or(OPENS, "<", OPEN_MAX as u64);
            write.only_unless_or(ENDS, "<", ENDED_MAX as u64);
            if levels.levels().len() > 1 {
                write.only_unless_or(&undone_name(*lease), "<", under.attempt);
            }
        }
        let until = match under.kind {
            Kind::Lease => {
                let text = self.inner.cache.text(levels);
                let record =
                    Record::new(Units::from_slice(units), now, now + terms.deadline, terms.on_expiry);
                let mark = OpenMark { level: number, record, levels: text.name.to_string() };
                write.set(&open_name(*lease), mark.to_string());
                write.add(OPENS, 1_u64);
                write.set(&format!("l:{}", text.name), &*text.text);
                now + terms.deadline
            }
            Kind::Spend => {
                write.set(&end_name(*lease), under.end_mark(number, now).to_string());
                write.add(ENDS, 1_u64);
                now + REMEMBERED
            }
        };
        forms::due_by(&mut write, seen, until, (keys, &level.subject));
        forms::live(&mut write, seen, level, (now, until));
        write
    }

    /// A level was written: this is what is there now.
    fn wrote(
        &self,
        under: &Under<'_>,
        decided: &Decided<Drawn>,
        number: usize,
        set: &super::keys::Item,
    ) -> Result<Arc<View>, StoreError> {
        let (subject, seen) = (&under.draw.levels.levels()[number].subject, &under.parts[number].view);
        let newest = self.inner.cache.view(subject).filter(|view| view.rules == seen.rules);
        let mut view = View::clone(newest.as_ref().unwrap_or(seen));
        view.rules.get_or_insert_default();
        view.revision += 1;
        view.meters.clone_from(&decided.meters[number]);
        view.absorb(set)?;
        let view = Arc::new(view);
        self.inner.cache.saw(subject, &view);
        Ok(view)
    }

    /// Looks at all buckets that are not written yet.
    async fn look_again(&self, under: &mut Under<'_>, now: Stamp) -> Result<(), StoreError> {
        let (parts, _) = self.look(&under.draw.levels, None, now).await?;
        for (number, part) in parts.into_iter().enumerate() {
            if under.done[number].is_none() {
                under.parts[number] = part;
            }
        }
        Ok(())
    }

    /// A refusal leaves the newer rules that it was decided by. Answers whether they are written.
    async fn follow(
        &self,
        under: &mut Under<'_>,
        decided: &Decided<Drawn>,
        now: Stamp,
    ) -> Result<bool, StoreError> {
        let mut is_written = true;
        for (number, level) in under.draw.levels.levels().iter().enumerate() {
            let seen = Arc::clone(&under.parts[number].view);
            let after = &decided.meters[number];
            if under.done[number].is_some() || seen.meters == *after || !seen.is_there() {
                continue;
            }
            let (mut write, epoch) = (write_of(self, level), self.epoch());
            let on =
                Decision { keys: &self.inner.keys, subject: &level.subject, now, asked: None, epoch: &epoch };
            forms::write_limits(&mut write, &seen, after, &on);
            match self.inner.link.update(&write).await {
                Ok(set) => {
                    let view = self.wrote(under, decided, number, &set)?;
                    under.parts[number] = Part { view, is_fresh: true };
                }
                Err(Failed::Condition(unmet)) => {
                    is_written = false;
                    take_in(unmet, &[Some(number)], |number, item| {
                        self.unmet(&under.draw.levels, number, &mut under.parts, item)
                    })?;
                }
                Err(Failed::Answer(error)) => return Err(error),
                // It was refused either way; the next one brings the rules again.
                Err(Failed::Away { .. } | Failed::Conflict) => {}
            }
        }
        Ok(is_written)
    }

    /// Takes back what was drawn of levels, and what may have been, where others are refused.
    async fn undo_sent(&self, under: &Under<'_>) -> Result<(), StoreError> {
        let levels = under.draw.levels.levels();
        if levels.len() > 1 && self.is_late(under) {
            // It is others' by now, and what is there may be theirs.
            return Ok(());
        }
        let sent = (0..levels.len()).filter(|number| under.is_unsure || under.done[*number].is_some());
        let undone = sent.map(|number| {
            let drawn = under.done[number].as_ref();
            let late = under.is_unsure.then_some(under.attempt);
            self.undo(under.draw.lease, (&levels[number], drawn), Whose::Drawn(&under.sent), late)
        });
        join_all(undone).await.into_iter().collect()
    }

    /// Takes back what somebody has drawn who is gone; who may still be at it, and has not come to every level yet, is waited for.
    async fn mend_or_wait(
        &self,
        under: &mut Under<'_>,
        now: Stamp,
        patience: &mut Patience,
    ) -> Result<(), StoreError> {
        let lease = under.draw.lease;
        // Its own level is written with the others, or last.
        let mark = under.parts.iter().find_map(|part| part.view.open.get(&lease));
        if mark.is_some_and(|mark| self.is_torn(&mark.record, now)) {
            self.mend(under).await?;
        } else {
            patience.pause(under_way(lease)).await?;
        }
        self.look_again(under, now).await
    }

    /// Whether whoever drew this has had time enough to come to every level.
    pub(super) fn is_torn(&self, record: &Record, now: Stamp) -> bool {
        record.drawn_at() + self.inner.link.timeout * TORN_AFTER < now
    }

    /// Takes back what somebody has drawn who did not come to every level and is gone. Whatever of it is still under way
    /// comes too late where it was taken back, and where it was not finds the mark of this draw or is found by it.
    async fn mend(&self, under: &mut Under<'_>) -> Result<(), StoreError> {
        let (lease, fence) = (under.draw.lease, self.attempt());
        let levels = under.draw.levels.levels();
        let torn = levels.iter().zip(&under.parts).filter_map(|(level, part)| {
            let at = part.view.open.get(&lease)?.record.drawn_at();
            Some(async move { self.undo(lease, (level, None), Whose::Drawn(&[at]), fence).await })
        });
        join_all(torn).await.into_iter().collect::<Result<(), StoreError>>()?;
        under.attempt = self.attempt();
        Ok(())
    }

    /// Whether a draw of several levels takes so long that others may take it for torn.
    fn is_late(&self, under: &Under<'_>) -> bool {
        under.parts.len() > 1 && self.now().since(under.begun) > self.inner.link.timeout * LATE_AFTER
    }

    fn granted(&self, under: &Under<'_>, decided: Decided<Drawn>) -> Result<Drawn, StoreError> {
        let levels = &under.draw.levels;
        let mut answer = decided.answer?;
        if let Some(readings) = answer.readings() {
            for (number, done) in under.done.iter().enumerate() {
                if let Some(meters) = done {
                    correct(readings, levels, number, meters);
                }
            }
        }
        self.inner.cache.drew(under.draw.lease, levels.subject());
        self.count_now_and_then(levels);
        Ok(answer)
    }
}

/// The trouble of one whose draw somebody else is making.
pub(super) fn under_way(lease: LeaseId) -> StoreError {
    StoreError::unavailable(format!("the draw of the lease {lease} is under way elsewhere"))
}

impl Under<'_> {
    fn known(&self, now: Stamp) -> Known {
        let lease = self.draw.lease;
        let left = (0..self.parts.len()).filter(|number| self.done[*number].is_none());
        for (number, view) in left.map(|number| (number, &self.parts[number].view)) {
            if let Some(mark) = view.end_of(lease, now) {
                return Known::Ended(mark.clone());
            }
            if view.ended.contains_key(&lease) {
                return Known::Forgettable(number);
            }
        }
        if self.done[0].is_none() && self.parts[0].view.open.contains_key(&lease) {
            return Known::Open;
        }
        let mut left = (0..self.parts.len()).filter(|number| self.is_left(*number));
        let is_apart = |view: &View| {
            view.may_be_apart(lease) || view.open_count() >= OPEN_MAX || view.end_count() >= ENDED_MAX
        };
        if left.any(|number| is_apart(&self.parts[number].view)) { Known::Apart } else { Known::Nothing }
    }

    /// A mark that this call made without hearing of it is its own.
    fn recognise(&mut self) {
        if !self.is_unsure || self.done[0].is_some() || self.is_complete() {
            return;
        }
        let (Some(mark), Some(tried)) = (self.parts[0].view.open.get(&self.draw.lease), &self.tried) else {
            return;
        };
        let at = mark.record.drawn_at();
        if mark.record.step() == 0 && self.sent.contains(&at) {
            self.at = self.at.or(Some(at));
            self.done[0] = Some(self.parts[0].view.meters.clone());
            // What the others are decided with is what was there before.
            self.parts[0] = tried.clone();
        }
    }

    /// Whether the lease has taken a step: then somebody was granted it.
    fn is_stepped(&self) -> bool {
        self.parts[0].view.open.get(&self.draw.lease).is_some_and(|mark| mark.record.step() > 0)
    }

    /// Whether an earlier call has left its mark above the lease's own level: what that took is not there for this one. What this
    /// call has left is taken back with the rest.
    fn is_in_its_own_way(&self) -> bool {
        let mark = |number: usize| self.parts[number].view.open.get(&self.draw.lease);
        let is_left_over = |number: usize| {
            let is_others = mark(number).is_some_and(|mark| !self.sent.contains(&mark.record.drawn_at()));
            self.done[number].is_none() && is_others
        };
        (1..self.parts.len()).any(is_left_over)
    }

    /// Whether a level is still to be written.
    fn is_left(&self, number: usize) -> bool {
        self.done[number].is_none() && !self.parts[number].view.open.contains_key(&self.draw.lease)
    }

    /// Whether every level that is not written was seen during this call.
    fn is_fresh(&self) -> bool {
        self.parts.iter().zip(&self.done).all(|(part, done)| part.is_fresh || done.is_some())
    }

    fn is_complete(&self) -> bool {
        (0..self.parts.len()).all(|number| !self.is_left(number))
    }

    fn decide(&self, now: Stamp) -> Decided<Drawn> {
        let views: Vec<&View> = self.parts.iter().map(|part| &*part.view).collect();
        let Self { draw, kind, .. } = self;
        decide(&views, &draw.levels, Slip::unknown(draw.lease), now, |desk| match kind {
            Kind::Lease => desk.draw(draw),
            Kind::Spend => desk.spend(draw),
        })
    }

    fn end_mark(&self, number: usize, now: Stamp) -> EndMark {
        let Draw { levels, units, .. } = self.draw;
        let ended = Ended { how: Ending::Settled, step: 0, at: now, digest: levels.digest(units) };
        let used = used_at(&levels.levels()[number], |name| units[name]);
        EndMark { ended, drawn_at: now, is_own: number == 0, used }
    }

    /// The answer where the lease has ended by now.
    fn ended(&self, ended: Ended, _: Stamp) -> Result<Drawn, StoreError> {
        let lease = self.draw.lease;
        let is_same = self.kind == Kind::Spend
            && ended.turn_settle(0, self.draw.levels.digest(&self.draw.units)) == Turn::Repeat;
        if !is_same {
            return Err(StoreError::Ended { lease, how: ended.how });
        }
        Ok(self.told(ended.at))
    }

    /// The answer where the lease is open by now: this very call may have drawn it.
    fn repeated(&self, now: Stamp) -> Result<Drawn, StoreError> {
        let lease: LeaseId = self.draw.lease;
        let home = &self.parts[0].view;
        let Some(mark) = home.open.get(&lease) else { return Err(StoreError::NoLease { lease }) };
        let slip = Slip::open(lease, mark.record.clone(), home.levels_of(mark)?);
        if self.kind == Kind::Lease && self.is_unsure && mark.record.step() == 0 {
            return Ok(self.told(mark.record.drawn_at()));
        }
        let views: Vec<&View> = self.parts.iter().map(|part| &*part.view).collect();
        let decided = decide(&views, &self.draw.levels, slip, now, |desk| match self.kind {
            Kind::Lease => desk.draw(self.draw),
            Kind::Spend => desk.spend(self.draw),
        });
        decided.answer
    }

    /// A grant of `at`, which this call made if it was not sure of it, and another one before it if it was.
    fn told(&self, at: Stamp) -> Drawn {
        if !self.is_unsure {
            return Drawn::Granted(Moved { at, is_repeat: true, readings: Readings::new() });
        }
        let Draw { levels, units, .. } = self.draw;
        let mut readings = Readings::new();
        for (number, (level, part)) in levels.levels().iter().zip(&self.parts).enumerate() {
            for line in &level.limits {
                let meter = part.view.meters.get(line.rule.row());
                if let (Some(units), Some(meter)) = (units[line.name], meter) {
                    let moved = 0_i64.saturating_add_unsigned(units);
                    readings.push(crate::buckets::Reading::new(number, line, moved, meter));
                }
            }
        }
        Drawn::Granted(Moved { at, is_repeat: false, readings })
    }
}
