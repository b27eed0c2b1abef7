//! A server that the program asks: how it is chosen, what a token allows, and what happens to leases while it is unavailable.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};

use rustix::process::Signal;

use crate::kit::serving::{Serving, free_port};
use crate::kit::{self, Shop, clear_environment, codec, finish, run, send, wait_for};

/// A command that holds three of ten jobs, has reported that it runs, and ends with the code that it reads. `None` if the
/// draw was not answered in time.
fn holding(shop: &Shop, arguments: &[&str]) -> Option<Child> {
    let line = ["acquire", "acme", "build", "jobs=3", "--", "sh", "-c", "echo runs; read code; exit $code"];
    let mut command = shop.command(&[arguments, &line].concat());
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

/// The same server again, at the same address.
fn again(shop: &Shop, address: &str) -> Serving {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    clear_environment(command.args(["serve", "--listen", address]));
    command.env("TIDEGATE_STORE", shop.store()).env("TIDEGATE_TIMEOUT", "1m");
    Serving::start(&mut command)
}

#[test]
fn a_lease_outlives_a_restart_of_the_server_and_ends_as_its_command_does() {
    for (code, left) in [("0", 7), ("9", 10)] {
        let mut shop = Shop::served();
        shop.ok("limits set system jobs:10/day");
        let mut child = holding(&shop, &["--timeout", "1m"]).expect("an answer within a minute");
        let server = shop.server.take().unwrap();
        let address = server.address.clone();
        server.stop();
        // The command ends while the server is down: the program sends its end until the server answers.
        end_with(&mut child, code);
        shop.server = Some(again(&shop, &address));
        let run = finish(child);
        assert_eq!((run.code.to_string().as_str(), run.stderr.as_str()), (code, ""));
        assert_eq!(shop.available("acme", "build", "jobs"), left);
        assert_eq!(shop.ok("usage summary entity acme") == "no usage\n", code != "0");
    }
}

#[test]
fn a_lease_expires_if_the_server_stays_down() {
    // The timeout bounds the draw too: a slow machine needs more than the first.
    let (mut shop, mut child) = ["500ms", "5s", "1m"]
        .into_iter()
        .find_map(|time| {
            let shop = Shop::served();
            shop.ok("limits set system jobs:10/day");
            holding(&shop, &["--timeout", time]).map(|child| (shop, child))
        })
        .expect("an answer within a minute");
    shop.server.take().unwrap().stop();
    end_with(&mut child, "0");
    let run = finish(child);
    assert_eq!(run.code, 0, "the command ended well");
    assert!(
        run.stderr.starts_with("tidegate: the lease has not ended as it should: the server is away: POST /v1/leases/{lease}/settle"),
        "{}",
        run.stderr
    );
    assert!(run.stderr.contains("\ntidegate: the end was not heard of: "), "{}", run.stderr);
    assert_eq!(shop.available("acme", "build", "jobs"), 7, "held until its deadline");
}

#[test]
fn a_server_that_is_away_is_one_sentence_and_ends_with_4() {
    let shop = Shop::new();
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
            let run = shop.run(&format!("--timeout {place} {line}"));
            assert_eq!((run.code, run.stdout.as_str()), (4, ""), "{line}: {run:?}");
            assert!(run.stderr.starts_with("error: the server is away: "), "{}", run.stderr);
            assert!(run.stderr.contains(cause) && run.stderr.contains("\n next: "), "{}", run.stderr);
        }
        let run = shop.run(&format!("--json --timeout {place} status"));
        let error = &codec::parse(&run.stderr)["error"];
        assert_eq!((&error["code"], &error["kind"]), (&4.into(), &"away".into()));
    }
    assert!(!shop.file().exists(), "no store was asked instead");
}

