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

/// Reads a private key, which only the server's user, or its group, may read.
pub(crate) fn read_key(file: &Path) -> Result<Vec<u8>, TlsError> {
    let bytes = read("key", file)?;
    match other_users_mode(file) {
        Some(mode) => {
            let why = format!("every user can read it (mode {mode:04o}): set mode 0600 or 0640");
            Err(TlsError::Unusable { what: "key", file: file.into(), why })
        }
        None => Ok(bytes),
    }
}

/// Returns the mode of a file that every user can read.
#[cfg(unix)]
fn other_users_mode(file: &Path) -> Option<u32> {
    use std::os::unix::fs::PermissionsExt as _;
    let mode = std::fs::metadata(file).ok()?.permissions().mode() & 0o777;
    (mode & 0o007 != 0).then_some(mode)
}

/// Other systems have no modes.
#[cfg(not(unix))]
fn other_users_mode(_: &Path) -> Option<u32> {
    None
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
