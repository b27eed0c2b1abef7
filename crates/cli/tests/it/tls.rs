//! TLS: a server with certificates, and the program as its client.

use std::fs;
use std::path::Path;

use rustix::process::Signal;

use crate::kit::pki::Authority;
use crate::kit::server::TestServer;
use crate::kit::{self, Fixture, Run, wait_until};

/// The path of a file as an argument.
fn typed(file: &Path) -> String {
    file.display().to_string()
}

/// Runs a verb at a server, with these arguments before it.
fn ask(fixture: &Fixture, server: &TestServer, arguments: &[&str], verb: &[&str]) -> Run {
    let url = server.url();
    // An option may be given once.
    let named = if arguments.contains(&"--server") { &[][..] } else { &["--server", &url][..] };
    kit::run(fixture.command(&[named, arguments, verb].concat()).env_remove("TIDEGATE_STORE"))
}

#[test]
fn server_url_with_a_wrong_scheme_is_named() {
    let fixture = Fixture::served();
    let server = fixture.server.as_ref().expect("it serves");
    let address = server.url().replace("http://", "");
    let run = ask(&fixture, server, &["--server", &format!("https://{address}")], &["status"]);
    let error = "error: GET /v1/status was not sent: the server does not use TLS, and its URL begins with https://\n \
                 next: write http:// in --server or TIDEGATE_SERVER, if that is the right server\n";
    assert_eq!((run.code, run.stderr.as_str()), (1, error), "it is not unavailable");
    let run = ask(&fixture, server, &["--server", &address], &["status"]);
    let error = format!(
        "error: invalid server URL `{address}`: it begins with neither http:// nor https://\n \
         next: correct --server or TIDEGATE_SERVER, such as http://127.0.0.1:8707\n"
    );
    assert_eq!((run.code, run.stderr), (2, error));
}

#[test]
fn client_needs_the_authority_of_the_server() {
    let (fixture, authority) = (Fixture::new(), Authority::new("ours"));
    let (cert, key) = authority.server().write(fixture.path("").as_path(), "server");
    let (ca, token) = (fixture.path("ca.pem"), fixture.path("token"));
    fs::write(&ca, authority.pem()).unwrap();
    let (cert, key, ca) = (typed(&cert), typed(&key), typed(&ca));
    let line = ["serve", "--listen", "0.0.0.0:0", "--tls-cert", &cert, "--tls-key", &key];
    let mut server = TestServer::start(&mut fixture.command(&line));
    server.address = server.address.replace("0.0.0.0", "127.0.0.1");
    assert!(server.url().starts_with("https://127.0.0.1:"));
    fs::write(&token, server.token().unwrap()).unwrap();
    let token = typed(&token);
    let made = ["limits", "set", "system", "jobs:5/day"];
    let run = ask(&fixture, &server, &["--ca", &ca, "--token-file", &token], &made);
    assert_eq!(run.code, 0, "{}", run.stderr);
    let mut command = fixture.command(&["--server", &server.url(), "acquire", "acme", "build", "jobs=1"]);
    let run = kit::run(command.env("TIDEGATE_CA", &ca).env("TIDEGATE_TOKEN_FILE", &token));
    assert_eq!(run.code, 0, "the same by variables: {}", run.stderr);
    let run = ask(&fixture, &server, &["--token-file", &token], &["status"]);
    assert_eq!(run.code, 1, "it is not unavailable: {run:?}");
    assert!(
        run.stderr.contains("the server's certificate is not trusted: invalid peer certificate: "),
        "{}",
        run.stderr
    );
    let run = ask(&fixture, &server, &["--ca", &cert, "--token-file", &token], &["status"]);
    assert_eq!(run.code, 1, "a certificate that signed nothing: {run:?}");
    server.stop();
}

