//! Tests of the TLS handshake: version, ALPN and session resumption.

use std::fs;
use std::sync::Arc;

use rustls::client::TicketRequest;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, HandshakeKind, SupportedProtocolVersion};
use tidegate_core::limit::token::{TokenId, TokenScope, TokenScopes};
use tidegate_server::Bounds;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy_bidirectional};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::kit::pki::Authority;
use crate::kit::tls::{Secure, VERSIONS, config, connect, is_served, last, negotiated, offering, shown};
use crate::kit::{make_token, soon};

const BROKEN: &str = "tidegate_tls_handshakes_failed_total{kind=\"broken\"}";

/// Starts a server that requires client certificates of these CAs. The name `urn:gate` maps to a token that
/// may read.
async fn mutual(clients: &[&Authority]) -> Secure {
    let secure = Secure::with(Bounds::default(), |folder, options| {
        let file = folder.path().join("clients.pem");
        fs::write(&file, clients.iter().map(|authority| authority.pem()).collect::<String>())
            .expect("written");
        options.client_ca(file).client("urn:gate", TokenId::new("gate").expect("an id"))
    })
    .await;
    make_token(secure.kit.limiter.store(), "gate", TokenScopes::new([TokenScope::Read]), "default").await;
    secure
}

/// A client that resumes sessions whenever possible, and requests more tickets than usual.
fn resuming(
    secure: &Secure,
    of: &Authority,
    version: &'static SupportedProtocolVersion,
) -> Arc<ClientConfig> {
    let pair = of.client("urn:gate", "x", 2090);
    let mut config = config(&secure.authority, Some(&pair), &[version]);
    config.send_ticket_request = Some(TicketRequest { new_session_count: 4, resumption_count: 4 });
    Arc::new(config)
}

/// Whether the connection is authorized as the token `gate`, which may not list tokens.
async fn is_gate(stream: &mut TlsStream<TcpStream>) -> bool {
    let answer = last(stream, "/v1/tokens").await.unwrap_or_default();
    answer.starts_with("HTTP/1.1 403") && answer.contains("the token `gate` lacks the scope `admin`")
}

#[tokio::test]
async fn client_certificate_is_verified_per_connection() {
    let clients = Authority::new("of clients");
    let secure = mutual(&[&clients]).await;
    for version in VERSIONS {
        let config = resuming(&secure, &clients, version);
        for _ in 0..3 {
            let mut stream = connect(secure.addr, &config).await.unwrap();
            assert!(is_gate(&mut stream).await, "{version:?}");
            let tls = stream.get_ref().1;
            assert_eq!(tls.handshake_kind(), Some(HandshakeKind::Full), "{version:?}");
            assert_eq!(tls.tls13_tickets_received(), 0, "no session can be resumed");
        }
    }
}

#[tokio::test]
async fn revoked_client_cannot_resume_session() {
    for version in VERSIONS {
        let (ours, theirs) = (Authority::new("ours"), Authority::new("theirs"));
        let secure = mutual(&[&ours, &theirs]).await;
        let [our, their] = [&ours, &theirs].map(|of| resuming(&secure, of, version));
        for config in [&our, &their] {
            assert!(is_gate(&mut connect(secure.addr, config).await.unwrap()).await, "{version:?}");
        }
        fs::write(secure.folder.path().join("clients.pem"), ours.pem()).unwrap();
        secure.tls.reload().await.unwrap();
        // In TLS 1.3 the client completes the handshake before the server has verified the certificate.
        if let Ok(mut stream) = connect(secure.addr, &their).await {
            let answer = last(&mut stream, "/health/live").await;
            assert!(answer.is_err(), "{version:?} {answer:?}");
        }
        assert!(is_gate(&mut connect(secure.addr, &our).await.unwrap()).await, "{version:?}");
    }
}

#[tokio::test]
async fn client_revoked_during_handshake_is_refused() {
    for version in VERSIONS {
        let (ours, theirs) = (Authority::new("ours"), Authority::new("theirs"));
        let secure = mutual(&[&ours, &theirs]).await;
        let connector = TlsConnector::from(resuming(&secure, &theirs, version));
        let (near, mut far) = tokio::io::duplex(1 << 16);
        let name = ServerName::try_from("localhost").unwrap();
        let shaking = tokio::spawn(async move { connector.connect(name, near).await });
        let (mut stream, mut hello) = (TcpStream::connect(secure.addr).await.unwrap(), [0; 4_096]);
        let read = far.read(&mut hello).await.unwrap();
        stream.write_all(&hello[..read]).await.unwrap();
        // The server has responded: it uses the CAs of that time.
        soon("the response", stream.peek(&mut [0])).await.unwrap();
        fs::write(secure.folder.path().join("clients.pem"), ours.pem()).unwrap();
        secure.tls.reload().await.unwrap();
        let carrying = tokio::spawn(async move { copy_bidirectional(&mut far, &mut stream).await });
        let mut late = soon("the handshake", shaking).await.unwrap().unwrap();
        let answer = soon("the answer", last(&mut late, "/v1/entities")).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 401"), "{version:?} {answer}");
        assert!(answer.contains("the client's certificate is no longer trusted"), "{version:?} {answer}");
        carrying.abort();
    }
}

