//! Runs `tidegate serve` on a free port.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::process::Signal;

use super::{Run, finish, send, wait_until};

/// A running server.
pub(crate) struct TestServer {
    child: Option<Child>,
    /// The lines it wrote until it was ready.
    pub(crate) startup: Vec<String>,
    pub(crate) address: String,
    scheme: String,
}

impl TestServer {
    pub(crate) fn start(command: &mut Command) -> Self {
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let mut server =
            Self { child: child.ok(), startup: Vec::new(), address: String::new(), scheme: String::new() };
        let stdout = server.child.as_mut().and_then(|child| child.stdout.as_mut()).expect("it starts");
        for line in BufReader::new(stdout).lines() {
            let line = line.expect("a line");
            server.startup.push(line.clone());
            if let Some((scheme, address)) =
                line.strip_prefix("ready  ").and_then(|url| url.split_once("://"))
            {
                scheme.clone_into(&mut server.scheme);
                address.clone_into(&mut server.address);
                return server;
            }
        }
        panic!("it ended before it was ready: {:?}", server.end());
    }

    /// The URL that clients use.
    pub(crate) fn url(&self) -> String {
        format!("{}://{}", self.scheme, self.address)
    }

    /// The word after this one in its startup lines.
    pub(crate) fn announced(&self, word: &str) -> Option<&str> {
        let line = self.startup.iter().find_map(|line| line.strip_prefix(word))?;
        line.trim_start().split(' ').next()
    }

    /// The token that it printed, if any.
    pub(crate) fn token(&self) -> Option<&str> {
        self.announced("token ")
    }

    /// Sends a request. Returns the status and the body of the response.
    pub(crate) fn ask(&self, request: &str, token: Option<&str>, body: &str) -> (u16, String) {
        answer(begin(&self.address, request, token, body))
    }

    /// Sends a request; [`answer`] waits for its response.
    pub(crate) fn begin(&self, request: &str, token: Option<&str>, body: &str) -> TcpStream {
        begin(&self.address, request, token, body)
    }

    /// The value of a metric.
    pub(crate) fn metric(&self, name: &str) -> u64 {
        let url = self.announced("watch ").and_then(|url| url.strip_prefix("http://"));
        let address = url.and_then(|url| url.strip_suffix("/metrics")).expect("it has one");
        let (status, text) = answer(begin(address, "GET /metrics", None, ""));
        assert_eq!(status, 200, "{text}");
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
        line.expect("it is counted")
    }

    /// Waits until a metric has this value.
    pub(crate) fn wait_for_metric(&self, name: &str, value: u64) {
        wait_until(&format!("{name}{value}"), || self.metric(name) == value);
    }

    /// Waits until `count` requests wait for a limit.
    pub(crate) fn wait_for_waiting(&self, count: u64) {
        self.wait_for_metric("tidegate_waiting ", count);
    }

    /// Waits until it refuses connections.
    pub(crate) fn wait_until_it_stops(&self) {
        wait_until("no connection", || TcpStream::connect(&self.address).is_err());
    }

    pub(crate) fn child(&mut self) -> &mut Child {
        self.child.as_mut().expect("it runs")
    }

    pub(crate) fn send(&self, signal: Signal) {
        send(self.child.as_ref().expect("it runs"), signal);
    }

    pub(crate) fn end(mut self) -> Run {
        finish(self.child.take().expect("it runs"))
    }

    /// Stops it, which must succeed. Uses SIGTERM, since a shell may start tests with SIGINT ignored.
    pub(crate) fn stop(self) -> Run {
        self.send(Signal::TERM);
        let run = self.end();
        assert_eq!(run.code, 0, "{}", run.stderr);
        run
    }
}

impl Drop for TestServer {
    /// Kills the server if the test failed.
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill().and_then(|()| child.wait());
        }
    }
}

/// A loopback address that no other test uses, so that its ports stay free while a server restarts.
pub(crate) fn own_address() -> Ipv4Addr {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let [.., high, low] = std::process::id().to_be_bytes();
    let [.., last] = NEXT.fetch_add(1, Ordering::Relaxed).to_be_bytes();
    // Linux has all of 127/8. Other systems have one address, where another program may take the port.
    let own = Ipv4Addr::new(127, high | 1, low, last);
    if TcpListener::bind((own, 0)).is_ok() { own } else { Ipv4Addr::LOCALHOST }
}

/// A free port of such an address.
pub(crate) fn free_port() -> SocketAddr {
    let listener = TcpListener::bind((own_address(), 0));
    listener.and_then(|listener| listener.local_addr()).expect("a port")
}

/// Sends a request.
fn begin(address: &str, request: &str, token: Option<&str>, body: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).expect("it listens");
    let token = token.map(|token| format!("authorization: Bearer {token}\r\n")).unwrap_or_default();
    let head = "host: localhost\r\nconnection: close\r\ncontent-type: application/json";
    write!(stream, "{request} HTTP/1.1\r\n{head}\r\n{token}content-length: {}\r\n\r\n{body}", body.len())
        .expect("it reads");
    stream
}

/// Waits for a response. Returns its status and its body.
pub(crate) fn answer(mut stream: TcpStream) -> (u16, String) {
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("it answers");
    let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
    (status, answer.split_once("\r\n\r\n").map(|(_, body)| body.to_owned()).unwrap_or_default())
}
