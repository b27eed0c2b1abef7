//! Limits as text: `tpm:100k/min:150k` is 100,000 a minute of `tpm`, and 150,000 at once.
//!
//! A limit is `name:amount/period[:burst]`. Amount and burst are whole numbers, in decimal thousands where `k`, `M`
//! or `G` is behind them: `1.5k` is 1,500. A period is a unit (`s`, `m`, `h`, `d`, or in longer words `sec`,
//! `second`, `min`, `minute`, `hour`, `day`), or a whole number and one of these (`30s`, `2h`) or of the
//! smaller `ms`, `us` and `ns`.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use super::{InvalidLimit, Limit, Rule};

/// Suffixes of numbers, the largest first.
const SUFFIXES: [(&str, u64); 3] = [("G", 1_000_000_000), ("M", 1_000_000), ("k", 1_000)];

/// Units of periods in nanoseconds, the longest first; of several words for one, that which is written.
const UNITS: [(&str, u64); 15] = [
    ("day", 86_400_000_000_000),
    ("d", 86_400_000_000_000),
    ("h", 3_600_000_000_000),
    ("hour", 3_600_000_000_000),
    ("min", 60_000_000_000),
    ("minute", 60_000_000_000),
    ("m", 60_000_000_000),
    ("s", 1_000_000_000),
    ("sec", 1_000_000_000),
    ("second", 1_000_000_000),
    ("ms", 1_000_000),
    ("us", 1_000),
    ("µs", 1_000),
    ("μs", 1_000),
    ("ns", 1),
];

/// Units that need a number: nobody means a limit per bare millisecond, and `m` is a minute.
const COUNTED: u64 = 1_000_000;

impl FromStr for Limit {
    type Err = InvalidLimit;

    /// Reads `name:amount/period[:burst]`.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tidegate_core::limit::rule::Limit;
    ///
    /// assert_eq!("rpm:60/m".parse(), Ok(Limit::per_minute("rpm", 60)));
    /// assert_eq!("jobs:1.5k/30s:2k".parse(), Ok(Limit::per("jobs", 1_500, Duration::from_secs(30)).burst(2_000)));
    /// ```
    fn from_str(text: &str) -> Result<Self, InvalidLimit> {
        let limit = parse(text).map_err(|why| InvalidLimit::Text { text: shown(text), why })?;
        limit.check()?;
        Ok(limit)
    }
}

