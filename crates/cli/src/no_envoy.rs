//! Envoy, in a program that was built without: it says so.

use std::net::SocketAddr;

use tidegate_server::EnvoyRules;
use toml::Table;

use crate::failure::Failure;

/// Says which feature it needs, if it was asked for.
pub(crate) fn decide(
    typed: Option<SocketAddr>,
    file: Option<Table>,
) -> Result<Option<(SocketAddr, EnvoyRules)>, Failure> {
    if typed.is_none() && file.is_none() {
        return Ok(None);
    }
    Err(Failure::usage("this program was built without `envoy`").next("build it with the feature `envoy`"))
}
