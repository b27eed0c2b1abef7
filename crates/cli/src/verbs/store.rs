//! `tidegate store`: creates, checks, upgrades, lists and removes a store.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use tidegate::StoreError;
use tidegate::store::Reply;
use tidegate::store::lifecycle::{
    self, BackupReport, CheckReport, ClockDifference, DestroyReport, InitReport, Lifecycle, NamespaceList,
    Readiness, Space, UpgradeReport,
};
use tidegate_core::limit::name::Namespace;
use tokio::time::timeout;

use super::DEFAULT_TIMEOUT;
use crate::codec;
use crate::default_paths::{address, store_failure, without_password};
use crate::failure::{Exit, Failure};
use crate::format;
use crate::output::{Output, Table, Tint};

const INIT: &str = "\
Existing parts are reported and left unchanged, so it is safe to repeat. Other
commands create the store they use, except a DynamoDB table, which only this
command creates. Use it to create a store in advance or with other permissions.

Examples:
  tidegate store init
  tidegate store init --store redis://cache.internal --namespace prod
  tidegate store init --store postgres://limits@db.internal/limits
  tidegate store init --store dynamodb://limits?region=eu-central-1";

const CHECK: &str = "\
Changes nothing.

Exit codes:
  0  the store is ready
  1  the store is unusable: its schema is newer, or it is another program's
  4  the store is unavailable, or timed out
  5  action is needed: a part is missing (`store init`), the schema is older
     (`store upgrade`), or a setting endangers its guarantees";

const UPGRADE: &str = "\
The upgrade is atomic and keeps all data; concurrent upgrades run once. A newer
store is left unchanged. Make a backup first: an older tidegate cannot open the
store afterwards.

A file and a PostgreSQL schema are also upgraded when they are opened. On Redis,
an older namespace is refused until it is upgraded. This upgrades all
namespaces, or the one that the address or --namespace names.";

const BACKUP: &str = "\
Copies one moment of a file while servers use it, and creates FILE, readable by
its owner only. Back up other engines with their own tools.

Example:
  tidegate store backup limits-$(date +%F).db";

const DESTROY: &str = "\
Removes a DynamoDB table with all of its namespaces. Without --yes, it only
reports what would be lost. Remove files, schemas and keys of other engines
with the tools of the engine.

Exit codes:
  0  the table is removed, or did not exist
  1  the store cannot be removed with this command
  5  data would be lost, and --yes is missing";

const TEMPLATE: &str = "\
Prints what `store init` would create, without a connection, to create tables
with CloudFormation.

Example:
  tidegate store template --store dynamodb://limits > limits.yaml";

/// Subcommands of `store`.
#[derive(Debug, Subcommand)]
pub(crate) enum StoreVerb {
    /// Create a store, and a namespace in it
    #[command(after_help = INIT)]
    Init(SpaceArgs),
    /// Check that a store is ready, its version and its settings
    #[command(after_help = CHECK)]
    Check(SpaceArgs),
    /// Upgrade the schema of a store to this program's version
    #[command(after_help = UPGRADE)]
    Upgrade(SpaceArgs),
    /// List the namespaces of a store, with their contents
    List,
    /// Copy the store to a new file, while it is in use
    #[command(after_help = BACKUP)]
    Backup {
        /// The new file
        file: PathBuf,
    },
    /// Remove a DynamoDB table, with all data
    #[command(after_help = DESTROY)]
    Destroy {
        /// Confirm the loss of all data
        #[arg(long)]
        yes: bool,
    },
    /// Print the DynamoDB table as a `CloudFormation` template
    #[command(after_help = TEMPLATE)]
    Template,
}

/// The namespace option.
#[derive(Debug, Args)]
pub(crate) struct SpaceArgs {
    /// The namespace, unless the address names it [default: default]
    #[arg(long, value_name = "NAME", value_parser = namespace)]
    namespace: Option<String>,
}

fn namespace(text: &str) -> Result<String, String> {
    Namespace::new(text).map_err(|error| error.to_string())?;
    // Addresses are not percent-decoded, so the name would end at the `&`.
    if text.contains('&') {
        return Err("must not contain `&`, which separates the options of an address".to_owned());
    }
    Ok(text.to_owned())
}

