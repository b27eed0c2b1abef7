//! Command-line arguments and their help.

use std::env;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command, CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use clap_complete::Shell;

use crate::fetch::FetchArgs;
use crate::output::Format;
use crate::parse;
use crate::verbs::acquire::AcquireArgs;
use crate::verbs::audit::AuditVerb;
use crate::verbs::bucket::BucketVerb;
use crate::verbs::entity::EntityVerb;
use crate::verbs::import::ImportVerb;
use crate::verbs::inspect::{BalanceArgs, CapacityArgs, ExplainArgs};
use crate::verbs::lab::LabVerb;
use crate::verbs::limits::LimitsVerb;
use crate::verbs::proxy::{MockArgs, ProxyArgs};
use crate::verbs::serve::ServeArgs;
use crate::verbs::store::StoreVerb;
use crate::verbs::token::TokenVerb;
use crate::verbs::upstream::UpstreamVerb;
use crate::verbs::usage::UsageVerb;
use crate::watch::WatchArgs;

const EXIT_CODES: &str = "\
Exit codes:
  0  done
  1  the operation failed, or its object does not exist
  2  an argument, a name, a cost or a file is invalid
  3  a limit refused, or would have refused in `explain --replay`
  4  the store, the server or a host is unavailable, or timed out
  5  `limits plan` found changes, or `store check` found something to do
acquire … -- COMMAND exits with the code of the command, or with 128 plus the
number of the signal that ended it.";

/// Help heading for the options that every verb takes.
const EVERYWHERE: &str = "Global options";

const EXAMPLES: &str = "\
Examples:
  tidegate limits set system rpm:60/min tpm:100k/min:150k
  tidegate acquire acme gpt-4 rpm=1 tpm=800
  tidegate acquire acme gpt-4 rpm=1 --within 30s -- ./call-the-model
  tidegate balance acme gpt-4
  tidegate fetch -i urls.txt --out pages
  tidegate --server http://127.0.0.1:8707 --token-file token balance acme gpt-4";

/// Rate limits and quotas shared by many programs: exact, and kept in one store.
///
/// Limits live in a store, an SQLite file by default. Every program that opens the same store enforces the
/// same limits; a server enforces them for programs on other machines. These commands inspect limits, change
/// them and draw from them, at a store or at a server.
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

