//! Envoy in a build without the feature: reports that it is missing.

use std::net::SocketAddr;

use tidegate_server::EnvoyRules;
use toml::Table;

use crate::failure::Failure;

/// Fails with the name of the missing feature, if Envoy is configured.
pub(crate) fn decide(
    typed: Option<SocketAddr>,
    file: Option<Table>,
) -> Result<Option<(SocketAddr, EnvoyRules)>, Failure> {
    if typed.is_none() && file.is_none() {
        return Ok(None);
    }
    Err(Failure::usage("this program was built without `envoy`").next("build it with the feature `envoy`"))
}