/// Runs the verb on the store at `url`, or on the one in the user's data folder.
pub(crate) async fn run(
    verb: StoreVerb,
    url: Option<String>,
    within: Option<Duration>,
) -> Result<Output, Failure> {
    let url = address(url, matches!(verb, StoreVerb::Init(_)))?;
    let named = match &verb {
        StoreVerb::Init(args) | StoreVerb::Check(args) | StoreVerb::Upgrade(args) => {
            with_namespace(&url, args)?
        }
        StoreVerb::List | StoreVerb::Backup { .. } | StoreVerb::Destroy { .. } | StoreVerb::Template => {
            url.clone()
        }
    };
    let store = lifecycle::at(&named).map_err(|error| address_failure(error, &url))?;
    let displayed = without_password(&named);
    let of_store = |error| store_failure(error, &url);
    match verb {
        StoreVerb::Init(_) => {
            Ok(made(&with_timeout(store.init(), within).await.map_err(of_store)?, &displayed))
        }
        StoreVerb::Check(_) => {
            let within = Some(within.unwrap_or(DEFAULT_TIMEOUT));
            Ok(checked(&with_timeout(store.check(), within).await.map_err(of_store)?, &displayed))
        }
        // An upgrade has no timeout by default: it takes as long as the data requires.
        StoreVerb::Upgrade(_) => {
            Ok(upgraded(&with_timeout(store.upgrade(), within).await.map_err(of_store)?, &displayed))
        }
        StoreVerb::List => Ok(listed(&list(&*store, within).await.map_err(of_store)?)),
        // No timeout by default either: it takes as long as the data requires.
        StoreVerb::Backup { file } => {
            Ok(copied(&with_timeout(store.backup(&file), within).await.map_err(of_store)?, &displayed))
        }
        StoreVerb::Destroy { yes: false } => {
            let within = Some(within.unwrap_or(DEFAULT_TIMEOUT));
            Ok(losses(&with_timeout(store.losses(), within).await.map_err(of_store)?, &displayed))
        }
        StoreVerb::Destroy { yes: true } => {
            Ok(destroyed(&with_timeout(store.destroy(), within).await.map_err(of_store)?, &displayed))
        }
        StoreVerb::Template => Ok(Output::raw(store.template().map_err(of_store)?.into_bytes())),
    }
}

async fn list(store: &dyn Lifecycle, within: Option<Duration>) -> Result<NamespaceList, StoreError> {
    with_timeout(store.list(), Some(within.unwrap_or(DEFAULT_TIMEOUT))).await
}

async fn with_timeout<T: Unpin>(reply: Reply<'_, T>, within: Option<Duration>) -> Result<T, StoreError> {
    let Some(within) = within else { return reply.await };
    let millis = u64::try_from(within.as_millis()).unwrap_or(u64::MAX);
    timeout(within, reply).await.unwrap_or(Err(StoreError::TimedOut { millis }))
}

/// An invalid address is a usage error.
fn address_failure(error: StoreError, url: &str) -> Failure {
    match error {
        StoreError::Invalid { what } => Failure::usage(what).next("correct --store or TIDEGATE_STORE"),
        error => store_failure(error, url),
    }
}

/// Adds the namespace option to the address.
fn with_namespace(url: &str, args: &SpaceArgs) -> Result<String, Failure> {
    let Some(name) = &args.namespace else { return Ok(url.to_owned()) };
    let (place, options) = url.split_once('?').unwrap_or((url, ""));
    if options.split('&').any(|option| option.starts_with("namespace=")) {
        return Err(
            Failure::usage("the address names a namespace, and so does --namespace").next("omit one of them")
        );
    }
    let options = if options.is_empty() { String::new() } else { format!("{options}&") };
    Ok(format!("{place}?{options}namespace={name}"))
}

fn line(name: &str, value: impl std::fmt::Display) -> String {
    format!("{name:<11}{value}")
}

fn made(made: &InitReport, url: &str) -> Output {
    let output = Output::new(codec::made(made, url)).line(line("store", url));
    let parts = made.parts.iter().map(|made| {
        let verb = if made.is_new { "created" } else { "exists" };
        line(verb, &made.part)
    });
    parts.fold(output, Output::line).line(line("schema", format!("version {}", made.schema)))
}

