//! The verbs: each asks a backend, and answers.

pub(crate) mod acquire;
pub(crate) mod audit;
pub(crate) mod entity;
pub(crate) mod limits;
pub(crate) mod look;
pub(crate) mod serve;
pub(crate) mod token;
pub(crate) mod usage;

use clap::CommandFactory as _;
use tidegate::store::{Cursor, Page};

use crate::answer::{Answer, Format, Table};
use crate::args::{Args, Verb, actor};
use crate::backend::Backend;
use crate::codec::{self, Json};
use crate::failure::Failure;
use crate::place::{Writes, open_store};
use crate::store::InProcess;

/// Does what was asked.
pub(crate) async fn run(args: Args, format: Format) -> Result<Answer, Failure> {
    if let Verb::Completions { shell } = args.verb {
        let mut script = Vec::new();
        clap_complete::generate(shell, &mut Args::command(), "tidegate", &mut script);
        return Ok(Answer::raw(script));
    }
    if let Verb::Serve(serving) = args.verb {
        return serve::run(serving, args.shared, format).await;
    }
    let opened = open_store(args.shared.store, Writes::Through).await?;
    let backend = InProcess::new(opened, actor(args.shared.actor))?;
    ask(backend, args.verb).await
}

async fn ask(backend: impl Backend, verb: Verb) -> Result<Answer, Failure> {
    match verb {
        Verb::Limits(verb) => limits::run(&backend, verb).await,
        Verb::Entity(verb) => entity::run(&backend, verb).await,
        Verb::Acquire(args) => acquire::run(backend, args).await,
        Verb::Balance(args) => look::balance(&backend, args).await,
        Verb::Explain(args) => look::explain(&backend, args).await,
        Verb::Usage(verb) => usage::run(&backend, verb).await,
        Verb::Audit(verb) => audit::run(&backend, verb).await,
        Verb::Token(verb) => token::run(&backend, verb).await,
        Verb::Status => status(&backend).await,
        Verb::Serve(_) | Verb::Completions { .. } => unreachable!("these ask no backend"),
    }
}

async fn status(backend: &impl Backend) -> Result<Answer, Failure> {
    let status = backend.status().await?;
    let durable =
        if status.is_durable { "what is settled survives the process" } else { "gone with the process" };
    let line = |name: &str, value: String| format!("{name:<9}{value}");
    Ok(Answer::new(codec::status(&status))
        .line(line("store", format!("{}, namespace {}", status.url, status.namespace)))
        .line(line("engine", format!("{}, {durable}", status.engine)))
        .line(line("time", format!("{} by the clock of the {}", status.at, status.clock)))
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
