//! Deletes usage and audit past their retention, in small steps.

use super::errors::CallError;
use super::transaction::Transaction;
use crate::ledger::Prune;
use crate::tables::{column, ended_by};

/// The rows of a kind that a transaction deletes without its callers noticing; four times its number of calls
/// if that is more.
const LINES_MAX: usize = 500;

/// Deletes some old rows in every namespace. If there may be more, the next transaction continues.
pub(super) fn apply(transaction: &mut Transaction<'_>) -> rusqlite::Result<()> {
    let max = LINES_MAX.max(4 * transaction.calls);
    transaction.is_behind = false;
    for (window, before) in transaction.retention.usage_before(transaction.now - transaction.anchor.offset())
    {
        let mut delete = transaction.connection.prepare_cached(
            "DELETE FROM usage WHERE (subject, name, span, start) IN
                 (SELECT subject, name, span, start FROM usage INDEXED BY usage_by_age
                  WHERE span = ?1 AND start < ?2 ORDER BY start LIMIT ?3)",
        )?;
        let lines = delete.execute((window as i64, ended_by(window, before), column(max as u64)))?;
        transaction.is_behind |= lines >= max;
    }
    if let Some(before) = transaction.retention.audit_before(transaction.now) {
        let mut delete = transaction.connection.prepare_cached(
            "DELETE FROM records WHERE (namespace, kind, first, second) IN
                 (SELECT namespace, kind, first, second FROM records INDEXED BY records_by_age
                  WHERE at < ?1 ORDER BY at LIMIT ?2)",
        )?;
        let lines = delete.execute((column(before.as_micros()), column(max as u64)))?;
        transaction.is_behind |= lines >= max;
    }
    Ok(())
}

/// Deletes up to `max` of the oldest lines of a namespace.
pub(super) fn prune(
    transaction: &mut Transaction<'_>,
    (namespace, prune, max): &(i64, Prune, usize),
) -> Result<u64, CallError> {
    // Includes what earlier calls of the transaction have settled, and leases past their deadline.
    let (connection, now) = (transaction.connection, transaction.now);
    transaction.namespace_as_is(*namespace)?.sweep_unreported(connection, now, usize::MAX)?;
    transaction.write()?;
    let (connection, max) = (transaction.connection, column(*max as u64));
    let pruned = match prune {
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
    Ok(pruned as u64)
}
