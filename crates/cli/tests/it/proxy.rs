//! `tidegate proxy`, `tidegate mock` and `serve --proxy`.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use crate::kit::server::{TestServer, answer};
use crate::kit::{Fixture, codec, wait_until};

const BODY: &str = r#"{"model": "gpt-4", "input": "hello"}"#;

fn mock(fixture: &Fixture, arguments: &[&str]) -> TestServer {
    let line = [&["mock", "openai", "--listen", "127.0.0.1:0"], arguments].concat();
    TestServer::start(&mut fixture.command(&line))
}

/// A proxy without a store.
fn proxy(fixture: &Fixture, arguments: &[&str]) -> TestServer {
    let line = [&["proxy", "--listen", "127.0.0.1:0"], arguments].concat();
    TestServer::start(fixture.command(&line).env_remove("TIDEGATE_STORE"))
}

#[test]
fn proxy_forwards_to_the_mock_and_stops() {
    let fixture = Fixture::new();
    let mock = mock(&fixture, &["--limit", "requests:1000/s", "--output-tokens", "5"]);
    let proxy = proxy(&fixture, &[&format!("openai={}", mock.url())]);
    let (status, body) = proxy.ask("POST /openai/v1/responses", Some("sk-own"), BODY);
    assert_eq!((status, codec::parse(&body)["usage"]["output_tokens"].as_u64()), (200, Some(5)));
    let (status, body) = mock.ask("GET /mock/totals", None, "");
    assert_eq!((status, codec::parse(&body)["completed"].as_u64()), (200, Some(1)));
    let (status, body) = proxy.ask("POST /openai/v1/responses", Some("tg_acme_0"), BODY);
    assert_eq!(status, 401, "{body}");
    let log = proxy.stop().stderr;
    assert!(!log.contains("sk-own") && !log.contains("hello"), "no key and no prompt in the log: {log}");
    mock.stop();
}

#[test]
fn invalid_proxy_arguments_are_refused() {
    let fixture = Fixture::new();
    let table = [
        ("proxy openai", "upstream is `openai`, and must be NAME=URL"),
        ("proxy a=http://x --listen 0.0.0.0:0", "0.0.0.0:0 can be reached from other machines without TLS"),
        ("proxy a=http://x --key b=env:PATH", "a key is given for `b`, which is no upstream"),
        ("proxy a=http://x --profiles /no/such/file", "the file `/no/such/file` cannot be read"),
        ("mock nothing", "there is no profile `nothing`"),
        ("mock openai --limit images:5/min", "limit is `images`, and must be requests"),
        ("mock openai --scenario none", "there is no scenario `none`"),
    ];
    for (line, sentence) in table {
        let run = fixture.run(line);
        assert_eq!(run.code, 2, "{line}: {}", run.stderr);
        assert!(run.stderr.contains(sentence), "{line}: {}", run.stderr);
    }
}

#[test]
fn serve_proxies_tenants_of_its_store() {
    let fixture = Fixture::new();
    fixture.ok("limits set system requests:2/day");
    let made = fixture.json("token create acme --scopes acquire");
    let token = made["secret"].as_str().unwrap().to_owned();
    let made = fixture.json("token create operator --scopes admin");
    let admin = made["secret"].as_str().unwrap().to_owned();
    let mock = mock(&fixture, &[]);
    let key = fixture.path("key");
    fs::write(&key, "sk-real\n").unwrap();
    fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).unwrap();
    let config = fixture.path("tidegate.toml");
    let text = format!(
        "[proxy]\nlisten = '127.0.0.1:0'\nupstreams = ['openai={}']\nkeys = {{ openai = '{}' }}",
        mock.url(),
        key.display()
    );
    fs::write(&config, text).unwrap();
    let config = config.display().to_string();
    let checked = fixture.run(&format!("serve --listen 127.0.0.1:0 --config {config} --check"));
    assert_eq!(checked.code, 0, "{}", checked.stderr);
    let mut server = fixture.serve(&["--config", &config]);
    let api = server.address.clone();
    server.address = server.announced("proxy ").unwrap().strip_prefix("http://").unwrap().to_owned();
    for _ in 0..2 {
        assert_eq!(server.ask("POST /openai/v1/responses", Some(&token), BODY).0, 200);
    }
    let (status, body) = server.ask("POST /openai/v1/responses", Some(&token), BODY);
    assert_eq!(status, 429);
    let message = codec::parse(&body)["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.starts_with("limit \"requests\" exceeded for acme on gpt-4"), "{message}");
    wait_until("both calls are booked", || {
        let usage = fixture.json("usage list entity acme");
        usage.to_string().contains("output_tokens")
    });
    let proxy = std::mem::replace(&mut server.address, api.clone());
    assert_eq!(server.ask("DELETE /v1/tokens/acme", Some(&admin), "").0, 200);
    server.address = proxy;
    let (status, body) = server.ask("POST /openai/v1/responses", Some(&token), BODY);
    assert_eq!(status, 401, "a revocation by the server takes effect at once: {body}");
    server.address = api;
    let log = server.stop().stderr;
    assert!(!log.contains(&token) && !log.contains("sk-real"), "no secret in the log: {log}");
    mock.stop();
}