/// Options of every verb.
#[derive(Debug, clap::Args)]
pub(crate) struct SharedArgs {
    /// The store: a file (`sqlite:PATH`), Redis, PostgreSQL or DynamoDB [default: `tidegate/tidegate.db` in the
    /// data folder]
    ///
    /// `sqlite:PATH`, `redis://HOST`, `redis+cluster://HOST,HOST`, `postgres://USER@HOST/DATABASE`: created if
    /// it does not exist. `dynamodb://TABLE?region=REGION`: `store init` creates the table. The data folder
    /// is `XDG_DATA_HOME`, or `~/.local/share`. Options follow a `?`: `sqlite:limits.db?namespace=prod`
    #[arg(long, global = true, help_heading = EVERYWHERE)]
    #[arg(value_name = "URL", env = "TIDEGATE_STORE", hide_env_values = true)]
    pub(crate) store: Option<String>,
    /// Use the server at this address instead of a store
    ///
    /// All verbs but `serve`, `store` and `audit archive` accept it, with the same output. Changes are
    /// audited as the token's.
    #[arg(long, global = true, help_heading = EVERYWHERE)]
    #[arg(value_name = "URL", env = "TIDEGATE_SERVER", hide_env_values = true)]
    pub(crate) server: Option<String>,
    /// Read the token for the server from this file; or set `TIDEGATE_TOKEN` to the token itself
    ///
    /// No option takes the token itself: command lines are visible to other users of the machine and end up
    /// in shell histories.
    #[arg(long, global = true, help_heading = EVERYWHERE)]
    #[arg(value_name = "FILE", env = "TIDEGATE_TOKEN_FILE", hide_env_values = true)]
    pub(crate) token_file: Option<PathBuf>,
    /// Trust only servers whose certificate is signed by one in this PEM file
    #[arg(long, global = true, help_heading = EVERYWHERE)]
    #[arg(value_name = "FILE", env = "TIDEGATE_CA", hide_env_values = true)]
    pub(crate) ca: Option<PathBuf>,
    /// Present this client certificate, in PEM, to a server that requires one
    #[arg(long, global = true, help_heading = EVERYWHERE)]
    #[arg(value_name = "FILE", env = "TIDEGATE_CLIENT_CERT", hide_env_values = true)]
    pub(crate) client_cert: Option<PathBuf>,
    /// The private key of that certificate, in PEM
    #[arg(long, global = true, help_heading = EVERYWHERE)]
    #[arg(value_name = "FILE", env = "TIDEGATE_CLIENT_KEY", hide_env_values = true)]
    pub(crate) client_key: Option<PathBuf>,
    /// Print one JSON document to stdout, or to stderr on failure
    #[arg(long, global = true, help_heading = EVERYWHERE)]
    json: bool,
    /// Record changes at a store under this name in the audit [default: the user's name]
    #[arg(long, global = true, help_heading = EVERYWHERE)]
    #[arg(value_name = "NAME", env = "TIDEGATE_ACTOR", hide_env_values = true)]
    pub(crate) actor: Option<String>,
    /// Treat a store or server as unavailable if it takes longer to respond, from 1ms to 1m [default: 5s]
    #[arg(long, global = true, help_heading = EVERYWHERE, value_parser = parse::timeout)]
    #[arg(value_name = "SPAN", env = "TIDEGATE_TIMEOUT", hide_env_values = true)]
    pub(crate) timeout: Option<Duration>,
}

/// The actor that changes are audited under.
pub(crate) fn actor(configured: Option<String>) -> String {
    let user = || env::var("USER").ok().filter(|user| !user.is_empty());
    configured.or_else(user).unwrap_or_else(|| "tidegate".to_owned())
}

/// The verbs.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Serve the limits of a store over HTTP, to programs in any language
    Serve(Box<ServeArgs>),
    /// Forward calls to LLM APIs as fast as they accept them: callers wait instead of a 429
    Proxy(Box<ProxyArgs>),
    /// Behave like an LLM API with limits of your choice
    Mock(Box<MockArgs>),
    /// Write, show and compare limits
    #[command(subcommand)]
    Limits(LimitsVerb),
    /// Create, show and move entities
    #[command(subcommand)]
    Entity(EntityVerb),
    /// Draw units, or hold them while a command runs
    Acquire(AcquireArgs),
    /// Show how much of an entity's limits is available
    Balance(BalanceArgs),
    /// Show how much of a resource's limits is in use, over all entities
    Capacity(CapacityArgs),
    /// Show how an acquire would be decided, and why, without drawing anything
    Explain(ExplainArgs),
    /// Repair a bucket after a wrong settlement
    #[command(subcommand)]
    Bucket(BucketVerb),
    /// Show usage
    #[command(subcommand)]
    Usage(UsageVerb),
    /// Show the audit of changes
    #[command(subcommand)]
    Audit(AuditVerb),
    /// Create, list and revoke the tokens that clients authenticate to a server with
    #[command(subcommand)]
    Token(TokenVerb),
    /// Create, check, upgrade and list a store
    #[command(subcommand)]
    Store(StoreVerb),
    /// Print what another limiter declares as a manifest
    #[command(subcommand)]
    Import(ImportVerb),
    /// Get permits for calls of upstreams at a server, and show the upstreams
    #[command(subcommand)]
    Upstream(UpstreamVerb),
    /// Show the address and state of the store or the server
    Status,
    /// Show decisions, refusals and levels in the terminal, as they happen
    Watch(WatchArgs),
    /// Fetch files from many hosts, each at the rate it sustains
    Fetch(Box<FetchArgs>),
    /// Measure how strategies use limits that they do not know, on simulated upstreams
    #[command(subcommand)]
    Lab(LabVerb),
    /// Print completions for a shell
    ///
    /// For bash: source <(tidegate completions bash)
    Completions {
        /// The shell
        shell: Shell,
    },
}

