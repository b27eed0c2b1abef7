//! A real terminal per test: a tmux server with a shell.

use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::mpsc::{Receiver, TrySendError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use super::clear_environment;

/// Maximum time between readings of the screen: tmux may show output later than it reports it.
const REST: Duration = Duration::from_millis(50);

/// A shell in a terminal.
pub(crate) struct Terminal {
    socket: PathBuf,
    folder: PathBuf,
    /// Notifies about output to the terminal.
    written: Receiver<()>,
}

impl Terminal {
    /// Starts a shell with these variables, in a terminal of this size. Requires tmux.
    pub(crate) fn new(folder: &Path, size: (u16, u16), variables: &[(&str, String)]) -> Self {
        let fifo = folder.join("written");
        let made = Command::new("mkfifo").arg(&fifo).status().expect("mkfifo can be run");
        assert!(made.success(), "{made:?}");
        let written = notify_on(fifo.clone());
        let terminal = Self { socket: folder.join("tmux"), folder: folder.to_owned(), written };
        let mut tmux = terminal.command();
        clear_environment(&mut tmux);
        // Root's shell ignores PS1 from the environment.
        let profile = folder.join("profile");
        fs::write(&profile, "PS1='ready$ '\n").expect("it is written");
        tmux.env("ENV", profile).env("LC_ALL", "C.UTF-8").env("TERM", "screen");
        tmux.envs(variables.iter().map(|(name, value)| (name, value)));
        let (width, height) = (size.0.to_string(), size.1.to_string());
        let output = tmux.args(["-u", "new-session", "-d", "-x", &width, "-y", &height, "sh"]).output();
        let output = output.expect("tmux can be run");
        assert!(output.status.success(), "{output:?}");
        terminal.ask(&["pipe-pane", "-O", &format!("exec cat > {}", fifo.display())]);
        terminal.until("a prompt", |screen| screen.starts_with("ready$"));
        terminal
    }

    fn command(&self) -> Command {
        let mut tmux = Command::new("tmux");
        tmux.arg("-S").arg(&self.socket).args(["-f", "/dev/null"]);
        tmux
    }

    fn ask(&self, arguments: &[&str]) -> String {
        let Output { status, stdout, stderr } =
            self.command().args(arguments).output().expect("tmux can be run");
        assert!(status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&stderr));
        String::from_utf8(stdout).expect("UTF-8")
    }

    /// Presses keys, by tmux's names for them.
    pub(crate) fn press(&self, keys: &[&str]) {
        self.ask(&[&["send-keys"], keys].concat());
    }

    /// Types a line into the shell.
    pub(crate) fn line(&self, text: &str) {
        self.ask(&["send-keys", "-l", text]);
        self.press(&["Enter"]);
    }

    pub(crate) fn resize(&self, (width, height): (u16, u16)) {
        self.ask(&["resize-window", "-x", &width.to_string(), "-y", &height.to_string()]);
    }

    pub(crate) fn screen(&self) -> String {
        self.ask(&["capture-pane", "-p"])
    }

    /// Waits until there is output, or [`REST`] has passed. Avoids polling, since each reading of the screen
    /// starts a program.
    fn rest(&self) {
        let _ = self.written.recv_timeout(REST);
        // One reading covers all pending output.
        while self.written.try_recv().is_ok() {}
    }

    /// Waits until the screen satisfies a condition, and returns it.
    pub(crate) fn until(&self, what: &str, is_so: impl Fn(&str) -> bool) -> String {
        let began = Instant::now();
        loop {
            let screen = self.screen();
            if is_so(&screen) {
                return screen;
            }
            assert!(began.elapsed() < super::HANGS, "timed out waiting for {what}:\n{screen}");
            self.rest();
        }
    }

    /// Waits until the program has ended, and returns its exit code. The terminal must be restored.
    pub(crate) fn ended(&self) -> String {
        let code = self.folder.join("code");
        let began = Instant::now();
        let text = loop {
            match fs::read_to_string(&code) {
                Ok(text) if text.ends_with('\n') => break text,
                _ => assert!(began.elapsed() < super::HANGS, "it never ends:\n{}", self.screen()),
            }
            self.rest();
        };
        self.until("a prompt", |screen| screen.trim_end().ends_with("ready$"));
        assert_eq!(self.ask(&["display-message", "-p", "#{alternate_on} #{cursor_flag}"]).trim(), "0 1");
        let modes = |name: &str| fs::read_to_string(self.folder.join(name)).expect("what stty wrote");
        assert_eq!(modes("after"), modes("before"), "the modes of the terminal");
        text.trim().to_owned()
    }

    /// Starts a program, and writes its process id to the file `id`.
    pub(crate) fn start(&self, line: &str) {
        let file = |name: &str| self.folder.join(name).display().to_string();
        let (id, before, after, code) = (file("id"), file("before"), file("after"), file("code"));
        let _ = fs::remove_file(self.folder.join("code"));
        let script = format!(
            "stty -g > {before}\nsh -c 'echo $$ > {id}; exec {line}'\ncode=$?\nstty -g > {after}\necho $code > {code}\n"
        );
        let path = self.folder.join("script");
        fs::write(&path, script).expect("it is written");
        self.line(&format!(". {}", path.display()));
    }

    /// The process id of the started program.
    pub(crate) fn id(&self) -> i32 {
        let id = fs::read_to_string(self.folder.join("id")).expect("it was started");
        id.trim().parse().expect("a number")
    }
}

/// Sends whenever data arrives in a pipe, until its writer closes it.
fn notify_on(fifo: PathBuf) -> Receiver<()> {
    let (sender, receiver) = sync_channel(1);
    thread::spawn(move || {
        let mut bytes = [0; 4_096];
        let Ok(mut pipe) = fs::File::open(fifo) else { return };
        while pipe.read(&mut bytes).is_ok_and(|count| count > 0) {
            // A pending notification is enough.
            if let Err(TrySendError::Disconnected(())) = sender.try_send(()) {
                break;
            }
        }
    });
    receiver
}

impl Drop for Terminal {
    /// Stops the tmux server, also if the test failed.
    fn drop(&mut self) {
        drop(self.command().arg("kill-server").output());
    }
}
