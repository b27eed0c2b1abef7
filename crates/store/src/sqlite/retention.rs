//! What is too old to be kept, forgotten little by little.

use std::time::Duration;

use tidegate_core::limit::usage::Window;
use tidegate_core::time::Stamp;

use super::trouble::{Trouble, column};
use super::work::Work;
use crate::ledger::Prune;

/// Lines of a kind that are forgotten at a time: whoever waits for the transaction does not notice.
const LINES_MAX: i64 = 500;
const DAY: Duration = Duration::from_hours(24);

/// How long what was used, and who changed what, is kept. What is `None` is kept for ever.
///
/// What is too old is forgotten by whoever writes next, a few hundred lines a second, and by
/// [`sweep`](crate::Store::sweep).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retention {
    /// Usage by the hour; 62 days.
    pub hours: Option<Duration>,
    /// Usage by the day; 800 days.
    pub days: Option<Duration>,
    /// Usage by the month; for ever.
    pub months: Option<Duration>,
    /// The audit; for ever. To keep it elsewhere, archive it.
    pub audit: Option<Duration>,
}

impl Default for Retention {
    fn default() -> Self {
        Self { hours: Some(62 * DAY), days: Some(800 * DAY), months: None, audit: None }
    }
}

/// Forgets some of what is too old, in every namespace.
pub(super) fn apply(work: &Work<'_>) -> rusqlite::Result<()> {
    let Retention { hours, days, months, audit } = work.retention;
    for (window, kept) in Window::ALL.into_iter().zip([hours, days, months]) {
        if let Some(before) = before(work.now, kept) {
            let mut delete = work.connection.prepare_cached(
                "DELETE FROM usage WHERE (subject, name, span, start) IN
                     (SELECT subject, name, span, start FROM usage INDEXED BY usage_by_age
                      WHERE span = ?1 AND start < ?2 ORDER BY start LIMIT ?3)",
            )?;
            delete.execute((window as i64, ended_by(window, before), LINES_MAX))?;
        }
    }
    if let Some(before) = before(work.now, audit) {
        let mut delete = work.connection.prepare_cached(
            "DELETE FROM audit WHERE (namespace, number) IN
                 (SELECT namespace, number FROM audit INDEXED BY audit_by_age
                  WHERE at < ?1 ORDER BY at LIMIT ?2)",
        )?;
        delete.execute((column(before.as_micros()), LINES_MAX))?;
    }
    Ok(())
}

/// Forgets up to `max` of the oldest lines of a namespace.
pub(super) fn prune(
    work: &mut Work<'_>,
    (namespace, prune, max): &(i64, Prune, usize),
) -> Result<u64, Trouble> {
    // What those before it in the same transaction have settled is there to be forgotten too, and so is what has expired.
    let (connection, now) = (work.connection, work.now);
    work.untidied(*namespace)?.sweep(connection, now, usize::MAX)?;
    work.write()?;
    let (connection, max) = (work.connection, column(*max as u64));
    let forgotten = match prune {
        Prune::Usage { window, before } => {
            let mut delete = connection.prepare_cached(
                "DELETE FROM usage WHERE (subject, name, span, start) IN
                     (SELECT subject, name, span, start FROM usage JOIN subjects ON id = subject
                      WHERE namespace = ?1 AND span = ?2 AND start < ?3 ORDER BY start LIMIT ?4)",
            )?;
            delete.execute((namespace, *window as i64, ended_by(*window, *before), max))?
        }
        Prune::Audit { through } => {
            let mut delete = connection.prepare_cached(
                "DELETE FROM audit WHERE namespace = ?1 AND number IN
                     (SELECT number FROM audit WHERE namespace = ?1 AND version <= ?2 ORDER BY number LIMIT ?3)",
            )?;
            delete.execute((namespace, column(through.number()), max))?
        }
    };
    Ok(forgotten as u64)
}

/// Windows that begin before this have ended by `before`.
fn ended_by(window: Window, before: Stamp) -> i64 {
    column(window.around(before).start.as_micros())
}

fn before(now: Stamp, kept: Option<Duration>) -> Option<Stamp> {
    let kept = u64::try_from(kept?.as_micros()).ok()?;
    now.as_micros().checked_sub(kept).map(Stamp::from_micros)
}
