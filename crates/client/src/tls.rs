//! Certificates as reqwest takes them.

use std::error::Error;
use std::io;

use reqwest::{Certificate, ClientBuilder, Identity};

use rustls::AlertDescription;

use crate::http::error::deepest;
use crate::http::{InvalidClient, Trust};

/// The same client, which trusts and is what is said.
pub(crate) fn secured(builder: ClientBuilder, trust: &Trust) -> Result<ClientBuilder, InvalidClient> {
    let refused = |what, why: String| InvalidClient::Tls { what, why };
    let mut builder = builder;
    if let Some(roots) = &trust.roots {
        let roots = Certificate::from_pem_bundle(roots)
            .map_err(|error| refused("root certificates", deepest(&error).to_string()))?;
        if roots.is_empty() {
            return Err(refused("root certificates", "there is no certificate in PEM".to_owned()));
        }
        builder = builder.tls_certs_only(roots);
    }
    if let Some(identity) = &trust.identity {
        let identity = Identity::from_pem(identity)
            .map_err(|error| refused("client's certificate and key", deepest(&error).to_string()))?;
        builder = builder.identity(identity);
    }
    Ok(builder)
}

/// Who does not trust whom, if that is what is at the bottom of an error.
pub(crate) fn distrust(error: &reqwest::Error) -> Option<String> {
    let mut next: Option<&(dyn Error + 'static)> = Some(error);
    while let Some(error) = next {
        match error.downcast_ref::<rustls::Error>() {
            Some(error @ (rustls::Error::InvalidCertificate(_) | rustls::Error::NoCertificatesPresented)) => {
                return Some(format!("the server's certificate is not trusted: {error}"));
            }
            Some(rustls::Error::AlertReceived(alert)) if is_of_certificate(*alert) => {
                return Some(format!("the server does not let this client's certificate in: {alert:?}"));
            }
            _ => {}
        }
        // What an error of the system wraps is none of its sources.
        let wrapped = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        next = wrapped.map(|wrapped| wrapped as &(dyn Error + 'static)).or_else(|| error.source());
    }
    None
}

const fn is_of_certificate(alert: AlertDescription) -> bool {
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
    fn what_is_no_certificate_is_refused_and_no_key_is_shown() {
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
