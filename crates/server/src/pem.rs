//! Files in PEM. What is in them is never in an error: a key that lost its line breaks is one long line, and a library that shows the
//! line it did not understand would show the key.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use rustls::pki_types::pem::{Error, PemObject as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use crate::tls::TlsError;

/// No more of a file is read: certificates and keys are far smaller.
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

/// The certificates of a file: one at least.
pub(crate) fn certificates(
    what: &'static str,
    file: &Path,
    bytes: &[u8],
) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let unusable = |why| TlsError::Unusable { what, file: file.into(), why };
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(bytes).collect();
    let chain = chain.map_err(|error| unusable(wrong("certificate", &error)))?;
    if chain.is_empty() {
        return Err(unusable(wrong("certificate", &Error::NoItemsFound)));
    }
    Ok(chain)
}

/// The first key of a file.
pub(crate) fn key(what: &'static str, file: &Path, bytes: &[u8]) -> Result<PrivateKeyDer<'static>, TlsError> {
    PrivateKeyDer::from_pem_slice(bytes).map_err(|error| TlsError::Unusable {
        what,
        file: file.into(),
        why: wrong("private key", &error),
    })
}

/// What is wrong with PEM, in words of ours alone.
fn wrong(what: &str, error: &Error) -> String {
    match error {
        Error::NoItemsFound => format!("it holds no {what} in PEM"),
        Error::MissingSectionEnd { .. } => "a section of its PEM has no line that ends it".to_owned(),
        Error::IllegalSectionStart { .. } => {
            "a line that begins a section of its PEM is broken: perhaps the file lost its line breaks"
                .to_owned()
        }
        Error::Base64Decode(_) => "a section of its PEM is no base64".to_owned(),
        Error::SectionTooLarge => "a section of its PEM is too long".to_owned(),
        _ => "it is no PEM".to_owned(),
    }
}
