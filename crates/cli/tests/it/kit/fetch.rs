//! Scripted upstreams on real sockets, and a runner of `tidegate fetch`.

use std::fmt::{self, Write as _};
use std::io::{BufRead as _, BufReader, Read, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::Instant;

use tempfile::TempDir;

use super::{Run, clear_environment, run};

/// One request as an upstream saw it.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    pub(crate) at: Instant,
    /// The port of the upstream.
    pub(crate) port: u16,
    /// Earlier requests to the same upstream.
    pub(crate) number: usize,
    pub(crate) path: String,
    pub(crate) agent: String,
    /// The head as received, in lower case.
    pub(crate) head: String,
}

impl Seen {
    /// The first byte of the range that was requested.
    pub(crate) fn range_start(&self) -> usize {
        let range = self.head.lines().find_map(|line| line.strip_prefix("range: bytes="));
        range.map_or(0, |range| range.trim_end_matches('-').parse().expect("a number"))
    }
}

/// A response of an upstream.
#[derive(Debug, Clone)]
pub(crate) struct Reply {
    status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
    end: End,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Whole,
    /// Closes the connection in the middle of the body.
    Cut,
    /// Closes the connection without a response.
    Silent,
    /// Chunked, without a content length.
    Chunked,
    /// Sends half of the body, and keeps the connection open.
    Halved,
    /// Sends no body, and keeps the connection open.
    Stalled,
}

impl Reply {
    pub(crate) fn status(status: u16) -> Self {
        let (headers, body) = (Vec::new(), b"hello".to_vec());
        Self { status, headers, body, end: End::Whole }
    }

    pub(crate) fn page(body: impl Into<Vec<u8>>) -> Self {
        Self { body: body.into(), ..Self::status(200) }
    }

    pub(crate) fn moved(to: &str) -> Self {
        Self::status(302).header("location", to)
    }

    pub(crate) fn header(mut self, name: &str, value: impl fmt::Display) -> Self {
        self.headers.push((name.to_owned(), value.to_string()));
        self
    }

    pub(crate) fn with_status(self, status: u16) -> Self {
        Self { status, ..self }
    }

    pub(crate) fn cut(self) -> Self {
        Self { end: End::Cut, ..self }
    }

    pub(crate) fn chunked(self) -> Self {
        Self { end: End::Chunked, ..self }
    }

    pub(crate) fn stalled(self) -> Self {
        Self { end: End::Stalled, ..self }
    }

    pub(crate) fn halved(self) -> Self {
        Self { end: End::Halved, ..self }
    }

    pub(crate) fn hangs_up() -> Self {
        Self { end: End::Silent, ..Self::status(200) }
    }
}

/// The requests to all upstreams of a test, in order.
pub(crate) type Log = Arc<Mutex<Vec<Seen>>>;

/// An upstream.
#[derive(Debug, Clone)]
pub(crate) struct Upstream {
    address: SocketAddr,
    log: Log,
}

impl Upstream {
    /// Starts an upstream that responds by `script`, and with 404 for robots.txt.
    pub(crate) fn start(log: &Log, script: impl Fn(&Seen) -> Reply + Send + Sync + 'static) -> Self {
        Self::with_robots(log, move |seen| match seen.path.as_str() {
            "/robots.txt" => Reply::status(404),
            _ => script(seen),
        })
    }

    pub(crate) fn with_robots(log: &Log, script: impl Fn(&Seen) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let upstream = Self { address: listener.local_addr().expect("an address"), log: Arc::clone(log) };
        let (log, script, port) = (Arc::clone(log), Arc::new(script), upstream.address.port());
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (log, script) = (Arc::clone(&log), Arc::clone(&script));
                thread::spawn(move || serve(&stream, port, &log, &*script));
            }
        });
        upstream
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    pub(crate) fn port(&self) -> u16 {
        self.address.port()
    }

    pub(crate) fn host(&self) -> String {
        self.address.to_string()
    }

    /// The folder for its files.
    pub(crate) fn folder(&self) -> String {
        format!("{}+http+{}", self.address.ip(), self.port())
    }

    /// Its requests, without those for robots.txt.
    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.all().into_iter().filter(|seen| seen.path != "/robots.txt").collect()
    }

    pub(crate) fn all(&self) -> Vec<Seen> {
        hold(&self.log).iter().filter(|seen| seen.port == self.port()).cloned().collect()
    }

    pub(crate) fn robots(&self) -> usize {
        self.all().len() - self.seen().len()
    }
}

/// Serves the requests of one connection.
fn serve(stream: &TcpStream, port: u16, log: &Log, script: &dyn Fn(&Seen) -> Reply) -> Option<()> {
    stream.set_nodelay(true).ok()?;
    let mut lines = BufReader::new(stream);
    loop {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            if lines.read_until(b'\n', &mut head).ok()? == 0 {
                return None;
            }
        }
        let head = String::from_utf8_lossy(&head).into_owned();
        let path = head.split(' ').nth(1)?.to_owned();
        let agent =
            head.lines().find_map(|line| line.strip_prefix("user-agent: ")).unwrap_or_default().to_owned();
        let seen = {
            let mut log = hold(log);
            let number = log.iter().filter(|seen| seen.port == port).count();
            let head = head.to_ascii_lowercase();
            let seen = Seen { at: Instant::now(), port, number, path, agent, head };
            log.push(seen.clone());
            seen
        };
        answer(stream, &script(&seen))?;
    }
}