#[test]
fn client_with_a_certificate_needs_no_token() {
    let (fixture, authority) = (Fixture::new(), Authority::new("ours"));
    let folder = fixture.path("");
    let (cert, key) = authority.server().write(&folder, "server");
    let (gate_cert, gate_key) = authority.client("spiffe://prod/gate", "gate", 2090).write(&folder, "gate");
    let ca = fixture.path("ca.pem");
    fs::write(&ca, authority.pem()).unwrap();
    let config = fixture.path("tidegate.toml");
    let text = format!(
        "listen = '127.0.0.1:0'\n[tls]\ncert = '{}'\nkey = '{}'\nclient_ca = '{}'\n\
         [[tls.clients]]\nname = 'spiffe://prod/gate'\ntoken = 'gateway'\n",
        cert.display(),
        key.display(),
        ca.display()
    );
    fs::write(&config, text).unwrap();
    fixture.ok("token create gateway --scopes read");
    let server = TestServer::start(&mut fixture.command(&["serve", "--config", &typed(&config)]));
    let [ca, cert, key] = [&ca, &gate_cert, &gate_key].map(|file| typed(file));
    let trusting = ["--ca", &ca, "--client-cert", &cert, "--client-key", &key];
    let run = ask(&fixture, &server, &trusting, &["entity", "list"]);
    assert_eq!((run.code, run.stdout.as_str()), (0, "no entities\n"), "{}", run.stderr);
    let run = ask(&fixture, &server, &trusting, &["limits", "set", "system", "jobs:5/day"]);
    assert!(run.stderr.contains("the token `gateway` lacks the scope `admin`"), "{}", run.stderr);
    let run = ask(&fixture, &server, &["--ca", &ca], &["entity", "list"]);
    assert_eq!(run.code, 1, "a certificate is required: {run:?}");
    assert!(run.stderr.contains("rejected the client certificate: CertificateRequired"), "{run:?}");
    fixture.ok("token revoke gateway");
    let refused = || ask(&fixture, &server, &trusting, &["entity", "list"]);
    wait_until("the token is known to be revoked", || refused().code != 0);
    assert!(refused().stderr.contains("the token was revoked"), "{:?}", refused());
    server.stop();
}

#[test]
fn sighup_reloads_files_and_ignores_invalid_ones() {
    let (fixture, old, new) = (Fixture::new(), Authority::new("old"), Authority::new("new"));
    let folder = fixture.path("");
    let (cert, key) = old.server().write(&folder, "server");
    let [old_ca, new_ca] = [("old.pem", &old), ("new.pem", &new)].map(|(name, authority)| {
        fs::write(fixture.path(name), authority.pem()).unwrap();
        typed(&fixture.path(name))
    });
    let [cert, key] = [&cert, &key].map(|file| typed(file));
    let server = fixture.serve_at("127.0.0.1:0", &["--tls-cert", &cert, "--tls-key", &key]);
    let token = fixture.path("token");
    fs::write(&token, server.token().unwrap()).unwrap();
    let token = typed(&token);
    let is_served =
        |ca: &str| ask(&fixture, &server, &["--ca", ca, "--token-file", &token], &["status"]).code == 0;
    assert!(is_served(&old_ca) && !is_served(&new_ca));

    fs::write(&key, "no key").unwrap();
    server.send(Signal::HUP);
    wait_until("it failed", || server.metric("tidegate_tls_reloads_total{result=\"failed\"} ") > 0);
    assert!(is_served(&old_ca));

    new.server().write(&folder, "server");
    server.send(Signal::HUP);
    wait_until("it was read", || server.metric("tidegate_tls_reloads_total{result=\"done\"} ") > 0);
    assert!(!is_served(&old_ca) && is_served(&new_ca));
    let log = server.stop().stderr;
    let warned = format!(
        "failed to reload the TLS files; keeping the current ones error=the key `{key}` cannot be used: it holds no private key"
    );
    assert!(log.contains(&warned), "{log}");
    assert!(log.contains("reloaded the TLS files"), "{log}");
}

/// The server's client asks the proxy: it gets an answer if it trusts the certificate.
#[test]
fn proxy_reloads_its_certificate_on_sighup() {
    let (fixture, old, new) = (Fixture::new(), Authority::new("old"), Authority::new("new"));
    let folder = fixture.path("");
    let (cert, key) = old.server().write(&folder, "server");
    let [old_ca, new_ca] = [("old.pem", &old), ("new.pem", &new)].map(|(name, authority)| {
        fs::write(fixture.path(name), authority.pem()).unwrap();
        typed(&fixture.path(name))
    });
    let [cert, key] = [&cert, &key].map(|file| typed(file));
    let line =
        ["proxy", "a=http://127.0.0.1:1", "--listen", "127.0.0.1:0", "--tls-cert", &cert, "--tls-key", &key];
    let proxy = TestServer::start(fixture.command(&line).env_remove("TIDEGATE_STORE"));
    assert!(proxy.url().starts_with("https://"));
    let is_trusted = |ca: &str| {
        let run = ask(&fixture, &proxy, &["--ca", ca], &["status"]);
        assert_eq!(
            run.stderr.contains("is not trusted"),
            !run.stderr.contains("with status 404"),
            "{}",
            run.stderr
        );
        !run.stderr.contains("is not trusted")
    };
    assert!(is_trusted(&old_ca) && !is_trusted(&new_ca));
    new.server().write(&folder, "server");
    proxy.send(Signal::HUP);
    wait_until("it is reloaded", || is_trusted(&new_ca));
    assert!(!is_trusted(&old_ca));
    let log = proxy.stop().stderr;
    assert!(log.contains("reloaded the TLS files"), "{log}");
}

