//! The writes of a step: the home item with the lease's mark, the items of other levels, and a check of its
//! tombstone.

use tidegate_core::limit::cascade::Level;
use tidegate_core::limit::lease::{EndRecord, Ending, REMEMBERED, Record};
use tidegate_core::time::Stamp;

use super::DynamoDb;
use super::bucket_update::{self, UpdateContext};
use super::bucket_view::{BucketView, ENDS, HORIZON, OPENS};
use super::client::Action;
use super::decide::Decision;
use super::expression::UpdateExpression;
use super::lease_marks::{EndMark, OpenMark, end_name, open_name, used_at};
use super::snapshot::{Snapshot, write_of};
use super::step::{ENDED_MAX, OPEN_MAX, PriorLease, Step};

impl DynamoDb {
    /// The writes of a step, and the level of each. A step that is refused writes newer rules only.
    pub(super) fn writes<T>(
        &self,
        step: &Step<'_>,
        snapshot: &Snapshot,
        decision: &Decision<T>,
        known: &PriorLease,
        now: Stamp,
    ) -> (Vec<Action>, Vec<Option<usize>>) {
        let is_changed = decision.is_changed();
        let is_expired = decision.end().is_some_and(|ended| ended.how == Ending::Expired);
        let requested = step.requested().filter(|_| is_changed && !is_expired);
        let until = decision.record().map_or(now + REMEMBERED, Record::deadline);
        let (mut actions, mut numbers) = (Vec::new(), Vec::new());
        // A lease is changed by the rules that it drew by.
        let levels = match known {
            PriorLease::Open(_, levels) => levels.levels(),
            PriorLease::Ended(_) | PriorLease::Unknown => step.levels.levels(),
        };
        for (number, (level, seen)) in levels.iter().zip(snapshot.views()).enumerate() {
            let after = &decision.meters[number];
            let exact = if is_expired { Vec::new() } else { exact_rows(step, known, number) };
            let is_asked =
                requested.is_some_and(|units| level.limits.iter().any(|line| units[line.name].is_some()));
            let is_moved = seen.meters != *after && (is_changed || seen.exists());
            let is_renewed = is_changed
                && decision.record().is_some()
                && bucket_update::is_too_short(seen, level, (now, until));
            let is_marked = is_changed && number == 0;
            if !(is_marked || is_moved || is_asked || is_renewed || !exact.is_empty()) {
                continue;
            }
            let (mut write, epoch) = (write_of(self, level), self.epoch());
            let requested = requested.map(|units| (level, units));
            let on = UpdateContext {
                keys: &self.inner.keys,
                subject: &level.subject,
                now,
                requested,
                exact: &exact,
                epoch: &epoch,
            };
            bucket_update::write_limits(&mut write, seen, after, &on);
            if is_marked {
                self.write_mark(&mut write, step, (seen, level), decision, (known, now));
            }
            let is_kept = seen.ttl.is_some() && decision.record().is_some();
            if is_changed && (step.is_draw() || is_kept || !seen.exists()) {
                // Only the mark of a lease that never drew is in the item, so the item need not stay.
                let bare = Level { subject: level.subject.clone(), limits: Box::default() };
                let level = if after.is_empty() { &bare } else { level };
                bucket_update::extend_lifetime(&mut write, seen, level, (now, until));
            }
            actions.push(Action::Update(write));
            numbers.push(Some(number));
        }
        if is_changed && matches!(known, PriorLease::Unknown) && snapshot.home().is_late(step.lease) {
            actions.push(self.no_tombstone_check(step.lease, now));
            numbers.push(None);
        }
        (actions, numbers)
    }

    /// Writes the mark of a lease to its home.
    fn write_mark<T>(
        &self,
        write: &mut UpdateExpression,
        step: &Step<'_>,
        (seen, level): (&BucketView, &Level),
        decision: &Decision<T>,
        (known, now): (&PriorLease, Stamp),
    ) {
        let (open, end) = (open_name(step.lease), end_name(step.lease));
        let due = (&self.inner.keys, &level.subject);
        if let PriorLease::Open(mark, _) = known {
            write.only_if(&open, "=", mark.to_string());
        } else if seen.exists() {
            write.only_without(&open);
            write.only_without(&end);
            if !seen.is_late(step.lease) {
                write.only_unless_or(HORIZON, "<", step.lease.millis());
            }
            write.only_unless_or(ENDS, "<", ENDED_MAX as u64);
            if decision.record().is_some() {
                write.only_unless_or(OPENS, "<", OPEN_MAX as u64);
            }
        }
        if let Some(record) = decision.record() {
            let levels = if let PriorLease::Open(mark, _) = known {
                mark.levels.clone()
            } else {
                let text = self.inner.cache.text(step.levels);
                write.set(&format!("l:{}", text.name), &*text.text);
                write.add(OPENS, 1_u64);
                bucket_update::set_due_by(write, seen, record.deadline(), due);
                text.name.to_string()
            };
            write.set(&open, OpenMark { level: 0, record: record.clone(), levels }.to_string());
        } else if let Some(ended) = decision.end() {
            if matches!(known, PriorLease::Open(..)) {
                write.remove(&open);
                write.add(OPENS, -1_i64);
            }
            write.set(&end, end_mark(step, known, ended, now).to_string());
            write.add(ENDS, 1_u64);
            bucket_update::set_due_by(write, seen, now + REMEMBERED, due);
        }
    }
}

/// The mark of a lease that ends by a step, with what it used at every level.
fn end_mark(step: &Step<'_>, known: &PriorLease, ended: EndRecord, now: Stamp) -> EndMark {
    let (record, levels) = match known {
        PriorLease::Open(mark, levels) => (Some(&mark.record), levels),
        PriorLease::Ended(_) | PriorLease::Unknown => (None, step.levels),
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

/// The rows of a level whose debt is bounded and may grow by the step: how much they take depends on their
/// debt.
fn exact_rows<'a>(step: &Step<'_>, known: &'a PriorLease, number: usize) -> Vec<&'a str> {
    let PriorLease::Open(OpenMark { record, .. }, levels) = known else { return Vec::new() };
    let lines = levels.levels().get(number).map_or(&[][..], |level| &level.limits);
    let bounded = lines.iter().filter(|line| line.debt_max.is_some() && step.may_owe(record, line.name));
    bounded.map(|line| line.rule.row()).collect()
}
