//! A scripted upstream: it responds, forwards, truncates responses, closes or stays silent.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::Value;
use tidegate_client::{Acquire, Backoff, Client, ClientBuilder, Cost, Retry, RetryBudget};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// The reply to one request.
#[derive(Debug, Clone)]
pub(crate) enum Reply {
    /// A response with this status, headers and body.
    Respond(u16, &'static str, String),
    /// These bytes, then close.
    Bytes(Vec<u8>),
    /// Close without a response.
    Close,
    /// No response, with the connection left open.
    Silence,
    /// The response of the backend.
    Pass,
    /// The first half of the backend's response.
    Cut,
}

/// A received request.
#[derive(Debug, Clone)]
pub(crate) struct ReceivedRequest {
    pub(crate) line: String,
    pub(crate) head: String,
    pub(crate) body: Value,
}

#[derive(Clone)]
pub(crate) struct Upstream {
    pub(crate) addr: SocketAddr,
    script: Arc<Mutex<VecDeque<Reply>>>,
    requests: Arc<Mutex<Vec<ReceivedRequest>>>,
    backend: Option<SocketAddr>,
}

impl Upstream {
    /// Starts an upstream that replies by this script, and then forwards to the backend, if any.
    pub(crate) async fn new(backend: Option<SocketAddr>, script: impl IntoIterator<Item = Reply>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("it listens");
        let upstream = Self {
            addr: listener.local_addr().expect("an address"),
            script: Arc::new(Mutex::new(script.into_iter().collect())),
            requests: Arc::default(),
            backend,
        };
        let serving = upstream.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serving.clone().serve(stream));
            }
        });
        upstream
    }

    /// Appends replies to the script.
    pub(crate) fn then(&self, script: impl IntoIterator<Item = Reply>) {
        self.script.lock().expect("whole").extend(script);
    }

    pub(crate) fn requests(&self) -> Vec<ReceivedRequest> {
        self.requests.lock().expect("whole").clone()
    }

    pub(crate) fn count(&self) -> usize {
        self.requests.lock().expect("whole").len()
    }

    /// The received lease steps, by verb.
    pub(crate) fn steps(&self) -> Vec<(String, u64)> {
        let verb = |line: &str| line.split([' ', '/']).nth(5).map(str::to_owned);
        let step =
            |requests: &ReceivedRequest| Some((verb(&requests.line)?, requests.body["step"].as_u64()?));
        self.requests().iter().filter_map(step).collect()
    }

    /// A client builder with three attempts and short delays.
    pub(crate) fn builder(&self) -> ClientBuilder {
        let quick = Retry::attempts(3)
            .backoff(Backoff::fixed(Duration::from_millis(1)))
            .budget(RetryBudget::unlimited());
        Client::builder(&format!("http://{}", self.addr)).token("tg_ci_0123456789").retry(quick)
    }

    async fn serve(self, mut stream: TcpStream) {
        let Some(request) = read(&mut stream).await else { return };
        let (head, body) = request.split_once("\r\n\r\n").expect("a whole request");
        let line = head.lines().next().unwrap_or_default().to_owned();
        let body = serde_json::from_str(body).unwrap_or_default();
        self.requests.lock().expect("whole").push(ReceivedRequest { line, head: head.to_owned(), body });
        let reply = self.script.lock().expect("whole").pop_front();
        let bytes = match reply.unwrap_or(Reply::Pass) {
            Reply::Respond(status, headers, body) => response(status, headers, &body).into_bytes(),
            Reply::Bytes(bytes) => bytes,
            Reply::Close => return,
            Reply::Silence => return std::future::pending().await,
            Reply::Pass => self.forward(&request).await,
            Reply::Cut => {
                let mut whole = self.forward(&request).await;
                whole.truncate(whole.len() / 2);
                whole
            }
        };
        let _ = stream.write_all(&bytes).await;
        let _ = stream.shutdown().await;
    }

    async fn forward(&self, request: &str) -> Vec<u8> {
        let Some(backend) = self.backend else { return response(500, "", "").into_bytes() };
        let mut stream = TcpStream::connect(backend).await.expect("connects");
        let request = request.replacen("\r\n", "\r\nconnection: close\r\n", 1);
        stream.write_all(request.as_bytes()).await.expect("it listens");
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.expect("it answers");
        answer
    }
}

/// Reads a whole request: head and body.
async fn read(stream: &mut TcpStream) -> Option<String> {
    let mut text = Vec::new();
    loop {
        let mut part = [0; 4_096];
        let count = stream.read(&mut part).await.ok().filter(|count| *count > 0)?;
        text.extend_from_slice(&part[..count]);
        let so_far = String::from_utf8_lossy(&text).into_owned();
        let Some((head, body)) = so_far.split_once("\r\n\r\n") else { continue };
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
        if body.len() >= length.map_or(0, |length| length.parse().expect("a number")) {
            return Some(so_far);
        }
    }
}

fn response(status: u16, headers: &str, body: &str) -> String {
    let length = body.len();
    format!("HTTP/1.1 {status} so\r\n{headers}content-length: {length}\r\nconnection: close\r\n\r\n{body}")
}

/// A problem response.
pub(crate) fn problem(status: u16, kind: &str, headers: &'static str) -> Reply {
    let problem = tidegate_client::Problem::new(status, kind, "t", format!("it is {kind}"));
    Reply::Respond(status, headers, serde_json::to_string(&problem).expect("a body"))
}

/// A granted lease that expires in a minute.
pub(crate) fn granted() -> Reply {
    Reply::Respond(200, "", format!("{{\"lease\":\"{}\",\"expires_in\":60}}", "7".repeat(64)))
}

/// A completed step.
pub(crate) fn done() -> Reply {
    let body = "{\"at\":\"2026-01-31T09:30:00Z\",\"is_repeat\":false,\"limits\":[]}";
    Reply::Respond(200, "", body.to_owned())
}

pub(crate) fn cost(amounts: &[(&str, u64)]) -> Cost {
    Cost::of(amounts.iter().copied()).expect("names")
}

pub(crate) fn request(amounts: &[(&str, u64)]) -> Acquire {
    Acquire::new("acme".parse().expect("a name"), "gpt-4".parse().expect("a name"), cost(amounts))
}
