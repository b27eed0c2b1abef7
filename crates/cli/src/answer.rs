//! What a verb answers: text for people, one JSON document for programs.
//!
//! Everything is written at once, at the end. A reader that has gone away (`tidegate … | head -1`) is no failure: what was
//! asked for is done, and the exit code says so.

use std::env;
use std::io::{self, IsTerminal as _, Write as _};
use std::process::ExitCode;

use comfy_table::{CellAlignment, ContentArrangement, presets};

use crate::codec::Json;
use crate::failure::{Exit, Failure};

/// For whom an answer is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    /// People.
    Text {
        /// On a terminal that shows colours.
        is_coloured: bool,
    },
    /// Programs.
    Json,
}

impl Format {
    /// For people, in colours where stdout shows them.
    pub(crate) fn text() -> Self {
        Self::Text { is_coloured: io::stdout().is_terminal() && wants_colours() }
    }

    /// Whether stderr shows colours.
    pub(crate) fn is_coloured_on_stderr() -> bool {
        io::stderr().is_terminal() && wants_colours()
    }
}

/// As <https://no-color.org> has it: any value but an empty one.
fn wants_colours() -> bool {
    let is_refused = env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    !is_refused && env::var_os("TERM").is_none_or(|term| term != "dumb")
}

/// Text in a colour, by its number in the terminal's language.
pub(crate) fn paint(text: &str, colour: &str, is_coloured: bool) -> String {
    if is_coloured { format!("\x1b[{colour}m{text}\x1b[0m") } else { text.to_owned() }
}

/// An answer.
#[derive(Debug)]
pub(crate) struct Answer {
    parts: Vec<Part>,
    json: Json,
    exit: Exit,
}

#[derive(Debug)]
enum Part {
    Line(String),
    Table(Table),
    /// As it is, whoever reads it.
    Raw(Vec<u8>),
}

impl Answer {
    /// An answer to programs; people have yet to be told.
    pub(crate) const fn new(json: Json) -> Self {
        Self { parts: Vec::new(), json, exit: Exit::Done }
    }

    /// An answer that is the same for everybody.
    pub(crate) fn raw(bytes: Vec<u8>) -> Self {
        Self { parts: vec![Part::Raw(bytes)], json: Json::Null, exit: Exit::Done }
    }

    /// Nothing to say, but how it ended.
    pub(crate) fn silent(exit: Exit) -> Self {
        Self { exit, ..Self::raw(Vec::new()) }
    }

    /// A line for people.
    pub(crate) fn line(mut self, line: impl Into<String>) -> Self {
        self.parts.push(Part::Line(line.into()));
        self
    }

    /// A table for people.
    pub(crate) fn table(mut self, table: Table) -> Self {
        self.parts.push(Part::Table(table));
        self
    }

    /// Ends otherwise than done.
    pub(crate) const fn exit(mut self, exit: Exit) -> Self {
        self.exit = exit;
        self
    }

    /// Writes it to stdout.
    pub(crate) fn tell(self, format: Format) -> ExitCode {
        let mut stdout = io::stdout().lock();
        let written = stdout.write_all(&self.bytes(format)).and_then(|()| stdout.flush());
        match written {
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
                let what = format!("it is done, and the answer cannot be written: {error}");
                Failure::failed(what).tell(format)
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

/// How a row looks where there are colours.
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

/// Rows under headings. Each row is one line, however long: a terminal wraps it, and `grep` finds all of it.
#[derive(Debug)]
pub(crate) struct Table {
    headings: Vec<&'static str>,
    rows: Vec<(Tint, Vec<String>)>,
}

impl Table {
    /// A heading that begins with `>` has numbers below it.
    pub(crate) fn new(headings: impl IntoIterator<Item = &'static str>) -> Self {
        Self { headings: headings.into_iter().collect(), rows: Vec::new() }
    }

    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.tinted(Tint::Plain, cells);
    }

    pub(crate) fn tinted(&mut self, tint: Tint, cells: impl IntoIterator<Item = String>) {
        // No name holds a control character, but texts for people may.
        let cells = cells.into_iter().map(|cell| crate::words::shown(&cell));
        self.rows.push((tint, cells.collect()));
    }

    fn text(&self, is_coloured: bool) -> String {
        let mut table = comfy_table::Table::new();
        table.load_preset(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
        table.set_header(self.headings.iter().map(|heading| heading.trim_start_matches('>')));
        for (_, cells) in &self.rows {
            table.add_row(cells);
        }
        for (column, heading) in table.column_iter_mut().zip(&self.headings) {
            let align = if heading.starts_with('>') { CellAlignment::Right } else { CellAlignment::Left };
            column.set_cell_alignment(align);
            column.set_padding((0, 2));
        }
        let tints = self.rows.iter().map(|(tint, _)| tint.colour());
        let colours = [Some("1")].into_iter().chain(tints);
        let painted = |(line, colour): (String, Option<&str>)| {
            let line = line.trim_end();
            colour.map_or_else(|| line.to_owned(), |colour| paint(line, colour, is_coloured))
        };
        table.lines().zip(colours).map(painted).collect::<Vec<_>>().join("\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_a_line_for_each_row_in_colours_only_where_they_are_shown() {
        let mut table = Table::new(["LIMIT", ">THERE"]);
        table.row(["rpm".to_owned(), "60".to_owned()]);
        table.tinted(Tint::Bad, ["a long\nname".to_owned(), "5".to_owned()]);
        assert_eq!(table.text(false), "LIMIT         THERE\nrpm              60\na long\\nname      5");
        let coloured = table.text(true);
        assert!(coloured.starts_with("\x1b[1mLIMIT         THERE\x1b[0m\nrpm"), "{coloured:?}");
        assert!(coloured.ends_with("\x1b[31ma long\\nname      5\x1b[0m"), "{coloured:?}");
    }

    #[test]
    fn an_answer_is_one_json_document_or_text() {
        let answer = Answer::new(Json::from(7)).line("seven");
        assert_eq!(answer.bytes(Format::Json), b"7\n");
        assert_eq!(answer.bytes(Format::Text { is_coloured: true }), b"seven\n");
    }
}
