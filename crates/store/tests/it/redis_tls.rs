//! Redis over TLS: an untrusted certificate is denied, not unavailable, and nothing is sent in plaintext.

use std::process::Command;
use std::time::Duration;

use tidegate_store::{RedisOptions, StoreError};

use crate::kit::engine::{REDIS_SERVER, free_port, skip_without};
use crate::kit::private_redis::Server;
use crate::kit::redis::{connect, options_at};

#[tokio::test]
async fn untrusted_certificate_is_denied_not_unavailable() {
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
    let plain = options_at(&server.url()).open().await;
    assert!(plain.is_ok(), "the server responds without TLS: {plain:?}");
    let url = format!("rediss://localhost:{port}");
    let error = options_at(&url).open().await.expect_err("the certificate is not trusted");
    assert!(matches!(error, StoreError::Denied { .. }), "{url}: {error:?}");
}

/// A server without TLS does not respond to a TLS hello, so it cannot be told from one that hangs. What
/// counts is that the store never sends plaintext to it.
#[tokio::test]
async fn tls_client_never_sends_plaintext() {
    skip_without!(REDIS_SERVER);
    let server = Server::start(&[]).await;
    for url in [
        format!("rediss://:secret@127.0.0.1:{}", server.port),
        format!("rediss+cluster://:secret@127.0.0.1:{}", server.port),
    ] {
        let opened = RedisOptions::new(&url).timeout(Duration::from_millis(500)).open().await;
        let error = opened.expect_err("the server does not support TLS");
        assert!(matches!(error, StoreError::Denied { .. }) || error.is_transient(), "{url}: {error:?}");
        assert!(!error.to_string().contains("secret"), "{error}");
    }
    let mut connection = connect(&server.url()).await;
    let stats: String = redis::cmd("INFO").arg("commandstats").query_async(&mut connection).await.unwrap();
    assert!(!stats.contains("auth") && !stats.contains("eval"), "{stats}");
}