fn checked(checked: &CheckReport, url: &str) -> Output {
    let readiness = checked.readiness();
    let schema = match checked.schema {
        Some(found) => format!("version {found}; this program has {}", checked.schema_wanted),
        None => format!("none; this program has version {}", checked.schema_wanted),
    };
    let is_there = checked.missing.iter().all(|part| part.kind != "namespace");
    let namespace = format!("{}{}", checked.namespace, if is_there { "" } else { ", missing" });
    let output = Output::new(codec::checked(checked, url))
        .line(line("store", url))
        .line(line("engine", format!("{}: {}", checked.of.engine, checked.server)))
        .line(line("schema", schema))
        .line(line("namespace", namespace))
        .line(line("durable", &checked.durability));
    let settings: Vec<_> =
        checked.settings.iter().map(|setting| format!("{} {}", setting.name, setting.value)).collect();
    let mut output = output.line(line("settings", settings.join("; ")));
    if let Some(clock) = checked.clock {
        output = output.line(line("clock", clock_words(clock)));
    }
    if let Some(offset) = checked.clock_offset.filter(|offset| !offset.is_zero()) {
        let ahead = format::duration(offset);
        output = output
            .line(line("offset", format!("the clock stepped back: the store's time is {ahead} ahead of it")));
    }
    for setting in &checked.settings {
        if let Some(danger) = &setting.danger {
            output = output.line(line("danger", format!("{} {}: {danger}", setting.name, setting.value)));
        }
    }
    output = match readiness {
        Readiness::Ready if checked.dangers().next().is_some() => {
            output.line(line("result", "ready, with the dangers above"))
        }
        Readiness::Ready => output.line(line("result", "ready")),
        Readiness::Older => {
            output.line(line("result", "older than this program: run `tidegate store upgrade`"))
        }
        Readiness::Missing => {
            let missing: Vec<_> = checked.missing.iter().map(ToString::to_string).collect();
            let are = if missing.len() == 1 { "is" } else { "are" };
            let missing = missing.join(" and ");
            output.line(line("result", format!("{missing} {are} missing: run `tidegate store init`")))
        }
    };
    let is_good = readiness == Readiness::Ready && checked.dangers().next().is_none();
    if is_good { output } else { output.exit(Exit::Changes) }
}

fn clock_words(clock: ClockDifference) -> String {
    let difference = format::latency(Duration::from_micros(clock.ahead_micros.unsigned_abs()));
    let direction = if clock.ahead_micros < 0 { "behind" } else { "ahead of" };
    format!(
        "the server's is {difference} {direction} this machine's, give or take {}",
        format::latency(clock.within)
    )
}

fn upgraded(upgraded: &UpgradeReport, url: &str) -> Output {
    let output = Output::new(codec::upgraded(upgraded, url)).line(line("store", url));
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
    parts.fold(output, Output::line)
}

fn copied(copied: &BackupReport, url: &str) -> Output {
    let file = format!("`{}`, {} bytes", copied.file.display(), copied.bytes);
    Output::new(codec::copied(copied, url)).line(line("store", url)).line(line("copied to", file))
}

/// What a removal would lose.
fn losses(listed: &NamespaceList, url: &str) -> Output {
    let json = codec::losses(listed, url);
    if listed.spaces.is_empty() {
        // The same output as with `--yes`: an existing store always has a namespace.
        return Output::new(json).line(line("store", url)).line("not found: nothing to remove");
    }
    let output = spaces(listed, Output::new(json).line(line("store", url)).line(line("to lose", "")));
    output.line(line("result", "nothing was removed: use --yes to remove all of it")).exit(Exit::Changes)
}

fn destroyed(destroyed: &DestroyReport, url: &str) -> Output {
    let verb = if destroyed.was_there { "removed" } else { "not found" };
    Output::new(codec::destroyed(destroyed, url)).line(line("store", url)).line(line(verb, &destroyed.part))
}

fn listed(listed: &NamespaceList) -> Output {
    spaces(listed, Output::new(codec::listed_store(listed)))
}

fn spaces(listed: &NamespaceList, output: Output) -> Output {
    if listed.spaces.is_empty() {
        return output.line("no namespaces");
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
    let output = output.table(table);
    if listed.has_more {
        return output.line(format!("there are more: {} are listed", lifecycle::LISTED_MAX));
    }
    output
}
