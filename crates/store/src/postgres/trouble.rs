//! What can go wrong with a server, in the words of a store: away, or an answer.
//!
//! A server that cannot be reached, is starting, stopping, full or slow is away, and the same call may succeed later. One that
//! does not let us in, or has no such database, is an answer: to wait for it helps nobody.

use std::error::Error as _;

use deadpool_postgres::{PoolError, TimeoutType};
use tokio_postgres::Row;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::FromSql;

use crate::error::StoreError;

/// What a pool said that gave no connection.
pub(super) fn of_pool(place: &str, error: PoolError) -> StoreError {
    match error {
        PoolError::Timeout(TimeoutType::Wait) => {
            StoreError::unavailable(format!("all connections to {place} are in use"))
        }
        PoolError::Timeout(_) => StoreError::unavailable(format!("{place} gave no connection in time")),
        PoolError::Closed => StoreError::Closed { what: format!("the connections to {place} were closed") },
        PoolError::Backend(error) => of_server(place, error),
        other => StoreError::unavailable(format!("{place}: {other}")),
    }
}

/// What the server, or the way to it, said.
pub(super) fn of_server(place: &str, error: tokio_postgres::Error) -> StoreError {
    // The driver says what it did, and what came of it is in the source.
    let said = error.source().map_or_else(|| error.to_string(), |source| format!("{error}: {source}"));
    let Some(code) = error.code() else { return of_connection(place, &said, error) };
    let what = format!("{place}: {said}");
    match Kind::of(code) {
        Kind::Away => StoreError::Unavailable { what, source: Some(Box::new(error)) },
        Kind::Denied => StoreError::Denied { what },
        Kind::Invalid => StoreError::Invalid { what },
        Kind::Corrupt => StoreError::Corrupt { what },
    }
}

/// The driver itself says so: there is no answer of the server.
fn of_connection(place: &str, said: &str, error: tokio_postgres::Error) -> StoreError {
    let what = format!("{place}: {said}");
    // It keeps its kinds to itself, and tells them by these words.
    if ["error performing TLS handshake", "authentication error"].iter().any(|word| said.starts_with(word)) {
        return StoreError::Denied { what };
    }
    if said.starts_with("invalid configuration") || said.starts_with("invalid connection string") {
        return StoreError::Invalid { what };
    }
    if ["error serializing", "error deserializing", "error retrieving", "query returned"]
        .iter()
        .any(|word| said.starts_with(word))
    {
        return StoreError::Corrupt { what };
    }
    StoreError::Unavailable { what, source: Some(Box::new(error)) }
}

/// A column of a row, which may not be as we write it.
pub(super) fn get<'a, T: FromSql<'a>>(row: &'a Row, place: usize) -> Result<T, StoreError> {
    row.try_get(place).map_err(|error| StoreError::Corrupt { what: error.to_string() })
}

/// The number that the first row begins with; zero where there is none.
pub(super) fn first(rows: &[Row]) -> Result<i64, StoreError> {
    rows.first().map_or(Ok(0), |row| get(row, 0))
}

/// Whether the connection is of no more use: what was asked may have been done or not.
pub(super) fn is_cut(error: &tokio_postgres::Error) -> bool {
    let is_ended =
        [SqlState::ADMIN_SHUTDOWN, SqlState::CRASH_SHUTDOWN].iter().any(|code| error.code() == Some(code));
    is_ended
        || error.is_closed()
        || (error.code().is_none()
            && error.source().is_some_and(<dyn std::error::Error>::is::<std::io::Error>))
}

/// Whether others were in the way, so that nothing was done and the same may be asked again at once.
pub(super) fn is_crossed(error: &tokio_postgres::Error) -> bool {
    [SqlState::T_R_SERIALIZATION_FAILURE, SqlState::T_R_DEADLOCK_DETECTED, SqlState::UNIQUE_VIOLATION]
        .iter()
        .any(|code| error.code() == Some(code))
}

/// Whether something that is kept, or was asked for, is not as it can be worked with: nothing was done.
pub(super) fn is_of_data(error: &tokio_postgres::Error) -> bool {
    error.code().is_some_and(|code| ["22", "XX"].iter().any(|class| code.code().starts_with(class)))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Away,
    Denied,
    Invalid,
    Corrupt,
}

impl Kind {
    fn of(code: &SqlState) -> Self {
        // By class, as the server's manual lists them: connections, rollbacks, resources, operators, the system itself.
        match (code.code().get(..2).unwrap_or_default(), code.code()) {
            (_, "42501") | ("28", _) => Self::Denied,
            // There is no such database.
            (_, "3D000") => Self::Invalid,
            // A standby: whoever was the primary is failing over.
            (_, "25006") | ("08" | "40" | "53" | "55" | "57" | "58", _) => Self::Away,
            _ => Self::Corrupt,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_helps_nobody_to_wait_for_is_an_answer() {
        let table = [
            ("08006", Kind::Away),
            ("57P01", Kind::Away),
            ("57P03", Kind::Away),
            ("57014", Kind::Away),
            ("53300", Kind::Away),
            ("40P01", Kind::Away),
            ("55P03", Kind::Away),
            ("25006", Kind::Away),
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
