//! Identifies clients by their certificates: names, expiry and whether they are still trusted.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustls::pki_types::CertificateDer;
use tidegate::Stamp;
use tidegate_core::limit::token::TokenId;
use x509_cert::Certificate;
use x509_cert::der::oid::ObjectIdentifier;
use x509_cert::der::{Decode as _, Tag, Tagged as _};
use x509_cert::ext::pkix::SubjectAltName;
use x509_cert::ext::pkix::name::GeneralName;

use crate::tls::Tls;

/// The object id of the common name attribute.
const COMMON_NAME: ObjectIdentifier = ObjectIdentifier::new_unwrap("2.5.4.3");

/// A verified client certificate, stored in the extensions of each request on its connection.
///
/// If one of its names is mapped to a token, a request without an `Authorization` header is authorized as
/// that token.
#[derive(Clone)]
pub struct PeerCertificate {
    token: Option<TokenId>,
    expires_at: Stamp,
    verification: Option<Arc<Verification>>,
}

/// How a certificate was verified, to verify it again when the client CAs change.
pub(crate) struct Verification {
    tls: Tls,
    chain: Vec<CertificateDer<'static>>,
    /// The last generation of client CAs that trusted it.
    generation: AtomicU64,
}

impl Verification {
    pub(crate) const fn new(tls: Tls, chain: Vec<CertificateDer<'static>>, generation: u64) -> Self {
        Self { tls, chain, generation: AtomicU64::new(generation) }
    }
}

impl PeerCertificate {
    /// Parses a certificate and maps its names to a token.
    pub(crate) fn new(der: &[u8], clients: &[(String, TokenId)]) -> Option<Self> {
        let info = CertificateInfo::read(der).ok()?;
        let token = clients.iter().find(|(name, _)| info.has(name)).map(|(_, token)| token.clone());
        Some(Self { token, expires_at: info.expires_at, verification: None })
    }

    pub(crate) fn with_verification(self, verification: Verification) -> Self {
        Self { verification: Some(Arc::new(verification)), ..self }
    }

    /// Returns why the certificate is no longer accepted, if so: a connection may outlive its validity.
    pub fn rejection(&self, now: Stamp) -> Option<&'static str> {
        if self.expires_at <= now {
            return Some("the client's certificate has expired");
        }
        let verification = self.verification.as_ref()?;
        // Verified once per change of the CAs, not per request.
        match verification.tls.trusts(&verification.chain, verification.generation.load(Ordering::Relaxed)) {
            Some(generation) => {
                verification.generation.store(generation, Ordering::Relaxed);
                None
            }
            None => Some("the client's certificate is no longer trusted"),
        }
    }

    /// Returns the token that it maps to, if any.
    pub const fn token(&self) -> Option<&TokenId> {
        self.token.as_ref()
    }

    /// Returns when it expires. A connection may last longer.
    pub const fn expires_at(&self) -> Stamp {
        self.expires_at
    }
}

impl fmt::Debug for PeerCertificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let token = self.token.as_ref().map_or("none", TokenId::as_str);
        write!(f, "PeerCertificate({token} until {})", self.expires_at)
    }
}

/// The relevant contents of a certificate.
pub(crate) struct CertificateInfo {
    uris: Vec<String>,
    dns: Vec<String>,
    /// Its common name, if it has exactly one.
    common_name: Option<String>,
    /// Start of its validity, in whole seconds.
    pub(crate) begins_at: Stamp,
    /// End of its validity, in whole seconds.
    pub(crate) expires_at: Stamp,
}

impl CertificateInfo {
    pub(crate) fn read(der: &[u8]) -> Result<Self, x509_cert::der::Error> {
        let certificate = Certificate::from_der(der)?.tbs_certificate;
        let expires_at = Stamp::from_secs(certificate.validity.not_after.to_unix_duration().as_secs());
        let begins_at = Stamp::from_secs(certificate.validity.not_before.to_unix_duration().as_secs());
        let (mut uris, mut dns) = (Vec::new(), Vec::new());
        for name in certificate.get::<SubjectAltName>()?.into_iter().flat_map(|(_, names)| names.0) {
            match name {
                GeneralName::UniformResourceIdentifier(uri) => uris.push(uri.to_string()),
                GeneralName::DnsName(name) => dns.push(name.to_string()),
                _ => {}
            }
        }
        let attributes = certificate.subject.0.iter().flat_map(|part| part.0.iter());
        let mut named = attributes.filter(|attribute| attribute.oid == COMMON_NAME);
        let only = named.next().filter(|_| named.next().is_none());
        let common_name = only.and_then(|attribute| {
            let is_text =
                matches!(attribute.value.tag(), Tag::Utf8String | Tag::PrintableString | Tag::Ia5String);
            let text = str::from_utf8(attribute.value.value()).ok().filter(|_| is_text);
            text.map(str::to_owned)
        });
        Ok(Self { uris, dns, common_name, begins_at, expires_at })
    }

