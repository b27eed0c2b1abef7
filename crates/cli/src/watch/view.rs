//! Draws the model. At any size, the header and the footer are visible; parts without space are omitted.

use std::time::Duration;
use tidegate_core::duration::Period;

use ratatui::Frame;
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{
    Block, Cell, Clear, HighlightSpacing, Paragraph, RenderDirection, Row as TableRow, Sparkline, Table,
    TableState,
};
use tidegate::Stamp;
use tidegate_client::UpstreamState;

use super::columns::{age, clock, speed};
use super::model::{Health, Kind, Link, Mode, Model, ViewData};
use super::subjects::{Level, Retry, Row, Sort};
use crate::format;

/// Minimum size.
const LEAST: (u16, u16) = (20, 5);
/// Height from which all parts have a frame.
const TALL: u16 = 18;
/// Width from which the table has all columns.
const WIDE: u16 = 64;
/// Height from which upstreams are shown.
const ROOMY: u16 = 24;
/// Maximum lines of upstreams.
const UPSTREAMS_MAX: u16 = 6;
/// Maximum height of the frame of levels.
const LEVELS_MAX: u16 = 8;

/// Latency from which a store is shown as slow.
const SLOW: Duration = Duration::from_millis(100);

/// The colours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Theme {
    pub(crate) is_coloured: bool,
}

impl Theme {
    fn of(self, colour: Color) -> Style {
        if self.is_coloured { Style::new().fg(colour) } else { Style::new() }
    }

    fn good(self) -> Style {
        self.of(Color::Green)
    }

    fn bad(self) -> Style {
        self.of(Color::Red).add_modifier(Modifier::BOLD)
    }

    fn warning(self) -> Style {
        self.of(Color::Yellow)
    }
}

const BOLD: Style = Style::new().add_modifier(Modifier::BOLD);

/// Draws the screen.
pub(crate) fn draw(frame: &mut Frame<'_>, model: &Model, now: Stamp, theme: Theme) {
    let area = frame.area();
    if area.width < LEAST.0 || area.height < LEAST.1 {
        let text = format!("{}x{}: too small", area.width, area.height);
        return frame.render_widget(Paragraph::new(text), area);
    }
    let is_tall = area.height >= TALL;
    let (rows, selected) = model.rows(now);
    let levels = selected.and_then(|index| rows.get(index)).map_or(&[][..], |row| &row.levels);
    let level_lines = u16::try_from(levels.len().max(1)).unwrap_or(LEVELS_MAX);
    let upstreams = &model.data().upstreams;
    let upstream_lines = match u16::try_from(upstreams.len()).unwrap_or(UPSTREAMS_MAX) {
        lines @ 1.. if area.height >= ROOMY => lines.min(area.height - ROOMY + 2).min(UPSTREAMS_MAX) + 2,
        _ => 0,
    };
    let heights = if is_tall {
        [1, 5, 0, (level_lines + 2).min(LEVELS_MAX), 2, 1]
    } else {
        [1, 1, 0, if area.height >= 10 { level_lines.min(2) } else { 0 }, 1, 1]
    };
    let [header, rates, table, upstream, level, health, footer] = Layout::vertical([
        Constraint::Length(heights[0]),
        Constraint::Length(heights[1]),
        Constraint::Fill(1),
        Constraint::Length(upstream_lines),
        Constraint::Length(heights[3]),
        Constraint::Length(heights[4]),
        Constraint::Length(heights[5]),
    ])
    .areas(area);
    draw_header(frame, header, model, now, theme);
    draw_rates(frame, rates, model, now, theme);
    let of = selected.and_then(|index| rows.get(index)).copied();
    draw_table(frame, table, (&rows, selected), model, now, theme);
    draw_upstreams(frame, upstream, upstreams);
    draw_levels(frame, level, of, model.kind, theme);
    draw_health(frame, health, model, now, theme);
    draw_footer(frame, footer, model);
    if model.mode == Mode::Help {
        draw_help(frame, area, model.kind);
    }
}

