//! `tidegate usage plot`: usage as charts, in the terminal or as an SVG.
//!
//! `usage → Chart → text or SVG`: [`chart`] selects and arranges the data, and the two renderers are pure.

mod chart;
mod svg;
mod text;

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::io::{self, IsTerminal as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tidegate::{
    Balance, EntityId, LimitName, Paging, ResourceName, Scope, Subject, Usage, UsageOf, UsageQuery,
};
use tidegate_core::limit::rule::Rule;

use crate::backend::Backend;
use crate::codec;
use crate::failure::Failure;
use crate::format;
use crate::output::Output;
pub(crate) use chart::Series;
use chart::{Chart, Panel};

/// Maximum records of usage for one chart.
const LINES_MAX: usize = 200_000;
/// Maximum names of limits in an error.
const KNOWN_MAX: usize = 20;
/// Maximum lines for different limits in one panel.
const REFILLS_MAX: usize = 3;
/// Maximum items per page.
const PAGE_MAX: u32 = 1_000;
/// Default width of a text chart, in columns.
const WIDTH: u16 = 80;

/// Arguments of `usage plot`.
#[derive(Debug, clap::Args)]
pub(crate) struct PlotArgs {
    /// Plot only this limit
    #[arg(long, value_name = "NAME", value_parser = limit)]
    limit: Option<LimitName>,
    /// Write an SVG to this file; its name must end in .svg
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Width in columns, from 40 to 500 [default: the terminal's width, or 80 without a terminal]
    #[arg(long, value_name = "COLUMNS", value_parser = clap::value_parser!(u16).range(40..=500))]
    width: Option<u16>,
}

fn limit(text: &str) -> Result<LimitName, String> {
    LimitName::new(text).map_err(|error| error.to_string())
}

/// Runs `usage plot`.
pub(crate) async fn run(
    backend: &impl Backend,
    query: &UsageQuery,
    args: PlotArgs,
) -> Result<Output, Failure> {
    let out = args.out.map(checked).transpose()?;
    let mut lines = read(backend, query).await?;
    if let Some(limit) = &args.limit {
        lines.retain(|line| line.limit == *limit);
        if lines.is_empty() {
            check_limit(backend, limit, &query.of).await?;
        }
    }
    let Some(mut chart) = Chart::new(query, &lines)? else {
        let text = if out.is_some() { "no usage: nothing was written" } else { "no usage" };
        return Ok(Output::new(json(query, None)).line(text));
    };
    read_limits(backend, &mut chart).await?;
    let output = Output::new(json(query, Some(&chart)));
    if let Some(out) = out {
        let failed = |error: io::Error| {
            Failure::failed(format!("the file `{}` cannot be written: {error}", out.display()))
                .next("choose another file with --out")
        };
        write(&out, &svg::draw(&chart)).map_err(failed)?;
        return Ok(output.line(format!("written to {}", format::escape(&out.display().to_string()))));
    }
    let width = args.width.unwrap_or_else(width);
    Ok(text::draw(&chart, width.into()).into_iter().fold(output, Output::line))
}

/// Refuses a limit that was never drawn from, unless none was.
async fn check_limit(backend: &impl Backend, limit: &LimitName, of: &UsageOf) -> Result<(), Failure> {
    let known: BTreeSet<LimitName> = match of {
        UsageOf::Entity(entity) => {
            backend.balances_of_entity(entity).await?.into_iter().map(|balance| balance.limit).collect()
        }
        UsageOf::Resource(resource) => {
            backend.capacity(resource).await?.into_keys().map(|key| key.name).collect()
        }
    };
    if known.is_empty() || known.contains(limit) {
        return Ok(());
    }
    let what = format!("{} has no limit `{limit}`", owner(of));
    let known: Vec<String> = known.iter().take(KNOWN_MAX).map(ToString::to_string).collect();
    Err(Failure::usage(what).next(format!("choose one of its limits: {}", known.join(", "))))
}

/// The chart as JSON, with the number of limits and series left out.
fn json(query: &UsageQuery, chart: Option<&Chart>) -> codec::Json {
    let (starts, series) = chart.map_or((&[][..], Vec::new()), |chart| (&chart.starts, chart.all_series()));
    let mut json = codec::chart(query.window, starts, &series);
    json["left_out"]["limits"] = chart.map_or(0, |chart| chart.left_out).into();
    json["left_out"]["series"] = chart.map_or(0, Chart::series_left_out).into();
    json
}

/// Replaces a file atomically: readers see the old content or the new. A path that exists and is not a
/// regular file, such as a pipe, is written directly.
pub(crate) fn write(out: &Path, text: &str) -> io::Result<()> {
    let is_other = fs::symlink_metadata(out).is_ok_and(|there| !there.is_file());
    let Some(name) = out.file_name().filter(|_| !is_other) else { return fs::write(out, text) };
    let mut part = OsString::from(".");
    part.push(name);
    part.push(format!(".{}.part", std::process::id()));
    let part = out.with_file_name(part);
    let written = fs::write(&part, text).and_then(|()| fs::rename(&part, out));
    if written.is_err() {
        // The write error is reported, not an error of the cleanup.
        drop(fs::remove_file(&part));
    }
    written
}

/// Validates the file's extension.
fn checked(out: PathBuf) -> Result<PathBuf, Failure> {
    let is_svg = out.extension().is_some_and(|kind| kind.eq_ignore_ascii_case("svg"));
    if is_svg {
        return Ok(out);
    }
    let name = format::escape(&out.display().to_string());
    Err(Failure::usage(format!("--out is `{name}`, and must end in .svg"))
        .next("for example: --out usage.svg"))
}

/// The width of the terminal.
fn width() -> u16 {
    let stdout = io::stdout();
    let size = stdout.is_terminal().then(|| rustix::termios::tcgetwinsize(&stdout).ok()).flatten();
    columns(size.map(|size| size.ws_col))
}

/// Some terminals report a width of 0, which means unknown.
fn columns(reported: Option<u16>) -> u16 {
    reported.filter(|columns| *columns > 0).unwrap_or(WIDTH).clamp(40, 500)
}

/// Reads all pages.
async fn read(backend: &impl Backend, query: &UsageQuery) -> Result<Vec<Usage>, Failure> {
    let (mut lines, mut paging) = (Vec::new(), Paging::first(PAGE_MAX)?);
    loop {
        let page = backend.usage(query, &paging).await?;
        lines.extend(page.items);
        if lines.len() > LINES_MAX {
            return Err(Failure::usage(format!("there are more than {LINES_MAX} records of usage to plot"))
                .next("choose fewer with --since and --until, or a longer --window"));
        }
        let Some(next) = page.next else { return Ok(lines) };
        paging = Paging::first(PAGE_MAX)?.after(next);
    }
}

/// Reads the current limits of what is drawn, and the units that they refill in a window.
async fn read_limits(backend: &impl Backend, chart: &mut Chart) -> Result<(), Failure> {
    let subjects = chart.all_series().into_iter().filter_map(|series| series.subject.clone());
    let mut known: Vec<(Subject, LimitName, u64)> = Vec::new();
    for subject in subjects.collect::<BTreeSet<_>>() {
        let balances = match (subject.one_entity(), subject.one_resource()) {
            (Some(_), Some(_)) => {
                backend.balances(&subject).await?.into_iter().map(|line| line.balance).collect()
            }
            (Some(entity), None) => backend.balances_of_entity(entity).await?,
            (None, _) => {
                let rules = rules_of_pool(backend, &subject).await?;
                let refill = |rule: &Rule| chart.refill(rule.shape().amount(), rule.shape().period());
                known.extend(rules.iter().map(|rule| (subject.clone(), rule.name().clone(), refill(rule))));
                continue;
            }
        };
        let refill = |balance: &Balance| chart.refill(balance.amount, balance.period);
        known.extend(balances.into_iter().map(|balance| {
            let refill = refill(&balance);
            (balance.subject, balance.limit, refill)
        }));
    }
    let refills = |panel: &Panel| {
        let is_drawn = |(subject, limit, _): &&(Subject, LimitName, u64)| {
            let mut subjects = panel.series.iter().filter_map(|series| series.subject.as_ref());
            limit.as_str() == panel.limit && subjects.any(|drawn| drawn == subject)
        };
        known.iter().filter(is_drawn).map(|(_, _, refill)| *refill).collect::<BTreeSet<_>>()
    };
    let refills: Vec<_> = chart.panels.iter().map(refills).collect();
    for (panel, refills) in chart.panels.iter_mut().zip(refills) {
        panel.refills = refills.into_iter().take(REFILLS_MAX).collect();
    }
    Ok(())
}

/// The limits of a pool over all entities, which no entity's policy can have.
async fn rules_of_pool(backend: &impl Backend, pool: &Subject) -> Result<Vec<Arc<Rule>>, Failure> {
    let mut rules: Vec<Arc<Rule>> = Vec::new();
    for scope in pool.one_resource().cloned().map(Scope::Resource).into_iter().chain([Scope::System]) {
        let Some(policy) = backend.policy(&scope).await? else { continue };
        for rule in policy.value.rules() {
            // The narrowest scope wins.
            if rule.across() == pool.across() && rules.iter().all(|known| known.name() != rule.name()) {
                rules.push(Arc::clone(rule));
            }
        }
        if policy.value.is_only() {
            break;
        }
    }
    Ok(rules)
}

/// The name of a series, which is unique within its limit.
pub(crate) fn series_name<'a>(of: &UsageOf, line: &'a Usage) -> &'a str {
    match of {
        UsageOf::Entity(_) => line.subject.one_resource().map_or("(all)", ResourceName::as_str),
        UsageOf::Resource(_) => line.subject.one_entity().map_or("(all)", EntityId::as_str),
    }
}

/// The owner of the usage, in words.
pub(crate) fn owner(of: &UsageOf) -> String {
    format::escape(&match of {
        of if *of == UsageOf::all_resources() => "all resources".to_owned(),
        UsageOf::Entity(entity) => format!("entity {entity}"),
        UsageOf::Resource(resource) => format!("resource {resource}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_terminal_width_is_the_default() {
        for (reported, expected) in
            [(None, 80), (Some(0), 80), (Some(12), 40), (Some(132), 132), (Some(9_999), 500)]
        {
            assert_eq!(columns(reported), expected, "{reported:?}");
        }
    }

    #[test]
    fn file_is_replaced_atomically() {
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
