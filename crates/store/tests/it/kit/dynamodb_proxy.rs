//! A way to the engine on which a test can have requests throttled, answers lost, and both come late.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::kit::engine;

/// What becomes of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// It is answered.
    None,
    /// It is not done, and an error with this code says so.
    Refused(&'static str),
    /// It is done, and an error of the engine's own is answered.
    Broken,
    /// It is done, and the connection is cut before the answer.
    Lost,
    /// It is done, and the answer comes so many milliseconds late.
    Late(u64),
    /// It is done without the items whose keys begin so, as if it had read them before they were written.
    Without(&'static str),
}

type Plan = Box<dyn FnMut(&str) -> Fault + Send>;

/// A way to the engine. It is gone with the runtime.
#[derive(Clone)]
pub(crate) struct Proxy {
    address: SocketAddr,
    state: Arc<Mutex<State>>,
}

struct State {
    target: String,
    plan: Plan,
    /// What was asked, in order.
    asked: Vec<String>,
}

impl Proxy {
    /// A way to the engine whose address is in this variable.
    pub(crate) async fn new(variable: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let address = listener.local_addr().expect("it is bound");
        let target = engine::address(variable).trim_start_matches("http://").to_owned();
        let state = State { target, plan: Box::new(|_| Fault::None), asked: Vec::new() };
        let state = Arc::new(Mutex::new(state));
        let serving = Arc::clone(&state);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(serve(Arc::clone(&serving), client));
            }
        });
        Self { address, state }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// From now on this is what becomes of requests, by what they ask for.
    pub(crate) fn plan(&self, plan: impl FnMut(&str) -> Fault + Send + 'static) {
        self.state.lock().expect("no test panics with it").plan = Box::new(plan);
    }

    /// What was asked since this was asked last.
    pub(crate) fn asked(&self) -> Vec<String> {
        std::mem::take(&mut self.state.lock().expect("no test panics with it").asked)
    }
}

async fn serve(state: Arc<Mutex<State>>, mut client: TcpStream) {
    // What is written in pieces would wait for the other side to say that it has the first.
    drop(client.set_nodelay(true));
    let mut server: Option<TcpStream> = None;
    while let Some((head, mut body)) = read_message(&mut client).await {
        let asked = header(&head, "x-amz-target").and_then(|target| target.split('.').nth(1)).unwrap_or("");
        let (fault, target) = {
            let mut state = state.lock().expect("no test panics with it");
            state.asked.push(asked.to_owned());
            ((state.plan)(asked), state.target.clone())
        };
        if let Fault::Refused(code) = fault {
            let status = if code == "InternalServerError" { 500 } else { 400 };
            if client.write_all(&error(status, code)).await.is_err() {
                return;
            }
            continue;
        }
        if server.is_none() {
            server = TcpStream::connect(&target).await.ok();
            server.as_ref().map(|server| server.set_nodelay(true));
        }
        let Some(to) = &mut server else { return };
        if let Fault::Without(key) = fault {
            // As long as it was, and there is no such item.
            body = String::from_utf8_lossy(&body).replace(key, &"x".repeat(key.len())).into_bytes();
        }
        let is_sent = to.write_all(head.as_bytes()).await.is_ok() && to.write_all(&body).await.is_ok();
        let Some((head, body)) = (if is_sent { read_message(to).await } else { None }) else { return };
        match fault {
            Fault::Lost => return,
            Fault::Broken => {
                if client.write_all(&error(500, "InternalServerError")).await.is_err() {
                    return;
                }
                continue;
            }
            Fault::Late(millis) => tokio::time::sleep(Duration::from_millis(millis)).await,
            Fault::None | Fault::Refused(_) | Fault::Without(_) => {}
        }
        if client.write_all(head.as_bytes()).await.is_err() || client.write_all(&body).await.is_err() {
            return;
        }
    }
}

fn error(status: u32, code: &str) -> Vec<u8> {
    let body =
        format!("{{\"__type\":\"com.amazonaws.dynamodb.v20120810#{code}\",\"message\":\"as planned\"}}");
    let length = body.len();
    format!(
        "HTTP/1.1 {status} x\r\ncontent-type: application/x-amz-json-1.0\r\ncontent-length: {length}\r\n\r\n{body}"
    )
    .into_bytes()
}

/// A request or an answer: its head, and as many bytes as that says.
async fn read_message(from: &mut TcpStream) -> Option<(String, Vec<u8>)> {
    let mut read = Vec::new();
    let mut buffer = vec![0; 1 << 16];
    let end = loop {
        if let Some(place) = read.windows(4).position(|window| window == b"\r\n\r\n") {
            break place + 4;
        }
        match from.read(&mut buffer).await {
            Ok(count @ 1..) => read.extend_from_slice(&buffer[..count]),
            _ => return None,
        }
    };
    let mut body = read.split_off(end);
    let head = String::from_utf8(read).ok()?;
    let length: usize = header(&head, "content-length").and_then(|length| length.parse().ok()).unwrap_or(0);
    while body.len() < length {
        match from.read(&mut buffer).await {
            Ok(count @ 1..) => body.extend_from_slice(&buffer[..count]),
            _ => return None,
        }
    }
    Some((head, body))
}

fn header<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    let mut lines = head.lines().filter_map(|line| line.split_once(':'));
    lines.find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value.trim())
}
