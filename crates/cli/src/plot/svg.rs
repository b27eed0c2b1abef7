//! Renders a chart as an SVG: a panel with axes per limit, a line per series, and a legend. The output is
//! deterministic, byte for byte.

use std::fmt::Write as _;

use tidegate::{Stamp, Window};

use super::chart::{Chart, Panel, Series};
use crate::format;

const WIDTH: f64 = 960.0;
const LEFT: f64 = 76.0;
const RIGHT: f64 = 40.0;
const TOP: f64 = 52.0;
/// Heights of a panel's title, its plot and the times below it.
const TITLE: f64 = 30.0;
const PLOT: f64 = 200.0;
const TIMES: f64 = 44.0;
/// Height of a row of the legend, and the gap after a panel.
const LEGEND: f64 = 20.0;
const GAP: f64 = 18.0;
/// Approximate width of a letter, since fonts differ.
const LETTER: f64 = 7.2;
/// Maximum letters of a name.
const NAME_MAX: usize = 48;
/// Points are marked up to this number of windows.
const POINTS_MAX: usize = 48;
/// Maximum labels below a plot.
const TICKS_MAX: usize = 10;

/// A limit is drawn up to this multiple of the highest usage.
const NEAR: u64 = 2;

/// A palette that colour-blind readers can distinguish, too.
const COLOURS: [&str; 8] =
    ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b58900", "#56b4e9", "#5c4b8a", "#6b6b6b"];