#[test]
fn whoever_may_not_is_told_what_is_lacking_and_what_to_do() {
    let shop = Shop::served();
    let token = |line: &str| shop.json(line)["secret"].as_str().map(str::to_owned).unwrap();
    let reads = token("token create reads --scopes read");
    let draws = token("token create draws --scopes acquire");
    let gone = token("token create gone --scopes read");
    shop.ok("token revoke gone");
    let scope = "\n next: use a token that has it; where the store is: tidegate token create ID --scopes acquire,read,admin\n";
    let lacks = |id: &str, scope_lacking: &str| {
        format!("error: the token `{id}` lacks the scope `{scope_lacking}`, which this needs{scope}")
    };
    let table = [
        (
            None,
            "status",
            "error: the server lets nobody in without a token\n \
             next: name a file that holds it with --token-file FILE, or set TIDEGATE_TOKEN\n"
                .to_owned(),
        ),
        (
            Some(&gone),
            "status",
            "error: the server does not let this token in: the token was revoked\n \
             next: ask for a good one; where the store is: tidegate token create ID --scopes SCOPES\n"
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
        let mut command = shop.command(&line.split_whitespace().collect::<Vec<_>>());
        let command = command.env_remove("TIDEGATE_TOKEN");
        let run = run(token.into_iter().fold(command, |command, token| command.env("TIDEGATE_TOKEN", token)));
        assert_eq!((run.code, run.stdout.as_str(), run.stderr), (1, "", sentence), "{line}");
    }
}

#[test]
fn each_verb_is_content_with_the_scopes_that_the_documentation_says() {
    let shop = Shop::served();
    shop.ok("limits set system jobs:10/day");
    shop.ok("token create spare --scopes read");
    shop.ok("entity create org");
    fs::write(shop.path("limits.toml"), "[system]\nlimits = ['jobs:20/day']").unwrap();
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
    let file = shop.path("limits.toml").display().to_string();
    for (number, (scopes, lines)) in table.into_iter().enumerate() {
        let made = shop.json(&format!("token create only-{number} --scopes {scopes}"));
        for line in lines {
            let line = line.replace("FILE", &file);
            let mut command = shop.command(&line.split_whitespace().collect::<Vec<_>>());
            let run = run(command.env("TIDEGATE_TOKEN", made["secret"].as_str().unwrap()));
            assert!(matches!(run.code, 0 | 5) && run.stderr.is_empty(), "{line} with {scopes}: {run:?}");
        }
    }
}

#[test]
fn a_token_comes_from_a_file_or_the_environment_and_is_shown_by_nothing() {
    let shop = Shop::served();
    let (file, token) = (shop.path("token"), shop.token.clone().unwrap());
    fs::write(&file, format!("{token}\n")).unwrap();
    let path = file.display().to_string();
    let mut command = shop.command(&["--token-file", &path, "status"]);
    assert_eq!(run(command.env("TIDEGATE_TOKEN", "none")).code, 0, "the file counts before the variable");
    let mut command = shop.command(&["status"]);
    assert_eq!(run(command.env_remove("TIDEGATE_TOKEN").env("TIDEGATE_TOKEN_FILE", &path)).code, 0);
    let secret = token.rsplit_once('_').unwrap().1;
    for bad in [format!("{token}0"), format!("{token}\n{token}"), format!("x{token}"), String::new()] {
        fs::write(&file, &bad).unwrap();
        let run = shop.run_words(&["--token-file", &path, "--json", "status"]);
        assert!(matches!(run.code, 1 | 2), "{run:?}");
        assert!(!run.stderr.contains(secret), "{}", run.stderr);
    }
    let run = shop.run("--token-file none status");
    assert_eq!((run.code, run.stdout.as_str()), (2, ""));
    assert!(
        run.stderr.starts_with("error: the token file `none` cannot be read: No such file"),
        "{}",
        run.stderr
    );
}

#[test]
fn the_far_side_that_was_typed_counts_and_two_are_one_too_many() {
    let shop = Shop::served();
    let (server, store) = (shop.server.as_ref().unwrap().url(), shop.store());
    let url = |run: kit::Run| codec::parse(&run.stdout)["url"].as_str().map(str::to_owned).unwrap();
    assert_eq!(url(shop.run(&format!("--json status --store {store}"))), store, "over TIDEGATE_SERVER");
    let mut command = shop.command(&["--json", "status", "--server", &server]);
    assert_eq!(url(run(command.env("TIDEGATE_STORE", &store))), format!("{server}/"), "over TIDEGATE_STORE");
    let mut command = shop.command(&["status"]);
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
        (format!("serve --server {server}"), "'--server <URL>' is for verbs that ask one"),
        (format!("--store {store} --token-file x status"), "'--token-file <FILE>' is for a server"),
        (format!("--server {server} --actor me entity create x"), "in the name of the token"),
        ("--server ftp://x status".to_owned(), "`ftp://x` is no address of a server"),
        (
            "--server 127.0.0.1:8707 status".to_owned(),
            "correct --server or TIDEGATE_SERVER, such as http://127.0.0.1:8707",
        ),
    ];
    for (line, sentence) in table {
        let run = shop.run(&line);
        assert_eq!((run.code, run.stdout.as_str()), (2, ""), "{line}: {run:?}");
        assert!(run.stderr.contains(sentence), "{line}: {}", run.stderr);
    }
    assert_eq!(shop.run("completions bash").code, 0, "whatever the environment says");
    assert_eq!(shop.run("--timeout 1s serve --listen 127.0.0.1:0 --check --store memory:").code, 0);
}

