//! Maps errors of PostgreSQL and of the pool to [`StoreError`].
//!
//! A server that is unreachable, starting, stopping, full or slow is unavailable, and the call may succeed
//! later. Denied access and a missing database are permanent errors.

use std::error::Error as _;

use deadpool_postgres::{PoolError, TimeoutType};
use tokio_postgres::Row;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::FromSql;

use crate::error::StoreError;

/// The error of a pool that has no connection.
pub(super) fn pool_error(place: &str, error: PoolError) -> StoreError {
    match error {
        PoolError::Timeout(TimeoutType::Wait) => {
            StoreError::unavailable(format!("all connections to {place} are in use"))
        }
        PoolError::Timeout(_) => StoreError::unavailable(format!("connecting to {place} timed out")),
        PoolError::Closed => StoreError::Closed { what: format!("the connections to {place} were closed") },
        PoolError::Backend(error) => server_error(place, error),
        other => StoreError::unavailable(format!("{place}: {other}")),
    }
}

/// The error of a statement or a connection attempt.
pub(super) fn server_error(place: &str, error: tokio_postgres::Error) -> StoreError {
    // The driver names its action; the cause is in the source.
    let message = error.source().map_or_else(|| error.to_string(), |source| format!("{error}: {source}"));
    let Some(code) = error.code() else { return connection_error(place, &message, error) };
    let what = format!("{place}: {message}");
    match Kind::of(code) {
        Kind::Unavailable => StoreError::Unavailable { what, source: Some(Box::new(error)) },
        Kind::Denied => StoreError::Denied { what },
        Kind::Invalid => StoreError::Invalid { what },
        Kind::Corrupt => StoreError::Corrupt { what },
    }
}

/// An error of the driver, without a reply of the server.
fn connection_error(place: &str, message: &str, error: tokio_postgres::Error) -> StoreError {
    let what = format!("{place}: {message}");
    // Its kinds are private, so they are recognized by their texts.
    if ["error performing TLS handshake", "authentication error"].iter().any(|word| message.starts_with(word))
    {
        return StoreError::Denied { what };
    }
    if message.starts_with("invalid configuration") || message.starts_with("invalid connection string") {
        return StoreError::Invalid { what };
    }
    if ["error serializing", "error deserializing", "error retrieving", "query returned"]
        .iter()
        .any(|word| message.starts_with(word))
    {
        return StoreError::Corrupt { what };
    }
    StoreError::Unavailable { what, source: Some(Box::new(error)) }
}

/// Reads a column of a row.
pub(super) fn get<'a, T: FromSql<'a>>(row: &'a Row, place: usize) -> Result<T, StoreError> {
    row.try_get(place).map_err(|error| StoreError::Corrupt { what: error.to_string() })
}

/// The first column of the first row; zero without a row.
pub(super) fn first(rows: &[Row]) -> Result<i64, StoreError> {
    rows.first().map_or(Ok(0), |row| get(row, 0))
}

/// Whether the connection was lost. The statement may have run or not.
pub(super) fn is_disconnected(error: &tokio_postgres::Error) -> bool {
    let is_ended =
        [SqlState::ADMIN_SHUTDOWN, SqlState::CRASH_SHUTDOWN].iter().any(|code| error.code() == Some(code));
    is_ended
        || error.is_closed()
        || (error.code().is_none()
            && error.source().is_some_and(<dyn std::error::Error>::is::<std::io::Error>))
}

/// Whether a concurrent transaction was the cause: nothing was done, and an immediate retry may succeed.
pub(super) fn is_conflict(error: &tokio_postgres::Error) -> bool {
    [SqlState::T_R_SERIALIZATION_FAILURE, SqlState::T_R_DEADLOCK_DETECTED, SqlState::UNIQUE_VIOLATION]
        .iter()
        .any(|code| error.code() == Some(code))
}

/// Whether stored data or a parameter was the cause: nothing was done.
pub(super) fn is_data_error(error: &tokio_postgres::Error) -> bool {
    error.code().is_some_and(|code| ["22", "XX"].iter().any(|class| code.code().starts_with(class)))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Unavailable,
    Denied,
    Invalid,
    Corrupt,
}

impl Kind {
    fn of(code: &SqlState) -> Self {
        // By SQLSTATE class: connections, rollbacks, resources, operators, the system.
        match (code.code().get(..2).unwrap_or_default(), code.code()) {
            (_, "42501") | ("28", _) => Self::Denied,
            // The database does not exist.
            (_, "3D000") => Self::Invalid,
            // A standby, probably during a failover.
            (_, "25006") | ("08" | "40" | "53" | "55" | "57" | "58", _) => Self::Unavailable,
            _ => Self::Corrupt,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_transient_states_are_unavailable() {
        let table = [
            ("08006", Kind::Unavailable),
            ("57P01", Kind::Unavailable),
            ("57P03", Kind::Unavailable),
            ("57014", Kind::Unavailable),
            ("53300", Kind::Unavailable),
            ("40P01", Kind::Unavailable),
            ("55P03", Kind::Unavailable),
            ("25006", Kind::Unavailable),
            ("28P01", Kind::Denied),
            ("28000", Kind::Denied),
            ("42501", Kind::Denied),
            ("3D000", Kind::Invalid),
            ("42P01", Kind::Corrupt),
            ("XX001", Kind::Corrupt),
        ];
        for (code, kind) in table {
            assert_eq!(Kind::of(&SqlState::from_code(code)), kind, "{code}");
        }
    }
}
