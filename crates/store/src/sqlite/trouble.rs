//! What can go wrong with a file, in the words of a store.

use rusqlite::ErrorCode;

use crate::error::StoreError;

/// Why something in a transaction did not work.
#[derive(Debug)]
pub(super) enum Trouble {
    /// The call has its answer, and the transaction goes on.
    Answer(StoreError),
    /// The transaction cannot go on.
    Engine(rusqlite::Error),
}

impl From<rusqlite::Error> for Trouble {
    fn from(error: rusqlite::Error) -> Self {
        if error.sqlite_error_code().is_some() {
            return Self::Engine(error);
        }
        // A column, or a row, is not as we write it: whoever asked for it is told so, and nobody else.
        Self::Answer(StoreError::Corrupt { what: error.to_string() })
    }
}

impl From<StoreError> for Trouble {
    fn from(error: StoreError) -> Self {
        Self::Answer(error)
    }
}

impl Trouble {
    pub(super) fn into_error(self, place: &str) -> StoreError {
        match self {
            Self::Answer(error) => error,
            Self::Engine(error) => of_file(place, &error),
        }
    }
}

/// What is wrong with a file, to be told to all who wait for it.
#[derive(Debug, Clone)]
pub(super) enum Fault {
    Away(String),
    Denied(String),
    Corrupt(String),
    Invalid(String),
}

impl Fault {
    /// What SQLite said about the file at `place`.
    pub(super) fn of(place: &str, error: &rusqlite::Error) -> Self {
        let Some(code) = error.sqlite_error_code() else {
            // A column is not of the type that we write.
            return Self::Corrupt(format!("`{place}`: {error}"));
        };
        match code {
            ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase => {
                Self::Corrupt(format!("`{place}` is damaged, or no database: {error}"))
            }
            ErrorCode::ConstraintViolation | ErrorCode::TypeMismatch => {
                Self::Corrupt(format!("`{place}` contradicts itself: {error}"))
            }
            // A table or a column is not there.
            ErrorCode::Unknown => Self::Corrupt(format!("`{place}` is not as it was made: {error}")),
            ErrorCode::ReadOnly
            | ErrorCode::PermissionDenied
            | ErrorCode::AuthorizationForStatementDenied => {
                Self::Denied(format!("`{place}` cannot be written: {error}"))
            }
            ErrorCode::CannotOpen => Self::Denied(format!("`{place}` cannot be opened: {error}")),
            ErrorCode::DiskFull => Self::Away(format!("there is no room for `{place}` to grow: {error}")),
            ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked => {
                Self::Away(format!("`{place}` is held by another process: {error}"))
            }
            _ => Self::Away(format!("`{place}` could not be read or written: {error}")),
        }
    }

    pub(super) fn error(&self) -> StoreError {
        match self.clone() {
            Self::Away(what) => StoreError::unavailable(what),
            Self::Denied(what) => StoreError::Denied { what },
            Self::Corrupt(what) => StoreError::Corrupt { what },
            Self::Invalid(what) => StoreError::Invalid { what },
        }
    }
}

/// What SQLite said about the file at `place`.
pub(super) fn of_file(place: &str, error: &rusqlite::Error) -> StoreError {
    Fault::of(place, error).error()
}

/// Whether somebody else holds the file for now.
pub(super) fn is_busy(error: &rusqlite::Error) -> bool {
    matches!(error.sqlite_error_code(), Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked))
}
