//! Maps errors of the SDK to [`StoreError`] by what the caller can do about them.
//!
//! Unavailable is what a retry may not meet again: no connection, a timeout, throttling, an internal error of
//! the engine. Wrong credentials, missing rights and a missing table are permanent.

use std::error::Error;
use std::fmt::Write as _;

use aws_sdk_dynamodb::error::{ProvideErrorMetadata, SdkError};

use super::keys::Item;
use crate::error::StoreError;

/// Why a request failed.
#[derive(Debug)]
pub(super) enum RequestError {
    /// The condition of at least one item does not hold. Has an entry for each item of the request.
    Condition(Vec<ItemCondition>),
    /// A conflict with another transaction: nothing was done.
    Conflict,
    /// The engine is unavailable. A write may have been applied, unless it `is_undone`.
    Unavailable { error: StoreError, is_undone: bool },
    /// A permanent error.
    Permanent(StoreError),
}

/// The condition of an item of a write.
#[derive(Debug)]
pub(super) enum ItemCondition {
    /// It holds.
    Met,
    /// It does not hold. The item, if it exists.
    Unmet(Option<Item>),
}

/// The table that an error reports.
#[derive(Debug, Clone)]
pub(super) struct ErrorContext {
    pub(super) place: String,
}

/// The message for a missing table.
const MISSING: &str = "the table does not exist, or not yet: create it with `tidegate store init`";

impl ErrorContext {
    /// Converts the error of a request that is not retried.
    pub(super) fn store_error<E, R>(&self, error: SdkError<E, R>) -> StoreError
    where
        E: ProvideErrorMetadata + Error + Send + Sync + 'static,
        R: std::fmt::Debug + Send + Sync + 'static,
    {
        self.request_error(error).into_error()
    }

    /// Converts the error of a request.
    pub(super) fn request_error<E, R>(&self, error: SdkError<E, R>) -> RequestError
    where
        E: ProvideErrorMetadata + Error + Send + Sync + 'static,
        R: std::fmt::Debug + Send + Sync + 'static,
    {
        let message = error_chain(&error);
        let what = format!("`{}`: {message}", self.place);
        match &error {
            SdkError::ServiceError(response) => code_error(response.err().code().unwrap_or_default(), what),
            // Without credentials nothing was signed, and so nothing was sent.
            _ if is_credential_error(&message) && is_timeout(&message) => {
                let error = StoreError::Unavailable { what, source: Some(Box::new(error)) };
                RequestError::Unavailable { error, is_undone: true }
            }
            SdkError::ConstructionFailure(_) if !is_credential_error(&message) => {
                RequestError::Permanent(StoreError::Invalid { what })
            }
            _ if is_credential_error(&message) => RequestError::Permanent(StoreError::Denied { what }),
            _ => {
                let error = StoreError::Unavailable { what, source: Some(Box::new(error)) };
                RequestError::Unavailable { error, is_undone: false }
            }
        }
    }
}

/// Converts an error code, of a whole response or of one item of a transaction. The latter has no suffix.
pub(super) fn code_error(code: &str, what: String) -> RequestError {
    match code.strip_suffix("Exception").unwrap_or(code) {
        "ProvisionedThroughputExceeded"
        | "Throttling"
        | "ThrottlingError"
        | "RequestLimitExceeded"
        | "LimitExceeded" => {
            RequestError::Unavailable { error: StoreError::unavailable(what), is_undone: true }
        }
        "TransactionConflict" | "TransactionInProgress" | "ReplicatedWriteConflict" => RequestError::Conflict,
        "AccessDenied"
        | "UnrecognizedClient"
        | "InvalidSignature"
        | "IncompleteSignature"
        | "MissingAuthenticationToken"
        | "ExpiredToken"
        | "InvalidClientTokenId"
        | "OptInRequired"
        | "NotAuthorized" => RequestError::Permanent(StoreError::Denied { what }),
        "ResourceNotFound" | "TableNotFound" => {
            RequestError::Permanent(StoreError::Invalid { what: format!("{what}; {MISSING}") })
        }
        "Validation"
        | "ValidationError"
        | "Serialization"
        | "UnknownOperation"
        | "ItemCollectionSizeLimitExceeded"
        | "IdempotentParameterMismatch"
        | "ResourceInUse" => RequestError::Permanent(StoreError::Invalid { what }),
        // Unknown codes are internal errors of the engine more often than ours.
        _ => RequestError::Unavailable { error: StoreError::unavailable(what), is_undone: false },
    }
}

impl RequestError {
    /// The error to report to the caller.
    pub(super) fn into_error(self) -> StoreError {
        match self {
            Self::Unavailable { error, .. } | Self::Permanent(error) => error,
            Self::Conflict => StoreError::unavailable("a concurrent transaction on the same items"),
            Self::Condition(_) => StoreError::unavailable("the same items were changed concurrently"),
        }
    }
}

/// Whether the table is missing.
pub(super) fn is_missing(error: &StoreError) -> bool {
    matches!(error, StoreError::Invalid { what } if what.ends_with(MISSING))
}

/// An error with its sources.
fn error_chain(error: &dyn Error) -> String {
    let mut message = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let cause = error.to_string();
        if !message.contains(&cause) {
            // Writing to a string cannot fail.
            let _ = write!(message, ": {cause}");
        }
        source = error.source();
    }
    message.chars().take(500).collect()
}

/// Whether credentials are missing.
fn is_credential_error(message: &str) -> bool {
    ["redentials", "no identity", "auth scheme"].iter().any(|word| message.contains(word))
}

/// Whether the source of credentials timed out.
fn is_timeout(message: &str) -> bool {
    ["timed out", "timeout", "TimedOut"].iter().any(|word| message.contains(word))
}

#[cfg(test)]
mod tests {
    use aws_sdk_dynamodb::operation::get_item::GetItemError;

    use super::*;

    #[test]
    fn missing_credentials_are_denied_but_late_ones_retry() {
        let context = ErrorContext { place: "dynamodb://limits".to_owned() };
        let request_error = |why: &str| {
            context.request_error(SdkError::<GetItemError, ()>::timeout_error(why.to_owned())).into_error()
        };
        let late =
            request_error("an error occurred while loading credentials: the endpoint timed out after 1s");
        assert!(late.is_transient(), "{late}");
        let none =
            SdkError::<GetItemError, ()>::construction_failure("no providers in chain provided credentials");
        let none = context.request_error(none).into_error();
        assert!(matches!(none, StoreError::Denied { .. }), "{none}");
    }

    #[test]
    fn only_transient_codes_are_unavailable() {
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
        for (code, is_transient, undone) in table {
            match code_error(code, code.to_owned()) {
                RequestError::Unavailable { error, is_undone } => {
                    assert!(is_transient && error.is_transient() && is_undone == undone, "{code}");
                }
                RequestError::Permanent(error) => assert!(!is_transient && !error.is_transient(), "{code}"),
                other => panic!("{code} is {other:?}"),
            }
        }
        assert!(matches!(code_error("TransactionConflictException", String::new()), RequestError::Conflict));
    }
}
