//! What may be typed, and its help.

use std::env;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use clap_complete::Shell;

use crate::answer::Format;
use crate::verbs::acquire::AcquireArgs;
use crate::verbs::audit::AuditVerb;
use crate::verbs::entity::EntityVerb;
use crate::verbs::limits::LimitsVerb;
use crate::verbs::look::{BalanceArgs, ExplainArgs};
use crate::verbs::serve::ServeArgs;
use crate::verbs::token::TokenVerb;
use crate::verbs::usage::UsageVerb;

const EXIT_CODES: &str = "\
Exit codes:
  0  done
  1  it could not be done, or what it is about is not there
  2  it was not asked as it can be asked: an argument, a name, a cost or a file of limits is wrong
  3  a limit refuses it
  4  the store is away, or held by another process for too long
  5  `limits plan` has found changes
  acquire … -- COMMAND ends as the command does.";

/// The options that every verb takes stand apart in its help.
const EVERYWHERE: &str = "Options of every command";

const EXAMPLES: &str = "\
Examples:
  tidegate limits set system rpm:60/min tpm:100k/min:150k
  tidegate acquire acme gpt-4 rpm=1 tpm=800
  tidegate acquire acme gpt-4 rpm=1 --within 30s -- ./call-the-model
  tidegate balance acme gpt-4";

/// Limits that many programs share: who may use how much of what, exactly.
///
/// Limits live in a store, a file of SQLite unless said otherwise, and every program that opens the same store keeps the same
/// limits. These verbs look at them, change them and draw from them.
#[derive(Debug, Parser)]
#[command(
    name = "tidegate",
    version,
    max_term_width = 110,
    arg_required_else_help = true,
    subcommand_required = true
)]
#[command(after_help = EXIT_CODES, after_long_help = format!("{EXAMPLES}\n\n{EXIT_CODES}"))]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) shared: SharedArgs,
    #[command(subcommand)]
    pub(crate) verb: Verb,
}

/// What every verb takes.
#[derive(Debug, clap::Args)]
pub(crate) struct SharedArgs {
    /// The store: sqlite:PATH, made if it is not there [default: tidegate/tidegate.db in the data folder]
    ///
    /// The data folder is `XDG_DATA_HOME`, or ~/.local/share. Options come behind a `?`: sqlite:limits.db?namespace=prod
    #[arg(long, global = true, help_heading = EVERYWHERE)]
    #[arg(value_name = "URL", env = "TIDEGATE_STORE", hide_env_values = true)]
    pub(crate) store: Option<String>,
    /// Answer with one JSON document, and with one on stderr if it fails
    #[arg(long, global = true, help_heading = EVERYWHERE)]
    json: bool,
    /// In whose name changes are made, for the audit [default: the user's name]
    #[arg(long, global = true, help_heading = EVERYWHERE)]
    #[arg(value_name = "NAME", env = "TIDEGATE_ACTOR", hide_env_values = true)]
    pub(crate) actor: Option<String>,
}

/// In whose name changes are made.
pub(crate) fn actor(said: Option<String>) -> String {
    let user = || env::var("USER").ok().filter(|user| !user.is_empty());
    said.or_else(user).unwrap_or_else(|| "tidegate".to_owned())
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Serve the limits of a store over HTTP, to programs in any language
    Serve(ServeArgs),
    /// Write, show and compare limits
    #[command(subcommand)]
    Limits(LimitsVerb),
    /// Say who there is, and under whom
    #[command(subcommand)]
    Entity(EntityVerb),
    /// Draw units, or hold them while a command runs
    Acquire(AcquireArgs),
    /// Show what is there of somebody's limits
    Balance(BalanceArgs),
    /// Tell what an acquire would be answered, and why; nothing is taken
    Explain(ExplainArgs),
    /// Show what was used
    #[command(subcommand)]
    Usage(UsageVerb),
    /// Show who has changed what
    #[command(subcommand)]
    Audit(AuditVerb),
    /// Make, list and revoke the tokens that a server lets its callers in by
    #[command(subcommand)]
    Token(TokenVerb),
    /// Say where the store is, and how it is
    Status,
    /// Print completions for a shell
    ///
    /// For bash: source <(tidegate completions bash)
    Completions {
        /// Which shell
        shell: Shell,
    },
}

impl Args {
    /// For whom to answer.
    pub(crate) fn format(&self) -> Format {
        if self.shared.json { Format::Json } else { Format::text() }
    }
}

/// Tells what is wrong with the arguments, or the help that was asked for. A reader that has gone away is no failure.
pub(crate) fn told(error: &clap::Error) -> ExitCode {
    drop(error.print());
    u8::try_from(error.exit_code()).unwrap_or(2).into()
}
