//! `tidegate balance`, `tidegate capacity` and `tidegate explain`: inspect limits without drawing from them.

use std::time::Duration;
use tidegate_core::duration::Period;

use clap::Args;
use tidegate::{Balance, EntityId, LimitLine, ResourceName, Source, Subject, Would};

use crate::backend::{AcquireRequest, Backend};
use crate::codec;
use crate::failure::Failure;
use crate::format;
use crate::output::{Output, Table, Tint};
use crate::parse::{self, Units};
use crate::replay::{self, LOG_FORMAT, ReplayArgs};

/// Arguments of `balance`.
#[derive(Debug, Args)]
pub(crate) struct BalanceArgs {
    /// The entity
    #[arg(value_parser = parse::entity)]
    entity: EntityId,
    /// The resource [default: every resource that the entity has drawn from]
    #[arg(value_parser = parse::resource)]
    resource: Option<ResourceName>,
}

/// Arguments of `capacity`.
#[derive(Debug, Args)]
pub(crate) struct CapacityArgs {
    /// The resource
    #[arg(value_parser = parse::resource)]
    resource: ResourceName,
}

/// Arguments of `explain`.
#[derive(Debug, Args)]
#[command(after_help = LOG_FORMAT)]
#[command(override_usage = "tidegate explain [OPTIONS] <ENTITY> <RESOURCE> <LIMIT=UNITS>...\n       \
                            tidegate explain [OPTIONS] --replay <LOG> [--manifest <FILE>]")]
pub(crate) struct ExplainArgs {
    /// The entity that would draw
    #[arg(value_parser = parse::entity, required_unless_present = "replay")]
    #[arg(conflicts_with_all = ["replay", "manifest", "prune"])]
    entity: Option<EntityId>,
    /// The resource
    #[arg(value_parser = parse::resource, required_unless_present = "replay")]
    resource: Option<ResourceName>,
    /// Units that it would draw from each limit, such as tpm=800
    #[arg(required_unless_present = "replay", value_name = "LIMIT=UNITS", value_parser = parse::units)]
    cost: Vec<Units>,
    #[command(flatten)]
    pub(crate) replay: ReplayArgs,
}

pub(crate) async fn balance(backend: &impl Backend, args: BalanceArgs) -> Result<Output, Failure> {
    let Some(resource) = args.resource else {
        return balance_of_entity(backend, &args.entity).await;
    };
    let subject = Subject { entity: args.entity, resource };
    let lines = backend.balances(&subject).await?;
    if lines.is_empty() {
        return balance_of_unwritten(backend, &subject).await;
    }
    let output = Output::new(codec::balances(&lines, codec::limit_line));
    let mut table = Table::new(["ENTITY", "RESOURCE", "LIMIT", ">AVAILABLE", ">BURST", "RATE", "BY"]);
    for line in &lines {
        table.tinted(
            tint(&line.balance),
            cells(&line.balance).into_iter().chain([source_words(&line.source)]),
        );
    }
    Ok(output.table(table))
}

async fn balance_of_entity(backend: &impl Backend, entity: &EntityId) -> Result<Output, Failure> {
    let balances = backend.balances_of_entity(entity).await?;
    let output = Output::new(codec::balances(&balances, codec::balance));
    if balances.is_empty() {
        return Ok(output.line(format!("no units were ever drawn for {entity}")));
    }
    Ok(output.table(drawn(&balances)))
}

/// The balances of a subject without stored limits: its requests may have had limits of their own, as those
/// of Envoy's rules do.
async fn balance_of_unwritten(backend: &impl Backend, subject: &Subject) -> Result<Output, Failure> {
    let mut balances = backend.balances_of_entity(&subject.entity).await?;
    balances.retain(|balance| balance.subject == *subject);
    let output = Output::new(codec::balances(&balances, codec::balance));
    if balances.is_empty() {
        return Ok(output.line(format!("no limit applies to {subject}, so its requests are refused")));
    }
    Ok(output
        .line(format!(
            "no limit is stored for {subject}; these units were drawn from limits of requests, or from removed ones"
        ))
        .table(drawn(&balances)))
}

