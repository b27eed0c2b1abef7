//! A plot of one run as inline SVG: the achieved rate against the hidden capacity, and below it the 429s,
//! over time.
//!
//! Colours come from the classes of the page's style sheet, so that they follow the browser's light or dark
//! scheme.

use std::fmt::Write as _;

use crate::describe::number;
use crate::measure::Series;
use crate::page::escape;

const WIDTH: f64 = 640.0;
const LEFT: f64 = 56.0;
const RIGHT: f64 = 20.0;
/// Space above each panel for its label.
const LABEL: f64 = 20.0;
const RATE_HEIGHT: f64 = 132.0;
const REJECTED_HEIGHT: f64 = 44.0;
/// Space below for the times.
const TIMES: f64 = 34.0;
const HEIGHT: f64 = LABEL + RATE_HEIGHT + LABEL + 4.0 + REJECTED_HEIGHT + TIMES;
/// Rates above this multiple of the highest capacity are cut off, because the burst of a deep bucket would
/// flatten the rest.
const CUT: f64 = 2.0;
/// The most intervals of each axis.
const RATE_TICKS: f64 = 4.0;
const REJECTED_TICKS: f64 = 2.0;
const TIME_TICKS: f64 = 8.0;

/// A panel: its top and height on the page, and the value at its top.
struct Panel {
    top: f64,
    height: f64,
    most: f64,
}

impl Panel {
    fn y(&self, value: f64) -> f64 {
        self.top + self.height * (1.0 - (value / self.most).min(1.0))
    }

    fn bottom(&self) -> f64 {
        self.top + self.height
    }
}

/// Draws a series of `scenario`; `unit` is the unit of its quota.
pub(crate) fn svg(scenario: &str, unit: &str, series: &Series) -> String {
    let count = series.good.len();
    let end = series.step_s * float(count);
    if count == 0 || end <= 0.0 {
        return String::new();
    }
    let x = |at: f64| LEFT + (WIDTH - LEFT - RIGHT) * at / end;
    let highest = |values: &[f64]| values.iter().copied().fold(0.0, f64::max);
    let (peak, capacity) = (highest(&series.good), highest(&series.capacity));
    let cut = if capacity > 0.0 { CUT * capacity } else { f64::INFINITY };
    let shown = peak.min(cut).max(capacity * 1.1).max(1e-6);
    let (step, rejected_step) =
        (nice(shown, RATE_TICKS), nice(highest(&series.rejected).max(1.0), REJECTED_TICKS));
    let rates = Panel { top: LABEL, height: RATE_HEIGHT, most: rounded_up(shown, step) };
    let rejected = Panel {
        top: rates.bottom() + LABEL + 4.0,
        height: REJECTED_HEIGHT,
        most: rounded_up(highest(&series.rejected).max(1.0), rejected_step),
    };
    let mut svg = format!(
        "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{0}: achieved rate, capacity and 429s over time\">\n\
         <title>{0}: achieved rate, capacity and 429s over time</title>\n",
        escape(scenario)
    );
    panel(&mut svg, &rates, step, &format!("{unit} per second"));
    panel(&mut svg, &rejected, rejected_step, "429s per second");
    times(&mut svg, end, &rejected, &x);
    let points = |values: &[f64], panel: &Panel| {
        let middle = |index: usize| x((float(index) + 0.5) * series.step_s);
        values.iter().enumerate().map(|(index, value)| (middle(index), panel.y(*value))).collect::<Vec<_>>()
    };
    let good = points(&series.good, &rates);
    let area = [(LEFT, rates.bottom())].into_iter().chain(good.iter().copied());
    let area: Vec<_> = area.chain([(x(end), rates.bottom())]).collect();
    line(&mut svg, "area", &area);
    line(&mut svg, "good", &good);
    // On top, so that it stays visible where all capacity is used.
    line(&mut svg, "capacity", &steps(&series.capacity, series.step_s, &x, &rates));
    bars(&mut svg, series, &rejected, &x);
    legend(&mut svg, (peak > rates.most).then_some(peak));
    svg.push_str("</svg>\n");
    svg
}

/// The axis of a panel with its label.
fn panel(svg: &mut String, panel: &Panel, step: f64, label: &str) {
    text(svg, (LEFT, panel.top - 7.0), "label", label);
    let mut tick = 0.0;
    while tick <= panel.most * (1.0 + 1e-9) {
        let y = panel.y(tick);
        let class = if tick == 0.0 { "axis" } else { "grid" };
        let right = WIDTH - RIGHT;
        // Writing to a string cannot fail.
        let _ = writeln!(
            svg,
            "<line class=\"{class}\" x1=\"{LEFT}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>"
        );
        text(svg, (LEFT - 6.0, y + 3.5), "tick end", &short(tick));
        tick += step;
    }
}

/// The axis of time below the lower panel.
fn times(svg: &mut String, end: f64, below: &Panel, x: &impl Fn(f64) -> f64) {
    let step = [1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1_200.0, 3_600.0]
        .into_iter()
        .find(|step| end / step <= TIME_TICKS)
        .unwrap_or_else(|| nice(end, TIME_TICKS));
    let mut at = 0.0;
    while at <= end {
        let (x, y) = (x(at), below.bottom());
        let _ = writeln!(
            svg,
            "<line class=\"axis\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{y:.1}\" y2=\"{:.1}\"/>",
            y + 4.0
        );
        text(svg, (x, y + 16.0), "tick middle", &number(at));
        at += step;
    }
    text(svg, (f64::midpoint(LEFT, WIDTH - RIGHT), below.bottom() + 30.0), "tick middle", "time in seconds");
}