#[test]
fn invalid_tls_setup_is_one_sentence() {
    let (fixture, authority) = (Fixture::new(), Authority::new("ours"));
    let folder = fixture.path("");
    let (cert, key) = authority.server().write(&folder, "server");
    let (other, _) = authority.server().write(&folder, "other");
    let (old, old_key) = authority.expired().write(&folder, "old");
    let [cert, key, other, old, old_key] = [&cert, &key, &other, &old, &old_key].map(|file| typed(file));
    let table = [
        (vec!["--tls-cert", &cert], "error: tls.cert is set, but tls.key is not\n".to_owned()),
        (vec!["--tls-client-ca", &cert], "error: tls.client_ca is set, but tls.cert is not\n".to_owned()),
        (
            vec!["--tls-cert", "none.pem", "--tls-key", &key],
            "error: the certificate `none.pem` cannot be read: ".to_owned(),
        ),
        (
            vec!["--tls-cert", &cert, "--tls-key", &cert],
            format!("error: the key `{cert}` cannot be used: it holds no private key in PEM\n"),
        ),
        (
            vec!["--tls-cert", &other, "--tls-key", &key],
            format!("error: the key `{key}` cannot be used: it does not match the certificate `{other}`\n"),
        ),
        (
            vec!["--tls-cert", &old, "--tls-key", &old_key],
            format!("error: the certificate `{old}` expired at 2020-01-01T00:00:00Z; it is now "),
        ),
        (
            vec!["--tls-cert", &cert, "--tls-key", &key, "--tls-client-ca", &key],
            format!("error: the client CA `{key}` cannot be used: it holds no certificate in PEM\n"),
        ),
    ];
    for (arguments, sentence) in table {
        for check in [&[][..], &["--check"]] {
            let run =
                fixture.run_words(&[&["serve", "--listen", "127.0.0.1:0"], &arguments[..], check].concat());
            assert_eq!((run.code, run.stdout.as_str()), (2, ""), "{arguments:?}: {run:?}");
            assert!(run.stderr.starts_with(&sentence), "{}", run.stderr);
        }
    }
    let good = ["serve", "--check", "--listen", "0.0.0.0:0", "--tls-cert", &cert, "--tls-key", &key];
    let run = fixture.run_words(&good);
    assert!(run.code == 0 && run.stdout.contains(" on https://0.0.0.0:"), "{run:?}");

    let run = fixture.run_words(&[&good[..], &["--metrics", "0.0.0.0:0"]].concat());
    assert!(run.code == 2 && run.stderr.contains("next: --metrics has no TLS: use "), "{run:?}");

    let table = [
        (vec!["--ca", &cert], "'--ca <FILE>' requires a server with TLS"),
        (vec!["--server", "http://127.0.0.1:1", "--ca", &cert], "'--ca <FILE>' requires a server with TLS"),
        (
            vec!["--server", "https://127.0.0.1:1", "--ca", "none.pem"],
            "error: --ca or TIDEGATE_CA is `none.pem`, which cannot be read: ",
        ),
        (
            vec!["--server", "https://127.0.0.1:1", "--client-cert", &cert],
            "error: --client-cert is set, but --client-key is not: a certificate requires its key\n",
        ),
        (
            vec!["--server", "https://127.0.0.1:1", "--ca", &key],
            "error: the root certificates cannot be used: there is no certificate in PEM\n",
        ),
    ];
    for (arguments, sentence) in table {
        let run = fixture.run_words(&[&arguments[..], &["status"]].concat());
        assert!(run.code == 2 && run.stderr.contains(sentence), "{arguments:?}: {run:?}");
    }
}
