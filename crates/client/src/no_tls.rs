//! Stand-in for `tls` in builds without the feature `rustls`.

use reqwest::ClientBuilder;

use crate::http::{Certificates, InvalidClient};

/// Rejects certificate options, which need TLS.
pub(crate) fn apply(
    builder: ClientBuilder,
    certificates: &Certificates,
) -> Result<ClientBuilder, InvalidClient> {
    let what = match certificates {
        Certificates { roots: Some(_), .. } => "root certificates",
        Certificates { identity: Some(_), .. } => "client's certificate and key",
        _ => return Ok(builder),
    };
    Err(InvalidClient::Tls { what, why: "they need the feature `rustls` of tidegate-client".to_owned() })
}

/// No server is expected to use TLS without it.
pub(crate) const fn is_plain_http(_: &reqwest::Error) -> bool {
    false
}

/// No error is about certificates without TLS.
pub(crate) const fn certificate_error(_: &reqwest::Error) -> Option<String> {
    None
}