fn bars(svg: &mut String, series: &Series, panel: &Panel, x: &impl Fn(f64) -> f64) {
    let mut path = String::new();
    for (index, rejected) in series.rejected.iter().enumerate().filter(|(_, rejected)| **rejected > 0.0) {
        let (from, until) = (float(index) * series.step_s, float(index + 1) * series.step_s);
        let (left, right, top) = (x(from), x(until), panel.y(*rejected).min(panel.bottom() - 1.0));
        let _ = write!(path, "M{left:.1} {:.1}V{top:.1}H{right:.1}V{:.1}Z", panel.bottom(), panel.bottom());
    }
    if !path.is_empty() {
        let _ = writeln!(svg, "<path class=\"rejected\" d=\"{path}\"/>");
    }
}

/// The corners of a step function.
fn steps(values: &[f64], step_s: f64, x: &impl Fn(f64) -> f64, panel: &Panel) -> Vec<(f64, f64)> {
    let corners = values.iter().enumerate().flat_map(|(index, value)| {
        let y = panel.y(*value);
        [(x(float(index) * step_s), y), (x(float(index + 1) * step_s), y)]
    });
    // Skip corners on a straight line.
    let mut path: Vec<(f64, f64)> = Vec::new();
    for corner in corners {
        if let [.., before, last] = path[..]
            && (before.1 - last.1).abs() < 1e-9
            && (last.1 - corner.1).abs() < 1e-9
        {
            path.pop();
        }
        path.push(corner);
    }
    path
}

fn line(svg: &mut String, class: &str, points: &[(f64, f64)]) {
    let mut path = String::new();
    for (index, (x, y)) in points.iter().enumerate() {
        let _ = write!(path, "{}{x:.1} {y:.1}", if index == 0 { 'M' } else { 'L' });
    }
    let _ = writeln!(svg, "<path class=\"{class}\" d=\"{path}\"/>");
}

/// Names of the lines at the top right, with the peak if it is cut off.
fn legend(svg: &mut String, cut: Option<f64>) {
    let mut right = WIDTH - RIGHT;
    for (class, name, width) in [("capacity", "hidden capacity", 104.0), ("good", "achieved by auto", 112.0)]
    {
        text(svg, (right, LABEL - 7.0), "tick end", name);
        let (from, until, y) = (right - width, right - width + 14.0, LABEL - 10.5);
        let _ = writeln!(svg, "<path class=\"{class}\" d=\"M{from:.1} {y}H{until:.1}\"/>");
        right = from - 14.0;
    }
    if let Some(peak) = cut {
        text(svg, (right, LABEL - 7.0), "tick end", &format!("▲ peak {}/s", short(peak)));
    }
}

fn text(svg: &mut String, (x, y): (f64, f64), class: &str, text: &str) {
    let _ = writeln!(svg, "<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\">{}</text>", escape(text));
}

/// A step of 1, 2 or 5 times a power of ten, with at most `ticks` steps up to `most`.
fn nice(most: f64, ticks: f64) -> f64 {
    let power = 10_f64.powf((most / ticks).log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * power);
    steps.into_iter().find(|step| most / step <= ticks * (1.0 + 1e-9)).unwrap_or(10.0 * power)
}

/// Rounds up to a multiple of `step`, tolerating rounding errors.
fn rounded_up(value: f64, step: f64) -> f64 {
    (value / step - 1e-6).ceil() * step
}

/// A short number: `0.05`, `15.5`, `120`, `25k`.
fn short(value: f64) -> String {
    match value {
        v if v >= 10_000.0 => format!("{}k", number((v / 100.0).round() / 10.0)),
        v if v >= 100.0 => number(v.round()),
        v if v >= 10.0 => number((10.0 * v).round() / 10.0),
        v => number(v),
    }
}

#[expect(clippy::cast_precision_loss, reason = "points are few")]
const fn float(count: usize) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(good: &[f64], rejected: &[f64]) -> Series {
        let capacity = vec![50.0; good.len()];
        Series { step_s: 1.0, good: good.to_vec(), capacity, rejected: rejected.to_vec() }
    }

    #[test]
    fn plot_has_axes_lines_and_labels() {
        let svg = svg("R<50", "requests", &series(&[20.0, 40.0, 50.0], &[0.0, 3.0, 0.0]));
        let parts = [
            "R&lt;50: achieved rate",
            "requests per second",
            "429s per second",
            "time in seconds",
            "hidden capacity",
            "class=\"good\"",
            "class=\"capacity\"",
            "class=\"rejected\"",
        ];
        for part in parts {
            assert!(svg.contains(part), "{part}: {svg}");
        }
        assert!(!svg.contains("peak") && !svg.contains("NaN"), "{svg}");
    }

    #[test]
    fn plot_cuts_and_names_a_peak() {
        let svg = svg("x", "requests", &series(&[900.0, 50.0], &[0.0; 2]));
        assert!(svg.contains("▲ peak 900/s") && svg.contains(">100</text>"), "{svg}");
        assert!(!svg.contains("class=\"rejected\""), "{svg}");
    }

    #[test]
    fn plot_of_nothing_is_empty() {
        assert_eq!(svg("x", "requests", &Series::default()), "");
        assert!(!svg("x", "requests", &series(&[0.0; 5], &[0.0; 5])).contains("NaN"));
    }

    #[test]
    fn steps_of_an_axis_are_round_and_few() {
        for (most, ticks, step) in
            [(55.0, 4.0, 20.0), (0.22, 4.0, 0.1), (1.0, 2.0, 0.5), (5_500.0, 4.0, 2_000.0)]
        {
            assert!((nice(most, ticks) - step).abs() < 1e-9, "{most}: {}", nice(most, ticks));
        }
        assert_eq!([0.05, 15.526, 50.0, 1_234.5, 25_000.0].map(short), ["0.05", "15.5", "50", "1235", "25k"]);
    }
}
