//! The output of a verb: text for people, one JSON document for programs.
//!
//! Output is written once, at the end. A closed pipe (`tidegate … | head -1`) is not a failure: the operation
//! is done, and the exit code reports it.

use std::env;
use std::io::{self, IsTerminal as _, Write as _};
use std::process::ExitCode;

use comfy_table::{CellAlignment, ColumnConstraint, ContentArrangement, TableComponent, Width, presets};

use crate::codec::Json;
use crate::failure::{Exit, Failure};
use crate::format;

/// The format of the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    /// Text for people.
    Text {
        /// Whether stdout is a terminal that shows colours.
        is_coloured: bool,
    },
    /// JSON for programs.
    Json,
}

impl Format {
    /// Text for people, coloured if stdout shows colours.
    pub(crate) fn text() -> Self {
        Self::Text { is_coloured: io::stdout().is_terminal() && wants_colours() }
    }

    /// Whether stderr shows colours.
    pub(crate) fn is_coloured_on_stderr() -> bool {
        io::stderr().is_terminal() && wants_colours()
    }
}

/// Follows <https://no-color.org>: any non-empty value disables colours.
fn wants_colours() -> bool {
    let is_refused = env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    !is_refused && env::var_os("TERM").is_none_or(|term| term != "dumb")
}

/// Wraps text in an ANSI colour code.
pub(crate) fn paint(text: &str, colour: &str, is_coloured: bool) -> String {
    if is_coloured { format!("\x1b[{colour}m{text}\x1b[0m") } else { text.to_owned() }
}

/// The output of a verb, and its exit code.
#[derive(Debug)]
pub(crate) struct Output {
    parts: Vec<Part>,
    json: Json,
    exit: Exit,
}

#[derive(Debug)]
enum Part {
    Line(String),
    Table(Table),
    /// Raw bytes, independent of the format.
    Raw(Vec<u8>),
}

impl Output {
    /// Output with its JSON document; text is added by [`line`](Self::line) and [`table`](Self::table).
    pub(crate) const fn new(json: Json) -> Self {
        Self { parts: Vec::new(), json, exit: Exit::Done }
    }

    /// Output that is the same in every format.
    pub(crate) fn raw(bytes: Vec<u8>) -> Self {
        Self { parts: vec![Part::Raw(bytes)], json: Json::Null, exit: Exit::Done }
    }

    /// No output, only an exit code.
    pub(crate) fn silent(exit: Exit) -> Self {
        Self { exit, ..Self::raw(Vec::new()) }
    }

    /// Adds a line of text.
    pub(crate) fn line(mut self, line: impl Into<String>) -> Self {
        self.parts.push(Part::Line(line.into()));
        self
    }

    /// Adds a table to the text.
    pub(crate) fn table(mut self, table: Table) -> Self {
        self.parts.push(Part::Table(table));
        self
    }

    /// Sets an exit code other than `Done`.
    pub(crate) const fn exit(mut self, exit: Exit) -> Self {
        self.exit = exit;
        self
    }

    /// Prints it to stdout and returns the exit code.
    pub(crate) fn print(self, format: Format) -> ExitCode {
        let mut stdout = io::stdout().lock();
        let written = stdout.write_all(&self.bytes(format)).and_then(|()| stdout.flush());
        match written {
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
                let what = format!("the operation succeeded, but its output cannot be written: {error}");
                Failure::failed(what).print(format)
            }
            _ => self.exit.into(),
        }
    }

    fn bytes(&self, format: Format) -> Vec<u8> {
        if let [Part::Raw(bytes)] = &self.parts[..] {
            return bytes.clone();
        }
        let is_coloured = match format {
            Format::Json => return format!("{:#}\n", self.json).into_bytes(),
            Format::Text { is_coloured } => is_coloured,
        };
        let mut text = Vec::new();
        for part in &self.parts {
            match part {
                Part::Line(line) => text.extend_from_slice(line.as_bytes()),
                Part::Table(table) => text.extend_from_slice(table.text(is_coloured).as_bytes()),
                Part::Raw(bytes) => text.extend_from_slice(bytes),
            }
            text.push(b'\n');
        }
        text
    }
}

/// How a row is coloured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tint {
    Plain,
    Good,
    Changed,
    Bad,
}

impl Tint {
    const fn colour(self) -> Option<&'static str> {
        match self {
            Self::Plain => None,
            Self::Good => Some("32"),
            Self::Changed => Some("33"),
            Self::Bad => Some("31"),
        }
    }
}

/// The maximum width of a table, in columns. JSON has no such limit.
const WIDTH_MAX: u16 = 100;
/// The space between two columns.
const SPACE: u16 = 2;
/// Ends each row while a table is laid out. Cells have no control characters.
const ROW_END: char = '\u{1e}';

/// Rows under headings, at most 100 columns wide: cells beyond that continue on the next line.
#[derive(Debug)]
pub(crate) struct Table {
    headings: Vec<&'static str>,
    rows: Vec<(Tint, Vec<String>)>,
}

