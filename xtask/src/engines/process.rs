//! Server processes that outlive the command which started them, and are identified by more than their id.

use std::fs::{self, File};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};

/// A server that is not up or down by then hangs.
const TIMEOUT: Duration = Duration::from_mins(5);
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A server's process.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Process {
    pub(super) pid: i32,
    pub(super) port: u16,
    /// When it started, in the kernel's ticks: process ids are reused.
    pub(super) started: u64,
}

impl Process {
    /// Starts a server and waits until it listens on `port`. Its output goes to the file `log`.
    pub(super) fn start(command: &mut Command, port: u16, log: &Path) -> Result<Self> {
        let file = File::create(log).with_context(|| format!("could not create {}", log.display()))?;
        // A process group of its own, so that Ctrl-C does not reach it.
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file).process_group(0);
        let mut child = command
            .spawn()
            .with_context(|| format!("could not start {}", command.get_program().display()))?;
        let up = wait(|| match child.try_wait()? {
            Some(status) => bail!("it ended with {status}"),
            None => Ok(listens(port)),
        });
        let up = up.and_then(|is_up| {
            ensure!(is_up, "it does not listen on port {port} after {TIMEOUT:?}");
            Ok(())
        });
        if let Err(error) = up {
            // It may have exited already.
            let _ = child.kill();
            child.wait()?;
            bail!("{error} and printed:\n{}", fs::read_to_string(log).unwrap_or_default());
        }
        let pid = i32::try_from(child.id())?;
        let started = started(pid).with_context(|| format!("the process {pid} has exited"))?;
        Ok(Self { pid, port, started })
    }

    pub(super) fn is_alive(&self) -> bool {
        started(self.pid) == Some(self.started)
    }

    /// Asks it to exit, and then kills it.
    pub(super) fn stop(&self) -> Result<()> {
        // A background shell starts its children with SIGINT ignored, so SIGINT alone would not stop every
        // server. After SIGTERM PostgreSQL waits for its clients; after SIGINT it shuts down at once.
        self.signal(Signal::TERM)?;
        self.signal(Signal::INT)?;
        if !wait(|| Ok(!self.is_alive()))? {
            self.signal(Signal::KILL)?;
            ensure!(wait(|| Ok(!self.is_alive()))?, "the process {} does not exit", self.pid);
        }
        Ok(())
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        let Some(pid) = Pid::from_raw(self.pid).filter(|_| self.is_alive()) else { return Ok(()) };
        match kill_process(pid, signal) {
            Ok(()) | Err(Errno::SRCH) => Ok(()),
            Err(error) => Err(error).with_context(|| format!("could not signal the process {}", self.pid)),
        }
    }
}

/// Starts several servers that only work as a group: if `start` fails, those already started are stopped.
pub(super) fn start_all(start: impl FnOnce(&mut Vec<Process>) -> Result<()>) -> Result<Vec<Process>> {
    let mut processes = Vec::new();
    if let Err(error) = start(&mut processes) {
        processes.iter().try_for_each(Process::stop)?;
        return Err(error);
    }
    Ok(processes)
}

/// Distinct free ports.
pub(super) fn free_ports<const N: usize>() -> Result<[u16; N]> {
    let mut held = Vec::new();
    let mut ports = [0; N];
    for port in &mut ports {
        // Each listener stays open until all ports are found: the system could assign the same port again.
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("no port is free")?;
        *port = listener.local_addr()?.port();
        held.push(listener);
    }
    Ok(ports)
}

/// Polls `is_so` until it returns true or the timeout expires.
pub(super) fn wait(mut is_so: impl FnMut() -> Result<bool>) -> Result<bool> {
    let since = Instant::now();
    while !is_so()? {
        if since.elapsed() > TIMEOUT {
            return Ok(false);
        }
        thread::sleep(POLL_INTERVAL);
    }
    Ok(true)
}

fn listens(port: u16) -> bool {
    TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_ok()
}

/// When a process started; `None` if it does not exist or is a zombie.
fn started(pid: i32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in brackets may contain anything, so count from its end: the state is next, the start time is
    // field 22.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    if state == "Z" {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn server_is_started_identified_and_stopped() {
        let [port] = free_ports().unwrap();
        let log = std::env::temp_dir().join(format!("tidegate-process-{port}.log"));
        let script = format!(
            "import http.server as h; h.test(h.SimpleHTTPRequestHandler, port={port}, bind='127.0.0.1')"
        );
        let server = Process::start(Command::new("python3").args(["-c", &script]), port, &log).unwrap();
        assert!(server.is_alive());
        server.stop().unwrap();
        assert!(!server.is_alive());
        server.stop().unwrap();
        fs::remove_file(log).unwrap();
    }

    #[test]
    fn server_that_exits_at_once_is_an_error_with_output() {
        let [port] = free_ports().unwrap();
        let log = std::env::temp_dir().join(format!("tidegate-process-{port}.log"));
        let mut command = Command::new("sh");
        let error = Process::start(command.args(["-c", "echo no luck; exit 3"]), port, &log).unwrap_err();
        assert_eq!(error.to_string(), "it ended with exit status: 3 and printed:\nno luck\n");
        fs::remove_file(log).unwrap();
    }

    #[test]
    fn free_ports_are_all_different() {
        let mut ports = free_ports::<6>().unwrap().to_vec();
        ports.sort_unstable();
        ports.dedup();
        assert_eq!(ports.len(), 6);
    }
}
