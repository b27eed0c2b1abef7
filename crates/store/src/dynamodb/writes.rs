//! The writes of a step: the home item with the lease's mark, the items of other levels, and a check of its
//! tombstone.

use tidegate_core::limit::cascade::Level;
use tidegate_core::limit::lease::{EndRecord, Ending, REMEMBERED, Record};
use tidegate_core::time::Stamp;

use super::DynamoDb;
use super::bucket_update::{self, UpdateContext};
use super::bucket_view::{BucketView, ENDS, HORIZON, OPENS};
use super::client::Action;
use super::expression::UpdateExpression;
use super::lease_marks::{EndMark, OpenMark, end_name, levels_text, open_name};
use super::snapshot::{Snapshot, write_of};
use super::step::{Decision, ENDED_MAX, OPEN_MAX, Step};
use crate::shared_engine::LeaseState;

impl DynamoDb {
    /// The writes of a step, and the level of each. A step that is refused writes newer rules only.
    pub(super) fn writes(
        &self,
        step: &Step<'_>,
        snapshot: &Snapshot,
        decision: &Decision,
        now: Stamp,
    ) -> (Vec<Action>, Vec<Option<usize>>) {
        let is_changed = decision.is_changed();
        let is_expired = decision.end().is_some_and(|ended| ended.how == Ending::Expired);
        let requested = step.requested().filter(|_| is_changed && !is_expired);
        let until = decision.record().map_or(now + REMEMBERED, Record::deadline);
        let (mut actions, mut numbers) = (Vec::new(), Vec::new());
        let levels = decision.levels(step).levels();
        for (number, (level, seen)) in levels.iter().zip(snapshot.views()).enumerate() {
            let after = &decision.meters[number];
            let exact = if is_expired { Vec::new() } else { exact_rows(step, &decision.before, number) };
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
            let (mut write, epoch) = (write_of(self, level), self.inner.epochs.next());
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
                self.write_mark(&mut write, step, (seen, level), decision, now);
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
        if is_changed && decision.before == LeaseState::Unknown && snapshot.home().is_late(step.of.lease) {
            actions.push(self.no_tombstone_check(step.of.lease, now));
            numbers.push(None);
        }
        (actions, numbers)
    }

    /// Writes the mark of a lease to its home.
    fn write_mark(
        &self,
        write: &mut UpdateExpression,
        step: &Step<'_>,
        (seen, level): (&BucketView, &Level),
        decision: &Decision,
        now: Stamp,
    ) {
        let (open, end) = (open_name(step.of.lease), end_name(step.of.lease));
        let due = (&self.inner.keys, &level.subject);
        let mark = seen.open.get(&step.of.lease);
        if let Some(mark) = mark {
            write.only_if(&open, "=", mark.to_string());
        } else if seen.exists() {
            write.only_without(&open);
            write.only_without(&end);
            if !seen.is_late(step.of.lease) {
                write.only_unless_or(HORIZON, "<", step.of.lease.millis());
            }
            write.only_unless_or(ENDS, "<", ENDED_MAX as u64);
            if decision.record().is_some() {
                write.only_unless_or(OPENS, "<", OPEN_MAX as u64);
            }
        }
        if let Some(record) = decision.record() {
            let levels = if let Some(mark) = mark {
                mark.levels.clone()
            } else {
                let (name, text) = levels_text(step.of.levels);
                write.set(&format!("l:{name}"), text);
                write.add(OPENS, 1_u64);
                bucket_update::set_due_by(write, seen, record.deadline(), due);
                name
            };
            write.set(&open, OpenMark { level: 0, record: record.clone(), levels }.to_string());
        } else if let Some(ended) = decision.end() {
            if mark.is_some() {
                write.remove(&open);
                write.add(OPENS, -1_i64);
            }
            write.set(&end, end_mark(step, decision, ended, now).to_string());
            write.add(ENDS, 1_u64);
            bucket_update::set_due_by(write, seen, now + REMEMBERED, due);
        }
    }
}

/// The mark of a lease that ends by a step, with what it used at every level.
fn end_mark(step: &Step<'_>, decision: &Decision, ended: EndRecord, now: Stamp) -> EndMark {
    let levels = decision.levels(step).levels();
    let others = levels[1..].iter().map(|level| (level.subject.clone(), decision.used(&level.subject)));
    EndMark {
        ended,
        drawn_at: decision.record_before().map_or(now, Record::drawn_at),
        is_own: true,
        used: decision.used(&levels[0].subject),
        others: others.filter(|(_, used)| !used.is_empty()).collect(),
    }
}

/// The rows of a level whose debt is bounded and may grow by the step: how much they take depends on their
/// debt.
fn exact_rows<'a>(step: &Step<'_>, before: &'a LeaseState, number: usize) -> Vec<&'a str> {
    let LeaseState::Open(record, levels) = before else { return Vec::new() };
    let lines = levels.levels().get(number).map_or(&[][..], |level| &level.limits);
    let bounded = lines.iter().filter(|line| line.debt_max.is_some() && step.may_owe(record, line.name));
    bounded.map(|line| line.rule.row()).collect()
}
