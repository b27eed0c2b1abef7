//! `tidegate store`: a store is made, looked at, brought up to date, listed and removed, where it is.

use std::time::Duration;

use clap::{Args, Subcommand};
use tidegate::StoreError;
use tidegate::store::Reply;
use tidegate::store::lifecycle::{
    self, Checked, ClockDifference, Destroyed, Lifecycle, Listed, Made, Readiness, Space, Upgraded,
};
use tidegate_core::limit::name::Namespace;
use tokio::time::timeout;

use super::PATIENCE;
use crate::answer::{Answer, Table, Tint};
use crate::codec;
use crate::failure::{Exit, Failure};
use crate::place::{address, refused, without_password};
use crate::words::span_words;

const INIT: &str = "\
What is there already is left as it is, and told: to repeat it does no harm.
Every verb makes the store that it is asked to use, but for a table of
DynamoDB, which only this one makes. It is for whoever wants a store made
before, with other rights or by another hand.

Examples:
  tidegate store init
  tidegate store init --store redis://cache.internal --namespace prod
  tidegate store init --store postgres://limits@db.internal/limits
  tidegate store init --store dynamodb://limits?region=eu-central-1";

const CHECK: &str = "\
Nothing is written, and nothing is made.

Exit codes:
  0  it can be used as it is
  1  it cannot be used: its schema is newer, or it is another program's
  4  it is away, or does not answer in time
  5  there is something to do: a part is not there (`store init`), its schema
     is older (`store upgrade`), or a setting endangers what it promises";

const UPGRADE: &str = "\
It is done under a lock, or not at all: what the store holds is kept, and
several who ask for it at once do it once. A store that is newer is left as
it is. Make a backup before; an older tidegate does not open the store after.

A file, and a schema of PostgreSQL, are upgraded by whoever opens them too.
On Redis an older namespace is refused until this is done: all there are, or
the one that the address or --namespace names.";

const DESTROY: &str = "\
A table of DynamoDB is removed, with all namespaces in it. Without --yes
nothing is: what would be lost is told. Files, schemas and keys of other
engines are removed by the engine's own means.

Exit codes:
  0  it is gone, or was not there
  1  it cannot be removed from here
  5  there is something to lose, and --yes was not said";

const TEMPLATE: &str = "\
Nothing is asked, and nothing is made: the answer is what `store init` makes,
for whoever makes tables by CloudFormation.

Example:
  tidegate store template --store dynamodb://limits > limits.yaml";

/// What to do with a store.
#[derive(Debug, Subcommand)]
pub(crate) enum StoreVerb {
    /// Make what a store needs, and a namespace in it
    #[command(after_help = INIT)]
    Init(SpaceArgs),
    /// Say whether a store can be used, of which version it is, and what its settings are worth
    #[command(after_help = CHECK)]
    Check(SpaceArgs),
    /// Bring an older store to the version of this program
    #[command(after_help = UPGRADE)]
    Upgrade(SpaceArgs),
    /// List the namespaces of a store, with what is in them
    List,
    /// Remove a table of DynamoDB, with all that it holds
    #[command(after_help = DESTROY)]
    Destroy {
        /// Lose it
        #[arg(long)]
        yes: bool,
    },
    /// Print a table of DynamoDB as a template of `CloudFormation`
    #[command(after_help = TEMPLATE)]
    Template,
}

/// In which namespace.
#[derive(Debug, Args)]
pub(crate) struct SpaceArgs {
    /// The namespace, if the address does not say it [default: default]
    #[arg(long, value_name = "NAME", value_parser = namespace)]
    namespace: Option<String>,
}

fn namespace(text: &str) -> Result<String, String> {
    Namespace::new(text).map_err(|error| error.to_string())?;
    // Nothing of an address is decoded.
    if text.contains('&') {
        return Err("an address cannot name it, for it holds `&`".to_owned());
    }
    Ok(text.to_owned())
}

