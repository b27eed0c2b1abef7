//! `tidegate serve` as people start it: the real program, on a port of its own.

mod kit;

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};

use kit::{Shop, codec, told};
use rustix::process::{Pid, Signal, kill_process};

/// A server that answers.
struct Serving {
    child: Option<Child>,
    /// What it said until it was ready.
    said: Vec<String>,
    address: String,
}

impl Serving {
    fn start(command: &mut Command) -> Self {
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let mut server = Self { child: child.ok(), said: Vec::new(), address: String::new() };
        let stdout = server.child.as_mut().and_then(|child| child.stdout.as_mut()).expect("it starts");
        for line in BufReader::new(stdout).lines() {
            let line = line.expect("a line");
            server.said.push(line.clone());
            if let Some(address) = line.strip_prefix("ready  http://") {
                address.clone_into(&mut server.address);
                return server;
            }
        }
        panic!("it ended before it was ready: {:?}", server.end());
    }

    /// The token that it has shown, if it has.
    fn token(&self) -> Option<&str> {
        let line = self.said.iter().find_map(|line| line.strip_prefix("token  "))?;
        line.split(' ').next()
    }

    /// The status of an answer, and its body.
    fn ask(&self, request: &str, token: Option<&str>, body: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(&self.address).expect("it listens");
        let token = token.map(|token| format!("authorization: Bearer {token}\r\n")).unwrap_or_default();
        let head = "host: localhost\r\nconnection: close\r\ncontent-type: application/json";
        write!(stream, "{request} HTTP/1.1\r\n{head}\r\n{token}content-length: {}\r\n\r\n{body}", body.len())
            .expect("it reads");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("it answers");
        let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
        (status, answer.split_once("\r\n\r\n").map(|(_, body)| body.to_owned()).unwrap_or_default())
    }

    fn send(&self, signal: Signal) {
        let id = self.child.as_ref().expect("it runs").id();
        let id = i32::try_from(id).ok().and_then(Pid::from_raw).expect("it has an id");
        kill_process(id, signal).expect("it is there");
    }

    fn end(mut self) -> kit::Run {
        let child = self.child.take().expect("it runs");
        told(child.wait_with_output().expect("it ends"))
    }
}

impl Drop for Serving {
    /// A test that fails leaves nothing behind.
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill().and_then(|()| child.wait());
        }
    }
}

#[test]
fn without_any_argument_it_serves_the_data_folder_and_shows_the_first_token_once() {
    let shop = Shop::new();
    let data = shop.path("data");
    let start = || {
        let mut command = shop.command(&["serve"]);
        // The one thing that a test may not leave as it is: another program may have the usual port.
        command.env("TIDEGATE_LISTEN", "127.0.0.1:0");
        Serving::start(command.env_remove("TIDEGATE_STORE").env("XDG_DATA_HOME", &data))
    };
    let server = start();
    let file = data.join("tidegate").join("tidegate.db");
    assert_eq!(server.said[0], format!("store  sqlite:{}", file.display()));
    assert_eq!(server.said.len(), 3, "{:?}", server.said);
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
    assert_eq!(server.token(), None, "it is shown once: {:?}", server.said);
    assert_eq!(server.ask(entities, Some(&token), "").0, 200, "and is good after a restart");
    server.send(Signal::INT);
    assert_eq!(server.end().code, 0);
}

#[test]
fn a_token_of_the_command_line_is_good_at_the_server_until_it_is_revoked() {
    let shop = Shop::new();
    let made = shop.json("token create ops --scopes read,admin");
    let token = made["secret"].as_str().unwrap();
    let server = Serving::start(&mut shop.command(&["serve", "--listen", "127.0.0.1:0"]));
    assert_eq!(server.token(), None, "there is one that may change things");
    assert_eq!(server.ask("GET /v1/entities", Some(token), "").0, 200);
    assert_eq!(server.ask("POST /v1/acquire", Some(token), "{}").0, 403, "it may not draw");
    shop.ok("token revoke ops");
    // What the server remembers of a token it remembers for two seconds.
    while server.ask("GET /v1/entities", Some(token), "").0 == 200 {
        std::thread::yield_now();
    }
    assert_eq!(server.ask("GET /v1/entities", Some(token), "").0, 401);
    server.send(Signal::TERM);
    assert_eq!(server.end().code, 0);
}

