//! A fake S3 server with what an archive needs: conditional puts, reads and paged listings. Requests can
//! fail, lose their response, or hang.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// Keys per page of a listing.
const PAGE: usize = 3;
/// Times for [`FakeS3::write_times`]: an expired lock, and a valid one.
pub(crate) const PAST: &str = "Fri, 15 Jan 2021 08:00:00 GMT";
pub(crate) const FUTURE: &str = "Thu, 15 Jan 2099 08:00:00 GMT";

/// What happens to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    None,
    /// It is rejected with an internal error.
    Refused,
    /// It is applied, and the connection is closed before the response.
    Lost,
    /// It is not applied, and hangs.
    Stuck,
    /// It is applied, and hangs.
    StuckAfter,
}

type Plan = Box<dyn FnMut(&str) -> Fault + Send>;

/// A server with one bucket, `archive`, which stops with the runtime.
#[derive(Clone)]
pub(crate) struct FakeS3 {
    pub(crate) address: SocketAddr,
    state: Arc<Mutex<State>>,
}

struct State {
    objects: BTreeMap<String, (Vec<u8>, u64)>,
    writes: u64,
    plan: Plan,
    requests: Vec<String>,
    stuck: UnboundedSender<()>,
    time: &'static str,
}

struct Request {
    method: String,
    path: String,
    query: String,
    head: String,
    body: Vec<u8>,
}

impl FakeS3 {
    /// Starts a server, and a channel with a message for every hanging request.
    pub(crate) async fn start() -> (Self, UnboundedReceiver<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let address = listener.local_addr().expect("it is bound");
        let (stuck, is_stuck) = unbounded_channel();
        let plan: Plan = Box::new(|_| Fault::None);
        let state =
            State { objects: BTreeMap::new(), writes: 0, plan, requests: Vec::new(), stuck, time: PAST };
        let s3 = Self { address, state: Arc::new(Mutex::new(state)) };
        let serving = s3.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let s3 = serving.clone();
                tokio::spawn(async move { s3.serve(client).await });
            }
        });
        (s3, is_stuck)
    }

    pub(crate) fn url(&self, prefix: &str) -> String {
        format!("s3://archive/{prefix}?region=eu-central-1&endpoint=http://{}", self.address)
    }

    pub(crate) fn plan(&self, plan: impl FnMut(&str) -> Fault + Send + 'static) {
        self.state().plan = Box::new(plan);
    }

    /// The requests so far: method and key.
    pub(crate) fn requests(&self) -> Vec<String> {
        self.state().requests.clone()
    }

    pub(crate) fn keys(&self) -> Vec<String> {
        self.state().objects.keys().cloned().collect()
    }

    pub(crate) fn write(&self, key: &str, bytes: &[u8]) {
        let mut state = self.state();
        state.writes += 1;
        let number = state.writes;
        state.objects.insert(key.to_owned(), (bytes.to_vec(), number));
    }

    /// Reports this modification time for every object, from now on.
    pub(crate) fn write_times(&self, time: &'static str) {
        self.state().time = time;
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no test panics while holding it")
    }

    async fn serve(self, mut client: TcpStream) {
        let _ = client.set_nodelay(true);
        while let Some(request) = read(&mut client).await {
            let fault = {
                let mut state = self.state();
                let request_line = format!("{} {}", request.method, request.path);
                state.requests.push(request_line.clone());
                (state.plan)(&request_line)
            };
            let answer = match fault {
                Fault::Refused => error(500, "InternalError"),
                Fault::Stuck => Vec::new(),
                _ => self.answer(&request),
            };
            match fault {
                Fault::Lost => return,
                Fault::Stuck | Fault::StuckAfter => {
                    let _ = self.state().stuck.send(());
                    std::future::pending::<()>().await;
                }
                Fault::None | Fault::Refused => {
                    if client.write_all(&answer).await.is_err() {
                        return;
                    }
                }
            }
        }
    }

    fn answer(&self, request: &Request) -> Vec<u8> {
        let mut state = self.state();
        let Some(key) =
            request.path.strip_prefix("/archive").map(|key| key.trim_start_matches('/').to_owned())
        else {
            return error(404, "NoSuchBucket");
        };
        match request.method.as_str() {
            "GET" if key.is_empty() => list(&state.objects, &request.query),
            "GET" | "HEAD" => match state.objects.get(&key) {
                None => error(404, "NoSuchKey"),
                Some((bytes, number)) => {
                    let is_head = request.method == "HEAD";
                    ok(*number, state.time, if is_head { &[] } else { bytes }, bytes.len())
                }
            },
            "PUT" => {
                let current = state.objects.get(&key).map(|(_, number)| format!("\"{number}\""));
                let is_precondition_failed =
                    match (header(&request.head, "if-none-match"), header(&request.head, "if-match")) {
                        (Some(_), _) => current.is_some(),
                        (_, Some(etag)) => current.as_deref() != Some(etag),
                        _ => false,
                    };
                if is_precondition_failed {
                    return error(412, "PreconditionFailed");
                }
                state.writes += 1;
                let number = state.writes;
                state.objects.insert(key, (request.body.clone(), number));
                ok(number, state.time, &[], 0)
            }
            _ => error(405, "MethodNotAllowed"),
        }
    }
}

fn list(objects: &BTreeMap<String, (Vec<u8>, u64)>, query: &str) -> Vec<u8> {
    let option = |name: &str| query.split('&').find_map(|part| part.strip_prefix(name)?.strip_prefix('='));
    let prefix = option("prefix").unwrap_or_default().replace("%2F", "/");
    let after = option("continuation-token").unwrap_or_default().replace("%2F", "/");
    let found: Vec<&String> =
        objects.keys().filter(|key| key.starts_with(&prefix) && **key > after).collect();
    let is_cut = found.len() > PAGE;
    let mut text = format!("<ListBucketResult><IsTruncated>{is_cut}</IsTruncated>");
    for key in found.iter().take(PAGE) {
        let size = objects[*key].0.len();
        let _ = write!(
            text,
            "<Contents><Key>{key}</Key><Size>{size}</Size>\
             <LastModified>2021-01-15T08:00:00.000Z</LastModified></Contents>"
        );
    }
    if is_cut {
        let _ = write!(text, "<NextContinuationToken>{}</NextContinuationToken>", found[PAGE - 1]);
    }
    text.push_str("</ListBucketResult>");
    ok(0, PAST, text.as_bytes(), text.len())
}

fn ok(number: u64, time: &str, body: &[u8], length: usize) -> Vec<u8> {
    let head = format!(
        "HTTP/1.1 200 x\r\nETag: \"{number}\"\r\nLast-Modified: {time}\r\nContent-Length: {length}\r\n\r\n"
    );
    [head.as_bytes(), body].concat()
}

fn error(status: u16, code: &str) -> Vec<u8> {
    let body = format!("<Error><Code>{code}</Code><Message>as planned</Message></Error>");
    format!("HTTP/1.1 {status} x\r\nContent-Length: {}\r\n\r\n{body}", body.len()).into_bytes()
}

async fn read(from: &mut TcpStream) -> Option<Request> {
    let (mut read, mut buffer) = (Vec::new(), vec![0; 1 << 16]);
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
    let mut words = head.split(' ');
    let (method, target) = (words.next()?.to_owned(), words.next()?.to_owned());
    let (path, query) = target.split_once('?').unwrap_or((&target, ""));
    Some(Request { method, path: path.to_owned(), query: query.to_owned(), head, body })
}

fn header<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    let mut lines = head.lines().filter_map(|line| line.split_once(':'));
    lines.find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value.trim())
}