/// Otherwise its expiry, or the removal of its CA, would go unnoticed.
#[tokio::test]
async fn unparsable_client_certificate_is_rejected() {
    let clients = Authority::new("of clients");
    let secure = mutual(&[&clients]).await;
    for version in VERSIONS {
        let config = Arc::new(config(&secure.authority, Some(&clients.overlong("urn:gate")), &[version]));
        if let Ok(mut stream) = connect(secure.addr, &config).await {
            let answer = last(&mut stream, "/health/live").await.unwrap_or_default();
            assert_eq!(answer, "", "{version:?}");
        }
    }
    soon("the count", async { while secure.metric(BROKEN).await < 2 {} }).await;
}

#[tokio::test]
async fn anonymous_session_ends_with_new_certificate() {
    for version in VERSIONS {
        let secure = Secure::new().await;
        let config = Arc::new(config(&secure.authority, None, &[version]));
        for kind in [HandshakeKind::Full, HandshakeKind::Resumed, HandshakeKind::Resumed] {
            let mut stream = connect(secure.addr, &config).await.unwrap();
            let answer = last(&mut stream, "/v1/entities").await.unwrap();
            assert!(answer.starts_with("HTTP/1.1 401"), "{version:?} {answer}");
            assert_eq!(stream.get_ref().1.handshake_kind(), Some(kind), "{version:?}");
        }
        let new = secure.authority.server();
        new.write(secure.folder.path(), "server");
        secure.tls.reload().await.unwrap();
        let mut stream = connect(secure.addr, &config).await.unwrap();
        assert!(is_served(&mut stream).await, "{version:?}");
        assert_eq!(stream.get_ref().1.handshake_kind(), Some(HandshakeKind::Full), "{version:?}");
        assert_eq!(shown(&stream), new.der, "{version:?}");
    }
}

#[tokio::test]
async fn http_port_negotiates_only_http_1_1() {
    let secure = Secure::new().await;
    let mut refused = 0;
    for version in VERSIONS {
        let client = config(&secure.authority, None, &[version]);
        for offer in [&["h2"][..], &["http/1.0"], &["h3", "acme-tls/1"]] {
            let error = connect(secure.addr, &offering(&client, offer)).await.unwrap_err();
            assert!(error.to_string().contains("NoApplicationProtocol"), "{version:?} {offer:?}: {error}");
            refused += 1;
        }
        let both = &["h2", "http/1.1"];
        for (offer, agreed) in [(&["http/1.1"][..], Some("http/1.1")), (both, Some("http/1.1")), (&[], None)]
        {
            let mut stream = connect(secure.addr, &offering(&client, offer)).await.unwrap();
            assert_eq!(negotiated(&stream), agreed, "{version:?} {offer:?}");
            assert!(is_served(&mut stream).await, "{version:?} {offer:?}");
        }
    }
    soon("the count", async { while secure.metric(BROKEN).await < refused {} }).await;
    assert_eq!(secure.metric(BROKEN).await, refused);
}

#[tokio::test]
async fn newest_common_tls_version_is_negotiated() {
    let secure = Secure::new().await;
    let [newer, older] = VERSIONS;
    for (offer, agreed) in [(&[newer][..], newer), (&[older], older), (&VERSIONS, newer)] {
        let config = Arc::new(config(&secure.authority, None, offer));
        let mut stream = connect(secure.addr, &config).await.unwrap();
        assert_eq!(stream.get_ref().1.protocol_version(), Some(agreed.version));
        assert!(is_served(&mut stream).await, "{agreed:?}");
    }
    // Missing and untrusted certificates are rejected with the older version too.
    let clients = Authority::new("of clients");
    let secure = mutual(&[&clients]).await;
    let untrusted = Authority::new("of clients").client("urn:gate", "x", 2090);
    for pair in [None, Some(&untrusted)] {
        let config = Arc::new(config(&secure.authority, pair, &[older]));
        assert!(connect(secure.addr, &config).await.is_err());
    }
}

#[tokio::test]
async fn older_tls_versions_are_refused_with_alert() {
    let secure = Secure::new().await;
    for minor in [0, 1, 2] {
        // A ClientHello: version, 32 random bytes, no session, one cipher suite, no compression.
        let mut hello = vec![0x16, 3, 1, 0, 45, 1, 0, 0, 41, 3, minor];
        hello.extend([7; 32]);
        hello.extend([0, 0, 2, 0, 0x2f, 1, 0]);
        let mut old = TcpStream::connect(secure.addr).await.unwrap();
        old.write_all(&hello).await.unwrap();
        let mut alert = Vec::new();
        soon("the end", old.read_to_end(&mut alert)).await.unwrap();
        let [kind, _, _, 0, 2, level, what] = alert[..] else { panic!("{alert:?}") };
        // A fatal alert: handshake failure or protocol version.
        assert!(kind == 21 && level == 2 && [40, 70].contains(&what), "{alert:?}");
        assert!(is_served(&mut secure.connect().await).await);
    }
    soon("the count", async { while secure.metric(BROKEN).await < 3 {} }).await;
}
