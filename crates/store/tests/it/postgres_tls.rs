//! PostgreSQL over TLS: the certificate is verified, and a failed verification is an error, not
//! unavailability.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

use tidegate_store::{Buckets, StoreError, open};

use crate::kit::common::{draw_of, granted, own, until_answered};
use crate::kit::engine::{POSTGRES_SERVER, skip_without};
use crate::kit::postgres::options_at;
use crate::kit::private_postgres::PrivatePostgres;

/// Creates a self-signed certificate for this machine and configures the server to use it.
fn certify(data: &Path) {
    let (key, certificate) = (data.join("server.key"), data.join("server.crt"));
    sign(&key, &certificate);
    let owner = fs::metadata(data).expect("the data folder exists");
    for file in [&key, &certificate] {
        std::os::unix::fs::chown(file, Some(owner.uid()), Some(owner.gid()))
            .expect("the creator may change the owner");
    }
    let settings = fs::OpenOptions::new().append(true).open(data.join("postgresql.conf"));
    settings.and_then(|mut file| file.write_all(b"ssl = on\n")).expect("the settings are written");
}

/// Creates a key and a self-signed certificate.
fn sign(key: &Path, certificate: &Path) {
    let mut openssl = Command::new("openssl");
    openssl.args([
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "30",
    ]);
    openssl.args(["-subj", "/CN=tidegate", "-addext", "subjectAltName=IP:127.0.0.1"]);
    openssl
        .args(["-addext", "basicConstraints=critical,CA:FALSE", "-keyout"])
        .arg(key)
        .arg("-out")
        .arg(certificate);
    let made = openssl.stdout(Stdio::null()).stderr(Stdio::null()).status().expect("openssl starts");
    assert!(made.success(), "openssl failed");
}

#[tokio::test]
async fn untrusted_certificate_is_refused() {
    skip_without!(POSTGRES_SERVER);
    let mut certificate = Vec::new();
    let mut path = None;
    let server = PrivatePostgres::start_with(|data| {
        certify(data);
        certificate = fs::read(data.join("server.crt")).expect("the certificate exists");
        path = Some(data.join("server.crt"));
    });
    let address = format!("{}?sslmode=require", server.url());
    let store = options_at(&address).open_secured(&certificate).await.unwrap();
    granted(store.draw(&draw_of(&own("acme", 5), 1)).await);
    let by_address = format!("{address}&sslrootcert={}", path.unwrap().display());
    granted(until_answered(|| open(&by_address)).await.unwrap().draw(&draw_of(&own("acme", 5), 1)).await);

    let error = options_at(&address).open_secured(b"").await.unwrap_err();
    assert!(matches!(error, StoreError::Denied { .. }) && !error.is_transient(), "{error:?}");
    // A certificate of another issuer for the same server is not trusted.
    let folder = tempfile::tempdir().unwrap();
    let other = folder.path().join("other.crt");
    sign(&folder.path().join("other.key"), &other);
    let error = options_at(&address).open_secured(&fs::read(&other).unwrap()).await.unwrap_err();
    assert!(matches!(error, StoreError::Denied { .. }), "{error:?}");
    // The certificate is for an address, not for this name.
    let by_name = address.replace("127.0.0.1", "localhost");
    let error = options_at(&by_name).open_secured(&certificate).await.unwrap_err();
    assert!(matches!(error, StoreError::Denied { .. }), "{error:?}");
}

#[tokio::test]
async fn required_tls_is_denied_by_a_plaintext_server() {
    skip_without!(POSTGRES_SERVER);
    let server = PrivatePostgres::start();
    let insists = format!("{}?sslmode=require", server.url());
    for error in [
        options_at(&insists).open_secured(b"").await.unwrap_err(),
        until_answered(|| open(&insists)).await.unwrap_err(),
    ] {
        assert!(matches!(error, StoreError::Denied { .. }) && !error.is_transient(), "{error:?}");
    }
    let store = options_at(server.url()).open_secured(b"").await.unwrap();
    granted(store.draw(&draw_of(&own("acme", 5), 1)).await);
}
