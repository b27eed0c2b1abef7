//! A command that runs while a lease is held.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;

use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child, Command};

use crate::failure::{Exit, Failure};
use crate::signals::SignalEvent;

/// Exit codes as in shells: the command cannot be executed, or is not found.
const CANNOT_RUN: u8 = 126;
const NOT_FOUND: u8 = 127;
/// Added to the number of the signal that killed a command.
const SIGNAL_BASE: i32 = 128;

/// Starts the command with this program's stdin, stdout and stderr.
pub(crate) fn start(command: &[OsString]) -> Result<Child, Failure> {
    let [program, arguments @ ..] = command else {
        return Err(Failure::usage("no command is given after `--`"));
    };
    Command::new(program).args(arguments).spawn().map_err(|error| {
        let code = if error.kind() == io::ErrorKind::NotFound { NOT_FOUND } else { CANNOT_RUN };
        let what = format!("the command `{}` cannot be started: {error}", program.display());
        Failure::new(Exit::Command(code), what).next("no units were spent: the drawn units are returned")
    })
}

/// Forwards a signal, unless the terminal has sent it to the command too.
pub(crate) fn forward(child: &Child, received: SignalEvent) {
    let id = child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
    if let (Some(id), Some(signal), false) =
        (id, Signal::from_named_raw(received.number), received.is_from_terminal)
    {
        // The command may just have exited: then there is no process to signal.
        let _ = kill_process(id, signal);
    }
}

/// The exit code of a command, by the convention of shells.
pub(crate) fn exit_of(status: ExitStatus) -> Exit {
    let code = status.code().or_else(|| status.signal().map(|signal| SIGNAL_BASE + signal));
    Exit::Command(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX))
}

/// The exit code of this program if a signal ends it before a command runs.
pub(crate) fn exit_by(signal: SignalEvent) -> Exit {
    Exit::Command(u8::try_from(SIGNAL_BASE + signal.number).unwrap_or(u8::MAX))
}
