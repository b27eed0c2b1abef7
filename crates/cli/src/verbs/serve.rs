//! `tidegate serve`: the limits of a store over HTTP.

use std::io::{self, Write as _};
use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use tidegate::store::{HostWall, Store};
use tidegate::{Limiter, LimiterBuilder, Paging, Versioned};
use tidegate_core::limit::name::Namespace;
use tidegate_core::limit::token::{NewToken, Token, TokenId, TokenScope, TokenScopes, TokenState};
use tidegate_server::{
    LeaseKey, Secret, ServeError, Server, ServerOptions, Shutdown, State, StateOptions, Stopped,
    StoreKeyring, StoreMeters, Tls, TlsError, TlsOptions,
};
use tracing_subscriber::filter::LevelFilter;

use crate::answer::{Answer, Format};
use crate::args::{self, SharedArgs};
use crate::config::{LogForm, LogLevel, ServeSettings, Serving, Timeout, TlsSettings};
use crate::failure::{Exit, Failure};
use crate::place::{Opened, Writes, open_store};
use crate::signals::Signals;
use crate::words;
use crate::{child, codec};

pub(crate) const HOW: &str = "\
Without any argument: the store in the data folder, HTTP on 127.0.0.1:8707.
If the store has no token that may change things, one is made and shown, once.
The line that begins with `ready` has the address; from then on it answers.

The first SIGINT or SIGTERM: nobody new enters, what is under way is answered.
The second: it ends at once.
SIGHUP: the files of TLS are read again; so they are when they change.

