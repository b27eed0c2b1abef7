//! `tidegate serve`: startup, bounds, signals and shutdown.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::thread;

use rusqlite::Connection;
use rustix::process::Signal;
use rustix::pty;

use crate::kit::server::{TestServer, answer, free_port};
use crate::kit::{self, Fixture, codec};

#[test]
fn serve_defaults_to_data_folder_and_shows_token_once() {
    let fixture = Fixture::new();
    let data = fixture.path("data");
    let start = || {
        let mut command = fixture.command(&["serve"]);
        // Another program may have the default port.
        command.env("TIDEGATE_LISTEN", "127.0.0.1:0");
        TestServer::start(command.env_remove("TIDEGATE_STORE").env("XDG_DATA_HOME", &data))
    };
    let server = start();
    let file = data.join("tidegate").join("tidegate.db");
    assert_eq!(server.startup[0], format!("store  sqlite:{}", file.display()));
    assert_eq!(server.startup.len(), 3, "{:?}", server.startup);
    let token = server.token().expect("the first token").to_owned();
    assert!(token.starts_with("tg_admin_"));
    assert_eq!(server.ask("GET /health/live", None, "").0, 204);
    let entities = "GET /v1/entities";
    assert_eq!(server.ask(entities, None, "").0, 401);
    assert_eq!(server.ask(entities, Some(&format!("{token}0")), "").0, 401);
    assert_eq!(server.ask(entities, Some(&token), "").0, 200);
    server.send(Signal::TERM);
    let run = server.end();
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert!(!run.stderr.contains(&token), "no secret in the log");

    let server = start();
    assert_eq!(server.token(), None, "it is shown once: {:?}", server.startup);
    assert_eq!(server.ask(entities, Some(&token), "").0, 200, "and is good after a restart");
    server.send(Signal::INT);
    assert_eq!(server.end().code, 0);
}

#[test]
fn token_is_accepted_until_it_is_revoked() {
    let fixture = Fixture::new();
    let made = fixture.json("token create ops --scopes read,admin");
    let token = made["secret"].as_str().unwrap();
    let server = TestServer::start(&mut fixture.command(&["serve", "--listen", "127.0.0.1:0"]));
    assert_eq!(server.token(), None, "there is a token with the scope admin");
    assert_eq!(server.ask("GET /v1/entities", Some(token), "").0, 200);
    assert_eq!(server.ask("POST /v1/acquire", Some(token), "{}").0, 403, "it may not draw");
    server.stop();
    fixture.ok("token revoke ops");
    // A server caches a token for two seconds; a new server has no cache.
    let server = TestServer::start(&mut fixture.command(&["serve", "--listen", "127.0.0.1:0"]));
    assert_eq!(server.ask("GET /v1/entities", Some(token), "").0, 401);
    server.stop();
}

#[test]
fn metrics_listener_requires_no_token() {
    let fixture = Fixture::new();
    let server = TestServer::start(&mut fixture.command(&[
        "serve",
        "--listen",
        "127.0.0.1:0",
        "--metrics",
        "127.0.0.1:0",
    ]));
    assert_eq!(server.metric("tidegate_granted_total "), 0);
    assert_eq!(server.ask("GET /metrics", None, "").0, 401, "the main listener requires one");
    assert_eq!(server.ask("GET /metrics", server.token(), "").0, 200);
    server.stop();
}

#[test]
fn json_log_has_one_document_per_line() {
    let fixture = Fixture::new();
    let line = ["serve", "--listen", "127.0.0.1:0", "--log", "json", "--log-level", "debug"];
    let server = TestServer::start(&mut fixture.command(&line));
    let token = server.token().unwrap().to_owned();
    assert_eq!(server.ask("GET /v1/entities", Some(&token), "").0, 200);
    assert_eq!(server.ask("GET /v1/no-such-route", Some(&token), "").0, 404);
    let log = server.stop().stderr;
    let lines: Vec<codec::Json> = log.lines().map(codec::parse).collect();
    assert!(lines.iter().any(|line| line["fields"]["route"] == "/v1/entities"), "{log}");
    assert!(!log.contains(&token), "no secret in the log");
}

