//! `tidegate limits`: what is agreed, written at scopes.

use std::fs;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{Args, Subcommand};
use tidegate::store::{Listing, PolicyChange};
use tidegate::{
    EntityId, Expect, Extra, Limit, Manifest, OnExpiry, OnUnavailable, Plan, Policy, ResourceName, Scope,
    Step, Version, Versioned,
};

use super::listed;
use crate::answer::{Answer, Table, Tint};
use crate::backend::{Backend, Written};
use crate::codec;
use crate::failure::{Exit, Failure};
use crate::words::{self, LIMITS, PageArgs, SCOPES, policy_words, scope_words, whole_scope};

/// A file of limits has at most so many bytes.
const FILE_MAX: u64 = 16 << 20;

const FILE: &str = "\
The file is TOML, a table for each scope:
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
  on_unavailable = { local_share = 0.2 } # or \"block\", \"allow\"";

/// What to do with limits.
#[derive(Debug, Subcommand)]
pub(crate) enum LimitsVerb {
    /// Write the limits of a scope, in the place of what is there
    #[command(override_usage = "tidegate limits set [OPTIONS] <SCOPE> <LIMIT>...")]
    #[command(after_help = format!("{SCOPES}\n\n{LIMITS}\n\nExample:\n  tidegate limits set entity acme resource gpt-4 rpm:60/min tpm:100k/min"))]
    Set(SetArgs),
    /// Show the limits of a scope
    #[command(override_usage = "tidegate limits show [OPTIONS] <SCOPE>", after_help = SCOPES)]
    Show {
        /// Where, as listed below
        #[arg(required = true, value_name = "SCOPE")]
        scope: Vec<String>,
    },
    /// List limits, by scope
    List(ListArgs),
    /// Remove the limits of a scope
    #[command(override_usage = "tidegate limits delete [OPTIONS] <SCOPE>", after_help = SCOPES)]
    Delete {
        /// Where, as listed below
        #[arg(required = true, value_name = "SCOPE")]
        scope: Vec<String>,
        /// Only if this is the version there
        #[arg(long, value_name = "VERSION", value_parser = words::expect)]
        expect: Option<Expect>,
    },
    /// Compare what a file declares with what is written; ends with 5 where they differ
    #[command(after_help = FILE)]
    Plan(PlanArgs),
    /// Write what a file declares, all of it or nothing
    #[command(after_help = FILE)]
    Apply(PlanArgs),
}

/// What to write.
#[derive(Debug, Args)]
pub(crate) struct SetArgs {
    /// Where, and the limits, as listed below
    #[arg(required = true, value_name = "SCOPE> <LIMIT")]
    words: Vec<String>,
    /// Limits of wider scopes do not count beside these
    #[arg(long)]
    only: bool,
    /// What an acquire does when the store is away: block, allow, or share:FRACTION of each limit per process
    #[arg(long, value_name = "HOW", value_parser = words::unavailable)]
    on_unavailable: Option<OnUnavailable>,
    /// What becomes of leases that are never ended: settle or return
    #[arg(long, value_name = "HOW", value_parser = words::expiry)]
    on_expiry: Option<OnExpiry>,
    /// Only if this is the version there, or `absent`
    #[arg(long, value_name = "VERSION", value_parser = words::expect)]
    expect: Option<Expect>,
}

/// What to list.
#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    /// Only those of this entity
    #[arg(long, value_name = "ID", value_parser = words::entity, conflicts_with = "resource")]
    entity: Option<EntityId>,
    /// Only those that entities have of their own for this resource
    #[arg(long, value_name = "NAME", value_parser = words::resource)]
    resource: Option<ResourceName>,
    #[command(flatten)]
    page: PageArgs,
}

/// What to compare.
#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    /// A file of limits; `-` is stdin
    file: PathBuf,
    /// Remove what is written and not declared
    #[arg(long)]
    prune: bool,
}

pub(crate) async fn run(backend: &impl Backend, verb: LimitsVerb) -> Result<Answer, Failure> {
    match verb {
        LimitsVerb::Set(args) => set(backend, args).await,
        LimitsVerb::Show { scope } => show(backend, whole_scope(&scope)?).await,
        LimitsVerb::List(args) => list(backend, args).await,
        LimitsVerb::Delete { scope, expect } => delete(backend, whole_scope(&scope)?, expect).await,
        LimitsVerb::Plan(args) => {
            let plan = plan(backend, &args).await?;
            let exit = if plan.is_empty() { Exit::Done } else { Exit::Changes };
            Ok(planned(&plan, None).exit(exit))
        }
        LimitsVerb::Apply(args) => {
            let plan = plan(backend, &args).await?;
            let version = backend.apply(&plan).await?;
            Ok(planned(&plan, Some(version)))
        }
    }
}

async fn set(backend: &impl Backend, args: SetArgs) -> Result<Answer, Failure> {
    let (scope, limits) = words::scope(&args.words)?;
    let is_nothing =
        limits.is_empty() && !args.only && args.on_unavailable.is_none() && args.on_expiry.is_none();
    if is_nothing {
        let what = format!("no limit is given for `{}`", scope_words(&scope));
        return Err(Failure::usage(what).next("write name:amount/period[:burst], such as tpm:100k/min:150k"));
    }
    let limits: Result<Vec<Limit>, _> = limits.iter().map(|text| text.parse()).collect();
    let limits = limits.map_err(|error: tidegate::InvalidLimit| Failure::usage(error.to_string()))?;
    let policy = Policy::new(limits).map_err(|error| Failure::usage(error.to_string()))?;
    let policy = if args.only { policy.only() } else { policy };
    let policy = args.on_unavailable.into_iter().fold(policy, Policy::on_unavailable);
    let policy = args.on_expiry.into_iter().fold(policy, Policy::on_expiry);
    change(backend, scope, Some(policy), args.expect).await
}