/// Two texts on one line: the right one in full, the left one as far as it fits.
fn sides(frame: &mut Frame<'_>, area: Rect, left: Line<'_>, right: Line<'_>) {
    let width = u16::try_from(right.width()).unwrap_or(u16::MAX).min(area.width);
    let [at_left, at_right] =
        Layout::horizontal([Constraint::Fill(1), Constraint::Length(width)]).areas(area);
    frame.render_widget(Paragraph::new(left), at_left);
    frame.render_widget(Paragraph::new(right), at_right);
}

fn draw_header(frame: &mut Frame<'_>, area: Rect, model: &Model, now: Stamp, theme: Theme) {
    let paused = model.paused_at().map(|at| format!(" PAUSED at {} ", clock(at)));
    let state = match (&model.link, paused) {
        (Link::Lost { since, tries, .. }, paused) => {
            let (span, paused) = (age(now.since(*since)), paused.unwrap_or_default());
            let lost = format!("{paused} LOST since {} ({span}, tried {tries}x) ", clock(*since));
            Line::styled(lost, theme.bad())
        }
        (_, Some(paused)) => Line::styled(paused, theme.warning().patch(BOLD)),
        (Link::Connecting, None) => Line::styled(" connecting ", theme.warning()),
        (Link::Up { .. }, None) => Line::styled(format!(" live {} ", clock(now)), theme.good()),
    };
    let entity = model.entity.as_ref().map(|entity| format!("{entity} ")).unwrap_or_default();
    let name = Span::styled(format!("tidegate watch {entity}"), BOLD);
    let place = Line::from(vec![name, Span::raw(model.place.as_str())]);
    sides(frame, area, place, state);
}

fn draw_rates(frame: &mut Frame<'_>, area: Rect, model: &Model, now: Stamp, theme: Theme) {
    let (data, at) = (model.data(), model.counted_at(now));
    let [left, right] = Layout::horizontal([Constraint::Fill(1), Constraint::Fill(1)]).areas(area);
    let decided = match model.kind {
        Kind::Server => "decisions/s",
        Kind::Store => "units/s",
    };
    let decided = (decided, &data.decided, theme.good());
    let refused = ("refusals/s", &data.refused, theme.bad());
    for ((name, rates, style), area) in [(decided, left), (refused, right)] {
        let is_known = model.kind == Kind::Server || name != "refusals/s";
        let text = if is_known { speed(rates.per_second(at)) } else { "?".to_owned() };
        // A server's counters cover all entities.
        let all = if model.kind == Kind::Server && model.entity.is_some() { " (all)" } else { "" };
        let title = format!(" {name}{all} {text} ");
        if area.height < 3 {
            frame.render_widget(Paragraph::new(title.trim().to_owned()), area);
            continue;
        }
        let block = Block::bordered().title(title);
        let inside = block.inner(area);
        if is_known {
            // The newest value is at the right.
            let mut points = rates.last(inside.width.into(), at);
            points.reverse();
            let curve =
                Sparkline::default().data(points).direction(RenderDirection::RightToLeft).style(style);
            frame.render_widget(curve.block(block), area);
        } else {
            let text = "A store records no refusals: watch a server for them.";
            let text = Paragraph::new(text).wrap(ratatui::widgets::Wrap { trim: true });
            frame.render_widget(text.block(block), area);
        }
    }
}

/// The title of the table.
fn title(rows: usize, model: &Model, width: u16) -> String {
    let data = model.data();
    let by = match (model.sort, model.kind) {
        (Sort::Count, Kind::Server) => "refusals",
        (Sort::Count | Sort::Granted, Kind::Store) => "units",
        (Sort::Granted, Kind::Server) => "grants",
        (Sort::Speed, _) => "speed",
        (Sort::Last, _) => "last",
        (Sort::Name, _) => "name",
    };
    let of = if model.filter.is_empty() { String::new() } else { format!(" of {}", data.subjects.len()) };
    let filter = if model.filter.is_empty() { String::new() } else { format!(" with `{}`", model.filter) };
    let more = if data.has_more { ", and more" } else { "" };
    let left = if data.subjects.evicted > 0 && width >= WIDE {
        format!(", {} left out", format::number(data.subjects.evicted))
    } else {
        String::new()
    };
    let missed = match data.missed {
        0 if data.has_gaps => ", with gaps".to_owned(),
        0 => String::new(),
        missed => format!(", {} missed", format::number(missed)),
    };
    let what = match model.kind {
        Kind::Server => "users",
        Kind::Store => "subjects",
    };
    format!(" {what}: {rows}{of}{filter}{more}{missed}{left}, by {by} ")
}

