//! A failure: one sentence, a hint at what to do next, and an exit code.

use std::io::{self, Write as _};
use std::process::ExitCode;
use std::time::Duration;

use tidegate::store::archive::ArchiveError;
use tidegate::{EntityId, LimitError, LimitLine, StoreError, Subject};
use tidegate_core::limit::token::TokenId;

use crate::codec;
use crate::format;
use crate::output::{Format, paint};

/// How the program ends. The help lists the codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exit {
    /// Done.
    Done,
    /// The operation failed, or its object does not exist.
    Failed,
    /// The arguments are invalid.
    Usage,
    /// A limit refused the request.
    Refused,
    /// The store or the server is unavailable.
    Unavailable,
    /// A plan has changes.
    Changes,
    /// The exit code of a command.
    Command(u8),
}

impl Exit {
    /// The exit code of the process.
    pub(crate) const fn code(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::Failed => 1,
            Self::Usage => 2,
            Self::Refused => 3,
            Self::Unavailable => 4,
            Self::Changes => 5,
            Self::Command(code) => code,
        }
    }

    /// The name of the code in JSON.
    pub(crate) const fn kind(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Failed => "failed",
            Self::Usage => "usage",
            Self::Refused => "refused",
            Self::Unavailable => "away",
            Self::Changes => "changes",
            Self::Command(_) => "command",
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        exit.code().into()
    }
}

/// Why a verb failed.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) exit: Exit,
    /// One sentence.
    pub(crate) what: String,
    /// A hint at what to do next.
    pub(crate) next: Option<String>,
    /// When a retry may succeed.
    pub(crate) retry_after: Option<Duration>,
    /// The limits that were checked, if one refused.
    pub(crate) limits: Vec<LimitLine>,
}

impl Failure {
    pub(crate) fn new(exit: Exit, what: impl Into<String>) -> Self {
        Self { exit, what: what.into(), next: None, retry_after: None, limits: Vec::new() }
    }

    /// The operation failed.
    pub(crate) fn failed(what: impl Into<String>) -> Self {
        Self::new(Exit::Failed, what)
    }

    /// The arguments are invalid.
    pub(crate) fn usage(what: impl Into<String>) -> Self {
        Self::new(Exit::Usage, what)
    }

    /// A limit is exhausted for now.
    pub(crate) fn limited(sentence: &str, retry_after: Option<Duration>, limits: Vec<LimitLine>) -> Self {
        let sentence = format::rewrite_wait(sentence, retry_after);
        let failure = Self { limits, ..Self::new(Exit::Refused, sentence) };
        failure.next("retry then, or wait with --within SPAN")
    }

    /// The request exceeds the burst of a limit.
    pub(crate) fn too_large(what: String, limits: Vec<LimitLine>) -> Self {
        let failure = Self { limits, ..Self::new(Exit::Refused, what) };
        failure.next("request less, or raise the limit's burst with `tidegate limits set`")
    }

    /// The entity is disabled.
    pub(crate) fn disabled(what: String) -> Self {
        Self::new(Exit::Refused, what).next("enable it: tidegate entity enable ID")
    }

    /// No limit applies to the subject.
    pub(crate) fn no_limits(subject: &Subject) -> Self {
        let next = format!("write a limit: tidegate limits set resource '{}' rpm:60/min", subject.resource);
        Self::failed(format!("no limit applies to {subject}, so its requests are refused")).next(next)
    }

    /// The version is not the expected one.
    pub(crate) fn stale(what: String) -> Self {
        Self::failed(what).next("it was changed concurrently: read it again, then retry")
    }

    pub(crate) fn no_entity(what: String, entity: &EntityId) -> Self {
        Self::failed(what).next(format!("create it: tidegate entity create '{entity}'"))
    }

    pub(crate) fn has_children(what: String, entity: &EntityId) -> Self {
        Self::failed(what).next(format!("list them: tidegate entity children '{entity}'"))
    }

