//! Limits as text: `tpm:100k/min:150k` is 100,000 `tpm` per minute with a burst of 150,000.
//!
//! The format is `name:amount/period[:burst][,across=resources|entities|both][,debt=units]`. Amount, burst and
//! debt are whole numbers with an optional decimal suffix `k`, `M` or `G`: `1.5k` is 1,500. A period is a
//! [`Period`]: `min`, `day`, `30s`.

use super::{InvalidLimit, Limit, Rule};
use crate::duration::Period;
use crate::excerpt::excerpt;
use crate::limit::name::InvalidAcross;
use std::fmt;
use std::str::FromStr;

/// The options after the numbers.
const ACROSS: &str = "across";
const DEBT: &str = "debt";
/// Suffixes of numbers, the largest first.
const SUFFIXES: [(&str, u64); 3] = [("G", 1_000_000_000), ("M", 1_000_000), ("k", 1_000)];

impl FromStr for Limit {
    type Err = InvalidLimit;

    /// Parses `name:amount/period[:burst]`, optionally followed by `,across=resources|entities|both` and
    /// `,debt=units`.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tidegate_core::limit::name::Across;
    /// use tidegate_core::limit::rule::Limit;
    ///
    /// assert_eq!("rpm:60/m".parse(), Ok(Limit::per_minute("rpm", 60)));
    /// let total = Limit::per_day("usd", 500).across(Across::Resources).debt_max(100);
    /// assert_eq!("usd:500/day,across=resources,debt=100".parse(), Ok(total));
    /// assert_eq!("jobs:1.5k/30s:2k".parse(), Ok(Limit::per("jobs", 1_500, Duration::from_secs(30)).burst(2_000)));
    /// ```
    fn from_str(text: &str) -> Result<Self, InvalidLimit> {
        let limit = parse(text).map_err(|why| InvalidLimit::Text { text: excerpt(text), why })?;
        limit.check()?;
        Ok(limit)
    }
}

impl fmt::Display for Limit {
    /// Writes text that parses as the same limit, if the limit is valid.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}/{}", self.name, Number(self.amount), Period(self.period))?;
        if let Some(burst) = self.burst {
            write!(f, ":{}", Number(burst))?;
        }
        if let Some(across) = self.across {
            write!(f, ",{ACROSS}={across}")?;
        }
        match self.debt_max {
            Some(debt_max) => write!(f, ",{DEBT}={}", Number(debt_max)),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Rule {
    /// Writes the rule as its limit, without a burst or a bound of debt that is the default.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.to_limit().fmt(f)
    }
}

/// The limit, or why `text` is not one.
fn parse(text: &str) -> Result<Limit, String> {
    let mut options = text.split(',');
    let mut parts = options.next().unwrap_or_default().split(':');
    let name = parts.next().unwrap_or_default();
    let rate = parts.next().ok_or("there is no `:` between the name and the amount")?;
    let burst = parts.next();
    if let Some(extra) = parts.next() {
        return Err(format!("`:{}` is one part too many", excerpt(extra)));
    }
    let (amount, period) = rate.split_once('/').ok_or("there is no `/` between the amount and the period")?;
    if name.is_empty() {
        return Err("the name is empty".to_owned());
    }
    let amount = number("the amount", amount)?;
    let period = Period::parse(period).map_err(|error| format!("the period {error}"))?;
    let burst = burst.map(|burst| number("the burst", burst)).transpose()?;
    let mut limit = Limit { burst, ..Limit::per(name, amount, period) };
    for option in options {
        let is_again = match option.split_once('=') {
            Some((ACROSS, across)) => {
                let across = across.parse().map_err(|error: InvalidAcross| format!("`across`: {error}"))?;
                limit.across.replace(across).is_some()
            }
            Some((DEBT, units)) => limit.debt_max.replace(number("the debt", units)?).is_some(),
            _ => return Err(format!("`,{}` is neither `,across=` nor `,debt=`", excerpt(option))),
        };
        if is_again {
            return Err(format!("`,{}` is a second value", excerpt(option)));
        }
    }
    Ok(limit)
}

/// A whole number with an optional suffix.
pub(crate) fn number(what: &str, text: &str) -> Result<u64, String> {
    let (digits, factor) = SUFFIXES
        .iter()
        .find_map(|(suffix, factor)| Some((text.strip_suffix(suffix)?, *factor)))
        .unwrap_or((text, 1));
    let (whole, part) = digits.split_once('.').unwrap_or((digits, "0"));
    if !is_digits(whole) || !is_digits(part) {
        let shown = excerpt(text);
        return Err(format!(
            "{what} `{shown}` is not a number: expected digits, optionally followed by k, M or G"
        ));
    }
    // A suffix moves the point by at most nine digits: further digits are a fraction, or zeros.
    let part = part.trim_end_matches('0');
    let scale = u32::try_from(part.len()).ok().and_then(|digits| 10_u64.checked_pow(digits));
    let fraction = match scale {
        Some(scale) if factor.is_multiple_of(scale) => part.parse().unwrap_or(0) * (factor / scale),
        _ => return Err(format!("{what} `{}` is not a whole number", excerpt(text))),
    };
    let value = whole.parse::<u64>().ok().and_then(|whole| whole.checked_mul(factor)?.checked_add(fraction));
    value.ok_or_else(|| format!("{what} `{}` is more than {}", excerpt(text), u64::MAX))
}

fn is_digits(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|letter| letter.is_ascii_digit())
}