/// Does it with the store at `url`, or with the one in the user's data folder.
pub(crate) async fn run(
    verb: StoreVerb,
    url: Option<String>,
    within: Option<Duration>,
) -> Result<Answer, Failure> {
    let url = address(url, matches!(verb, StoreVerb::Init(_)))?;
    let named = match &verb {
        StoreVerb::Init(args) | StoreVerb::Check(args) | StoreVerb::Upgrade(args) => {
            with_namespace(&url, args)?
        }
        StoreVerb::List | StoreVerb::Destroy { .. } | StoreVerb::Template => url.clone(),
    };
    let store = lifecycle::at(&named).map_err(|error| misled(error, &url))?;
    let shown = without_password(&named);
    let of_store = |error| refused(error, &url);
    match verb {
        StoreVerb::Init(_) => Ok(made(&answer(store.init(), within).await.map_err(of_store)?, &shown)),
        StoreVerb::Check(_) => {
            let within = Some(within.unwrap_or(PATIENCE));
            Ok(checked(&answer(store.check(), within).await.map_err(of_store)?, &shown))
        }
        // Bringing up to date takes as long as it takes.
        StoreVerb::Upgrade(_) => {
            Ok(upgraded(&answer(store.upgrade(), within).await.map_err(of_store)?, &shown))
        }
        StoreVerb::List => Ok(listed(&list(&*store, within).await.map_err(of_store)?)),
        StoreVerb::Destroy { yes: false } => {
            let within = Some(within.unwrap_or(PATIENCE));
            Ok(losses(&answer(store.losses(), within).await.map_err(of_store)?, &shown))
        }
        StoreVerb::Destroy { yes: true } => {
            Ok(destroyed(&answer(store.destroy(), within).await.map_err(of_store)?, &shown))
        }
        StoreVerb::Template => Ok(Answer::raw(store.template().map_err(of_store)?.into_bytes())),
    }
}

async fn list(store: &dyn Lifecycle, within: Option<Duration>) -> Result<Listed, StoreError> {
    answer(store.list(), Some(within.unwrap_or(PATIENCE))).await
}

async fn answer<T: Unpin>(reply: Reply<'_, T>, within: Option<Duration>) -> Result<T, StoreError> {
    let Some(within) = within else { return reply.await };
    let millis = u64::try_from(within.as_millis()).unwrap_or(u64::MAX);
    timeout(within, reply).await.unwrap_or(Err(StoreError::TimedOut { millis }))
}

/// What is wrong with an address is for whoever wrote it to correct.
fn misled(error: StoreError, url: &str) -> Failure {
    match error {
        StoreError::Invalid { what } => Failure::usage(what).next("correct --store or TIDEGATE_STORE"),
        error => refused(error, url),
    }
}

/// The address, with the namespace that was said.
fn with_namespace(url: &str, args: &SpaceArgs) -> Result<String, Failure> {
    let Some(name) = &args.namespace else { return Ok(url.to_owned()) };
    let (place, options) = url.split_once('?').unwrap_or((url, ""));
    if options.split('&').any(|option| option.starts_with("namespace=")) {
        return Err(Failure::usage("the address names a namespace, and so does --namespace")
            .next("leave one of them out"));
    }
    let options = if options.is_empty() { String::new() } else { format!("{options}&") };
    Ok(format!("{place}?{options}namespace={name}"))
}

fn line(name: &str, value: impl std::fmt::Display) -> String {
    format!("{name:<11}{value}")
}

fn made(made: &Made, url: &str) -> Answer {
    let answer = Answer::new(codec::made(made, url)).line(line("store", url));
    let parts = made.parts.iter().map(|made| {
        let verb = if made.is_new { "made" } else { "was there" };
        line(verb, &made.part)
    });
    parts.fold(answer, Answer::line).line(line("schema", format!("version {}", made.schema)))
}

fn checked(checked: &Checked, url: &str) -> Answer {
    let readiness = checked.readiness();
    let schema = match checked.schema {
        Some(found) => format!("version {found}, and this program has {}", checked.schema_wanted),
        None => format!("none, and this program has version {}", checked.schema_wanted),
    };
    let is_there = checked.missing.iter().all(|part| part.kind != "namespace");
    let namespace = format!("{}{}", checked.namespace, if is_there { "" } else { ", not there" });
    let answer = Answer::new(codec::checked(checked, url))
        .line(line("store", url))
        .line(line("engine", format!("{}: {}", checked.of.engine, checked.server)))
        .line(line("schema", schema))
        .line(line("namespace", namespace))
        .line(line("durable", &checked.durability));
    let settings: Vec<_> =
        checked.settings.iter().map(|setting| format!("{} {}", setting.name, setting.value)).collect();
    let mut answer = answer.line(line("settings", settings.join("; ")));
    if let Some(clock) = checked.clock {
        answer = answer.line(line("clock", clock_words(clock)));
    }
    if let Some(offset) = checked.clock_offset.filter(|offset| !offset.is_zero()) {
        let ahead = span_words(offset);
        answer = answer
            .line(line("offset", format!("the clock stepped back: the store's time is {ahead} ahead of it")));
    }
    for setting in &checked.settings {
        if let Some(danger) = &setting.danger {
            answer = answer.line(line("danger", format!("{} {}: {danger}", setting.name, setting.value)));
        }
    }
    answer = match readiness {
        Readiness::Ready if checked.dangers().next().is_some() => {
            answer.line(line("so", "it can be used, with what is said of danger"))
        }
        Readiness::Ready => answer.line(line("so", "it can be used as it is")),
        Readiness::Older => answer.line(line("so", "older than this program: run `tidegate store upgrade`")),
        Readiness::Missing => {
            let missing: Vec<_> = checked.missing.iter().map(ToString::to_string).collect();
            let are = if missing.len() == 1 { "is" } else { "are" };
            let missing = missing.join(" and ");
            answer.line(line("so", format!("{missing} {are} not there: run `tidegate store init`")))
        }
    };
    let is_good = readiness == Readiness::Ready && checked.dangers().next().is_none();
    if is_good { answer } else { answer.exit(Exit::Changes) }
}