    pub(crate) fn no_token(what: String) -> Self {
        Self::failed(what).next("list tokens: tidegate token list")
    }

    /// The id of the token is or was in use.
    pub(crate) fn token_taken(id: &TokenId) -> Self {
        Self::failed(format!("the token id `{id}` is or was in use, and ids are never reused"))
            .next("choose another id; list those in use: tidegate token list")
    }

    /// The store is full.
    pub(crate) fn full(what: String) -> Self {
        Self::failed(what).next("archive the audit, or open the store with a larger size_max")
    }

    /// Adds a hint at what to do next.
    pub(crate) fn next(mut self, next: impl Into<String>) -> Self {
        self.next = Some(next.into());
        self
    }

    /// Prints the failure to stderr. Errors of that write are ignored: there is no other channel.
    pub(crate) fn print(&self, format: Format) -> ExitCode {
        let text = match format {
            Format::Json => codec::failure(self).to_string() + "\n",
            Format::Text { .. } => {
                let mark = paint("error:", "1;31", Format::is_coloured_on_stderr());
                let next = self.next.as_ref().map(|next| format!("\n next: {next}")).unwrap_or_default();
                format!("{mark} {}{next}\n", self.what)
            }
        };
        drop(io::stderr().write_all(text.as_bytes()));
        self.exit.into()
    }
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        let exit = if error.is_unavailable() { Exit::Unavailable } else { Exit::Failed };
        let failure = Self::new(exit, error.to_string());
        match error {
            StoreError::Unavailable { .. } | StoreError::TimedOut { .. } => {
                failure.next("retry when no other process locks it, or choose another store with --store URL")
            }
            StoreError::Denied { .. } => failure.next(
                "check the permissions of the file and its folder, or choose another store with --store URL",
            ),
            StoreError::Corrupt { .. } => {
                failure.next("choose the right file with --store sqlite:PATH, or restore a backup")
            }
            StoreError::Full { .. } => Self::full(failure.what),
            StoreError::Stale { .. } => Self::stale(failure.what),
            StoreError::NoEntity { entity } => Self::no_entity(failure.what, &entity),
            StoreError::HasChildren { entity, .. } => Self::has_children(failure.what, &entity),
            StoreError::NoToken { .. } => Self::no_token(failure.what),
            StoreError::Token(_) => Self { exit: Exit::Usage, ..failure },
            _ => failure,
        }
    }
}

impl From<LimitError> for Failure {
    fn from(error: LimitError) -> Self {
        let (what, retry_after) = (error.to_string(), error.retry_after());
        let failure = match error {
            LimitError::Store(error) => return error.into(),
            LimitError::Unavailable { source, .. } => source.into(),
            LimitError::Limited(limited) => Self::limited(&what, retry_after, limited.lines),
            LimitError::TooLarge(limited) => Self::too_large(what, limited.lines),
            LimitError::Waiting { .. } | LimitError::Busy { .. } => {
                Self::new(Exit::Refused, format::rewrite_wait(&what, retry_after))
            }
            LimitError::Disabled { .. } => Self::disabled(what),
            LimitError::NoLimits { subject } => Self::no_limits(&subject),
            LimitError::Deep { .. } | LimitError::Closed => Self::failed(what),
            _ => Self::usage(what),
        };
        Self { retry_after, ..failure }
    }
}

impl From<ArchiveError> for Failure {
    fn from(error: ArchiveError) -> Self {
        match error {
            ArchiveError::Store(error) => error.into(),
            ArchiveError::Io { ref source, .. } => Self::failed(format!("{error}: {source}")),
            ArchiveError::Remote { is_transient: true, .. } => {
                Self::new(Exit::Unavailable, error.to_string())
                    .next("check that it is reachable, then retry: nothing is lost")
            }
            error if error.is_transient() => {
                Self::failed(error.to_string()).next("wait until it is done, then retry")
            }
            error => Self::failed(error.to_string()),
        }
    }
}