#[test]
fn other_machines_need_tls_or_an_explicit_flag() {
    let fixture = Fixture::new();
    let refused = fixture.run("serve --listen 0.0.0.0:0");
    assert_eq!((refused.code, refused.stdout.as_str()), (2, ""), "a restart would not help");
    assert_eq!(
        refused.stderr,
        "error: 0.0.0.0:0 can be reached from other machines without TLS: listen on 127.0.0.1, or allow it explicitly\n \
         next: use --tls-cert FILE --tls-key FILE, or --without-tls behind a proxy with TLS\n"
    );
    let watched = fixture.run("serve --listen 127.0.0.1:0 --metrics 0.0.0.0:0");
    assert_eq!(watched.code, 2, "its metrics too: {}", watched.stderr);
    for flag in ["--without-tls", "--without-tls=true"] {
        let mut server = TestServer::start(&mut fixture.command(&["serve", "--listen", "0.0.0.0:0", flag]));
        server.address = server.address.replace("0.0.0.0", "127.0.0.1");
        assert_eq!(server.ask("GET /health/ready", None, "").0, 204);
        server.stop();
    }
    assert_eq!(fixture.run("serve --listen 0.0.0.0:0 --without-tls=false").code, 2);
}

#[test]
fn waiter_is_answered_before_the_server_stops() {
    let fixture = Fixture::new();
    fixture.ok("limits set system jobs:1/day");
    let server = fixture.serve(&["--within-max", "1h"]);
    let token = server.token().unwrap().to_owned();
    let ask = r#"{"entity": "acme", "resource": "build", "cost": {"jobs": 1}, "within": 3600}"#;
    let (status, held) = server.ask("POST /v1/acquire", Some(&token), ask);
    assert_eq!(status, 200, "{held}");
    let tomorrow = server.begin("POST /v1/acquire", Some(&token), &ask.replace("3600", "0"));
    assert_eq!(answer(tomorrow).0, 429, "no unit refills within the time");
    fixture.ok("limits set system jobs:1/s:1");
    // The next unit refills after half an hour, longer than any test.
    fixture.ok("limits set resource slow jobs:2/h:1");
    let slow = ask.replace("build", "slow");
    assert_eq!(server.ask("POST /v1/acquire", Some(&token), &slow).0, 200);
    let waits = server.begin("POST /v1/acquire", Some(&token), &slow);
    server.wait_for_waiting(1);
    server.send(Signal::TERM);
    let (status, body) = answer(waits);
    assert_eq!((status, codec::parse(&body)["type"].as_str()), (503, Some("/problems/stopping")));
    let run = server.end();
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert_eq!(fixture.available("acme", "slow", "jobs"), 0, "the granted lease is still held");
}

#[test]
fn drain_beyond_its_bound_is_reported() {
    let fixture = Fixture::new();
    let mut command = fixture.command(&["serve", "--listen", "127.0.0.1:0", "--drain-time", "1ms"]);
    // The request does not end before the drain does.
    let server = TestServer::start(command.env("TIDEGATE_BODY_TIME", "1h"));
    let slow = under_way(&server);
    server.send(Signal::TERM);
    let run = server.end();
    assert_eq!(run.code, 1);
    assert!(
        run.stderr.ends_with(
            "error: requests in flight did not finish within the drain time: their leases end at their deadlines\n"
        ),
        "{}",
        run.stderr
    );
    drop(slow);
}

