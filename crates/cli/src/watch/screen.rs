//! Sets up the terminal for the live view, and restores it however the program ends.

use std::io::{self, Stdout, Write as _};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};
use std::{panic, thread};

use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::cursor::Show;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{
    Clear, ClearType, EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode,
};
use signal_hook::consts::{SIGSTOP, SIGTSTP};
use signal_hook::iterator::Signals;
use tidegate::Stamp;
use tokio::sync::mpsc;

use super::model::{Key, Model};
use super::view::{self, Theme};
use crate::failure::Failure;

/// Capacity of the channel of terminal events.
const KEYS_MAX: usize = 64;

/// Whether the terminal is in raw mode and on the alternate screen.
static IS_ACTIVE: AtomicBool = AtomicBool::new(false);

/// The terminal.
#[derive(Debug)]
pub(crate) struct Screen {
    terminal: Terminal<CrosstermBackend<Stdout>>,
    theme: Theme,
}

/// An event of the terminal.
#[derive(Debug)]
pub(crate) enum TerminalEvent {
    Key(Key),
    /// The size changed.
    Resized,
    /// Another process sent SIGTSTP.
    Stopped,
    /// Reading failed: no further events follow.
    Closed(io::Error),
}

impl Screen {
    /// Sets up the terminal, and a panic hook that restores it.
    pub(crate) fn open(theme: Theme) -> Result<Self, Failure> {
        static HOOK: Once = Once::new();
        HOOK.call_once(|| {
            let before = panic::take_hook();
            panic::set_hook(Box::new(move |info| {
                // First, so that the panic message is visible.
                restore();
                before(info);
            }));
        });
        let opened = set_up().and_then(|()| Terminal::new(CrosstermBackend::new(io::stdout())));
        match opened {
            Ok(terminal) => Ok(Self { terminal, theme }),
            Err(error) => {
                restore();
                Err(failed(&error))
            }
        }
    }

    /// Draws the model.
    pub(crate) fn draw(&mut self, model: &Model, now: Stamp) -> Result<(), Failure> {
        if !IS_ACTIVE.load(Ordering::SeqCst) {
            // The panic hook of a thread has restored the terminal and printed its message.
            return Err(Failure::failed("a thread of this program panicked"));
        }
        let theme = self.theme;
        let drawn = self.terminal.draw(|frame| view::draw(frame, model, now, theme));
        drawn.map(drop).map_err(|error| failed(&error))
    }

    /// Restores the terminal and stops the process; sets the terminal up again when the shell continues it.
    pub(crate) fn suspend(&mut self) -> Result<(), Failure> {
        restore();
        let stopped = signal_hook::low_level::raise(SIGSTOP);
        // A new `Terminal` redraws everything. Clearing the old one would query the cursor position, and the
        // keyboard thread would read the reply.
        let taken = stopped.and_then(|()| set_up());
        self.terminal = taken
            .and_then(|()| Terminal::new(CrosstermBackend::new(io::stdout())))
            .map_err(|error| failed(&error))?;
        Ok(())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        restore();
    }
}

/// Sets up the terminal. After a failure, the exit path restores the terminal.
fn set_up() -> io::Result<()> {
    IS_ACTIVE.store(true, Ordering::SeqCst);
    enable_raw_mode()?;
    execute!(io::stdout(), EnterAlternateScreen, Clear(ClearType::All))
}

/// Restores the terminal, once. Errors are ignored: a closed terminal needs no restoring.
fn restore() {
    if IS_ACTIVE.swap(false, Ordering::SeqCst) {
        drop(disable_raw_mode());
        drop(execute!(io::stdout(), LeaveAlternateScreen, Show));
        drop(io::stdout().flush());
    }
}

fn failed(error: &io::Error) -> Failure {
    Failure::failed(format!("the terminal cannot be drawn: {error}"))
        .next("use --once for a table, or --json for one line per event")
}

