//! A real Envoy in front of a small upstream, with the files of `examples/envoy`, limited by tidegate.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use crate::kit::engine::{address, skip_without};
use crate::kit::server::{TestServer, own_address};
use crate::kit::{Fixture, wait_for, wait_until};

/// The variable with the path of the program.
const ENVOY: &str = "TIDEGATE_TEST_ENVOY";
/// Timeout of a response.
const HANGS: Duration = Duration::from_mins(2);

/// A response of the proxy.
#[derive(Debug)]
struct Response {
    status: u16,
    head: String,
    body: String,
}

impl Response {
    fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            key.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    }
}

fn example(name: &str) -> String {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../examples/envoy").join(name);
    fs::read_to_string(path).expect("the example exists")
}

/// Starts an upstream that responds with the path of the request, and reports the tokens in its query.
fn upstream() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("it listens");
    let address = listener.local_addr().expect("it has an address");
    thread::spawn(move || {
        for stream in listener.incoming() {
            thread::spawn(move || stream.map(serve));
        }
    });
    address
}

fn serve(stream: TcpStream) -> Option<()> {
    let mut reader = BufReader::new(stream);
    loop {
        let mut path = None;
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).ok().filter(|read| *read > 0)?;
            if line.trim().is_empty() {
                break;
            }
            path = path.or_else(|| line.split(' ').nth(1).map(str::to_owned));
        }
        let path = path?;
        let tokens = path.strip_prefix("/chat?tokens=").map(|tokens| format!("x-tokens: {tokens}\r\n"));
        let body = format!("upstream {path}");
        let (length, tokens) = (body.len(), tokens.unwrap_or_default());
        let head = format!("HTTP/1.1 200 OK\r\n{tokens}content-length: {length}\r\n\r\n");
        reader.get_mut().write_all((head + &body).as_bytes()).ok()?;
    }
}

/// A running Envoy. Dropping it kills it.
struct Envoy {
    child: Child,
    address: String,
}

impl Envoy {
    /// Starts it with the example's configuration on free ports, and one more change.
    fn start(fixture: &Fixture, tidegate: &str, token: &str, change: (&str, &str)) -> Self {
        let (ip, port) = tidegate.rsplit_once(':').expect("a port");
        let ports = [
            ("port_value: 9901", "port_value: 0".to_owned()),
            ("port_value: 10000", "port_value: 0".to_owned()),
            ("port_value: 8080", format!("port_value: {}", upstream().port())),
            ("127.0.0.1, port_value: 8708", format!("{ip}, port_value: {port}")),
            // Long enough for a slow machine.
            ("timeout: 0.25s", "timeout: 30s".to_owned()),
            (change.0, change.1.to_owned()),
        ];
        let mut text = example("envoy.yaml");
        for (from, to) in ports {
            assert!(text.contains(from), "{from} is not in the example");
            text = text.replace(from, &to);
        }
        let (config, admin) = (fixture.path("envoy.yaml"), fixture.path("admin"));
        fs::write(&config, text).expect("it can be written");
        let child = Command::new(address(ENVOY))
            .arg("-c")
            .arg(&config)
            .arg("--admin-address-path")
            .arg(&admin)
            .args(["--concurrency", "1", "--disable-hot-restart", "--log-level", "error"])
            .env_clear()
            .env("TIDEGATE_TOKEN", token)
            .stdout(Stdio::null())
            .stderr(fs::File::create(fixture.path("envoy.log")).expect("it can be written"))
            .spawn()
            .expect("Envoy starts");
        let mut envoy = Self { child, address: String::new() };
        let log = fixture.path("envoy.log");
        envoy.address = wait_for("Envoy", || {
            if let Ok(Some(ended)) = envoy.child.try_wait() {
                panic!("Envoy ended with {ended}: {}", fs::read_to_string(&log).unwrap_or_default());
            }
            let admin = fs::read_to_string(&admin).ok().filter(|admin| admin.contains(':'))?;
            let listeners = ask(&admin, "/listeners", &[])?;
            listeners.body.lines().find_map(|line| Some(line.strip_prefix("web::")?.trim().to_owned()))
        });
        envoy
    }

    fn get(&self, path: &str, headers: &[(&str, &str)]) -> Response {
        wait_for("an answer", || ask(&self.address, path, headers))
    }
}

