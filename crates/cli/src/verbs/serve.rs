//! `tidegate serve`: the limits of a store over HTTP.

use std::io::{self, Write as _};
use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use tidegate::store::{HostWall, Store};
use tidegate::{Limiter, Paging, Versioned};
use tidegate_core::limit::name::Namespace;
use tidegate_core::limit::token::{NewToken, Token, TokenId, TokenScope, TokenScopes, TokenState};
use tidegate_server::{
    Bounds, LeaseKey, Secret, ServeError, Server, ServerOptions, Shutdown, State, StateOptions, Stopped,
    StoreKeyring,
};
use tracing_subscriber::filter::LevelFilter;

use crate::answer::{Answer, Format};
use crate::args::{self, SharedArgs};
use crate::config::{LogForm, LogLevel, ServeSettings, Serving};
use crate::failure::{Exit, Failure};
use crate::place::{Opened, Writes, open_store};
use crate::signals::Signals;
use crate::words;
use crate::{child, codec};

const HOW: &str = "\
Without any argument: the store in the data folder, HTTP on 127.0.0.1:8707.
If the store has no token that may change things, one is made and shown, once.
The line that begins with `ready` has the address; from then on it answers.

The first SIGINT or SIGTERM: nobody new enters, and what is under way is answered.
The second: it ends at once.

The file of --config is TOML, and has the same names with `_`:
  store = \"sqlite:/var/lib/tidegate/limits.db\"
  actor = \"ops\"
  listen = \"127.0.0.1:8707\"
  metrics = \"127.0.0.1:9090\"
  without_tls = false
  log = \"json\"                      # or \"text\"
  log_level = \"info\"                # or \"off\", \"error\", \"warn\", \"debug\", \"trace\"
A flag counts before its TIDEGATE_ variable, and that before the file.";

/// The id of the first token, and what follows it should it be taken.
const FIRST: &str = "admin";
/// So many ids are tried for it.
const FIRST_MAX: u32 = 100;

/// How to serve.
#[derive(Debug, Args)]
#[command(after_help = HOW)]
pub(crate) struct ServeArgs {
    #[command(flatten)]
    settings: ServeSettings,
    /// A file with these options
    #[arg(long, value_name = "FILE", env = "TIDEGATE_CONFIG", hide_env_values = true)]
    config: Option<PathBuf>,
    /// Say whether it could serve, and end: reads the configuration, opens the store, tries the addresses
    #[arg(long)]
    check: bool,
}

/// Serves until a signal stops it.
pub(crate) async fn run(args: ServeArgs, shared: SharedArgs, format: Format) -> Result<Answer, Failure> {
    let SharedArgs { store, actor, .. } = shared;
    let settings = ServeSettings { store, actor, ..args.settings };
    let serving = settings.decide(args.config.as_ref())?;
    let opened = open_store(serving.store.clone(), Writes::AsSaid).await?;
    let server = Server::bind(&options(&serving)).await.map_err(|error| refused(&error))?;
    let url = format!("http://{}", server.local_addr());
    if args.check {
        let answer = Answer::new(codec::serving(&url, &opened, None));
        return Ok(answer.line(format!("it could serve {} on {url}", opened.url)));
    }
    log(serving.log, serving.log_level);
    let mut signals = Signals::hear()?;
    let state = state(&opened).await?;
    let token = first_token(&*opened.store, &opened.namespace, &args::actor(serving.actor)).await?;
    ready(format, &url, &opened, token.as_ref());
    let (tell, shutdown) = Shutdown::new();
    let running = server.run(state, shutdown);
    tokio::pin!(running);
    let mut last = None;
    let stopped = loop {
        tokio::select! {
            stopped = &mut running => break stopped,
            heard = signals.next() => {
                if heard.is_to_end() {
                    last = Some(heard);
                    tell.stop();
                }
            }
        }
    };
    opened.close().await;
    match (stopped, last) {
        (Stopped::Drained, _) => Ok(Answer::silent(Exit::Done)),
        (Stopped::AtOnce, Some(heard)) => Ok(Answer::silent(child::exit_by(heard))),
        _ => Err(Failure::failed(
            "what was under way took longer to end than it may: its leases end by their deadline",
        )),
    }
}

