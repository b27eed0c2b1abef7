//! Taking back what a draw took of one level while another one refused it.
//!
//! What is taken back was never granted to anybody, so that it must leave the bucket as if it had never been taken. While it
//! was taken the bucket refilled, and others drew: a bucket that would have been full meanwhile would have lost what it could
//! not hold. So where others were at work, what refilled in that time is not given back; what is lost by it is at most the
//! refill of a round trip, and nothing is ever invented. Where nobody was, all of it is given back.

use std::collections::BTreeMap;
use std::sync::Arc;

use tidegate_core::limit::cascade::Level;
use tidegate_core::limit::lease::{LeaseId, REMEMBERED};
use tidegate_core::limit::meter::Meter;
use tidegate_core::time::Stamp;

use super::DynamoDb;
use super::expression::Write;
use super::forms;
use super::marks::{OpenMark, open_name, undone_name};
use super::parts::write_of;
use super::trouble::{Failed, Unmet};
use super::view::{OPENS, RULES, View};
use crate::error::StoreError;

/// Takes back what a mark holds of a level that was left as `drawn` by it, if that is known.
pub(super) fn take_back(
    write: &mut Write,
    seen: &View,
    mark: &OpenMark,
    (level, drawn): (&Level, Option<&BTreeMap<String, Meter>>),
    now: Stamp,
) {
    let passed = now.as_micros().saturating_sub(mark.record.drawn_at().as_micros());
    let mut is_moved = false;
    for line in &level.limits {
        let row = line.rule.row();
        let held = mark.record.held().get(line.name).copied().flatten().filter(|units| *units > 0);
        let (Some(units), Some(meter)) = (held, seen.meters.get(row)) else { continue };
        is_moved = true;
        let shape = meter.rule().shape();
        let full_at = format!("f:{row}");
        let mut back = u128::from(units) * shape.period().as_micros();
        let was = drawn.and_then(|drawn| drawn.get(row)).map(forms::parts);
        if was == Some(forms::parts(meter)) {
            forms::only_as_seen(write, &full_at, meter);
        } else {
            back = back.saturating_sub(u128::from(passed) * u128::from(shape.amount()));
        }
        write.add(&full_at, -i128::try_from(back).unwrap_or(i128::MAX));
        write.add(&format!("c:{row}"), -i64::try_from(units).unwrap_or(i64::MAX));
    }
    if let Some(rules) = seen.rules.as_deref().filter(|_| is_moved) {
        write.only_if(RULES, "=", rules);
    }
}

/// Whose mark is taken back.
#[derive(Debug, Clone, Copy)]
pub(super) enum Whose<'a> {
    /// That of a draw that was sent at one of these times, as long as the lease has taken no step.
    Drawn(&'a [Stamp]),
    /// Anybody's.
    Anybody,
}

impl Whose<'_> {
    fn is_of(&self, mark: &OpenMark) -> bool {
        match self {
            Self::Drawn(times) => mark.record.step() == 0 && times.contains(&mark.record.drawn_at()),
            Self::Anybody => true,
        }
    }

    /// Whether it may still be written.
    const fn may_come(&self) -> bool {
        matches!(self, Self::Drawn(_))
    }
}

impl DynamoDb {
    /// Takes back what an open lease holds of one level. One that is not there holds nothing. Where a draw of it may still be
    /// under way, word is left that those up to an attempt come too late; otherwise none is, since it stays for a while.
    pub(super) async fn undo(
        &self,
        lease: LeaseId,
        (level, drawn): (&Level, Option<&BTreeMap<String, Meter>>),
        whose: Whose<'_>,
        late: impl Into<Option<u64>>,
    ) -> Result<(), StoreError> {
        let late: Option<u64> = late.into();
        // What was seen last may lack the mark, where others have seen it meanwhile: only what is there now tells so.
        let seen = self.inner.cache.view(&level.subject);
        let mut view = if let Some(view) = seen.filter(|view| view.open.contains_key(&lease)) {
            view
        } else {
            let item = self.inner.link.get(&self.inner.keys.bucket(&level.subject)).await?;
            Arc::new(View::read(item.as_ref())?)
        };
        let mut patience = self.inner.link.patience();
        loop {
            let is_told = |attempt: u64| view.undone.get(&lease).is_some_and(|told| *told >= attempt);
            let mut write = write_of(self, level);
            match view.open.get(&lease) {
                Some(mark) if !whose.is_of(mark) => break,
                Some(mark) => {
                    take_back(&mut write, &view, mark, (level, drawn), self.now());
                    write.only_if(&open_name(lease), "=", mark.to_string());
                    write.remove(&open_name(lease));
                    write.add(OPENS, -1_i64);
                }
                // It may still come. Where there is no item there is no place to say so.
                None if view.is_there()
                    && whose.may_come()
                    && late.is_some_and(|attempt| !is_told(attempt)) =>
                {
                    write.only_without(&open_name(lease));
                    let on = (&self.inner.keys, &level.subject);
                    forms::due_by(&mut write, &view, self.now() + REMEMBERED, on);
                }
                None => break,
            }
            forms::begin(&mut write, &view, "");
            if let Some(attempt) = late {
                write.set(&undone_name(lease), attempt);
            }
            match self.inner.link.update(&write).await {
                Ok(set) => {
                    let mut left = View::clone(&view);
                    left.open.remove(&lease);
                    left.absorb(&set)?;
                    view = Arc::new(left);
                    self.inner.cache.saw(&level.subject, &view);
                    self.inner.cache.gave(&level.subject);
                }
                Err(Failed::Condition(unmet)) => {
                    let item = unmet.into_iter().find_map(|unmet| match unmet {
                        Unmet::Yes(item) => item,
                        Unmet::No => None,
                    });
                    view = Arc::new(View::read(item.as_ref())?);
                    self.inner.cache.saw(&level.subject, &view);
                }
                Err(failed) => patience.bear(failed).await?,
            }
        }
        Ok(())
    }
}
