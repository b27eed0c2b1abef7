//! How a provider counts: buckets of requests and tokens, drawn when a request starts and corrected when it
//! ends.

use std::time::Duration;

use tidegate_core::bucket::Bucket;
use tidegate_core::cost::Cost;
use tidegate_core::limit::rule::{Limit, Rule};
use tidegate_core::time::Stamp;

use crate::profile::{Profile, Reserve, Tokens};

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
    /// Full buckets of these limits. `Err` is the name of a limit that counts nothing known, or the problem of
    /// an invalid one.
    pub(crate) fn new(limits: &[Limit]) -> Result<Self, String> {
        let quota = |limit: &Limit| {
            let name = limit.name();
            let counted = Counted::of(name).ok_or_else(|| {
                format!("limit is `{name}`, and must be requests, tokens, input_tokens or output_tokens")
            })?;
            let rule = limit.check().map_err(|error| error.to_string())?;
            Ok(Quota { counted, rule, bucket: Bucket::full() })
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
        let exceeded = self.0.iter().find_map(|quota| quota.exceeded(units(quota.counted), now));
        for quota in &mut self.0 {
            let is_request = quota.counted == Counted::Requests;
            if quota.counted != Counted::Output
                && (exceeded.is_none() || (is_request && profile.refused_counts))
            {
                let level = u64::try_from(quota.bucket.level(quota.rule.shape(), now)).unwrap_or(0);
                let most = if exceeded.is_none() { u64::MAX } else { level };
                quota.bucket.debit(quota.rule.shape(), units(quota.counted).min(most), now);
            }
        }
        exceeded.map_or(Ok(reserved), Err)
    }

    /// Corrects the counts when a request has ended.
    pub(crate) fn end(&mut self, profile: &Profile, reserved: u64, tokens: Tokens, now: Stamp) {
        let reserved_cost = Cost::request().tokens(reserved);
        let spent = profile.spent(reserved_cost, tokens.input, tokens.output).total_tokens();
        for Quota { counted, rule, bucket } in &mut self.0 {
            match counted {
                Counted::Output if profile.reserve != Reserve::Input => {
                    bucket.debit(rule.shape(), tokens.output, now);
                }
                Counted::Tokens if spent > reserved => bucket.debit(rule.shape(), spent - reserved, now),
                Counted::Tokens => bucket.credit(rule.shape(), reserved - spent),
                _ => {}
            }
        }
    }

    /// The levels that headers report: the first limit of each kind.
    pub(crate) fn levels(&self, now: Stamp) -> Vec<Level> {
        let mut levels: Vec<Level> = Vec::new();
        for Quota { counted, rule, bucket } in &self.0 {
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
        let ready_at = self.bucket.ready_at(shape, requested, now);
        if ready_at <= now {
            return None;
        }
        let level = u64::try_from(self.bucket.level(shape, now)).unwrap_or(0);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::Profiles;

    const NOW: Stamp = Stamp::from_secs(1_800_000_000);

    fn quotas(limits: &[&str]) -> Quotas {
        let limits: Vec<Limit> = limits.iter().map(|text| text.parse().unwrap()).collect();
        Quotas::new(&limits).unwrap()
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
            let mut quotas = quotas(&limits);
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
            let mut quotas = quotas(&["requests:10/day", "input_tokens:100/min"]);
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
        let error = Quotas::new(&["images:5/min".parse().unwrap()]).unwrap_err();
        assert!(error.starts_with("limit is `images`"), "{error}");
    }
}
