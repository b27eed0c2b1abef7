//! The program as a client of a server: choosing it, scopes of tokens, and leases while it is unavailable.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};

use rustix::process::Signal;

use crate::kit::server::{TestServer, free_port};
use crate::kit::{self, Fixture, clear_environment, codec, finish, run, send, wait_for};

/// A running command that holds three of ten jobs, and exits with the code that it reads. `None` if the draw
/// timed out.
fn holding(fixture: &Fixture, arguments: &[&str]) -> Option<Child> {
    let line = ["acquire", "acme", "build", "jobs=3", "--", "sh", "-c", "echo runs; read code; exit $code"];
    let mut command = fixture.command(&[arguments, &line].concat());
    let command = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the program starts");
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().expect("a pipe")).read_line(&mut line).expect("a line");
    if line.is_empty() {
        let run = finish(child);
        assert_eq!(run.code, 4, "{run:?}");
        return None;
    }
    assert_eq!(line, "runs\n");
    Some(child)
}

fn end_with(child: &mut Child, code: &str) {
    let mut stdin = child.stdin.take().expect("a pipe");
    writeln!(stdin, "{code}").expect("it reads");
}

/// Restarts the server at the same address.
fn again(fixture: &Fixture, address: &str) -> TestServer {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    clear_environment(command.args(["serve", "--listen", address]));
    command.env("TIDEGATE_STORE", fixture.store()).env("TIDEGATE_TIMEOUT", "1m");
    TestServer::start(&mut command)
}

#[test]
fn lease_survives_a_restart_of_the_server() {
    for (code, left) in [("0", 7), ("9", 10)] {
        let mut fixture = Fixture::served();
        fixture.ok("limits set system jobs:10/day");
        let mut child = holding(&fixture, &["--timeout", "1m"]).expect("a response within a minute");
        let server = fixture.server.take().unwrap();
        let address = server.address.clone();
        server.stop();
        // The command ends while the server is down: the program sends its end until the server answers.
        end_with(&mut child, code);
        fixture.server = Some(again(&fixture, &address));
        let run = finish(child);
        assert_eq!((run.code.to_string().as_str(), run.stderr.as_str()), (code, ""));
        assert_eq!(fixture.available("acme", "build", "jobs"), left);
        assert_eq!(fixture.ok("usage summary entity acme") == "no usage\n", code != "0");
    }
}

#[test]
fn lease_expires_if_the_server_stays_down() {
    // The timeout bounds the draw too: a slow machine needs more than the first.
    let (mut fixture, mut child) = ["500ms", "5s", "1m"]
        .into_iter()
        .find_map(|time| {
            let fixture = Fixture::served();
            fixture.ok("limits set system jobs:10/day");
            holding(&fixture, &["--timeout", time]).map(|child| (fixture, child))
        })
        .expect("a response within a minute");
    fixture.server.take().unwrap().stop();
    end_with(&mut child, "0");
    let run = finish(child);
    assert_eq!(run.code, 0, "the command ended well");
    assert!(
        run.stderr.starts_with(
            "tidegate: the lease could not be ended: server unavailable: POST /v1/leases/{lease}/settle"
        ),
        "{}",
        run.stderr
    );
    assert!(run.stderr.contains("\ntidegate: the end of the lease was not confirmed: "), "{}", run.stderr);
    assert_eq!(fixture.available("acme", "build", "jobs"), 7, "held until its deadline");
}

#[test]
fn unavailable_server_is_one_sentence_and_code_4() {
    let fixture = Fixture::new();
    let unused = free_port();
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    // The first refuses the connection; the second never answers.
    let table = [
        (format!("1m --server http://{unused}"), "no connection: "),
        (format!("50ms --server http://{}", silent.local_addr().unwrap()), "in "),
    ];
    for (place, cause) in table {
        for line in ["status", "limits list", "limits set system a:1/s", "acquire acme build jobs=1 -- true"]
        {
            let run = fixture.run(&format!("--timeout {place} {line}"));
            assert_eq!((run.code, run.stdout.as_str()), (4, ""), "{line}: {run:?}");
            assert!(run.stderr.starts_with("error: server unavailable: "), "{}", run.stderr);
            assert!(run.stderr.contains(cause) && run.stderr.contains("\n next: "), "{}", run.stderr);
        }
        let run = fixture.run(&format!("--json --timeout {place} status"));
        let error = &codec::parse(&run.stderr)["error"];
        assert_eq!((&error["code"], &error["kind"]), (&4.into(), &"away".into()));
    }
    assert!(!fixture.file().exists(), "no store was used instead");
}

