//! The Envoy configuration of `serve`: its listen address and its rules.

use std::net::{Ipv4Addr, SocketAddr};

use tidegate_server::{EnvoyConfig, EnvoyRules};
use toml::Table;

use crate::failure::Failure;

/// The default listen address for Envoy.
const LISTEN: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 8708);

/// Resolves the address and the rules, if a flag or the file configures Envoy.
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
    fn envoy_is_served_if_configured_and_flag_wins() {
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
    fn invalid_configuration_is_rejected_with_its_key() {
        let cases = [
            ("port = 1", "`envoy.port`: unknown field `port`, expected one of `listen`, `unknown`, `rules`"),
            ("unknown = 'maybe'", "`envoy.unknown`: unknown variant `maybe`, expected `allow` or `refuse`"),
            (
                "[[rules]]\nmatch = [{ key = 'a' }]\nentiti = 'x'",
                "`envoy.rules[0].entiti`: unknown field `entiti`",
            ),
            (
                "[[rules]]\nmatch = [{ key = 'a' }]\nentity = '{b}'\nresource = 'x'",
                "`envoy.rules`: rule 1: `entity` is `{b}`: `match` has no entry `b`",
            ),
        ];
        for (text, sentence) in cases {
            let failure = decide(None, Some(table(text))).unwrap_err();
            assert!(failure.what.contains(sentence), "{}", failure.what);
        }
    }
}