fn clock_words(clock: ClockDifference) -> String {
    let millis = |micros: u64| format!("{}.{} ms", micros / 1_000, micros % 1_000 / 100);
    let within = millis(u64::try_from(clock.within.as_micros()).unwrap_or(u64::MAX));
    let far = |micros: u64| match micros {
        0..60_000_000 => millis(micros),
        _ => span_words(Duration::from_micros(micros)),
    };
    let direction = if clock.ahead_micros < 0 { "behind" } else { "ahead of" };
    format!(
        "the server's is {} {direction} this machine's, give or take {within}",
        far(clock.ahead_micros.unsigned_abs())
    )
}

fn upgraded(upgraded: &Upgraded, url: &str) -> Answer {
    let answer = Answer::new(codec::upgraded(upgraded, url)).line(line("store", url));
    let parts = upgraded.parts.iter().map(|part| {
        if part.from == upgraded.schema {
            line("nothing", format!("to do: {} has schema version {}", part.part, upgraded.schema))
        } else {
            line(
                "upgraded",
                format!("{} from schema version {} to {}", part.part, part.from, upgraded.schema),
            )
        }
    });
    parts.fold(answer, Answer::line)
}

/// What would be lost, and how it is.
fn losses(listed: &Listed, url: &str) -> Answer {
    let json = codec::losses(listed, url);
    if listed.spaces.is_empty() {
        // As `--yes` would answer: a store always has a namespace.
        return Answer::new(json).line(line("store", url)).line("was not there: nothing to remove");
    }
    let answer = spaces(listed, Answer::new(json).line(line("store", url)).line(line("to lose", "")));
    answer.line(line("so", "nothing is removed: say --yes to lose all of it")).exit(Exit::Changes)
}

fn destroyed(destroyed: &Destroyed, url: &str) -> Answer {
    let verb = if destroyed.was_there { "removed" } else { "was not there" };
    Answer::new(codec::destroyed(destroyed, url)).line(line("store", url)).line(format!(
        "{verb:<11}{}{}",
        if destroyed.was_there { "" } else { " " },
        destroyed.part
    ))
}

fn listed(listed: &Listed) -> Answer {
    spaces(listed, Answer::new(codec::listed_store(listed)))
}

fn spaces(listed: &Listed, answer: Answer) -> Answer {
    if listed.spaces.is_empty() {
        return answer.line("no namespaces");
    }
    let has_schemas = listed.spaces.iter().any(|space| space.within.is_some());
    let within = if listed.of.engine == "dynamodb" { "TABLE" } else { "SCHEMA" };
    let within: &[&str] = if has_schemas { &[within] } else { &[] };
    let headings = ["NAMESPACE", ">VERSION", ">CHANGES", ">ENTITIES", ">POLICIES"];
    let mut table = Table::new(within.iter().copied().chain(headings));
    for space in &listed.spaces {
        let or_none = |text: Option<&String>| text.map_or_else(|| "-".to_owned(), Clone::clone);
        let number = |number: Option<u64>| number.map_or_else(|| "-".to_owned(), |number| number.to_string());
        let Space { within, namespace, schema, changes, entities, policies } = space;
        let cells = [
            or_none(namespace.as_ref()),
            number(*schema),
            number(*changes),
            number(*entities),
            number(*policies),
        ];
        let tint = if *schema == Some(listed.schema_wanted) { Tint::Plain } else { Tint::Changed };
        table.tinted(tint, has_schemas.then(|| or_none(within.as_ref())).into_iter().chain(cells));
    }
    let answer = answer.table(table);
    if listed.has_more {
        return answer.line(format!("there are more: {} are listed", lifecycle::LISTED_MAX));
    }
    answer
}