async fn delete(backend: &impl Backend, scope: Scope, expect: Option<Expect>) -> Result<Answer, Failure> {
    change(backend, scope, None, expect).await
}

/// Changes what is there, and tells what was. What it tells is true: if somebody changes it in between, nothing is done.
async fn change(
    backend: &impl Backend,
    scope: Scope,
    after: Option<Policy>,
    expect: Option<Expect>,
) -> Result<Answer, Failure> {
    let before = backend.policy(&scope).await?;
    if after.is_none() && before.is_none() {
        return Err(nothing_at(&scope));
    }
    let step = Step { scope, before, after };
    let expect = expect.unwrap_or_else(|| step.expect());
    let change = PolicyChange { scope: step.scope.clone(), expect, policy: step.after.clone() };
    let version = backend.change(change).await?;
    let answer = Answer::new(codec::changed(&step, Some(version)));
    Ok(answer.table(diff(std::slice::from_ref(&step))).line(format!("written at version {version}")))
}

fn nothing_at(scope: &Scope) -> Failure {
    Failure::failed(format!("no limits are written for `{}`", scope_words(scope)))
        .next("see what is: tidegate limits list")
}

async fn show(backend: &impl Backend, scope: Scope) -> Result<Answer, Failure> {
    let found = backend.policy(&scope).await?.ok_or_else(|| nothing_at(&scope))?;
    let mut table = Table::new(["LIMIT", ">AMOUNT", "PERIOD", ">BURST"]);
    for rule in found.value.rules() {
        let shape = rule.shape();
        let period = humantime::format_duration(shape.period()).to_string();
        table.row([rule.name().to_string(), shape.amount().to_string(), period, shape.burst().to_string()]);
    }
    let written: Written = (scope, found);
    let (scope, Versioned { version, value }) = &written;
    let answer = Answer::new(codec::written(&written));
    let answer = answer.line(format!("{} at version {version}: {}", scope_words(scope), policy_words(value)));
    Ok(if value.rules().is_empty() { answer } else { answer.table(table) })
}

async fn list(backend: &impl Backend, args: ListArgs) -> Result<Answer, Failure> {
    let listing = match (args.entity, args.resource) {
        (Some(entity), _) => Listing::Entity(entity),
        (None, Some(resource)) => Listing::Custom(resource),
        (None, None) => Listing::All,
    };
    let page = backend.policies(&listing, &args.page.paging()?).await?;
    let mut table = Table::new(["SCOPE", "LIMITS", ">VERSION"]);
    for (scope, policy) in &page.items {
        table.row([scope_words(scope), policy_words(&policy.value), policy.version.to_string()]);
    }
    Ok(listed("limits", &page, codec::written, table))
}

/// The limits that a file declares.
pub(crate) fn manifest(file: &Path) -> Result<Manifest, Failure> {
    Manifest::from_toml(&read(file)?).map_err(|error| {
        let problems = error.problems().iter().map(ToString::to_string).collect::<Vec<_>>().join("\n       ");
        Failure::usage(format!("`{}` is no file of limits:\n       {problems}", file.display()))
            .next("see its form: tidegate limits plan --help")
    })
}

async fn plan(backend: &impl Backend, args: &PlanArgs) -> Result<Plan, Failure> {
    let manifest = manifest(&args.file)?;
    backend.plan(manifest.policies(), if args.prune { Extra::Prune } else { Extra::Keep }).await
}

fn read(file: &Path) -> Result<String, Failure> {
    let failed = |error: io::Error| {
        Failure::usage(format!("the file `{}` cannot be read: {error}", file.display()))
            .next("name a file of limits, or `-` for stdin")
    };
    let source: Box<dyn io::Read> = if file == Path::new("-") {
        Box::new(io::stdin())
    } else {
        Box::new(fs::File::open(file).map_err(failed)?)
    };
    let mut text = String::new();
    source.take(FILE_MAX + 1).read_to_string(&mut text).map_err(failed)?;
    if text.len() as u64 > FILE_MAX {
        let what =
            format!("the file `{}` has more than {FILE_MAX} bytes, the most there may be", file.display());
        return Err(Failure::usage(what));
    }
    Ok(text)
}

fn planned(plan: &Plan, version: Option<Version>) -> Answer {
    let answer = Answer::new(codec::plan(plan, version));
    if plan.is_empty() {
        return answer.line("all is as declared");
    }
    let count = plan.steps().len();
    let scopes = if count == 1 { "1 scope".to_owned() } else { format!("{count} scopes") };
    let end = match version {
        Some(version) => format!("{scopes} changed, at version {version}"),
        None => format!("{scopes} to change: tidegate limits apply"),
    };
    answer.table(diff(plan.steps())).line(end)
}

/// A row for each scope that changes.
fn diff(steps: &[Step]) -> Table {
    let mut table = Table::new(["", "SCOPE", "BEFORE", "AFTER"]);
    let or_none = |policy: Option<&Policy>| policy.map_or_else(|| "-".to_owned(), policy_words);
    for step in steps {
        let before: Option<&Arc<Policy>> = step.before.as_ref().map(|before| &before.value);
        let (sign, tint) = match (before, &step.after) {
            (None, _) => ("+", Tint::Good),
            (Some(_), Some(_)) => ("~", Tint::Changed),
            (Some(_), None) => ("-", Tint::Bad),
        };
        let cells = [or_none(before.map(|before| &**before)), or_none(step.after.as_ref())];
        table.tinted(tint, [sign.to_owned(), scope_words(&step.scope)].into_iter().chain(cells));
    }
    table
}
