//! Tests of TLS over real sockets: accepted certificates and reloads.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::sync::Arc;
use std::time::Duration;

use tempfile::TempDir;
use tidegate::store::ManualWall;
use tidegate::{Expect, Stamp};
use tidegate_core::limit::token::{TokenId, TokenScope, TokenScopes};
use tidegate_server::{Bounds, Server, ServerOptions, ShutdownOutcome, TlsOptions};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::kit::codec::json;
use crate::kit::frozen::{Frozen, advance_until};
use crate::kit::pki::Authority;
use crate::kit::tls::{Secure, VERSIONS, config, connect, is_served, shown};
use crate::kit::{bounds, make_token, soon};

#[tokio::test]
async fn only_clients_trusting_the_ca_connect() {
    let secure = Secure::new().await;
    let client = secure.client(None);
    assert_eq!(secure.get(&client, "/health/ready").await.unwrap().0, 204);
    assert_eq!(secure.get(&client, "/v1/entities").await.unwrap().0, 401, "TLS does not replace a token");
    let bearer = client.get(secure.url("/v1/entities")).bearer_auth(&secure.kit.token).send().await.unwrap();
    assert_eq!(bearer.status().as_u16(), 200);
    let untrusted = Arc::new(config(&Authority::new("another"), None, &VERSIONS));
    let untrusted = connect(secure.addr, &untrusted).await.unwrap_err();
    assert!(untrusted.to_string().contains("UnknownIssuer"), "{untrusted}");
    assert!(is_served(&mut secure.connect().await).await, "and the server continues");
    let broken = "tidegate_tls_handshakes_failed_total{kind=\"broken\"}";
    soon("the count", async { while secure.metric(broken).await < 1 {} }).await;
    let text = secure.kit.get("/metrics").await.text;
    assert!(text.contains(&format!("\n{broken} 1\n")), "{text}");
    let expiry = format!(
        "\ntidegate_tls_certificate_expiry_seconds {}\n",
        secure.tls.expires_at().as_micros() / 1_000_000
    );
    assert!(text.contains(&expiry), "{expiry} {text}");
}