/// Reads terminal events on threads that end with the program.
pub(crate) fn terminal_events() -> Result<mpsc::Receiver<TerminalEvent>, Failure> {
    let (sender, events) = mpsc::channel(KEYS_MAX);
    let failed = |error| Failure::failed(format!("keys cannot be read: {error}"));
    // Ctrl-Z does not raise it in raw mode, but other processes may send it.
    let mut stops = Signals::new([SIGTSTP]).map_err(failed)?;
    let stop_sender = sender.clone();
    let forward_stops = move || {
        for _ in &mut stops {
            if stop_sender.blocking_send(TerminalEvent::Stopped).is_err() {
                break;
            }
        }
    };
    thread::Builder::new().name("stops".into()).spawn(forward_stops).map_err(failed)?;
    let forward_keys = move || {
        loop {
            let next = match event::read() {
                Ok(Event::Key(key)) => match key_of(key) {
                    Some(key) => TerminalEvent::Key(key),
                    None => continue,
                },
                Ok(Event::Resize(..)) => TerminalEvent::Resized,
                Ok(_) => continue,
                Err(error) => TerminalEvent::Closed(error),
            };
            let is_closed = matches!(next, TerminalEvent::Closed(_));
            if sender.blocking_send(next).is_err() || is_closed {
                break;
            }
        }
    };
    let started = thread::Builder::new().name("keys".into()).spawn(forward_keys);
    started.map(|_| events).map_err(failed)
}

fn key_of(key: KeyEvent) -> Option<Key> {
    if key.kind == KeyEventKind::Release {
        return None;
    }
    Some(match key.code {
        KeyCode::Char('c' | 'd') if key.modifiers.contains(KeyModifiers::CONTROL) => Key::Interrupt,
        KeyCode::Char('z') if key.modifiers.contains(KeyModifiers::CONTROL) => Key::Suspend,
        KeyCode::Char(_) if key.modifiers.intersects(KeyModifiers::CONTROL | KeyModifiers::ALT) => {
            return None;
        }
        KeyCode::Char(letter) => Key::Letter(letter),
        KeyCode::Up => Key::Up,
        KeyCode::Down => Key::Down,
        KeyCode::PageUp => Key::PageUp,
        KeyCode::PageDown => Key::PageDown,
        KeyCode::Home => Key::Home,
        KeyCode::End => Key::End,
        KeyCode::Enter => Key::Enter,
        KeyCode::Esc => Key::Escape,
        KeyCode::Backspace => Key::Backspace,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use std::env;
    use std::fs::{File, OpenOptions};
    use std::io::Read as _;
    use std::process::{Command, Stdio};

    use rustix::fs::OFlags;
    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

    use super::*;

    /// Makes a run of this test the one that panics.
    const PANICS: &str = "TIDEGATE_TEST_PANICS";

    #[test]
    fn panic_restores_the_terminal_before_its_message() {
        if env::var_os(PANICS).is_some() {
            let _screen = Screen::open(Theme { is_coloured: false }).unwrap();
            panic!("printed on the restored terminal");
        }
        let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&ours).unwrap();
        unlockpt(&ours).unwrap();
        let name = ptsname(&ours, Vec::new()).unwrap().into_string().unwrap();
        let open_terminal = || OpenOptions::new().read(true).write(true).open(&name).unwrap();
        // A terminal that no process has open loses its modes.
        let open = open_terminal();
        let modes = || rustix::termios::tcgetattr(&open).unwrap().local_modes;
        let before = modes();
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "watch::screen::tests::panic_restores_the_terminal_before_its_message"])
            .args(["--nocapture", "--test-threads=1"])
            .env(PANICS, "1")
            .stdin(Stdio::from(open_terminal()))
            .stdout(Stdio::from(open_terminal()))
            .stderr(Stdio::from(open_terminal()))
            .spawn()
            .unwrap();
        let mut ours = File::from(ours);
        rustix::fs::fcntl_setfl(&ours, OFlags::NONBLOCK).unwrap();
        let (mut output, mut is_over) = (Vec::new(), false);
        while !is_over {
            // Its last output is read after it has ended.
            is_over = child.try_wait().unwrap().is_some();
            // Both the end of the terminal and a lack of output are errors here.
            drop(ours.read_to_end(&mut output));
        }
        assert!(!child.wait().unwrap().success(), "it panics");
        assert_eq!(modes(), before, "lines are edited and shown again");
        let output = String::from_utf8_lossy(&output);
        let at = |text: &str| output.find(text).unwrap_or_else(|| panic!("{text:?} is not in {output:?}"));
        assert!(at("\x1b[?1049h") < at("\x1b[?1049l"), "{output:?}");
        assert!(at("\x1b[?1049l") < at("printed on the restored terminal"), "{output:?}");
        assert!(at("\x1b[?25h") < at("printed on the restored terminal"), "{output:?}");
    }
}