#[test]
fn a_second_signal_ends_it_at_once() {
    let shop = Shop::new();
    let server = Serving::start(&mut shop.command(&["serve", "--listen", "127.0.0.1:0"]));
    let token = server.token().unwrap().to_owned();
    // A request that is under way: its body is on its way.
    let mut slow = TcpStream::connect(&server.address).unwrap();
    write!(slow, "POST /v1/acquire HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\n").unwrap();
    write!(slow, "content-type: application/json\r\nexpect: 100-continue\r\ncontent-length: 9\r\n\r\n")
        .unwrap();
    let mut hears = [0; 12];
    slow.read_exact(&mut hears).unwrap();
    assert_eq!(&hears, b"HTTP/1.1 100", "the server reads it");
    server.send(Signal::TERM);
    // Nobody new enters any more.
    while TcpStream::connect(&server.address).is_ok() {
        std::thread::yield_now();
    }
    server.send(Signal::TERM);
    assert_eq!(server.end().code, 128 + 15);
}

#[test]
fn what_keeps_it_from_serving_is_one_sentence() {
    let shop = Shop::new();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap();
    let config = shop.path("tidegate.toml");
    fs::write(&config, "listen = '127.0.0.1:0'\nport = 5").unwrap();
    let config = config.display().to_string();
    let table = [
        (
            vec!["--listen".to_owned(), taken.to_string()],
            1,
            format!("error: {taken} is in use by another program: stop it, or listen on another port\n"),
        ),
        (
            vec!["--listen".to_owned(), "0.0.0.0:0".to_owned()],
            1,
            "error: 0.0.0.0:0 can be reached from other machines, and there is no TLS".to_owned(),
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
        (vec!["--config".to_owned(), "none.toml".to_owned()], 2, "`none.toml` cannot be read".to_owned()),
    ];
    for (arguments, code, sentence) in table {
        for check in [None, Some("--check")] {
            let words: Vec<&str> =
                ["serve"].into_iter().chain(arguments.iter().map(String::as_str)).chain(check).collect();
            let run = shop.run_words(&words);
            assert_eq!((run.code, run.stdout.as_str()), (code, ""), "{words:?}: {run:?}");
            assert!(run.stderr.contains(&sentence), "{words:?}: {}", run.stderr);
        }
    }
    let other = shop.path("other.db");
    fs::write(&other, "no database at all, and longer than the header of one would ever be".repeat(9))
        .unwrap();
    let run = shop.run(&format!("serve --listen 127.0.0.1:0 --store sqlite:{}", other.display()));
    assert_eq!((run.code, run.stdout.as_str()), (1, ""));
    assert!(run.stderr.contains("is damaged, or no database"), "{}", run.stderr);
}

#[test]
fn a_check_says_whether_it_could_serve_and_makes_no_token() {
    let shop = Shop::new();
    let config = shop.path("tidegate.toml");
    let store = format!("sqlite:{}", shop.file().display());
    fs::write(&config, format!("store = '{store}'\nlisten = '127.0.0.1:0'\nlog = 'json'")).unwrap();
    let config = config.display().to_string();
    let mut command = shop.command(&["serve", "--check", "--config", &config]);
    let run = kit::run(command.env_remove("TIDEGATE_STORE"));
    assert_eq!((run.code, run.stderr.as_str()), (0, ""));
    assert!(
        run.stdout.starts_with(&format!("it could serve {store} on http://127.0.0.1:")),
        "{}",
        run.stdout
    );
    let json = codec::parse(&shop.run_words(&["--json", "serve", "--check", "--config", &config]).stdout);
    assert_eq!(codec::fields(&json), ["namespace", "store", "token", "url"]);
    assert_eq!(shop.ok("token list"), "no tokens\n");
}
