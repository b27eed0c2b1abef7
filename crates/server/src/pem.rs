//! Reads PEM files. Errors never contain their contents: a key that lost its line breaks is one long line,
//! which a library may quote in its error.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use rustls::pki_types::pem::{Error, PemObject as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use crate::tls::TlsError;

/// The maximum size of a file; certificates and keys are far smaller.
const FILE_MAX: u64 = 1 << 20;

pub(crate) fn read(what: &'static str, file: &Path) -> Result<Vec<u8>, TlsError> {
    let mut bytes = Vec::new();
    let opened = File::open(file).and_then(|file| file.take(FILE_MAX + 1).read_to_end(&mut bytes));
    opened.map_err(|source| TlsError::Unreadable { what, file: file.into(), source })?;
    if bytes.len() as u64 > FILE_MAX {
        let why = format!("it is longer than {FILE_MAX} bytes");
        return Err(TlsError::Unusable { what, file: file.into(), why });
    }
    Ok(bytes)
}

/// Parses the certificates of a file, at least one.
pub(crate) fn certificates(
    what: &'static str,
    file: &Path,
    bytes: &[u8],
) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let unusable = |why| TlsError::Unusable { what, file: file.into(), why };
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(bytes).collect();
    let chain = chain.map_err(|error| unusable(describe("certificate", &error)))?;
    if chain.is_empty() {
        return Err(unusable(describe("certificate", &Error::NoItemsFound)));
    }
    Ok(chain)
}

/// Parses the first key of a file.
pub(crate) fn key(what: &'static str, file: &Path, bytes: &[u8]) -> Result<PrivateKeyDer<'static>, TlsError> {
    PrivateKeyDer::from_pem_slice(bytes).map_err(|error| TlsError::Unusable {
        what,
        file: file.into(),
        why: describe("private key", &error),
    })
}

/// Describes a PEM error without quoting the file.
fn describe(what: &str, error: &Error) -> String {
    match error {
        Error::NoItemsFound => format!("it holds no {what} in PEM"),
        Error::MissingSectionEnd { .. } => "a section of its PEM has no line that ends it".to_owned(),
        Error::IllegalSectionStart { .. } => {
            "a line that begins a section of its PEM is broken: perhaps the file lost its line breaks"
                .to_owned()
        }
        Error::Base64Decode(_) => "a section of its PEM is not valid base64".to_owned(),
        Error::SectionTooLarge => "a section of its PEM is too long".to_owned(),
        _ => "it is not PEM".to_owned(),
    }
}