impl fmt::Display for Limit {
    /// Writes what is read back as the same limit, if it is one that can be.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}/{}", self.name, Number(self.amount), Period(self.period))?;
        match self.burst {
            Some(burst) => write!(f, ":{}", Number(burst)),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Rule {
    /// As the limit it was made of is written; a burst that is the amount is left out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (amount, burst) = (self.shape.amount(), self.shape.burst());
        let burst = Some(burst).filter(|burst| *burst != amount);
        let name = self.name.as_str().to_owned();
        Limit { name, amount, period: self.shape.period(), burst }.fmt(f)
    }
}

/// The limit that `text` says, or why it says none.
fn parse(text: &str) -> Result<Limit, String> {
    let mut parts = text.split(':');
    let name = parts.next().unwrap_or_default();
    let rate = parts.next().ok_or("there is no `:` between the name and the amount")?;
    let burst = parts.next();
    if let Some(extra) = parts.next() {
        return Err(format!("`:{}` is one part too many", shown(extra)));
    }
    let (amount, period) = rate.split_once('/').ok_or("there is no `/` between the amount and the period")?;
    if name.is_empty() {
        return Err("the name is empty".to_owned());
    }
    let amount = number("the amount", amount)?;
    let period = duration(period)?;
    let burst = burst.map(|burst| number("the burst", burst)).transpose()?;
    Ok(Limit { name: name.to_owned(), amount, period, burst })
}

/// A whole number with or without a suffix.
fn number(what: &str, text: &str) -> Result<u64, String> {
    let (digits, factor) = SUFFIXES
        .iter()
        .find_map(|(suffix, factor)| Some((text.strip_suffix(suffix)?, *factor)))
        .unwrap_or((text, 1));
    let (whole, part) = digits.split_once('.').unwrap_or((digits, "0"));
    if !is_digits(whole) || !is_digits(part) {
        let shown = shown(text);
        return Err(format!("{what} `{shown}` is no number of digits, with k, M or G behind them or not"));
    }
    // A suffix moves the point by at most nine digits: what is behind those is a fraction, or nothing.
    let part = part.trim_end_matches('0');
    let scale = u32::try_from(part.len()).ok().and_then(|digits| 10_u64.checked_pow(digits));
    let fraction = match scale {
        Some(scale) if factor.is_multiple_of(scale) => part.parse().unwrap_or(0) * (factor / scale),
        _ => return Err(format!("{what} `{}` is no whole number", shown(text))),
    };
    let value = whole.parse::<u64>().ok().and_then(|whole| whole.checked_mul(factor)?.checked_add(fraction));
    value.ok_or_else(|| format!("{what} `{}` is more than {}", shown(text), u64::MAX))
}

/// A unit, or a whole number of one.
fn duration(text: &str) -> Result<Duration, String> {
    let start = text.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(text.len());
    let (count, unit) = text.split_at(start);
    let Some((_, nanos)) = UNITS.iter().find(|(name, _)| *name == unit) else {
        return Err(format!("the period `{}` has no unit that is one of s, m, h, d, ms, us", shown(text)));
    };
    if count.is_empty() && *nanos <= COUNTED {
        return Err(format!("the period `{}` has no number; write 1{unit}", shown(text)));
    }
    let count = if count.is_empty() { Some(1) } else { count.parse().ok() };
    let nanos = count.and_then(|count: u64| count.checked_mul(*nanos));
    nanos.map(Duration::from_nanos).ok_or_else(|| {
        format!("the period `{}` is more than {:?}", shown(text), Duration::from_nanos(u64::MAX))
    })
}

fn is_digits(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|letter| letter.is_ascii_digit())
}

/// Text from outside as it may stand in a message: without control characters, and not long.
fn shown(text: &str) -> String {
    const LETTERS_MAX: usize = 80;
    let mut letters = text.chars();
    let mut shown: String = letters.by_ref().take(LETTERS_MAX).flat_map(char::escape_debug).collect();
    if letters.next().is_some() {
        shown.push('…');
    }
    shown
}

struct Number(u64);

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let suffix = SUFFIXES.iter().find(|(_, factor)| self.0 > 0 && self.0.is_multiple_of(*factor));
        match suffix {
            Some((suffix, factor)) => write!(f, "{}{suffix}", self.0 / factor),
            None => write!(f, "{}", self.0),
        }
    }
}

struct Period(Duration);

impl fmt::Display for Period {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nanos = self.0.as_nanos();
        let fits = |per_unit: u64| nanos > 0 && nanos.is_multiple_of(per_unit.into());
        match UNITS.iter().find(|(_, per_unit)| fits(*per_unit)) {
            Some((unit, per_unit)) if nanos == u128::from(*per_unit) && *per_unit > COUNTED => {
                f.write_str(unit)
            }
            Some((unit, per_unit)) => {
                // A number goes with the one letter there is for a minute and a day.
                let short = if *per_unit > COUNTED { &unit[..1] } else { unit };
                write!(f, "{}{short}", nanos / u128::from(*per_unit))
            }
            None => f.write_str("0s"),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::bucket::{AMOUNT_MAX, PERIOD_MAX};

    #[test]
    fn a_limit_is_read_and_written() {
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
        ];
        for (text, limit, written) in table {
            assert_eq!(text.parse::<Limit>(), Ok(limit.clone()), "{text}");
            assert_eq!(limit.to_string(), written);
        }
        let rule = Limit::per_minute("tpm", 5_000).burst(5_000).check().unwrap();
        assert_eq!(rule.to_string(), "tpm:5k/min");
    }

