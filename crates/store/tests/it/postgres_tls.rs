//! A PostgreSQL server over TLS: the certificate counts, and what is wrong with it is an answer, never called away.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

use tidegate_store::{Buckets, StoreError, open};

use crate::kit::engine::{POSTGRES_SERVER, skip_without};
use crate::kit::postgres::patient;
use crate::kit::private_postgres::PrivatePostgres;
use crate::kit::words::{draw_of, granted, own, until_answered};

/// Makes a certificate for this machine that nobody has signed but itself, and has the server show it.
fn certify(data: &Path) {
    let (key, certificate) = (data.join("server.key"), data.join("server.crt"));
    sign(&key, &certificate);
    let owner = fs::metadata(data).expect("it was made");
    for file in [&key, &certificate] {
        std::os::unix::fs::chown(file, Some(owner.uid()), Some(owner.gid()))
            .expect("whoever made it may give it away");
    }
    let settings = fs::OpenOptions::new().append(true).open(data.join("postgresql.conf"));
    settings.and_then(|mut file| file.write_all(b"ssl = on\n")).expect("the settings are written");
}

/// Makes a key, and a certificate that it has signed itself.
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
    let made = openssl.stdout(Stdio::null()).stderr(Stdio::null()).status().expect("openssl is started");
    assert!(made.success(), "openssl has made no certificate");
}

#[tokio::test]
async fn a_certificate_that_is_trusted_opens_and_any_other_is_refused() {
    skip_without!(POSTGRES_SERVER);
    let mut certificate = Vec::new();
    let mut path = None;
    let server = PrivatePostgres::start_with(|data| {
        certify(data);
        certificate = fs::read(data.join("server.crt")).expect("it was made");
        path = Some(data.join("server.crt"));
    });
    let address = format!("{}?sslmode=require", server.url());
    let store = patient(&address).open_secured(&certificate).await.unwrap();
    granted(store.draw(&draw_of(&own("acme", 5), 1)).await);
    let by_address = format!("{address}&sslrootcert={}", path.unwrap().display());
    granted(until_answered(|| open(&by_address)).await.unwrap().draw(&draw_of(&own("acme", 5), 1)).await);

    let error = patient(&address).open_secured(b"").await.unwrap_err();
    assert!(matches!(error, StoreError::Denied { .. }) && !error.is_transient(), "{error:?}");
    // Somebody else may have signed for the same server: it does not count.
    let folder = tempfile::tempdir().unwrap();
    let other = folder.path().join("other.crt");
    sign(&folder.path().join("other.key"), &other);
    let error = patient(&address).open_secured(&fs::read(&other).unwrap()).await.unwrap_err();
    assert!(matches!(error, StoreError::Denied { .. }), "{error:?}");
    // It is for an address, and not for this name.
    let elsewhere = address.replace("127.0.0.1", "localhost");
    let error = patient(&elsewhere).open_secured(&certificate).await.unwrap_err();
    assert!(matches!(error, StoreError::Denied { .. }), "{error:?}");
}

#[tokio::test]
async fn a_server_that_speaks_no_tls_is_denied_to_whoever_insists_and_open_to_others() {
    skip_without!(POSTGRES_SERVER);
    let server = PrivatePostgres::start();
    let insists = format!("{}?sslmode=require", server.url());
    for error in [
        patient(&insists).open_secured(b"").await.unwrap_err(),
        until_answered(|| open(&insists)).await.unwrap_err(),
    ] {
        assert!(matches!(error, StoreError::Denied { .. }) && !error.is_transient(), "{error:?}");
    }
    let store = patient(server.url()).open_secured(b"").await.unwrap();
    granted(store.draw(&draw_of(&own("acme", 5), 1)).await);
}
