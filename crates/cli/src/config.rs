//! The configuration of `serve`. Flags override the environment, which overrides the file, which overrides
//! the defaults.

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, ValueEnum};
use serde::Deserialize;
use serde::de::IgnoredAny;
use tidegate::{Limits, ResourceName};
use tidegate_core::limit::token::TokenId;
use tidegate_server::{Bounds, EnvoyRules};

use crate::bounds::{self, BoundArgs};
use crate::envoy;
use crate::failure::Failure;
use crate::format;
use crate::parse;
use crate::proxy::ProxySettings;
use crate::upstreams;
use crate::verbs::proxy::LISTEN as PROXY_LISTEN;

/// The default listen address.
const LISTEN: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 8707);

/// The warning for a file that still has the key `aggregate`.
const AGGREGATE_IS_IGNORED: &str =
    "the key `aggregate` in the configuration is ignored: usage is counted without a background worker";

/// The flags, and the keys of the file: the same names, with `_` for `-`.
#[derive(Debug, Clone, Default, Args, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct ServeSettings {
    /// The store, like `--store`, which is a global option on the command line.
    #[arg(skip)]
    pub(crate) store: Option<String>,
    /// The actor that creates the first token, like `--actor`, which is a global option on the command line.
    #[arg(skip)]
    pub(crate) actor: Option<String>,
    /// How long to wait for the store, like `--timeout`, which is a global option on the command line.
    #[arg(skip)]
    pub(crate) timeout: Option<Timeout>,
    /// Address to listen on [default: 127.0.0.1:8707]; port 0 picks a free one
    #[arg(long, value_name = "ADDRESS", env = "TIDEGATE_LISTEN", hide_env_values = true)]
    pub(crate) listen: Option<SocketAddr>,
    /// Also serve /metrics and the health checks here, without a token
    #[arg(long, value_name = "ADDRESS", env = "TIDEGATE_METRICS", hide_env_values = true)]
    pub(crate) metrics: Option<SocketAddr>,
    /// Serve Envoy here, over gRPC [default: 127.0.0.1:8708 if the file has `[envoy]`]
    #[arg(long = "envoy", value_name = "ADDRESS", env = "TIDEGATE_ENVOY", hide_env_values = true)]
    #[serde(skip)]
    pub(crate) envoy_listen: Option<SocketAddr>,
    /// The `[envoy]` table of a file: its address and rules.
    #[arg(skip)]
    pub(crate) envoy: Option<toml::Table>,
    /// Apply this file of limits, entities and tokens at the start and on SIGHUP; see `limits apply`
    #[arg(long, value_name = "FILE", env = "TIDEGATE_MANIFEST", hide_env_values = true)]
    pub(crate) manifest: Option<PathBuf>,
    /// Forward calls to LLM APIs here; the file names them in `[proxy]` [default: 127.0.0.1:8709]
    #[arg(long = "proxy", value_name = "ADDRESS", env = "TIDEGATE_PROXY", hide_env_values = true)]
    #[serde(skip)]
    pub(crate) proxy_listen: Option<SocketAddr>,
    /// The `[proxy]` table of a file.
    #[arg(skip)]
    pub(crate) proxy: Option<ProxyTable>,
    /// Let other machines connect without TLS: tokens cross the network in plain text
    #[arg(long, value_name = "BOOL", env = "TIDEGATE_WITHOUT_TLS", hide_env_values = true)]
    #[arg(num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(crate) without_tls: Option<bool>,
    /// Use TLS with this certificate chain, a PEM file
    #[arg(long, value_name = "FILE", env = "TIDEGATE_TLS_CERT", hide_env_values = true)]
    #[serde(skip)]
    pub(crate) tls_cert: Option<PathBuf>,
    /// The key of that certificate, a PEM file
    #[arg(long, value_name = "FILE", env = "TIDEGATE_TLS_KEY", hide_env_values = true)]
    #[serde(skip)]
    pub(crate) tls_key: Option<PathBuf>,
    /// Accept only clients whose certificate is signed by one in this PEM file
    #[arg(long, value_name = "FILE", env = "TIDEGATE_TLS_CLIENT_CA", hide_env_values = true)]
    #[serde(skip)]
    pub(crate) tls_client_ca: Option<PathBuf>,
    /// The `[upstreams]` table of a file.
    #[arg(skip)]
    pub(crate) upstreams: Option<BTreeMap<String, UpstreamTable>>,
    /// The `[tls]` table of a file.
    #[arg(skip)]
    pub(crate) tls: TlsTable,
    /// A key of older files, which has no effect.
    #[arg(skip)]
    pub(crate) aggregate: Option<IgnoredAny>,
    /// Format of the log, on stderr [default: text]
    #[arg(long, value_enum, value_name = "FORM", env = "TIDEGATE_LOG", hide_env_values = true)]
    pub(crate) log: Option<LogForm>,
    /// Level of the log [default: info]
    #[arg(long, value_enum, value_name = "LEVEL", env = "TIDEGATE_LOG_LEVEL", hide_env_values = true)]
    pub(crate) log_level: Option<LogLevel>,
    /// The `[bounds]` table of a file.
    #[arg(skip)]
    pub(crate) bounds: toml::Table,
    /// The bounds that have flags.
    #[command(flatten)]
    #[serde(skip)]
    pub(crate) bound_args: BoundArgs,
}