#[test]
fn an_archive_is_made_where_the_store_is() {
    let shop = Shop::served();
    let run = shop.run("audit archive audit --before 0s");
    assert_eq!((run.code, run.stdout.as_str()), (2, ""));
    assert_eq!(
        run.stderr,
        "error: an archive takes changes out of the store, and a server lets nobody do that\n \
         next: where the store is: tidegate --store URL audit archive audit\n"
    );
}

#[test]
fn whatever_else_answers_at_the_address_is_no_server() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let other = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut line = String::new();
        BufReader::new(&stream).read_line(&mut line).unwrap();
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhello").unwrap();
        line
    });
    let run = Shop::new().run(&format!("--server http://{address} status"));
    assert!(other.join().unwrap().starts_with("GET /v1/status "));
    assert_eq!((run.code, run.stdout.as_str()), (1, ""));
    assert!(run.stderr.contains("next: see whether --server is the address of a tidegate"), "{}", run.stderr);
}

#[test]
fn a_signal_removes_a_waiter_from_the_server() {
    let shop = Shop::served();
    shop.ok("limits set system jobs:2/min:1");
    let server = shop.server.as_ref().unwrap();
    for line in [
        &["acquire", "acme", "build", "jobs=1", "--within", "2m"][..],
        &["acquire", "birch", "build", "jobs=1", "--within", "2m", "--", "true"],
    ] {
        shop.ok(&line[..4].join(" "));
        let mut granted = 1;
        // A machine that takes half a minute to get here grants this one too: then the next one waits.
        let run = loop {
            let mut command = shop.command(line);
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
        let used = shop.json(&format!("usage summary entity {}", line[1]));
        assert_eq!(used["limits"][0]["units"], granted, "{line:?}");
    }
}

#[test]
fn a_wait_beyond_the_bound_of_the_server_goes_on() {
    let mut shop = Shop::served();
    shop.server.take().unwrap().stop();
    shop.server = Some(shop.serve(&["--within-max", "20ms"]));
    shop.ok("limits set system jobs:10/s:1");
    for _ in 0..3 {
        shop.ok("acquire acme build jobs=1 --within 1m");
    }
    assert_eq!(shop.json("usage summary entity acme")["limits"][0]["units"], 3);
    let run = shop.run("acquire acme build jobs=2 --within 1m");
    assert_eq!(run.code, 3, "what never comes is not waited for: {}", run.stderr);
}

#[test]
fn a_lost_lease_is_reported_while_its_command_runs() {
    let mut shop = Shop::served();
    shop.ok("limits set system jobs:10/day");
    let line = "acquire acme build jobs=3 --deadline 1s -- sh -c";
    let line: Vec<_> = line.split(' ').chain(["echo runs; read code"]).collect();
    let mut command = shop.command(&line);
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    let server = shop.server.take().unwrap();
    let address = server.address.clone();
    server.stop();
    let mut warning = String::new();
    BufReader::new(child.stderr.as_mut().unwrap()).read_line(&mut warning).unwrap();
    // On a slow machine it may have expired at the server before that stopped.
    let sentence = "tidegate: the lease is not renewed, and the command goes on: ";
    let why = warning.strip_prefix(sentence).unwrap_or_else(|| panic!("{warning}"));
    assert!(
        why.starts_with("the server was not heard of") || why.starts_with("the server has ended it"),
        "{warning}"
    );
    assert_eq!(child.try_wait().unwrap(), None, "it goes on");
    shop.server = Some(again(&shop, &address));
    end_with(&mut child, "0");
    assert_eq!(child.wait().unwrap().code(), Some(0));
}
