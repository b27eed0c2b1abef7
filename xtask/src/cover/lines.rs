//! Counts covered lines from LLVM's line records.
//!
//! Reads the records (`lcov`), not LLVM's summary: a crate is compiled once for its unit tests and once for
//! its integration tests, and the summary takes the better of the two, not their union. Unit tests are left
//! out, because they would hide untested code.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Result, ensure};

/// A crate to measure.
#[derive(Debug, Clone, Copy)]
pub(super) struct Crate {
    pub(super) name: &'static str,
    /// Relative to the root, with a trailing slash.
    pub(super) folder: &'static str,
    /// The share of lines that must be covered, in thousandths.
    pub(super) floor_permille: u64,
}

/// For each file, each line of code and whether a test covers it.
#[derive(Debug, Default)]
pub(super) struct Lines {
    files: BTreeMap<String, BTreeMap<usize, bool>>,
}

impl Lines {
    /// Reads the records of files under `root`; `text` returns a file's content, to find its unit tests.
    pub(super) fn read(records: &str, root: &Path, text: impl Fn(&Path) -> Option<String>) -> Self {
        let mut files: BTreeMap<String, BTreeMap<usize, bool>> = BTreeMap::new();
        let mut current = None;
        for record in records.lines() {
            if let Some(path) = record.strip_prefix("SF:").map(Path::new) {
                current = path.strip_prefix(root).ok().map(|short| {
                    let end = text(path).map_or(usize::MAX, |text| tests_start(short, &text));
                    (short.to_string_lossy().into_owned(), end)
                });
            } else if let (Some((file, end)), Some((line, reached))) = (&current, line_record(record))
                && line < *end
            {
                *files.entry(file.clone()).or_default().entry(line).or_default() |= reached;
            }
        }
        Self { files }
    }

    /// Files and totals of each crate, with the missed lines.
    pub(super) fn table(&self, crates: &[Crate]) -> String {
        let width = self.files.keys().map(String::len).max().unwrap_or_default().max(24);
        let mut table = String::new();
        for measured in crates {
            let _ = writeln!(
                table,
                "\n{:<width$} {:>7} {:>7} {:>8}  missed",
                measured.name, "reached", "lines", "percent"
            );
            for (file, lines) in self.files_of(measured) {
                let count = Count::of(lines.values());
                let _ = writeln!(table, "{}", row(file, width, count, &gaps(lines)));
            }
            let _ = writeln!(table, "{}", row("total", width, self.total(measured), ""));
        }
        table
    }

    /// Fails with the numbers if a crate is below its floor.
    pub(super) fn check_floors(&self, crates: &[Crate]) -> Result<()> {
        for measured in crates {
            let floor = measured.floor_permille;
            let count = self.total(measured);
            ensure!(count.lines > 0, "no line of {} was measured", measured.name);
            ensure!(
                count.permille() >= floor,
                "the tests of {} reach {} of {} lines, {} %; at least {} % are required",
                measured.name,
                count.reached,
                count.lines,
                percent(count.permille()),
                percent(floor),
            );
        }
        Ok(())
    }

    fn files_of(&self, measured: &Crate) -> impl Iterator<Item = (&String, &BTreeMap<usize, bool>)> {
        self.files.iter().filter(|(file, _)| file.starts_with(measured.folder))
    }

