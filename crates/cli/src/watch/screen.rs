//! The terminal, while it is ours: however this program ends, it is given back as it was.

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

/// Keys that are typed ahead. People type fewer.
const KEYS_MAX: usize = 64;

/// The terminal is ours.
static IS_OURS: AtomicBool = AtomicBool::new(false);

/// The terminal.
#[derive(Debug)]
pub(crate) struct Screen {
    terminal: Terminal<CrosstermBackend<Stdout>>,
    theme: Theme,
}

/// What comes from the terminal.
#[derive(Debug)]
pub(crate) enum Typed {
    Key(Key),
    /// It has another size.
    Resized,
    /// Somebody wants us to stop until we are let go on.
    Stopped,
    /// Nothing comes any more.
    Gone(io::Error),
}

impl Screen {
    /// Takes the terminal.
    pub(crate) fn open(theme: Theme) -> Result<Self, Failure> {
        static HOOK: Once = Once::new();
        HOOK.call_once(|| {
            let before = panic::take_hook();
            panic::set_hook(Box::new(move |info| {
                // First, so that what it says is seen.
                give_back();
                before(info);
            }));
        });
        let opened = take().and_then(|()| Terminal::new(CrosstermBackend::new(io::stdout())));
        match opened {
            Ok(terminal) => Ok(Self { terminal, theme }),
            Err(error) => {
                give_back();
                Err(failed(&error))
            }
        }
    }

    /// Shows the model.
    pub(crate) fn draw(&mut self, model: &Model, now: Stamp) -> Result<(), Failure> {
        if !IS_OURS.load(Ordering::SeqCst) {
            // A thread has panicked, and said so on the terminal that was before.
            return Err(Failure::failed(
                "a part of this program has failed, and the terminal was given back",
            ));
        }
        let theme = self.theme;
        let drawn = self.terminal.draw(|frame| view::draw(frame, model, now, theme));
        drawn.map(drop).map_err(|error| failed(&error))
    }

    /// Gives the terminal back and stops, as a shell wants it; takes it again when that lets us go on.
    pub(crate) fn suspend(&mut self) -> Result<(), Failure> {
        give_back();
        let stopped = signal_hook::low_level::raise(SIGSTOP);
        // A terminal of which nothing is known is drawn whole. To clear the one there is would ask where the cursor is, and the
        // thread that hears keys would have the answer.
        let taken = stopped.and_then(|()| take());
        self.terminal = taken
            .and_then(|()| Terminal::new(CrosstermBackend::new(io::stdout())))
            .map_err(|error| failed(&error))?;
        Ok(())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        give_back();
    }
}

/// Takes the terminal. Where that fails, whatever was taken of it is given back at the end.
fn take() -> io::Result<()> {
    IS_OURS.store(true, Ordering::SeqCst);
    enable_raw_mode()?;
    execute!(io::stdout(), EnterAlternateScreen, Clear(ClearType::All))
}

/// Gives the terminal back, once. One that has gone needs nothing.
fn give_back() {
    if IS_OURS.swap(false, Ordering::SeqCst) {
        drop(disable_raw_mode());
        drop(execute!(io::stdout(), LeaveAlternateScreen, Show));
        drop(io::stdout().flush());
    }
}

fn failed(error: &io::Error) -> Failure {
    Failure::failed(format!("the terminal cannot be drawn on: {error}"))
        .next("say --once for a table, or --json for a line for each event")
}

/// Hears what is typed, on threads that end with the program.
pub(crate) fn typed() -> Result<mpsc::Receiver<Typed>, Failure> {
    let (tell, heard) = mpsc::channel(KEYS_MAX);
    let failed = |error| Failure::failed(format!("keys cannot be heard: {error}"));
    // A key does not raise it while the terminal is ours; others may send it.
    let mut stops = Signals::new([SIGTSTP]).map_err(failed)?;
    let tell_stops = tell.clone();
    let hear_stops = move || {
        for _ in &mut stops {
            if tell_stops.blocking_send(Typed::Stopped).is_err() {
                break;
            }
        }
    };
    thread::Builder::new().name("stops".into()).spawn(hear_stops).map_err(failed)?;
    let listen = move || {
        loop {
            let typed = match event::read() {
                Ok(Event::Key(key)) => match key_of(key) {
                    Some(key) => Typed::Key(key),
                    None => continue,
                },
                Ok(Event::Resize(..)) => Typed::Resized,
                Ok(_) => continue,
                Err(error) => Typed::Gone(error),
            };
            let is_gone = matches!(typed, Typed::Gone(_));
            if tell.blocking_send(typed).is_err() || is_gone {
                break;
            }
        }
    };
    let started = thread::Builder::new().name("keys".into()).spawn(listen);
    started.map(|_| heard).map_err(failed)
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

    /// Says to a run of this test that it is the one that panics.
    const PANICS: &str = "TIDEGATE_TEST_PANICS";

    #[test]
    fn a_panic_gives_the_terminal_back_before_it_is_told() {
        if env::var_os(PANICS).is_some() {
            let _screen = Screen::open(Theme { is_coloured: false }).unwrap();
            panic!("told on the terminal that was before");
        }
        let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&ours).unwrap();
        unlockpt(&ours).unwrap();
        let name = ptsname(&ours, Vec::new()).unwrap().into_string().unwrap();
        let theirs = || OpenOptions::new().read(true).write(true).open(&name).unwrap();
        // A terminal that nobody has open forgets its modes.
        let open = theirs();
        let modes = || rustix::termios::tcgetattr(&open).unwrap().local_modes;
        let before = modes();
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "watch::screen::tests::a_panic_gives_the_terminal_back_before_it_is_told"])
            .args(["--nocapture", "--test-threads=1"])
            .env(PANICS, "1")
            .stdin(Stdio::from(theirs()))
            .stdout(Stdio::from(theirs()))
            .stderr(Stdio::from(theirs()))
            .spawn()
            .unwrap();
        let mut ours = File::from(ours);
        rustix::fs::fcntl_setfl(&ours, OFlags::NONBLOCK).unwrap();
        let (mut said, mut is_over) = (Vec::new(), false);
        while !is_over {
            // What was said before it ended is read after it has.
            is_over = child.try_wait().unwrap().is_some();
            // At the end of a terminal there is an error, and while nothing is said another one.
            drop(ours.read_to_end(&mut said));
        }
        assert!(!child.wait().unwrap().success(), "it panics");
        assert_eq!(modes(), before, "lines are edited and shown again");
        let said = String::from_utf8_lossy(&said);
        let at = |text: &str| said.find(text).unwrap_or_else(|| panic!("{text:?} is not in {said:?}"));
        assert!(at("\x1b[?1049h") < at("\x1b[?1049l"), "{said:?}");
        assert!(at("\x1b[?1049l") < at("told on the terminal that was before"), "{said:?}");
        assert!(at("\x1b[?25h") < at("told on the terminal that was before"), "{said:?}");
    }
}