pub(crate) fn drawn(balances: &[Balance]) -> Table {
    let mut table = Table::new(["ENTITY", "RESOURCE", "LIMIT", ">AVAILABLE", ">BURST", "RATE"]);
    for balance in balances {
        table.tinted(tint(balance), cells(balance));
    }
    table
}

pub(crate) async fn capacity(backend: &impl Backend, args: CapacityArgs) -> Result<Output, Failure> {
    let sums = backend.capacity(&args.resource).await?;
    let output = Output::new(codec::capacity(&sums));
    if sums.is_empty() {
        return Ok(output.line(format!("no units were ever drawn from {}", args.resource)));
    }
    let mut table = Table::new(["LIMIT", ">BUCKETS", ">AVAILABLE", ">BURST", ">CONSUMED"]);
    for (limit, sum) in &sums {
        let numbers = [sum.available.to_string(), sum.burst.to_string(), sum.consumed.to_string()];
        table.row([limit.to_string(), sum.buckets.to_string()].into_iter().chain(numbers));
    }
    Ok(output.table(table))
}

pub(crate) async fn explain(backend: &impl Backend, args: ExplainArgs) -> Result<Output, Failure> {
    let (Some(entity), Some(resource)) = (args.entity, args.resource) else {
        return replay::run(Some(backend), args.replay).await;
    };
    let subject = Subject { entity, resource };
    let request = AcquireRequest { subject, cost: args.cost, within: None, deadline: Duration::from_mins(1) };
    let explanation = backend.explain(&request).await?;
    // The line above names the resource; a pool over all resources has the same limits again.
    let has_pools = explanation.lines.iter().any(|line| line.balance.subject.one_resource().is_none());
    let resource = has_pools.then_some("RESOURCE");
    let headings = ["LIMIT", ">AVAILABLE", ">BURST", "RATE", ">REQUESTED", "RETRY IN", "BY"];
    let mut table = Table::new(["", "ENTITY"].into_iter().chain(resource).chain(headings));
    for LimitLine { balance, source } in &explanation.lines {
        let (mark, tint) = if balance.is_short() { ("short", Tint::Bad) } else { ("ok", Tint::Plain) };
        let comes_in = match balance.retry_after {
            Some(Duration::ZERO) => "now".to_owned(),
            Some(span) => format::duration(span),
            None => "never".to_owned(),
        };
        let asked = [balance.asked.to_string(), comes_in, source_words(source)];
        let [entity, resource, numbers @ ..] = cells(balance);
        let resource = has_pools.then_some(resource);
        table.tinted(tint, [mark.to_owned(), entity].into_iter().chain(resource).chain(numbers).chain(asked));
    }
    let subject = &explanation.subject;
    let verdict = match explanation.would {
        Would::Grant => format!("{subject} would be granted"),
        Would::Wait(span) => format!("{subject} would be refused; retry after {}", format::duration(span)),
        _ => format!("{subject} could never be granted: request less, or raise the burst"),
    };
    let behaves = |how: String, source: &Source| format!("{how} (by {})", source_words(source));
    let (on_unavailable, says_unavailable) = &explanation.on_unavailable;
    let (on_expiry, says_expiry) = &explanation.on_expiry;
    Ok(Output::new(codec::explanation(&explanation))
        .line(verdict)
        .table(table)
        .line(format!(
            "store unavailable: {}",
            behaves(format::unavailable(*on_unavailable), says_unavailable)
        ))
        .line(format!("lease expired: {}", behaves(format::expiry(*on_expiry).to_owned(), says_expiry))))
}

fn cells(balance: &Balance) -> [String; 6] {
    let [entity, resource] = format::bucket(&balance.subject);
    [
        entity,
        resource,
        balance.limit.to_string(),
        balance.available.to_string(),
        balance.burst.to_string(),
        format!("{}/{}", balance.amount, Period(balance.period)),
    ]
}

/// Highlights limits that are exhausted or in debt.
const fn tint(balance: &Balance) -> Tint {
    if balance.available > 0 { Tint::Plain } else { Tint::Bad }
}

fn source_words(source: &Source) -> String {
    match source {
        Source::Policy(scope) => format::scope(scope),
        other => other.to_string(),
    }
}
