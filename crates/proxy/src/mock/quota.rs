//! How a provider counts: buckets of requests and tokens, drawn when a request starts, while it produces output,
//! and corrected when it ends.

use std::time::Duration;

use tidegate_core::bucket::Bucket;
use tidegate_core::calendar::{Date, date, days};
use tidegate_core::cost::Cost;
use tidegate_core::limit::rule::{Limit, Rule};
use tidegate_core::time::Stamp;

use crate::profile::{Format, Profile, Reserve, Tokens};

const DAY: Duration = Duration::from_hours(24);

/// What a limit counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Counted {
    Requests,
    Tokens,
    Input,
    Output,
}

/// The limits of the pretended account.
#[derive(Debug)]
pub(crate) struct Quotas(Vec<Quota>);

#[derive(Debug)]
struct Quota {
    counted: Counted,
    rule: Rule,
    bucket: Bucket<Stamp>,
    /// Whether it is full again at midnight, and not before.
    is_daily: bool,
    /// The time up to which it is refilled.
    at: Stamp,
}

/// Why a request is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Exceeded {
    pub(crate) counted: Counted,
    pub(crate) limit: u64,
    pub(crate) used: u64,
    pub(crate) requested: u64,
    pub(crate) period: Duration,
    /// `None` if the request exceeds the whole limit.
    pub(crate) retry_after: Option<Duration>,
}

/// The level of a limit, as headers report it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Level {
    pub(crate) counted: Counted,
    pub(crate) limit: u64,
    pub(crate) remaining: u64,
    pub(crate) full_after: Duration,
}

impl Counted {
    /// What a limit of this name counts. A suffix after `-` distinguishes several limits of one kind.
    fn of(name: &str) -> Option<Self> {
        match name.split('-').next()? {
            "requests" => Some(Self::Requests),
            "tokens" => Some(Self::Tokens),
            "input_tokens" => Some(Self::Input),
            "output_tokens" => Some(Self::Output),
            _ => None,
        }
    }
}

impl Quotas {
    /// Full buckets of these limits, as the provider of this profile has them. `Err` is the name of a limit that counts nothing known, or the problem of
    /// an invalid one.
    pub(crate) fn new(profile: &Profile, limits: &[Limit]) -> Result<Self, String> {
        let quota = |limit: &Limit| {
            let name = limit.name();
            let counted = Counted::of(name).ok_or_else(|| {
                format!("limit is `{name}`, and must be requests, tokens, input_tokens or output_tokens")
            })?;
            let rule = limit.check().map_err(|error| error.to_string())?;
            let is_daily = profile.format == Format::Google && rule.shape().period() == DAY;
            Ok(Quota { counted, rule, bucket: Bucket::full(), is_daily, at: Stamp::ZERO })
        };
        limits.iter().map(quota).collect::<Result<_, String>>().map(Self)
    }

    /// Counts a request at its start, all or nothing. Returns the reserved tokens.
    pub(crate) fn start(&mut self, profile: &Profile, tokens: Tokens, now: Stamp) -> Result<u64, Exceeded> {
        // A provider does not know the output in advance.
        let reserved = profile.reserved(Tokens { output: 0, ..tokens }).total_tokens();
        let units = |counted| match counted {
            Counted::Tokens => reserved,
            Counted::Input => tokens.input,
            // Output is counted as it is produced, if any is available.
            Counted::Requests | Counted::Output => 1,
        };
        self.advance(now);
        let exceeded = self.0.iter().find_map(|quota| quota.exceeded(units(quota.counted), now));
        for quota in &mut self.0 {
            let at = quota.at;
            let is_request = quota.counted == Counted::Requests;
            if quota.counted != Counted::Output
                && (exceeded.is_none() || (is_request && profile.refused_counts))
            {
                let level = u64::try_from(quota.bucket.level(quota.rule.shape(), at)).unwrap_or(0);
                let most = if exceeded.is_none() { u64::MAX } else { level };
                quota.bucket.debit(quota.rule.shape(), units(quota.counted).min(most), at);
            }
        }
        exceeded.map_or(Ok(reserved), Err)
    }

    /// Counts output that was produced. Some providers do so only at the end.
    pub(crate) fn produce(&mut self, output: u64, now: Stamp) {
        self.advance(now);
        for Quota { counted, rule, bucket, at, .. } in &mut self.0 {
            if matches!(counted, Counted::Output | Counted::Tokens) {
                bucket.debit(rule.shape(), output, *at);
            }
        }
    }