#[test]
fn denied_request_names_the_scope_and_a_remedy() {
    let fixture = Fixture::served();
    let token = |line: &str| fixture.json(line)["secret"].as_str().map(str::to_owned).unwrap();
    let reads = token("token create reads --scopes read");
    let draws = token("token create draws --scopes acquire");
    let gone = token("token create gone --scopes read");
    fixture.ok("token revoke gone");
    let scope = "\n next: use a token that has it; at the store: tidegate token create ID --scopes acquire,read,admin\n";
    let lacks = |id: &str, scope_lacking: &str| {
        format!("error: the token `{id}` lacks the scope `{scope_lacking}`, which this needs{scope}")
    };
    let table = [
        (
            None,
            "status",
            "error: the server requires a token\n \
             next: pass a file that holds one with --token-file FILE, or set TIDEGATE_TOKEN\n"
                .to_owned(),
        ),
        (
            Some(&gone),
            "status",
            "error: the server rejected the token: the token was revoked\n \
             next: use a valid token; at the store: tidegate token create ID --scopes SCOPES\n"
                .to_owned(),
        ),
        (Some(&reads), "limits set system a:1/s", lacks("reads", "admin")),
        (Some(&reads), "token list", lacks("reads", "admin")),
        (Some(&reads), "acquire acme build jobs=1", lacks("reads", "acquire")),
        (Some(&reads), "acquire acme build jobs=1 -- echo runs", lacks("reads", "acquire")),
        (Some(&draws), "balance acme build", lacks("draws", "read")),
        (Some(&draws), "audit list", lacks("draws", "read")),
    ];
    for (token, line, sentence) in table {
        let mut command = fixture.command(&line.split_whitespace().collect::<Vec<_>>());
        let command = command.env_remove("TIDEGATE_TOKEN");
        let run = run(token.into_iter().fold(command, |command, token| command.env("TIDEGATE_TOKEN", token)));
        assert_eq!((run.code, run.stdout.as_str(), run.stderr), (1, "", sentence), "{line}");
    }
}

#[test]
fn each_verb_needs_only_its_documented_scopes() {
    let fixture = Fixture::served();
    fixture.ok("limits set system jobs:10/day");
    fixture.ok("token create spare --scopes read");
    fixture.ok("entity create org");
    fs::write(fixture.path("limits.toml"), "[system]\nlimits = ['jobs:20/day']").unwrap();
    let table = [
        ("acquire", vec!["acquire acme build jobs=1", "acquire acme build jobs=1 --within 1s -- true"]),
        (
            "read",
            vec![
                "limits show system",
                "limits list",
                "limits plan FILE",
                "entity list",
                "entity children org",
                "balance acme",
                "balance acme build",
                "explain acme build jobs=1",
                "usage list entity acme",
                "usage summary entity acme",
                "audit list",
                "status",
            ],
        ),
        (
            "read,admin",
            vec![
                "limits set resource build jobs:5/day",
                "limits delete resource build",
                "limits apply FILE",
                "entity create acme",
                "entity show acme",
                "entity set-parent acme --none",
                "entity delete acme",
            ],
        ),
        ("admin", vec!["token list", "token create other --scopes read", "token revoke spare"]),
    ];
    let file = fixture.path("limits.toml").display().to_string();
    for (number, (scopes, lines)) in table.into_iter().enumerate() {
        let made = fixture.json(&format!("token create only-{number} --scopes {scopes}"));
        for line in lines {
            let line = line.replace("FILE", &file);
            let mut command = fixture.command(&line.split_whitespace().collect::<Vec<_>>());
            let run = run(command.env("TIDEGATE_TOKEN", made["secret"].as_str().unwrap()));
            assert!(matches!(run.code, 0 | 5) && run.stderr.is_empty(), "{line} with {scopes}: {run:?}");
        }
    }
}

