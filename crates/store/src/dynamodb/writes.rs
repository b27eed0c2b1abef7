//! The writes of a step: the home item with the lease's mark, the items of other levels, and a check of its tombstone.

use tidegate_core::limit::cascade::Level;
use tidegate_core::limit::lease::{Ended, Ending, REMEMBERED, Record};
use tidegate_core::time::Stamp;

use super::DynamoDb;
use super::decide::Decided;
use super::expression::Write;
use super::forms::{self, Decision};
use super::link::Action;
use super::marks::{EndMark, OpenMark, end_name, open_name, used_at};
use super::parts::{Parts, write_of};
use super::step::{ENDED_MAX, Known, OPEN_MAX, Step};
use super::view::{ENDS, HORIZON, OPENS, View};

impl DynamoDb {
    /// The writes of a step, and the level of each. A step that is refused writes newer rules only.
    pub(super) fn writes<T>(
        &self,
        step: &Step<'_>,
        parts: &Parts,
        decided: &Decided<T>,
        known: &Known,
        now: Stamp,
    ) -> (Vec<Action>, Vec<Option<usize>>) {
        let is_changed = decided.is_changed();
        let is_expired = decided.end().is_some_and(|ended| ended.how == Ending::Expired);
        let asked = step.asked().filter(|_| is_changed && !is_expired);
        let until = decided.record().map_or(now + REMEMBERED, Record::deadline);
        let (mut actions, mut numbers) = (Vec::new(), Vec::new());
        // A lease is moved by the rules that it drew by.
        let levels = match known {
            Known::Open(_, levels) => levels.levels(),
            Known::Ended(_) | Known::Unknown => step.levels.levels(),
        };
        for (number, (level, seen)) in levels.iter().zip(parts.views()).enumerate() {
            let after = &decided.meters[number];
            let exact = if is_expired { Vec::new() } else { exact_rows(step, known, number) };
            let is_asked =
                asked.is_some_and(|units| level.limits.iter().any(|line| units[line.name].is_some()));
            let is_moved = seen.meters != *after && (is_changed || seen.is_there());
            let is_renewed =
                is_changed && decided.record().is_some() && forms::is_too_short(seen, level, (now, until));
            let is_marked = is_changed && number == 0;
            if !(is_marked || is_moved || is_asked || is_renewed || !exact.is_empty()) {
                continue;
            }
            let (mut write, epoch) = (write_of(self, level), self.epoch());
            let asked = asked.map(|units| (level, units));
            let on = Decision {
                keys: &self.inner.keys,
                subject: &level.subject,
                now,
                asked,
                exact: &exact,
                epoch: &epoch,
            };
            forms::write_limits(&mut write, seen, after, &on);
            if is_marked {
                self.write_mark(&mut write, step, (seen, level), decided, (known, now));
            }
            let is_kept = seen.ttl.is_some() && decided.record().is_some();
            if is_changed && (step.is_draw() || is_kept || !seen.is_there()) {
                // The mark of a lease that never drew is all there is, and the item need not stay.
                let bare = Level { subject: level.subject.clone(), limits: Box::default() };
                let level = if after.is_empty() { &bare } else { level };
                forms::live(&mut write, seen, level, (now, until));
            }
            actions.push(Action::Update(write));
            numbers.push(Some(number));
        }
        if is_changed && matches!(known, Known::Unknown) && parts.home().is_late(step.lease) {
            actions.push(self.unburied(step.lease, now));
            numbers.push(None);
        }
        (actions, numbers)
    }

    /// Writes the mark of a lease to its home.
    fn write_mark<T>(
        &self,
        write: &mut Write,
        step: &Step<'_>,
        (seen, level): (&View, &Level),
        decided: &Decided<T>,
        (known, now): (&Known, Stamp),
    ) {
        let (open, end) = (open_name(step.lease), end_name(step.lease));
        let due = (&self.inner.keys, &level.subject);
        if let Known::Open(mark, _) = known {
            write.only_if(&open, "=", mark.to_string());
        } else if seen.is_there() {
            write.only_without(&open);
            write.only_without(&end);
            if !seen.is_late(step.lease) {
                write.only_unless_or(HORIZON, "<", step.lease.millis());
            }
            write.only_unless_or(ENDS, "<", ENDED_MAX as u64);
            if decided.record().is_some() {
                write.only_unless_or(OPENS, "<", OPEN_MAX as u64);
            }
        }
        if let Some(record) = decided.record() {
            let levels = if let Known::Open(mark, _) = known {
                mark.levels.clone()
            } else {
                let text = self.inner.cache.text(step.levels);
                write.set(&format!("l:{}", text.name), &*text.text);
                write.add(OPENS, 1_u64);
                forms::due_by(write, seen, record.deadline(), due);
                text.name.to_string()
            };
            write.set(&open, OpenMark { level: 0, record: record.clone(), levels }.to_string());
        } else if let Some(ended) = decided.end() {
            if matches!(known, Known::Open(..)) {
                write.remove(&open);
                write.add(OPENS, -1_i64);
            }
            write.set(&end, end_mark(step, known, ended, now).to_string());
            write.add(ENDS, 1_u64);
            forms::due_by(write, seen, now + REMEMBERED, due);
        }
    }
}

/// The mark of a lease that ends by a step, with what it used at every level.
fn end_mark(step: &Step<'_>, known: &Known, ended: Ended, now: Stamp) -> EndMark {
    let (record, levels) = match known {
        Known::Open(mark, levels) => (Some(&mark.record), levels),
        Known::Ended(_) | Known::Unknown => (None, step.levels),
    };
    let used = |level: &Level| used_at(level, |name| step.used(record, ended.how, name));
    let others = levels.levels()[1..].iter().map(|level| (level.subject.clone(), used(level)));
    EndMark {
        ended,
        drawn_at: record.map_or(now, Record::drawn_at),
        is_own: true,
        used: used(&levels.levels()[0]),
        others: others.filter(|(_, used)| !used.is_empty()).collect(),
    }
}

/// The rows of a level whose debt is bounded and that may owe more after the step: what they take depends on what they owe.
fn exact_rows<'a>(step: &Step<'_>, known: &'a Known, number: usize) -> Vec<&'a str> {
    let Known::Open(OpenMark { record, .. }, levels) = known else { return Vec::new() };
    let lines = levels.levels().get(number).map_or(&[][..], |level| &level.limits);
    let bounded = lines.iter().filter(|line| line.debt_max.is_some() && step.may_owe(record, line.name));
    bounded.map(|line| line.rule.row()).collect()
}