/// The global options that a verb ignores, by their ids. Its help omits them. `path` is its name after those of the
/// verbs above it; what one of those ignores, it ignores too.
fn ignored(path: &str) -> &'static [&'static str] {
    const IDS: [&str; 9] =
        ["server", "token_file", "ca", "client_cert", "client_key", "actor", "store", "timeout", "json"];
    match path {
        "serve" | "proxy" => &IDS[..5],
        "store" => &IDS[..6],
        "fetch" => &IDS[..7],
        "lab" | "mock" | "import" => &IDS[..8],
        "upstream" => &IDS[5..7],
        "completions" => &IDS,
        // They change nothing that is audited.
        "acquire" | "balance" | "capacity" | "explain" | "usage" | "audit" | "status" | "watch"
        | "limits show" | "limits list" | "entity show" | "entity list" | "entity children"
        | "entity tree" | "token list" => &IDS[5..6],
        _ => &[],
    }
}

/// The global options that the given verb and those above it ignore.
fn ignored_of(matches: &ArgMatches) -> impl Iterator<Item = &'static str> {
    let (mut path, mut below, mut all) = (String::new(), matches, Vec::new());
    while let Some((name, matches)) = below.subcommand() {
        path = if path.is_empty() { name.to_owned() } else { format!("{path} {name}") };
        all.extend(ignored(&path));
        below = matches;
    }
    all.into_iter()
}

/// The verbs below `path`, whose help omits the global options that they ignore.
fn hide_ignored(command: Command, path: &str, globals: &[Arg]) -> Command {
    let verbs: Vec<_> = command.get_subcommands().map(|verb| verb.get_name().to_owned()).collect();
    verbs.into_iter().fold(command, |command, verb| {
        let path = if path.is_empty() { verb.clone() } else { format!("{path} {verb}") };
        // clap adds a global option only where there is none of its name.
        let hidden = globals.iter().filter(|arg| ignored(&path).contains(&arg.get_id().as_str()));
        let hidden: Vec<_> = hidden.map(|arg| arg.clone().hide(true)).collect();
        command.mut_subcommand(verb, |verb| hide_ignored(verb.args(hidden), &path, globals))
    })
}

impl Args {
    /// Parses the command line and the environment. A `--store` or `--server` flag overrides the other's
    /// variable.
    pub(crate) fn read() -> Result<Self, clap::Error> {
        let mut command = Self::for_people();
        let matches = command.clone().try_get_matches()?;
        let mut args = Self::from_arg_matches(&matches)?;
        let is_typed = |id: &str| matches.value_source(id) == Some(ValueSource::CommandLine);
        let verb = matches.subcommand_name().unwrap_or_default();
        let misplaced = ignored_of(&matches).find(|id| is_typed(id)).and_then(|id| {
            command.build();
            command.get_arguments().find(|arg| arg.get_id() == id).map(ToString::to_string)
        });
        let mut conflict = |what: &str| Err(command.error(ErrorKind::ArgumentConflict, what));
        let shared = &mut args.shared;
        match args.verb {
            Verb::Store(_) if is_typed("server") => {
                return conflict(&format!(
                    "`{verb}` works on the store directly: use --store <URL> instead of '--server <URL>'",
                ));
            }
            Verb::Store(_) if shared.server.is_some() && shared.store.is_none() => {
                return conflict(&format!(
                    "TIDEGATE_SERVER is set, but `{verb}` works on the store directly: use --store <URL>",
                ));
            }
            Verb::Serve(_)
            | Verb::Proxy(_)
            | Verb::Mock(_)
            | Verb::Store(_)
            | Verb::Fetch(_)
            | Verb::Lab(_)
            | Verb::Import(_)
            | Verb::Completions { .. } => {
                shared.server = None;
            }
            Verb::Upstream(_) => shared.store = None,
            _ => match (is_typed("store"), is_typed("server")) {
                (true, false) => shared.server = None,
                (false, true) => shared.store = None,
                (true, true) => {
                    return conflict("the argument '--server <URL>' cannot be used with '--store <URL>'");
                }
                (false, false) if shared.store.is_some() && shared.server.is_some() => {
                    return conflict(
                        "TIDEGATE_STORE and TIDEGATE_SERVER are both set: unset one, or use --store or --server",
                    );
                }
                (false, false) => {}
            },
        }
        if let Some(arg) = misplaced {
            return conflict(&format!("the argument '{arg}' does not apply to this command"));
        }
        let of_tls = [("ca", "--ca"), ("client_cert", "--client-cert"), ("client_key", "--client-key")];
        if let Some((_, flag)) = of_tls.iter().find(|(id, _)| is_typed(id))
            && !shared.server.as_ref().is_some_and(|url| url.starts_with("https://"))
        {
            return conflict(&format!(
                "the argument '{flag} <FILE>' requires a server with TLS: use --server https://…"
            ));
        }
        match shared.server {
            None if is_typed("token_file") => {
                conflict("the argument '--token-file <FILE>' requires a server: use --server <URL>")
            }
            Some(_) if is_typed("actor") => {
                conflict("a server records changes under its token: '--actor <NAME>' applies to stores only")
            }
            _ => Ok(args),
        }
    }

