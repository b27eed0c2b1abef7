//! What is wrong with a configuration, all of it, each as one sentence.

use std::fmt;

use thiserror::Error;

/// Everything that is wrong with a configuration.
///
/// ```
/// let error = tidegate::Config::from_toml("slots.maks = 8\nslots.min = 0").unwrap_err();
/// assert_eq!(
///     error.to_string(),
///     "`slots.maks` in TOML is not a key, did you mean `slots.max`?; \
///      `slots.min` is 0 in TOML, and must be from 1 to 1073741824"
/// );
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{}", sentences(problems))]
pub struct ConfigError {
    problems: Vec<ConfigProblem>,
}

impl ConfigError {
    /// One entry for each thing that is wrong.
    pub fn problems(&self) -> &[ConfigProblem] {
        &self.problems
    }

    /// The value, if there was no problem.
    pub(super) fn unless_any<T>(problems: Vec<ConfigProblem>, value: T) -> Result<T, Self> {
        if problems.is_empty() { Ok(value) } else { Err(Self { problems }) }
    }
}

impl From<ConfigProblem> for ConfigError {
    fn from(problem: ConfigProblem) -> Self {
        Self { problems: vec![problem] }
    }
}

/// One thing that is wrong: where, with what, and how.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConfigProblem {
    /// Where it was said.
    pub origin: Origin,
    /// The key, as it was written: `slots.max`. Empty where a text as a whole cannot be read.
    pub field: String,
    /// What is wrong with it.
    pub fault: Fault,
}

/// What is wrong with a key.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// The value is out of its bounds, or of another type.
    OutOfBounds {
        /// The value found there, shortened if it is long.
        value: String,
        /// What it may be.
        bound: String,
    },
    /// It is not given, and another key needs it.
    Missing {
        /// The key that needs it; the origin is this one's.
        because: String,
    },
    /// It is given, and another key leaves it without effect.
    Useless {
        /// The other key.
        because: String,
        /// What the other key says.
        says: String,
    },
    /// It is for many throttles together, and given for one.
    OfMany,
    /// There is no such key.
    Unknown {
        /// A key that is nearly the same.
        closest: Option<String>,
    },
    /// It is given more than once.
    Repeated,
    /// The text is not of the format it should be of.
    Unreadable {
        /// What the parser says, with line and column.
        message: String,
    },
}

/// Where a value was said.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Origin {
    /// A TOML text.
    Toml,
    /// A JSON text.
    Json,
    /// A map.
    Map,
    /// The environment.
    Environment,
    /// The environment variable of this name.
    Variable(String),
    /// A draft.
    Draft,
    /// Nowhere: it is the preset's.
    Default,
}

impl ConfigProblem {
    pub(super) fn new(origin: Origin, field: impl Into<String>, fault: Fault) -> Self {
        Self { origin, field: field.into(), fault }
    }
}

impl fmt::Display for ConfigProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { origin, field, fault } = self;
        match fault {
            Fault::OutOfBounds { value, bound } => {
                write!(f, "`{field}` is {value} {origin}, and must be {bound}")
            }
            Fault::Missing { because } => {
                write!(f, "`{field}` is missing, because `{because}` is given {origin}")
            }
            Fault::Useless { because, says } => {
                write!(f, "`{field}` is given {origin}, and has no effect because `{because}` is {says}")
            }
            Fault::OfMany => write!(f, "`{field}` is given {origin}, and has no effect on a single throttle"),
            Fault::Unknown { closest: None } => write!(f, "`{field}` {origin} is not a key"),
            Fault::Unknown { closest: Some(closest) } => {
                write!(f, "`{field}` {origin} is not a key, did you mean `{closest}`?")
            }
            Fault::Repeated => write!(f, "`{field}` is given twice {origin}"),
            Fault::Unreadable { message } => write!(f, "what is {origin} cannot be read: {message}"),
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Toml => f.write_str("in TOML"),
            Self::Json => f.write_str("in JSON"),
            Self::Map => f.write_str("in the map"),
            Self::Environment => f.write_str("in the environment"),
            Self::Variable(name) => write!(f, "in the environment variable `{name}`"),
            Self::Draft => f.write_str("in the draft"),
            Self::Default => f.write_str("by default"),
        }
    }
}

/// Text from outside as it may stand in a message: without control characters, and not long.
pub(super) fn shown(text: &str) -> String {
    const LETTERS_MAX: usize = 60;
    let mut letters = text.chars();
    let mut shown: String = letters.by_ref().take(LETTERS_MAX).flat_map(char::escape_debug).collect();
    if letters.next().is_some() {
        shown.push('…');
    }
    shown
}

fn sentences(problems: &[ConfigProblem]) -> String {
    problems.iter().map(ConfigProblem::to_string).collect::<Vec<_>>().join("; ")
}