impl Drop for Envoy {
    fn drop(&mut self) {
        let _ = self.child.kill().and_then(|()| self.child.wait());
    }
}

/// Sends one request. Returns `None` without a response.
fn ask(address: &str, path: &str, headers: &[(&str, &str)]) -> Option<Response> {
    let mut stream = TcpStream::connect(address).ok()?;
    stream.set_read_timeout(Some(HANGS)).ok()?;
    write!(stream, "GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n").ok()?;
    for (name, value) in headers {
        write!(stream, "{name}: {value}\r\n").ok()?;
    }
    write!(stream, "\r\n").ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    let (head, body) = text.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    Some(Response { status, head: head.to_owned(), body: body.to_owned() })
}

/// A server with the example's rules, and a token for Envoy.
fn tidegate(fixture: &Fixture, listen: &str) -> TestServer {
    let config = fixture.path("tidegate.toml");
    fs::write(&config, example("tidegate.toml")).expect("it can be written");
    fixture.serve(&["--config", config.to_str().expect("a path"), "--envoy", listen])
}

fn token(fixture: &Fixture) -> String {
    let made = fixture.json("token create envoy --scopes acquire");
    made["secret"].as_str().expect("a secret").to_owned()
}

#[test]
fn envoy_limits_users_and_sends_ratelimit_headers() {
    skip_without!(ENVOY);
    let fixture = Fixture::new();
    let token = token(&fixture);
    let server = tidegate(&fixture, "127.0.0.1:0");
    let envoy =
        Envoy::start(&fixture, server.announced("envoy ").unwrap(), &token, ("deny: true", "deny: true"));
    let ada = [("x-user", "ada")];
    for left in (0..5).rev() {
        let passed = envoy.get("/", &ada);
        assert_eq!((passed.status, passed.body.as_str()), (200, "upstream /"), "{passed:?}");
        assert_eq!(passed.header("ratelimit"), Some(format!("\"requests\";r={left}").as_str()), "{passed:?}");
        assert_eq!(passed.header("ratelimit-policy"), Some("\"requests\";q=5;w=3600"));
    }
    let refused = envoy.get("/", &ada);
    assert_eq!(refused.status, 429, "{refused:?}");
    let wait: u64 =
        refused.header("retry-after").and_then(|wait| wait.parse().ok()).expect("a retry-after header");
    assert!((1..=720).contains(&wait), "{refused:?}");
    assert!(
        refused.header("ratelimit").is_some_and(|field| field.starts_with("\"requests\";r=0;t=")),
        "{refused:?}"
    );

    // Another user, hits that count three times, a user without a limit, and a request without a user.
    assert_eq!(envoy.get("/", &[("x-user", "bob")]).status, 200);
    assert_eq!(envoy.get("/bulk", &[("x-user", "bob")]).header("ratelimit"), Some("\"requests\";r=1"));
    assert_eq!(envoy.get("/bulk", &[("x-user", "bob")]).status, 429);
    assert_eq!(envoy.get("/", &[("x-user", "bob")]).status, 200, "a refused request takes nothing");
    for _ in 0..10 {
        assert_eq!(envoy.get("/", &[("x-user", "root")]).status, 200);
    }
    assert_eq!(envoy.get("/", &[]).status, 200);

    // A rule in shadow mode passes every request, alone and beside another.
    for _ in 0..3 {
        assert_eq!(envoy.get("/", &[("x-trial", "new")]).status, 200);
    }
    // It is counted after the response, which does not wait for the disk.
    wait_until("the count", || server.metric("tidegate_rls_descriptors_total{kind=\"shadowed\"}") == 2);
    assert_eq!(envoy.get("/", &[("x-trial", "other"), ("x-user", "ada")]).status, 429);
    assert_eq!(envoy.get("/", &[("x-trial", "new"), ("x-user", "cleo")]).status, 200);
    // An invalid name is refused.
    assert_eq!(envoy.get("/", &[("x-user", "a#b")]).status, 429);
    // Its limits are in a rule and not in the store, and the balance shows the units drawn from them.
    let balance = &fixture.json("balance cleo web")["limits"][0];
    assert_eq!((&balance["limit"], &balance["available"]), (&"requests".into(), &4.into()), "{balance}");
    server.stop();
}