    /// Corrects the counts when a request has ended. `tokens` are those that were not counted as they were produced.
    pub(crate) fn end(&mut self, profile: &Profile, reserved: u64, tokens: Tokens, now: Stamp) {
        self.advance(now);
        let reserved_cost = Cost::request().tokens(reserved);
        let spent = profile.spent(reserved_cost, tokens.input, tokens.output).total_tokens();
        for Quota { counted, rule, bucket, at, .. } in &mut self.0 {
            match counted {
                Counted::Output if profile.reserve != Reserve::Input => {
                    bucket.debit(rule.shape(), tokens.output, *at);
                }
                Counted::Tokens if spent > reserved => bucket.debit(rule.shape(), spent - reserved, *at),
                Counted::Tokens => bucket.credit(rule.shape(), reserved - spent),
                _ => {}
            }
        }
    }

    /// Refills the buckets up to now.
    fn advance(&mut self, now: Stamp) {
        for quota in &mut self.0 {
            let at = if quota.is_daily { pacific_day(now).0 } else { now };
            if quota.is_daily && at > quota.at {
                quota.bucket = Bucket::full();
            }
            quota.at = quota.at.max(at);
        }
    }

    /// The levels that headers report: the first limit of each kind.
    pub(crate) fn levels(&self, now: Stamp) -> Vec<Level> {
        let mut levels: Vec<Level> = Vec::new();
        for Quota { counted, rule, bucket, .. } in &self.0 {
            if levels.iter().all(|level| level.counted != *counted) {
                let shape = rule.shape();
                let full_at = bucket.free_at(shape, shape.burst(), now);
                levels.push(Level {
                    counted: *counted,
                    limit: shape.burst(),
                    remaining: u64::try_from(bucket.level(shape, now)).unwrap_or(0),
                    full_after: full_at.since(now),
                });
            }
        }
        levels
    }
}

impl Quota {
    fn exceeded(&self, requested: u64, now: Stamp) -> Option<Exceeded> {
        let shape = self.rule.shape();
        let ready_at = self.bucket.ready_at(shape, requested, self.at);
        if ready_at <= self.at {
            return None;
        }
        let ready_at = if self.is_daily { pacific_day(now).1 } else { ready_at };
        let level = u64::try_from(self.bucket.level(shape, self.at)).unwrap_or(0);
        Some(Exceeded {
            counted: self.counted,
            limit: shape.burst(),
            used: shape.burst().saturating_sub(level),
            requested,
            period: shape.period(),
            retry_after: (requested <= shape.burst()).then(|| ready_at.since(now)),
        })
    }
}