/// A number with the longest suffix that keeps it whole: `150k`.
pub(crate) struct Number(pub(crate) u64);

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let suffix = SUFFIXES.iter().find(|(_, factor)| self.0 > 0 && self.0.is_multiple_of(*factor));
        match suffix {
            Some((suffix, factor)) => write!(f, "{}{suffix}", self.0 / factor),
            None => write!(f, "{}", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;
    use crate::bucket::{AMOUNT_MAX, PERIOD_MAX};
    use crate::limit::name::Across;

    #[test]
    fn limit_text_is_parsed_and_displayed() {
        let seconds = |seconds| Duration::from_secs(seconds);
        let table = [
            ("tpm:100k/min:150k", Limit::per_minute("tpm", 100_000).burst(150_000), "tpm:100k/min:150k"),
            ("rpm:60/m", Limit::per_minute("rpm", 60), "rpm:60/min"),
            ("jobs:5/30s", Limit::per("jobs", 5, seconds(30)), "jobs:5/30s"),
            ("day:1M/day", Limit::per_day("day", 1_000_000), "day:1M/day"),
            (
                "a.b-c_d:1.5k/second:2.25k",
                Limit::per_second("a.b-c_d", 1_500).burst(2_250),
                "a.b-c_d:1500/s:2250",
            ),
            ("x:1G/hour", Limit::per_hour("x", 1_000_000_000), "x:1G/h"),
            ("x:1.000000001G/h", Limit::per_hour("x", 1_000_000_001), "x:1000000001/h"),
            ("x:7/250ms:007", Limit::per("x", 7, Duration::from_millis(250)).burst(7), "x:7/250ms:7"),
            ("x:1/1d", Limit::per_day("x", 1), "x:1/day"),
            ("x:1.0/90min", Limit::per("x", 1, seconds(5_400)), "x:1/90m"),
            ("x:1/1us", Limit::per("x", 1, Duration::from_micros(1)), "x:1/1us"),
            ("x:1/2000ns", Limit::per("x", 1, Duration::from_micros(2)), "x:1/2us"),
            (
                "tpm:100k/min:150k,across=entities,debt=1M",
                Limit::per_minute("tpm", 100_000).burst(150_000).across(Across::Entities).debt_max(1_000_000),
                "tpm:100k/min:150k,across=entities,debt=1M",
            ),
            (
                "usd:5/day,debt=0,across=both",
                Limit::per_day("usd", 5).across(Across::Both).debt_max(0),
                "usd:5/day,across=both,debt=0",
            ),
            (
                "usd:5/day,across=resources",
                Limit::per_day("usd", 5).across(Across::Resources),
                "usd:5/day,across=resources",
            ),
        ];
        for (text, limit, written) in table {
            assert_eq!(text.parse::<Limit>(), Ok(limit.clone()), "{text}");
            assert_eq!(limit.to_string(), written);
        }
        let rule = Limit::per_minute("tpm", 5_000).burst(5_000).check().unwrap();
        assert_eq!(rule.to_string(), "tpm:5k/min");
    }

    #[test]
    fn invalid_text_error_has_part_and_bound() {
        let table = [
            ("", "there is no `:` between the name and the amount"),
            ("tpm", "there is no `:`"),
            ("tpm:5", "there is no `/` between the amount and the period"),
            (":5/m", "the name is empty"),
            ("tpm:/m", "the amount `` is not a number"),
            ("tpm:-5/m", "the amount `-5` is not a number"),
            ("tpm:+5/m", "the amount `+5` is not a number"),
            ("tpm:NaN/m", "the amount `NaN` is not a number"),
            ("tpm:1e3/m", "the amount `1e3` is not a number"),
            ("tpm:.5k/m", "the amount `.5k` is not a number"),
            (
                "tpm:5K/m",
                "the amount `5K` is not a number: expected digits, optionally followed by k, M or G",
            ),
            ("tpm:٣/m", "the amount `٣` is not a number"),
            ("tpm:5.5/m", "the amount `5.5` is not a whole number"),
            ("tpm:1.0005k/m", "the amount `1.0005k` is not a whole number"),
            ("tpm:1.00000000000000000000000000000001G/m", "is not a whole number"),
            ("tpm:20000000000G/m", "the amount `20000000000G` is more than 18446744073709551615"),
            ("tpm:99999999999999999999999/m", "is more than 18446744073709551615"),
            ("tpm:0/m", "the limit `tpm`: 0 units per period, outside 1..=1099511627776"),
            ("tpm:2000G/m", "2000000000000 units per period, outside 1..=1099511627776"),
            ("tpm:5/", "the period `` is not a duration: it has no unit"),
            ("tpm:5/30", "the period `30` is not a duration: it has no unit"),
            ("tpm:5/weak", "the period `weak` is not a duration: its unit is not one of"),
            ("tpm:5/-1s", "the period `-1s` is not a duration"),
            ("tpm:5/1.5", "the period `1.5` is not a duration: it has no unit"),
            ("tpm:5/ms", "the period `ms` is not a duration: it has no number before its unit"),
            ("tpm:5/0s", "the limit `tpm`: a period of 0s, not a multiple of 1us within 1us..=366d"),
            ("tpm:5/500ns", "the limit `tpm`: a period of 500ns, not a multiple of 1us"),
            ("tpm:5/400d", "the limit `tpm`: a period of 400d, not a multiple of 1us within 1us..=366d"),
            ("tpm:5/999999999d", "the limit `tpm`: a period of 999999999d"),
            ("tpm:5/m:", "the burst `` is not a number"),
            ("tpm:5/m:0", "the limit `tpm`: a burst of 0 units"),
            ("tpm:5/m:6:7", "`:7` is one part too many"),
            ("t pm:5/m", "the limit `t pm` has ' ' at byte 1"),
            ("tpm:5/m/s", "the period `m/s` is not a duration"),
            ("tpm:5/m\n", "the period `m\\n` is not a duration"),
            ("tpm:5/m,", "`,` is neither `,across=` nor `,debt=`"),
            ("tpm:5/m,pool=x", "`,pool=x` is neither `,across=` nor `,debt=`"),
            ("tpm:5/m,across", "`,across` is neither"),
            ("tpm:5/m,across=all", "`across`: `all` is not one of `resources`, `entities` and `both`"),
            ("tpm:5/m,across=both,across=both", "`,across=both` is a second value"),
            ("tpm:5/m,debt=-1", "the debt `-1` is not a number"),
            ("tpm:5/m,debt=1,debt=2", "`,debt=2` is a second value"),
            ("tpm:5/day,debt=1G", "the limit `tpm`: a debt of 1000000000 units, more than 1826250"),
            ("tpm:5/m,debt=1:7", "the debt `1:7` is not a number"),
        ];
        for (text, sentence) in table {
            let error = text.parse::<Limit>().unwrap_err().to_string();
            assert!(error.contains(sentence), "{text}: {error}");
        }
        let error = "tpm".parse::<Limit>().unwrap_err().to_string();
        assert!(error.ends_with("write name:amount/period[:burst], such as tpm:100k/min:150k"), "{error}");
    }

    proptest! {
        #[test]
        fn every_limit_roundtrips_as_text(
            name in "[a-zA-Z0-9_.-]{1,64}",
            amount in prop_oneof![1..=AMOUNT_MAX, (1_u64..1_000).prop_map(|thousands| thousands * 1_000)],
            micros in prop_oneof![1..=3_600_000_000_u64, (1_u64..366).prop_map(|days| days * 86_400_000_000)],
            burst in prop::option::of(1_u64..1_000_000),
            across in prop::option::of(prop::sample::select(&Across::ALL[..])),
            debt_max in prop::option::of(0_u64..10_000_000),
        ) {
            prop_assume!(name != crate::limit::name::DEFAULT);
            let mut limit = Limit::per(name, amount, Duration::from_micros(micros).min(PERIOD_MAX));
            if let Some(burst) = burst {
                limit = limit.burst(burst);
            }
            limit.across = across;
            limit.debt_max = debt_max;
            prop_assume!(limit.check().is_ok());
            prop_assert_eq!(limit.to_string().parse(), Ok(limit.clone()));
            let rule = limit.check().expect("valid");
            prop_assert_eq!(rule.to_string().parse::<Limit>().expect("written").check(), Ok(rule));
        }

        #[test]
        fn arbitrary_text_does_not_panic(text in any::<String>(), parts in "[a-z]:[0-9.kMG]{0,30}/[0-9]{0,30}[a-zµ]{0,3}(:[0-9k]{0,5})?(,(across=(both|x)|debt=[0-9k]{0,30}|[a-z=,]{0,5})){0,3}") {
            let _ = text.parse::<Limit>();
            if let Ok(limit) = parts.parse::<Limit>() {
                prop_assert_eq!(limit.to_string().parse(), Ok(limit));
            }
        }
    }
}
