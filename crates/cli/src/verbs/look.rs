//! `tidegate balance`, `tidegate capacity` and `tidegate explain`: looking without taking.

use std::time::Duration;

use clap::Args;
use tidegate::{Balance, EntityId, LimitLine, ResourceName, Source, Subject, Would};

use crate::answer::{Answer, Table, Tint};
use crate::backend::{Ask, Backend};
use crate::codec;
use crate::failure::Failure;
use crate::replay::{self, FORM, ReplayArgs};
use crate::words::{self, Units, expiry_word, scope_words, span_words, unavailable_words};

/// Whose balance.
#[derive(Debug, Args)]
pub(crate) struct BalanceArgs {
    /// Whose
    #[arg(value_parser = words::entity)]
    entity: EntityId,
    /// Of what; without it, of everything that was ever drawn
    #[arg(value_parser = words::resource)]
    resource: Option<ResourceName>,
}

/// Of which resource.
#[derive(Debug, Args)]
pub(crate) struct CapacityArgs {
    /// Of what
    #[arg(value_parser = words::resource)]
    resource: ResourceName,
}

/// What to explain.
#[derive(Debug, Args)]
#[command(after_help = FORM)]
#[command(override_usage = "tidegate explain [OPTIONS] <ENTITY> <RESOURCE> <LIMIT=UNITS>...\n       \
                            tidegate explain [OPTIONS] --replay <LOG> [--manifest <FILE>]")]
pub(crate) struct ExplainArgs {
    /// Who would draw
    #[arg(value_parser = words::entity, required_unless_present = "replay")]
    #[arg(conflicts_with_all = ["replay", "manifest", "prune"])]
    entity: Option<EntityId>,
    /// Of what
    #[arg(value_parser = words::resource, required_unless_present = "replay")]
    resource: Option<ResourceName>,
    /// How much of which limit, such as tpm=800
    #[arg(required_unless_present = "replay", value_name = "LIMIT=UNITS", value_parser = words::units)]
    cost: Vec<Units>,
    #[command(flatten)]
    pub(crate) replay: ReplayArgs,
}

pub(crate) async fn balance(backend: &impl Backend, args: BalanceArgs) -> Result<Answer, Failure> {
    let Some(resource) = args.resource else {
        return balance_of_entity(backend, &args.entity).await;
    };
    let subject = Subject { entity: args.entity, resource };
    let lines = backend.balances(&subject).await?;
    if lines.is_empty() {
        return balance_of_unwritten(backend, &subject).await;
    }
    let answer = Answer::new(codec::balances(&lines, codec::limit_line));
    let mut table = Table::new(["ENTITY", "RESOURCE", "LIMIT", ">THERE", ">BURST", "RATE", "BY"]);
    for line in &lines {
        table.tinted(
            tint(&line.balance),
            cells(&line.balance).into_iter().chain([source_words(&line.source)]),
        );
    }
    Ok(answer.table(table))
}

async fn balance_of_entity(backend: &impl Backend, entity: &EntityId) -> Result<Answer, Failure> {
    let balances = backend.balances_of_entity(entity).await?;
    let answer = Answer::new(codec::balances(&balances, codec::balance));
    if balances.is_empty() {
        return Ok(answer.line(format!("nothing was ever drawn for {entity}")));
    }
    Ok(answer.table(drawn(&balances)))
}

/// Of a subject that no limit is written for: what callers who brought their own have drawn, as Envoy's rules do.
async fn balance_of_unwritten(backend: &impl Backend, subject: &Subject) -> Result<Answer, Failure> {
    let mut balances = backend.balances_of_entity(&subject.entity).await?;
    balances.retain(|balance| balance.subject == *subject);
    let answer = Answer::new(codec::balances(&balances, codec::balance));
    if balances.is_empty() {
        return Ok(answer.line(format!("nothing limits {subject}, and what nothing limits is refused")));
    }
    Ok(answer
        .line(format!(
            "no limit is written for {subject}; this was drawn of limits that came with calls, or are gone"
        ))
        .table(drawn(&balances)))
}

