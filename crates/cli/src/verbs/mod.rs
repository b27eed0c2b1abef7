//! The verbs: each asks a backend, and answers.

pub(crate) mod acquire;
pub(crate) mod audit;
pub(crate) mod entity;
pub(crate) mod lab;
pub(crate) mod limits;
pub(crate) mod look;
pub(crate) mod serve;
pub(crate) mod store;
pub(crate) mod token;
pub(crate) mod usage;

use std::io::{self, Read as _};
use std::path::Path;
use std::time::Duration;
use std::{env, fs};

use clap::CommandFactory as _;
use tidegate::store::{Cursor, Page};

use crate::answer::{Answer, Format, Table};
use crate::args::{Args, Verb, actor};
use crate::backend::Backend;
use crate::codec::{self, Json};
use crate::failure::Failure;
use crate::place::{Writes, open_store};
use crate::remote::{Remote, Trust};
use crate::store::InProcess;
use crate::words::span_words;

/// Nobody waits longer for a store or a server than this, unless they say so.
const PATIENCE: Duration = Duration::from_secs(5);

/// The variable that holds the token for a server.
const TOKEN: &str = "TIDEGATE_TOKEN";
/// No more of its file is read: a token is far shorter.
const TOKEN_FILE_MAX: u64 = 4_096;

/// Does what was asked.
pub(crate) async fn run(args: Args, format: Format) -> Result<Answer, Failure> {
    if let Verb::Completions { shell } = args.verb {
        let mut script = Vec::new();
        clap_complete::generate(shell, &mut Args::command(), "tidegate", &mut script);
        return Ok(Answer::raw(script));
    }
    if let Verb::Lab(verb) = args.verb {
        return lab::run(verb);
    }
    if let Verb::Serve(serving) = args.verb {
        return serve::run(*serving, args.shared, format).await;
    }
    if let Verb::Fetch(fetching) = args.verb {
        return crate::fetch::run(*fetching, args.shared.timeout, format).await;
    }
    if let Verb::Store(verb) = args.verb {
        return store::run(verb, args.shared.store, args.shared.timeout).await;
    }
    let patience = args.shared.timeout.unwrap_or(PATIENCE);
    if let Some(url) = &args.shared.server {
        let token = token(args.shared.token_file.as_deref())?;
        let trust = Trust::read(&args.shared)?;
        let server = Remote::new(url, token.as_deref(), &trust, patience)?;
        return match args.verb {
            Verb::Watch(watching) => crate::watch::at_server(watching, server, format).await,
            verb => ask(server, verb).await,
        };
    }
    let verb = match args.verb {
        // Nobody has named a store: the one in the data folder is not meant, nor made.
        Verb::Explain(explained) if explained.replay.is_asked() && args.shared.store.is_none() => {
            return crate::replay::run(None::<&InProcess>, explained.replay).await;
        }
        verb => verb,
    };
    let opened = open_store(args.shared.store, Writes::Through, Some(patience)).await?;
    let place = format!("{} {}", opened.url, opened.namespace);
    let store = InProcess::new(opened, actor(args.shared.actor), patience)?;
    match verb {
        Verb::Watch(watching) => crate::watch::at_store(watching, store, place, format).await,
        verb => ask(store, verb).await,
    }
}

/// The token that a file holds, or else the environment.
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

async fn ask(backend: impl Backend, verb: Verb) -> Result<Answer, Failure> {
    match verb {
        Verb::Limits(verb) => limits::run(&backend, verb).await,
        Verb::Entity(verb) => entity::run(&backend, verb).await,
        Verb::Acquire(args) => acquire::run(backend, args).await,
        Verb::Balance(args) => look::balance(&backend, args).await,
        Verb::Capacity(args) => look::capacity(&backend, args).await,
        Verb::Explain(args) => look::explain(&backend, args).await,
        Verb::Usage(verb) => usage::run(&backend, verb).await,
        Verb::Audit(verb) => audit::run(&backend, verb).await,
        Verb::Token(verb) => token::run(&backend, verb).await,
        Verb::Status => status(&backend).await,
        Verb::Serve(_)
        | Verb::Store(_)
        | Verb::Fetch(_)
        | Verb::Watch(_)
        | Verb::Lab(_)
        | Verb::Completions { .. } => unreachable!("these are done before"),
    }
}

async fn status(backend: &impl Backend) -> Result<Answer, Failure> {
    let status = backend.status().await?;
    let durable =
        if status.is_durable { "what is settled survives the process" } else { "gone with the process" };
    let line = |name: &str, value: String| format!("{name:<9}{value}");
    let offset = match status.clock_offset {
        Duration::ZERO => String::new(),
        offset => format!(", {} ahead of it", span_words(offset)),
    };
    Ok(Answer::new(codec::status(&status))
        .line(line(status.kind, format!("{}, namespace {}", status.url, status.namespace)))
        .line(line("engine", format!("{}, {durable}", status.engine)))
        .line(line("time", format!("{} by the clock of the {}{offset}", status.at, status.clock)))
        .line(line("changes", status.version.to_string()))
        .line(line("answers", format!("in {:.1} ms", status.took.as_secs_f64() * 1_000.0))))
}

/// A page of a listing, `name` of it in JSON, with where it goes on.
fn listed<T>(name: &str, page: &Page<T>, json: impl Fn(&T) -> Json, table: Table) -> Answer {
    let answer = Answer::new(codec::page(name, page, json));
    let answer = if page.items.is_empty() { answer.line(format!("no {name}")) } else { answer.table(table) };
    match page.next.as_ref().map(Cursor::as_str) {
        // Names may hold spaces.
        Some(next) => answer.line(format!("there are more: --after '{next}'")),
        None => answer,
    }
}
