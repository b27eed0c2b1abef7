//! What the engine says went wrong, as what a caller can do about it.
//!
//! Away is what a later try may find gone: no connection, a timeout, a table that is asked more than it may be, an error of
//! the engine's own. Keys that are wrong, rights that are missing and a table that is not there are answers, and stay so.

use std::error::Error;
use std::fmt::Write as _;

use aws_sdk_dynamodb::error::{ProvideErrorMetadata, SdkError};

use super::keys::Item;
use crate::error::StoreError;

/// Why a write was not made, or may not have been.
#[derive(Debug)]
pub(super) enum Failed {
    /// What must hold does not, for at least one item. Of each that was written: what is there, if this was one of them.
    Condition(Vec<Unmet>),
    /// Another transaction was at work on one of the items: nothing was done.
    Conflict,
    /// The engine is away. What was asked may have been done, unless it `is_undone`.
    Unavailable { error: StoreError, is_undone: bool },
    /// Anything else.
    Answer(StoreError),
}

/// Of an item that was to be written.
#[derive(Debug)]
pub(super) enum Unmet {
    /// It would have been.
    No,
    /// What must hold for it does not. What is there, if anything is.
    Yes(Option<Item>),
}

/// Which table a trouble is about.
#[derive(Debug, Clone)]
pub(super) struct Whose {
    pub(super) place: String,
}

/// What is said of a table that is not there.
const MISSING: &str = "the table is not there, or not yet: make it with `tidegate store init`";

/// What kind of trouble a code of the engine is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// It was not done.
    Throttled,
    /// It may have been done.
    Broken,
    Conflict,
    Denied,
    Missing,
    Invalid,
}

impl Whose {
    /// The trouble of a call.
    pub(super) fn failed<E, R>(&self, error: SdkError<E, R>) -> Failed
    where
        E: ProvideErrorMetadata + Error + Send + Sync + 'static,
        R: std::fmt::Debug + Send + Sync + 'static,
    {
        let told = told(&error);
        let what = format!("`{}`: {told}", self.place);
        match &error {
            SdkError::ServiceError(said) => of_code(said.err().code().unwrap_or_default(), what),
            // Nothing was signed, and so nothing was sent.
            _ if is_about_keys(&told) && is_about_time(&told) => {
                let error = StoreError::Unavailable { what, source: Some(Box::new(error)) };
                Failed::Unavailable { error, is_undone: true }
            }
            SdkError::ConstructionFailure(_) if !is_about_keys(&told) => {
                Failed::Answer(StoreError::Invalid { what })
            }
            _ if is_about_keys(&told) => Failed::Answer(StoreError::Denied { what }),
            _ => {
                let error = StoreError::Unavailable { what, source: Some(Box::new(error)) };
                Failed::Unavailable { error, is_undone: false }
            }
        }
    }
}

/// The same of a code that stands for a whole answer, or for one part of a transaction.
pub(super) fn of_code(code: &str, what: String) -> Failed {
    match kind(code) {
        Kind::Throttled => Failed::Unavailable { error: StoreError::unavailable(what), is_undone: true },
        Kind::Broken => Failed::Unavailable { error: StoreError::unavailable(what), is_undone: false },
        Kind::Conflict => Failed::Conflict,
        Kind::Denied => Failed::Answer(StoreError::Denied { what }),
        Kind::Missing => Failed::Answer(StoreError::Invalid { what: format!("{what}; {MISSING}") }),
        Kind::Invalid => Failed::Answer(StoreError::Invalid { what }),
    }
}

impl Failed {
    /// As whoever only reads is told.
    pub(super) fn into_error(self) -> StoreError {
        match self {
            Self::Unavailable { error, .. } | Self::Answer(error) => error,
            Self::Conflict => StoreError::unavailable("others were at work on the same items"),
            Self::Condition(_) => StoreError::unavailable("others have changed the same items"),
        }
    }
}

/// Whether it says that there is no table.
pub(super) fn is_missing(error: &StoreError) -> bool {
    matches!(error, StoreError::Invalid { what } if what.ends_with(MISSING))
}

