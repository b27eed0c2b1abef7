//! Far sides on real sockets that answer by a script, and `tidegate fetch` as people run it.
#![allow(dead_code, reason = "each test file uses its own part")]

pub(crate) mod codec;

use std::fmt::{self, Write as _};
use std::io::{BufRead as _, BufReader, Read, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// One request as a far side saw it.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    pub(crate) at: Instant,
    /// Which far side it was.
    pub(crate) port: u16,
    /// How many that one had seen before.
    pub(crate) number: usize,
    pub(crate) path: String,
    pub(crate) agent: String,
}

/// What a far side says.
#[derive(Debug, Clone)]
pub(crate) struct Reply {
    status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
    end: End,
    told: Moment,
}

/// When something was, if it was.
pub(crate) type Moment = Arc<Mutex<Option<Instant>>>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Whole,
    /// In the middle of its body.
    Cut,
    /// Before it has begun.
    Silent,
    /// In chunks, without saying how many bytes there are.
    Chunked,
    /// Its body never comes, and the connection stays.
    Stalled,
}

impl Reply {
    pub(crate) fn status(status: u16) -> Self {
        Self {
            status,
            headers: Vec::new(),
            body: b"hello".to_vec(),
            end: End::Whole,
            told: Moment::default(),
        }
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

    pub(crate) fn cut(self) -> Self {
        Self { end: End::Cut, ..self }
    }

    pub(crate) fn chunked(self) -> Self {
        Self { end: End::Chunked, ..self }
    }

    pub(crate) fn stalled(self) -> Self {
        Self { end: End::Stalled, ..self }
    }

    /// Notes when its head has been sent.
    pub(crate) fn noting(self, told: &Moment) -> Self {
        Self { told: Arc::clone(told), ..self }
    }

    pub(crate) fn hangs_up() -> Self {
        Self { end: End::Silent, ..Self::status(200) }
    }
}

/// What all far sides of a test have seen, in the order in which they did.
pub(crate) type Log = Arc<Mutex<Vec<Seen>>>;

/// A far side.
#[derive(Debug, Clone)]
pub(crate) struct Far {
    address: SocketAddr,
    log: Log,
}

impl Far {
    /// One that answers as `script` says, and 404 for robots.txt unless the script is `with_robots`.
    pub(crate) fn start(log: &Log, script: impl Fn(&Seen) -> Reply + Send + Sync + 'static) -> Self {
        Self::with_robots(log, move |seen| match seen.path.as_str() {
            "/robots.txt" => Reply::status(404),
            _ => script(seen),
        })
    }

    pub(crate) fn with_robots(log: &Log, script: impl Fn(&Seen) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let far = Self { address: listener.local_addr().expect("an address"), log: Arc::clone(log) };
        let (log, script, port) = (Arc::clone(log), Arc::new(script), far.address.port());
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (log, script) = (Arc::clone(&log), Arc::clone(&script));
                thread::spawn(move || serve(&stream, port, &log, &*script));
            }
        });
        far
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

    /// What it has seen, without robots.txt.
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

/// Requests of one connection, one after the other.
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
            let seen = Seen { at: Instant::now(), port, number, path, agent };
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
    let mut head = format!("HTTP/1.1 {} Said\r\n", reply.status);
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
    *hold(&reply.told) = Some(Instant::now());
    if reply.end == End::Stalled {
        // Until the other side has had enough.
        stream.read_exact(&mut [0]).ok()?;
        return None;
    }
    if reply.end == End::Cut {
        stream.write_all(&reply.body[..reply.body.len() / 2]).ok()?;
        return None;
    }
    stream.write_all(&reply.body).ok()
}

/// A folder for what is fetched.
pub(crate) struct Bay {
    folder: TempDir,
}

/// What a run came to.
#[derive(Debug)]
pub(crate) struct Run {
    /// 128 and the signal's number for what a signal ended.
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Bay {
    pub(crate) fn new() -> Self {
        Self { folder: TempDir::new().expect("a folder for a test") }
    }

    pub(crate) fn out(&self) -> PathBuf {
        self.folder.path().join("out")
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The program, with an environment that no machine changes; without limits of its own where it is `fast`.
    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
        command.env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default());
        command.arg("fetch").arg("--out").arg(self.out()).args(arguments);
        command.stdin(Stdio::null());
        command
    }

    /// Fetches these.
    pub(crate) fn fetch(&self, arguments: &[&str], urls: &[String]) -> Run {
        let mut command = self.command(arguments);
        told(command.args(urls).output().expect("the program starts"))
    }

    /// The same with nothing that holds it back but its hosts.
    pub(crate) fn fast(&self, arguments: &[&str], urls: &[String]) -> Run {
        self.fetch(&[FAST, arguments].concat(), urls)
    }

    /// The same, and it is under way.
    pub(crate) fn begin(&self, arguments: &[&str], urls: &[String]) -> Child {
        let mut command = self.command(&[FAST, arguments].concat());
        command.args(urls).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts")
    }

    /// A file that was fetched, if it has its name.
    pub(crate) fn file(&self, far: &Far, name: &str) -> Option<Vec<u8>> {
        std::fs::read(self.out().join(far.folder()).join(name)).ok()
    }

    /// All files that have their names, from the folder on.
    pub(crate) fn files(&self) -> Vec<String> {
        let mut files = Vec::new();
        walk(&self.out(), &self.out(), &mut files);
        files.sort();
        files
    }

    /// What is under way, or was when it was interrupted.
    pub(crate) fn parts(&self) -> usize {
        std::fs::read_dir(self.out().join(".tidegate/parts")).map_or(0, Iterator::count)
    }
}

/// Hosts are asked as fast as they answer.
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

pub(crate) fn told(output: Output) -> Run {
    use std::os::unix::process::ExitStatusExt as _;
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    let code = output.status.code().or_else(|| output.status.signal().map(|signal| 128 + signal));
    Run { code: code.expect("it has ended"), stdout: text(output.stdout), stderr: text(output.stderr) }
}

pub(crate) fn send(child: &Child, signal: Signal) {
    let id = Pid::from_raw(i32::try_from(child.id()).expect("a process")).expect("a process");
    kill_process(id, signal).expect("it runs");
}

/// Waits until it ends.
pub(crate) fn end(child: Child) -> Run {
    told(child.wait_with_output().expect("it ends"))
}

/// Waits until `is_so`, for as long as a test may take.
pub(crate) fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < Duration::from_mins(1), "never: {what}");
        thread::yield_now();
    }
}

/// So many pages of a far side.
pub(crate) fn pages(far: &Far, count: usize) -> Vec<String> {
    (0..count).map(|number| far.url(&format!("/p/{number}.html"))).collect()
}

/// Reads one line of what a program tells, and nothing behind it.
pub(crate) fn read_line(from: &mut impl Read) -> String {
    let mut line = Vec::new();
    let mut letter = [0];
    while from.read(&mut letter).expect("it tells") == 1 && letter[0] != b'\n' {
        line.push(letter[0]);
    }
    String::from_utf8(line).expect("UTF-8")
}

pub(crate) fn hold<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("nobody panics while holding it")
}
