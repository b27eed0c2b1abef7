//! Renders a chart as text: one block chart per series, each with its own scale.

use tidegate::Stamp;

use super::chart::{Chart, Panel, Series};
use crate::format;

/// Rows of blocks.
const ROWS: usize = 5;
/// Width of the scale at the left.
const SCALE: usize = 8;
/// Maximum width of a column.
const COLUMN_MAX: usize = 6;
/// Blocks from zero to eight eighths.
const BLOCKS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Renders the chart with at most `width` columns per line.
pub(crate) fn draw(chart: &Chart, width: usize) -> Vec<String> {
    let room = width.saturating_sub(SCALE + 1).max(1);
    let per_column = chart.starts.len().div_ceil(room).max(1);
    let columns = chart.starts.len().div_ceil(per_column).max(1);
    let wide = (room / columns).clamp(1, COLUMN_MAX);
    let each = if per_column == 1 { String::new() } else { format!(", {per_column} per column") };
    let mut lines = vec![cut(format!("usage of {} by {}{each}, UTC", chart.owner, chart.each()), width)];
    for panel in &chart.panels {
        for series in &panel.series {
            lines.push(String::new());
            lines.push(cut(heading(series, panel, chart), width));
            lines.extend(blocks(series, per_column, wide));
            lines.push(axis(&chart.starts, columns * wide, room));
        }
        if panel.left_out > 0 {
            lines.push(format!("and {} more of {}", panel.left_out, panel.limit));
        }
    }
    if chart.left_out > 0 {
        lines.push(format!("and {} more limits", chart.left_out));
    }
    lines
}

fn heading(series: &Series, panel: &Panel, chart: &Chart) -> String {
    let most = series.most();
    let when = series.units.iter().position(|units| *units == most).and_then(|at| chart.starts.get(at));
    let when = when.map(|start| format!(" at {}", minute(*start))).unwrap_or_default();
    let total = series.total();
    let limits: Vec<_> = panel.refills.iter().map(|units| format::number(*units)).collect();
    let limits = if limits.is_empty() { String::new() } else { format!("; limit {}", limits.join(", ")) };
    format!(
        "{} of {}: {} in total, at most {}{when}{limits}",
        series.limit,
        series.name,
        format::number(total),
        format::number(most)
    )
}

/// The rows of blocks from top to bottom, each after its part of the scale.
fn blocks(series: &Series, per_column: usize, wide: usize) -> Vec<String> {
    let sum = |units: &[u64]| units.iter().fold(0_u64, |sum, units| sum.saturating_add(*units));
    let columns: Vec<u64> = series.units.chunks(per_column).map(sum).collect();
    let most = columns.iter().copied().max().unwrap_or_default().max(1);
    let eighths: Vec<usize> = columns
        .iter()
        .map(|units| {
            // Rounded up, so that any usage is visible.
            let eighths = (u128::from(*units) * (ROWS as u128 * 8)).div_ceil(u128::from(most));
            usize::try_from(eighths).unwrap_or(ROWS * 8)
        })
        .collect();
    let row = |row: usize| {
        let label = match row {
            0 => format::number(most),
            _ if row == ROWS - 1 => "0".to_owned(),
            _ => String::new(),
        };
        let block = |eighths: &usize| {
            let left = eighths.saturating_sub((ROWS - 1 - row) * 8).min(8);
            BLOCKS[left].to_string().repeat(wide)
        };
        let blocks: String = eighths.iter().map(block).collect();
        format!("{label:>SCALE$}│{}", blocks.trim_end())
    };
    (0..ROWS).map(row).collect()
}

/// The axis with the first time, and the last if there is space.
fn axis(starts: &[Stamp], width: usize, room: usize) -> String {
    let (Some(first), Some(last)) = (starts.first(), starts.last()) else { return String::new() };
    let labels = [minute(*first), minute(*last)];
    let space = width.saturating_sub(labels[0].len() + labels[1].len());
    let text = if starts.len() == 1 {
        labels[0].clone()
    } else if space >= 2 {
        format!("{}{}{}", labels[0], " ".repeat(space), labels[1])
    } else if labels[0].len() + labels[1].len() + 3 <= room {
        format!("{} – {}", labels[0], labels[1])
    } else {
        labels[0].clone()
    };
    format!("{:SCALE$}└{text}", "")
}

/// A time to the minute.
fn minute(at: Stamp) -> String {
    let text = at.to_string();
    text.get(..16).map_or(text.clone(), |text| text.replace('T', " "))
}

fn cut(text: String, width: usize) -> String {
    if text.chars().count() <= width {
        return text;
    }
    text.chars().take(width.saturating_sub(1)).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use tidegate::Window;

    use super::super::chart::tests::{line, query};
    use super::*;

    fn chart() -> Chart {
        let hour = |resource, limit, hour: u64, units| {
            line(
                resource,
                limit,
                Window::Hour,
                &format!("2026-01-{:02}T{:02}:00:00Z", 30 + hour / 24, hour % 24),
                units,
            )
        };
        let lines: Vec<_> = (0..12)
            .map(|at| hour("gpt-4", "tpm", 20 + at, (at * at) * 1_000))
            .chain([hour("images", "rpm", 22, 1), hour("images", "rpm", 25, 8)])
            .collect();
        Chart::new(&query(Window::Hour), &lines).unwrap().unwrap()
    }

    #[test]
    fn text_chart_at_80_columns() {
        let text = draw(&chart(), 80).join("\n");
        assert_eq!(text, include_str!("text-80.txt").trim_end_matches('\n'), "\n{text}\n");
    }

    #[test]
    fn excess_windows_are_summed_per_column() {
        let lines: Vec<_> = (0..100_u64)
            .map(|at| Stamp::from_secs(1_769_000_400 + at * 3_600).to_string())
            .map(|start| line("gpt", "rpm", Window::Hour, &start, 1))
            .collect();
        let chart = Chart::new(&query(Window::Hour), &lines).unwrap().unwrap();
        let text = draw(&chart, 40);
        assert_eq!(text[0], "usage of entity acme by hour, 4 per col…");
        assert!(text.iter().all(|line| line.chars().count() <= 40), "{text:#?}");
        assert_eq!(text[3].trim_start(), format!("4│{}", "█".repeat(25)));
    }
}