#[test]
fn envoy_limits_tokens_that_the_upstream_reports() {
    skip_without!(ENVOY);
    let fixture = Fixture::new();
    let token = token(&fixture);
    let server = tidegate(&fixture, "127.0.0.1:0");
    let envoy =
        Envoy::start(&fixture, server.announced("envoy ").unwrap(), &token, ("deny: true", "deny: true"));
    let chat = |tokens: u64| envoy.get(&format!("/chat?tokens={tokens}"), &[("x-user", "ada")]);
    let is_left = |expected: i64| {
        // Envoy reports after the response.
        wait_until("the report", || {
            let limits = &fixture.json("balance ada llm")["limits"];
            limits[0]["available"].as_i64().is_some_and(|left| (expected..=expected + 100).contains(&left))
        });
    };
    let first = chat(600);
    assert_eq!((first.status, first.header("ratelimit")), (200, Some("\"tokens\";r=1000")), "{first:?}");
    is_left(400);
    // The check admits a request while any token is left, whatever it will take.
    assert_eq!(chat(900).status, 200);
    is_left(-500);
    let refused = chat(1);
    assert_eq!(refused.status, 429, "{refused:?}");
    assert!(refused.header("retry-after").is_some(), "{refused:?}");
    // A refused request reports nothing.
    is_left(-500);
    assert_eq!(envoy.get("/chat?tokens=1", &[("x-user", "bob")]).status, 200);
    wait_until("the reports", || server.metric("tidegate_rls_descriptors_total{kind=\"reported\"}") >= 3);
    server.stop();
}

#[test]
fn envoy_follows_its_failure_mode_and_recovers() {
    skip_without!(ENVOY);
    for (change, status) in [("failure_mode_deny: true", 500), ("failure_mode_deny: false", 200)] {
        let fixture = Fixture::new();
        let token = token(&fixture);
        let server = tidegate(&fixture, &format!("{}:0", own_address()));
        let address = server.announced("envoy ").expect("a listener for Envoy").to_owned();
        let envoy = Envoy::start(&fixture, &address, &token, ("failure_mode_deny: true", change));
        let ada = [("x-user", "ada")];
        assert!(envoy.get("/", &ada).header("ratelimit").is_some());
        server.stop();
        let without = envoy.get("/", &ada);
        assert_eq!((without.status, without.header("ratelimit")), (status, None), "{change}: {without:?}");
        let server = tidegate(&fixture, &address);
        let recovered = wait_for("the recovery", || {
            let answer = envoy.get("/", &ada);
            answer.header("ratelimit").is_some().then_some(answer)
        });
        assert_eq!(recovered.status, 200, "{change}: {recovered:?}");
        assert_eq!(recovered.header("ratelimit"), Some("\"requests\";r=3"), "{change}: {recovered:?}");
        server.stop();
    }
}

#[test]
fn invalid_token_is_a_service_failure() {
    skip_without!(ENVOY);
    let fixture = Fixture::new();
    let server = tidegate(&fixture, "127.0.0.1:0");
    let address = server.announced("envoy ").expect("a listener for Envoy").to_owned();
    let envoy = Envoy::start(&fixture, &address, "tg_envoy_wrong", ("deny: true", "deny: true"));
    assert_eq!(envoy.get("/", &[("x-user", "ada")]).status, 500);
    assert_eq!(server.metric("tidegate_rls_requests_total{answer=\"refused\"}"), 1);
    server.stop();
}

#[test]
fn invalid_rules_are_rejected_at_startup() {
    let fixture = Fixture::new();
    let config = fixture.path("tidegate.toml");
    let check = |text: &str| {
        fs::write(&config, text).expect("it can be written");
        let path = config.to_str().expect("a path");
        fixture.run_words(&[
            "serve",
            "--check",
            "--listen",
            "127.0.0.1:0",
            "--envoy",
            "127.0.0.1:0",
            "--config",
            path,
        ])
    };
    let good = check(&example("tidegate.toml"));
    assert_eq!(good.code, 0, "{}", good.stderr);
    let wrong = check(&example("tidegate.toml").replace("\"{user}\"", "\"{usr}\""));
    assert_eq!((wrong.code, wrong.stdout.as_str()), (2, ""));
    let sentence = "`envoy.rules`: rule 2: `entity` is `{usr}`: `match` has no entry `usr`";
    assert!(wrong.stderr.contains(sentence), "{}", wrong.stderr);
}
