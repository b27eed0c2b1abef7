//! `tidegate limits`: writes, shows, compares and removes the limits of scopes.

use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{env, fs};
use tidegate_core::duration::Period;
use tidegate_core::limit::rule::Rule;

use clap::{Args, Subcommand};
use tidegate::store::{Listing, PolicyChange};
use tidegate::{
    Across, EntityId, Expect, Limit, Manifest, OnExpiry, OnUnavailable, Policy, ResourceName, Scope, Step,
    Undeclared, Versioned,
};

use super::listed;
use crate::backend::{Backend, CreatedToken, StoredPolicy};
use crate::codec;
use crate::default_paths::without_password;
use crate::failure::{Exit, Failure};
use crate::format;
use crate::manifest::{EntityChange, ManifestChanges};
use crate::output::{Output, Table, Tint};
use crate::parse::{self, LIMITS, PageArgs, SCOPES};

/// Maximum size of a file of limits.
const FILE_MAX: u64 = 16 << 20;

const FILE: &str = "\
The file is TOML, with a table per scope:
  [system]
  limits = [\"rpm:1000/min\", \"tpm:100k/min:150k\"]
  on_expiry = \"return\"                 # or \"settle\"
  [resource.\"gpt-4\"]
  limits = [\"tpm:1M/min\"]
  [entity.acme]
  limits = [\"rpm:50/s\"]
  only = true
  [entity.acme.resource.\"gpt-4\"]
  limits = [\"rpm:5/s\"]
  on_unavailable = { local_share = 0.2 } # or \"block\", \"allow\"
  [entity.bot]                         # any of these declares the entity
  parent = \"acme\"                      # declared here, or stored
  cascade = true
  name = \"A bot\"
  notes = { team = \"search\" }
  [token.ci]                           # created if it does not exist
  scopes = [\"acquire\", \"read\"]
  expires = 2030-01-31                 # default: never
  name = \"CI\"
  secret_env = \"CI_TOKEN\"              # default: generated and shown once
Entities and tokens that it does not declare are left as they are.";

/// Subcommands of `limits`.
#[derive(Debug, Subcommand)]
pub(crate) enum LimitsVerb {
    /// Set the limits of a scope, replacing the existing ones
    #[command(override_usage = "tidegate limits set [OPTIONS] <SCOPE> <LIMIT>...")]
    #[command(after_help = format!("{SCOPES}\n\n{LIMITS}\n\nExample:\n  tidegate limits set entity acme resource gpt-4 rpm:60/min tpm:100k/min"))]
    Set(SetArgs),
    /// Show the limits of a scope
    #[command(override_usage = "tidegate limits show [OPTIONS] <SCOPE>", after_help = SCOPES)]
    Show {
        /// The scope, as described below
        #[arg(required = true, value_name = "SCOPE")]
        scope: Vec<String>,
    },
    /// List limits, by scope
    List(ListArgs),
    /// Remove the limits of a scope
    #[command(override_usage = "tidegate limits delete [OPTIONS] <SCOPE>", after_help = SCOPES)]
    Delete {
        /// The scope, as described below
        #[arg(required = true, value_name = "SCOPE")]
        scope: Vec<String>,
        /// Delete only if the current version is this one
        #[arg(long, value_name = "VERSION", value_parser = parse::expect)]
        expect: Option<Expect>,
    },
    /// Compare a file with the stored limits, entities and tokens; exits with 5 if they differ
    #[command(after_help = FILE)]
    Plan(PlanArgs),
    /// Write the entities, limits and tokens of a file
    ///
    /// The limits are written all or nothing. A token that does not exist is created: its secret is shown once, or
    /// read from the variable that `secret_env` names. A token that exists is never changed.
    #[command(after_help = FILE)]
    Apply(PlanArgs),
}

/// Arguments of `limits set`.
#[derive(Debug, Args)]
pub(crate) struct SetArgs {
    /// The scope and the limits, as described below
    #[arg(required = true, value_name = "SCOPE> <LIMIT")]
    words: Vec<String>,
    /// Ignore the limits of wider scopes
    #[arg(long)]
    only: bool,
    /// Behaviour while the store is unavailable: block, allow, or share:FRACTION of each limit per process
    #[arg(long, value_name = "HOW", value_parser = parse::unavailable)]
    on_unavailable: Option<OnUnavailable>,
    /// Behaviour for expired leases: settle or return
    #[arg(long, value_name = "HOW", value_parser = parse::expiry)]
    on_expiry: Option<OnExpiry>,
    /// Write only if the current version is this one, or `absent`
    #[arg(long, value_name = "VERSION", value_parser = parse::expect)]
    expect: Option<Expect>,
}

/// Arguments of `limits list`.
#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    /// List only the limits of this entity
    #[arg(long, value_name = "ID", value_parser = parse::entity, conflicts_with = "resource")]
    entity: Option<EntityId>,
    /// List only the limits that entities have for this resource
    #[arg(long, value_name = "NAME", value_parser = parse::resource)]
    resource: Option<ResourceName>,
    #[command(flatten)]
    page: PageArgs,
}

/// Arguments of `limits plan` and `limits apply`.
#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    /// A file of limits; `-` reads stdin
    file: PathBuf,
    /// Remove stored limits that the file does not declare
    #[arg(long)]
    prune: bool,
}

pub(crate) async fn run(backend: &impl Backend, verb: LimitsVerb) -> Result<Output, Failure> {
    match verb {
        LimitsVerb::Set(args) => set(backend, args).await,
        LimitsVerb::Show { scope } => show(backend, parse::whole_scope(&scope)?).await,
        LimitsVerb::List(args) => list(backend, args).await,
        LimitsVerb::Delete { scope, expect } => delete(backend, parse::whole_scope(&scope)?, expect).await,
        LimitsVerb::Plan(args) => {
            let changes = plan(backend, &args).await?;
            let output = revoked_lines(&changes, Output::new(codec::plan(&changes)));
            if changes.is_empty() {
                return Ok(output.line("no changes"));
            }
            let words = env::args_os().map(|word| word.to_string_lossy().into_owned());
            let end = format!("{} to change; apply: {}", counted(&changes), apply_command(words));
            Ok(output.table(diff_all(&changes)).line(end).exit(Exit::Changes))
        }
        LimitsVerb::Apply(args) => {
            let changes = plan(backend, &args).await?;
            let applied = changes.apply(backend).await?;
            let output = revoked_lines(&changes, Output::new(codec::applied(&changes, &applied)));
            if changes.is_empty() {
                return Ok(output.line("no changes"));
            }
            let end = format!("{} changed, at version {}", counted(&changes), applied.version);
            let output = output.table(diff_all(&changes)).line(end);
            let shown = |output: Output, made: CreatedToken| {
                output.line(format!("{}: {}", made.token.value.id, made.secret))
            };
            let has_tokens = !applied.tokens.is_empty();
            let output = applied.tokens.into_iter().fold(output, shown);
            let once = "These are the tokens. They are shown once: keep them safe.";
            Ok(if has_tokens { output.line(once) } else { output })
        }
    }
}

/// Names the declared tokens that stay revoked.
fn revoked_lines(changes: &ManifestChanges, output: Output) -> Output {
    let line = |id| format!("the token `{id}` was revoked, and stays so: remove it from the file");
    changes.revoked.iter().map(line).fold(output, Output::line)
}

async fn set(backend: &impl Backend, args: SetArgs) -> Result<Output, Failure> {
    let (scope, limits) = parse::scope(&args.words)?;
    let is_nothing =
        limits.is_empty() && !args.only && args.on_unavailable.is_none() && args.on_expiry.is_none();
    if is_nothing {
        let what = format!("no limit is given for `{}`", format::scope(&scope));
        return Err(Failure::usage(what).next("write name:amount/period[:burst], such as tpm:100k/min:150k"));
    }
    let limits: Result<Vec<Limit>, _> = limits.iter().map(|text| text.parse()).collect();
    let limits = limits.map_err(|error: tidegate::InvalidLimit| Failure::usage(error.to_string()))?;
    let policy = Policy::new(limits).map_err(|error| Failure::usage(error.to_string()))?;
    let policy = if args.only { policy.only() } else { policy };
    let policy = args.on_unavailable.into_iter().fold(policy, Policy::on_unavailable);
    let policy = args.on_expiry.into_iter().fold(policy, Policy::on_expiry);
    policy.check_scope(&scope).map_err(|error| Failure::usage(error.to_string()))?;
    let hint = pooling_hint(&scope, &policy);
    let output = change(backend, scope, Some(policy), args.expect).await?;
    Ok(hint.into_iter().fold(output, Output::line))
}

/// What a limit for many subjects counts, and how it becomes a total, for readers who expect one.
fn pooling_hint(scope: &Scope, policy: &Policy) -> Option<String> {
    let rules = policy.rules();
    let is_alone =
        |rule: &Rule| rules.iter().all(|other| other.across().is_none() || other.name() != rule.name());
    let rule = rules.iter().find(|rule| rule.across().is_none() && is_alone(rule))?;
    let (counted, across, pool) = match scope {
        Scope::System => ("each entity on each resource", "both", "all entities on all resources"),
        Scope::Resource(_) => ("each entity", "entities", "all entities"),
        Scope::Entity(_) => ("each resource", "resources", "all resources"),
        Scope::Subject(_) => return None,
    };
    let name = rule.name();
    Some(format!(
        "`{name}` counts {counted} separately; for one total of {pool}, write {rule},across={across}"
    ))
}

/// The bucket that a limit of a scope counts in.
pub(crate) fn bucket_words(scope: &Scope, across: Option<Across>) -> &'static str {
    match (across, scope) {
        (Some(Across::Both), _) => "all entities on all resources",
        (Some(Across::Entities), Scope::System) => "all entities, per resource",
        (Some(Across::Entities), _) => "all entities",
        (Some(Across::Resources), Scope::System) => "all resources, per entity",
        (Some(Across::Resources), _) => "all resources",
        (None, Scope::System) => "per entity and resource",
        (None, Scope::Resource(_)) => "per entity",
        (None, Scope::Entity(_)) => "per resource",
        (None, Scope::Subject(_)) => "its own",
    }
}

async fn delete(backend: &impl Backend, scope: Scope, expect: Option<Expect>) -> Result<Output, Failure> {
    change(backend, scope, None, expect).await
}

/// Changes a policy and reports its previous state. Optimistic locking keeps the report true: a concurrent
/// change fails the write.
async fn change(
    backend: &impl Backend,
    scope: Scope,
    after: Option<Policy>,
    expect: Option<Expect>,
) -> Result<Output, Failure> {
    let before = backend.policy(&scope).await?;
    if after.is_none() && before.is_none() {
        return Err(nothing_at(&scope));
    }
    let step = Step { scope, before, after };
    let expect = expect.unwrap_or_else(|| step.expect());
    let change = PolicyChange { scope: step.scope.clone(), expect, policy: step.after.clone() };
    let version = backend.change(change).await?;
    let output = Output::new(codec::changed(&step, Some(version)));
    Ok(output.table(diff(std::slice::from_ref(&step))).line(format!("written at version {version}")))
}

fn nothing_at(scope: &Scope) -> Failure {
    Failure::failed(format!("no limits are written for `{}`", format::scope(scope)))
        .next("list limits: tidegate limits list")
}

async fn show(backend: &impl Backend, scope: Scope) -> Result<Output, Failure> {
    let found = backend.policy(&scope).await?.ok_or_else(|| nothing_at(&scope))?;
    let mut table = Table::new(["LIMIT", ">AMOUNT", "PERIOD", ">BURST", ">DEBT", "BUCKET"]);
    for rule in found.value.rules() {
        let shape = rule.shape();
        let period = Period(shape.period()).to_string();
        let [amount, burst, debt_max] =
            [shape.amount(), shape.burst(), rule.debt_max()].map(|units| units.to_string());
        let bucket = bucket_words(&scope, rule.across()).to_owned();
        table.row([rule.name().to_string(), amount, period, burst, debt_max, bucket]);
    }
    let written: StoredPolicy = (scope, found);
    let (scope, Versioned { version, value }) = &written;
    let output = Output::new(codec::written(&written));
    let output =
        output.line(format!("{} at version {version}: {}", format::scope(scope), format::policy(value)));
    Ok(if value.rules().is_empty() { output } else { output.table(table) })
}

async fn list(backend: &impl Backend, args: ListArgs) -> Result<Output, Failure> {
    let listing = match (args.entity, args.resource) {
        (Some(entity), _) => Listing::Entity(entity),
        (None, Some(resource)) => Listing::Custom(resource),
        (None, None) => Listing::All,
    };
    let page = backend.policies(&listing, &args.page.paging()?).await?;
    let mut table = Table::new(["SCOPE", "LIMITS", ">VERSION"]);
    for (scope, policy) in &page.items {
        table.row([format::scope(scope), format::policy(&policy.value), policy.version.to_string()]);
    }
    Ok(listed("limits", &page, codec::written, table))
}

/// Reads a file of limits.
pub(crate) fn manifest(file: &Path) -> Result<Manifest, Failure> {
    Manifest::from_toml(&read(file)?).map_err(|error| {
        let problems = error.problems().iter().map(ToString::to_string).collect::<Vec<_>>().join("\n       ");
        Failure::usage(format!("`{}` is not a file of limits:\n       {problems}", file.display()))
            .next("see the format: tidegate limits plan --help")
    })
}

async fn plan(backend: &impl Backend, args: &PlanArgs) -> Result<ManifestChanges, Failure> {
    let manifest = manifest(&args.file)?;
    let extra = if args.prune { Undeclared::Prune } else { Undeclared::Keep };
    ManifestChanges::plan(backend, &manifest, extra).await
}

fn read(file: &Path) -> Result<String, Failure> {
    let failed = |error: io::Error| {
        Failure::usage(format!("the file `{}` cannot be read: {error}", file.display()))
            .next("choose a file of limits, or `-` for stdin")
    };
    let source: Box<dyn io::Read> = if file == Path::new("-") {
        Box::new(io::stdin())
    } else {
        Box::new(fs::File::open(file).map_err(failed)?)
    };
    let mut text = String::new();
    source.take(FILE_MAX + 1).read_to_string(&mut text).map_err(failed)?;
    if text.len() as u64 > FILE_MAX {
        let what = format!("the file `{}` is larger than {FILE_MAX} bytes", file.display());
        return Err(Failure::usage(what));
    }
    Ok(text)
}

/// The command line of a plan as one that applies it, with its options. A password is shown as `***`.
fn apply_command(words: impl Iterator<Item = String>) -> String {
    let (mut command, mut verbs) = (vec!["tidegate".to_owned()], ["limits", "plan"].iter().peekable());
    for word in words.skip(1) {
        if verbs.next_if(|verb| **verb == word).is_some() {
            command.push(if word == "plan" { "apply".to_owned() } else { word });
            continue;
        }
        command.push(format::shell_word(&without_password(&word)));
    }
    command.join(" ")
}

/// What changes, by kind: `2 scopes, 1 token`.
fn counted(changes: &ManifestChanges) -> String {
    let count = |count: usize, one: &str, many: &str| match count {
        0 => None,
        1 => Some(format!("1 {one}")),
        count => Some(format!("{count} {many}")),
    };
    let entities = count(changes.entities.len(), "entity", "entities");
    let scopes = count(changes.policies.steps().len(), "scope", "scopes");
    let tokens = count(changes.tokens.len(), "token", "tokens");
    entities.into_iter().chain(scopes).chain(tokens).collect::<Vec<_>>().join(", ")
}

/// All changes of a manifest, one row each.
fn diff_all(changes: &ManifestChanges) -> Table {
    let mut table = diff(changes.policies.steps());
    for EntityChange { before, after } in &changes.entities {
        let (sign, tint) = if before.is_none() { ("+", Tint::Good) } else { ("~", Tint::Changed) };
        let before = before.as_ref().map_or_else(|| "-".to_owned(), |before| format::entity(&before.value));
        let name = format!("record of entity {}", after.id());
        table.tinted(tint, [sign.to_owned(), name, before, format::entity(after)]);
    }
    for token in &changes.tokens {
        let name = format!("token {}", token.id);
        table.tinted(Tint::Good, ["+".to_owned(), name, "-".to_owned(), token.scopes.to_string()]);
    }
    table
}

/// The changes, one row per scope.
fn diff(steps: &[Step]) -> Table {
    let mut table = Table::new(["", "SCOPE", "BEFORE", "AFTER"]);
    let or_none = |policy: Option<&Policy>| policy.map_or_else(|| "-".to_owned(), format::policy);
    for step in steps {
        let before: Option<&Arc<Policy>> = step.before.as_ref().map(|before| &before.value);
        let (sign, tint) = match (before, &step.after) {
            (None, _) => ("+", Tint::Good),
            (Some(_), Some(_)) => ("~", Tint::Changed),
            (Some(_), None) => ("-", Tint::Bad),
        };
        let cells = [or_none(before.map(|before| &**before)), or_none(step.after.as_ref())];
        table.tinted(tint, [sign.to_owned(), format::scope(&step.scope)].into_iter().chain(cells));
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plan_shows_the_command_that_applies_it() {
        let table = [
            ("limits plan a.toml", "tidegate limits apply a.toml"),
            (
                "--store redis://u:hunter2@h limits plan - --prune",
                "tidegate --store 'redis://u:***@h' limits apply - --prune",
            ),
            ("--actor limits limits plan plan", "tidegate --actor limits limits apply plan"),
        ];
        for (given, shown) in table {
            let words = ["/usr/bin/tidegate"].into_iter().chain(given.split(' ')).map(str::to_owned);
            assert_eq!(apply_command(words), shown);
        }
    }
}
