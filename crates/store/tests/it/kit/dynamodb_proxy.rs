//! A proxy to the engine that can throttle requests, lose responses, and delay both.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::kit::engine;

/// What happens to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// It succeeds.
    None,
    /// It is rejected with this error code.
    Refused(&'static str),
    /// It is applied, and the response is an internal error.
    Broken,
    /// It is applied, and the connection is closed before the response.
    Lost,
    /// It is applied, and the response is delayed by so many milliseconds.
    Late(u64),
    /// It is applied without the items whose keys have this prefix, as if it had read them before they were
    /// written.
    Without(&'static str),
}

type Plan = Box<dyn FnMut(&str) -> Fault + Send>;

/// A proxy to the engine, which stops with the runtime.
#[derive(Clone)]
pub(crate) struct Proxy {
    address: SocketAddr,
    state: Arc<Mutex<State>>,
}

struct State {
    target: String,
    plan: Plan,
    /// Operations received, in order.
    requests: Vec<String>,
    /// The actions that IAM checks for all requests so far: for a transaction those of its parts.
    actions: BTreeSet<String>,
}

impl Proxy {
    /// A proxy to the engine whose address is in this variable.
    pub(crate) async fn new(variable: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let address = listener.local_addr().expect("it is bound");
        let target = engine::address(variable).trim_start_matches("http://").to_owned();
        let state =
            State { target, plan: Box::new(|_| Fault::None), requests: Vec::new(), actions: BTreeSet::new() };
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

    /// Chooses the fault of each request by its operation, from now on.
    pub(crate) fn plan(&self, plan: impl FnMut(&str) -> Fault + Send + 'static) {
        self.state.lock().expect("no test panics while holding it").plan = Box::new(plan);
    }

    /// The actions that a policy has to allow for all requests received.
    pub(crate) fn actions(&self) -> BTreeSet<String> {
        self.state.lock().expect("no test panics while holding it").actions.clone()
    }

    /// Takes the operations received since the last call.
    pub(crate) fn take_requests(&self) -> Vec<String> {
        std::mem::take(&mut self.state.lock().expect("no test panics while holding it").requests)
    }
}

/// What IAM checks for a request.
fn actions_of(operation: &str, body: &[u8]) -> Vec<String> {
    let parts = match operation {
        "TransactWriteItems" => ["ConditionCheck", "Delete", "Put", "Update"].as_slice(),
        "TransactGetItems" => &["Get"],
        _ => return vec![operation.to_owned()],
    };
    let body = String::from_utf8_lossy(body);
    let has = |part: &&&str| body.contains(&format!("\"{part}\":{{"));
    parts.iter().filter(has).map(|part| format!("{part}Item")).collect()
}

async fn serve(state: Arc<Mutex<State>>, mut client: TcpStream) {
    // Without TCP_NODELAY a message in pieces would wait for an acknowledgement.
    drop(client.set_nodelay(true));
    let mut server: Option<TcpStream> = None;
    while let Some((head, mut body)) = read_message(&mut client).await {
        let operation =
            header(&head, "x-amz-target").and_then(|target| target.split('.').nth(1)).unwrap_or("");
        let (fault, target) = {
            let mut state = state.lock().expect("no test panics while holding it");
            state.requests.push(operation.to_owned());
            state.actions.extend(actions_of(operation, &body));
            ((state.plan)(operation), state.target.clone())
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
            // The same length, but no such item exists.
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

/// A request or a response: its head, and the body of the announced length.
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