#[test]
fn token_is_read_from_file_or_variable_and_not_shown() {
    let fixture = Fixture::served();
    let (file, token) = (fixture.path("token"), fixture.token.clone().unwrap());
    fs::write(&file, format!("{token}\n")).unwrap();
    let path = file.display().to_string();
    let mut command = fixture.command(&["--token-file", &path, "status"]);
    assert_eq!(run(command.env("TIDEGATE_TOKEN", "none")).code, 0, "the file overrides the variable");
    let mut command = fixture.command(&["status"]);
    assert_eq!(run(command.env_remove("TIDEGATE_TOKEN").env("TIDEGATE_TOKEN_FILE", &path)).code, 0);
    let secret = token.rsplit_once('_').unwrap().1;
    for bad in [format!("{token}0"), format!("{token}\n{token}"), format!("x{token}"), String::new()] {
        fs::write(&file, &bad).unwrap();
        let run = fixture.run_words(&["--token-file", &path, "--json", "status"]);
        assert!(matches!(run.code, 1 | 2), "{run:?}");
        assert!(!run.stderr.contains(secret), "{}", run.stderr);
    }
    let run = fixture.run("--token-file none status");
    assert_eq!((run.code, run.stdout.as_str()), (2, ""));
    assert!(
        run.stderr.starts_with("error: the token file `none` cannot be read: No such file"),
        "{}",
        run.stderr
    );
}

#[test]
fn flag_overrides_the_variable_and_two_are_rejected() {
    let fixture = Fixture::served();
    let (server, store) = (fixture.server.as_ref().unwrap().url(), fixture.store());
    let url = |run: kit::Run| codec::parse(&run.stdout)["url"].as_str().map(str::to_owned).unwrap();
    assert_eq!(url(fixture.run(&format!("--json status --store {store}"))), store, "over TIDEGATE_SERVER");
    let mut command = fixture.command(&["--json", "status", "--server", &server]);
    assert_eq!(url(run(command.env("TIDEGATE_STORE", &store))), format!("{server}/"), "over TIDEGATE_STORE");
    let mut command = fixture.command(&["status"]);
    let both = run(command.env("TIDEGATE_STORE", &store));
    assert_eq!(both.code, 2);
    assert!(
        both.stderr.starts_with("error: TIDEGATE_STORE and TIDEGATE_SERVER are both set: "),
        "{}",
        both.stderr
    );
    let table = [
        (
            format!("--store {store} --server {server} status"),
            "'--server <URL>' cannot be used with '--store <URL>'",
        ),
        (format!("serve --server {server}"), "'--server <URL>' does not apply to this command"),
        (
            format!("--store {store} limits list --actor me"),
            "'--actor <NAME>' does not apply to this command",
        ),
        (format!("--store {store} --token-file x status"), "'--token-file <FILE>' requires a server"),
        (format!("--server {server} --actor me entity create x"), "under its token"),
        ("--server ftp://x status".to_owned(), "invalid server URL `ftp://x`"),
        (
            "--server 127.0.0.1:8707 status".to_owned(),
            "correct --server or TIDEGATE_SERVER, such as http://127.0.0.1:8707",
        ),
    ];
    for (line, sentence) in table {
        let run = fixture.run(&line);
        assert_eq!((run.code, run.stdout.as_str()), (2, ""), "{line}: {run:?}");
        assert!(run.stderr.contains(sentence), "{line}: {}", run.stderr);
    }
    assert_eq!(fixture.run("completions bash").code, 0, "regardless of the environment");
    assert_eq!(fixture.run("--timeout 1s serve --listen 127.0.0.1:0 --check --store memory:").code, 0);
}

#[test]
fn archive_requires_the_store() {
    let fixture = Fixture::served();
    let run = fixture.run("audit archive audit --before 0s");
    assert_eq!((run.code, run.stdout.as_str()), (2, ""));
    assert_eq!(
        run.stderr,
        "error: an archive moves changes out of the store, which a server does not allow\n \
         next: run it at the store: tidegate --store URL audit archive audit\n"
    );
}

#[test]
fn other_http_server_is_rejected() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let other = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut line = String::new();
        BufReader::new(&stream).read_line(&mut line).unwrap();
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhello").unwrap();
        line
    });
    let run = Fixture::new().run(&format!("--server http://{address} status"));
    assert!(other.join().unwrap().starts_with("GET /v1/status "));
    assert_eq!((run.code, run.stdout.as_str()), (1, ""));
    assert!(run.stderr.contains("next: check that --server is the address of a tidegate"), "{}", run.stderr);
}

