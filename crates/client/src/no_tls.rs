//! Without TLS there is nobody to trust.

use reqwest::ClientBuilder;

use crate::http::{InvalidClient, Trust};

/// The same client, if nothing is said of certificates.
pub(crate) fn secured(builder: ClientBuilder, trust: &Trust) -> Result<ClientBuilder, InvalidClient> {
    let what = match trust {
        Trust { roots: Some(_), .. } => "root certificates",
        Trust { identity: Some(_), .. } => "client's certificate and key",
        _ => return Ok(builder),
    };
    Err(InvalidClient::Tls { what, why: "they need the feature `rustls` of tidegate-client".to_owned() })
}

/// Without TLS there are no certificates to trust.
pub(crate) const fn distrust(_: &reqwest::Error) -> Option<String> {
    None
}
