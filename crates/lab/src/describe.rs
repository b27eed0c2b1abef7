//! One-line summaries of scenarios, for lists and pages.

use crate::scenario::{Headers, RetryAfter, Scenario, Upstream};

impl Scenario {
    /// The limit of the upstream and anything unusual about it, in one line: `token bucket of 50/s, 1 s deep;
    /// 40 workers; …`.
    pub fn summary(&self) -> String {
        let mut parts = vec![self.limit_in_words(), self.demand_in_words()];
        parts.push(format!("latency {}", span(self.latency)));
        if self.sigma > 0.5 {
            parts.push(format!("heavy tail (σ {})", self.sigma));
        }
        if let Some((from, by)) = self.slower {
            parts.push(format!("{by} times slower from {from} s"));
        }
        if self.reject_latency >= 0.2 {
            parts.push(format!("429s take {}", span(self.reject_latency)));
        }
        if self.errors > 0.0 {
            parts.push(format!("{} % errors", number(100.0 * self.errors)));
        }
        if self.burns {
            parts.push("429s use quota".to_owned());
        }
        if let Some((share, length)) = self.background {
            let share = number(100.0 * share);
            parts.push(format!("other clients take {share} %, {length} s on and off"));
        }
        parts.extend(self.retry_after.in_words().map(str::to_owned));
        parts.extend(self.headers.in_words().map(str::to_owned));
        parts.push(format!("runs {}", span(self.seconds)));
        parts.join("; ")
    }

    /// The unit that the quota counts.
    pub(crate) const fn unit_name(&self) -> &'static str {
        if self.tokens.is_some() { "tokens" } else { "requests" }
    }

    /// What the upstream limits.
    pub(crate) fn limit_in_words(&self) -> String {
        let steps: Vec<String> = self.capacity.iter().map(|(_, capacity)| number(*capacity)).collect();
        let steps = steps.join(" → ");
        let rate = if self.tokens.is_some() { format!("{steps} tokens/s") } else { format!("{steps}/s") };
        let second = self.token_quota.as_ref().map_or_else(String::new, |quota| {
            let named = if quota.named { ", 429s name the quota" } else { "" };
            format!(" and {} tokens/s{named}", number(quota.rate))
        });
        match self.upstream {
            Upstream::Bucket { depth: 0.0 } => format!("token bucket of {rate}{second}, 1 request deep"),
            Upstream::Bucket { depth } => format!("token bucket of {rate}{second}, {} deep", span(depth)),
            Upstream::Window { length } => format!("fixed window of {}, {rate}{second}", span(length)),
            Upstream::Sliding { length } => format!("sliding window of {}, {rate}{second}", span(length)),
            Upstream::Cap => format!("at most {steps} in flight"),
            Upstream::Knee { .. } => format!("slower beyond {steps} in flight"),
            Upstream::Free => "no limit".to_owned(),
        }
    }

    fn demand_in_words(&self) -> String {
        let each = match self.arrivals {
            Some(rate) => format!("{}/s arrive", number(rate)),
            None => format!("{} workers", self.workers),
        };
        if self.clients > 1 { format!("{} clients, {each} each", self.clients) } else { each }
    }
}

impl RetryAfter {
    const fn in_words(self) -> Option<&'static str> {
        match self {
            Self::None => None,
            Self::Exact => Some("exact Retry-After"),
            Self::Seconds => Some("Retry-After in seconds"),
            Self::TenTimes => Some("Retry-After ten times too long"),
        }
    }
}

impl Headers {
    const fn in_words(self) -> Option<&'static str> {
        match self {
            Self::None => None,
            Self::Right => Some("quota headers"),
            Self::Stale => Some("quota headers 1 s old"),
            Self::Lying => Some("quota headers twice too high"),
        }
    }
}

/// A readable duration: `200 ms`, `8 s`, `10 min`.
fn span(seconds: f64) -> String {
    match seconds {
        s if s < 1.0 => format!("{} ms", number(1_000.0 * s)),
        s if s >= 300.0 && s % 60.0 == 0.0 => format!("{} min", number(s / 60.0)),
        s => format!("{} s", number(s)),
    }
}

/// A number with at most three decimals, without trailing zeros.
pub(crate) fn number(value: f64) -> String {
    let text = format!("{value:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn summary(name: &str) -> String {
        let scenarios = Scenario::built_in();
        scenarios.iter().find(|scenario| scenario.name == name).unwrap().summary()
    }

    #[test]
    fn summary_names_limit_demand_and_oddities() {
        let table = [
            ("R50", "token bucket of 50/s, 1 s deep; 40 workers; latency 200 ms; runs 240 s"),
            (
                "N16R50+RA",
                "token bucket of 50/s, 1 s deep; 16 clients, 16 workers each; latency 200 ms; Retry-After in seconds; \
                 runs 10 min",
            ),
            ("C1", "at most 1 in flight; 32 workers; latency 200 ms; runs 240 s"),
            ("free64slow4", "no limit; 64 workers; latency 200 ms; 4 times slower from 60 s; runs 180 s"),
            ("S20-100", "token bucket of 20 → 100 → 20/s, 1 s deep; 80 workers; latency 200 ms; runs 180 s"),
            ("open15/50", "token bucket of 50/s, 1 s deep; 15/s arrive; latency 200 ms; runs 240 s"),
        ];
        for (name, wanted) in table {
            assert_eq!(summary(name), wanted);
        }
        assert!(
            summary("turns+dim").starts_with("token bucket of 50/s and 20000 tokens/s, 429s name the quota")
        );
        assert!(summary("tpm20k/s").starts_with("token bucket of 20000 tokens/s, 5 s deep"));
        assert!(summary("bg50").contains("; other clients take 50 %, 20 s on and off;"));
    }
}
