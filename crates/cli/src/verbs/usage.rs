//! `tidegate usage`: what was used.

use clap::{Args, Subcommand, ValueEnum};
use tidegate::{Scope, Stamp, UsageOf, UsageQuery, Window};

use super::listed;
use crate::answer::{Answer, Table};
use crate::backend::Backend;
use crate::codec;
use crate::failure::Failure;
use crate::plot::{self, PlotArgs};
use crate::words::{self, PageArgs, whole_scope};

const WHOSE: &str = "\
Whose:
  entity ID                        an entity's, and of those below that cascade
  resource NAME                    everybody's use of a resource
Times are 2026-01-31, 2026-01-31T09:30:00Z, or for so long ago 24h, 7d.
Usage counts in the window of its draw, UTC.";

/// What to show.
#[derive(Debug, Subcommand)]
pub(crate) enum UsageVerb {
    /// List usage: by subject, limit and window
    #[command(override_usage = "tidegate usage list [OPTIONS] <WHOSE>", after_help = WHOSE)]
    List {
        #[command(flatten)]
        query: QueryArgs,
        #[command(flatten)]
        page: PageArgs,
    },
    /// Sum usage up, by limit
    #[command(override_usage = "tidegate usage summary [OPTIONS] <WHOSE>", after_help = WHOSE)]
    Summary(QueryArgs),
    /// Draw usage over time: a chart for each limit, in the terminal or as an SVG
    #[command(override_usage = "tidegate usage plot [OPTIONS] <WHOSE>", after_help = WHOSE)]
    Plot {
        #[command(flatten)]
        query: QueryArgs,
        #[command(flatten)]
        plot: PlotArgs,
    },
}

/// Whose, and when.
#[derive(Debug, Args)]
pub(crate) struct QueryArgs {
    /// Whose, as listed below
    #[arg(required = true, value_name = "WHOSE")]
    whose: Vec<String>,
    /// How long a span each line is summed over
    #[arg(long, value_enum, default_value_t = WindowArg::Hour)]
    window: WindowArg,
    /// Windows that begin at this time or later
    #[arg(long, value_name = "TIME", value_parser = words::time)]
    since: Option<Stamp>,
    /// Windows that begin before this time
    #[arg(long, value_name = "TIME", value_parser = words::time)]
    until: Option<Stamp>,
}

/// How long a span usage is summed over.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum WindowArg {
    Hour,
    Day,
    Month,
}

impl QueryArgs {
    fn query(&self) -> Result<UsageQuery, Failure> {
        let of = match whole_scope(&self.whose)? {
            Scope::Entity(entity) => UsageOf::Entity(entity),
            Scope::Resource(resource) => UsageOf::Resource(resource),
            _ => {
                let what = format!("usage of `{}` is not kept", words::shown(&self.whose.join(" ")));
                return Err(Failure::usage(what).next("ask for `entity ID` or `resource NAME`"));
            }
        };
        let window = match self.window {
            WindowArg::Hour => Window::Hour,
            WindowArg::Day => Window::Day,
            WindowArg::Month => Window::Month,
        };
        let range = self.since.unwrap_or(Stamp::ZERO)..self.until.unwrap_or(Stamp::MAX);
        Ok(UsageQuery { of, window, range })
    }
}

pub(crate) async fn run(backend: &impl Backend, verb: UsageVerb) -> Result<Answer, Failure> {
    match verb {
        UsageVerb::List { query, page } => list(backend, &query.query()?, &page).await,
        UsageVerb::Summary(query) => summary(backend, &query.query()?).await,
        UsageVerb::Plot { query, plot } => plot::run(backend, &query.query()?, plot).await,
    }
}

async fn list(backend: &impl Backend, query: &UsageQuery, page: &PageArgs) -> Result<Answer, Failure> {
    let page = backend.usage(query, &page.paging()?).await?;
    let mut table = Table::new(["START", "ENTITY", "RESOURCE", "LIMIT", ">UNITS", ">OWN", ">LEASES"]);
    for line in &page.items {
        table.row([
            line.start.to_string(),
            line.subject.entity.to_string(),
            line.subject.resource.to_string(),
            line.limit.to_string(),
            line.tally.units.to_string(),
            line.tally.own.to_string(),
            line.tally.leases.to_string(),
        ]);
    }
    Ok(listed("usage", &page, codec::usage, table))
}

async fn summary(backend: &impl Backend, query: &UsageQuery) -> Result<Answer, Failure> {
    let sum = backend.usage_sum(query).await?;
    let answer = Answer::new(codec::usage_sum(&sum));
    if sum.limits.is_empty() {
        return Ok(answer.line("no usage"));
    }
    let mut table = Table::new(["LIMIT", ">UNITS", ">OWN", ">LEASES"]);
    for (limit, tally) in &sum.limits {
        let numbers = [tally.units, tally.own, tally.leases].map(|number| number.to_string());
        table.row([limit.to_string()].into_iter().chain(numbers));
    }
    Ok(answer.table(table))
}
