//! Limits as they are written, and as checked rules.
//!
//! [`Limit`] is unchecked: any name, any numbers. [`Limit::check`] turns it into a [`Rule`], whose name is
//! valid and whose shape can be counted exactly.

mod text;

pub(crate) use text::{Number, number};

use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;

use crate::bucket::{InvalidShape, Shape};
use crate::limit::name::{InvalidName, LimitName};
use crate::time::Stamp;

/// A named limit: an amount of units per period, and at most `burst` at once.
///
/// ```
/// use tidegate_core::limit::rule::Limit;
///
/// let tokens = Limit::per_minute("tpm", 10_000).burst(15_000);
/// assert!(tokens.check().is_ok());
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limit {
    name: String,
    amount: u64,
    period: Duration,
    burst: Option<u64>,
}

impl Limit {
    /// `amount` units per `period`.
    pub fn per(name: impl Into<String>, amount: u64, period: Duration) -> Self {
        Self { name: name.into(), amount, period, burst: None }
    }

    /// `amount` units per second.
    pub fn per_second(name: impl Into<String>, amount: u64) -> Self {
        Self::per(name, amount, Duration::from_secs(1))
    }

    /// `amount` units per minute.
    pub fn per_minute(name: impl Into<String>, amount: u64) -> Self {
        Self::per(name, amount, Duration::from_secs(60))
    }

    /// `amount` units per hour.
    pub fn per_hour(name: impl Into<String>, amount: u64) -> Self {
        Self::per(name, amount, Duration::from_secs(3_600))
    }

    /// `amount` units per day of 24 hours.
    pub fn per_day(name: impl Into<String>, amount: u64) -> Self {
        Self::per(name, amount, Duration::from_secs(86_400))
    }

    /// Sets the capacity of the bucket, which can be taken at once; by default the amount of one period.
    #[must_use]
    pub const fn burst(mut self, burst: u64) -> Self {
        self.burst = Some(burst);
        self
    }

    /// The name, checked or not.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Checks the limit and returns its rule.
    ///
    /// # Errors
    /// [`InvalidLimit`] with the limit, the number and its bound.
    pub fn check(&self) -> Result<Rule, InvalidLimit> {
        let name = LimitName::new(&self.name)?;
        let burst = self.burst.unwrap_or(self.amount);
        match Shape::new(self.amount, self.period, burst) {
            Ok(shape) => Ok(Rule::stored(name, shape)),
            Err(problem) => Err(InvalidLimit::Shape { name: self.name.clone(), problem }),
        }
    }
}

/// The error for an invalid limit.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum InvalidLimit {
    /// Its name is invalid.
    #[error(transparent)]
    Name(#[from] InvalidName),
    /// One of its numbers is outside its bound.
    #[error("the limit `{name}`: {problem}")]
    Shape {
        /// The limit.
        name: String,
        /// The number and its bound.
        problem: InvalidShape,
    },
    /// The text is not a limit.
    #[error("`{text}` is not a limit: {why}; write name:amount/period[:burst], such as tpm:100k/min:150k")]
    Text {
        /// The text.
        text: String,
        /// What is wrong with it.
        why: String,
    },
}

/// A checked limit: a name, and the shape of its bucket for each subject.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    name: LimitName,
    row: Arc<str>,
    shape: Shape<Stamp>,
}

impl Rule {
    /// A limit of a policy: one bucket per subject and name, whose shape follows the policy.
    pub fn stored(name: LimitName, shape: Shape<Stamp>) -> Self {
        Self { row: name.as_str().into(), name, shape }
    }

    /// The limit given with one call: a separate bucket per subject, name and shape.
    #[must_use]
    pub fn of_call(self) -> Self {
        let shape = &self.shape;
        let period = shape.period().as_micros();
        // `~` is not allowed in names, so that the row never collides with that of a stored limit.
        let row = format!("{}~{}/{period}/{}", self.name, shape.amount(), shape.burst()).into();
        Self { row, ..self }
    }

    /// The limit's name.
    pub const fn name(&self) -> &LimitName {
        &self.name
    }

    /// The name of the bucket within the subject: the limit's name, followed by the shape for a limit given
    /// with a call.
    pub fn row(&self) -> &str {
        &self.row
    }

    /// Whether it was given with a call.
    pub fn is_of_call(&self) -> bool {
        *self.row != *self.name.as_str()
    }

    /// The rate and burst of the bucket.
    pub const fn shape(&self) -> &Shape<Stamp> {
        &self.shape
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn burst_defaults_to_the_amount() {
        let rule = Limit::per_minute("tpm", 10_000).check().unwrap();
        assert_eq!((rule.shape().amount(), rule.shape().burst()), (10_000, 10_000));
        let rule = Limit::per_minute("tpm", 10_000).burst(15_000).check().unwrap();
        assert_eq!((rule.shape().period(), rule.shape().burst()), (Duration::from_secs(60), 15_000));
        let periods = [Limit::per_second("a", 1), Limit::per_hour("a", 1), Limit::per_day("a", 1)];
        let seconds = periods.map(|limit| limit.check().unwrap().shape().period().as_secs());
        assert_eq!(seconds, [1, 3_600, 86_400]);
    }

    #[test]
    fn invalid_limit_error_has_number_and_bound() {
        let table = [
            (Limit::per_minute("a b", 1), "the limit `a b` has ' ' at byte 1, which is not allowed"),
            (Limit::per_minute("x", 0), "the limit `x`: 0 units per period, outside 1..=1099511627776"),
            (Limit::per_minute("x", 5).burst(0), "the limit `x`: a burst of 0 units"),
            (
                Limit::per("x", 1, Duration::from_nanos(1_500)),
                "the limit `x`: a period of 1500ns, not a multiple",
            ),
        ];
        for (limit, sentence) in table {
            let error = limit.check().unwrap_err().to_string();
            assert!(error.starts_with(sentence), "{error}");
        }
    }

    #[test]
    fn call_limit_has_a_separate_row_per_shape() {
        let stored = Limit::per_minute("tpm", 100).check().unwrap();
        assert_eq!((stored.row(), stored.is_of_call()), ("tpm", false));
        let call = stored.of_call();
        assert_eq!((call.row(), call.name().as_str()), ("tpm~100/60000000/100", "tpm"));
        assert!(call.is_of_call());
    }
}