#[test]
fn signal_removes_a_waiter_from_the_server() {
    let fixture = Fixture::served();
    fixture.ok("limits set system jobs:2/min:1");
    let server = fixture.server.as_ref().unwrap();
    for line in [
        &["acquire", "acme", "build", "jobs=1", "--within", "2m"][..],
        &["acquire", "birch", "build", "jobs=1", "--within", "2m", "--", "true"],
    ] {
        fixture.ok(&line[..4].join(" "));
        let mut granted = 1;
        // On a slow machine a unit may refill first, and is granted: then the next one waits.
        let run = loop {
            let mut command = fixture.command(line);
            let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
            wait_for("a waiter or a grant", || {
                (child.try_wait().unwrap().is_some() || server.metric("tidegate_waiting ") == 1).then_some(())
            });
            send(&child, Signal::INT);
            let run = finish(child);
            if run.code != 0 {
                break run;
            }
            granted += 1;
        };
        assert_eq!((run.code, run.stderr.as_str()), (130, ""));
        server.wait_for_waiting(0);
        let used = fixture.json(&format!("usage summary entity {}", line[1]));
        assert_eq!(used["limits"][0]["units"], granted, "{line:?}");
    }
}

#[test]
fn wait_continues_beyond_the_bound_of_the_server() {
    let mut fixture = Fixture::served();
    fixture.server.take().unwrap().stop();
    fixture.server = Some(fixture.serve(&["--within-max", "20ms"]));
    fixture.ok("limits set system jobs:10/s:1");
    for _ in 0..3 {
        fixture.ok("acquire acme build jobs=1 --within 1m");
    }
    assert_eq!(fixture.json("usage summary entity acme")["limits"][0]["units"], 3);
    let run = fixture.run("acquire acme build jobs=2 --within 1m");
    assert_eq!(run.code, 3, "an impossible request does not wait: {}", run.stderr);
}

#[test]
fn lost_lease_is_reported_while_its_command_runs() {
    let mut fixture = Fixture::served();
    fixture.ok("limits set system jobs:10/day");
    let line = "acquire acme build jobs=3 --deadline 1s -- sh -c";
    let line: Vec<_> = line.split(' ').chain(["echo runs; read code"]).collect();
    let mut command = fixture.command(&line);
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    let server = fixture.server.take().unwrap();
    let address = server.address.clone();
    server.stop();
    let mut warning = String::new();
    BufReader::new(child.stderr.as_mut().unwrap()).read_line(&mut warning).unwrap();
    // On a slow machine it may have expired at the server before that stopped.
    let sentence = "tidegate: the lease was not renewed, and the command continues: ";
    let why = warning.strip_prefix(sentence).unwrap_or_else(|| panic!("{warning}"));
    assert!(
        why.starts_with("the server does not respond") || why.starts_with("the server has ended the lease"),
        "{warning}"
    );
    assert_eq!(child.try_wait().unwrap(), None, "it continues");
    fixture.server = Some(again(&fixture, &address));
    end_with(&mut child, "0");
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn upstreams_are_listed_at_a_server() {
    let fixture = Fixture::served();
    assert_eq!(fixture.ok("upstream list"), "no upstreams\n");
    let server = fixture.server.as_ref().unwrap();
    let (status, body) =
        server.ask("POST /v1/upstreams/openai%2Fgpt-4/acquire", fixture.token.as_deref(), "{}");
    assert_eq!(status, 200, "{body}");
    let listed = fixture.ok("upstream list");
    let rows: Vec<Vec<&str>> = listed.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows[0].join(" "), "UPSTREAM RATE QUOTA SLOTS IN FLIGHT WAITING ADMITTED REASON");
    assert_eq!(rows[1], ["openai/gpt-4", "10.0", "-", "32", "1", "0", "1", "probing"], "{listed}");
    assert!(listed.lines().all(|line| line.chars().count() <= 100), "{listed}");
    let json = fixture.json("upstream list");
    let wanted = ["admitted", "in_flight", "name", "quota", "rate", "reason", "slots", "waiting"];
    assert_eq!(codec::fields(&json["upstreams"][0]), wanted);
    assert_eq!(
        (&json["upstreams"][0]["rate"], &json["upstreams"][0]["in_flight"]),
        (&10.0.into(), &1.into())
    );

    let run = Fixture::new().run("upstream list");
    assert_eq!(run.code, 2);
    assert!(run.stderr.contains("upstreams are at a server, not in a store"), "{}", run.stderr);
}
