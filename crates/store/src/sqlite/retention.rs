//! What is too old to be kept, forgotten little by little.

use super::trouble::Trouble;
use super::work::Work;
use crate::ledger::Prune;
use crate::tables::{column, ended_by};

/// Lines of a kind that a transaction forgets: its callers do not notice. Four times as many as it has calls, where that is more.
const LINES_MAX: usize = 500;

/// Forgets some of what is too old, in every namespace. If there may be more, the next transaction goes on.
pub(super) fn apply(work: &mut Work<'_>) -> rusqlite::Result<()> {
    let max = LINES_MAX.max(4 * work.calls);
    work.is_behind = false;
    for (window, before) in work.retention.usage_before(work.now - work.anchor.offset()) {
        let mut delete = work.connection.prepare_cached(
            "DELETE FROM usage WHERE (subject, name, span, start) IN
                 (SELECT subject, name, span, start FROM usage INDEXED BY usage_by_age
                  WHERE span = ?1 AND start < ?2 ORDER BY start LIMIT ?3)",
        )?;
        let lines = delete.execute((window as i64, ended_by(window, before), column(max as u64)))?;
        work.is_behind |= lines >= max;
    }
    if let Some(before) = work.retention.audit_before(work.now) {
        let mut delete = work.connection.prepare_cached(
            "DELETE FROM records WHERE (namespace, kind, first, second) IN
                 (SELECT namespace, kind, first, second FROM records INDEXED BY records_by_age
                  WHERE at < ?1 ORDER BY at LIMIT ?2)",
        )?;
        let lines = delete.execute((column(before.as_micros()), column(max as u64)))?;
        work.is_behind |= lines >= max;
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
    work.untidied(*namespace)?.sweep_in_passing(connection, now, usize::MAX)?;
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
                "DELETE FROM records WHERE namespace = ?1 AND kind = 6 AND first IN
                     (SELECT first FROM records WHERE namespace = ?1 AND kind = 6 AND version <= ?2
                      ORDER BY first LIMIT ?3)",
            )?;
            delete.execute((namespace, column(through.number()), max))?
        }
    };
    Ok(forgotten as u64)
}
