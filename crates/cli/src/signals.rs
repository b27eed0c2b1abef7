//! Signals, one by one, with their origin.
//!
//! While a lease is held, no signal may end this program before the lease is returned. A signal from another
//! process is forwarded to the command, unless the terminal has sent it to both.

use std::thread;

use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::WithOrigin;
use signal_hook::low_level::siginfo::Cause;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::failure::Failure;

/// The handled signals: all that users send and whose default action ends a program.
const HANDLED: [i32; 6] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2];

/// A received signal.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SignalEvent {
    /// Its number.
    pub(crate) number: i32,
    /// Whether the terminal sent it, to every process in the foreground.
    pub(crate) is_from_terminal: bool,
}

impl SignalEvent {
    /// Whether a server reloads its files on it, or its terminal was closed.
    pub(crate) const fn is_hangup(self) -> bool {
        self.number == SIGHUP
    }

    /// Whether a server stops on it.
    pub(crate) const fn is_stop(self) -> bool {
        matches!(self.number, SIGINT | SIGTERM)
    }
}

/// A stream of signals.
#[derive(Debug)]
pub(crate) struct Signals {
    // Unbounded is safe: the kernel coalesces pending signals of one kind, and users send few.
    events: UnboundedReceiver<SignalEvent>,
}

impl Signals {
    /// Installs handlers that replace the default actions.
    pub(crate) fn install() -> Result<Self, Failure> {
        let failed = |error| Failure::failed(format!("signal handlers cannot be installed: {error}"));
        let mut signals = SignalsInfo::<WithOrigin>::new(HANDLED).map_err(failed)?;
        let (sender, events) = unbounded_channel();
        let forward = move || {
            for origin in &mut signals {
                let is_from_terminal = matches!(origin.cause, Cause::Kernel);
                if sender.send(SignalEvent { number: origin.signal, is_from_terminal }).is_err() {
                    break;
                }
            }
        };
        thread::Builder::new().name("signals".into()).spawn(forward).map_err(failed)?;
        Ok(Self { events })
    }

    /// Waits for the next signal.
    ///
    /// # Cancel safety
    /// Dropping the future loses none.
    pub(crate) async fn next(&mut self) -> SignalEvent {
        match self.events.recv().await {
            Some(event) => event,
            // The thread has ended: no signal arrives any more.
            None => std::future::pending().await,
        }
    }
}
