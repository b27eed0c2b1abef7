//! `tidegate proxy` and `tidegate mock`: HTTP servers that run until a signal.

use std::io::{self, Write as _};
use std::net::{Ipv4Addr, SocketAddr};
use std::num::NonZero;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use tidegate::Limit;
use tidegate::Limiter;
use tidegate::store::Store;
use tidegate_lab::Scenario;
use tidegate_proxy::{HttpService, ListenBounds, Mock, MockOptions, Profiles, Tenants, serve};
use tidegate_server::{Listener, StoreTokenCache, Tls};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{interval, timeout};

use crate::args::SharedArgs;
use crate::child;
use crate::codec;
use crate::config::{LogForm, LogLevel, TlsSettings};
use crate::default_paths::{OpenStore, WriteMode, open_store};
use crate::failure::{Exit, Failure};
use crate::output::{Format, Output};
use crate::parse;
use crate::proxy::{ProxySettings, check_exposure, read_profiles};
use crate::signals::Signals;
use crate::verbs::lab::read_scenarios;
use crate::verbs::serve::{log, tls};

/// The default listen address of the proxy.
pub(crate) const LISTEN: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 8709);
/// The default listen address of the mock.
const MOCK_LISTEN: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 8710);
/// Timeout for settling leases when no call is in flight any more.
const SETTLE_TIME: Duration = Duration::from_secs(5);
/// Between sweeps for expired leases.
const SWEEP_EVERY: Duration = Duration::from_secs(5);
/// Leases that one sweep ends.
const SWEEP_MAX: usize = 1_000;

const PROXY_HELP: &str = "\
Callers change their base URL to the proxy's, and keep their key:
  tidegate proxy openai=https://api.openai.com
  export OPENAI_BASE_URL=http://127.0.0.1:8709/openai/v1

The name picks the profile of the same name, or else `generic`; NAME:PROFILE=URL
says it: groq:openai=https://api.groq.com/openai

