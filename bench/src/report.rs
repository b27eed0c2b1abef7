//! Rows of results: a table for people, JSON for programs.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use comfy_table::{CellAlignment, ContentArrangement, Table, presets::UTF8_BORDERS_ONLY};
use serde::Serialize;

/// One comparison.
#[derive(Debug, Serialize)]
pub struct Row {
    /// The name, which is stable across versions.
    pub name: String,
    /// Our side.
    pub ours: f64,
    /// The peer.
    pub peer: f64,
    /// Ours divided by the peer's.
    pub ratio: f64,
    /// The bound of the ratio: upper, or lower if `is_at_least`. A row without one is only reported.
    pub target: Option<f64>,
    /// Whether the target is met.
    pub met: Option<bool>,
    /// Whether more is better.
    pub is_at_least: bool,
    /// The unit of both sides.
    pub unit: &'static str,
    /// What is compared.
    pub what: String,
}

impl Row {
    /// A comparison where less is better.
    pub fn new(
        name: &str,
        (ours, peer): (f64, f64),
        target: Option<f64>,
        unit: &'static str,
        what: &str,
    ) -> Self {
        let ratio = ours / peer;
        let met = target.map(|target| ratio <= target);
        let (name, what) = (name.to_owned(), what.to_owned());
        Self { name, ours, peer, ratio, target, met, is_at_least: false, unit, what }
    }

    /// A comparison where more is better.
    pub fn at_least(
        name: &str,
        sides: (f64, f64),
        target: Option<f64>,
        unit: &'static str,
        what: &str,
    ) -> Self {
        let row = Self::new(name, sides, target, unit, what);
        Self { met: target.map(|target| row.ratio >= target), is_at_least: true, ..row }
    }
}

/// A table for people, at most 100 columns wide.
pub fn print(rows: &[Row]) {
    let mut table = Table::new();
    table.load_preset(UTF8_BORDERS_ONLY).set_content_arrangement(ContentArrangement::Dynamic).set_width(100);
    table.set_header(["name", "ours", "peer", "unit", "ratio", "target", "met", "what"]);
    for row in rows {
        let met = match row.met {
            Some(true) => "yes",
            Some(false) => "NO",
            None => "",
        };
        table.add_row([
            row.name.clone(),
            number(row.ours),
            number(row.peer),
            row.unit.to_owned(),
            format!("{:.3}", row.ratio),
            row.target.map_or_else(String::new, |target| {
                format!("{} {target}", if row.is_at_least { "≥" } else { "≤" })
            }),
            met.to_owned(),
            row.what.clone(),
        ]);
    }
    for index in [1, 2, 4, 5] {
        if let Some(column) = table.column_mut(index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    println!("{table}");
}

/// Small numbers are shown with more decimals.
fn number(value: f64) -> String {
    if value.abs() < 10.0 { format!("{value:.3}") } else { format!("{value:.1}") }
}

/// Writes the rows as JSON.
///
/// # Errors
/// If the file cannot be written.
pub fn write(rows: &[Row], path: &Path) -> Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)
            .with_context(|| format!("cannot create the folder {}", folder.display()))?;
    }
    let json = serde_json::to_string_pretty(rows)?;
    fs::write(path, json + "\n").with_context(|| format!("cannot write {}", path.display()))?;
    println!("written to {}", path.display());
    Ok(())
}