/// The `[tls]` table of a file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct TlsTable {
    cert: Option<PathBuf>,
    key: Option<PathBuf>,
    client_ca: Option<PathBuf>,
    clients: Vec<TlsClient>,
}

/// A name in a client's certificate, and the token that it maps to.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct TlsClient {
    name: String,
    token: String,
}

/// The `[proxy]` table of a file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct ProxyTable {
    listen: Option<SocketAddr>,
    upstreams: Vec<String>,
    keys: BTreeMap<String, String>,
    profiles: Option<PathBuf>,
    require_token: bool,
    within: Option<Span>,
    within_max: Option<Span>,
}

/// The table of one upstream: its keys are those of a throttle.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct UpstreamTable {
    pub(crate) auto: AutoTable,
    pub(crate) slots: SlotsTable,
}

/// Requests per second.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[expect(clippy::struct_field_names, reason = "the keys of the configuration")]
pub(crate) struct AutoTable {
    pub(crate) rate_min: Option<f64>,
    pub(crate) rate_start: Option<f64>,
    pub(crate) rate_max: Option<f64>,
}

/// Calls in flight.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct SlotsTable {
    pub(crate) min: Option<u32>,
    pub(crate) start: Option<u32>,
    pub(crate) max: Option<u32>,
}

/// A duration in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
struct Span(Duration);

impl TryFrom<String> for Span {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        parse::duration(&text).map(Self)
    }
}

impl ProxyTable {
    /// The address and the settings, if a flag or the file configures a proxy.
    fn decide(typed: Option<SocketAddr>, file: Option<Self>) -> Option<(SocketAddr, ProxySettings)> {
        if typed.is_none() && file.is_none() {
            return None;
        }
        let Self { listen, upstreams, keys, profiles, require_token, within, within_max } =
            file.unwrap_or_default();
        let (within, within_max) = (within.map(|Span(span)| span), within_max.map(|Span(span)| span));
        let settings = ProxySettings { upstreams, keys, profiles, require_token, within, within_max };
        Some((typed.or(listen).unwrap_or(PROXY_LISTEN), settings))
    }
}

/// The resolved TLS configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TlsSettings {
    pub(crate) cert: PathBuf,
    pub(crate) key: PathBuf,
    pub(crate) client_ca: Option<PathBuf>,
    pub(crate) clients: Vec<(String, TokenId)>,
}

impl TlsSettings {
    /// The settings of flags, if there are any.
    pub(crate) fn of_flags(
        cert: Option<PathBuf>,
        key: Option<PathBuf>,
        client_ca: Option<PathBuf>,
    ) -> Result<Option<Self>, Failure> {
        TlsTable { cert, key, client_ca, clients: Vec::new() }.decide()
    }
}