/// Renders the chart.
pub(crate) fn draw(chart: &Chart) -> String {
    let heights: Vec<f64> = chart.panels.iter().map(height).collect();
    let note = if chart.left_out > 0 { LEGEND } else { 0.0 };
    let whole = TOP + heights.iter().sum::<f64>() + note + 8.0;
    let mut svg = Svg::default();
    svg.line(&format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {whole}" width="{WIDTH}" height="{whole}" font-family="system-ui, sans-serif" font-size="12" fill="#222">"##
    ));
    let title = format!("Usage of {} by {}", chart.owner, chart.each());
    svg.line(&format!("<title>{}</title>", escaped(&title)));
    svg.line(&format!(r##"<rect width="{WIDTH}" height="{whole}" fill="#fff"/>"##));
    svg.text((LEFT, 28.0), r#"font-size="18" font-weight="600""#, &title);
    if let (Some(first), Some(last)) = (chart.starts.first(), chart.starts.last()) {
        let range = format!("{} – {} UTC", minute(*first), minute(chart.window.around(*last).end));
        svg.text((WIDTH - RIGHT, 28.0), r##"text-anchor="end" fill="#666""##, &range);
    }
    let mut top = TOP;
    for (panel, height) in chart.panels.iter().zip(heights) {
        draw_panel(&mut svg, chart, panel, top);
        top += height;
    }
    if chart.left_out > 0 {
        svg.text((LEFT, top + 8.0), r##"fill="#666""##, &format!("and {} more limits", chart.left_out));
    }
    svg.line("</svg>");
    svg.0
}

fn height(panel: &Panel) -> f64 {
    let rows = u16::try_from(legend(panel).last().map_or(0, |item| item.row + 1)).unwrap_or(u16::MAX);
    TITLE + PLOT + TIMES + f64::from(rows) * LEGEND + GAP
}

fn draw_panel(svg: &mut Svg, chart: &Chart, panel: &Panel, top: f64) {
    let below = top + TITLE + PLOT;
    let mut title = format!("{}, units per {}", panel.limit, chart.each());
    for (place, units) in panel.refills.iter().enumerate() {
        title.push_str(if place == 0 { "; limit " } else { ", " });
        title.push_str(&format::number(*units));
    }
    svg.text((LEFT, top + 18.0), r#"font-size="14" font-weight="600""#, &title);
    // A limit far above the usage would flatten it.
    let is_near = |units: &&u64| **units <= panel.most().saturating_mul(NEAR);
    let limits = || panel.refills.iter().filter(is_near);
    let most = panel.most().max(limits().max().copied().unwrap_or_default());
    let step = nice(most);
    let highest = most.div_ceil(step).max(1).saturating_mul(step);
    let y = |units: u64| below - part(units, highest) * PLOT;
    for tick in (0..=highest / step).map(|tick| tick * step) {
        let at = y(tick);
        let colour = if tick == 0 { "#888" } else { "#e4e4e4" };
        svg.line(&format!(
            r#"<line x1="{LEFT}" y1="{at:.1}" x2="{}" y2="{at:.1}" stroke="{colour}"/>"#,
            WIDTH - RIGHT
        ));
        svg.text((LEFT - 8.0, at + 4.0), r##"text-anchor="end" fill="#555""##, &format::number(tick));
    }
    let count = chart.starts.len();
    let slot = (WIDTH - LEFT - RIGHT) / float(count);
    // A window is a span, so its point is in the middle.
    let x = |index: usize| LEFT + (float(index) + 0.5) * slot;
    let mut day = String::new();
    for (index, start) in ticks(&chart.starts, chart.window) {
        let (label, below_it) = label(start, chart.window);
        svg.line(&format!(
            r##"<line x1="{0:.1}" y1="{below:.1}" x2="{0:.1}" y2="{1:.1}" stroke="#888"/>"##,
            x(index),
            below + 5.0
        ));
        svg.text((x(index), below + 19.0), r##"text-anchor="middle" fill="#555""##, &label);
        if below_it != day {
            svg.text((x(index), below + 34.0), r##"text-anchor="middle" fill="#888""##, &below_it);
            day = below_it;
        }
    }
    for units in limits() {
        let at = y(*units);
        svg.line(&format!(
            r##"<line x1="{LEFT}" y1="{at:.1}" x2="{}" y2="{at:.1}" stroke="#444" stroke-dasharray="6 4"/>"##,
            WIDTH - RIGHT
        ));
    }
    for series in &panel.series {
        draw_series(svg, series, COLOURS[series.colour], &x, &y);
    }
    for item in legend(panel) {
        let row = u16::try_from(item.row).unwrap_or(u16::MAX);
        let at = below + TIMES + f64::from(row) * LEGEND + 10.0;
        if let Some(colour) = item.colour {
            svg.line(&format!(
                r#"<rect x="{:.1}" y="{:.1}" width="14" height="4" rx="2" fill="{colour}"/>"#,
                item.left,
                at - 6.0
            ));
        }
        svg.text((item.left + 20.0, at), "", &item.text);
    }
}

fn draw_series(
    svg: &mut Svg,
    series: &Series,
    colour: &str,
    x: &impl Fn(usize) -> f64,
    y: &impl Fn(u64) -> f64,
) {
    let mut path = String::new();
    for (index, units) in series.units.iter().enumerate() {
        let letter = if index == 0 { 'M' } else { 'L' };
        // Writing to a string cannot fail.
        let _ = write!(path, "{letter}{:.1} {:.1}", x(index), y(*units));
    }
    svg.line(&format!(
        r#"<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.8" stroke-linejoin="round"/>"#
    ));
    if series.units.len() <= POINTS_MAX {
        for (index, units) in series.units.iter().enumerate() {
            svg.line(&format!(
                r#"<circle cx="{:.1}" cy="{:.1}" r="2.4" fill="{colour}"/>"#,
                x(index),
                y(*units)
            ));
        }
    }
}

/// A name in the legend, and its position.
struct Item {
    row: usize,
    left: f64,
    colour: Option<&'static str>,
    text: String,
}

/// The legend, wrapped into rows.
fn legend(panel: &Panel) -> Vec<Item> {
    let named = panel.series.iter().map(|series| {
        let name = if series.name.chars().count() > NAME_MAX {
            series.name.chars().take(NAME_MAX - 1).chain(['…']).collect()
        } else {
            series.name.clone()
        };
        (Some(COLOURS[series.colour]), format!("{name} ({})", format::number(series.total())))
    });
    let more = (panel.left_out > 0).then(|| (None, format!("and {} more", panel.left_out)));
    let (mut row, mut left) = (0, LEFT);
    let mut items = Vec::new();
    for (colour, text) in named.chain(more) {
        let width = 20.0 + float(text.chars().count()) * LETTER + 22.0;
        if left > LEFT && left + width > WIDTH - RIGHT {
            (row, left) = (row + 1, LEFT);
        }
        items.push(Item { row, left, colour, text });
        left += width;
    }
    items
}

/// The smallest step of 1, 2 or 5 times a power of ten that gives at most five steps.
fn nice(most: u64) -> u64 {
    let mut power = 1_u64;
    loop {
        for step in [power, power.saturating_mul(2), power.saturating_mul(5)] {
            if most.div_ceil(step) <= 5 {
                return step;
            }
        }
        power = power.saturating_mul(10);
    }
}

/// The windows that are labelled: the finest round interval with at most [`TICKS_MAX`] labels.
fn ticks(starts: &[Stamp], window: Window) -> Vec<(usize, Stamp)> {
    let (seconds, steps): (u64, &[u64]) = match window {
        Window::Minute => (60, &[1, 2, 5, 10, 15, 30, 60, 120, 180, 360, 720, 1_440, 10_080]),
        Window::Hour => (3_600, &[1, 2, 3, 6, 12, 24, 48, 96, 168, 336, 672, 1_344]),
        Window::Day => (86_400, &[1, 2, 4, 7, 14, 28, 56, 112, 364, 1_092]),
        Window::Month => (0, &[1, 2, 3, 6, 12, 24, 60, 120]),
    };
    let number = |index: usize, start: &Stamp| match seconds {
        0 => index as u64,
        seconds => start.as_micros() / 1_000_000 / seconds,
    };
    let of = |step: u64| {
        let all = starts.iter().enumerate();
        all.filter(move |(index, start)| number(*index, start).is_multiple_of(step))
            .map(|(index, start)| (index, *start))
            .collect::<Vec<_>>()
    };
    let few = steps.iter().map(|step| of(*step)).find(|ticks| ticks.len() <= TICKS_MAX);
    let ticks = few.unwrap_or_default();
    // At least one time is always labelled.
    if ticks.is_empty() { starts.first().map(|start| (0, *start)).into_iter().collect() } else { ticks }
}

/// The label of a window, and the label below it, which is drawn where it changes.
fn label(start: Stamp, window: Window) -> (String, String) {
    let text = start.to_string();
    let part = |range: std::ops::Range<usize>| text.get(range).unwrap_or_default().to_owned();
    match window {
        Window::Minute | Window::Hour => (part(11..16), part(0..10)),
        Window::Day => (part(5..10), part(0..4)),
        Window::Month => (part(5..7), part(0..4)),
    }
}

fn minute(at: Stamp) -> String {
    at.to_string().get(..16).unwrap_or_default().replace('T', " ")
}

fn part(units: u64, of: u64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "a part of some points of a picture")]
    let part = units as f64 / of.max(1) as f64;
    part
}

fn float(count: usize) -> f64 {
    u32::try_from(count).map_or(f64::MAX, f64::from)
}

/// The text of an SVG.
#[derive(Default)]
struct Svg(String);

impl Svg {
    fn line(&mut self, line: &str) {
        self.0.push_str(line);
        self.0.push('\n');
    }

    fn text(&mut self, (x, y): (f64, f64), style: &str, text: &str) {
        let space = if style.is_empty() { "" } else { " " };
        self.line(&format!(r#"<text x="{x:.1}" y="{y:.1}"{space}{style}>{}</text>"#, escaped(text)));
    }
}

/// Escapes markup, and replaces characters that XML does not allow.
fn escaped(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            letter if letter.is_control() || matches!(letter, '\u{fffe}' | '\u{ffff}') => {
                safe.push('\u{fffd}');
            }
            letter => safe.push(letter),
        }
    }
    safe
}

#[cfg(test)]
mod tests {
    use super::super::chart::tests::{line, query};
    use super::*;

    fn chart() -> Chart {
        let names =
            ["gpt-4", "images", "<script>&\"'", "a rather long name of a resource that few would choose"];
        let lines: Vec<_> = (0..36_u64)
            .flat_map(|hour| {
                let start = Stamp::from_secs(1_769_864_400 + hour * 3_600).to_string();
                let units = [hour * hour * 37 % 9_000, 4_000 - hour * 90, 500, hour % 7 * 300];
                let lines = names.iter().zip(units);
                let lines = lines.map(|(name, units)| line(name, "tpm", Window::Hour, &start, units));
                lines.chain([line("gpt-4", "rpm", Window::Hour, &start, hour % 5)]).collect::<Vec<_>>()
            })
            .collect();
        let mut chart = Chart::new(&query(Window::Hour), &lines).unwrap().unwrap();
        // One far above the usage, and one near it.
        (chart.panels[0].refills, chart.panels[1].refills) = (vec![600], vec![6_000, 90_000]);
        chart
    }

    #[test]
    fn svg_is_deterministic() {
        let svg = draw(&chart());
        assert_eq!(svg, draw(&chart()));
        assert_eq!(svg, include_str!("usage.svg"), "\n{svg}");
    }

    #[test]
    fn maximum_usage_is_drawn() {
        let most = [line("gpt-4", "tpm", Window::Day, "2026-01-31T00:00:00Z", u64::MAX)];
        let svg = draw(&Chart::new(&query(Window::Day), &most).unwrap().unwrap());
        assert!(svg.contains("gpt-4 (18.4E)"), "{svg}");
    }

    #[test]
    fn names_are_escaped() {
        let svg = draw(&chart());
        assert!(svg.contains("&lt;script&gt;&amp;&quot;&#39;") && !svg.contains("<script"), "{svg}");
        assert_eq!(escaped("a\u{0}\u{1b}b\u{ffff}"), "a\u{fffd}\u{fffd}b\u{fffd}");
    }

    #[test]
    fn axis_steps_are_round_and_few() {
        for (most, step) in [(0, 1), (1, 1), (5, 1), (6, 2), (11, 5), (26, 10), (99, 20), (5_001, 2_000)] {
            assert_eq!(nice(most), step, "{most}");
        }
        assert!(u64::MAX.div_ceil(nice(u64::MAX)) <= 5);
    }

    #[test]
    fn labels_are_few_and_never_none() {
        let hours =
            |count: u64| (0..count).map(|hour| Stamp::from_secs(1_769_864_400 + hour * 3_600)).collect();
        for count in [1, 2, 10, 11, 100, 1_000, 10_000] {
            let starts: Vec<Stamp> = hours(count);
            let ticks = ticks(&starts, Window::Hour);
            assert!((1..=TICKS_MAX).contains(&ticks.len()), "{count}: {}", ticks.len());
        }
    }
}