#[tokio::test]
async fn plaintext_client_gets_bad_request() {
    let secure = Secure::new().await;
    let mut plain = TcpStream::connect(secure.addr).await.unwrap();
    plain.write_all(b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    soon("the answer", plain.read_to_string(&mut answer)).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 400 Bad Request\r\n"), "{answer}");
    assert!(answer.ends_with("\r\n\r\nthis port speaks TLS: ask at its https:// address\n"), "{answer}");
    drop(plain);
    let mut noise = TcpStream::connect(secure.addr).await.unwrap();
    noise.write_all(&[0; 100]).await.unwrap();
    // The connection is closed or reset without data.
    assert_eq!(soon("the end", noise.read(&mut [0; 10])).await.unwrap_or(0), 0);
    let mut broken = TcpStream::connect(secure.addr).await.unwrap();
    broken.write_all(&[0x16; 100]).await.unwrap();
    let mut alert = Vec::new();
    let _ = soon("the end", broken.read_to_end(&mut alert)).await;
    assert!(!alert.starts_with(b"HTTP"), "{alert:?}");
    assert!(is_served(&mut secure.connect().await).await);
    // A port probe does not count as a failed handshake.
    drop(TcpStream::connect(secure.addr).await.unwrap());
    let plain =
        async { while secure.metric("tidegate_tls_handshakes_failed_total{kind=\"plain\"}").await < 2 {} };
    soon("the count", plain).await;
    assert_eq!(secure.metric("tidegate_tls_handshakes_failed_total{kind=\"broken\"}").await, 1);
}

#[tokio::test]
async fn client_certificate_maps_to_token() {
    let clients = Authority::new("of clients");
    let gate = TokenId::new("gate").unwrap();
    let secure = Secure::with(Bounds::default(), |folder, options| {
        let file = folder.path().join("clients.pem");
        fs::write(&file, clients.pem()).unwrap();
        options.client_ca(file).client("spiffe://prod/gate", gate.clone())
    })
    .await;
    // Paused time: no idle connection is closed.
    let _frozen = Frozen::new();
    let store = secure.kit.limiter.store();
    make_token(store, "gate", TokenScopes::new([TokenScope::Read]), "default").await;

    // Missing, untrusted and expired certificates are rejected.
    let untrusted = Authority::new("of clients").client("spiffe://prod/gate", "x", 2090);
    let expired = clients.client("spiffe://prod/gate", "x", 2020);
    for pair in [None, Some(&untrusted), Some(&expired)] {
        assert!(secure.get(&secure.client(pair), "/health/live").await.is_err());
    }

    let known = secure.client(Some(&clients.client("spiffe://prod/gate", "x", 2027)));
    assert_eq!(secure.get(&known, "/v1/entities").await.unwrap().0, 200);
    let ask = json!({"entity": "a", "resource": "b", "cost": {"rpm": 1}}).to_string();
    let spend = known.post(secure.url("/v1/spend")).header("content-type", "application/json").body(ask);
    let refused = spend.send().await.unwrap();
    assert_eq!(refused.status().as_u16(), 403, "its token has only the scope `read`");
    assert!(refused.text().await.unwrap().contains("the token `gate` lacks the scope `acquire`"));

    // A sent token takes precedence, valid or not.
    let with = |token: &str| known.get(secure.url("/v1/tokens")).bearer_auth(token).send();
    assert_eq!(with(&secure.kit.token).await.unwrap().status().as_u16(), 200);
    assert_eq!(with("tg_no_token").await.unwrap().status().as_u16(), 401);

    // An unmapped certificate needs a token.
    let other = secure.client(Some(&clients.client("spiffe://prod/other", "spiffe://prod/gate", 2090)));
    let (status, body) = secure.get(&other, "/v1/entities").await.unwrap();
    assert!(status == 401 && body.contains("the client's certificate maps to no token"), "{body}");
    assert_eq!(secure.get(&other, "/health/live").await.unwrap().0, 204);

    // A connection may last longer than the certificate.
    secure.kit.clock.advance(Duration::from_hours(24 * 365));
    let (status, body) = secure.get(&known, "/v1/entities").await.unwrap();
    assert!(status == 401 && body.contains("the client's certificate has expired"), "{body}");
    assert_eq!(
        with(&secure.kit.token).await.unwrap().status().as_u16(),
        401,
        "a token does not replace a valid certificate"
    );
    let known = secure.client(Some(&clients.client("spiffe://prod/gate", "x", 2090)));
    assert_eq!(secure.get(&known, "/v1/entities").await.unwrap().0, 200);

    // Revoking the token revokes the certificate's access.
    store.revoke_token(&gate, Expect::Any, "test").await.unwrap();
    let (status, body) = secure.get(&known, "/v1/entities").await.unwrap();
    assert!(status == 401 && body.contains("the token was revoked"), "{body}");
}

#[tokio::test]
async fn certificate_for_missing_token_is_unauthorized() {
    let clients = Authority::new("of clients");
    let secure = Secure::with(Bounds::default(), |folder, options| {
        let file = folder.path().join("clients.pem");
        fs::write(&file, clients.pem()).unwrap();
        options.client_ca(file).client("urn:gate", TokenId::new("later").unwrap())
    })
    .await;
    let client = secure.client(Some(&clients.client("urn:gate", "x", 2090)));
    let (status, body) = secure.get(&client, "/v1/entities").await.unwrap();
    assert!(
        status == 401 && body.contains("the token that the client's certificate maps to does not exist"),
        "{body}"
    );
    make_token(secure.kit.limiter.store(), "later", TokenScopes::new([TokenScope::Read]), "default").await;
    assert_eq!(secure.get(&client, "/v1/entities").await.unwrap().0, 200);
}

#[tokio::test]
async fn new_certificate_applies_to_new_connections() {
    let secure = Secure::new().await;
    let mut old = secure.connect().await;
    assert!(is_served(&mut old).await);
    let new = secure.authority.server();
    new.write(secure.folder.path(), "server");
    assert_eq!(shown(&secure.connect().await), secure.pair.der, "the files are not reloaded yet");
    secure.tls.reload().await.unwrap();
    let mut fresh = secure.connect().await;
    assert_eq!((shown(&old), shown(&fresh)), (secure.pair.der.clone(), new.der));
    assert!(is_served(&mut old).await && is_served(&mut fresh).await);
    assert_eq!(secure.metric("tidegate_tls_reloads_total{result=\"done\"}").await, 1);
}

#[tokio::test]
async fn changed_files_are_reloaded() {
    let secure =
        Secure::with(Bounds::default(), |_, options| options.check_every(Duration::from_millis(1))).await;
    for _ in 0..3 {
        let new = secure.authority.server();
        new.write(secure.folder.path(), "server");
        let seen = async { while shown(&secure.connect().await) != new.der {} };
        soon("the new certificate", seen).await;
    }
}

#[tokio::test]
async fn invalid_key_pair_is_reported_and_old_one_kept() {
    let secure = Secure::new().await;
    let (new, other) = (secure.authority.server(), secure.authority.server());
    let (expired, file) = (secure.authority.expired(), secure.folder.path().join("server"));
    let [cert, key] = ["pem", "key"].map(|kind| file.with_extension(kind));
    let broken = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    let table = [
        ("", new.key.as_str(), "it holds no certificate in PEM"),
        (broken, &new.key, "the certificate `"),
        (&new.cert[..200], &new.key, "the certificate `"),
        (&new.cert, "", "it holds no private key in PEM"),
        (&new.cert, &new.cert, "it holds no private key in PEM"),
        (&new.cert, &other.key, "it does not match the certificate `"),
        (&expired.cert, &expired.key, "expired at 2020-01-01T00:00:00Z; it is now "),
    ];
    let count = table.len() as u64;
    for (new_cert, new_key, sentence) in table {
        fs::write(&cert, new_cert).unwrap();
        fs::write(&key, new_key).unwrap();
        let error = secure.tls.reload().await.unwrap_err().to_string();
        assert!(error.contains(sentence) && error.contains(&*file.to_string_lossy()), "{error}");
        assert!(!error.contains(new_key.get(60..90).unwrap_or("a key")), "{error}");
        assert_eq!(shown(&secure.connect().await), secure.pair.der, "{error}");
    }
    new.write(secure.folder.path(), "server");
    fs::remove_file(&key).unwrap();
    let error = secure.tls.reload().await.unwrap_err().to_string();
    assert!(error.starts_with("the key `") && error.contains("` cannot be read: "), "{error}");
    assert_eq!(secure.metric("tidegate_tls_reloads_total{result=\"failed\"}").await, count + 1);
    new.write(secure.folder.path(), "server");
    secure.tls.reload().await.unwrap();
    assert_eq!(shown(&secure.connect().await), new.der);
}

#[tokio::test]
async fn invalid_tls_options_are_rejected() {
    let (folder, authority) = (TempDir::new().unwrap(), Authority::new("a"));
    let (cert, key) = authority.server().write(folder.path(), "server");
    let ca = folder.path().join("ca.pem");
    fs::write(&ca, authority.pem()).unwrap();
    let options = || TlsOptions::new(&cert, &key);
    let token = |id: &str| TokenId::new(id).unwrap();
    let table = [
        (options().client("a", token("t")), "client names require a client CA"),
        (options().client_ca(&ca).client("", token("t")), "the name is empty"),
        (options().client_ca(&ca).client("a", token(".lease-key")), "the token is reserved"),
        (
            options().client_ca(&ca).client("a", token("t")).client("a", token("u")),
            "cannot map the client `a` to the token `u`: the name is already mapped",
        ),
        (options().client_ca(&key), "it holds no certificate in PEM"),
        (options().client_ca("none.pem"), "the client CA `none.pem` cannot be read: "),
    ];
    for (options, sentence) in table {
        let error = options.load().unwrap_err().to_string();
        assert!(error.contains(sentence), "{error}");
    }
    let anywhere = SocketAddr::from(([0, 0, 0, 0], 0));
    let tls = options().load().unwrap();
    assert!(Server::bind(&ServerOptions::new(anywhere)).await.is_err());
    assert!(Server::bind(&ServerOptions::new(anywhere).tls(tls.clone())).await.is_ok());
    let watched = ServerOptions::new(anywhere).tls(tls).metrics(anywhere);
    assert!(
        Server::bind(&watched).await.is_err(),
        "the metrics listener has no TLS, so it must stay on loopback"
    );
}

#[tokio::test]
async fn stalled_handshake_times_out_and_frees_slot() {
    let secure = Secure::with(bounds(|bounds| bounds.connections_max = 1), |_, options| options).await;
    let _frozen = Frozen::new();
    for begun in [&b""[..], b"\x16", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"] {
        let mut slow = TcpStream::connect(secure.addr).await.unwrap();
        slow.write_all(begun).await.unwrap();
        let mut rest = Vec::new();
        let (_, passed) = advance_until(Duration::from_secs(1), slow.read_to_end(&mut rest)).await;
        assert!(rest.is_empty() && passed >= secure.kit.state.bounds().head_time, "{begun:?} {passed:?}");
    }
    assert!(is_served(&mut secure.connect().await).await);
    assert_eq!(secure.metric("tidegate_tls_handshakes_failed_total{kind=\"timed_out\"}").await, 3);
}

#[tokio::test]
async fn errors_never_contain_mangled_key() {
    let secure = Secure::new().await;
    let file = secure.folder.path().join("server");
    let [cert, key] = ["pem", "key"].map(|kind| file.with_extension(kind));
    let secret = secure.pair.key.clone();
    let line = secret.lines().nth(1).unwrap().to_owned();
    let decimals = |text: &str| format!("{:?}", &text.as_bytes()[..20]).trim_matches(['[', ']']).to_owned();
    let (first, label) = (decimals(&line), decimals(&secret));
    for broken in
        [secret.replace('\n', "\\n"), secret.replace('\n', " "), secret[..secret.len() - 30].to_owned()]
    {
        for (as_cert, as_key) in [(&secure.pair.cert, &broken), (&broken, &secret)] {
            fs::write(&cert, as_cert).unwrap();
            fs::write(&key, as_key).unwrap();
            let error = secure.tls.reload().await.unwrap_err();
            for text in [error.to_string(), format!("{error:?}")] {
                let shows = [&line, &first, &label].into_iter().any(|part| text.contains(part.as_str()));
                assert!(!shows, "{text}");
            }
        }
    }
}

/// A server that checks its files every millisecond.
async fn watching(change: impl FnOnce(&TempDir, TlsOptions) -> TlsOptions) -> Secure {
    Secure::with(Bounds::default(), |folder, options| {
        change(folder, options.check_every(Duration::from_millis(1)))
    })
    .await
}

impl Secure {
    async fn until_failed(&self, count: u64) {
        let failed =
            async { while self.metric("tidegate_tls_reloads_total{result=\"failed\"}").await < count {} };
        soon("a failed reload", failed).await;
    }

    async fn until_shown(&self, der: &[u8]) {
        let seen = async { while shown(&self.connect().await) != der {} };
        soon("the new certificate", seen).await;
    }
}

#[tokio::test]
async fn key_pair_files_can_be_replaced_one_by_one() {
    let secure = watching(|_, options| options).await;
    let new = secure.authority.server();
    let file = secure.folder.path().join("server");
    fs::write(file.with_extension("pem"), &new.cert).unwrap();
    secure.until_failed(1).await;
    assert_eq!(shown(&secure.connect().await), secure.pair.der);
    fs::write(file.with_extension("key"), &new.key).unwrap();
    secure.until_shown(&new.der).await;
}

#[tokio::test]
async fn failed_reload_is_retried_and_logged_once() {
    // In 2019. The client uses the machine's clock and accepts the certificate.
    let clock = ManualWall::new(Stamp::from_secs(1_550_000_000));
    let secure = watching(|_, options| options.clock(Arc::new(clock.clone()))).await;
    let early = secure.authority.from(2020);
    early.write(secure.folder.path(), "server");
    secure.until_failed(1).await;
    // The files are checked many times until then.
    for _ in 0..20 {
        assert_eq!(shown(&secure.connect().await), secure.pair.der, "it is not valid yet");
    }
    // The two files may have been reloaded one by one.
    assert!(secure.metric("tidegate_tls_reloads_total{result=\"failed\"}").await <= 3);
    clock.advance(Duration::from_hours(24 * 365));
    secure.until_shown(&early.der).await;
}

#[tokio::test]
async fn change_with_same_mtime_and_length_is_detected() {
    let secure = watching(|_, options| options).await;
    let file = secure.folder.path().join("server.pem");
    let old = fs::metadata(&file).unwrap().modified().unwrap();
    // The same key, in another certificate of the same length.
    let mut again = secure.authority.again(&secure.pair);
    while again.cert.len() != secure.pair.cert.len() {
        again = secure.authority.again(&secure.pair);
    }
    let other = secure.folder.path().join("other.pem");
    fs::write(&other, &again.cert).unwrap();
    fs::File::options().write(true).open(&other).unwrap().set_modified(old).unwrap();
    fs::rename(&other, &file).unwrap();
    secure.until_shown(&again.der).await;
}

#[tokio::test]
async fn revoked_client_is_refused_on_open_connection() {
    let (ours, theirs) = (Authority::new("ours"), Authority::new("theirs"));
    let secure = Secure::with(Bounds::default(), |folder, options| {
        let file = folder.path().join("clients.pem");
        fs::write(&file, ours.pem() + &theirs.pem()).unwrap();
        options.client_ca(file).client("urn:gate", TokenId::new("gate").unwrap())
    })
    .await;
    // Paused time: no idle connection is closed.
    let _frozen = Frozen::new();
    make_token(secure.kit.limiter.store(), "gate", TokenScopes::new([TokenScope::Read]), "default").await;
    let [our, their] = [&ours, &theirs].map(|of| secure.client(Some(&of.client("urn:gate", "x", 2090))));
    for client in [&our, &their] {
        assert_eq!(secure.get(client, "/v1/entities").await.unwrap().0, 200);
    }
    // An invalid server certificate does not delay the removal of a client CA.
    fs::write(secure.folder.path().join("clients.pem"), ours.pem()).unwrap();
    fs::write(secure.folder.path().join("server.key"), "").unwrap();
    assert!(secure.tls.reload().await.is_err());
    assert_eq!(secure.get(&our, "/v1/entities").await.unwrap().0, 200, "its connection continues");
    for token in [None, Some(&secure.kit.token)] {
        let ask = their.get(secure.url("/v1/entities"));
        let answer = token.into_iter().fold(ask, reqwest::RequestBuilder::bearer_auth).send().await.unwrap();
        assert_eq!(answer.status().as_u16(), 401);
        assert!(answer.text().await.unwrap().contains("the client's certificate is no longer trusted"));
    }
    let fresh = secure.client(Some(&theirs.client("urn:gate", "x", 2090)));
    assert!(secure.get(&fresh, "/health/live").await.is_err(), "and cannot open new ones");
}

#[tokio::test]
async fn shutdown_finishes_requests_but_not_handshakes() {
    let secure = Secure::new().await;
    let mut silent = TcpStream::connect(secure.addr).await.unwrap();
    let mut asking = secure.connect().await;
    let body = json!({"entity": "a", "resource": "b", "cost": {"rpm": 1}}).to_string();
    let head = format!(
        "POST /v1/spend HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {}\r\ncontent-type: application/json\r\n\
         expect: 100-continue\r\ncontent-length: {}\r\n\r\n",
        secure.kit.token,
        body.len()
    );
    asking.write_all(head.as_bytes()).await.unwrap();
    let mut interim = [0; 25];
    asking.read_exact(&mut interim).await.unwrap();
    assert!(interim.starts_with(b"HTTP/1.1 100"), "the request is in flight");
    let mut idle = secure.connect().await;
    assert!(is_served(&mut idle).await);
    secure.stopper.stop();
    assert_eq!(soon("the end of the silent connection", silent.read(&mut [0; 9])).await.unwrap_or(0), 0);
    let mut rest = Vec::new();
    soon("the end of the idle connection", idle.read_to_end(&mut rest)).await.unwrap();
    asking.write_all(body.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    soon("the answer", asking.read_to_end(&mut answer)).await.unwrap();
    let answer = String::from_utf8_lossy(&answer).into_owned();
    // The limiter is closed by then, which is a valid response.
    assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("/problems/stopping"), "{answer}");
    assert_eq!(soon("the stop", secure.running).await.unwrap(), ShutdownOutcome::Drained);
}

#[test]
fn key_that_every_user_can_read_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (cert, key) = Authority::new("ca").server().write(folder.path(), "server");
    for (mode, is_good) in [(0o600, true), (0o400, true), (0o640, true), (0o644, false), (0o604, false)] {
        fs::set_permissions(&key, fs::Permissions::from_mode(mode)).unwrap();
        let loaded = TlsOptions::new(&cert, &key).load();
        assert_eq!(loaded.is_ok(), is_good, "{mode:o}");
        if let Err(error) = loaded {
            assert!(error.to_string().contains("every user can read it (mode 06"), "{error}");
        }
    }
}