A caller may send a token of tidegate in place of a key. The limits of the
entity that the token is bound to are drawn (if it is bound to none, of the
entity with the token's id), and the upstream gets the key that is kept here:
  tidegate proxy openai=https://api.openai.com --key openai=env:OPENAI_API_KEY \\
    --store sqlite:limits.db

A call waits 55 s at most, or as x-tidegate-within says. The proxy's own paths:
/tidegate/health, /tidegate/scopes, /tidegate/metrics";

const MOCK_HELP: &str = "\
Limits are named requests, tokens, input_tokens and output_tokens; a suffix
distinguishes two of a kind:
  tidegate mock openai --limit requests:500/min --limit requests-day:10k/day
A token is four bytes of a request's body. GET /mock/totals shows the counts,
GET /bytes/N a body of N bytes.";

/// Arguments of `proxy`.
#[derive(Debug, Args)]
#[command(after_help = PROXY_HELP)]
pub(crate) struct ProxyArgs {
    /// Upstreams, as NAME=URL or NAME:PROFILE=URL
    #[arg(value_name = "NAME=URL", required = true)]
    upstreams: Vec<String>,
    /// Address to listen on [default: 127.0.0.1:8709]; port 0 picks a free one
    #[arg(long, value_name = "ADDRESS", env = "TIDEGATE_PROXY", hide_env_values = true)]
    listen: Option<SocketAddr>,
    /// Keep a key for callers with a token: NAME=env:VARIABLE or NAME=FILE; may be repeated
    ///
    /// The file must not be readable by others.
    #[arg(long, value_name = "NAME=PLACE", value_parser = key)]
    key: Vec<(String, String)>,
    /// Read more profiles from this TOML file
    #[arg(long, value_name = "FILE")]
    profiles: Option<PathBuf>,
    /// Refuse callers without a token; other than loopback addresses always do
    #[arg(long)]
    require_token: bool,
    /// How long a call waits that does not say [default: 55s]
    #[arg(long, value_name = "SPAN", value_parser = parse::duration)]
    within: Option<Duration>,
    /// The longest time that a call may ask to wait [default: 10m]
    #[arg(long, value_name = "SPAN", value_parser = parse::duration)]
    within_max: Option<Duration>,
    /// Let other machines connect without TLS: tokens cross the network in plain text
    #[arg(long)]
    without_tls: bool,
    /// Use TLS with this certificate chain, a PEM file; SIGHUP and changes of the files reload them
    #[arg(long, value_name = "FILE", env = "TIDEGATE_TLS_CERT", hide_env_values = true)]
    tls_cert: Option<PathBuf>,
    /// The key of that certificate, a PEM file
    #[arg(long, value_name = "FILE", env = "TIDEGATE_TLS_KEY", hide_env_values = true)]
    tls_key: Option<PathBuf>,
    /// Accept only clients whose certificate is signed by one in this PEM file
    #[arg(long, value_name = "FILE", env = "TIDEGATE_TLS_CLIENT_CA", hide_env_values = true)]
    tls_client_ca: Option<PathBuf>,
}

/// Arguments of `mock`.
#[derive(Debug, Args)]
#[command(after_help = MOCK_HELP)]
pub(crate) struct MockArgs {
    /// The profile: openai, azure, anthropic, gemini, generic, or one of --profiles
    profile: String,
    /// Address to listen on [default: 127.0.0.1:8710]; port 0 picks a free one
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<SocketAddr>,
    /// A limit of the account, such as requests:500/min; may be repeated
    #[arg(long, value_name = "LIMIT")]
    limit: Vec<Limit>,
    /// Say nothing about the limits in responses
    #[arg(long)]
    hidden: bool,
    /// Tokens of each response, unless the request asks for less [default: 16]
    #[arg(long, value_name = "COUNT")]
    output_tokens: Option<u64>,
    /// Time until a response begins [default: 0s]
    #[arg(long, value_name = "SPAN", value_parser = parse::duration)]
    latency: Option<Duration>,
    /// Time between two events of a stream [default: 0s]
    #[arg(long, value_name = "SPAN", value_parser = parse::duration)]
    event_interval: Option<Duration>,
    /// Refuse one of so many calls because of overload, with 529 or 503
    #[arg(long, value_name = "COUNT")]
    overload_every: Option<NonZero<u64>>,
    /// Report an error within one of so many streams
    #[arg(long, value_name = "COUNT")]
    error_every: Option<NonZero<u64>>,
    /// Break off one of so many streams
    #[arg(long, value_name = "COUNT")]
    cut_every: Option<NonZero<u64>>,
    /// Behave as this scenario of the lab instead of --limit and --latency; see `tidegate lab list`
    #[arg(long, value_name = "NAME", conflicts_with_all = ["limit", "latency"])]
    scenario: Option<String>,
    /// Read the scenario from this file instead of the built-in ones
    #[arg(long, value_name = "FILE", requires = "scenario")]
    scenario_file: Option<PathBuf>,
    /// Read more profiles from this TOML file
    #[arg(long, value_name = "FILE")]
    profiles: Option<PathBuf>,
}

fn key(text: &str) -> Result<(String, String), String> {
    let (name, place) = text.split_once('=').ok_or("must be NAME=env:VARIABLE or NAME=FILE")?;
    Ok((name.to_owned(), place.to_owned()))
}

/// Runs a proxy until a signal stops it.
pub(crate) async fn run(args: ProxyArgs, shared: SharedArgs, format: Format) -> Result<Output, Failure> {
    let listen = args.listen.unwrap_or(LISTEN);
    let tls = TlsSettings::of_flags(args.tls_cert, args.tls_key, args.tls_client_ca)?.map(tls).transpose()?;
    check_exposure(listen, tls.is_some(), args.without_tls)?;
    let settings = ProxySettings {
        upstreams: args.upstreams,
        keys: args.key.into_iter().collect(),
        profiles: args.profiles,
        require_token: args.require_token,
        within: args.within,
        within_max: args.within_max,
    };
    let opened = match shared.store {
        Some(store) => Some(open_store(Some(store), WriteMode::StoreDefault, shared.timeout).await?),
        None => None,
    };
    let limiter = opened.as_ref().map(limiter).transpose()?;
    let tenants = opened.as_ref().zip(limiter.as_ref()).map(|(opened, limiter)| tenants(limiter, opened));
    let proxy = settings.build(listen, tenants)?;
    log(LogForm::Text, LogLevel::Info);
    let sweep = opened.as_ref().map(|opened| tokio::spawn(sweep(Arc::clone(&opened.store))));
    let stop = || {
        // Callers that wait for their own limits end too.
        limiter.iter().for_each(Limiter::close);
        proxy.close();
    };
    let ended = until_signal(listen, tls, proxy.clone(), stop, format).await;
    if let Some(limiter) = limiter {
        drain(&limiter).await;
    }
    if let Some(sweep) = sweep {
        sweep.abort();
    }
    if let Some(opened) = opened {
        opened.close().await;
    }
    ended
}

/// A limiter of its own over an open store.
pub(crate) fn limiter(opened: &OpenStore) -> Result<Limiter, Failure> {
    Limiter::over(Arc::clone(&opened.store)).build().map_err(|error| Failure::failed(error.to_string()))
}

/// Closes a limiter, and waits for the leases that are being settled.
pub(crate) async fn drain(limiter: &Limiter) {
    limiter.close();
    if timeout(SETTLE_TIME, limiter.drain()).await.is_err() {
        tracing::warn!("leases are still held: they end at their deadlines");
    }
}

/// The tenants of an open store.
pub(crate) fn tenants(limiter: &Limiter, opened: &OpenStore) -> Tenants {
    let tokens = Arc::new(StoreTokenCache::new(limiter.clone()));
    Tenants::new(limiter.clone(), tokens, opened.namespace.clone())
}

/// Ends expired leases, as a server does.
async fn sweep(store: Arc<dyn Store>) {
    let mut ticks = interval(SWEEP_EVERY);
    loop {
        ticks.tick().await;
        if let Err(error) = store.sweep(SWEEP_MAX).await {
            tracing::warn!(%error, "failed to sweep expired leases");
        }
    }
}

/// Runs a mock until a signal stops it.
pub(crate) async fn run_mock(args: MockArgs, format: Format) -> Result<Output, Failure> {
    let profiles = args.profiles.as_deref().map_or_else(|| Ok(Profiles::built_in()), read_profiles)?;
    let Some(profile) = profiles.get(&args.profile) else {
        let known = profiles.names().collect::<Vec<_>>().join(", ");
        return Err(Failure::usage(format!(
            "there is no profile `{}`",
            crate::format::escape(&args.profile)
        ))
        .next(format!("choose one of {known}")));
    };
    let mut options = MockOptions::default();
    options.limits = args.limit;
    options.is_hidden = args.hidden;
    options.output_tokens = args.output_tokens.unwrap_or(options.output_tokens);
    options.latency = args.latency.unwrap_or_default();
    options.event_interval = args.event_interval.unwrap_or_default();
    options.overload_every = args.overload_every;
    options.error_every = args.error_every;
    options.cut_every = args.cut_every;
    options.scenario = args.scenario.map(|name| scenario(&name, args.scenario_file.as_ref())).transpose()?;
    let mock = Mock::new(Arc::clone(profile), options).map_err(|error| Failure::usage(error.to_string()))?;
    until_signal(args.listen.unwrap_or(MOCK_LISTEN), None, mock, || {}, format).await
}

fn scenario(name: &str, file: Option<&PathBuf>) -> Result<Scenario, Failure> {
    let all = file.map_or_else(|| Ok(Scenario::built_in()), |file| read_scenarios(file))?;
    all.into_iter().find(|scenario| scenario.name == name).ok_or_else(|| {
        Failure::usage(format!("there is no scenario `{}`", crate::format::escape(name)))
            .next("list them: tidegate lab list")
    })
}

/// Binds an address, and explains why if that fails. It may be exposed: see [`check_exposure`].
pub(crate) fn bind(listen: SocketAddr) -> Result<Listener, Failure> {
    Listener::bind(listen, true).map_err(|error| {
        Failure::failed(error.to_string()).next("choose another port with --listen 127.0.0.1:PORT")
    })
}

/// Serves until a signal. The first one calls `stop` and finishes requests in flight, the second one stops at
/// once.
async fn until_signal(
    listen: SocketAddr,
    tls: Option<Tls>,
    service: impl HttpService,
    stop: impl Fn(),
    format: Format,
) -> Result<Output, Failure> {
    let mut signals = Signals::install()?;
    let listener = bind(listen)?;
    let addr = listener.local_addr();
    let url = format!("{}://{addr}", if tls.is_some() { "https" } else { "http" });
    let text = match format {
        Format::Json => codec::listening(&url).to_string() + "\n",
        Format::Text { .. } => format!("ready  {url}\n"),
    };
    {
        // A closed pipe is not a failure.
        let mut stdout = io::stdout().lock();
        drop(stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()));
    }
    let (stopper, mut signal) = watch::channel(false);
    let until = async move { drop(signal.wait_for(|is_stopped| *is_stopped).await) };
    let watched = tls.clone().map(|tls| tokio::spawn(tls.watch_files()));
    let running = serve(listener, service, tls.clone(), ListenBounds::default(), until);
    tokio::pin!(running);
    loop {
        tokio::select! {
            is_drained = &mut running => {
                watched.iter().for_each(JoinHandle::abort);
                return if is_drained {
                    Ok(Output::silent(Exit::Done))
                } else {
                    Err(Failure::failed("requests in flight did not finish within the drain time"))
                };
            }
            signal = signals.next() => {
                if let (true, Some(tls)) = (signal.is_hangup(), tls.clone()) {
                    // Errors are logged, and the previous certificate stays in use.
                    tokio::spawn(async move { drop(tls.reload().await) });
                }
                if !signal.is_stop() {
                    continue;
                }
                if *stopper.borrow() {
                    return Ok(Output::silent(child::exit_by(signal)));
                }
                stop();
                stopper.send_replace(true);
            }
        }
    }
}
