//! What went wrong, in one sentence, with what to do next and the exit code it ends with.

use std::io::{self, Write as _};
use std::process::ExitCode;
use std::time::Duration;

use tidegate::store::archive::ArchiveError;
use tidegate::{EntityId, LimitError, LimitLine, StoreError, Subject};
use tidegate_core::limit::token::TokenId;

use crate::answer::{Format, paint};
use crate::{codec, words};

/// How the program ends. The help lists the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exit {
    /// Done.
    Done,
    /// It could not be done, or what it is about is not there.
    Failed,
    /// It was not asked as it can be asked.
    Usage,
    /// A limit refuses it.
    Refused,
    /// The store is away.
    Away,
    /// A plan has changes.
    Changes,
    /// A command that was run ended with this.
    Command(u8),
}

impl Exit {
    /// What the shell sees.
    pub(crate) const fn code(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::Failed => 1,
            Self::Usage => 2,
            Self::Refused => 3,
            Self::Away => 4,
            Self::Changes => 5,
            Self::Command(code) => code,
        }
    }

    /// The word for it in JSON.
    pub(crate) const fn word(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Failed => "failed",
            Self::Usage => "usage",
            Self::Refused => "refused",
            Self::Away => "away",
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

/// Why a verb did not do what it was asked to.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) exit: Exit,
    /// One sentence.
    pub(crate) what: String,
    /// What to do next.
    pub(crate) next: Option<String>,
    /// When it is worth asking again.
    pub(crate) retry_after: Option<Duration>,
    /// The limits that were asked, where one refused.
    pub(crate) limits: Vec<LimitLine>,
}

impl Failure {
    pub(crate) fn new(exit: Exit, what: impl Into<String>) -> Self {
        Self { exit, what: what.into(), next: None, retry_after: None, limits: Vec::new() }
    }

    /// It could not be done.
    pub(crate) fn failed(what: impl Into<String>) -> Self {
        Self::new(Exit::Failed, what)
    }

    /// It was not asked as it can be asked.
    pub(crate) fn usage(what: impl Into<String>) -> Self {
        Self::new(Exit::Usage, what)
    }

    /// A limit is used up for now.
    pub(crate) fn limited(sentence: &str, retry_after: Option<Duration>, limits: Vec<LimitLine>) -> Self {
        let sentence = words::come_back(sentence, retry_after);
        let failure = Self { limits, ..Self::new(Exit::Refused, format!("refused: {sentence}")) };
        failure.next("come back then, or wait for it with --within SPAN")
    }

    /// More is asked for than a limit ever holds.
    pub(crate) fn too_large(what: String, limits: Vec<LimitLine>) -> Self {
        let failure = Self { limits, ..Self::new(Exit::Refused, what) };
        failure.next("ask for less, or raise the limit's burst with `tidegate limits set`")
    }

    /// Nothing limits it.
    pub(crate) fn no_limits(subject: &Subject) -> Self {
        let next = format!("write a limit: tidegate limits set resource '{}' rpm:60/min", subject.resource);
        Self::failed(format!("nothing limits {subject}, and what nothing limits is refused")).next(next)
    }

    /// It is not as its writer believes.
    pub(crate) fn stale(what: String) -> Self {
        Self::failed(what).next("somebody else has changed it: look again, then repeat")
    }

    pub(crate) fn no_entity(what: String, entity: &EntityId) -> Self {
        Self::failed(what).next(format!("tidegate entity create '{entity}'"))
    }

    pub(crate) fn has_children(what: String, entity: &EntityId) -> Self {
        Self::failed(what).next(format!("list them: tidegate entity children '{entity}'"))
    }

    pub(crate) fn no_token(what: String) -> Self {
        Self::failed(what).next("see which there are: tidegate token list")
    }

    /// The id of a token is, or was, another's.
    pub(crate) fn token_taken(id: &TokenId) -> Self {
        Self::failed(format!("there is, or was, a token `{id}`, and its id is never another's"))
            .next("choose another id; those there are: tidegate token list")
    }

    /// The store is full.
    pub(crate) fn full(what: String) -> Self {
        Self::failed(what).next("archive the audit, or open the store with a larger size_max")
    }

    /// Says what to do next.
    pub(crate) fn next(mut self, next: impl Into<String>) -> Self {
        self.next = Some(next.into());
        self
    }

    /// Tells it on stderr. Where that is gone there is nobody left to tell.
    pub(crate) fn tell(&self, format: Format) -> ExitCode {
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
        let exit = if error.is_unavailable() { Exit::Away } else { Exit::Failed };
        let failure = Self::new(exit, error.to_string());
        match error {
            StoreError::Unavailable { .. } | StoreError::TimedOut { .. } => failure
                .next("wait for whoever holds it and try again, or name another store with --store URL"),
            StoreError::Denied { .. } => failure.next(
                "see who may read and write the file and its folder, or name another store with --store URL",
            ),
            StoreError::Corrupt { .. } => {
                failure.next("name the right file with --store sqlite:PATH, or put a backup in its place")
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
                Self::new(Exit::Refused, words::come_back(&what, retry_after))
            }
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
            ArchiveError::Remote { is_transient: true, .. } => Self::new(Exit::Away, error.to_string())
                .next("see whether it can be reached, then repeat: nothing is lost"),
            error if error.is_transient() => {
                Self::failed(error.to_string()).next("wait until it is done, then repeat")
            }
            error => Self::failed(error.to_string()),
        }
    }
}
