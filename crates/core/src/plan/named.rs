//! Named limits: further rates and budgets of one throttle, each with a name.
//!
//! Providers limit requests per minute and per day, and input apart from output tokens. A rate counts requests; a
//! budget counts one kind of token. All of them must admit a request.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use super::check::{Problems, SPAN_MAX, UNITS_MAX, out_of_bounds};
use super::{Budget, Draft, Oversize, Rate};
use crate::bucket::Shape;
use crate::duration::{Exact, Period};
use crate::excerpt::excerpt;
use crate::feedback::headers::Dimension;
use crate::limit::rule::{Number, number};
use crate::verdict::GateName;

/// The most named limits of a throttle: every admission asks each of them.
pub const NAMED_MAX: usize = 8;

/// Kinds of tokens that a budget can count, by their names in texts.
const KINDS: [(&str, Dimension); 3] = [
    ("tokens", Dimension::Tokens),
    ("input_tokens", Dimension::InputTokens),
    ("output_tokens", Dimension::OutputTokens),
];

/// A rate or a budget with a name of its own.
///
/// ```
/// use std::time::Duration;
/// use tidegate_core::plan::{Budget, Named, Rate};
///
/// assert_eq!("rpd:10k/day".parse(), Ok(Named::new("rpd", Rate::per_day(10_000))));
/// let input = Budget::input_tokens(40_000, Duration::from_secs(60));
/// assert_eq!("itpm:40k/min:input_tokens".parse(), Ok(Named::new("itpm", input)));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Named<L> {
    /// The name: 1 to 23 letters, digits, `_`, `-` and `.`.
    pub name: String,
    /// The rate or budget.
    pub limit: L,
}

impl<L> Named<L> {
    /// `limit`, named `name`.
    pub fn new(name: impl Into<String>, limit: L) -> Self {
        Self { name: name.into(), limit }
    }

    /// Adds `limit`, or replaces the one of this name.
    fn put(all: &mut Vec<Self>, name: impl Into<String>, limit: L) {
        let named = Self::new(name, limit);
        match all.iter_mut().find(|other| other.name == named.name) {
            Some(other) => *other = named,
            None => all.push(named),
        }
    }
}

impl Draft {
    /// Adds a rate with a name, or replaces the one of this name.
    ///
    /// ```
    /// use tidegate_core::plan::{Draft, Rate};
    ///
    /// let draft = Draft::default().rate_named("rpm", Rate::per_minute(500)).rate_named("rpd", Rate::per_day(10_000));
    /// assert!(draft.check().is_ok());
    /// ```
    #[must_use]
    pub fn rate_named(mut self, name: impl Into<String>, rate: Rate) -> Self {
        Named::put(&mut self.rates, name, rate);
        self
    }

    /// Adds a budget with a name, or replaces the one of this name.
    #[must_use]
    pub fn budget_named(mut self, name: impl Into<String>, budget: Budget) -> Self {
        Named::put(&mut self.budgets, name, budget);
        self
    }
}

/// The checked named limits of a plan.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct NamedPlan {
    pub(crate) rates: Vec<(GateName, Shape)>,
    pub(crate) budgets: Vec<(GateName, Budget)>,
}

impl Problems {
    /// Checks the named limits; `None` if there are none.
    pub(super) fn named(&mut self, draft: &Draft) -> Option<Box<NamedPlan>> {
        let count = draft.rates.len() + draft.budgets.len();
        if count > NAMED_MAX {
            let field = if draft.rates.len() > NAMED_MAX { "rates" } else { "budgets" };
            let bound = format!("at most {NAMED_MAX} in all, with the named rates and budgets together");
            self.add(field, &format!("one of {count} named limits"), &bound);
        }
        if let Some(budget) = draft.budget
            && budget.counts != Dimension::Tokens
        {
            let bound = "`tokens`, because a budget of one kind of token needs a name: `budgets`";
            self.add("budget.counts", &format!("`{}`", kind(budget.counts)), bound);
        }
        let mut plan = NamedPlan { rates: Vec::new(), budgets: Vec::new() };
        for named in &draft.rates {
            let name = self.gate_name("rates", &named.name, draft);
            let Rate { amount, period, burst } = named.limit;
            match Shape::new(amount, period, burst).map_err(out_of_bounds) {
                Ok(shape) => plan.rates.extend(name.map(|name| (name, shape))),
                Err((part, _, bound)) => {
                    self.add("rates", &format!("`{named}`"), &format!("a rate whose {part} is {bound}"));
                }
            }
        }
        for named in &draft.budgets {
            let name = self.gate_name("budgets", &named.name, draft);
            let Budget { tokens, window, .. } = named.limit;
            let bound = if !(1..=UNITS_MAX).contains(&tokens) {
                Some(format!("a budget whose tokens are from 1 to {UNITS_MAX}"))
            } else if window.is_zero() || window > SPAN_MAX {
                Some(format!("a budget whose window is from 1ns to {}", Exact(SPAN_MAX)))
            } else {
                None
            };
            if let Some(bound) = bound {
                self.add("budgets", &format!("`{named}`"), &bound);
            }
            plan.budgets.extend(name.map(|name| (name, named.limit)));
        }
        (count > 0).then(|| Box::new(plan))
    }

