//! The verbs: each calls a backend and returns its output.

pub(crate) mod acquire;
pub(crate) mod audit;
pub(crate) mod bucket;
pub(crate) mod entity;
pub(crate) mod import;
pub(crate) mod inspect;
pub(crate) mod lab;
pub(crate) mod limits;
pub(crate) mod proxy;
pub(crate) mod serve;
pub(crate) mod store;
pub(crate) mod token;
mod tree;
pub(crate) mod upstream;
pub(crate) mod usage;

use std::io::{self, Read as _};
use std::path::Path;
use std::time::Duration;
use std::{env, fs};

use clap::CommandFactory as _;
use tidegate::store::{Cursor, Page};

use crate::args::{Args, Verb, actor};
use crate::backend::Backend;
use crate::codec::{self, Json};
use crate::default_paths::{WriteMode, open_store};
use crate::failure::Failure;
use crate::format;
use crate::output::{Format, Output, Table};
use crate::remote::{Remote, TlsFiles};
use crate::store::InProcess;

/// The default timeout for a store or a server.
pub(crate) const DEFAULT_TIMEOUT: Duration = Duration::from_secs(5);

/// The variable that holds the token for a server.
const TOKEN: &str = "TIDEGATE_TOKEN";
/// Maximum size of a token file: a token is far shorter.
const TOKEN_FILE_MAX: u64 = 4_096;

/// Runs the verb.
pub(crate) async fn run(args: Args, format: Format) -> Result<Output, Failure> {
    if let Verb::Completions { shell } = args.verb {
        let mut script = Vec::new();
        clap_complete::generate(shell, &mut Args::command(), "tidegate", &mut script);
        return Ok(Output::raw(script));
    }
    if let Verb::Lab(verb) = args.verb {
        return lab::run(verb);
    }
    if let Verb::Serve(serving) = args.verb {
        return serve::run(*serving, args.shared, format).await;
    }
    if let Verb::Proxy(proxying) = args.verb {
        return proxy::run(*proxying, args.shared, format).await;
    }
    if let Verb::Mock(mocking) = args.verb {
        return proxy::run_mock(*mocking, format).await;
    }
    if let Verb::Fetch(fetching) = args.verb {
        return crate::fetch::run(*fetching, args.shared.timeout, format).await;
    }
    if let Verb::Import(verb) = args.verb {
        return import::run(verb).await;
    }
    if let Verb::Store(verb) = args.verb {
        return store::run(verb, args.shared.store, args.shared.timeout).await;
    }
    let timeout = args.shared.timeout.unwrap_or(DEFAULT_TIMEOUT);
    if let Some(url) = &args.shared.server {
        let token = token(args.shared.token_file.as_deref())?;
        let tls = TlsFiles::read(&args.shared)?;
        let server = Remote::new(url, token.as_deref(), &tls, timeout)?;
        return match args.verb {
            Verb::Watch(watching) => crate::watch::at_server(watching, server, format).await,
            Verb::Upstream(verb) => upstream::run(&server, verb).await,
            verb => ask(server, verb).await,
        };
    }
    let verb = match args.verb {
        Verb::Upstream(_) => return Err(upstream::no_server()),
        // Without a configured store, a replay neither opens nor creates the default one.
        Verb::Explain(explained) if explained.replay.is_requested() && args.shared.store.is_none() => {
            return crate::replay::run(None::<&InProcess>, explained.replay).await;
        }
        verb => verb,
    };
    let opened = open_store(args.shared.store, WriteMode::Sync, Some(timeout)).await?;
    let place = format!("{} {}", opened.url, opened.namespace);
    let store = InProcess::new(opened, actor(args.shared.actor), timeout)?;
    match verb {
        Verb::Watch(watching) => crate::watch::at_store(watching, store, place, format).await,
        verb => ask(store, verb).await,
    }
}

/// The token from the file, or else from the environment.
fn token(file: Option<&Path>) -> Result<Option<String>, Failure> {
    let Some(file) = file else { return Ok(env::var(TOKEN).ok().filter(|token| !token.is_empty())) };
    let failed = |error: io::Error| {
        Failure::usage(format!("the token file `{}` cannot be read: {error}", file.display()))
            .next("correct --token-file or TIDEGATE_TOKEN_FILE; the file holds the token and nothing else")
    };
    let mut token = String::new();
    fs::File::open(file)
        .and_then(|file| file.take(TOKEN_FILE_MAX).read_to_string(&mut token))
        .map_err(failed)?;
    Ok(Some(token.trim().to_owned()))
}

async fn ask(backend: impl Backend, verb: Verb) -> Result<Output, Failure> {
    match verb {
        Verb::Limits(verb) => limits::run(&backend, verb).await,
        Verb::Entity(verb) => entity::run(&backend, verb).await,
        Verb::Acquire(args) => acquire::run(backend, args).await,
        Verb::Balance(args) => inspect::balance(&backend, args).await,
        Verb::Capacity(args) => inspect::capacity(&backend, args).await,
        Verb::Explain(args) => inspect::explain(&backend, args).await,
        Verb::Bucket(verb) => bucket::run(&backend, verb).await,
        Verb::Usage(verb) => usage::run(&backend, verb).await,
        Verb::Audit(verb) => audit::run(&backend, verb).await,
        Verb::Token(verb) => token::run(&backend, verb).await,
        Verb::Status => status(&backend).await,
        Verb::Serve(_)
        | Verb::Store(_)
        | Verb::Fetch(_)
        | Verb::Watch(_)
        | Verb::Lab(_)
        | Verb::Proxy(_)
        | Verb::Mock(_)
        | Verb::Import(_)
        | Verb::Upstream(_)
        | Verb::Completions { .. } => unreachable!("handled above"),
    }
}

async fn status(backend: &impl Backend) -> Result<Output, Failure> {
    let status = backend.status().await?;
    let durable = if status.is_durable {
        "settled units survive the process"
    } else {
        "units are lost with the process"
    };
    let line = |name: &str, value: String| format!("{name:<9}{value}");
    let offset = match status.clock_offset {
        Duration::ZERO => String::new(),
        offset => format!(", {} ahead of it", format::duration(offset)),
    };
    Ok(Output::new(codec::status(&status))
        .line(line(status.kind, format!("{}, namespace {}", status.url, status.namespace)))
        .line(line("engine", format!("{}, {durable}", status.engine)))
        .line(line("time", format!("{} by the clock of the {}{offset}", status.at, status.clock)))
        .line(line("changes", status.version.to_string()))
        .line(line("latency", format::latency(status.took))))
}

/// The output of a page: its items under `name` in JSON, and the cursor of the next page.
fn listed<T>(name: &str, page: &Page<T>, json: impl Fn(&T) -> Json, table: Table) -> Output {
    let output = Output::new(codec::page(name, page, json));
    let output = if page.items.is_empty() { output.line(format!("no {name}")) } else { output.table(table) };
    match page.next.as_ref().map(Cursor::as_str) {
        // Quoted, since names may contain spaces.
        Some(next) => output.line(format!("there are more: --after '{next}'")),
        None => output,
    }
}
