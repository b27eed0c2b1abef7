//! PostgreSQL over TLS, always with certificate verification.

use std::sync::Arc;

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use rustls::{ClientConfig, RootCertStore};
use tokio_postgres_rustls::MakeRustlsConnect;

use crate::error::StoreError;
use crate::lifecycle::Lifecycle;
use crate::postgres::{Postgres, PostgresOptions};

impl PostgresOptions {
    /// Opens the store over TLS. The server's certificate and host name are verified against the system's
    /// root certificates and `roots`, in PEM, which may be empty. A server without TLS is refused if the
    /// address has `sslmode=require`.
    ///
    /// # Errors
    /// As [`Postgres::open`], and [`StoreError::Invalid`] for roots that are not certificates.
    ///
    /// # Cancel safety
    /// As [`open`](Self::open).
    pub async fn open_secured(self, roots: &[u8]) -> Result<Postgres, StoreError> {
        let config = config(roots)?;
        self.open_over(MakeRustlsConnect::new(config)).await
    }

    /// The lifecycle over TLS.
    pub(crate) fn lifecycle_secured(self, roots: &[u8]) -> Result<impl Lifecycle + use<>, StoreError> {
        self.lifecycle_over(MakeRustlsConnect::new(config(roots)?))
    }
}

fn config(roots: &[u8]) -> Result<ClientConfig, StoreError> {
    let invalid = |what: String| StoreError::Invalid { what };
    let mut trusted = RootCertStore::empty();
    // A system without root certificates is no error: `roots` are still used.
    trusted.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    for root in CertificateDer::pem_slice_iter(roots) {
        let root = root.map_err(|error| invalid(format!("the root certificates: {error}")))?;
        trusted.add(root).map_err(|error| invalid(format!("the root certificates: {error}")))?;
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let config = config.map_err(|error| invalid(format!("the versions of TLS: {error}")))?;
    Ok(config.with_root_certificates(trusted).with_no_client_auth())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_roots_are_rejected() {
        assert!(config(b"").is_ok());
        let error = config(b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n").unwrap_err();
        assert!(error.to_string().starts_with("the root certificates: "), "{error}");
    }
}