    fn total(&self, measured: &Crate) -> Count {
        Count::of(self.files_of(measured).flat_map(|(_, lines)| lines.values()))
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct Count {
    reached: u64,
    lines: u64,
}

impl Count {
    fn of<'a>(lines: impl Iterator<Item = &'a bool>) -> Self {
        lines.fold(Self::default(), |count, reached| Self {
            reached: count.reached + u64::from(*reached),
            lines: count.lines + 1,
        })
    }

    /// Rounded down, so that 100 % means every line.
    fn permille(self) -> u64 {
        (self.reached * 1000).checked_div(self.lines).unwrap_or(1000)
    }
}

fn row(name: &str, width: usize, count: Count, gaps: &str) -> String {
    let percent = percent(count.permille());
    let row = format!("{name:<width$} {:>7} {:>7} {percent:>8}  {gaps}", count.reached, count.lines);
    row.trim_end().to_owned()
}

fn percent(permille: u64) -> String {
    format!("{}.{}", permille / 10, permille % 10)
}

/// Missed lines as ranges, the first few. Ranges join across lines without code.
fn gaps(lines: &BTreeMap<usize, bool>) -> String {
    const SHOWN_MAX: usize = 6;
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    let mut is_open = false;
    for (line, reached) in lines {
        match ranges.last_mut().filter(|_| is_open) {
            Some((_, end)) if !reached => *end = *line,
            None if !reached => ranges.push((*line, *line)),
            _ => {}
        }
        is_open = !reached;
    }
    let shown = ranges.iter().take(SHOWN_MAX);
    let mut shown: Vec<_> = shown
        .map(|(start, end)| if start == end { start.to_string() } else { format!("{start}-{end}") })
        .collect();
    if ranges.len() > SHOWN_MAX {
        shown.push(format!("and {} more", ranges.len() - SHOWN_MAX));
    }
    shown.join(", ")
}

/// `DA:line,count`
fn line_record(record: &str) -> Option<(usize, bool)> {
    let (line, count) = record.strip_prefix("DA:")?.split_once(',')?;
    Some((line.parse().ok()?, count != "0"))
}

/// The line on which the unit tests of a file begin. They come last: clippy checks that.
fn tests_start(path: &Path, text: &str) -> usize {
    if path.file_stem().is_some_and(|name| name == "tests" || name.to_string_lossy().ends_with("_tests")) {
        return 0;
    }
    let mut pairs = text.lines().zip(text.lines().skip(1)).zip(1..);
    // A module in its own file (`mod tests;`) ends on its line, and code may follow.
    let begins =
        |line: &str, next: &str| line == "#[cfg(test)]" && next.starts_with("mod ") && next.ends_with('{');
    pairs.find(|((line, next), _)| begins(line, next)).map_or(usize::MAX, |(_, number)| number)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEASURED: Crate = Crate { name: "core", folder: "core/src/", floor_permille: 950 };

    /// Lines 1 to 5 are code, of which `missed` are not covered; the unit tests begin on line 6.
    fn lines(missed: &[usize]) -> Lines {
        let mut records = "SF:/elsewhere/std.rs\nDA:1,0\nend_of_record\nSF:/r/core/src/a.rs\n".to_owned();
        for line in 1..=8 {
            let _ = writeln!(records, "DA:{line},{}", u8::from(!missed.contains(&line)));
        }
        let text = "1\n2\n3\n4\n5\n#[cfg(test)]\nmod tests {\n}\n";
        Lines::read(&records, Path::new("/r"), |_| Some(text.to_owned()))
    }

    #[test]
    fn files_elsewhere_and_unit_tests_do_not_count() {
        let count = lines(&[2]).total(&MEASURED);
        assert_eq!((count.reached, count.lines), (4, 5));
    }

    #[test]
    fn test_module_in_its_own_file_ends_on_its_line() {
        assert_eq!(
            tests_start(Path::new("src/lib.rs"), "#[cfg(test)]\nmod bucket_tests;\nfn code() {}"),
            usize::MAX
        );
        assert_eq!(tests_start(Path::new("src/bucket_tests.rs"), "fn helper() {}"), 0);
    }

    #[test]
    fn line_covered_by_either_build_is_covered() {
        let records =
            "SF:/r/core/src/a.rs\nDA:1,0\nDA:2,3\nend_of_record\nSF:/r/core/src/a.rs\nDA:1,4\nDA:2,0\n";
        let count = Lines::read(records, Path::new("/r"), |_| None).total(&MEASURED);
        assert_eq!((count.reached, count.lines), (2, 2));
    }

    #[test]
    fn table_shows_each_file_its_gaps_and_the_total() {
        let table = lines(&[2, 3, 5]).table(&[MEASURED]);
        let rows: Vec<Vec<_>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(rows[2], ["core/src/a.rs", "2", "5", "40.0", "2-3,", "5"]);
        assert_eq!(rows[3], ["total", "2", "5", "40.0"]);
    }

    #[test]
    fn crate_below_its_floor_fails_with_the_numbers() {
        let error = lines(&[2]).check_floors(&[MEASURED]).unwrap_err();
        let sentence = "the tests of core reach 4 of 5 lines, 80.0 %; at least 95.0 % are required";
        assert_eq!(error.to_string(), sentence);
        lines(&[]).check_floors(&[MEASURED]).unwrap();
        Lines::default().check_floors(&[MEASURED]).unwrap_err();
    }
}
