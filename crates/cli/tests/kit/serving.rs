//! A server as people start it, on a port of its own.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use super::{Run, told};

/// A server that answers.
pub(crate) struct Serving {
    child: Option<Child>,
    /// What it said until it was ready.
    pub(crate) said: Vec<String>,
    pub(crate) address: String,
    scheme: String,
}

impl Serving {
    pub(crate) fn start(command: &mut Command) -> Self {
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let mut server =
            Self { child: child.ok(), said: Vec::new(), address: String::new(), scheme: String::new() };
        let stdout = server.child.as_mut().and_then(|child| child.stdout.as_mut()).expect("it starts");
        for line in BufReader::new(stdout).lines() {
            let line = line.expect("a line");
            server.said.push(line.clone());
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

    /// Its address, as it is asked for.
    pub(crate) fn url(&self) -> String {
        format!("{}://{}", self.scheme, self.address)
    }

    /// What stands behind a word of what it said.
    pub(crate) fn said_of(&self, word: &str) -> Option<&str> {
        let line = self.said.iter().find_map(|line| line.strip_prefix(word))?;
        line.trim_start().split(' ').next()
    }

    /// The token that it has shown, if it has.
    pub(crate) fn token(&self) -> Option<&str> {
        self.said_of("token ")
    }

    /// The status of an answer, and its body.
    pub(crate) fn ask(&self, request: &str, token: Option<&str>, body: &str) -> (u16, String) {
        answer(begin(&self.address, request, token, body))
    }

    /// A request that is on its way; [`answer`] waits for what becomes of it.
    pub(crate) fn begin(&self, request: &str, token: Option<&str>, body: &str) -> TcpStream {
        begin(&self.address, request, token, body)
    }

    /// The number of this name at the listener of the metrics.
    pub(crate) fn metric(&self, name: &str) -> u64 {
        let watched = self.said_of("watch ").and_then(|url| url.strip_prefix("http://"));
        let address = watched.and_then(|url| url.strip_suffix("/metrics")).expect("it has one");
        let (status, text) = answer(begin(address, "GET /metrics", None, ""));
        assert_eq!(status, 200, "{text}");
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
        line.expect("it is counted")
    }

    /// Waits until as many wait for a limit.
    pub(crate) fn wait_for_waiting(&self, count: u64) {
        while self.metric("tidegate_waiting ") != count {
            std::thread::yield_now();
        }
    }

    /// Waits until nobody new enters any more.
    pub(crate) fn wait_until_it_stops(&self) {
        while TcpStream::connect(&self.address).is_ok() {
            std::thread::yield_now();
        }
    }

    pub(crate) fn child(&mut self) -> &mut Child {
        self.child.as_mut().expect("it runs")
    }

    pub(crate) fn send(&self, signal: Signal) {
        send(self.child.as_ref().expect("it runs"), signal);
    }

    pub(crate) fn end(mut self) -> Run {
        let child = self.child.take().expect("it runs");
        told(child.wait_with_output().expect("it ends"))
    }

    /// Asks it to stop, which it must do well.
    pub(crate) fn stop(self) -> Run {
        self.send(Signal::TERM);
        let run = self.end();
        assert_eq!(run.code, 0, "{}", run.stderr);
        run
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

pub(crate) fn send(child: &Child, signal: Signal) {
    let id = i32::try_from(child.id()).ok().and_then(Pid::from_raw).expect("it has an id");
    kill_process(id, signal).expect("it is there");
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

/// The status of an answer, and its body.
pub(crate) fn answer(mut stream: TcpStream) -> (u16, String) {
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("it answers");
    let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
    (status, answer.split_once("\r\n\r\n").map(|(_, body)| body.to_owned()).unwrap_or_default())
}