fn draw_table(
    frame: &mut Frame<'_>,
    area: Rect,
    (rows, selected): (&[&Row], Option<usize>),
    model: &Model,
    now: Stamp,
    theme: Theme,
) {
    let is_framed = area.height >= 6;
    let block = if is_framed { Block::bordered() } else { Block::new() };
    let block = if is_framed { block.title(title(rows.len(), model, area.width)) } else { block };
    if rows.is_empty() {
        let text = match (model.kind, &model.link) {
            (_, Link::Connecting) => "",
            _ if !model.filter.is_empty() => "No name matches the filter.",
            (Kind::Server, _) => "No grants and no refusals since the start.",
            (Kind::Store, _) => "The store has no entities: choose one, tidegate watch ENTITY.",
        };
        return frame.render_widget(Paragraph::new(text).block(block), area);
    }
    let is_wide = area.width >= WIDE;
    let (at, counted_at) = (model.shown_at(now), model.rows_at(now));
    let (count, count_of) = count_column(model);
    let (headings, widths): (Vec<_>, Vec<_>) = if is_wide {
        (
            vec!["ENTITY", "RESOURCE", "LIMIT", count, "/S", "RETRY IN", "LAST"],
            vec![
                Constraint::Fill(3),
                Constraint::Fill(2),
                Constraint::Fill(2),
                Constraint::Length(8),
                Constraint::Length(6),
                Constraint::Length(8),
                Constraint::Length(5),
            ],
        )
    } else {
        (
            vec!["ENTITY", "RESOURCE", count],
            vec![Constraint::Fill(1), Constraint::Fill(1), Constraint::Length(8)],
        )
    };
    let right = |text: String| Cell::new(Line::raw(text).alignment(Alignment::Right));
    let row = |row: &&Row| {
        let (name, count) = ([row.entity.clone(), row.resource.clone()], format::number(count_of(row)));
        let [entity, resource] = name.map(Cell::new);
        let cells = if is_wide {
            let last = row.last.map(|last| age(at.since(last))).unwrap_or_default();
            let speed = speed(row.rates.per_second(counted_at));
            vec![
                entity,
                resource,
                Cell::new(row.limit.clone()),
                right(count),
                right(speed),
                right(retry(row, at)),
                right(last),
            ]
        } else {
            vec![entity, resource, right(count)]
        };
        let is_short = row.levels.iter().any(|level| level.available <= 0) || !retry(row, at).is_empty();
        TableRow::new(cells).style(if is_short { theme.bad() } else { Style::new() })
    };
    let heading = |name: &&'static str| match *name {
        "ENTITY" | "RESOURCE" | "LIMIT" => Cell::new(*name),
        name => right(name.to_owned()),
    };
    let table = Table::new(rows.iter().map(row), widths)
        .header(TableRow::new(headings.iter().map(heading)).style(BOLD))
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED))
        .highlight_symbol("> ")
        .highlight_spacing(HighlightSpacing::Always)
        .block(block);
    frame.render_stateful_widget(table, area, &mut TableState::new().with_selected(selected));
}

/// The heading of the count, and what it shows.
fn count_column(model: &Model) -> (&'static str, fn(&Row) -> u64) {
    match (model.kind, model.sort) {
        (Kind::Server, Sort::Granted) => ("GRANTED", |row| row.granted),
        (Kind::Server, _) => ("REFUSED", |row| row.count),
        (Kind::Store, _) => ("UNITS", |row| row.count),
    }
}

/// Time until a retry may succeed; empty if that is now.
fn retry(row: &Row, at: Stamp) -> String {
    match row.retry {
        Retry::At(when) if when > at => age(when.since(at)),
        Retry::At(_) | Retry::Unknown => String::new(),
        Retry::Never => "never".to_owned(),
    }
}

