//! `tidegate serve`: serves the limits of a store over HTTP.

use std::io::{self, IsTerminal as _, Write as _};
use std::panic;
use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use tidegate::store::{HostWall, Store};
use tidegate::{Limiter, LimiterBuilder, Paging, Versioned};
use tidegate_core::limit::name::Namespace;
use tidegate_core::limit::token::{NewToken, Token, TokenId, TokenScope, TokenScopes, TokenState};
use tidegate_proxy::{ListenBounds, Proxy, Tenants, serve};
use tidegate_server::{
    Bounds, LeaseKey, Listener, Secret, ServeError, Server, ServerOptions, Shutdown, ShutdownOutcome, State,
    StateOptions, StoreMeters, StoreTokenCache, Tls, TlsError, TlsOptions,
};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tracing_subscriber::filter::LevelFilter;

use crate::args::{self, SharedArgs};
use crate::config::{LogForm, LogLevel, ServeSettings, Serving, Timeout, TlsSettings};
use crate::default_paths::{OpenStore, WriteMode, open_store};
use crate::failure::{Exit, Failure};
use crate::manifest::ManifestFile;
use crate::output::{Format, Output};
use crate::parse;
use crate::proxy::check_exposure;
use crate::signals::{SignalEvent, Signals};
use crate::verbs::proxy::{bind, drain, limiter, tenants};
use crate::{child, codec};

pub(crate) const HELP: &str = "\
By default it serves the store in the data folder on http://127.0.0.1:8707.
If the store has no token with the scope `admin`, it creates one and shows it
once. It accepts requests from the line that begins with `ready` on.

The first SIGINT or SIGTERM stops it after the requests in flight, the second
stops it at once. SIGHUP reloads the TLS files, as a change of the files does,
and applies the manifest again. With neither, SIGHUP stops a server on a
terminal, which was closed.

