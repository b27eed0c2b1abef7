//! `tidegate usage`: lists, sums and plots usage.

use clap::{Args, Subcommand, ValueEnum};
use tidegate::{Scope, Stamp, UsageOf, UsageQuery, Window};

use super::listed;
use crate::backend::Backend;
use crate::codec;
use crate::failure::Failure;
use crate::format;
use crate::output::{Output, Table};
use crate::parse::{self, PageArgs};
use crate::plot::{self, PlotArgs};

const SCOPES: &str = "\
Scopes:
  entity ID                        an entity, and its children that cascade
  resource NAME                    all entities, one resource
  system                           limits across all resources
Times: 2026-01-31, 2026-01-31T09:30:00Z, or 24h or 7d for a time ago.
Usage counts in the window of its draw, in UTC.";

/// Subcommands of `usage`.
#[derive(Debug, Subcommand)]
pub(crate) enum UsageVerb {
    /// List usage by subject, limit and window
    #[command(override_usage = "tidegate usage list [OPTIONS] <SCOPE>", after_help = SCOPES)]
    List {
        #[command(flatten)]
        query: QueryArgs,
        #[command(flatten)]
        page: PageArgs,
    },
    /// Sum up usage by limit
    #[command(override_usage = "tidegate usage summary [OPTIONS] <SCOPE>", after_help = SCOPES)]
    Summary(QueryArgs),
    /// Plot usage over time, in the terminal or as an SVG
    #[command(override_usage = "tidegate usage plot [OPTIONS] <SCOPE>", after_help = SCOPES)]
    Plot {
        #[command(flatten)]
        query: QueryArgs,
        #[command(flatten)]
        plot: PlotArgs,
    },
}

/// The scope and the time range of a query.
#[derive(Debug, Args)]
pub(crate) struct QueryArgs {
    /// Whose usage, as described below
    #[arg(required = true, value_name = "SCOPE")]
    scope: Vec<String>,
    /// Sum usage per window of this length
    #[arg(long, value_enum, default_value_t = WindowArg::Hour)]
    window: WindowArg,
    /// Include windows that begin at this time or later
    #[arg(long, value_name = "TIME", value_parser = parse::time)]
    since: Option<Stamp>,
    /// Include windows that begin before this time
    #[arg(long, value_name = "TIME", value_parser = parse::time)]
    until: Option<Stamp>,
}

/// The length of a window.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum WindowArg {
    Minute,
    Hour,
    Day,
    Month,
}

impl QueryArgs {
    fn query(&self) -> Result<UsageQuery, Failure> {
        let of = match parse::whole_scope(&self.scope)? {
            Scope::Entity(entity) => UsageOf::Entity(entity),
            Scope::Resource(resource) => UsageOf::Resource(resource),
            Scope::System => UsageOf::all_resources(),
            Scope::Subject(_) => {
                let what = format!("usage is not recorded for `{}`", format::escape(&self.scope.join(" ")));
                return Err(Failure::usage(what).next("use `entity ID`, `resource NAME` or `system`"));
            }
        };
        let window = match self.window {
            WindowArg::Minute => Window::Minute,
            WindowArg::Hour => Window::Hour,
            WindowArg::Day => Window::Day,
            WindowArg::Month => Window::Month,
        };
        let range = self.since.unwrap_or(Stamp::ZERO)..self.until.unwrap_or(Stamp::MAX);
        Ok(UsageQuery { of, window, range })
    }
}

pub(crate) async fn run(backend: &impl Backend, verb: UsageVerb) -> Result<Output, Failure> {
    match verb {
        UsageVerb::List { query, page } => list(backend, &query.query()?, &page).await,
        UsageVerb::Summary(query) => summary(backend, &query.query()?).await,
        UsageVerb::Plot { query, plot } => plot::run(backend, &query.query()?, plot).await,
    }
}

async fn list(backend: &impl Backend, query: &UsageQuery, page: &PageArgs) -> Result<Output, Failure> {
    let page = backend.usage(query, &page.paging()?).await?;
    let mut table = Table::new(["START", "ENTITY", "RESOURCE", "LIMIT", ">UNITS", ">OWN", ">LEASES"]);
    for line in &page.items {
        let [entity, resource] = format::bucket(&line.subject);
        table.row([
            line.start.to_string(),
            entity,
            resource,
            line.limit.to_string(),
            line.tally.units.to_string(),
            line.tally.own.to_string(),
            line.tally.leases.to_string(),
        ]);
    }
    Ok(listed("usage", &page, codec::usage, table))
}

async fn summary(backend: &impl Backend, query: &UsageQuery) -> Result<Output, Failure> {
    let sum = backend.usage_sum(query).await?;
    let output = Output::new(codec::usage_sum(&sum));
    if sum.limits.is_empty() {
        return Ok(output.line("no usage"));
    }
    let mut table = Table::new(["LIMIT", ">UNITS", ">OWN", ">LEASES"]);
    for (limit, tally) in &sum.limits {
        let numbers = [tally.units, tally.own, tally.leases].map(|number| number.to_string());
        table.row([limit.to_string()].into_iter().chain(numbers));
    }
    Ok(output.table(table))
}