    /// Whether it has this name. A name with `:` matches only URIs. The common name counts only if there is
    /// neither a URI nor a DNS name, because CA name constraints may cover those kinds but not common names.
    fn has(&self, name: &str) -> bool {
        if name.contains(':') {
            return self.uris.iter().any(|uri| uri == name);
        }
        let is_bare = self.uris.is_empty() && self.dns.is_empty();
        self.dns.iter().any(|dns| dns.eq_ignore_ascii_case(name))
            || is_bare && self.common_name.as_deref() == Some(name)
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, DnType, KeyPair, SanType};

    use super::*;

    /// A certificate with this common name, DNS name and URI.
    fn certificate(common_name: &str, dns: &str, uri: &str) -> Vec<u8> {
        let mut params = CertificateParams::new(vec![dns.to_owned()]).expect("a name");
        params.distinguished_name.push(DnType::CommonName, common_name);
        params.subject_alt_names.push(SanType::URI(uri.try_into().expect("a name")));
        params.not_after = rcgen::date_time_ymd(2040, 1, 1);
        params.self_signed(&KeyPair::generate().expect("a key")).expect("signed").der().to_vec()
    }

    #[test]
    fn certificate_maps_to_first_matching_token() {
        let der = certificate("gateway", "Gate.internal", "spiffe://prod/gate");
        let table = [
            (vec!["gateway"], None),
            (vec!["gate.internal"], Some(0)),
            (vec!["spiffe://prod/gate"], Some(0)),
            (vec!["other", "spiffe://prod/gate", "gate.internal"], Some(1)),
            (vec!["Gateway", "spiffe://prod/GATE", "gate", "", "rcgen self signed cert"], None),
        ];
        for (names, at) in table {
            let clients: Vec<(String, TokenId)> = names
                .iter()
                .enumerate()
                .map(|(number, name)| ((*name).to_owned(), TokenId::new(&format!("t{number}")).unwrap()))
                .collect();
            let peer = PeerCertificate::new(&der, &clients).unwrap();
            let expected = at.map(|number: usize| clients[number].1.clone());
            assert_eq!(peer.token(), expected.as_ref(), "{names:?}");
            assert_eq!(peer.expires_at().to_string(), "2040-01-01T00:00:00Z");
        }
    }

    #[test]
    fn common_name_counts_only_without_alt_names() {
        let clients = ["gateway", "urn:gate"].map(|name| (name.to_owned(), TokenId::new("t").unwrap()));
        let is_known = |change: fn(&mut CertificateParams)| {
            let mut params = CertificateParams::default();
            params.distinguished_name.push(DnType::CommonName, "gateway");
            change(&mut params);
            let der = params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().to_vec();
            PeerCertificate::new(&der, &clients).unwrap().token().is_some()
        };
        assert!(is_known(|_| {}));
        assert!(!is_known(|params| params
            .subject_alt_names
            .push(SanType::DnsName("a.b".try_into().unwrap()))));
        assert!(!is_known(|params| params.subject_alt_names.push(SanType::URI("a:b".try_into().unwrap()))));
        assert!(is_known(|params| params
            .subject_alt_names
            .push(SanType::URI("urn:gate".try_into().unwrap()))));
        assert!(!is_known(|params| params.distinguished_name.push(DnType::CommonName, "urn:gate")));
    }

    #[test]
    fn common_name_never_matches_uri() {
        let der = certificate("spiffe://prod/admin", "a.internal", "spiffe://prod/gate");
        let clients = [("spiffe://prod/admin".to_owned(), TokenId::new("admin").unwrap())];
        assert_eq!(PeerCertificate::new(&der, &clients).unwrap().token(), None);
    }

    #[test]
    fn invalid_certificate_bytes_are_rejected() {
        let whole = certificate("a", "b", "c:d");
        assert!(PeerCertificate::new(b"", &[]).is_none());
        for cut in 0..whole.len() {
            assert!(PeerCertificate::new(&whole[..cut], &[]).is_none());
        }
    }
}
