//! Limits as they are written, and as checked rules.
//!
//! [`Limit`] is unchecked: any name, any numbers. [`Limit::check`] turns it into a [`Rule`], whose name is
//! valid and whose shape can be counted exactly.

mod text;

pub(crate) use text::{Number, number};

use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;

use crate::bucket::{AMOUNT_MAX, InvalidShape, Shape};
use crate::limit::name::{Across, InvalidName, LimitName};
use crate::time::Stamp;

/// The debt of a limit is bounded by its burst times this, unless it has a bound of its own.
const DEBT_FACTOR: u64 = 10;
/// The longest time in which a debt is paid: a thousand years.
pub(crate) const DEBT_TIME_MAX: Duration = Duration::from_secs(365_250 * 86_400);

/// A named limit: an amount of units per period, and at most `burst` at once.
///
/// It counts each entity's use of each resource in a bucket of its own, unless it is [pooled](Self::across).
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
    across: Option<Across>,
    debt_max: Option<u64>,
}

impl Limit {
    /// `amount` units per `period`.
    pub fn per(name: impl Into<String>, amount: u64, period: Duration) -> Self {
        Self { name: name.into(), amount, period, burst: None, across: None, debt_max: None }
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

    /// Counts all of these subjects in one bucket.
    #[must_use]
    pub const fn across(mut self, across: Across) -> Self {
        self.across = Some(across);
        self
    }

    /// Sets the debt at which settling and adjusting stop taking units; by default ten times the burst. A
    /// daily limit whose burst is a day's amount is then blocked for at most ten days.
    #[must_use]
    pub const fn debt_max(mut self, debt_max: u64) -> Self {
        self.debt_max = Some(debt_max);
        self
    }

    /// The name, checked or not.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The name, and which subjects share the bucket: unique within a policy.
    pub fn key(&self) -> (&str, Option<Across>) {
        (&self.name, self.across)
    }

    /// Checks the limit and returns its rule.
    ///
    /// # Errors
    /// [`InvalidLimit`] with the limit, the number and its bound.
    pub fn check(&self) -> Result<Rule, InvalidLimit> {
        let name = LimitName::new(&self.name)?;
        let burst = self.burst.unwrap_or(self.amount);
        let shape = Shape::new(self.amount, self.period, burst)
            .map_err(|problem| InvalidLimit::Shape { name: self.name.clone(), problem })?;
        let rule = Rule { across: self.across, ..Rule::stored(name, shape) };
        let Some(debt_max) = self.debt_max else { return Ok(rule) };
        let max = refilled_in(DEBT_TIME_MAX, &shape);
        if debt_max > max {
            return Err(InvalidLimit::Debt { name: self.name.clone(), debt_max, max });
        }
        Ok(Rule { debt_max, ..rule })
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
    /// Its debt would take more than a thousand years to pay.
    #[error(
        "the limit `{name}`: a debt of {debt_max} units, more than {max}, which refill in a thousand years"
    )]
    Debt {
        /// The limit.
        name: String,
        /// The bound of its debt.
        debt_max: u64,
        /// The largest bound.
        max: u64,
    },
    /// It is pooled and given with one call.
    #[error("the limit `{name}` is given with a call and cannot count across={across}: put it in a policy")]
    PoolOfCall {
        /// The limit.
        name: String,
        /// How it is pooled.
        across: Across,
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

/// Units that refill in this time.
pub(crate) fn refilled_in(time: Duration, shape: &Shape<Stamp>) -> u64 {
    let units = time.as_micros() * u128::from(shape.amount()) / shape.period().as_micros();
    u64::try_from(units).unwrap_or(u64::MAX)
}

/// A checked limit: a name, the shape of its bucket, which subjects share it, and how far it may be in debt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    name: LimitName,
    row: Arc<str>,
    shape: Shape<Stamp>,
    across: Option<Across>,
    debt_max: u64,
}

impl Rule {
    /// A limit of a policy: one bucket per subject and name, whose shape follows the policy.
    pub fn stored(name: LimitName, shape: Shape<Stamp>) -> Self {
        let debt_max = shape.burst().saturating_mul(DEBT_FACTOR);
        Self { row: name.as_str().into(), name, shape, across: None, debt_max }
    }

    /// The limit with each number of its amount and burst replaced by `map`.
    ///
    /// # Errors
    /// [`InvalidShape`] if the mapped numbers are out of bounds.
    pub fn map_units(&self, map: impl Fn(u64) -> u64) -> Result<Self, InvalidShape> {
        let shape = Shape::new(map(self.shape.amount()), self.shape.period(), map(self.shape.burst()))?;
        Ok(Self { shape, debt_max: map(self.debt_max), ..self.clone() })
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

    /// Which subjects share its bucket; `None` if each subject has one of its own.
    pub const fn across(&self) -> Option<Across> {
        self.across
    }

    /// Whether both count in the same bucket of a subject.
    pub fn counts_like(&self, other: &Self) -> bool {
        self.name == other.name && self.across == other.across
    }

    /// The debt at which settling and adjusting stop taking units.
    pub const fn debt_max(&self) -> u64 {
        self.debt_max
    }

    /// The limit that the rule was checked from, without a burst or a bound of debt that is the default.
    pub fn to_limit(&self) -> Limit {
        let (amount, burst) = (self.shape.amount(), self.shape.burst());
        Limit {
            name: self.name.as_str().to_owned(),
            amount,
            period: self.shape.period(),
            burst: Some(burst).filter(|burst| *burst != amount),
            across: self.across,
            debt_max: Some(self.debt_max).filter(|debt_max| *debt_max != burst.saturating_mul(DEBT_FACTOR)),
        }
    }

    /// Whether it was given with a call.
    pub fn is_of_call(&self) -> bool {
        *self.row != *self.name.as_str()
    }

    /// Whether it limits nothing: its draws are only recorded as usage.
    pub fn only_records(&self) -> bool {
        self.is_of_call() && self.shape.amount() == AMOUNT_MAX && self.shape.burst() == AMOUNT_MAX
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
    fn debt_is_bounded_by_ten_bursts_unless_set() {
        let daily = Limit::per_day("usd", 100);
        assert_eq!(daily.check().unwrap().debt_max(), 1_000);
        assert_eq!(daily.clone().burst(7).check().unwrap().debt_max(), 70);
        assert_eq!(daily.clone().debt_max(0).check().unwrap().debt_max(), 0);
        // A thousand years are 365,250 days.
        assert!(daily.clone().debt_max(36_525_000).check().is_ok());
        let error = daily.debt_max(36_525_001).check().unwrap_err().to_string();
        assert_eq!(
            error,
            "the limit `usd`: a debt of 36525001 units, more than 36525000, which refill in a thousand years"
        );
    }

    #[test]
    fn rule_becomes_the_limit_it_was_checked_from() {
        let plain = Limit::per_day("usd", 100);
        let table = [
            (plain.clone(), plain.clone()),
            (plain.clone().burst(100).debt_max(1_000), plain.clone()),
            (plain.clone().across(Across::Both).debt_max(5), plain.clone().across(Across::Both).debt_max(5)),
            (plain.clone().burst(7), plain.burst(7)),
        ];
        for (written, expected) in table {
            assert_eq!(written.check().unwrap().to_limit(), expected);
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