fn kind(code: &str) -> Kind {
    match code {
        "ProvisionedThroughputExceededException"
        | "ProvisionedThroughputExceeded"
        | "ThrottlingException"
        | "ThrottlingError"
        | "Throttling"
        | "RequestLimitExceeded"
        | "LimitExceededException" => Kind::Throttled,
        "TransactionConflictException"
        | "TransactionConflict"
        | "TransactionInProgressException"
        | "ReplicatedWriteConflictException" => Kind::Conflict,
        "AccessDeniedException"
        | "AccessDenied"
        | "UnrecognizedClientException"
        | "InvalidSignatureException"
        | "IncompleteSignatureException"
        | "IncompleteSignature"
        | "MissingAuthenticationTokenException"
        | "MissingAuthenticationToken"
        | "ExpiredTokenException"
        | "ExpiredToken"
        | "InvalidClientTokenId"
        | "OptInRequired"
        | "NotAuthorized" => Kind::Denied,
        "ResourceNotFoundException" | "TableNotFoundException" => Kind::Missing,
        "ValidationException"
        | "ValidationError"
        | "SerializationException"
        | "UnknownOperationException"
        | "ItemCollectionSizeLimitExceededException"
        | "ItemCollectionSizeLimitExceeded"
        | "IdempotentParameterMismatchException"
        | "ResourceInUseException" => Kind::Invalid,
        // What is not known is the engine's own trouble more often than ours.
        _ => Kind::Broken,
    }
}

/// An error with all that it comes from.
fn told(error: &dyn Error) -> String {
    let mut told = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let said = error.to_string();
        if !told.contains(&said) {
            // To a string nothing fails.
            let _ = write!(told, ": {said}");
        }
        source = error.source();
    }
    told.chars().take(500).collect()
}

/// Whether there is nothing to sign with.
fn is_about_keys(told: &str) -> bool {
    ["redentials", "no identity", "auth scheme"].iter().any(|word| told.contains(word))
}

/// Whether whoever has the keys did not answer in time.
fn is_about_time(told: &str) -> bool {
    ["timed out", "timeout", "TimedOut"].iter().any(|word| told.contains(word))
}

#[cfg(test)]
mod tests {
    use aws_sdk_dynamodb::operation::get_item::GetItemError;

    use super::*;

    #[test]
    fn keys_that_nobody_has_are_denied_and_keys_that_are_late_are_away() {
        let whose = Whose { place: "dynamodb://limits".to_owned() };
        let failed = |why: &str| {
            whose.failed(SdkError::<GetItemError, ()>::timeout_error(why.to_owned())).into_error()
        };
        let late = failed("an error occurred while loading credentials: the endpoint timed out after 1s");
        assert!(late.is_transient(), "{late}");
        let none =
            SdkError::<GetItemError, ()>::construction_failure("no providers in chain provided credentials");
        let none = whose.failed(none).into_error();
        assert!(matches!(none, StoreError::Denied { .. }), "{none}");
    }

    #[test]
    fn away_is_what_may_pass_and_everything_else_is_an_answer() {
        let table = [
            ("ProvisionedThroughputExceededException", true, true),
            ("ThrottlingException", true, true),
            ("RequestLimitExceeded", true, true),
            ("InternalServerError", true, false),
            ("ServiceUnavailable", true, false),
            ("AccessDeniedException", false, false),
            ("UnrecognizedClientException", false, false),
            ("ResourceNotFoundException", false, false),
            ("ValidationException", false, false),
        ];
        for (code, is_away, undone) in table {
            match of_code(code, code.to_owned()) {
                Failed::Unavailable { error, is_undone } => {
                    assert!(is_away && error.is_transient() && is_undone == undone, "{code}");
                }
                Failed::Answer(error) => assert!(!is_away && !error.is_transient(), "{code}"),
                other => panic!("{code} is {other:?}"),
            }
        }
        assert!(matches!(of_code("TransactionConflictException", String::new()), Failed::Conflict));
    }
}
