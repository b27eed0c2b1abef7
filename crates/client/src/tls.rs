//! Applies certificate options to reqwest, and recognizes certificate errors.

use std::error::Error;
use std::io;

use reqwest::{Certificate, ClientBuilder, Identity};

use rustls::{AlertDescription, InvalidMessage};

use crate::http::error::root_cause;
use crate::http::{Certificates, InvalidClient};

/// Configures root certificates and the client identity.
pub(crate) fn apply(
    builder: ClientBuilder,
    certificates: &Certificates,
) -> Result<ClientBuilder, InvalidClient> {
    let refused = |what, why: String| InvalidClient::Tls { what, why };
    let mut builder = builder;
    if let Some(roots) = &certificates.roots {
        let roots = Certificate::from_pem_bundle(roots)
            .map_err(|error| refused("root certificates", root_cause(&error).to_string()))?;
        if roots.is_empty() {
            return Err(refused("root certificates", "there is no certificate in PEM".to_owned()));
        }
        builder = builder.tls_certs_only(roots);
    }
    if let Some(identity) = &certificates.identity {
        let identity = Identity::from_pem(identity)
            .map_err(|error| refused("client's certificate and key", root_cause(&error).to_string()))?;
        builder = builder.identity(identity);
    }
    Ok(builder)
}

/// Returns why a certificate was rejected, if that is the cause of an error.
pub(crate) fn certificate_error(error: &reqwest::Error) -> Option<String> {
    match tls_error(error)? {
        error @ (rustls::Error::InvalidCertificate(_) | rustls::Error::NoCertificatesPresented) => {
            Some(format!("the server's certificate is not trusted: {error}"))
        }
        rustls::Error::AlertReceived(alert) if is_certificate_alert(*alert) => {
            Some(format!("the server rejected the client certificate: {alert:?}"))
        }
        _ => None,
    }
}

/// Whether the server answered a TLS handshake with something else, as a server without TLS does.
pub(crate) fn is_plain_http(error: &reqwest::Error) -> bool {
    matches!(tls_error(error), Some(rustls::Error::InvalidMessage(InvalidMessage::InvalidContentType)))
}

/// The error of TLS among the causes of an error.
fn tls_error(error: &reqwest::Error) -> Option<&rustls::Error> {
    let mut next: Option<&(dyn Error + 'static)> = Some(error);
    while let Some(error) = next {
        if let Some(error) = error.downcast_ref() {
            return Some(error);
        }
        // `io::Error::source` skips the wrapped error itself.
        let wrapped = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        next = wrapped.map(|wrapped| wrapped as &(dyn Error + 'static)).or_else(|| error.source());
    }
    None
}

const fn is_certificate_alert(alert: AlertDescription) -> bool {
    matches!(
        alert,
        AlertDescription::NoCertificate
            | AlertDescription::BadCertificate
            | AlertDescription::UnsupportedCertificate
            | AlertDescription::CertificateRevoked
            | AlertDescription::CertificateExpired
            | AlertDescription::CertificateUnknown
            | AlertDescription::UnknownCA
            | AlertDescription::AccessDenied
            | AlertDescription::CertificateRequired
    )
}

#[cfg(test)]
mod tests {
    use crate::Client;

    #[test]
    fn invalid_pem_is_rejected_without_showing_key() {
        let builder = || Client::builder("https://limits.example");
        let error = builder().root_certificates(b"none").build().unwrap_err().to_string();
        assert_eq!(error, "the root certificates cannot be used: there is no certificate in PEM");
        let broken = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
        let error = builder().root_certificates(broken).build().unwrap_err().to_string();
        assert!(error.starts_with("the certificates cannot be used: "), "{error}");
        let builder = builder().identity(b"none", b"hunter2");
        assert!(!format!("{builder:?}").contains("hunter2") && !format!("{builder:?}").contains("104, 117"));
        let error = builder.build().unwrap_err().to_string();
        assert!(error.starts_with("the client's certificate and key cannot be used: "), "{error}");
        assert!(!error.contains("hunter2"), "{error}");
    }
}
