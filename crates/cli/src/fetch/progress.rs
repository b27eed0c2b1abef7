//! The progress display on a terminal: overall progress, the estimated time left, and the slowest hosts.

use std::io::{self, Write as _};
use std::time::Duration;

use indicatif::{HumanDuration, MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use tidegate::{Authority, State};
use tokio::time::Instant;

use super::frontier::Frontier;
use super::gates::Gates;
use super::host::{Host, RunState};
use super::robots::RobotsRules;
use super::tally::{Tally, size};
use crate::format;

/// Number of hosts shown, those that take longest.
const HOSTS_SHOWN: usize = 6;
/// Weight of the latest sample in a host's speed, an exponential moving average.
const WEIGHT: f64 = 0.1;
/// Maximum length of a displayed host name.
const NAME_MAX: usize = 32;

/// The lines on the terminal.
pub(crate) struct Progress {
    all: MultiProgress,
    bar: ProgressBar,
    hosts: Vec<ProgressBar>,
    updated_at: Instant,
}

impl Progress {
    /// Draws nothing unless stderr is a terminal.
    pub(crate) fn new() -> Self {
        let all = MultiProgress::with_draw_target(ProgressDrawTarget::stderr_with_hz(8));
        let bar = all.add(ProgressBar::new(0));
        bar.set_style(style("{bar:24.cyan/blue} {msg}"));
        Self { all, bar, hosts: Vec::new(), updated_at: Instant::now() }
    }

    /// Removes the lines.
    pub(crate) fn clear(&self) {
        // A closed terminal shows nothing anyway.
        drop(self.all.clear());
    }

    /// Reports that the fetch is stopping.
    pub(crate) fn stopping(&mut self, in_flight: usize) {
        if self.bar.is_hidden() {
            // The sender of the signal may wait for this line.
            drop(io::stderr().write_all((stopping_line(in_flight) + "\n").as_bytes()));
        } else {
            self.lines(&[format!("  {}", stopping_line(in_flight))]);
        }
    }

    /// Updates speeds and redraws.
    pub(crate) fn update(
        &mut self,
        frontier: &mut Frontier,
        total: &Tally,
        is_read: bool,
        is_stopping: bool,
        in_flight: usize,
    ) {
        let now = Instant::now();
        let span = now.duration_since(self.updated_at).as_secs_f64();
        self.updated_at = now;
        let is_shown = !self.bar.is_hidden();
        let mut slow: Vec<(Option<Duration>, usize)> = Vec::new();
        let mut speed = 0.0;
        for (id, host) in frontier.hosts.iter_mut().enumerate() {
            let Some(host) = host else { continue };
            pace(host, span);
            speed += host.speed;
            if is_shown && host.remaining() > 0 {
                slow.push((remaining(host, now), id));
            }
        }
        if !is_shown {
            return;
        }
        // Hosts without an estimate come first: they may take longest.
        slow.sort_by_key(|(remaining, _)| std::cmp::Reverse(remaining.unwrap_or(Duration::MAX)));
        let longest = slow.iter().filter_map(|(remaining, _)| *remaining).max();
        self.bar.set_length(frontier.known.max(1));
        self.bar.set_position(total.ended());
        let ended = total.ended();
        let known = if is_read { frontier.known.to_string() } else { format!("{}+", frontier.known) };
        let failed = if total.failed > 0 { format!(" · {} failed", total.failed) } else { String::new() };
        let eta = match longest {
            _ if is_stopping => "stopping".to_owned(),
            Some(remaining) => format!("about {} left", HumanDuration(remaining)),
            None => "…".to_owned(),
        };
        self.bar
            .set_message(format!("{ended}/{known} · {} · {speed:.1}/s{failed} · {eta}", size(total.bytes)));
        if is_stopping {
            self.lines(&[format!("  {}", stopping_line(in_flight))]);
            return;
        }
        let (shown, more) = slow.split_at(slow.len().min(HOSTS_SHOWN));
        let mut lines: Vec<String> = Vec::new();
        for (_, id) in shown {
            if let Some(host) = &frontier.hosts[*id] {
                lines.push(line(host, &frontier.gates, now));
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

fn stopping_line(in_flight: usize) -> String {
    format!("stopping: waiting for {in_flight} requests in flight; press Ctrl-C again to stop at once")
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template)
        .map_or_else(|_| ProgressStyle::default_bar(), |style| style.progress_chars("━╸─"))
}

/// Updates a host's speed.
#[expect(clippy::cast_precision_loss, reason = "a mean of counts")]
fn pace(host: &mut Host, span: f64) {
    let ended = host.tally.done + host.tally.failed;
    if span > 0.0 {
        let latest = (ended - host.ended_before) as f64 / span;
        host.speed += WEIGHT * (latest - host.speed);
    }
    host.ended_before = ended;
}

/// Estimated time for the host's remaining pages at its recent speed, including its current wait; `None` if
/// unknown.
#[expect(clippy::cast_precision_loss, reason = "an estimate")]
fn remaining(host: &Host, now: Instant) -> Option<Duration> {
    let wait = match host.state {
        RunState::Waiting { until: Some(until) } => until.saturating_duration_since(now),
        _ => Duration::ZERO,
    };
    let seconds = host.remaining() as f64 / host.speed;
    let work = (host.speed > 0.01).then(|| Duration::try_from_secs_f64(seconds.min(1e9)).ok()).flatten()?;
    Some(work + wait)
}

/// The line of a host.
fn line(host: &Host, gates: &Gates, now: Instant) -> String {
    let ended = host.tally.ended();
    let of = ended + host.remaining();
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

/// What a host is doing.
fn doing(host: &Host, gates: &Gates, now: Instant) -> String {
    if let Some(why) = &host.gave_up {
        return format!("given up: {why}");
    }
    let wait = match host.state {
        RunState::Waiting { until: Some(until) } => until.saturating_duration_since(now),
        _ => Duration::ZERO,
    };
    let rest = format::duration(Duration::from_secs(wait.as_secs() + u64::from(wait.subsec_nanos() > 0)));
    let is_robots_pending = host.rules.iter().any(|rules| matches!(rules, RobotsRules::Pending));
    let Some(view) = gates.view(&host.authority) else { return String::new() };
    match view.state {
        State::CircuitOpen => format!("circuit open: {rest}"),
        State::Paused => format!("paused by the host: {rest}"),
        _ if is_robots_pending => "robots.txt".to_owned(),
        _ => {
            let limit = view.rate.map(|rate| format!("up to {:.1}/s, ", rate.as_f64())).unwrap_or_default();
            let every = if view.interval.is_zero() {
                String::new()
            } else {
                format!("one in {}, ", format::duration(view.interval))
            };
            let reason = view.control.map(|control| format!(" ({})", control.reason)).unwrap_or_default();
            let slots = view.slots.unwrap_or_default();
            let waits = host.limited_by.filter(|_| !wait.is_zero());
            let waits = waits.map(|limit| format!(", limited by {limit}: {rest}")).unwrap_or_default();
            format!("{limit}{every}{} of {slots} at once{reason}{waits}", view.in_flight)
        }
    }
}