impl TlsTable {
    fn decide(self) -> Result<Option<TlsSettings>, Failure> {
        let Self { cert, key, client_ca, clients } = self;
        let missing = |given: &str, missing: &str| {
            Err(Failure::usage(format!("{given} is set, but {missing} is not"))
                .next("set --tls-cert FILE and --tls-key FILE, or `cert` and `key` in [tls]"))
        };
        let (cert, key) = match (cert, key) {
            (Some(cert), Some(key)) => (cert, key),
            (Some(_), None) => return missing("tls.cert", "tls.key"),
            (None, Some(_)) => return missing("tls.key", "tls.cert"),
            (None, None) if client_ca.is_some() => return missing("tls.client_ca", "tls.cert"),
            (None, None) if !clients.is_empty() => return missing("tls.clients", "tls.cert"),
            (None, None) => return Ok(None),
        };
        let client = |(at, TlsClient { name, token }): (usize, TlsClient)| match TokenId::new(&token) {
            Ok(token) => Ok((name, token)),
            Err(error) => Err(Failure::usage(format!("`tls.clients[{at}].token`: {error}"))),
        };
        let clients = clients.into_iter().enumerate().map(client).collect::<Result<_, _>>()?;
        Ok(Some(TlsSettings { cert, key, client_ca, clients }))
    }
}

/// How long to wait for a store or a server, in command-line form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct Timeout(pub(crate) Duration);

impl TryFrom<String> for Timeout {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        parse::timeout(&text)
            .map(Self)
            .map_err(|why| format!("timeout is `{}`: {why}", format::escape(&text)))
    }
}

/// The format of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum LogForm {
    /// Lines for people
    Text,
    /// A JSON object on each line
    Json,
}

/// The level of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum LogLevel {
    Off,
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

/// The resolved configuration.
#[derive(Debug, Clone)]
pub(crate) struct Serving {
    pub(crate) store: Option<String>,
    pub(crate) actor: Option<String>,
    pub(crate) listen: SocketAddr,
    pub(crate) metrics: Option<SocketAddr>,
    pub(crate) envoy: Option<(SocketAddr, EnvoyRules)>,
    pub(crate) manifest: Option<PathBuf>,
    pub(crate) proxy: Option<(SocketAddr, ProxySettings)>,
    /// The only upstreams of permits, if the file names them.
    pub(crate) upstreams: Option<BTreeMap<ResourceName, Limits>>,
    pub(crate) without_tls: bool,
    pub(crate) tls: Option<TlsSettings>,
    /// A warning for the log about a key without effect.
    pub(crate) warning: Option<&'static str>,
    pub(crate) log: LogForm,
    pub(crate) log_level: LogLevel,
    pub(crate) timeout: Option<Duration>,
    pub(crate) bounds: Bounds,
}

impl ServeSettings {
    /// Resolves the configuration: flags, then the file, then the defaults.
    pub(crate) fn decide(self, file: Option<&PathBuf>) -> Result<Serving, Failure> {
        let file = file.map(|path| read(path)).transpose()?.unwrap_or_default();
        let environment = |name: &str| env::var_os(name).map(|value| value.to_string_lossy().into_owned());
        let tls = TlsTable {
            cert: self.tls_cert.or(file.tls.cert),
            key: self.tls_key.or(file.tls.key),
            client_ca: self.tls_client_ca.or(file.tls.client_ca),
            clients: file.tls.clients,
        };
        Ok(Serving {
            tls: tls.decide()?,
            bounds: bounds::decide(&self.bound_args, environment, &file.bounds)?,
            timeout: self.timeout.or(file.timeout).map(|Timeout(span)| span),
            store: self.store.or(file.store),
            actor: self.actor.or(file.actor),
            listen: self.listen.or(file.listen).unwrap_or(LISTEN),
            metrics: self.metrics.or(file.metrics),
            envoy: envoy::decide(self.envoy_listen, file.envoy)?,
            manifest: self.manifest.or(file.manifest),
            proxy: ProxyTable::decide(self.proxy_listen, file.proxy),
            upstreams: upstreams::decide(file.upstreams)?,
            without_tls: self.without_tls.or(file.without_tls).unwrap_or(false),
            warning: file.aggregate.map(|_| AGGREGATE_IS_IGNORED),
            log: self.log.or(file.log).unwrap_or(LogForm::Text),
            log_level: self.log_level.or(file.log_level).unwrap_or(LogLevel::Info),
        })
    }
}

