//! What `serve` is told about Envoy: where to listen for it, and by which rules.

use std::net::{Ipv4Addr, SocketAddr};

use tidegate_server::{EnvoyConfig, EnvoyRules};
use toml::Table;

use crate::failure::Failure;

/// Where it listens for Envoy unless it is told otherwise.
const LISTEN: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 8708);

/// Where, and by which rules, if it was asked for: by an address that was typed, or by a file.
pub(crate) fn decide(
    typed: Option<SocketAddr>,
    file: Option<Table>,
) -> Result<Option<(SocketAddr, EnvoyRules)>, Failure> {
    if typed.is_none() && file.is_none() {
        return Ok(None);
    }
    let wrong = |why: String| Failure::usage(why).next("see its keys: tidegate serve --help");
    let config = file.map(EnvoyConfig::read).transpose().map_err(wrong)?.unwrap_or_default();
    let rules = config.rules().map_err(|error| wrong(format!("`envoy.rules`: {error}")))?;
    Ok(Some((typed.or(config.listen).unwrap_or(LISTEN), rules)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(text: &str) -> Table {
        text.parse().expect("it is TOML")
    }

    #[test]
    fn it_is_served_if_it_was_asked_for_and_what_is_typed_counts_first() {
        let port = |typed: Option<&str>, file: Option<&str>| {
            let typed = typed.map(|address| address.parse().expect("an address"));
            decide(typed, file.map(table)).unwrap().map(|(address, _)| address.port())
        };
        assert_eq!(port(None, None), None);
        assert_eq!(port(None, Some("")), Some(8708));
        assert_eq!(port(None, Some("listen = '127.0.0.1:1'")), Some(1));
        assert_eq!(port(Some("127.0.0.1:2"), Some("listen = '127.0.0.1:1'")), Some(2));
        assert_eq!(port(Some("127.0.0.1:2"), None), Some(2));
    }

    #[test]
    fn what_is_wrong_is_told_with_its_place() {
        let cases = [
            ("port = 1", "`envoy.port`: unknown field `port`, expected one of `listen`, `unknown`, `rules`"),
            ("unknown = 'maybe'", "`envoy.unknown`: unknown variant `maybe`, expected `allow` or `refuse`"),
            (
                "[[rules]]\nmatch = [{ key = 'a' }]\nentiti = 'x'",
                "`envoy.rules[0].entiti`: unknown field `entiti`",
            ),
            (
                "[[rules]]\nmatch = [{ key = 'a' }]\nentity = '{b}'\nresource = 'x'",
                "`envoy.rules`: rule 1: `entity` is `{b}`: there is no entry `b` in its match",
            ),
        ];
        for (text, sentence) in cases {
            let failure = decide(None, Some(table(text))).unwrap_err();
            assert!(failure.what.contains(sentence), "{}", failure.what);
        }
    }
}
