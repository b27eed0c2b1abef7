//! Maps errors of SQLite to [`StoreError`], for a call or for a whole transaction.

use rusqlite::ErrorCode;

use crate::error::StoreError;

/// Why a call in a transaction failed.
#[derive(Debug)]
pub(super) enum CallError {
    /// The call fails alone, and the transaction continues.
    Reply(StoreError),
    /// The transaction fails.
    Transaction(rusqlite::Error),
}

impl From<rusqlite::Error> for CallError {
    fn from(error: rusqlite::Error) -> Self {
        if error.sqlite_error_code().is_some() {
            return Self::Transaction(error);
        }
        // Malformed data: only the call that reads it fails.
        Self::Reply(StoreError::Corrupt { what: error.to_string() })
    }
}

impl From<StoreError> for CallError {
    fn from(error: StoreError) -> Self {
        Self::Reply(error)
    }
}

impl CallError {
    pub(super) fn into_error(self, place: &str) -> StoreError {
        match self {
            Self::Reply(error) => error,
            Self::Transaction(error) => file_error(place, &error),
        }
    }
}

/// Converts an error of SQLite about the file at `place`.
pub(super) fn file_error(place: &str, error: &rusqlite::Error) -> StoreError {
    let corrupt = |what: String| StoreError::Corrupt { what };
    let Some(code) = error.sqlite_error_code() else {
        // A column has another type than we write.
        return corrupt(format!("`{place}`: {error}"));
    };
    match code {
        ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase => {
            corrupt(format!("`{place}` is damaged, or no database: {error}"))
        }
        ErrorCode::ConstraintViolation | ErrorCode::TypeMismatch => {
            corrupt(format!("`{place}` contradicts itself: {error}"))
        }
        // A table or a column is missing.
        ErrorCode::Unknown => corrupt(format!("`{place}` is not as it was made: {error}")),
        ErrorCode::ReadOnly | ErrorCode::PermissionDenied | ErrorCode::AuthorizationForStatementDenied => {
            StoreError::Denied { what: format!("`{place}` cannot be written: {error}") }
        }
        ErrorCode::CannotOpen => StoreError::Denied { what: format!("`{place}` cannot be opened: {error}") },
        ErrorCode::DiskFull => StoreError::unavailable(format!("no space for `{place}` to grow: {error}")),
        ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked => {
            StoreError::unavailable(format!("`{place}` is held by another process: {error}"))
        }
        _ => StoreError::unavailable(format!("`{place}` could not be read or written: {error}")),
    }
}

/// Whether another connection holds the lock of the file.
pub(super) fn is_busy(error: &rusqlite::Error) -> bool {
    matches!(error.sqlite_error_code(), Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked))
}