    /// The command line, whose help omits the global options that a verb ignores.
    pub(crate) fn for_people() -> Command {
        let command = Self::command();
        let globals: Vec<_> = command.get_arguments().filter(|arg| arg.is_global_set()).cloned().collect();
        hide_ignored(command, "", &globals)
    }

    /// The output format.
    pub(crate) fn format(&self) -> Format {
        if self.shared.json { Format::Json } else { Format::text() }
    }
}

/// Prints an argument error, or the requested help. A closed pipe is not a failure.
pub(crate) fn print_error(error: &clap::Error) -> ExitCode {
    drop(error.print());
    u8::try_from(error.exit_code()).unwrap_or(2).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn help_omits_options_that_the_verb_ignores() {
        let help = |verb: &str| {
            let mut command = Args::for_people();
            command.build();
            let verb = verb
                .split(' ')
                .fold(&mut command, |command, name| command.find_subcommand_mut(name).expect("a verb"));
            verb.render_help().to_string()
        };
        let table = [
            ("fetch", &["--json", "--timeout"][..], &["--server", "--store", "--token-file", "--actor"][..]),
            ("lab run", &["--json"], &["--server", "--store", "--timeout"]),
            ("completions", &[], &["--json", "--server", "Global options"]),
            ("store check", &["--store", "--timeout"], &["--server", "--ca", "--actor"]),
            ("serve", &["--store", "--actor"], &["--server", "--token-file"]),
            ("balance", &["--store", "--server"], &["--actor"]),
            ("limits set", &["--store", "--server", "--actor"], &[]),
            ("limits show", &["--store", "--server"], &["--actor"]),
            // It prints the command that applies the plan, with the same options.
            ("limits plan", &["--actor"], &[]),
            ("entity tree", &["--store", "--server"], &["--actor"]),
            ("entity delete", &["--actor"], &[]),
            ("token list", &["--store", "--server"], &["--actor"]),
            ("token revoke", &["--actor"], &[]),
            ("bucket set", &["--actor"], &[]),
            ("usage plot", &["--json"], &["--actor"]),
        ];
        for (verb, shown, hidden) in table {
            let help = help(verb);
            let has = |option: &&&str| {
                help.contains(&format!("{option} ")) || help.contains(&format!("{option}\n"))
            };
            assert_eq!(shown.iter().filter(has).count(), shown.len(), "{verb}: {help}");
            assert_eq!(hidden.iter().filter(has).count(), 0, "{verb}: {help}");
        }
    }

    #[test]
    fn after_help_fits_80_columns() {
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
