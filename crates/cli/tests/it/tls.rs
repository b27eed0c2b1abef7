//! A server with TLS as people start it, and the program that asks it.

use std::fs;
use std::path::Path;

use rustix::process::Signal;

use crate::kit::pki::Authority;
use crate::kit::serving::Serving;
use crate::kit::{self, Run, Shop, wait_until};

/// A file as people type it.
fn typed(file: &Path) -> String {
    file.display().to_string()
}

/// Asks a server with these arguments before the verb.
fn ask(shop: &Shop, server: &Serving, arguments: &[&str], verb: &[&str]) -> Run {
    let url = server.url();
    kit::run(shop.command(&[&["--server", &url], arguments, verb].concat()).env_remove("TIDEGATE_STORE"))
}

#[test]
fn a_server_with_tls_is_asked_by_whoever_trusts_its_authority() {
    let (shop, authority) = (Shop::new(), Authority::new("ours"));
    let (cert, key) = authority.server().write(shop.path("").as_path(), "server");
    let (ca, token) = (shop.path("ca.pem"), shop.path("token"));
    fs::write(&ca, authority.pem()).unwrap();
    let (cert, key, ca) = (typed(&cert), typed(&key), typed(&ca));
    let line = ["serve", "--listen", "0.0.0.0:0", "--tls-cert", &cert, "--tls-key", &key];
    let mut server = Serving::start(&mut shop.command(&line));
    server.address = server.address.replace("0.0.0.0", "127.0.0.1");
    assert!(server.url().starts_with("https://127.0.0.1:"));
    fs::write(&token, server.token().unwrap()).unwrap();
    let token = typed(&token);
    let made = ["limits", "set", "system", "jobs:5/day"];
    let run = ask(&shop, &server, &["--ca", &ca, "--token-file", &token], &made);
    assert_eq!(run.code, 0, "{}", run.stderr);
    let mut command = shop.command(&["--server", &server.url(), "acquire", "acme", "build", "jobs=1"]);
    let run = kit::run(command.env("TIDEGATE_CA", &ca).env("TIDEGATE_TOKEN_FILE", &token));
    assert_eq!(run.code, 0, "the same by variables: {}", run.stderr);
    let run = ask(&shop, &server, &["--token-file", &token], &["status"]);
    assert_eq!(run.code, 1, "it is not away: {run:?}");
    assert!(
        run.stderr.contains("the server's certificate is not trusted: invalid peer certificate: "),
        "{}",
        run.stderr
    );
    let run = ask(&shop, &server, &["--ca", &cert, "--token-file", &token], &["status"]);
    assert_eq!(run.code, 1, "a certificate that signed nothing: {run:?}");
    server.stop();
}

#[test]
fn a_client_with_a_certificate_needs_no_token() {
    let (shop, authority) = (Shop::new(), Authority::new("ours"));
    let folder = shop.path("");
    let (cert, key) = authority.server().write(&folder, "server");
    let (gate_cert, gate_key) = authority.client("spiffe://prod/gate", "gate", 2090).write(&folder, "gate");
    let ca = shop.path("ca.pem");
    fs::write(&ca, authority.pem()).unwrap();
    let config = shop.path("tidegate.toml");
    let text = format!(
        "listen = '127.0.0.1:0'\n[tls]\ncert = '{}'\nkey = '{}'\nclient_ca = '{}'\n\
         [[tls.clients]]\nname = 'spiffe://prod/gate'\ntoken = 'gateway'\n",
        cert.display(),
        key.display(),
        ca.display()
    );
    fs::write(&config, text).unwrap();
    shop.ok("token create gateway --scopes read");
    let server = Serving::start(&mut shop.command(&["serve", "--config", &typed(&config)]));
    let [ca, cert, key] = [&ca, &gate_cert, &gate_key].map(|file| typed(file));
    let trusting = ["--ca", &ca, "--client-cert", &cert, "--client-key", &key];
    let run = ask(&shop, &server, &trusting, &["entity", "list"]);
    assert_eq!((run.code, run.stdout.as_str()), (0, "no entities\n"), "{}", run.stderr);
    let run = ask(&shop, &server, &trusting, &["limits", "set", "system", "jobs:5/day"]);
    assert!(run.stderr.contains("the token `gateway` lacks the scope `admin`"), "{}", run.stderr);
    let run = ask(&shop, &server, &["--ca", &ca], &["entity", "list"]);
    assert_eq!(run.code, 1, "nobody without one: {run:?}");
    assert!(run.stderr.contains("does not let this client's certificate in: CertificateRequired"), "{run:?}");
    shop.ok("token revoke gateway");
    let refused = || ask(&shop, &server, &trusting, &["entity", "list"]);
    wait_until("the token is known to be revoked", || refused().code != 0);
    assert!(refused().stderr.contains("the token was revoked"), "{:?}", refused());
    server.stop();
}

