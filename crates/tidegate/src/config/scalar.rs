//! A value as a source provides it, before its expected type is known.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use tidegate_core::duration;
use tidegate_core::excerpt::excerpt;
use tidegate_core::plan::{Budget, FieldValue, InvalidNamed, Named, Rate};

use super::schema::Kind;

/// One value of a document, a map or a variable.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Scalar {
    /// Text from a source that also has other types.
    Text(String),
    /// Text from a source that has only text: numbers are written in it too.
    Untyped(String),
    Integer(i128),
    Float(f64),
    Bool(bool),
    /// An array of texts.
    List(Vec<String>),
    /// A number that fits no type.
    Huge(String),
    /// A table without keys.
    Empty,
    /// Never valid: an array, a date, null.
    Other(&'static str),
}

impl Scalar {
    /// Converts the value to `kind`.
    ///
    /// # Errors
    /// A description of the valid values.
    pub(super) fn read(&self, kind: &Kind) -> Result<FieldValue, String> {
        match *kind {
            Kind::Whole { min, max } => match self.integer() {
                Some(Ok(value)) if (min..=max).contains(&value) => Ok(FieldValue::Count(value)),
                Some(_) => Err(kind.bounds()),
                None => Err(kind.demand()),
            },
            Kind::PowerOfTwo { max } => match self.integer() {
                Some(Ok(value)) if value <= max && value.is_power_of_two() => Ok(FieldValue::Count(value)),
                Some(_) => Err(kind.bounds()),
                None => Err(kind.demand()),
            },
            Kind::Span { min, max } => match self.span() {
                Some(Ok(span)) if (min..=max).contains(&span) => Ok(FieldValue::Span(span)),
                Some(_) => Err(kind.bounds()),
                None => Err(kind.demand()),
            },
            Kind::Fraction { min } => match self.number() {
                Some(number) if (min..=1.0).contains(&number) => Ok(FieldValue::Fraction(number)),
                Some(_) => Err(kind.bounds()),
                None => Err(kind.demand()),
            },
            Kind::Number { min, max } => match self.number() {
                Some(number) if (min..=max).contains(&number) => Ok(FieldValue::Number(number)),
                Some(_) => Err(kind.bounds()),
                None => Err(kind.demand()),
            },
            Kind::Word(words) => {
                let (Self::Text(text) | Self::Untyped(text)) = self else { return Err(kind.demand()) };
                let word = words.iter().find(|word| *word == text);
                word.map(|word| FieldValue::Word(word)).ok_or_else(|| kind.demand())
            }
            Kind::Flag => match self {
                Self::Bool(flag) => Ok(FieldValue::Flag(*flag)),
                Self::Untyped(text) => text.parse().map(FieldValue::Flag).map_err(|_| kind.demand()),
                _ => Err(kind.demand()),
            },
            Kind::Rates => self.named::<Rate>(kind),
            Kind::Budgets => self.named::<Budget>(kind),
        }
    }

    /// Named limits, as one text.
    fn named<L>(&self, kind: &Kind) -> Result<FieldValue, String>
    where
        Named<L>: FromStr<Err = InvalidNamed> + fmt::Display,
    {
        let demand = |error: InvalidNamed| format!("{}: {}", kind.demand(), error.why());
        let read =
            |text: &str| text.trim().parse::<Named<L>>().map(|named| named.to_string()).map_err(demand);
        let all: Result<Vec<_>, _> = match self {
            Self::List(texts) => texts.iter().map(|text| read(text)).collect(),
            Self::Text(text) | Self::Untyped(text) if text.trim().is_empty() => Ok(Vec::new()),
            Self::Text(text) | Self::Untyped(text) => text.split(',').map(read).collect(),
            _ => return Err(kind.demand()),
        };
        all.map(|all| FieldValue::Text(all.join(", ")))
    }

    /// The value as written: text without quotes.
    pub(super) fn bare(&self) -> String {
        match self {
            Self::Text(text) | Self::Untyped(text) => excerpt(text),
            Self::List(texts) => excerpt(&texts.join(", ")),
            _ => self.to_string(),
        }
    }

    /// A whole number; the inner error is one that is negative or too large.
    fn integer(&self) -> Option<Result<u64, ()>> {
        let integer = match self {
            Self::Integer(integer) => *integer,
            Self::Huge(_) => return Some(Err(())),
            Self::Untyped(text) => text.parse().ok()?,
            _ => return None,
        };
        Some(u64::try_from(integer).map_err(drop))
    }

    /// A duration; the inner error is one that is negative, too long or not a number.
    fn span(&self) -> Option<Result<Duration, ()>> {
        match self {
            Self::Integer(seconds) => Some(u64::try_from(*seconds).map(Duration::from_secs).map_err(drop)),
            Self::Float(seconds) => Some(Duration::try_from_secs_f64(*seconds).map_err(drop)),
            Self::Huge(_) => Some(Err(())),
            Self::Text(text) | Self::Untyped(text) => seconds_or_duration(text).map(Ok),
            Self::Bool(_) | Self::List(_) | Self::Empty | Self::Other(_) => None,
        }
    }

    fn number(&self) -> Option<f64> {
        match self {
            #[expect(clippy::cast_precision_loss, reason = "inexact values are far out of bounds")]
            Self::Integer(integer) => Some(*integer as f64),
            Self::Float(float) => Some(*float),
            Self::Huge(_) => Some(f64::NAN),
            Self::Untyped(text) => text.parse().ok(),
            Self::Text(_) | Self::Bool(_) | Self::List(_) | Self::Empty | Self::Other(_) => None,
        }
    }
}

/// A number is in seconds.
fn seconds_or_duration(text: &str) -> Option<Duration> {
    match duration::parse(text) {
        Ok(span) => Some(span),
        Err(_) => duration::parse(&format!("{text}s")).ok(),
    }
}

impl fmt::Display for Scalar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(text) | Self::Untyped(text) => write!(f, "\"{}\"", excerpt(text)),
            Self::List(texts) if texts.is_empty() => f.write_str("an array"),
            Self::List(texts) => write!(f, "\"{}\"", excerpt(&texts.join(", "))),
            Self::Huge(number) => f.write_str(&excerpt(number)),
            Self::Integer(integer) => integer.fmt(f),
            Self::Float(float) => write!(f, "{float:?}"),
            Self::Bool(bool) => bool.fmt(f),
            Self::Empty => f.write_str("an empty table"),
            Self::Other(what) => f.write_str(what),
        }
    }
}