    fn gate_name(&mut self, field: &'static str, name: &str, draft: &Draft) -> Option<GateName> {
        let names = || draft.rates.iter().map(|named| &named.name);
        let same =
            names().chain(draft.budgets.iter().map(|named| &named.name)).filter(|other| *other == name);
        if same.count() > 1 {
            self.add(field, &format!("`{}` twice", excerpt(name)), "limits with different names");
            return None;
        }
        let checked = GateName::new(name);
        if checked.is_none() {
            let bound = format!("named by 1 to {} letters, digits, `_`, `-` and `.`", GateName::MAX);
            self.add(field, &format!("`{}`", excerpt(name)), &bound);
        }
        checked
    }
}

/// The error for a text that is not a named limit.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("`{text}` is not a named limit: {why}")]
pub struct InvalidNamed {
    text: String,
    why: String,
}

impl InvalidNamed {
    /// What is wrong with the text.
    pub fn why(&self) -> &str {
        &self.why
    }
}

impl FromStr for Named<Rate> {
    type Err = InvalidNamed;

    /// Parses and checks `name:amount/period[:burst]`, such as `rpd:10k/day`.
    fn from_str(text: &str) -> Result<Self, InvalidNamed> {
        let read = || {
            let (name, amount, period, rest) = parts(text)?;
            let rate = Rate::new(amount, period);
            let rate = match rest.as_slice() {
                [] => rate,
                [burst] => rate.burst(number("the burst", burst)?),
                [_, extra, ..] => return Err(format!("`:{}` is one part too many", excerpt(extra))),
            };
            Draft::default().rate_named(name, rate).check().map_err(|invalid| invalid.to_string())?;
            Ok(Self::new(name, rate))
        };
        read().map_err(|why| InvalidNamed { text: excerpt(text), why })
    }
}

impl FromStr for Named<Budget> {
    type Err = InvalidNamed;

    /// Parses and checks `name:tokens/window[:kind][:alone]`, such as `itpm:40k/min:input_tokens`.
    fn from_str(text: &str) -> Result<Self, InvalidNamed> {
        let read = || {
            let (name, tokens, window, rest) = parts(text)?;
            let mut budget = Budget::tokens(tokens, window);
            for word in rest {
                match KINDS.iter().find(|(name, _)| *name == word) {
                    Some((_, counts)) => budget.counts = *counts,
                    None if word == "alone" => budget.oversize = Oversize::Alone,
                    None => {
                        let words = "tokens, input_tokens, output_tokens and alone";
                        return Err(format!("`{}` is none of {words}", excerpt(word)));
                    }
                }
            }
            Draft::default().budget_named(name, budget).check().map_err(|invalid| invalid.to_string())?;
            Ok(Self::new(name, budget))
        };
        read().map_err(|why| InvalidNamed { text: excerpt(text), why })
    }
}

/// The name, the amount, the period, and the parts behind them.
type Parts<'a> = (&'a str, u64, std::time::Duration, Vec<&'a str>);

fn parts(text: &str) -> Result<Parts<'_>, String> {
    let mut parts = text.split(':').map(str::trim);
    let name = parts.next().unwrap_or_default();
    let limit = parts.next().ok_or("there is no `:` between the name and the amount")?;
    let (amount, period) =
        limit.split_once('/').ok_or("there is no `/` between the amount and the period")?;
    let period = Period::parse(period).map_err(|error| format!("the period {error}"))?;
    Ok((name, number("the amount", amount)?, period, parts.collect()))
}

