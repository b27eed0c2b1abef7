//! Rows: a table for people, JSON for programs.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use comfy_table::{CellAlignment, Table, presets::UTF8_BORDERS_ONLY};
use serde::Serialize;

/// One comparison.
#[derive(Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) name: String,
    pub(crate) ours: f64,
    pub(crate) peer: f64,
    pub(crate) ratio: f64,
    /// The ratio is to be at most this; without one the row is told and not judged.
    pub(crate) target: Option<f64>,
    pub(crate) met: Option<bool>,
    pub(crate) unit: &'static str,
    pub(crate) what: String,
}

impl Row {
    pub(crate) fn new(
        name: &str,
        (ours, peer): (f64, f64),
        target: Option<f64>,
        unit: &'static str,
        what: &str,
    ) -> Self {
        let ratio = ours / peer;
        let met = target.map(|target| ratio <= target);
        Self { name: name.to_owned(), ours, peer, ratio, target, met, unit, what: what.to_owned() }
    }
}

pub(crate) fn print(rows: &[Row]) {
    let mut table = Table::new();
    table.load_preset(UTF8_BORDERS_ONLY);
    table.set_header(["name", "ours", "peer", "unit", "ratio", "target", "met", "what"]);
    for row in rows {
        let met = match row.met {
            Some(true) => "yes",
            Some(false) => "NO",
            None => "",
        };
        table.add_row([
            row.name.clone(),
            format!("{:.1}", row.ours),
            format!("{:.1}", row.peer),
            row.unit.to_owned(),
            format!("{:.2}", row.ratio),
            row.target.map_or_else(String::new, |target| format!("≤ {target:.1}")),
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

pub(crate) fn write(rows: &[Row], path: &Path) -> Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).with_context(|| format!("cannot make the folder {}", folder.display()))?;
    }
    let json = serde_json::to_string_pretty(rows)?;
    fs::write(path, json + "\n").with_context(|| format!("cannot write {}", path.display()))?;
    println!("written to {}", path.display());
    Ok(())
}
