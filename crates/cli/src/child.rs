//! A command that runs while a lease is held.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;

use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child, Command};

use crate::failure::{Exit, Failure};
use crate::signals::Heard;

/// As shells have it: a command that is there and cannot be run, and one that is not there.
const CANNOT_RUN: u8 = 126;
const NOT_FOUND: u8 = 127;
/// And one that a signal ended has this and the signal's number.
const BY_SIGNAL: i32 = 128;

/// Starts it, with our own input and output.
pub(crate) fn start(command: &[OsString]) -> Result<Child, Failure> {
    let [program, arguments @ ..] = command else {
        return Err(Failure::usage("no command is given after `--`"));
    };
    Command::new(program).args(arguments).spawn().map_err(|error| {
        let code = if error.kind() == io::ErrorKind::NotFound { NOT_FOUND } else { CANNOT_RUN };
        let what = format!("the command `{}` cannot be started: {error}", program.display());
        Failure::new(Exit::Command(code), what).next("nothing was used: what was drawn is given back")
    })
}

/// Passes a signal on, unless the terminal has sent it to the command too.
pub(crate) fn pass_on(child: &Child, heard: Heard) {
    let id = child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
    if let (Some(id), Some(signal), false) = (id, Signal::from_named_raw(heard.number), heard.is_of_terminal)
    {
        // It may have ended just now: then there is nobody to tell.
        let _ = kill_process(id, signal);
    }
}

/// How it ended, as a shell would tell.
pub(crate) fn exit_of(status: ExitStatus) -> Exit {
    let code = status.code().or_else(|| status.signal().map(|signal| BY_SIGNAL + signal));
    Exit::Command(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX))
}

/// How this program ends when a signal ended it before there was a command.
pub(crate) fn exit_by(heard: Heard) -> Exit {
    Exit::Command(u8::try_from(BY_SIGNAL + heard.number).unwrap_or(u8::MAX))
}