fn read(path: &Path) -> Result<ServeSettings, Failure> {
    let text = fs::read_to_string(path).map_err(|error| {
        Failure::usage(format!("the configuration `{}` cannot be read: {error}", path.display()))
            .next("choose a file with --config FILE or TIDEGATE_CONFIG, or omit it")
    })?;
    toml::from_str(&text).map_err(|error| {
        let line = error.span().map(|span| text[..span.start].matches('\n').count() + 1);
        let place = line.map(|line| format!(", line {line}")).unwrap_or_default();
        Failure::usage(format!("the configuration `{}`{place}: {}", path.display(), error.message()))
            .next("see its keys: tidegate serve --help")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flag_overrides_file_which_overrides_default() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tidegate.toml");
        fs::write(&path, "store = 'memory:'\nlisten = '127.0.0.1:1'\nlog = 'json'\nwithout_tls = true")
            .unwrap();
        let usual = ServeSettings::default().decide(None).unwrap();
        assert_eq!((usual.listen, usual.log, usual.without_tls), (LISTEN, LogForm::Text, false));
        let typed = ServeSettings { log: Some(LogForm::Text), ..ServeSettings::default() };
        let decided = typed.decide(Some(&path)).unwrap();
        assert_eq!((decided.listen.port(), decided.log, decided.without_tls), (1, LogForm::Text, true));
        assert_eq!(decided.store.as_deref(), Some("memory:"));
    }

    #[test]
    fn old_aggregate_key_is_ignored_with_a_warning() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tidegate.toml");
        for (text, warning) in [
            ("log = 'json'", None),
            ("aggregate = true\nlog = 'json'", Some(AGGREGATE_IS_IGNORED)),
            ("aggregate = 'no'\nlog = 'json'", Some(AGGREGATE_IS_IGNORED)),
        ] {
            fs::write(&path, text).unwrap();
            let decided = ServeSettings::default().decide(Some(&path)).unwrap();
            assert_eq!((decided.log, decided.warning), (LogForm::Json, warning), "{text}");
        }
    }

    #[test]
    fn invalid_file_is_rejected_with_its_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tidegate.toml");
        let table = [
            (
                "port = 1",
                "line 1: unknown field `port`, expected one of `store`, `actor`, `timeout`, `listen`",
            ),
            ("\nlisten = 'here'", "line 2: invalid socket address syntax"),
            ("log = 'loud'", "line 1: unknown variant `loud`, expected `text` or `json`"),
            ("[", "line 1: "),
            ("\ntimeout = 'soon'", "line 2: timeout is `soon`: must be from 1ms to 1m"),
            ("[bounds]\nbody_max = 99999999999999999999", "line 2: "),
            ("bounds = 5", "line 1: "),
            ("[tls]\ncert = 'a.pem'", "tls.cert is set, but tls.key is not"),
            ("[tls]\nkey = 'a.pem'", "tls.key is set, but tls.cert is not"),
            ("[tls]\nclient_ca = 'a.pem'", "tls.client_ca is set, but tls.cert is not"),
            ("[tls]\nca = 'a.pem'", "line 2: unknown field `ca`, expected one of `cert`, `key`, `client_ca`"),
            ("[upstreams.a]\nrate = 5", "line 2: unknown field `rate`, expected `auto` or `slots`"),
            (
                "[upstreams.a.auto]\nrate_max = 5\nrate_min = 6",
                "`upstreams.a`: `auto.rate_min` is 6, and must be from 0.000001 to 5",
            ),
            ("[upstreams.'']", "`upstreams`: "),
            ("[upstreams]\na = 5", "line 2: "),
            ("[[tls.clients]]\nname = 'a'", "line 1: missing field `token`"),
            (
                "[tls]\ncert = 'a'\nkey = 'b'\n[[tls.clients]]\nname = 'a'\ntoken = 'a b'",
                "`tls.clients[0].token`: ",
            ),
            (
                "[bounds]\nbody_max = -5",
                "`bounds.body_max` is `-5`, and must be a whole number from 1024 to ",
            ),
        ];
        for (text, sentence) in table {
            fs::write(&path, text).unwrap();
            let failure = ServeSettings::default().decide(Some(&path)).unwrap_err();
            assert!(failure.what.contains(sentence), "{}", failure.what);
        }
    }
}