#[test]
fn closed_output_does_not_stop_the_server() {
    let fixture = Fixture::new();
    let line = ["serve", "--listen", "127.0.0.1:0", "--log-level", "debug"];
    let mut server = TestServer::start(&mut fixture.command(&line));
    drop((server.child().stdout.take(), server.child().stderr.take()));
    let token = server.token().unwrap().to_owned();
    for _ in 0..3 {
        assert_eq!(
            server.ask("GET /v1/entities", Some(&token), "").0,
            200,
            "each response writes a line to the log"
        );
    }
    server.send(Signal::TERM);
    assert_eq!(server.end().code, 0);
    // Its output was never read.
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let place = free_port().to_string();
    let mut child = fixture.command(&["serve", "--listen", &place]).stdout(writer).spawn().unwrap();
    kit::wait_until("a connection", || {
        assert_eq!(child.try_wait().unwrap(), None, "it still serves");
        TcpStream::connect(&place).is_ok()
    });
    kit::send(&child, Signal::TERM);
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn bounds_come_from_flags_variables_and_the_file() {
    let fixture = Fixture::new();
    fixture.ok("limits set system jobs:1/day");
    let config = fixture.path("tidegate.toml");
    fs::write(&config, "[bounds]\nbody_max = 1024\nwithin_max = '7s'\nlease_deadline = '8s'").unwrap();
    let config = config.display().to_string();
    let mut command =
        fixture.command(&["serve", "--listen", "127.0.0.1:0", "--config", &config, "--within-max", "2s"]);
    let server = TestServer::start(command.env("TIDEGATE_LEASE_DEADLINE", "9s"));
    let token = server.token().unwrap().to_owned();
    let ask = |more: &str| {
        let body = format!(r#"{{"entity": "acme", "resource": "build", "cost": {{"jobs": 1}}{more}}}"#);
        let (status, body) = server.ask("POST /v1/acquire", Some(&token), &body);
        (status, codec::parse(&body))
    };
    let (status, body) = ask(r#", "within": 3"#);
    assert_eq!((status, body["detail"].as_str()), (422, Some("a within of 3s, more than 2s")));
    assert_eq!(ask(&" ".repeat(1_024)).0, 413);
    let (status, body) = ask("");
    assert_eq!((status, body["expires_in"].as_u64()), (200, Some(9)));
    server.stop();
}

#[test]
fn second_signal_stops_the_server_at_once() {
    let fixture = Fixture::new();
    let mut command = fixture.command(&["serve", "--listen", "127.0.0.1:0"]);
    // The request does not end by itself.
    let server = TestServer::start(command.env("TIDEGATE_BODY_TIME", "1h"));
    let slow = under_way(&server);
    server.send(Signal::TERM);
    server.wait_until_it_stops();
    server.send(Signal::TERM);
    assert_eq!(server.end().code, 128 + 15);
    drop(slow);
}

/// A request in progress: the server waits for its body.
fn under_way(server: &TestServer) -> TcpStream {
    let mut slow = TcpStream::connect(&server.address).expect("it listens");
    let token = server.token().expect("the first token");
    let head = format!("POST /v1/acquire HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\n");
    let rest = "content-type: application/json\r\nexpect: 100-continue\r\ncontent-length: 9\r\n\r\n";
    slow.write_all((head + rest).as_bytes()).expect("it reads");
    let mut head = [0; 12];
    slow.read_exact(&mut head).expect("it answers");
    assert_eq!(&head, b"HTTP/1.1 100", "the server reads it");
    slow
}

#[test]
fn invalid_configuration_is_one_sentence() {
    let fixture = Fixture::new();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap();
    let config = fixture.path("tidegate.toml");
    fs::write(&config, "listen = '127.0.0.1:0'\nport = 5").unwrap();
    let config = config.display().to_string();
    let upstreams = fixture.path("upstreams.toml");
    fs::write(&upstreams, "[upstreams.openai.auto]\nrate_min = 9\nrate_max = 5").unwrap();
    let upstreams = upstreams.display().to_string();
    let table = [
        (
            vec!["--listen".to_owned(), taken.to_string()],
            1,
            format!("error: {taken} is in use by another program: stop it, or listen on another port\n"),
        ),
        (
            vec!["--listen".to_owned(), "0.0.0.0:0".to_owned()],
            2,
            "error: 0.0.0.0:0 can be reached from other machines without TLS".to_owned(),
        ),
        (
            vec!["--listen".to_owned(), "here".to_owned()],
            2,
            "invalid value 'here' for '--listen <ADDRESS>'".to_owned(),
        ),
        (
            vec!["--config".to_owned(), config.clone()],
            2,
            format!("error: the configuration `{config}`, line 2: unknown field `port`, expected one of "),
        ),
        (
            vec!["--config".to_owned(), upstreams],
            2,
            "error: `upstreams.openai`: `auto.rate_min` is 9, and must be from 0.000001 to 5\n".to_owned(),
        ),
        (vec!["--config".to_owned(), "none.toml".to_owned()], 2, "`none.toml` cannot be read".to_owned()),
        (
            vec!["--requests-max".to_owned(), "0".to_owned()],
            2,
            "error: --requests-max or TIDEGATE_REQUESTS_MAX is `0`, and must be a whole number from 1 to 1000000\n"
                .to_owned(),
        ),
        (
            vec!["--timeout".to_owned(), "2m".to_owned()],
            2,
            "invalid value '2m' for '--timeout <SPAN>': must be from 1ms to 1m".to_owned(),
        ),
    ];
    for (arguments, code, sentence) in table {
        for check in [None, Some("--check")] {
            let words: Vec<&str> =
                ["serve"].into_iter().chain(arguments.iter().map(String::as_str)).chain(check).collect();
            let run = fixture.run_words(&words);
            assert_eq!((run.code, run.stdout.as_str()), (code, ""), "{words:?}: {run:?}");
            assert!(run.stderr.contains(&sentence), "{words:?}: {}", run.stderr);
        }
    }
    let other = fixture.path("other.db");
    fs::write(&other, "no database at all, and longer than the header of one would ever be".repeat(9))
        .unwrap();
    let run = fixture.run(&format!("serve --listen 127.0.0.1:0 --store sqlite:{}", other.display()));
    assert_eq!((run.code, run.stdout.as_str()), (1, ""));
    assert!(run.stderr.contains("is damaged, or no database"), "{}", run.stderr);
}

#[test]
fn locked_or_newer_store_is_one_sentence() {
    let fixture = Fixture::new();
    fixture.ok("limits set system jobs:1/day");
    let other = Connection::open(fixture.file()).unwrap();
    other.execute_batch("PRAGMA locking_mode = EXCLUSIVE; BEGIN EXCLUSIVE").unwrap();
    for check in ["", "--check"] {
        let run = fixture.run(&format!("serve --listen 127.0.0.1:0 --timeout 50ms {check}"));
        assert_eq!((run.code, run.stdout.as_str()), (4, ""), "{run:?}");
        assert!(run.stderr.starts_with("error: the store "), "{}", run.stderr);
        assert!(run.stderr.contains("\n next: retry when no other process locks it"), "{}", run.stderr);
    }
    other.execute_batch("ROLLBACK; PRAGMA user_version = 99").unwrap();
    drop(other);
    for check in ["", "--check"] {
        let run = fixture.run(&format!("serve --listen 127.0.0.1:0 {check}"));
        assert_eq!((run.code, run.stdout.as_str()), (1, ""), "{run:?}");
        assert!(run.stderr.contains(" has schema version 99, newer than "), "{}", run.stderr);
        assert!(run.stderr.ends_with(": use a newer tidegate\n"), "{}", run.stderr);
    }
}

#[test]
fn check_reports_readiness_and_creates_no_token() {
    let fixture = Fixture::new();
    let config = fixture.path("tidegate.toml");
    let store = format!("sqlite:{}", fixture.file().display());
    fs::write(&config, format!("store = '{store}'\nlisten = '127.0.0.1:0'\nlog = 'json'")).unwrap();
    let config = config.display().to_string();
    let mut command = fixture.command(&["serve", "--check", "--config", &config]);
    let run = kit::run(command.env_remove("TIDEGATE_STORE"));
    assert_eq!((run.code, run.stderr.as_str()), (0, ""));
    assert!(
        run.stdout.starts_with(&format!("ready to serve {store} on http://127.0.0.1:")),
        "{}",
        run.stdout
    );
    let json = codec::parse(&fixture.run_words(&["--json", "serve", "--check", "--config", &config]).stdout);
    assert_eq!(codec::fields(&json), ["envoy", "metrics", "namespace", "proxy", "store", "token", "url"]);
    assert_eq!(fixture.ok("token list"), "no tokens\n");
}

#[test]
fn old_aggregate_key_is_ignored_with_a_warning() {
    let fixture = Fixture::new();
    let config = fixture.path("tidegate.toml");
    fs::write(&config, "listen = '127.0.0.1:0'\naggregate = false").unwrap();
    let config = config.display().to_string();
    let warning = "the key `aggregate` in the configuration is ignored";
    let check = fixture.run_words(&["serve", "--check", "--config", &config]);
    assert_eq!((check.code, check.stderr.as_str()), (0, ""));
    assert!(check.stdout.contains(warning), "{}", check.stdout);
    let server = TestServer::start(&mut fixture.command(&["serve", "--config", &config]));
    let log = server.stop().stderr;
    assert!(log.contains("WARN") && log.contains(warning), "{log}");
}

#[test]
fn two_first_starts_create_one_admin_token() {
    for _ in 0..3 {
        let fixture = Fixture::new();
        let start = || TestServer::start(&mut fixture.command(&["serve", "--listen", "127.0.0.1:0"]));
        let tokens = thread::scope(|scope| {
            let servers = [scope.spawn(start), scope.spawn(start)].map(|server| server.join().unwrap());
            let tokens = servers.iter().filter(|server| server.token().is_some()).count();
            for server in servers {
                drop(server.stop());
            }
            tokens
        });
        assert_eq!(tokens, 1);
        assert_eq!(fixture.json("token list")["tokens"].as_array().unwrap().len(), 1);
    }
}

/// A supervisor would restart the server for ever.
#[test]
fn invalid_store_address_is_a_usage_error() {
    let fixture = Fixture::new();
    for address in
        ["sqlite:x.db?colour=blue", "memory:?retention=1", "postgres://h/d?pool=x", "redis://h?colour=1"]
    {
        let run = kit::run(&mut fixture.command(&["--store", address, "serve", "--check"]));
        assert_eq!(run.code, 2, "{address}: {}", run.stderr);
    }
}

/// A server outlived its closed terminal.
#[test]
fn hangup_stops_server_on_a_terminal() {
    let fixture = Fixture::new();
    let terminal = pty::openpt(pty::OpenptFlags::RDWR | pty::OpenptFlags::NOCTTY).unwrap();
    pty::grantpt(&terminal).unwrap();
    pty::unlockpt(&terminal).unwrap();
    let path = pty::ptsname(&terminal, Vec::new()).unwrap();
    let other_side = fs::OpenOptions::new().read(true).write(true).open(path.to_str().unwrap()).unwrap();
    let mut command = fixture.command(&["serve", "--listen", "127.0.0.1:0"]);
    let server = TestServer::start(command.stdin(other_side));
    server.send(Signal::HUP);
    assert_eq!(server.end().code, 0);

    let server = TestServer::start(&mut fixture.command(&["serve", "--listen", "127.0.0.1:0"]));
    server.send(Signal::HUP);
    assert_eq!(server.ask("GET /health/live", None, "").0, 204, "without a terminal it goes on");
    server.stop();
}