#[test]
fn a_hangup_reads_the_files_again_and_what_cannot_be_used_changes_nothing() {
    let (shop, old, new) = (Shop::new(), Authority::new("old"), Authority::new("new"));
    let folder = shop.path("");
    let (cert, key) = old.server().write(&folder, "server");
    let [old_ca, new_ca] = [("old.pem", &old), ("new.pem", &new)].map(|(name, authority)| {
        fs::write(shop.path(name), authority.pem()).unwrap();
        typed(&shop.path(name))
    });
    let [cert, key] = [&cert, &key].map(|file| typed(file));
    let server = shop.serve_at("127.0.0.1:0", &["--tls-cert", &cert, "--tls-key", &key]);
    let token = shop.path("token");
    fs::write(&token, server.token().unwrap()).unwrap();
    let token = typed(&token);
    let is_served =
        |ca: &str| ask(&shop, &server, &["--ca", ca, "--token-file", &token], &["status"]).code == 0;
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
    let warned =
        format!("the certificate in use stays error=the key `{key}` cannot be used: it holds no private key");
    assert!(log.contains(&warned), "{log}");
    assert!(log.contains("the certificate was read again"), "{log}");
}

#[test]
fn what_keeps_it_from_tls_is_one_sentence() {
    let (shop, authority) = (Shop::new(), Authority::new("ours"));
    let folder = shop.path("");
    let (cert, key) = authority.server().write(&folder, "server");
    let (other, _) = authority.server().write(&folder, "other");
    let (old, old_key) = authority.expired().write(&folder, "old");
    let [cert, key, other, old, old_key] = [&cert, &key, &other, &old, &old_key].map(|file| typed(file));
    let table = [
        (vec!["--tls-cert", &cert], "error: tls.cert is said, and tls.key is not\n".to_owned()),
        (vec!["--tls-client-ca", &cert], "error: tls.client_ca is said, and tls.cert is not\n".to_owned()),
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
            format!("error: the key `{key}` cannot be used: it is not that of the certificate `{other}`\n"),
        ),
        (
            vec!["--tls-cert", &old, "--tls-key", &old_key],
            format!("error: the certificate `{old}` expired at 2020-01-01T00:00:00Z, and now is "),
        ),
        (
            vec!["--tls-cert", &cert, "--tls-key", &key, "--tls-client-ca", &key],
            format!("error: the client CA `{key}` cannot be used: it holds no certificate in PEM\n"),
        ),
    ];
    for (arguments, sentence) in table {
        for check in [&[][..], &["--check"]] {
            let run =
                shop.run_words(&[&["serve", "--listen", "127.0.0.1:0"], &arguments[..], check].concat());
            assert_eq!((run.code, run.stdout.as_str()), (2, ""), "{arguments:?}: {run:?}");
            assert!(run.stderr.starts_with(&sentence), "{}", run.stderr);
        }
    }
    let good = ["serve", "--check", "--listen", "0.0.0.0:0", "--tls-cert", &cert, "--tls-key", &key];
    let run = shop.run_words(&good);
    assert!(run.code == 0 && run.stdout.contains(" on https://0.0.0.0:"), "{run:?}");

    let run = shop.run_words(&[&good[..], &["--metrics", "0.0.0.0:0"]].concat());
    assert!(run.code == 2 && run.stderr.contains("next: --metrics has no TLS: say "), "{run:?}");

    let table = [
        (vec!["--ca", &cert], "'--ca <FILE>' is for a server with TLS"),
        (vec!["--server", "http://127.0.0.1:1", "--ca", &cert], "'--ca <FILE>' is for a server with TLS"),
        (
            vec!["--server", "https://127.0.0.1:1", "--ca", "none.pem"],
            "error: --ca or TIDEGATE_CA is `none.pem`, which cannot be read: ",
        ),
        (
            vec!["--server", "https://127.0.0.1:1", "--client-cert", &cert],
            "error: --client-cert is said, and --client-key is not: a certificate is used with its key\n",
        ),
        (
            vec!["--server", "https://127.0.0.1:1", "--ca", &key],
            "error: the root certificates cannot be used: there is no certificate in PEM\n",
        ),
    ];
    for (arguments, sentence) in table {
        let run = shop.run_words(&[&arguments[..], &["status"]].concat());
        assert!(run.code == 2 && run.stderr.contains(sentence), "{arguments:?}: {run:?}");
    }
}
