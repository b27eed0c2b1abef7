//! Who a client is by its certificate: the names that are in it, and until when they count.

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

/// The attribute of a subject that is its common name.
const COMMON_NAME: ObjectIdentifier = ObjectIdentifier::new_unwrap("2.5.4.3");

/// A client's certificate that was checked, among the extensions of each request on its connection.
///
/// It stands for a token if one of its names does, and a request without an `Authorization` header is then that token's.
#[derive(Clone)]
pub struct PeerCertificate {
    token: Option<TokenId>,
    expires_at: Stamp,
    origin: Option<Arc<Origin>>,
}

/// By whom a certificate was checked, and what has to be checked again when those who are let in change.
pub(crate) struct Origin {
    tls: Tls,
    chain: Vec<CertificateDer<'static>>,
    /// The last generation of those who are let in that it was good for.
    checked: AtomicU64,
}

impl Origin {
    pub(crate) const fn new(tls: Tls, chain: Vec<CertificateDer<'static>>, generation: u64) -> Self {
        Self { tls, chain, checked: AtomicU64::new(generation) }
    }
}

impl PeerCertificate {
    /// The certificate of these bytes, by what its names stand for.
    pub(crate) fn new(der: &[u8], clients: &[(String, TokenId)]) -> Option<Self> {
        let facts = Facts::read(der).ok()?;
        let token = clients.iter().find(|(name, _)| facts.has(name)).map(|(_, token)| token.clone());
        Some(Self { token, expires_at: facts.expires_at, origin: None })
    }

    pub(crate) fn checked_by(self, origin: Origin) -> Self {
        Self { origin: Some(Arc::new(origin)), ..self }
    }

    /// Why it counts no more, if it does not: it was good when its connection was made.
    pub(crate) fn trouble(&self, now: Stamp) -> Option<&'static str> {
        if self.expires_at <= now {
            return Some("the client's certificate has expired");
        }
        let origin = self.origin.as_ref()?;
        // Checked once for each change, and not for each request.
        match origin.tls.trusts(&origin.chain, origin.checked.load(Ordering::Relaxed)) {
            Some(generation) => {
                origin.checked.store(generation, Ordering::Relaxed);
                None
            }
            None => Some("the client's certificate is trusted no more"),
        }
    }

    /// The token that it stands for, if any.
    pub const fn token(&self) -> Option<&TokenId> {
        self.token.as_ref()
    }

    /// When it is good no more: a connection may last longer.
    pub const fn expires_at(&self) -> Stamp {
        self.expires_at
    }
}

impl fmt::Debug for PeerCertificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let token = self.token.as_ref().map_or("nobody", TokenId::as_str);
        write!(f, "PeerCertificate({token} until {})", self.expires_at)
    }
}

/// What is read of a certificate.
pub(crate) struct Facts {
    uris: Vec<String>,
    dns: Vec<String>,
    /// Its common name, if it has exactly one.
    common: Option<String>,
    /// The begin of its time, in whole seconds.
    pub(crate) begins_at: Stamp,
    /// The end of its time, in whole seconds.
    pub(crate) expires_at: Stamp,
}

impl Facts {
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
        let common = only.and_then(|attribute| {
            let is_text =
                matches!(attribute.value.tag(), Tag::Utf8String | Tag::PrintableString | Tag::Ia5String);
            let text = str::from_utf8(attribute.value.value()).ok().filter(|_| is_text);
            text.map(str::to_owned)
        });
        Ok(Self { uris, dns, common, begins_at, expires_at })
    }

    /// Whether it has this name. One with `:` is a URI and nothing else. A common name counts only where there is neither a URI nor
    /// a DNS name: those who sign for others may be bound to names of these kinds, and to no common names.
    fn has(&self, name: &str) -> bool {
        if name.contains(':') {
            return self.uris.iter().any(|uri| uri == name);
        }
        let is_bare = self.uris.is_empty() && self.dns.is_empty();
        self.dns.iter().any(|dns| dns.eq_ignore_ascii_case(name))
            || is_bare && self.common.as_deref() == Some(name)
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, DnType, KeyPair, SanType};

    use super::*;

    /// A certificate with this common name, DNS name and URI.
    fn certificate(common: &str, dns: &str, uri: &str) -> Vec<u8> {
        let mut params = CertificateParams::new(vec![dns.to_owned()]).expect("a name");
        params.distinguished_name.push(DnType::CommonName, common);
        params.subject_alt_names.push(SanType::URI(uri.try_into().expect("a name")));
        params.not_after = rcgen::date_time_ymd(2040, 1, 1);
        params.self_signed(&KeyPair::generate().expect("a key")).expect("signed").der().to_vec()
    }

    #[test]
    fn a_certificate_stands_for_the_first_token_that_one_of_its_names_is_mapped_to() {
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
    fn a_common_name_counts_only_alone() {
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
    fn a_common_name_that_looks_like_a_uri_is_none() {
        let der = certificate("spiffe://prod/admin", "a.internal", "spiffe://prod/gate");
        let clients = [("spiffe://prod/admin".to_owned(), TokenId::new("admin").unwrap())];
        assert_eq!(PeerCertificate::new(&der, &clients).unwrap().token(), None);
    }

    #[test]
    fn bytes_that_are_no_certificate_are_nobodys() {
        let whole = certificate("a", "b", "c:d");
        assert!(PeerCertificate::new(b"", &[]).is_none());
        for cut in 0..whole.len() {
            assert!(PeerCertificate::new(&whole[..cut], &[]).is_none());
        }
    }
}
