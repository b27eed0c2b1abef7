//! Test certificates.
#![allow(dead_code, reason = "each test program uses a part of it")]

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    SanType, SerialNumber,
};

/// A certificate authority.
pub(crate) struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

/// A certificate and its key, in PEM.
#[derive(Clone)]
pub(crate) struct Pair {
    pub(crate) cert: String,
    pub(crate) key: String,
    pub(crate) der: Vec<u8>,
}

impl Authority {
    pub(crate) fn new(name: &str) -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().expect("a key");
        Self { issuer: CertifiedIssuer::self_signed(params, key).expect("signed") }
    }

    pub(crate) fn pem(&self) -> String {
        self.issuer.pem()
    }

    /// A certificate of a server on this machine.
    pub(crate) fn server(&self) -> Pair {
        self.sign(&server())
    }

    /// A certificate of a server that has expired.
    pub(crate) fn expired(&self) -> Pair {
        let mut params = server();
        params.not_after = rcgen::date_time_ymd(2020, 1, 1);
        self.sign(&params)
    }

    /// A certificate of a server that is valid from the beginning of a year.
    pub(crate) fn from(&self, year: i32) -> Pair {
        let mut params = server();
        params.not_before = rcgen::date_time_ymd(year, 1, 1);
        self.sign(&params)
    }

    /// Another certificate for the key of a pair.
    pub(crate) fn again(&self, pair: &Pair) -> Pair {
        let key = KeyPair::from_pem(&pair.key).expect("a key");
        self.sign_with(&server(), &key)
    }

    /// A certificate of a client with this URI and common name, valid until the end of a year.
    pub(crate) fn client(&self, uri: &str, common: &str, until: i32) -> Pair {
        self.sign(&client(uri, common, until))
    }

    /// Like `client`, with a serial number above the maximum of 20 bytes, which not every library accepts.
    pub(crate) fn overlong(&self, uri: &str) -> Pair {
        let mut params = client(uri, "x", 2090);
        params.serial_number = Some(SerialNumber::from_slice(&[1; 30]));
        self.sign(&params)
    }

    fn sign(&self, params: &CertificateParams) -> Pair {
        self.sign_with(params, &KeyPair::generate().expect("a key"))
    }

    fn sign_with(&self, params: &CertificateParams, key: &KeyPair) -> Pair {
        let cert = params.signed_by(key, &self.issuer).expect("signed");
        Pair { cert: cert.pem(), key: key.serialize_pem(), der: cert.der().to_vec() }
    }
}

fn server() -> CertificateParams {
    let mut params =
        CertificateParams::new(vec!["127.0.0.1".to_owned(), "localhost".to_owned()]).expect("names");
    params.extended_key_usages.push(ExtendedKeyUsagePurpose::ServerAuth);
    params
}

fn client(uri: &str, common: &str, until: i32) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, common);
    params.subject_alt_names.push(SanType::URI(uri.try_into().expect("a URI")));
    params.extended_key_usages.push(ExtendedKeyUsagePurpose::ClientAuth);
    params.not_after = rcgen::date_time_ymd(until, 12, 31);
    params
}

impl Pair {
    /// Writes the two files of this name in a folder, one after the other. Each replaces an older one at
    /// once: no reader sees a part of it.
    pub(crate) fn write(&self, folder: &Path, name: &str) -> (PathBuf, PathBuf) {
        let files = (folder.join(format!("{name}.pem")), folder.join(format!("{name}.key")));
        for (file, text) in [(&files.0, &self.cert), (&files.1, &self.key)] {
            let new = file.with_extension("new");
            fs::write(&new, text).expect("written");
            fs::set_permissions(&new, fs::Permissions::from_mode(0o600)).expect("private");
            fs::rename(&new, file).expect("replaced");
        }
        files
    }
}
