//! What people see while it runs: how far it is, how long it takes, and what the slowest hosts do. On a terminal only.

use std::io::{self, Write as _};
use std::time::Duration;

use indicatif::{HumanDuration, MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use tidegate::{Authority, State};
use tokio::time::Instant;

use super::book::Book;
use super::gates::Gates;
use super::host::{Host, Turn};
use super::rules::Rules;
use super::tally::{Tally, size};

/// So many hosts are shown, those that take longest.
const HOSTS_SHOWN: usize = 6;
/// How much of a look goes into a host's speed.
const WEIGHT: f64 = 0.1;
/// The longest name that is shown whole.
const NAME_MAX: usize = 32;

/// The lines on the terminal.
pub(crate) struct Show {
    all: MultiProgress,
    bar: ProgressBar,
    hosts: Vec<ProgressBar>,
    looked: Instant,
}

impl Show {
    /// Nothing is shown where stderr is no terminal.
    pub(crate) fn new() -> Self {
        let all = MultiProgress::with_draw_target(ProgressDrawTarget::stderr_with_hz(8));
        let bar = all.add(ProgressBar::new(0));
        bar.set_style(style("{bar:24.cyan/blue} {msg}"));
        Self { all, bar, hosts: Vec::new(), looked: Instant::now() }
    }

    /// Takes them away.
    pub(crate) fn clear(&self) {
        // A terminal that has gone shows nothing anyway.
        drop(self.all.clear());
    }

    /// Says that it stops.
    pub(crate) fn stopping(&mut self, in_flight: usize) {
        if self.bar.is_hidden() {
            // Whoever has sent the signal may wait for it.
            drop(io::stderr().write_all((stopping(in_flight) + "\n").as_bytes()));
        } else {
            self.lines(&[format!("  {}", stopping(in_flight))]);
        }
    }

    /// Shows how it goes.
    pub(crate) fn look(
        &mut self,
        book: &mut Book,
        total: &Tally,
        is_read: bool,
        is_stopping: bool,
        in_flight: usize,
    ) {
        let now = Instant::now();
        let span = now.duration_since(self.looked).as_secs_f64();
        self.looked = now;
        let is_shown = !self.bar.is_hidden();
        let mut slow: Vec<(Option<Duration>, usize)> = Vec::new();
        let mut speed = 0.0;
        for (id, host) in book.hosts.iter_mut().enumerate() {
            let Some(host) = host else { continue };
            pace(host, span);
            speed += host.speed;
            if is_shown && host.left() > 0 {
                slow.push((left(host, now), id));
            }
        }
        if !is_shown {
            return;
        }
        // What nobody can tell comes first: it may take longest.
        slow.sort_by_key(|(left, _)| std::cmp::Reverse(left.unwrap_or(Duration::MAX)));
        let longest = slow.iter().filter_map(|(left, _)| *left).max();
        self.bar.set_length(book.known.max(1));
        self.bar.set_position(total.ended());
        let ended = total.ended();
        let known = if is_read { book.known.to_string() } else { format!("{}+", book.known) };
        let failed = if total.failed > 0 { format!(" · {} failed", total.failed) } else { String::new() };
        let eta = match longest {
            _ if is_stopping => "stopping".to_owned(),
            Some(left) => format!("about {} left", HumanDuration(left)),
            None => "…".to_owned(),
        };
        self.bar
            .set_message(format!("{ended}/{known} · {} · {speed:.1}/s{failed} · {eta}", size(total.bytes)));
        if is_stopping {
            self.lines(&[format!("  {}", stopping(in_flight))]);
            return;
        }
        let (shown, more) = slow.split_at(slow.len().min(HOSTS_SHOWN));
        let mut lines: Vec<String> = Vec::new();
        for (_, id) in shown {
            if let Some(host) = &book.hosts[*id] {
                lines.push(line(host, &book.gates, now));
            }
        }
        if !more.is_empty() {
            lines.push(format!("  and {} more", more.len()));
        }
        self.lines(&lines);
    }

    fn lines(&mut self, lines: &[String]) {
        while self.hosts.len() < lines.len() {
            let bar = self.all.add(ProgressBar::new(0));
            bar.set_style(style("{msg}"));
            self.hosts.push(bar);
        }
        while self.hosts.len() > lines.len() {
            if let Some(bar) = self.hosts.pop() {
                bar.finish_and_clear();
                self.all.remove(&bar);
            }
        }
        for (bar, line) in self.hosts.iter().zip(lines) {
            bar.set_message(line.clone());
        }
    }
}

fn stopping(in_flight: usize) -> String {
    format!("stopping: {in_flight} under way are brought to their end; Ctrl-C again ends at once")
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template)
        .map_or_else(|_| ProgressStyle::default_bar(), |style| style.progress_chars("━╸─"))
}