/// Text that parses as the same rate.
impl fmt::Display for Named<Rate> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Rate { amount, period, burst } = self.limit;
        write!(f, "{}:{}/{}", self.name, Number(amount), Period(period))?;
        if burst == amount { Ok(()) } else { write!(f, ":{}", Number(burst)) }
    }
}

/// Text that parses as the same budget.
impl fmt::Display for Named<Budget> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Budget { tokens, window, oversize, counts } = self.limit;
        write!(f, "{}:{}/{}", self.name, Number(tokens), Period(window))?;
        if counts != Dimension::Tokens {
            write!(f, ":{}", kind(counts))?;
        }
        if oversize == Oversize::Alone { f.write_str(":alone") } else { Ok(()) }
    }
}

fn kind(counts: Dimension) -> &'static str {
    KINDS.iter().find(|(_, kind)| *kind == counts).map_or("other", |(name, _)| name)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    #[test]
    fn texts_are_read_back() {
        for text in ["rpm:500/min", "rpd:10k/day:200", "x:3/7s:1M"] {
            assert_eq!(text.parse::<Named<Rate>>().map(|rate| rate.to_string()).as_deref(), Ok(text));
        }
        for text in ["tpm:90k/min", "itpm:40k/min:input_tokens", "otpd:1M/day:output_tokens:alone"] {
            assert_eq!(text.parse::<Named<Budget>>().map(|budget| budget.to_string()).as_deref(), Ok(text));
        }
    }

    #[test]
    fn other_texts_are_refused_with_a_reason() {
        let rate = |text: &str| text.parse::<Named<Rate>>().unwrap_err().to_string();
        assert!(rate("rpm").ends_with("there is no `:` between the name and the amount"));
        assert!(rate("rpm:5").ends_with("there is no `/` between the amount and the period"));
        assert!(rate("rpm:5/min:6:7").ends_with("`:7` is one part too many"));
        assert!(
            rate("a b:5/min").ends_with(
                "`rates` is `a b`, and must be named by 1 to 23 letters, digits, `_`, `-` and `.`"
            )
        );
        let budget = "itpm:5/min:input".parse::<Named<Budget>>().unwrap_err().to_string();
        assert!(
            budget.ends_with("`input` is none of tokens, input_tokens, output_tokens and alone"),
            "{budget}"
        );
    }

    #[test]
    fn bad_named_limits_are_problems_with_their_names() {
        let rate = Rate::per_minute(5);
        let many = (0..9).fold(Draft::default(), |draft, index| draft.rate_named(format!("r{index}"), rate));
        let input = Budget::input_tokens(5, MINUTE);
        let twice = Draft::default().rate_named("x", rate).budget_named("x", input);
        let table = [
            (
                Draft::default().rate_named("a b", rate),
                "`rates` is `a b`, and must be named by 1 to 23 letters",
            ),
            (Draft::default().rate_named("", rate), "`rates` is ``, and must be named by 1 to 23"),
            (Draft::default().rate_named("x".repeat(24), rate), "`rates` is `xxxxxxxxxxxxxxxxxxxxxxxx`"),
            (
                Draft::default().rate_named("rpd", Rate::per_day(0)),
                "`rates` is `rpd:0/day`, and must be a rate whose amount is from 1 to 1099511627776",
            ),
            (
                Draft::default().budget_named("tpm", Budget::tokens(0, MINUTE)),
                "`budgets` is `tpm:0/min`, and must be a budget whose tokens are from 1 to 9007199254740992",
            ),
            (
                Draft::default().budget_named("tpm", Budget::tokens(1, Duration::ZERO)),
                "`budgets` is `tpm:1/0s`, and must be a budget whose window is from 1ns to 366d",
            ),
            (twice, "`rates` is `x` twice, and must be limits with different names; `budgets` is `x` twice"),
            (many, "`rates` is one of 9 named limits, and must be at most 8 in all"),
            (
                Draft { budget: Some(input), ..Draft::default() },
                "`budget.counts` is `input_tokens`, and must be `tokens`, because a budget of one kind",
            ),
        ];
        for (draft, sentence) in table {
            let error = draft.check().unwrap_err().to_string();
            assert!(error.starts_with(sentence), "{error}");
        }
    }
}