The file of --config is TOML, with the same names and `_` for `-`:
  store = \"sqlite:/var/lib/tidegate/limits.db\"
  actor = \"ops\"
  timeout = \"5s\"
  listen = \"127.0.0.1:8707\"
  metrics = \"127.0.0.1:9090\"
  manifest = \"limits.toml\"     # limits, entities and tokens to apply
  without_tls = false
  log = \"json\"                 # or text
  log_level = \"info\"           # or off, error, warn, debug, trace
  [bounds]                     # the defaults
  body_max = 262144            # bytes of a body
  body_time = \"10s\"            # for a body to arrive
  requests_max = 4096
  within_max = \"1m\"
  lease_deadline = \"5m\"
  lease_deadline_max = \"24h\"   # maximum that a request may set
  report_time = \"10s\"          # for a listing or a report
  head_max = 16384             # bytes of a request's line and headers
  headers_max = 64
  head_time = \"15s\"            # for them to arrive; also the idle timeout
  connections_max = 8192
  drain_time = \"30s\"
  sweep_every = \"5s\"           # between sweeps for expired leases
  listeners_max = 64           # clients of the event stream
  alive_every = \"15s\"          # between checks of their tokens
  [tls]                        # lets other machines connect
  cert = \"server.pem\"          # with its chain
  key = \"server.key\"
  client_ca = \"clients.pem\"    # accept only clients signed by these
  [[tls.clients]]              # maps a client's name to a token
  name = \"spiffe://prod/gate\"  # a URI, a DNS name or the common name
  token = \"gateway\"
  [envoy]                      # its rate limit service; see docs/envoy.md
  listen = \"127.0.0.1:8708\"
  unknown = \"allow\"            # or refuse: if no rule matches
  [[envoy.rules]]              # the first match wins
  match = [{ key = \"user\", value = \"*\" }]
  entity = \"{user}\"            # also resource, cost, limits,
  resource = \"web\"             # domain, shadow, unlimited, charge,
                               # refund_within
  [proxy]                      # to LLM APIs; see docs/proxy.md
  listen = \"127.0.0.1:8709\"
  upstreams = [\"openai=https://api.openai.com\"]
  keys = { openai = \"env:OPENAI_API_KEY\" }  # or a file, mode 0600
  require_token = false        # also profiles, within, within_max
  [upstreams]                  # of permits; without it, any name
  anthropic = {}               # see docs/permits.md
  [upstreams.openai]           # bounds of its learned rate and slots
  auto = { rate_min = 0.5, rate_start = 5, rate_max = 100 }
  slots = { min = 1, start = 8, max = 64 }
Each bound has a variable, such as TIDEGATE_BODY_MAX.
A flag overrides its TIDEGATE_ variable, which overrides the file.";

/// The id of the first token; a number is appended if it is taken.
const FIRST: &str = "admin";
/// Maximum ids to try.
const FIRST_MAX: u32 = 100;

/// Arguments of `serve`.
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub(crate) struct ServeArgs {
    /// Read these options from a TOML file
    #[arg(long, value_name = "FILE", env = "TIDEGATE_CONFIG", hide_env_values = true)]
    config: Option<PathBuf>,
    /// Check the configuration, the store and the addresses, then exit
    #[arg(long)]
    check: bool,
    // Last, since its final options have a help heading that would apply to all options after them.
    #[command(flatten)]
    settings: ServeSettings,
}

/// The addresses of a running server.
pub(crate) struct Addresses {
    pub(crate) url: String,
    /// The metrics listener, which requires no token.
    pub(crate) metrics: Option<String>,
    /// The listener for Envoy.
    pub(crate) envoy: Option<String>,
    /// The listener for callers of LLM APIs.
    pub(crate) proxy: Option<String>,
}

/// Serves until a signal stops it.
pub(crate) async fn run(args: ServeArgs, shared: SharedArgs, format: Format) -> Result<Output, Failure> {
    let SharedArgs { store, actor, timeout, .. } = shared;
    let settings = ServeSettings { store, actor, timeout: timeout.map(Timeout), ..args.settings };
    let serving = settings.decide(args.config.as_ref())?;
    let opened = open_store(serving.store.clone(), WriteMode::StoreDefault, serving.timeout).await?;
    // Before clients can connect: from here on, a signal stops the server gracefully.
    let mut signals = Signals::install()?;
    let tls = serving.tls.clone().map(tls).transpose()?;
    let options = options(&serving, tls.clone());
    let server = Server::bind(&options).await.map_err(|error| bind_failure(&error, tls.is_some()))?;
    let scheme = if tls.is_some() { "https" } else { "http" };
    let proxy = bind_proxy(&serving)?;
    let addresses = Addresses {
        url: format!("{scheme}://{}", server.local_addr()),
        metrics: server.metrics_addr().map(|address| format!("http://{address}/metrics")),
        envoy: server.envoy_addr().map(|address| address.to_string()),
        proxy: proxy.as_ref().map(|listener| format!("{scheme}://{}", listener.local_addr())),
    };
    let manifest = serving.manifest.as_deref().map(|file| ManifestFile::new(file, &opened, &serving));
    let manifest = manifest.transpose()?.map(Arc::new);
    if args.check {
        return check(&serving, &opened, manifest.as_deref(), &addresses).await;
    }
    log(serving.log, serving.log_level);
    if let Some(warning) = serving.warning {
        tracing::warn!("{warning}");
    }
    let state = state(&opened, &serving).await?;
    if let Some(manifest) = &manifest {
        manifest.apply().await?;
    }
    let proxy = build_proxy(proxy, &serving, &opened, &state)?;
    let token = first_token(&*opened.store, &opened.namespace, &args::actor(serving.actor)).await?;
    ready(format, &addresses, &opened, token.as_ref());
    let (stopper, shutdown) = Shutdown::new();
    let shared_limiter = state.limiter().clone();
    let proxy = proxy.map(|bound| RunningProxy::start(bound, tls.clone(), serving.bounds));
    let running = server.run(state, shutdown);
    tokio::pin!(running);
    let mut last = None;
    let hangup = Hangup { tls, manifest, limiter: shared_limiter.clone(), is_on_terminal: is_on_terminal() };
    let result = loop {
        tokio::select! {
            result = &mut running => break result,
            signal = signals.next() => {
                if signal.is_stop() || signal.is_hangup() && hangup.stops() {
                    last = Some(signal);
                    stopper.stop();
                    proxy.iter().for_each(RunningProxy::stop);
                } else if signal.is_hangup() {
                    hangup.reload();
                }
            }
        }
    };
    let drained = match (proxy, result == ShutdownOutcome::AtOnce) {
        (Some(proxy), false) => proxy.drained(&mut signals).await,
        _ => Ok(true),
    };
    drain(&shared_limiter).await;
    opened.close().await;
    match (result, last, drained) {
        (ShutdownOutcome::Drained, _, Ok(true)) => Ok(Output::silent(Exit::Done)),
        (ShutdownOutcome::AtOnce, Some(signal), _) | (_, _, Err(signal)) => {
            Ok(Output::silent(child::exit_by(signal)))
        }
        _ => Err(Failure::failed(
            "requests in flight did not finish within the drain time: their leases end at their deadlines",
        )),
    }
}

/// Checks what only serving would find out.
async fn check(
    serving: &Serving,
    opened: &OpenStore,
    manifest: Option<&ManifestFile>,
    addresses: &Addresses,
) -> Result<Output, Failure> {
    if let Some(manifest) = manifest {
        manifest.check().await?;
    }
    if let Some((listen, settings)) = &serving.proxy {
        settings.build(*listen, Some(tenants(&limiter(opened)?, opened)))?;
    }
    let output = Output::new(codec::serving(addresses, opened, None));
    let output = output.line(format!("ready to serve {} on {}", opened.url, addresses.url));
    Ok(serving.warning.into_iter().fold(output, Output::line))
}

fn bind_proxy(serving: &Serving) -> Result<Option<Listener>, Failure> {
    let Some((listen, _)) = &serving.proxy else { return Ok(None) };
    check_exposure(*listen, serving.tls.is_some(), serving.without_tls)?;
    bind(*listen).map(Some)
}

fn build_proxy(
    bound: Option<Listener>,
    serving: &Serving,
    opened: &OpenStore,
    state: &State,
) -> Result<Option<(Listener, Proxy)>, Failure> {
    let (Some(listener), Some((listen, settings))) = (bound, &serving.proxy) else { return Ok(None) };
    // The server's own tokens: a revocation takes effect on both at once.
    let tokens = Arc::clone(state.token_cache());
    let tenants = Tenants::new(state.limiter().clone(), tokens, opened.namespace.clone());
    Ok(Some((listener, settings.build(*listen, Some(tenants))?)))
}

/// The proxy beside the server.
struct RunningProxy {
    proxy: Proxy,
    stopper: watch::Sender<bool>,
    running: JoinHandle<bool>,
}

impl RunningProxy {
    fn start((listener, proxy): (Listener, Proxy), tls: Option<Tls>, of: Bounds) -> Self {
        let (stopper, mut signal) = watch::channel(false);
        let mut bounds = ListenBounds::default();
        bounds.connections_max = of.connections_max;
        bounds.drain_time = of.drain_time;
        let until = async move { drop(signal.wait_for(|is_stopped| *is_stopped).await) };
        let running = tokio::spawn(serve(listener, proxy.clone(), tls, bounds, until));
        Self { proxy, stopper, running }
    }

    /// Accepts no more calls.
    fn stop(&self) {
        self.proxy.close();
        self.stopper.send_replace(true);
    }

    /// Whether all calls were finished within the drain time, or the signal that ended the wait.
    async fn drained(mut self, signals: &mut Signals) -> Result<bool, SignalEvent> {
        self.stop();
        loop {
            tokio::select! {
                drained = &mut self.running => return Ok(drained.unwrap_or(false)),
                signal = signals.next() => if signal.is_stop() {
                    return Err(signal);
                }
            }
        }
    }
}

impl Drop for RunningProxy {
    /// Ends the calls in flight.
    fn drop(&mut self) {
        self.running.abort();
    }
}

/// What SIGHUP does: it reloads what the server has read from files. With nothing to reload, it is the hangup of
/// the terminal that the server was started on, and stops it.
struct Hangup {
    tls: Option<Tls>,
    manifest: Option<Arc<ManifestFile>>,
    limiter: Limiter,
    is_on_terminal: bool,
}

impl Hangup {
    const fn stops(&self) -> bool {
        self.is_on_terminal && self.tls.is_none() && self.manifest.is_none()
    }

    fn reload(&self) {
        if let Some(tls) = self.tls.clone() {
            // Errors are logged, and the previous certificate stays in use.
            tokio::spawn(async move { drop(tls.reload().await) });
        }
        if let Some(manifest) = self.manifest.clone() {
            let limiter = self.limiter.clone();
            tokio::spawn(async move { manifest.reload(&limiter).await });
        }
    }
}

fn is_on_terminal() -> bool {
    io::stdin().is_terminal() || io::stdout().is_terminal() || io::stderr().is_terminal()
}

/// Loads the TLS files.
pub(crate) fn tls(settings: TlsSettings) -> Result<Tls, Failure> {
    let TlsSettings { cert, key, client_ca, clients } = settings;
    let options = TlsOptions::new(cert, key);
    let options = client_ca.into_iter().fold(options, TlsOptions::client_ca);
    let options = clients.into_iter().fold(options, |options, (name, token)| options.client(name, token));
    options.load().map_err(|error| {
        let failure = Failure::usage(error.to_string());
        match error {
            TlsError::Client { .. } => failure.next("correct [[tls.clients]] in the --config file"),
            TlsError::Expired { .. } | TlsError::Early { .. } => failure.next("renew it, or check the clock"),
            _ => failure
                .next("correct --tls-cert, --tls-key and --tls-client-ca, or [tls] in the --config file"),
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

fn bind_failure(error: &ServeError, has_tls: bool) -> Failure {
    let failure = Failure::failed(error.to_string());
    match error {
        // With TLS configured, only the metrics listener lacks it.
        ServeError::Exposed { .. } if has_tls => Failure::usage(error.to_string()).next(
            "--metrics has no TLS: use --metrics 127.0.0.1:PORT, or --without-tls on a trusted network",
        ),
        // A usage error, so that supervisors do not restart it.
        ServeError::Exposed { .. } => Failure::usage(error.to_string())
            .next("use --tls-cert FILE --tls-key FILE, or --without-tls behind a proxy with TLS"),
        ServeError::InUse { .. } => failure.next("choose another port with --listen 127.0.0.1:PORT"),
        _ => failure,
    }
}

async fn state(opened: &OpenStore, serving: &Serving) -> Result<State, Failure> {
    let meters = StoreMeters::new();
    let limiter = Limiter::over(meters.watch(Arc::clone(&opened.store)));
    let limiter = serving.timeout.into_iter().fold(limiter, LimiterBuilder::store_deadline).build();
    let limiter = limiter.map_err(|error| Failure::failed(error.to_string()))?;
    let lease_key = LeaseKey::of_store(&*opened.store, &opened.namespace).await?;
    let token_cache = Arc::new(StoreTokenCache::new(limiter.clone()));
    let namespace = opened.namespace.clone();
    let bounds = serving.bounds;
    let upstreams = serving.upstreams.clone();
    let clock = Arc::new(HostWall);
    let options = StateOptions { token_cache, namespace, lease_key, bounds, clock, upstreams };
    Ok(State::with(limiter, options).measured_by(meters))
}

/// Creates a token with every scope, if no valid token has the scope `admin`.
async fn first_token(
    store: &dyn Store,
    namespace: &Namespace,
    actor: &str,
) -> Result<Option<Secret>, Failure> {
    for number in 1..=FIRST_MAX {
        // Another server may just have created one.
        if has_admin_token(store, namespace).await? {
            return Ok(None);
        }
        let id = if number == 1 { FIRST.to_owned() } else { format!("{FIRST}-{number}") };
        let id = TokenId::new(&id).map_err(|error| Failure::failed(error.to_string()))?;
        let secret = Secret::generate(&id);
        let scopes = TokenScopes::new(TokenScope::ALL);
        let name = "made by serve".to_owned();
        let new = NewToken { id, name, namespace: namespace.clone(), scopes, entity: None, expires_at: None };
        match store.create_token(&new, secret.hash(), actor).await {
            // The id is taken: by a revoked or expired token, or at this moment by another server.
            Err(tidegate::StoreError::Stale { .. }) => {}
            made => return Ok(Some(made.map(|_| secret)?)),
        }
    }
    Err(Failure::failed(format!("{FIRST_MAX} tokens `{FIRST}` were revoked: no first token is created"))
        .next("create one: tidegate token create ID --scopes acquire,read,admin"))
}

/// Whether a valid token has the scope `admin`.
async fn has_admin_token(store: &dyn Store, namespace: &Namespace) -> Result<bool, Failure> {
    let now = parse::time("0s").map_err(Failure::failed)?;
    let is_enough = |token: &Token| {
        token.scopes.has(TokenScope::Admin)
            && token.namespace == *namespace
            && token.state(now) == TokenState::Good
    };
    let (first, mut paging) = (Paging::first(1_000)?, Paging::first(1_000)?);
    loop {
        let page = store.tokens(&paging).await?;
        if page.items.iter().any(|Versioned { value, .. }| is_enough(value)) {
            return Ok(true);
        }
        match page.next {
            Some(next) => paging = first.clone().after(next),
            None => return Ok(false),
        }
    }
}

/// Prints the addresses. A closed pipe is not a failure.
fn ready(format: Format, addresses: &Addresses, opened: &OpenStore, token: Option<&Secret>) {
    let text = match format {
        Format::Json => codec::serving(addresses, opened, token.map(Secret::reveal)).to_string() + "\n",
        Format::Text { .. } => {
            let token = token.map(|token| format!("token  {} (shown once: keep it safe)\n", token.reveal()));
            let metrics = addresses.metrics.as_ref().map(|url| format!("watch  {url}\n"));
            let envoy = addresses.envoy.as_ref().map(|address| format!("envoy  {address}\n"));
            let proxy = addresses.proxy.as_ref().map(|url| format!("proxy  {url}\n"));
            let lines = [token, metrics, envoy, proxy].into_iter().flatten().collect::<String>();
            format!("store  {}\n{lines}ready  {}\n", opened.url, addresses.url)
        }
    };
    let mut stdout = io::stdout().lock();
    drop(stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()));
}

pub(crate) fn log(form: LogForm, level: LogLevel) {
    let level = match level {
        LogLevel::Off => LevelFilter::OFF,
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Debug => LevelFilter::DEBUG,
        LogLevel::Trace => LevelFilter::TRACE,
    };
    // If stderr is closed, the server continues: reporting the log's own errors there would panic.
    let lines =
        tracing_subscriber::fmt().with_max_level(level).with_writer(io::stderr).log_internal_errors(false);
    match form {
        LogForm::Text => lines.with_ansi(Format::is_coloured_on_stderr()).init(),
        LogForm::Json => lines.json().init(),
    }
    // The message of a panic may quote a request.
    panic::set_hook(Box::new(|info| {
        let location = info.location().map(ToString::to_string).unwrap_or_default();
        tracing::error!(location, "panicked");
    }));
}

#[cfg(test)]
mod tests {
    use std::env;
    use std::process::Command;

    use super::*;

    /// The hook is of the whole process: the test runs its own program.
    #[test]
    fn panic_is_logged_without_its_message() {
        const VARIABLE: &str = "TIDEGATE_TEST_PANICS";
        if env::var_os(VARIABLE).is_some() {
            log(LogForm::Text, LogLevel::Error);
            panic!("the secret is swordfish");
        }
        let name = format!("{}::panic_is_logged_without_its_message", module_path!());
        let name = name.split_once("::").expect("a crate").1;
        let mut program = Command::new(env::current_exe().expect("a path"));
        program.args(["--exact", name, "--nocapture"]).env(VARIABLE, "1");
        let output = program.output().expect("it runs");
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8_lossy(&text);
        assert!(text.contains("panicked") && text.contains("serve.rs:"), "{text}");
        assert!(!output.status.success() && !text.contains("swordfish"), "{text}");
    }
}