impl Table {
    /// Headings that begin with `>` are right-aligned, for numbers.
    pub(crate) fn new(headings: impl IntoIterator<Item = &'static str>) -> Self {
        Self { headings: headings.into_iter().collect(), rows: Vec::new() }
    }

    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.tinted(Tint::Plain, cells);
    }

    pub(crate) fn tinted(&mut self, tint: Tint, cells: impl IntoIterator<Item = String>) {
        // Names hold no control characters, but free text may.
        let cells = cells.into_iter().map(|cell| format::escape(&cell));
        self.rows.push((tint, cells.collect()));
    }

    /// The length of the longest word of each column.
    fn longest_words(&self) -> Vec<u16> {
        let headings = self.headings.iter().map(|heading| heading.trim_start_matches('>'));
        let mut longest: Vec<u16> = headings.map(longest_word).collect();
        for (_, cells) in &self.rows {
            for (longest, cell) in longest.iter_mut().zip(cells) {
                *longest = longest_word(cell).max(*longest);
            }
        }
        longest
    }

    fn text(&self, is_coloured: bool) -> String {
        let mut table = comfy_table::Table::new();
        table.load_preset(presets::NOTHING);
        table.set_content_arrangement(ContentArrangement::Dynamic);
        table.set_style(TableComponent::HorizontalLines, ROW_END);
        table.set_style(TableComponent::HeaderLines, ROW_END);
        table.set_header(self.headings.iter().map(|heading| heading.trim_start_matches('>')));
        for (_, cells) in &self.rows {
            table.add_row(cells);
        }
        let widths = shrink(table.column_max_content_widths(), &self.longest_words(), WIDTH_MAX);
        for ((column, heading), width) in table.column_iter_mut().zip(&self.headings).zip(widths) {
            let align = if heading.starts_with('>') { CellAlignment::Right } else { CellAlignment::Left };
            column.set_cell_alignment(align);
            column.set_padding((0, SPACE));
            column.set_constraint(ColumnConstraint::Absolute(Width::Fixed(width + SPACE)));
        }
        let tints = self.rows.iter().map(|(tint, _)| tint.colour());
        let mut colours = [Some("1")].into_iter().chain(tints);
        let mut colour = colours.next().flatten();
        let mut lines = Vec::new();
        for line in table.lines() {
            if line.contains(ROW_END) {
                colour = colours.next().flatten();
                continue;
            }
            let line = line.trim_end();
            lines.push(colour.map_or_else(|| line.to_owned(), |colour| paint(line, colour, is_coloured)));
        }
        lines.join("\n")
    }
}

fn longest_word(cell: &str) -> u16 {
    let longest = cell.split(' ').map(|word| word.chars().count()).max();
    u16::try_from(longest.unwrap_or(0)).unwrap_or(u16::MAX)
}

/// The widths of columns that fit into `width_max` with the space between them. The widest ones shrink first,
/// and words are broken only if whole ones do not fit.
fn shrink(mut widths: Vec<u16>, words: &[u16], width_max: u16) -> Vec<u16> {
    for least in [words, &vec![1; widths.len()]] {
        let total = |widths: &[u16]| widths.iter().map(|width| u32::from(width + SPACE)).sum::<u32>();
        while total(&widths) > u32::from(width_max + SPACE) {
            let columns = widths.iter_mut().zip(least).filter(|(width, least)| **width > **least);
            let Some((widest, _)) = columns.max_by_key(|(width, _)| **width) else { break };
            *widest -= 1;
        }
    }
    widths
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widest_columns_shrink_first() {
        let words = [5, 20, 9];
        assert_eq!(shrink(vec![5, 20, 30], &words, 100), [5, 20, 30], "it fits");
        assert_eq!(shrink(vec![5, 20, 71], &words, 100), [5, 20, 71], "it just fits");
        assert_eq!(shrink(vec![5, 60, 90], &words, 100), [5, 46, 45]);
        assert_eq!(shrink(vec![5, 20, 30], &words, 40), [5, 20, 11], "words stay whole");
        assert_eq!(shrink(vec![5, 20, 30], &words, 30), [5, 12, 9], "if they can");
        assert_eq!(shrink(vec![u16::MAX - SPACE; 60], &[1; 60], 100), [1; 60]);
    }

    #[test]
    fn table_fits_100_columns_and_loses_nothing() {
        let mut table = Table::new(["SCOPE", ">UNITS", "BEFORE", "AFTER"]);
        let (name, policy) = ("n".repeat(256), "rpm:60/min tpm:100k/min:150k ".repeat(4));
        table.tinted(Tint::Bad, [name.clone(), "7".to_owned(), policy.clone(), policy.clone()]);
        table.row(["a", "8", "-", "-"].map(str::to_owned));
        let text = table.text(false);
        assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
        assert_eq!(text.matches('n').count(), name.len() + 8 * "min".matches('n').count() * 2, "{text}");
        assert_eq!(text.matches("tpm:100k/min:150k").count(), 8, "words stay whole: {text}");
        assert!(text.lines().last().is_some_and(|line| line.starts_with("a ")), "{text}");
        let coloured = table.text(true);
        let red = coloured.lines().filter(|line| line.starts_with("\x1b[31m")).count();
        assert_eq!(red, coloured.lines().count() - 2, "each line of a row has its colour: {coloured}");
    }

    #[test]
    fn table_has_optional_colours() {
        let mut table = Table::new(["LIMIT", ">AVAILABLE"]);
        table.row(["rpm".to_owned(), "60".to_owned()]);
        table.tinted(Tint::Bad, ["a long\nname".to_owned(), "5".to_owned()]);
        assert_eq!(
            table.text(false),
            "LIMIT         AVAILABLE\nrpm                  60\na long\\nname          5"
        );
        let coloured = table.text(true);
        assert!(coloured.starts_with("\x1b[1mLIMIT         AVAILABLE\x1b[0m\nrpm"), "{coloured:?}");
        assert!(coloured.ends_with("\x1b[31ma long\\nname          5\x1b[0m"), "{coloured:?}");
    }

    #[test]
    fn output_is_one_json_document_or_text() {
        let output = Output::new(Json::from(7)).line("seven");
        assert_eq!(output.bytes(Format::Json), b"7\n");
        assert_eq!(output.bytes(Format::Text { is_coloured: true }), b"seven\n");
    }
}
