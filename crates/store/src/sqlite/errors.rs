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

/// An error of the file, which can be reported to several callers.
#[derive(Debug, Clone)]
pub(super) enum Fault {
    Unavailable(String),
    Denied(String),
    Corrupt(String),
    Invalid(String),
}

impl Fault {
    /// Classifies an error of SQLite about the file at `place`.
    pub(super) fn new(place: &str, error: &rusqlite::Error) -> Self {
        let Some(code) = error.sqlite_error_code() else {
            // A column has another type than we write.
            return Self::Corrupt(format!("`{place}`: {error}"));
        };
        match code {
            ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase => {
                Self::Corrupt(format!("`{place}` is damaged, or no database: {error}"))
            }
            ErrorCode::ConstraintViolation | ErrorCode::TypeMismatch => {
                Self::Corrupt(format!("`{place}` contradicts itself: {error}"))
            }
            // A table or a column is missing.
            ErrorCode::Unknown => Self::Corrupt(format!("`{place}` is not as it was made: {error}")),
            ErrorCode::ReadOnly
            | ErrorCode::PermissionDenied
            | ErrorCode::AuthorizationForStatementDenied => {
                Self::Denied(format!("`{place}` cannot be written: {error}"))
            }
            ErrorCode::CannotOpen => Self::Denied(format!("`{place}` cannot be opened: {error}")),
            ErrorCode::DiskFull => Self::Unavailable(format!("no space for `{place}` to grow: {error}")),
            ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked => {
                Self::Unavailable(format!("`{place}` is held by another process: {error}"))
            }
            _ => Self::Unavailable(format!("`{place}` could not be read or written: {error}")),
        }
    }

    pub(super) fn to_store_error(&self) -> StoreError {
        match self.clone() {
            Self::Unavailable(what) => StoreError::unavailable(what),
            Self::Denied(what) => StoreError::Denied { what },
            Self::Corrupt(what) => StoreError::Corrupt { what },
            Self::Invalid(what) => StoreError::Invalid { what },
        }
    }
}

/// Converts an error of SQLite about the file at `place`.
pub(super) fn file_error(place: &str, error: &rusqlite::Error) -> StoreError {
    Fault::new(place, error).to_store_error()
}

/// Whether another connection holds the lock of the file.
pub(super) fn is_busy(error: &rusqlite::Error) -> bool {
    matches!(error.sqlite_error_code(), Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked))
}
