//! The errors of a configuration, each as one sentence.

use std::fmt;

use thiserror::Error;

/// All problems of a configuration.
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
    /// One entry for each problem.
    pub fn problems(&self) -> &[ConfigProblem] {
        &self.problems
    }

    /// The value, if there are no problems.
    pub(super) fn unless_any<T>(problems: Vec<ConfigProblem>, value: T) -> Result<T, Self> {
        if problems.is_empty() { Ok(value) } else { Err(Self { problems }) }
    }
}

impl From<ConfigProblem> for ConfigError {
    fn from(problem: ConfigProblem) -> Self {
        Self { problems: vec![problem] }
    }
}

/// A problem: the key, where it was given, and the fault.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConfigProblem {
    /// Where it was given.
    pub origin: Origin,
    /// The key as written: `slots.max`. Empty if the whole text cannot be parsed.
    pub field: String,
    /// The fault.
    pub fault: Fault,
}

/// A fault of a key.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// The value is out of bounds or of the wrong type.
    OutOfBounds {
        /// The value as written, shortened if it is long.
        value: String,
        /// The valid values.
        bound: String,
    },
    /// It is missing, and another key requires it.
    Missing {
        /// The key that requires it; the problem's origin is this key's.
        because: String,
    },
    /// It has no effect because of another key.
    Useless {
        /// The other key.
        because: String,
        /// The value of the other key.
        says: String,
    },
    /// It is for keyed throttles, and given for a single one.
    OfMany,
    /// The key does not exist.
    Unknown {
        /// The most similar key.
        closest: Option<String>,
    },
    /// It is given more than once.
    Repeated,
    /// The text cannot be parsed.
    Unreadable {
        /// The parser's message, with line and column.
        message: String,
    },
}

/// Where a value was given.
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
    /// The preset's default.
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
            Fault::Unreadable { message } => write!(f, "cannot parse the input {origin}: {message}"),
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

fn sentences(problems: &[ConfigProblem]) -> String {
    problems.iter().map(ConfigProblem::to_string).collect::<Vec<_>>().join("; ")
}
