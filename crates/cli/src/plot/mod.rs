//! `tidegate usage plot`: usage as charts, in the terminal or as an SVG.
//!
//! `lines of usage → Chart → text or SVG`: what is drawn is decided in [`chart`], and the two that draw it are pure.

mod chart;
mod svg;
mod text;

use std::ffi::OsString;
use std::fs;
use std::io::{self, IsTerminal as _};
use std::path::{Path, PathBuf};

use tidegate::{LimitName, Paging, Usage, UsageOf, UsageQuery};

use crate::answer::Answer;
use crate::backend::Backend;
use crate::codec;
use crate::failure::Failure;
use crate::words::shown;
use chart::Chart;
pub(crate) use chart::Series;

/// Lines of usage that are read: more would be no chart.
const LINES_MAX: usize = 200_000;
/// The most that a page holds.
const PAGE_MAX: u32 = 1_000;
/// As wide as text is where nobody says.
const WIDTH: u16 = 80;

/// How to draw.
#[derive(Debug, clap::Args)]
pub(crate) struct PlotArgs {
    /// Only this limit
    #[arg(long, value_name = "NAME", value_parser = limit)]
    limit: Option<LimitName>,
    /// Write an SVG to this file, whose name ends in .svg
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Columns to draw on, from 40 to 500 [default: as wide as the terminal; 80 without one]
    #[arg(long, value_name = "COLUMNS", value_parser = clap::value_parser!(u16).range(40..=500))]
    width: Option<u16>,
}

fn limit(text: &str) -> Result<LimitName, String> {
    LimitName::new(text).map_err(|error| error.to_string())
}

/// Draws usage.
pub(crate) async fn run(
    backend: &impl Backend,
    query: &UsageQuery,
    args: PlotArgs,
) -> Result<Answer, Failure> {
    let out = args.out.map(checked).transpose()?;
    let mut lines = read(backend, query).await?;
    lines.retain(|line| args.limit.as_ref().is_none_or(|limit| line.limit == *limit));
    let Some(chart) = Chart::new(query, &lines)? else {
        let words = if out.is_some() { "no usage: nothing was written" } else { "no usage" };
        return Ok(Answer::new(json(query, None)).line(words));
    };
    let answer = Answer::new(json(query, Some(&chart)));
    if let Some(out) = out {
        let failed = |error: io::Error| {
            Failure::failed(format!("the file `{}` cannot be written: {error}", out.display()))
                .next("name another file with --out")
        };
        write(&out, &svg::draw(&chart)).map_err(failed)?;
        return Ok(answer.line(format!("written to {}", shown(&out.display().to_string()))));
    }
    let width = args.width.unwrap_or_else(width);
    Ok(text::draw(&chart, width.into()).into_iter().fold(answer, Answer::line))
}

/// The chart for programs, with how much of the usage is not in it.
fn json(query: &UsageQuery, chart: Option<&Chart>) -> codec::Json {
    let (starts, series) = chart.map_or((&[][..], Vec::new()), |chart| (&chart.starts, chart.all_series()));
    let mut json = codec::chart(query.window, starts, &series);
    json["left_out"]["limits"] = chart.map_or(0, |chart| chart.left_out).into();
    json["left_out"]["series"] = chart.map_or(0, Chart::series_left_out).into();
    json
}

/// Writes a file whole: whoever reads it sees the one before or this one. What is there and no file is written as it is.
pub(crate) fn write(out: &Path, text: &str) -> io::Result<()> {
    let is_other = fs::symlink_metadata(out).is_ok_and(|there| !there.is_file());
    let Some(name) = out.file_name().filter(|_| !is_other) else { return fs::write(out, text) };
    let mut part = OsString::from(".");
    part.push(name);
    part.push(format!(".{}.part", std::process::id()));
    let part = out.with_file_name(part);
    let written = fs::write(&part, text).and_then(|()| fs::rename(&part, out));
    if written.is_err() {
        // That it could not be written is what is told.
        drop(fs::remove_file(&part));
    }
    written
}

/// A file that can be written.
fn checked(out: PathBuf) -> Result<PathBuf, Failure> {
    let is_svg = out.extension().is_some_and(|kind| kind.eq_ignore_ascii_case("svg"));
    if is_svg {
        return Ok(out);
    }
    let name = shown(&out.display().to_string());
    Err(Failure::usage(format!("--out is `{name}`, and only .svg can be written"))
        .next("such as --out usage.svg"))
}

/// As wide as the terminal is.
fn width() -> u16 {
    let stdout = io::stdout();
    let size = stdout.is_terminal().then(|| rustix::termios::tcgetwinsize(&stdout).ok()).flatten();
    columns(size.map(|size| size.ws_col))
}

/// A terminal that says that it has no columns does not know.
fn columns(told: Option<u16>) -> u16 {
    told.filter(|columns| *columns > 0).unwrap_or(WIDTH).clamp(40, 500)
}

/// Everything there is, page by page.
async fn read(backend: &impl Backend, query: &UsageQuery) -> Result<Vec<Usage>, Failure> {
    let (mut lines, mut paging) = (Vec::new(), Paging::first(PAGE_MAX)?);
    loop {
        let page = backend.usage(query, &paging).await?;
        lines.extend(page.items);
        if lines.len() > LINES_MAX {
            return Err(Failure::usage(format!("there are more than {LINES_MAX} lines of usage to draw"))
                .next("choose fewer with --since and --until, or a longer --window"));
        }
        let Some(next) = page.next else { return Ok(lines) };
        paging = Paging::first(PAGE_MAX)?.after(next);
    }
}

/// What a series is called beside others of the same limit.
pub(crate) fn name_of<'a>(of: &UsageOf, line: &'a Usage) -> &'a str {
    match of {
        UsageOf::Entity(_) => line.subject.resource.as_str(),
        UsageOf::Resource(_) => line.subject.entity.as_str(),
    }
}

/// Whose usage it is, in words.
pub(crate) fn whose(of: &UsageOf) -> String {
    shown(&match of {
        UsageOf::Entity(entity) => format!("entity {entity}"),
        UsageOf::Resource(resource) => format!("resource {resource}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_without_columns_is_as_wide_as_a_pipe() {
        for (told, columns_of) in
            [(None, 80), (Some(0), 80), (Some(12), 40), (Some(132), 132), (Some(9_999), 500)]
        {
            assert_eq!(columns(told), columns_of, "{told:?}");
        }
    }

    #[test]
    fn a_file_is_written_whole_and_nothing_is_left_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("usage.svg");
        for text in ["one", "other"] {
            write(&out, text).unwrap();
            assert_eq!(fs::read_to_string(&out).unwrap(), text);
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        let taken = folder.path().join("folder.svg");
        fs::create_dir(&taken).unwrap();
        assert!(write(&taken, "text").is_err());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }
}