/// The last midnight in the Pacific time of America, and the next one.
fn pacific_day(now: Stamp) -> (Stamp, Stamp) {
    const HOUR: u64 = 3_600;
    let seconds = now.as_micros() / 1_000_000;
    // The local time is eight hours behind UTC, or seven from the second Sunday of March until the first one of
    // November. Clocks are set at two in the morning, so a midnight has the offset of the day that it ends.
    let midnight = |day: u64| {
        let Date { year, .. } = date(day);
        let sunday = |month, week: u64| {
            let first = days(Date { year, month, day: 1 }).unwrap_or(0);
            // 1970-01-01 was a Thursday.
            first + (10 - first % 7) % 7 + 7 * (week - 1)
        };
        let is_summer = sunday(3, 2) < day && day <= sunday(11, 1);
        Stamp::from_secs(day * DAY.as_secs() + if is_summer { 7 * HOUR } else { 8 * HOUR })
    };
    let today = seconds / DAY.as_secs();
    let last = if midnight(today) <= now { today } else { today.saturating_sub(1) };
    (midnight(last), midnight(last + 1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::Profiles;

    const NOW: Stamp = Stamp::from_secs(1_800_000_000);

    fn quotas(profile: &Profile, limits: &[&str]) -> Quotas {
        let limits: Vec<Limit> = limits.iter().map(|text| text.parse().unwrap()).collect();
        Quotas::new(profile, &limits).unwrap()
    }

    fn remaining(quotas: &Quotas) -> Vec<u64> {
        quotas.levels(NOW).iter().map(|level| level.remaining).collect()
    }

    /// The same call, counted by each provider's rules at its start and at its end.
    #[test]
    fn each_provider_counts_by_its_rules() {
        let tokens = Tokens { input: 100, output: 40, output_max: Some(500), choices: 1 };
        let table = [
            ("openai", [9, 500, 900, 1_000], [9, 500, 900, 960]),
            ("azure", [9, 400, 900, 1_000], [9, 860, 900, 960]),
            ("anthropic", [9, 900, 900, 1_000], [9, 860, 900, 960]),
            ("gemini", [9, 900, 900, 1_000], [9, 900, 900, 1_000]),
            ("generic", [9, 1_000, 900, 1_000], [9, 1_000, 900, 960]),
        ];
        for (name, at_start, at_end) in table {
            let profiles = Profiles::built_in();
            let profile = profiles.get(name).unwrap();
            let limits =
                ["requests:10/day", "tokens:1000/day", "input_tokens:1000/day", "output_tokens:1000/day"];
            let mut quotas = quotas(profile, &limits);
            let reserved = quotas.start(profile, tokens, NOW).unwrap();
            assert_eq!(remaining(&quotas), at_start, "{name} at the start");
            quotas.end(profile, reserved, tokens, NOW);
            assert_eq!(remaining(&quotas), at_end, "{name} at the end");
        }
    }

    #[test]
    fn refused_request_counts_where_the_provider_says_so() {
        for (name, left) in [("openai", 8), ("anthropic", 9)] {
            let profiles = Profiles::built_in();
            let profile = profiles.get(name).unwrap();
            let mut quotas = quotas(profile, &["requests:10/day", "input_tokens:100/min"]);
            let tokens = Tokens { input: 80, ..Tokens::default() };
            quotas.start(profile, tokens, NOW).unwrap();
            let refused = quotas.start(profile, tokens, NOW).unwrap_err();
            assert_eq!((refused.counted, refused.used, refused.requested), (Counted::Input, 80, 80));
            assert_eq!(refused.retry_after, Some(Duration::from_secs(36)));
            assert_eq!(remaining(&quotas), [left, 20], "{name}");
            let large = quotas.start(profile, Tokens { input: 101, ..tokens }, NOW).unwrap_err();
            assert_eq!(large.retry_after, None, "it exceeds the whole limit");
        }
    }

    #[test]
    fn unknown_limit_is_refused_by_name() {
        let profiles = Profiles::built_in();
        let error =
            Quotas::new(profiles.get("openai").unwrap(), &["images:5/min".parse().unwrap()]).unwrap_err();
        assert!(error.starts_with("limit is `images`"), "{error}");
    }

    /// A day's quota returned little by little.
    #[test]
    fn geminis_day_ends_at_midnight_in_california() {
        let profiles = Profiles::built_in();
        let profile = profiles.get("gemini").unwrap();
        let mut quotas = quotas(profile, &["requests:2/day"]);
        // 2027-01-15 08:00 UTC is midnight.
        let midnight = NOW;
        let at = |hours: u64| midnight + Duration::from_hours(hours);
        let mut start =
            |now| quotas.start(profile, Tokens::default(), now).map_err(|refused| refused.retry_after);
        assert_eq!((start(at(1)), start(at(2))), (Ok(0), Ok(0)));
        assert_eq!(start(at(23)), Err(Some(Duration::from_hours(1))));
        assert_eq!((start(at(24)), start(at(30))), (Ok(0), Ok(0)), "all of it is back");
        assert_eq!(start(at(36)), Err(Some(Duration::from_hours(12))));
    }

    #[test]
    fn pacific_days_follow_summer_time() {
        let utc = |year, month, day, hour: u64| {
            Stamp::from_secs(days(Date { year, month, day }).unwrap() * 86_400 + hour * 3_600)
        };
        let table = [
            (utc(2027, 1, 15, 7), utc(2027, 1, 14, 8), utc(2027, 1, 15, 8)),
            (utc(2026, 3, 8, 20), utc(2026, 3, 8, 8), utc(2026, 3, 9, 7)),
            (utc(2026, 7, 1, 7), utc(2026, 7, 1, 7), utc(2026, 7, 2, 7)),
            (utc(2026, 11, 1, 20), utc(2026, 11, 1, 7), utc(2026, 11, 2, 8)),
        ];
        for (now, last, next) in table {
            assert_eq!(pacific_day(now), (last, next), "{now}");
        }
    }
}