/// The throttles of the busiest upstreams: rate, load and reason.
fn draw_upstreams(frame: &mut Frame<'_>, area: Rect, upstreams: &[UpstreamState]) {
    if area.height == 0 {
        return;
    }
    let title = format!(" upstreams: {}, by admissions ", upstreams.len());
    let row = |upstream: &UpstreamState| {
        let rate = upstream.rate.map(|rate| format!("{}/s", speed(rate))).unwrap_or_default();
        let quota = upstream.quota.map(|quota| format!("of {}", speed(quota))).unwrap_or_default();
        let load = format!("{} in flight, {} waiting", upstream.in_flight, upstream.waiting);
        let reason = upstream.reason.as_deref().unwrap_or_default();
        let cells = [upstream.name.to_string(), rate, quota, load, reason.to_owned()];
        TableRow::new(cells.map(|cell| format::escape(&cell)))
    };
    let widths = [
        Constraint::Fill(1),
        Constraint::Length(8),
        Constraint::Length(8),
        Constraint::Length(24),
        Constraint::Length(11),
    ];
    frame.render_widget(
        Table::new(upstreams.iter().map(row), widths).block(Block::bordered().title(title)),
        area,
    );
}

fn draw_levels(frame: &mut Frame<'_>, area: Rect, row: Option<&Row>, kind: Kind, theme: Theme) {
    if area.height == 0 {
        return;
    }
    let mut inside = area;
    if area.height >= 3 {
        let title = row.map(|row| format!(" levels of {} on {} ", row.entity, row.resource));
        let block = Block::bordered().title(title.unwrap_or_else(|| " levels ".to_owned()));
        inside = block.inner(area);
        frame.render_widget(block, area);
    }
    let Some(row) = row else { return };
    if row.levels.is_empty() {
        let text = if kind == Kind::Server { "not read yet" } else { "no units were ever drawn" };
        return frame.render_widget(Paragraph::new(text), inside);
    }
    // The lowest levels first, since only some may fit.
    let mut levels: Vec<&Level> = row.levels.iter().collect();
    levels
        .sort_by(|one, other| one.fill().total_cmp(&other.fill()).then(one.available.cmp(&other.available)));
    let name = levels.iter().map(|level| Line::raw(&level.limit).width()).max().unwrap_or_default();
    let name = name.min(usize::from(inside.width) / 3);
    let lines = levels.into_iter().map(|level| level_line(level, name, inside.width, theme));
    frame.render_widget(Paragraph::new(lines.take(inside.height.into()).collect::<Vec<_>>()), inside);
}

/// `rpm  ██████░░░░  42 of 60  60/1m`
fn level_line(level: &Level, name: usize, width: u16, theme: Theme) -> Line<'static> {
    let rate = format!("{}/{}", format::number(level.amount), Period(level.period));
    let amounts = format!("{} of {}", signed(level.available), format::number(level.burst));
    let words = if width >= WIDE { format!(" {amounts:>17}  {rate:>10}") } else { format!(" {amounts}") };
    let bar = usize::from(width).saturating_sub(name + 1 + words.chars().count());
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "a part of some columns"
    )]
    let columns = (level.fill() * bar as f64).round() as usize;
    // An empty bar means that no unit is available.
    let columns = if level.available > 0 { columns.max(1).min(bar) } else { 0 };
    let style = match level.fill() {
        _ if level.available <= 0 => theme.bad(),
        fill if fill < 0.2 => theme.warning(),
        _ => theme.good(),
    };
    let mut label: String = level.limit.chars().take(name).collect();
    label.extend(std::iter::repeat_n(' ', name.saturating_sub(Line::raw(&label).width()) + 1));
    Line::from(vec![
        Span::raw(label),
        Span::styled("█".repeat(columns), style),
        Span::raw("░".repeat(bar - columns)),
        Span::raw(words),
    ])
}

fn signed(units: i64) -> String {
    let sign = if units < 0 { "-" } else { "" };
    format!("{sign}{}", format::number(units.unsigned_abs()))
}