#[test]
fn proxy_address_is_set_by_flag_or_variable() {
    let fixture = Fixture::new();
    let mock = mock(&fixture, &[]);
    let config = fixture.path("tidegate.toml");
    // The host of the file and of the variable can be bound by no test: these are for documentation.
    fs::write(&config, format!("[proxy]\nlisten = '192.0.2.1:1'\nupstreams = ['openai={}']", mock.url()))
        .unwrap();
    let config = config.display().to_string();
    let line = ["serve", "--listen", "127.0.0.1:0", "--config", &config];
    let by_flag = [&line[..], &["--proxy", "127.0.0.1:0"]].concat();
    for (line, variable) in [(&line[..], "127.0.0.1:0"), (&by_flag, "192.0.2.2:1")] {
        let mut command = fixture.command(line);
        let mut server = TestServer::start(command.env("TIDEGATE_PROXY", variable));
        let api = server.address.clone();
        server.address = server.announced("proxy ").unwrap().strip_prefix("http://").unwrap().to_owned();
        assert!(server.address.starts_with("127.0.0.1:"), "{}", server.address);
        assert_eq!(server.ask("POST /openai/v1/responses", Some("sk-own"), BODY).0, 200);
        server.address = api;
        server.stop();
    }
    mock.stop();
}

/// It went on waiting, and the drain time passed.
#[test]
fn stopping_proxy_refuses_waiting_tenants() {
    let fixture = Fixture::new();
    fixture.ok("limits set system requests:1/min");
    let made = fixture.json("token create acme --scopes acquire");
    let token = made["secret"].as_str().unwrap().to_owned();
    let mock = mock(&fixture, &[]);
    let (upstream, store) = (format!("openai={}", mock.url()), fixture.store());
    let line = [
        &["proxy", &upstream, "--listen", "127.0.0.1:0", "--store", &store][..],
        &["--key", "openai=env:A_KEY", "--within", "10m"],
    ];
    let proxy = TestServer::start(fixture.command(&line.concat()).env("A_KEY", "sk-real"));
    assert_eq!(proxy.ask("POST /openai/v1/responses", Some(&token), BODY).0, 200);
    let waiting = proxy.begin("POST /openai/v1/responses", Some(&token), BODY);
    wait_until("a call waits", || {
        proxy.ask("GET /tidegate/metrics", None, "").1.contains("tidegate_proxy_calls_total 2\n")
    });
    proxy.stop();
    let (status, body) = answer(waiting);
    assert_eq!(status, 503, "{body}");
    mock.stop();
}

/// A killed proxy gives back nothing: the call that it had in flight is held until its lease expires.
#[test]
fn killed_proxy_leaves_its_calls_held() {
    let fixture = Fixture::new();
    fixture.ok("limits set system requests:2/day");
    let made = fixture.json("token create acme --scopes acquire");
    let token = made["secret"].as_str().unwrap().to_owned();
    let mock = mock(&fixture, &["--latency", "1h"]);
    let upstream = format!("openai={}", mock.url());
    let store = fixture.store();
    let line =
        ["proxy", &upstream, "--listen", "127.0.0.1:0", "--store", &store, "--key", "openai=env:A_KEY"];
    let start = || TestServer::start(fixture.command(&line).env("A_KEY", "sk-real"));
    let mut proxy = start();
    let _calls = [(), ()].map(|()| proxy.begin("POST /openai/v1/responses", Some(&token), BODY));
    wait_until("both calls hold their limits", || fixture.available("acme", "gpt-4", "requests") == 0);
    proxy.child().kill().unwrap();
    proxy.child().wait().unwrap();
    drop(proxy);
    let proxy = start();
    let (status, body) = proxy.ask("POST /openai/v1/responses", Some(&token), BODY);
    assert_eq!(status, 429, "no excess after a restart: {body}");
    proxy.stop();
    drop(mock);
}
