//! Signals, heard one by one, with where they come from.
//!
//! While a lease is held, nothing may end this program without giving it back. And what others send to it is meant for the
//! command that it runs, unless the terminal has told that one already.

use std::thread;

use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::WithOrigin;
use signal_hook::low_level::siginfo::Cause;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::failure::Failure;

/// Those that are heard: all that people send by hand and that would end a program.
const HEARD: [i32; 6] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2];

/// A signal.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Heard {
    /// Its number.
    pub(crate) number: i32,
    /// The terminal sent it, to every program in its foreground.
    pub(crate) is_of_terminal: bool,
}

impl Heard {
    /// Whether it asks a server to read its certificate again.
    pub(crate) const fn is_to_read_again(self) -> bool {
        self.number == SIGHUP
    }

    /// Whether it asks a server to end.
    pub(crate) const fn is_to_end(self) -> bool {
        matches!(self.number, SIGINT | SIGTERM)
    }
}

/// The signals that come from now on.
#[derive(Debug)]
pub(crate) struct Signals {
    // The system keeps one of each kind until it is heard, and people send few.
    heard: UnboundedReceiver<Heard>,
}

impl Signals {
    /// Hears them in the place of what they would do.
    pub(crate) fn hear() -> Result<Self, Failure> {
        let failed = |error| Failure::failed(format!("signals cannot be heard: {error}"));
        let mut signals = SignalsInfo::<WithOrigin>::new(HEARD).map_err(failed)?;
        let (tell, heard) = unbounded_channel();
        let listen = move || {
            for origin in &mut signals {
                let is_of_terminal = matches!(origin.cause, Cause::Kernel);
                if tell.send(Heard { number: origin.signal, is_of_terminal }).is_err() {
                    break;
                }
            }
        };
        thread::Builder::new().name("signals".into()).spawn(listen).map_err(failed)?;
        Ok(Self { heard })
    }

    /// The next one.
    ///
    /// # Cancel safety
    /// Dropping the future loses none.
    pub(crate) async fn next(&mut self) -> Heard {
        match self.heard.recv().await {
            Some(heard) => heard,
            // The thread has gone: nothing comes any more.
            None => std::future::pending().await,
        }
    }
}
