//! What a site lets robots fetch: robots.txt by RFC 9309.
//!
//! | the response | means |
//! |---|---|
//! | a file | its rules, from the first 500 KiB |
//! | 4xx; more than five redirects | every page may be fetched |
//! | 5xx, 429, no response | no page may be fetched until the rules are known |

use std::time::Duration;

use reqwest::Url;
use robotxt::{AccessResult, Agent, Robots};
use tokio::time::Instant;

/// Redirects that are followed to a robots.txt, including to other hosts.
pub(crate) const HOPS_MAX: u32 = 5;
/// Bytes of it that are read.
pub(crate) const BYTES_MAX: usize = robotxt::BYTE_LIMIT;
/// Delay before robots.txt is requested again after a failure, if pages are left to fetch.
pub(crate) const RETRY_DELAY: Duration = Duration::from_mins(5);

/// The rules of a site, as far as known.
#[derive(Debug, Default)]
pub(crate) enum RobotsRules {
    /// Not requested yet.
    #[default]
    Unknown,
    /// Requested: pages of the site wait.
    Pending,
    Known(Box<Robots>),
    /// The request failed.
    Unavailable {
        why: String,
        until: Instant,
    },
}

/// The result of a request for robots.txt.
#[derive(Debug)]
pub(crate) enum RobotsResponse {
    File(Vec<u8>),
    /// The site has none.
    Missing,
    /// The rules are unknown, for this reason.
    Unavailable(String),
}

impl RobotsRules {
    /// Parses the rules for a user agent.
    pub(crate) fn read(response: RobotsResponse, user_agent: &str, now: Instant) -> Self {
        let agent = Agent::Exact(product(user_agent));
        match response {
            RobotsResponse::File(text) => {
                Self::Known(Box::new(Robots::from_access(AccessResult::Successful(&text), agent)))
            }
            RobotsResponse::Missing => {
                Self::Known(Box::new(Robots::from_access(AccessResult::Unavailable, agent)))
            }
            RobotsResponse::Unavailable(why) => Self::Unavailable { why, until: now + RETRY_DELAY },
        }
    }

    /// The delay between requests that the rules demand.
    pub(crate) fn delay(&self) -> Option<Duration> {
        match self {
            Self::Known(robots) => robots.crawl_delay().filter(|delay| !delay.is_zero()),
            _ => None,
        }
    }

    /// Whether the rules allow the URL; `None` while they are unknown.
    pub(crate) fn allow(&self, url: &Url) -> Option<bool> {
        match self {
            Self::Known(robots) => Some(robots.is_url_allowed(url)),
            _ => None,
        }
    }
}

/// The product token of a user agent, which rules refer to: `bot` of `bot/1.0 (+https://example.com)`.
fn product(user_agent: &str) -> &str {
    let is_of_it = |letter: char| letter.is_ascii_alphabetic() || letter == '-' || letter == '_';
    let end = user_agent.find(|letter| !is_of_it(letter)).unwrap_or(user_agent.len());
    &user_agent[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allow(text: &str, agent: &str, url: &str) -> Option<bool> {
        let rules = RobotsRules::read(RobotsResponse::File(text.as_bytes().to_vec()), agent, Instant::now());
        rules.allow(&Url::parse(url).unwrap())
    }

    #[test]
    fn rules_of_the_agent_win_over_the_default() {
        let text =
            "User-agent: *\nDisallow: /\n\nUser-agent: bot\nAllow: /open/\nDisallow: /\nCrawl-delay: 1.5";
        let table = [
            ("bot/1.0 (+https://example.com)", "https://h/open/a", true),
            ("BOT", "https://h/open/a?b", true),
            ("bot/2", "https://h/shut", false),
            ("other", "https://h/open/a", false),
            ("other", "https://h/robots.txt", true),
        ];
        for (agent, url, is_allowed) in table {
            assert_eq!(allow(text, agent, url), Some(is_allowed), "{agent} {url}");
        }
        let rules = RobotsRules::read(RobotsResponse::File(text.into()), "bot/1.0", Instant::now());
        assert_eq!(rules.delay(), Some(Duration::from_millis(1_500)));
    }

    #[test]
    fn missing_rules_allow_all_and_unknown_allow_none() {
        let url = Url::parse("https://h/a").unwrap();
        assert_eq!(RobotsRules::read(RobotsResponse::Missing, "bot", Instant::now()).allow(&url), Some(true));
        assert_eq!(
            RobotsRules::read(RobotsResponse::Unavailable("503".into()), "bot", Instant::now()).allow(&url),
            None
        );
        assert_eq!((RobotsRules::Unknown.allow(&url), RobotsRules::Pending.allow(&url)), (None, None));
    }
}