The file of --config is TOML, and has the same names with `_`:
  store = \"sqlite:/var/lib/tidegate/limits.db\"
  actor = \"ops\"
  timeout = \"5s\"
  listen = \"127.0.0.1:8707\"
  metrics = \"127.0.0.1:9090\"
  without_tls = false
  log = \"json\"                 # or text
  log_level = \"info\"           # or off, error, warn, debug, trace
  [bounds]                     # as they are unless said otherwise
  body_max = 262144            # bytes of a body
  body_time = \"10s\"            # for a body to arrive
  requests_max = 4096
  within_max = \"1m\"
  lease_deadline = \"5m\"
  lease_deadline_max = \"24h\"   # what a request may ask for
  report_time = \"10s\"          # for a listing or a report
  head_max = 16384             # bytes of a request's line and headers
  headers_max = 64
  head_time = \"15s\"            # for them to arrive, and to be idle
  connections_max = 8192
  drain_time = \"30s\"
  sweep_every = \"5s\"           # between looks for leases past their deadline
  listeners_max = 64           # those who listen to events
  alive_every = \"15s\"          # between looks at their tokens
  [tls]                        # with it, other machines may reach it
  cert = \"server.pem\"          # and those that it is signed by
  key = \"server.key\"
  client_ca = \"clients.pem\"    # only clients with a certificate of these
  [[tls.clients]]              # whose name stands for a token
  name = \"spiffe://prod/gate\"  # a URI, a DNS name or the common name
  token = \"gateway\"
  [envoy]                      # its rate limit service; see docs/envoy.md
  listen = \"127.0.0.1:8708\"
  unknown = \"allow\"            # or refuse: what no rule matches
  [[envoy.rules]]              # the first that matches counts
  match = [{ key = \"user\", value = \"*\" }]
  entity = \"{user}\"            # also resource, cost, limits,
  resource = \"web\"             # domain, shadow, unlimited
Each bound has a variable too, such as TIDEGATE_BODY_MAX.
A flag counts before its TIDEGATE_ variable, and that before the file.";

/// The id of the first token, and what follows it should it be taken.
const FIRST: &str = "admin";
/// So many ids are tried for it.
const FIRST_MAX: u32 = 100;

/// How to serve.
#[derive(Debug, Args)]
#[command(after_help = HOW)]
pub(crate) struct ServeArgs {
    /// A file with these options
    #[arg(long, value_name = "FILE", env = "TIDEGATE_CONFIG", hide_env_values = true)]
    config: Option<PathBuf>,
    /// Say whether it could serve, and end: reads the configuration, opens the store, tries the addresses
    #[arg(long)]
    check: bool,
    // Its last options stand under a heading, and so would all behind them.
    #[command(flatten)]
    settings: ServeSettings,
}

/// Where a server answers.
pub(crate) struct Place {
    pub(crate) url: String,
    /// What it counts, without a token.
    pub(crate) metrics: Option<String>,
    /// Where it answers Envoy.
    pub(crate) envoy: Option<String>,
}

/// Serves until a signal stops it.
pub(crate) async fn run(args: ServeArgs, shared: SharedArgs, format: Format) -> Result<Answer, Failure> {
    let SharedArgs { store, actor, timeout, .. } = shared;
    let settings = ServeSettings { store, actor, timeout: timeout.map(Timeout), ..args.settings };
    let serving = settings.decide(args.config.as_ref())?;
    let opened = open_store(serving.store.clone(), Writes::AsSaid, serving.timeout).await?;
    // Before anybody can connect: from then on a signal means to stop as it should.
    let mut signals = Signals::hear()?;
    let tls = serving.tls.clone().map(tls).transpose()?;
    let options = options(&serving, tls.clone());
    let server = Server::bind(&options).await.map_err(|error| refused(&error, tls.is_some()))?;
    let scheme = if tls.is_some() { "https" } else { "http" };
    let place = Place {
        url: format!("{scheme}://{}", server.local_addr()),
        metrics: server.metrics_addr().map(|address| format!("http://{address}/metrics")),
        envoy: server.envoy_addr().map(|address| address.to_string()),
    };
    if args.check {
        let answer = Answer::new(codec::serving(&place, &opened, None));
        let answer = answer.line(format!("it could serve {} on {}", opened.url, place.url));
        return Ok(serving.warning.into_iter().fold(answer, Answer::line));
    }
    log(serving.log, serving.log_level);
    if let Some(warning) = serving.warning {
        tracing::warn!("{warning}");
    }
    let state = state(&opened, &serving).await?;
    let token = first_token(&*opened.store, &opened.namespace, &args::actor(serving.actor)).await?;
    ready(format, &place, &opened, token.as_ref());
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
                } else if heard.is_to_read_again() && let Some(tls) = tls.clone() {
                    // What goes wrong is in the log, and what was there before stays.
                    tokio::spawn(async move { drop(tls.reload().await) });
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

fn tls(settings: TlsSettings) -> Result<Tls, Failure> {
    let TlsSettings { cert, key, client_ca, clients } = settings;
    let options = TlsOptions::new(cert, key);
    let options = client_ca.into_iter().fold(options, TlsOptions::client_ca);
    let options = clients.into_iter().fold(options, |options, (name, token)| options.client(name, token));
    options.load().map_err(|error| {
        let failure = Failure::usage(error.to_string());
        match error {
            TlsError::Client { .. } => failure.next("correct [[tls.clients]] in the file of --config"),
            TlsError::Expired { .. } | TlsError::Early { .. } => {
                failure.next("renew it, or see whether the clock is right")
            }
            _ => failure
                .next("correct --tls-cert, --tls-key and --tls-client-ca, or [tls] in the file of --config"),
        }
    })
}

fn options(serving: &Serving, tls: Option<Tls>) -> ServerOptions {
    let options = ServerOptions::new(serving.listen);
    let options = tls.into_iter().fold(options, ServerOptions::tls);
    let options = serving.metrics.into_iter().fold(options, ServerOptions::metrics);
    let envoy = serving.envoy.clone();
    let options = envoy.into_iter().fold(options, |options, (listen, rules)| options.envoy(listen, rules));
    if serving.without_tls { options.without_tls_anywhere() } else { options }
}

fn refused(error: &ServeError, has_tls: bool) -> Failure {
    let failure = Failure::failed(error.to_string());
    match error {
        // With TLS it is the one listener that has none.
        ServeError::Exposed { .. } if has_tls => Failure::usage(error.to_string())
            .next("--metrics has no TLS: say --metrics 127.0.0.1:PORT; or --without-tls, where only those who watch reach it"),
        // To start it again would not help, and who starts it has to know.
        ServeError::Exposed { .. } => Failure::usage(error.to_string())
            .next("say --tls-cert FILE --tls-key FILE; or --without-tls, behind a proxy that has TLS"),
        ServeError::InUse { .. } => failure.next("choose another port with --listen 127.0.0.1:PORT"),
        _ => failure,
    }
}

async fn state(opened: &Opened, serving: &Serving) -> Result<State, Failure> {
    let meters = StoreMeters::new();
    let limiter = Limiter::over(meters.watch(Arc::clone(&opened.store)));
    let limiter = serving.timeout.into_iter().fold(limiter, LimiterBuilder::store_deadline).build();
    let limiter = limiter.map_err(|error| Failure::failed(error.to_string()))?;
    let lease_key = LeaseKey::of_store(&*opened.store, &opened.namespace).await?;
    let keyring = Arc::new(StoreKeyring::new(limiter.clone()));
    let namespace = opened.namespace.clone();
    let bounds = serving.bounds;
    let options = StateOptions { keyring, namespace, lease_key, bounds, clock: Arc::new(HostWall) };
    Ok(State::with(limiter, options).measured_by(meters))
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
fn ready(format: Format, place: &Place, opened: &Opened, token: Option<&Secret>) {
    let text = match format {
        Format::Json => codec::serving(place, opened, token.map(Secret::reveal)).to_string() + "\n",
        Format::Text { .. } => {
            let token = token.map(|token| format!("token  {} (shown once: keep it safe)\n", token.reveal()));
            let metrics = place.metrics.as_ref().map(|url| format!("watch  {url}\n"));
            let envoy = place.envoy.as_ref().map(|address| format!("envoy  {address}\n"));
            let (token, metrics) = (token.unwrap_or_default(), metrics.unwrap_or_default());
            let envoy = envoy.unwrap_or_default();
            format!("store  {}\n{token}{metrics}{envoy}ready  {}\n", opened.url, place.url)
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
    // A log that nobody reads any more is no reason to stop: a complaint on stderr would be a panic then.
    let lines =
        tracing_subscriber::fmt().with_max_level(level).with_writer(io::stderr).log_internal_errors(false);
    match form {
        LogForm::Text => lines.with_ansi(Format::is_coloured_on_stderr()).init(),
        LogForm::Json => lines.json().init(),
    }
}
