//! What may be typed, and its help.

use std::env;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use clap_complete::Shell;

use crate::answer::Format;
use crate::fetch::FetchArgs;
use crate::verbs::acquire::AcquireArgs;
use crate::verbs::audit::AuditVerb;
use crate::verbs::entity::EntityVerb;
use crate::verbs::lab::LabVerb;
use crate::verbs::limits::LimitsVerb;
use crate::verbs::look::{BalanceArgs, CapacityArgs, ExplainArgs};
use crate::verbs::serve::ServeArgs;
use crate::verbs::store::StoreVerb;
use crate::verbs::token::TokenVerb;
use crate::verbs::usage::UsageVerb;
use crate::watch::WatchArgs;
use crate::words;

const EXIT_CODES: &str = "\
Exit codes:
  0  done
  1  it could not be done, or what it is about is not there
  2  it was not asked as it can be: an argument, a name, a cost, a file is wrong
  3  a limit refuses it, or would have in `explain --replay`
  4  the store, the server or a host is away, or does not answer in time
  5  `limits plan` has found changes, `store check` something to do
  acquire … -- COMMAND ends as the command does, and what a signal ends
  with 128 and its number.";

/// The options that every verb takes stand apart in its help.
const EVERYWHERE: &str = "Options of every command";

const EXAMPLES: &str = "\
Examples:
  tidegate limits set system rpm:60/min tpm:100k/min:150k
  tidegate acquire acme gpt-4 rpm=1 tpm=800
  tidegate acquire acme gpt-4 rpm=1 --within 30s -- ./call-the-model
  tidegate balance acme gpt-4
  tidegate fetch -i urls.txt --out pages
  tidegate --server http://127.0.0.1:8707 --token-file token balance acme gpt-4";

/// Limits that many programs share: who may use how much of what, exactly.
///
/// Limits live in a store, a file of SQLite unless said otherwise, and every program that opens the same store keeps the same
/// limits; a server keeps them for programs that are elsewhere. These verbs look at them, change them and draw from them, at a
/// store or at a server.
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
    /// The store: a file (sqlite:PATH), Redis, PostgreSQL or DynamoDB [default: tidegate/tidegate.db in the data folder]
    ///
    /// sqlite:PATH, `redis://HOST`, `redis+cluster://HOST,HOST`, `postgres://USER@HOST/DATABASE`: it is made if it is not there.
    /// `dynamodb://TABLE?region=REGION`: the table is made by `store init`.
    /// The data folder is `XDG_DATA_HOME`, or ~/.local/share. Options come behind a `?`: sqlite:limits.db?namespace=prod
    #[arg(long, global = true, help_heading = EVERYWHERE)]
    #[arg(value_name = "URL", env = "TIDEGATE_STORE", hide_env_values = true)]
    pub(crate) store: Option<String>,
    /// Ask the server at this address in the place of a store
    ///
    /// All verbs but `serve`, `store` and `audit archive` ask it, and answer the same. Changes are made in the name of the token.
    #[arg(long, global = true, help_heading = EVERYWHERE)]
    #[arg(value_name = "URL", env = "TIDEGATE_SERVER", hide_env_values = true)]
    pub(crate) server: Option<String>,
    /// A file that holds the token for the server; or set `TIDEGATE_TOKEN` to the token itself
    ///
    /// No option takes the token itself: everybody on a machine sees its command lines, and shells write them down.
    #[arg(long, global = true, help_heading = EVERYWHERE)]
    #[arg(value_name = "FILE", env = "TIDEGATE_TOKEN_FILE", hide_env_values = true)]
    pub(crate) token_file: Option<PathBuf>,
    /// Trust a server whose certificate is signed by one of those in this file, in PEM, and no other
    #[arg(long, global = true, help_heading = EVERYWHERE)]
    #[arg(value_name = "FILE", env = "TIDEGATE_CA", hide_env_values = true)]
    pub(crate) ca: Option<PathBuf>,
    /// The client's own certificate, in PEM, for a server that asks for one
    #[arg(long, global = true, help_heading = EVERYWHERE)]
    #[arg(value_name = "FILE", env = "TIDEGATE_CLIENT_CERT", hide_env_values = true)]
    pub(crate) client_cert: Option<PathBuf>,
    /// The key of that certificate, in PEM
    #[arg(long, global = true, help_heading = EVERYWHERE)]
    #[arg(value_name = "FILE", env = "TIDEGATE_CLIENT_KEY", hide_env_values = true)]
    pub(crate) client_key: Option<PathBuf>,
    /// Answer with one JSON document, and with one on stderr if it fails
    #[arg(long, global = true, help_heading = EVERYWHERE)]
    json: bool,
    /// In whose name changes are made at a store, for the audit [default: the user's name]
    #[arg(long, global = true, help_heading = EVERYWHERE)]
    #[arg(value_name = "NAME", env = "TIDEGATE_ACTOR", hide_env_values = true)]
    pub(crate) actor: Option<String>,
    /// How long to wait for an answer before it counts as away, from 1ms to 1m [default: 5s]
    #[arg(long, global = true, help_heading = EVERYWHERE, value_parser = words::timeout)]
    #[arg(value_name = "SPAN", env = "TIDEGATE_TIMEOUT", hide_env_values = true)]
    pub(crate) timeout: Option<Duration>,
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
    Serve(Box<ServeArgs>),
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
    /// Show how much of a resource's limits is in use, over all entities
    Capacity(CapacityArgs),
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
    /// Make a store, look at it, bring it up to date, list what is in it
    #[command(subcommand)]
    Store(StoreVerb),
    /// Say where the store or the server is, and how it is
    Status,
    /// Show decisions, refusals and levels in the terminal, as they happen
    Watch(WatchArgs),
    /// Fetch files from many hosts, each as often as it bears
    Fetch(Box<FetchArgs>),
    /// Measure how strategies use limits that they do not know, on simulated upstreams
    #[command(subcommand)]
    Lab(LabVerb),
    /// Print completions for a shell
    ///
    /// For bash: source <(tidegate completions bash)
    Completions {
        /// Which shell
        shell: Shell,
    },
}