fn draw_health(frame: &mut Frame<'_>, area: Rect, model: &Model, now: Stamp, theme: Theme) {
    let data = model.data();
    let store = store_line(data, area.width, theme);
    let leases = match (&data.totals, model.kind) {
        (Some(totals), _) => format!(
            "leases {}  waiting {}  expired {}  unsettled {}",
            format::number(totals.open_leases),
            format::number(totals.waiting),
            format::number(totals.expired),
            format::number(totals.unsettled)
        ),
        (None, Kind::Server) => String::new(),
        (None, Kind::Store) => "A store has no events: it is polled.".to_owned(),
    };
    let news = match (&model.link, &data.news) {
        (Link::Lost { why, .. }, _) => Some(Line::styled(why.clone(), theme.bad())),
        (_, Some((at, news))) => {
            Some(Line::raw(format!("{} ago: {news}", age(model.shown_at(now).since(*at)))))
        }
        _ => None,
    };
    if area.height >= 2 {
        let [first, second] = Layout::vertical([Constraint::Length(1), Constraint::Length(1)]).areas(area);
        sides(frame, first, Line::raw(leases), store);
        frame.render_widget(news.unwrap_or_default(), second);
    } else if let (Link::Lost { .. }, Some(news)) = (&model.link, news) {
        frame.render_widget(news, area);
    } else {
        sides(frame, area, Line::raw(leases), store);
    }
}

fn store_line(data: &ViewData, width: u16, theme: Theme) -> Line<'static> {
    let away = data.totals.and_then(|totals| totals.store_away);
    match (&data.health, away) {
        (_, Some(span)) => {
            Line::styled(format!("  store unavailable, retry in {}", format::duration(span)), theme.bad())
        }
        (Some(Health::Away { why }), None) => {
            Line::styled(format!("  store unavailable: {why}"), theme.bad())
        }
        (Some(Health::Good { engine, version, took }), None) => {
            let changes = if width >= 100 { format!("  changes {version}") } else { String::new() };
            Line::styled(
                format!("  store {engine} ok {}{changes}", format::latency(*took)),
                if *took < SLOW { theme.good() } else { theme.warning() },
            )
        }
        (None, None) => Line::default(),
    }
}

fn draw_footer(frame: &mut Frame<'_>, area: Rect, model: &Model) {
    let keys = match model.mode {
        Mode::Filter => {
            let text = format!("/{}", model.filter);
            let column = u16::try_from(Line::raw(&text).width()).unwrap_or(u16::MAX);
            frame.set_cursor_position((area.x + column.min(area.width.saturating_sub(1)), area.y));
            return frame.render_widget(Line::raw(text), area);
        }
        Mode::Table | Mode::Help if area.width >= WIDE => {
            "q quit   / filter   s sort   p pause   ↑↓ select   ? help"
        }
        Mode::Table | Mode::Help => "q quit / filter s sort p pause ? help",
    };
    frame.render_widget(Line::styled(keys, BOLD), area);
}

fn draw_help(frame: &mut Frame<'_>, area: Rect, kind: Kind) {
    let source = match kind {
        Kind::Server => {
            "Rates come from the server's counters, rows from\nits events and its busiest. Levels are those of >."
        }
        Kind::Store => "A store has levels, but no decisions: units are\nthose taken between two scans.",
    };
    let text = format!(
        "/      filter rows by name\n\
         s      sort: count, speed, last, name, grants\n\
         p      pause or resume the display\n\
         ↑ ↓    select a row (or k j, PgUp PgDn, Home End)\n\
         q      quit (or Esc, Ctrl-C); Esc clears a filter\n\n{source}\n\nAny key closes this."
    );
    let (width, height) = (52.min(area.width), 12.min(area.height));
    let (x, y) = (area.x + (area.width - width) / 2, area.y + (area.height - height) / 2);
    let area = Rect { x, y, width, height };
    frame.render_widget(Clear, area);
    frame.render_widget(Paragraph::new(text).block(Block::bordered().title(" help ")), area);
}