/// How fast a host is of late.
#[expect(clippy::cast_precision_loss, reason = "a mean of counts")]
fn pace(host: &mut Host, span: f64) {
    let ended = host.tally.done + host.tally.failed;
    if span > 0.0 {
        let latest = (ended - host.ended_then) as f64 / span;
        host.speed += WEIGHT * (latest - host.speed);
    }
    host.ended_then = ended;
}

/// How long what is left takes at the speed of late, and what it waits for; `None` while nobody can tell.
#[expect(clippy::cast_precision_loss, reason = "an estimate")]
fn left(host: &Host, now: Instant) -> Option<Duration> {
    let wait = match host.turn {
        Turn::Waits { until: Some(until) } => until.saturating_duration_since(now),
        _ => Duration::ZERO,
    };
    let seconds = host.left() as f64 / host.speed;
    let work = (host.speed > 0.01).then(|| Duration::try_from_secs_f64(seconds.min(1e9)).ok()).flatten()?;
    Some(work + wait)
}

/// A host in a line.
fn line(host: &Host, gates: &Gates, now: Instant) -> String {
    let ended = host.tally.ended();
    let of = ended + host.left();
    let name = name(&host.authority);
    let failed =
        if host.tally.failed > 0 { format!(" · {} failed", host.tally.failed) } else { String::new() };
    format!(
        "  {name:<NAME_MAX$} {ended:>6}/{of:<6} {:>6.1}/s{failed}  {}",
        host.speed,
        doing(host, gates, now)
    )
}

fn name(host: &Authority) -> String {
    let text = host.as_str();
    if text.chars().count() <= NAME_MAX {
        return text.to_owned();
    }
    let cut: String = text.chars().take(NAME_MAX - 1).collect();
    cut + "…"
}

/// What a host does.
fn doing(host: &Host, gates: &Gates, now: Instant) -> String {
    if let Some(why) = &host.gave_up {
        return format!("given up: {why}");
    }
    let wait = match host.turn {
        Turn::Waits { until: Some(until) } => until.saturating_duration_since(now),
        _ => Duration::ZERO,
    };
    let seconds = wait.as_secs_f64().ceil();
    let is_asking = host.rules.iter().any(|rules| matches!(rules, Rules::Asking));
    let Some(view) = gates.view(&host.authority) else { return String::new() };
    match view.state {
        State::CircuitOpen => format!("fails: left alone, {seconds:.0} s"),
        State::Paused => format!("asks to wait: {seconds:.0} s"),
        _ if is_asking => "robots.txt".to_owned(),
        _ => {
            let limit = view.rate.map(|rate| format!("up to {:.1}/s, ", rate.as_f64())).unwrap_or_default();
            let every = if view.interval.is_zero() {
                String::new()
            } else {
                format!("one in {:.1} s, ", view.interval.as_secs_f64())
            };
            let reason = view.control.map(|control| format!(" ({})", control.reason)).unwrap_or_default();
            let slots = view.slots.unwrap_or_default();
            format!("{limit}{every}{} of {slots} at once{reason}", view.in_flight)
        }
    }
}
