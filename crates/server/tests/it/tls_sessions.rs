//! What a handshake agrees on: the version of TLS, the protocol behind it, and whether a session is resumed.

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
use crate::kit::tls::{Secure, VERSIONS, config, connect, is_served, last, offering, shown, spoken};
use crate::kit::{make_token, soon};

const BROKEN: &str = "tidegate_tls_handshakes_failed_total{kind=\"broken\"}";

/// A server whose clients need a certificate of one of these. With the name `urn:gate` it stands for a token that may look.
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

/// A client of such a server that takes up a session whenever it has one, and asks for more of them than usual.
fn eager(secure: &Secure, of: &Authority, version: &'static SupportedProtocolVersion) -> Arc<ClientConfig> {
    let pair = of.client("urn:gate", "x", 2090);
    let mut config = config(&secure.authority, Some(&pair), &[version]);
    config.send_ticket_request = Some(TicketRequest { new_session_count: 4, resumption_count: 4 });
    Arc::new(config)
}

/// Whether the other end is known as the token `gate`, which may not see tokens.
async fn is_gate(stream: &mut TlsStream<TcpStream>) -> bool {
    let answer = last(stream, "/v1/tokens").await.unwrap_or_default();
    answer.starts_with("HTTP/1.1 403") && answer.contains("the token `gate` lacks the scope `admin`")
}

#[tokio::test]
async fn a_client_with_a_certificate_is_checked_at_each_connection_and_stays_who_it_is() {
    let clients = Authority::new("of clients");
    let secure = mutual(&[&clients]).await;
    for version in VERSIONS {
        let config = eager(&secure, &clients, version);
        for _ in 0..3 {
            let mut stream = connect(secure.addr, &config).await.unwrap();
            assert!(is_gate(&mut stream).await, "{version:?}");
            let tls = stream.get_ref().1;
            assert_eq!(tls.handshake_kind(), Some(HandshakeKind::Full), "{version:?}");
            assert_eq!(tls.tls13_tickets_received(), 0, "there is nothing to take up later");
        }
    }
}

#[tokio::test]
async fn who_is_trusted_no_more_does_not_come_in_by_a_session_from_before() {
    for version in VERSIONS {
        let (ours, theirs) = (Authority::new("ours"), Authority::new("theirs"));
        let secure = mutual(&[&ours, &theirs]).await;
        let [our, their] = [&ours, &theirs].map(|of| eager(&secure, of, version));
        for config in [&our, &their] {
            assert!(is_gate(&mut connect(secure.addr, config).await.unwrap()).await, "{version:?}");
        }
        fs::write(secure.folder.path().join("clients.pem"), ours.pem()).unwrap();
        secure.tls.reload().await.unwrap();
        // By TLS 1.3 a client takes the handshake for done before the server has looked.
        if let Ok(mut stream) = connect(secure.addr, &their).await {
            let answer = last(&mut stream, "/health/live").await;
            assert!(answer.is_err(), "{version:?} {answer:?}");
        }
        assert!(is_gate(&mut connect(secure.addr, &our).await.unwrap()).await, "{version:?}");
    }
}

#[tokio::test]
async fn who_is_trusted_no_more_before_its_handshake_ends_is_refused_at_its_first_request() {
    for version in VERSIONS {
        let (ours, theirs) = (Authority::new("ours"), Authority::new("theirs"));
        let secure = mutual(&[&ours, &theirs]).await;
        let connector = TlsConnector::from(eager(&secure, &theirs, version));
        let (near, mut far) = tokio::io::duplex(1 << 16);
        let name = ServerName::try_from("localhost").unwrap();
        let shaking = tokio::spawn(async move { connector.connect(name, near).await });
        let (mut stream, mut hello) = (TcpStream::connect(secure.addr).await.unwrap(), [0; 4_096]);
        let read = far.read(&mut hello).await.unwrap();
        stream.write_all(&hello[..read]).await.unwrap();
        // The server has answered: it goes by those whom it trusted then.
        soon("its answer", stream.peek(&mut [0])).await.unwrap();
        fs::write(secure.folder.path().join("clients.pem"), ours.pem()).unwrap();
        secure.tls.reload().await.unwrap();
        let carrying = tokio::spawn(async move { copy_bidirectional(&mut far, &mut stream).await });
        let mut late = soon("the handshake", shaking).await.unwrap().unwrap();
        let answer = soon("the answer", last(&mut late, "/v1/entities")).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 401"), "{version:?} {answer}");
        assert!(answer.contains("the client's certificate is trusted no more"), "{version:?} {answer}");
        carrying.abort();
    }
}

/// Else nobody would see that it expires, or that its CA is taken out of the file.
#[tokio::test]
async fn a_client_whose_certificate_cannot_be_read_is_not_let_in_though_it_is_signed() {
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
async fn a_session_without_a_certificate_goes_on_until_the_server_has_a_new_one_and_is_no_token() {
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
async fn http_1_1_is_offered_and_who_wants_only_something_else_is_told_so() {
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
            assert_eq!(spoken(&stream), agreed, "{version:?} {offer:?}");
            assert!(is_served(&mut stream).await, "{version:?} {offer:?}");
        }
    }
    soon("the count", async { while secure.metric(BROKEN).await < refused {} }).await;
    assert_eq!(secure.metric(BROKEN).await, refused);
}

#[tokio::test]
async fn tls_1_2_and_1_3_are_spoken_the_newer_one_with_who_speaks_both() {
    let secure = Secure::new().await;
    let [newer, older] = VERSIONS;
    for (offer, agreed) in [(&[newer][..], newer), (&[older], older), (&VERSIONS, newer)] {
        let config = Arc::new(config(&secure.authority, None, offer));
        let mut stream = connect(secure.addr, &config).await.unwrap();
        assert_eq!(stream.get_ref().1.protocol_version(), Some(agreed.version));
        assert!(is_served(&mut stream).await, "{agreed:?}");
    }
    // Nobody without a certificate, or with one of somebody else, by the older one either.
    let clients = Authority::new("of clients");
    let secure = mutual(&[&clients]).await;
    let stranger = Authority::new("of clients").client("urn:gate", "x", 2090);
    for pair in [None, Some(&stranger)] {
        let config = Arc::new(config(&secure.authority, pair, &[older]));
        assert!(connect(secure.addr, &config).await.is_err());
    }
}

#[tokio::test]
async fn who_speaks_only_an_older_tls_is_refused_by_an_alert_and_others_are_served() {
    let secure = Secure::new().await;
    for minor in [0, 1, 2] {
        // The first words of a client: version, 32 random bytes, no session, one cipher suite, no compression.
        let mut hello = vec![0x16, 3, 1, 0, 45, 1, 0, 0, 41, 3, minor];
        hello.extend([7; 32]);
        hello.extend([0, 0, 2, 0, 0x2f, 1, 0]);
        let mut old = TcpStream::connect(secure.addr).await.unwrap();
        old.write_all(&hello).await.unwrap();
        let mut alert = Vec::new();
        soon("the end", old.read_to_end(&mut alert)).await.unwrap();
        let [kind, _, _, 0, 2, level, what] = alert[..] else { panic!("{alert:?}") };
        // Fatal: no handshake can be, or not by this version.
        assert!(kind == 21 && level == 2 && [40, 70].contains(&what), "{alert:?}");
        assert!(is_served(&mut secure.connect().await).await);
    }
    soon("the count", async { while secure.metric(BROKEN).await < 3 {} }).await;
}
