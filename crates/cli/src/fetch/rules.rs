//! What a site lets robots fetch: robots.txt as RFC 9309 has it.
//!
//! | the answer | means |
//! |---|---|
//! | a file | its rules, of the first 500 KiB |
//! | 4xx; more than five redirects | everything may be fetched |
//! | 5xx, 429, no answer | nothing may be, until it is known |

use std::time::Duration;

use reqwest::Url;
use robotxt::{AccessResult, Agent, Robots};
use tokio::time::Instant;

/// Redirects that are followed to a robots.txt, to other hosts too.
pub(crate) const HOPS_MAX: u32 = 5;
/// So much of it is read.
pub(crate) const BYTES_MAX: usize = robotxt::BYTE_LIMIT;
/// A site whose rules could not be had is asked for them again after so long, if there still is something to fetch.
pub(crate) const AGAIN: Duration = Duration::from_mins(5);

/// What is known of a site's rules.
#[derive(Debug, Default)]
pub(crate) enum Rules {
    /// Nobody has asked.
    #[default]
    Unknown,
    /// Somebody asks: what is to be fetched there waits.
    Asking,
    Known(Box<Robots>),
    /// They could not be had.
    Away {
        why: String,
        until: Instant,
    },
}

/// What a request for robots.txt came to.
#[derive(Debug)]
pub(crate) enum Told {
    File(Vec<u8>),
    /// There is none.
    None,
    /// Nobody knows, for this reason.
    Away(String),
}

impl Rules {
    /// The rules for whoever calls itself `user_agent`.
    pub(crate) fn read(told: Told, user_agent: &str, now: Instant) -> Self {
        let agent = Agent::Exact(product(user_agent));
        match told {
            Told::File(text) => {
                Self::Known(Box::new(Robots::from_access(AccessResult::Successful(&text), agent)))
            }
            Told::None => Self::Known(Box::new(Robots::from_access(AccessResult::Unavailable, agent))),
            Told::Away(why) => Self::Away { why, until: now + AGAIN },
        }
    }

    /// The delay between requests that they ask for.
    pub(crate) fn delay(&self) -> Option<Duration> {
        match self {
            Self::Known(robots) => robots.crawl_delay().filter(|delay| !delay.is_zero()),
            _ => None,
        }
    }

    /// Whether they let it be fetched; `None` while that is not known.
    pub(crate) fn allow(&self, url: &Url) -> Option<bool> {
        match self {
            Self::Known(robots) => Some(robots.is_url_allowed(url)),
            _ => None,
        }
    }
}

/// The name in a user agent by which rules are written: `bot` of `bot/1.0 (+https://example.com)`.
fn product(user_agent: &str) -> &str {
    let is_of_it = |letter: char| letter.is_ascii_alphabetic() || letter == '-' || letter == '_';
    let end = user_agent.find(|letter| !is_of_it(letter)).unwrap_or(user_agent.len());
    &user_agent[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allow(text: &str, agent: &str, url: &str) -> Option<bool> {
        let rules = Rules::read(Told::File(text.as_bytes().to_vec()), agent, Instant::now());
        rules.allow(&Url::parse(url).unwrap())
    }

    #[test]
    fn rules_are_those_of_our_name_or_else_of_everybody() {
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
        let rules = Rules::read(Told::File(text.into()), "bot/1.0", Instant::now());
        assert_eq!(rules.delay(), Some(Duration::from_millis(1_500)));
    }

    #[test]
    fn none_is_everything_and_unknown_is_nothing() {
        let url = Url::parse("https://h/a").unwrap();
        assert_eq!(Rules::read(Told::None, "bot", Instant::now()).allow(&url), Some(true));
        assert_eq!(Rules::read(Told::Away("503".into()), "bot", Instant::now()).allow(&url), None);
        assert_eq!((Rules::Unknown.allow(&url), Rules::Asking.allow(&url)), (None, None));
    }
}