impl Args {
    /// What was typed, with what the environment says. Where both a store and a server are said, the one that was typed counts.
    pub(crate) fn read() -> Result<Self, clap::Error> {
        let mut command = Self::command();
        let matches = command.clone().try_get_matches()?;
        let mut args = Self::from_arg_matches(&matches)?;
        let is_typed = |id: &str| matches.value_source(id) == Some(ValueSource::CommandLine);
        let mut conflict = |what: &str| Err(command.error(ErrorKind::ArgumentConflict, what));
        let shared = &mut args.shared;
        let verb = matches.subcommand_name().unwrap_or_default();
        match args.verb {
            Verb::Serve(_) | Verb::Fetch(_) | Verb::Lab(_) | Verb::Completions { .. }
                if is_typed("server") =>
            {
                return conflict(
                    "the argument '--server <URL>' is for verbs that ask one, and this one does not",
                );
            }
            Verb::Store(_) if is_typed("server") => {
                return conflict(&format!(
                    "`{verb}` works on the store itself, where it is: say --store <URL>, and no '--server <URL>'",
                ));
            }
            Verb::Store(_) if shared.server.is_some() && shared.store.is_none() => {
                return conflict(&format!(
                    "TIDEGATE_SERVER names a server, and `{verb}` works on the store itself: say --store <URL>",
                ));
            }
            Verb::Serve(_) | Verb::Store(_) | Verb::Fetch(_) | Verb::Lab(_) | Verb::Completions { .. } => {
                shared.server = None;
            }
            _ => match (is_typed("store"), is_typed("server")) {
                (true, false) => shared.server = None,
                (false, true) => shared.store = None,
                (true, true) => {
                    return conflict("the argument '--server <URL>' cannot be used with '--store <URL>'");
                }
                (false, false) if shared.store.is_some() && shared.server.is_some() => {
                    return conflict(
                        "TIDEGATE_STORE and TIDEGATE_SERVER are both set: unset one, or say --store or --server",
                    );
                }
                (false, false) => {}
            },
        }
        let of_tls = [("ca", "--ca"), ("client_cert", "--client-cert"), ("client_key", "--client-key")];
        if let Some((_, flag)) = of_tls.iter().find(|(id, _)| is_typed(id))
            && !shared.server.as_ref().is_some_and(|url| url.starts_with("https://"))
        {
            return conflict(&format!(
                "the argument '{flag} <FILE>' is for a server with TLS: say --server https://…"
            ));
        }
        match shared.server {
            None if is_typed("token_file") => {
                conflict("the argument '--token-file <FILE>' is for a server: say --server <URL>")
            }
            Some(_) if is_typed("actor") => {
                conflict("a server makes changes in the name of the token: '--actor <NAME>' is for stores")
            }
            _ => Ok(args),
        }
    }

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

#[cfg(test)]
mod tests {
    use clap::Command;

    use super::*;

    #[test]
    fn the_help_behind_the_options_fits_a_terminal_of_80_columns() {
        fn walk(command: &Command) {
            for text in [command.get_after_help(), command.get_after_long_help()].into_iter().flatten() {
                for line in text.to_string().lines() {
                    assert!(line.chars().count() <= 80, "{}: {line}", command.get_name());
                }
            }
            command.get_subcommands().for_each(walk);
        }
        walk(&Args::command());
        Args::command().debug_assert();
    }
}