fn answer(mut stream: &TcpStream, reply: &Reply) -> Option<()> {
    if reply.end == End::Silent {
        return None;
    }
    let mut head = format!("HTTP/1.1 {} Status\r\n", reply.status);
    for (name, value) in &reply.headers {
        write!(head, "{name}: {value}\r\n").ok()?;
    }
    if reply.end == End::Chunked {
        head.push_str("transfer-encoding: chunked\r\n\r\n");
        stream.write_all(head.as_bytes()).ok()?;
        for chunk in reply.body.chunks(64 << 10) {
            stream.write_all(format!("{:x}\r\n", chunk.len()).as_bytes()).ok()?;
            stream.write_all(chunk).ok()?;
            stream.write_all(b"\r\n").ok()?;
        }
        return stream.write_all(b"0\r\n\r\n").ok();
    }
    write!(head, "content-length: {}\r\n\r\n", reply.body.len()).ok()?;
    stream.write_all(head.as_bytes()).ok()?;
    if reply.end == End::Halved {
        stream.write_all(&reply.body[..reply.body.len() / 2]).ok()?;
    }
    if matches!(reply.end, End::Stalled | End::Halved) {
        // Until the client closes the connection.
        stream.read_exact(&mut [0]).ok()?;
        return None;
    }
    if reply.end == End::Cut {
        stream.write_all(&reply.body[..reply.body.len() / 2]).ok()?;
        return None;
    }
    stream.write_all(&reply.body).ok()
}

/// A temporary folder for fetched files.
pub(crate) struct FetchDir {
    folder: TempDir,
}

impl FetchDir {
    pub(crate) fn new() -> Self {
        Self { folder: TempDir::new().expect("a folder for a test") }
    }

    pub(crate) fn out(&self) -> PathBuf {
        self.folder.path().join("out")
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The program, with an environment that is the same on every machine.
    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
        clear_environment(&mut command);
        command.arg("fetch").arg("--out").arg(self.out()).args(arguments);
        command.stdin(Stdio::null());
        command
    }

    /// Fetches these addresses.
    pub(crate) fn fetch(&self, arguments: &[&str], urls: &[String]) -> Run {
        run(self.command(arguments).args(urls))
    }

    /// Fetches these addresses at the maximum rate.
    pub(crate) fn fast(&self, arguments: &[&str], urls: &[String]) -> Run {
        self.fetch(&[FAST, arguments].concat(), urls)
    }

    /// Starts fetching these addresses, and returns while the fetch runs.
    pub(crate) fn begin(&self, arguments: &[&str], urls: &[String]) -> Child {
        let mut command = self.command(&[FAST, arguments].concat());
        command.args(urls).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts")
    }

    /// The content of a fetched file.
    pub(crate) fn file(&self, upstream: &Upstream, name: &str) -> Option<Vec<u8>> {
        std::fs::read(self.out().join(upstream.folder()).join(name)).ok()
    }

    /// All fetched files, as paths below the folder.
    pub(crate) fn files(&self) -> Vec<String> {
        let mut files = Vec::new();
        walk(&self.out(), &self.out(), &mut files);
        files.sort();
        files
    }

    /// The number of fetched files of one upstream.
    pub(crate) fn files_of(&self, upstream: &Upstream) -> usize {
        let folder = format!("{}/", upstream.folder());
        self.files().iter().filter(|file| file.starts_with(&folder)).count()
    }

    /// The number of incomplete files.
    pub(crate) fn parts(&self) -> usize {
        std::fs::read_dir(self.out().join(".tidegate/parts")).map_or(0, Iterator::count)
    }
}

/// Arguments for the maximum rate.
pub(crate) const FAST: &[&str] = &["--rate", "100000", "--rate-max", "100000"];

fn walk(root: &Path, folder: &Path, files: &mut Vec<String>) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() && !path.ends_with(".tidegate") {
            walk(root, &path, files);
        } else if path.is_file() {
            files.push(path.strip_prefix(root).expect("below it").to_string_lossy().into_owned());
        }
    }
}

/// The addresses of the first `count` pages of an upstream.
pub(crate) fn pages(upstream: &Upstream, count: usize) -> Vec<String> {
    (0..count).map(|number| upstream.url(&format!("/p/{number}.html"))).collect()
}

/// Reads one line of a program's output, unbuffered.
pub(crate) fn read_line(from: &mut impl Read) -> String {
    let mut line = Vec::new();
    let mut letter = [0];
    while from.read(&mut letter).expect("it writes") == 1 && letter[0] != b'\n' {
        line.push(letter[0]);
    }
    String::from_utf8(line).expect("UTF-8")
}

pub(crate) fn hold<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no thread panics while it holds the lock")
}