fn drawn(balances: &[Balance]) -> Table {
    let mut table = Table::new(["ENTITY", "RESOURCE", "LIMIT", ">THERE", ">BURST", "RATE"]);
    for balance in balances {
        table.tinted(tint(balance), cells(balance));
    }
    table
}

pub(crate) async fn capacity(backend: &impl Backend, args: CapacityArgs) -> Result<Answer, Failure> {
    let sums = backend.capacity(&args.resource).await?;
    let answer = Answer::new(codec::capacity(&sums));
    if sums.is_empty() {
        return Ok(answer.line(format!("nothing was ever drawn of {}", args.resource)));
    }
    let mut table = Table::new(["LIMIT", ">BUCKETS", ">AVAILABLE", ">BURST", ">CONSUMED"]);
    for (limit, sum) in &sums {
        let numbers = [sum.available.to_string(), sum.burst.to_string(), sum.consumed.to_string()];
        table.row([limit.to_string(), sum.buckets.to_string()].into_iter().chain(numbers));
    }
    Ok(answer.table(table))
}

pub(crate) async fn explain(backend: &impl Backend, args: ExplainArgs) -> Result<Answer, Failure> {
    let (Some(entity), Some(resource)) = (args.entity, args.resource) else {
        return replay::run(Some(backend), args.replay).await;
    };
    let subject = Subject { entity, resource };
    let ask = Ask { subject, cost: args.cost, within: None, deadline: Duration::from_mins(1) };
    let explanation = backend.explain(&ask).await?;
    let mut table = Table::new([
        "", "ENTITY", "RESOURCE", "LIMIT", ">THERE", ">BURST", "RATE", ">ASKED", "COMES IN", "BY",
    ]);
    for LimitLine { balance, source } in &explanation.lines {
        let (mark, tint) = if balance.is_short() { ("short", Tint::Bad) } else { ("ok", Tint::Plain) };
        let comes_in = match balance.retry_after {
            Some(Duration::ZERO) => "now".to_owned(),
            Some(span) => span_words(span),
            None => "never".to_owned(),
        };
        let asked = [balance.asked.to_string(), comes_in, source_words(source)];
        table.tinted(tint, [mark.to_owned()].into_iter().chain(cells(balance)).chain(asked));
    }
    let subject = &explanation.subject;
    let verdict = match explanation.would {
        Would::Grant => format!("{subject} would be granted this"),
        Would::Wait(span) => format!("{subject} would be refused; come back in {}", span_words(span)),
        _ => format!("{subject} could never be granted this: ask for less, or raise the burst"),
    };
    let behaves = |how: String, source: &Source| format!("{how} (by {})", source_words(source));
    let (on_unavailable, says_unavailable) = &explanation.on_unavailable;
    let (on_expiry, says_expiry) = &explanation.on_expiry;
    Ok(Answer::new(codec::explanation(&explanation))
        .line(verdict)
        .table(table)
        .line(format!("store away: {}", behaves(unavailable_words(*on_unavailable), says_unavailable)))
        .line(format!("lease never ended: {}", behaves(expiry_word(*on_expiry).to_owned(), says_expiry))))
}

fn cells(balance: &Balance) -> [String; 6] {
    [
        balance.subject.entity.to_string(),
        balance.subject.resource.to_string(),
        balance.limit.to_string(),
        balance.available.to_string(),
        balance.burst.to_string(),
        format!("{}/{}", balance.amount, humantime::format_duration(balance.period)),
    ]
}

/// What is in debt, or used up, is seen at once.
const fn tint(balance: &Balance) -> Tint {
    if balance.available > 0 { Tint::Plain } else { Tint::Bad }
}

fn source_words(source: &Source) -> String {
    match source {
        Source::Policy(scope) => scope_words(scope),
        other => other.to_string(),
    }
}