    #[test]
    fn what_is_no_limit_is_refused_with_the_part_and_the_bound() {
        let table = [
            ("", "there is no `:` between the name and the amount"),
            ("tpm", "there is no `:`"),
            ("tpm:5", "there is no `/` between the amount and the period"),
            (":5/m", "the name is empty"),
            ("tpm:/m", "the amount `` is no number"),
            ("tpm:-5/m", "the amount `-5` is no number"),
            ("tpm:+5/m", "the amount `+5` is no number"),
            ("tpm:NaN/m", "the amount `NaN` is no number"),
            ("tpm:1e3/m", "the amount `1e3` is no number"),
            ("tpm:.5k/m", "the amount `.5k` is no number"),
            ("tpm:5K/m", "the amount `5K` is no number of digits, with k, M or G behind them or not"),
            ("tpm:٣/m", "the amount `٣` is no number"),
            ("tpm:5.5/m", "the amount `5.5` is no whole number"),
            ("tpm:1.0005k/m", "the amount `1.0005k` is no whole number"),
            ("tpm:1.00000000000000000000000000000001G/m", "is no whole number"),
            ("tpm:20000000000G/m", "the amount `20000000000G` is more than 18446744073709551615"),
            ("tpm:99999999999999999999999/m", "is more than 18446744073709551615"),
            ("tpm:0/m", "the limit `tpm`: 0 units per period, outside 1..=1099511627776"),
            ("tpm:2000G/m", "2000000000000 units per period, outside 1..=1099511627776"),
            ("tpm:5/", "the period `` has no unit that is one of s, m, h, d, ms, us"),
            ("tpm:5/30", "the period `30` has no unit"),
            ("tpm:5/week", "the period `week` has no unit"),
            ("tpm:5/-1s", "the period `-1s` has no unit"),
            ("tpm:5/1.5s", "the period `1.5s` has no unit"),
            ("tpm:5/ms", "the period `ms` has no number; write 1ms"),
            ("tpm:5/0s", "the limit `tpm`: a period of 0ns, no multiple of 1µs"),
            ("tpm:5/500ns", "the limit `tpm`: a period of 500ns, no multiple of 1µs"),
            ("tpm:5/400d", "the limit `tpm`: a period of 34560000s"),
            ("tpm:5/999999999d", "the period `999999999d` is more than 18446744073.709551615s"),
            ("tpm:5/m:", "the burst `` is no number"),
            ("tpm:5/m:0", "the limit `tpm`: a burst of 0 units"),
            ("tpm:5/m:6:7", "`:7` is one part too many"),
            ("t pm:5/m", "the limit `t pm` holds ' ' at byte 1"),
            ("tpm:5/m/s", "the period `m/s` has no unit"),
            ("tpm:5/m\n", "the period `m\\n` has no unit"),
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
        fn every_limit_is_written_and_read_back(
            name in "[a-zA-Z0-9_.-]{1,64}",
            amount in prop_oneof![1..=AMOUNT_MAX, (1_u64..1_000).prop_map(|thousands| thousands * 1_000)],
            micros in prop_oneof![1..=3_600_000_000_u64, (1_u64..366).prop_map(|days| days * 86_400_000_000)],
            burst in prop::option::of(1_u64..1_000_000),
        ) {
            prop_assume!(name != crate::limit::name::DEFAULT);
            let mut limit = Limit::per(name, amount, Duration::from_micros(micros).min(PERIOD_MAX));
            if let Some(burst) = burst {
                limit = limit.burst(burst);
            }
            prop_assume!(limit.check().is_ok());
            prop_assert_eq!(limit.to_string().parse(), Ok(limit.clone()));
            let rule = limit.check().expect("valid");
            prop_assert_eq!(rule.to_string().parse::<Limit>().expect("written").check(), Ok(rule));
        }

        #[test]
        fn no_text_makes_it_panic(text in any::<String>(), parts in "[a-z]:[0-9.kMG]{0,30}/[0-9]{0,30}[a-zµ]{0,3}(:[0-9k]{0,5})?") {
            let _ = text.parse::<Limit>();
            if let Ok(limit) = parts.parse::<Limit>() {
                prop_assert_eq!(limit.to_string().parse(), Ok(limit));
            }
        }
    }
}