fn options(serving: &Serving) -> ServerOptions {
    let options = ServerOptions::new(serving.listen);
    let options = serving.metrics.into_iter().fold(options, ServerOptions::metrics);
    if serving.without_tls { options.without_tls_anywhere() } else { options }
}

fn refused(error: &ServeError) -> Failure {
    let failure = Failure::failed(error.to_string());
    match error {
        ServeError::Exposed { .. } => {
            failure.next("put a proxy with TLS before it and say --without-tls, or listen on 127.0.0.1")
        }
        ServeError::InUse { .. } => failure.next("choose another port with --listen 127.0.0.1:PORT"),
        _ => failure,
    }
}

async fn state(opened: &Opened) -> Result<State, Failure> {
    let limiter = Limiter::over(Arc::clone(&opened.store)).build();
    let limiter = limiter.map_err(|error| Failure::failed(error.to_string()))?;
    let lease_key = LeaseKey::of_store(&*opened.store, &opened.namespace).await?;
    let keyring = Arc::new(StoreKeyring::new(limiter.clone()));
    let namespace = opened.namespace.clone();
    let options =
        StateOptions { keyring, namespace, lease_key, bounds: Bounds::default(), clock: Arc::new(HostWall) };
    Ok(State::with(limiter, options))
}

/// A token that may do everything, made if there is none that may change things.
async fn first_token(
    store: &dyn Store,
    namespace: &Namespace,
    actor: &str,
) -> Result<Option<Secret>, Failure> {
    let now = words::time("0s").map_err(Failure::failed)?;
    let is_enough = |token: &Token| {
        token.scopes.has(TokenScope::Admin)
            && token.namespace == *namespace
            && token.state(now) == TokenState::Good
    };
    let (first, mut paging) = (Paging::first(1_000)?, Paging::first(1_000)?);
    loop {
        let page = store.tokens(&paging).await?;
        if page.items.iter().any(|Versioned { value, .. }| is_enough(value)) {
            return Ok(None);
        }
        match page.next {
            Some(next) => paging = first.clone().after(next),
            None => break,
        }
    }
    for number in 1..=FIRST_MAX {
        let id = if number == 1 { FIRST.to_owned() } else { format!("{FIRST}-{number}") };
        let id = TokenId::new(&id).map_err(|error| Failure::failed(error.to_string()))?;
        let secret = Secret::generate(&id);
        let scopes = TokenScopes::new(TokenScope::ALL);
        let name = "the first, made by serve".to_owned();
        let new = NewToken { id, name, namespace: namespace.clone(), scopes, expires_at: None };
        match store.create_token(&new, secret.hash(), actor).await {
            // One of this id was revoked, or has expired.
            Err(tidegate::StoreError::Stale { .. }) => {}
            made => return Ok(Some(made.map(|_| secret)?)),
        }
    }
    Err(Failure::failed(format!("{FIRST_MAX} tokens `{FIRST}` were revoked: none is made anew"))
        .next("make one: tidegate token create ID --scopes acquire,read,admin"))
}

/// Tells that it answers. A reader that has gone away is no failure.
fn ready(format: Format, url: &str, opened: &Opened, token: Option<&Secret>) {
    let text = match format {
        Format::Json => codec::serving(url, opened, token.map(Secret::reveal)).to_string() + "\n",
        Format::Text { .. } => {
            let token = token.map(|token| format!("token  {} (shown once: keep it safe)\n", token.reveal()));
            format!("store  {}\n{}ready  {url}\n", opened.url, token.unwrap_or_default())
        }
    };
    let mut stdout = io::stdout().lock();
    drop(stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()));
}

fn log(form: LogForm, level: LogLevel) {
    let level = match level {
        LogLevel::Off => LevelFilter::OFF,
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Debug => LevelFilter::DEBUG,
        LogLevel::Trace => LevelFilter::TRACE,
    };
    let lines = tracing_subscriber::fmt().with_max_level(level).with_writer(io::stderr);
    match form {
        LogForm::Text => lines.with_ansi(Format::is_coloured_on_stderr()).init(),
        LogForm::Json => lines.json().init(),
    }
}
