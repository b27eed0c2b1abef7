//! Over TLS: a certificate that nobody trusts is denied and never away, and nothing is said in the open.

use std::process::Command;
use std::time::Duration;

use tidegate_store::{RedisOptions, StoreError};

use crate::kit::engine::{REDIS_SERVER, free_port, skip_without};
use crate::kit::private_redis::Server;
use crate::kit::redis::{connect, patient};

#[tokio::test]
async fn a_certificate_that_nobody_trusts_is_denied_and_never_away() {
    skip_without!(REDIS_SERVER);
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name).display().to_string();
    let (key, certificate) = (file("key.pem"), file("certificate.pem"));
    let made = Command::new("openssl")
        .args(["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"])
        .args(["-addext", "subjectAltName=DNS:localhost", "-keyout", &key, "-out", &certificate])
        .output()
        .unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let port = free_port().to_string();
    let tls = ["--tls-port", &port, "--tls-cert-file", &certificate, "--tls-key-file", &key];
    let server = Server::start(
        &[&tls[..], &["--tls-ca-cert-file", &certificate, "--tls-auth-clients", "no"]].concat(),
    )
    .await;
    let plain = patient(&server.url()).open().await;
    assert!(plain.is_ok(), "it is there without TLS: {plain:?}");
    let url = format!("rediss://localhost:{port}");
    let error = patient(&url).open().await.expect_err("it is not trusted");
    assert!(matches!(error, StoreError::Denied { .. }), "{url}: {error:?}");
}

/// Such a server says nothing to a greeting that it does not understand, so that there is nothing to tell it by from one that is
/// away. What counts is that nothing is ever said to it in the open.
#[tokio::test]
async fn a_server_that_speaks_no_tls_is_never_spoken_to_without() {
    skip_without!(REDIS_SERVER);
    let server = Server::start(&[]).await;
    for url in [
        format!("rediss://:secret@127.0.0.1:{}", server.port),
        format!("rediss+cluster://:secret@127.0.0.1:{}", server.port),
    ] {
        let opened = RedisOptions::new(&url).timeout(Duration::from_millis(500)).open().await;
        let error = opened.expect_err("it is no TLS that it speaks");
        assert!(matches!(error, StoreError::Denied { .. }) || error.is_transient(), "{url}: {error:?}");
        assert!(!error.to_string().contains("secret"), "{error}");
    }
    let mut connection = connect(&server.url()).await;
    let stats: String = redis::cmd("INFO").arg("commandstats").query_async(&mut connection).await.unwrap();
    assert!(!stats.contains("auth") && !stats.contains("eval"), "{stats}");
}
