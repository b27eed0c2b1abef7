//! The proxies under test, each with one worker, and the upstreams behind them. All are separate processes.

use std::env;
use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde_json::json;
use tempfile::TempDir;
use tidegate_bench::side::Side;
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::time::sleep;

use crate::load::Target;

/// The key that the upstream gets.
const KEY: &str = "sk-bench";
/// The name of the upstream at our proxy.
const NAME: &str = "bench";
/// Far more than the callers draw.
const PLENTY: &str = r#"{"policy": {"limits": ["requests:1000000000/s:1000000000000"]}}"#;
/// How often a starting peer is asked whether it is ready, and how many times: it imports thousands of modules.
const ASKS: (Duration, u32) = (Duration::from_millis(100), 1_200);

/// A running proxy of ours. Dropping it kills the process.
pub(crate) struct Ours {
    pub(crate) side: Side,
    _folder: Option<TempDir>,
}

/// A running peer. Dropping it kills the process.
pub(crate) struct Peer {
    child: Child,
    pub(crate) addr: String,
    _folder: TempDir,
}

/// Starts the small upstream of this program.
pub(crate) async fn upstream() -> Result<Side> {
    Side::start(env::current_exe()?.as_os_str(), &["--upstream", "127.0.0.1:0"]).await
}

/// Starts `tidegate mock` with the profile of `OpenAI`.
pub(crate) async fn mock(arguments: &[&str]) -> Result<Side> {
    let program = env::current_exe()?.with_file_name("tidegate");
    let line = [&["mock", "openai", "--json", "--listen", "127.0.0.1:0"], arguments].concat();
    Side::start(program.as_os_str(), &line).await
}

/// The host and port of a program that reports its URL in this field.
pub(crate) fn addr(side: &Side, field: &str) -> Result<String> {
    Ok(side.ready_field(field)?.strip_prefix("http://").context("an HTTP address")?.to_owned())
}

impl Ours {
    /// A proxy without tenants: callers bring their key.
    pub(crate) async fn plain(profile: &str, upstream: &str) -> Result<Self> {
        let upstream = format!("{NAME}:{profile}=http://{upstream}");
        let line = ["proxy", &upstream, "--json", "--listen", "127.0.0.1:0"];
        Ok(Self { side: start(&line).await?, _folder: None })
    }

    /// A proxy whose callers are tenants with limits in memory, which each call draws and settles.
    pub(crate) async fn with_tenants(profile: &str, upstream: &str) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let (config, key) = (folder.path().join("tidegate.toml"), folder.path().join("key"));
        fs::write(&key, KEY)?;
        fs::set_permissions(&key, fs::Permissions::from_mode(0o600))?;
        let text = format!(
            "[proxy]\nlisten = '127.0.0.1:0'\nupstreams = ['{NAME}:{profile}=http://{upstream}']\nkeys = {{ {NAME} = '{}' }}\n",
            key.display()
        );
        fs::write(&config, text)?;
        let config = config.to_str().context("the path of a folder is text")?;
        let line =
            ["serve", "--json", "--store", "memory:", "--listen", "127.0.0.1:0", "--log-level", "warn"];
        let side = start(&[&line[..], &["--config", config]].concat()).await?;
        let api = Target {
            addr: addr(&side, "url")?,
            path: String::new(),
            key: side.ready_field("token")?.to_owned(),
        };
        api.send("PUT", "/v1/policy", PLENTY).await?;
        Ok(Self { side, _folder: Some(folder) })
    }

    /// Where callers send their requests.
    pub(crate) fn target(&self, path: &str) -> Result<Target> {
        let is_server = self.side.ready_field("proxy").is_ok();
        Ok(Target {
            addr: addr(&self.side, if is_server { "proxy" } else { "url" })?,
            path: format!("/{NAME}{path}"),
            key: if is_server { self.side.ready_field("token")?.to_owned() } else { KEY.to_owned() },
        })
    }
}

/// Starts the program with one worker thread.
async fn start(arguments: &[&str]) -> Result<Side> {
    let program = env::current_exe()?.with_file_name("tidegate");
    let program = program.to_str().context("the path of the program is text")?;
    Side::start("env".as_ref(), &[&["TOKIO_WORKER_THREADS=1", program], arguments].concat()).await
}

impl Peer {
    /// nginx with one worker, which keeps connections to the upstream and writes no log.
    pub(crate) async fn nginx(upstream: &str) -> Result<Self> {
        let (folder, port) = (tempfile::tempdir()?, free_port()?);
        let place = folder.path().display();
        let config = format!(
            // One process: it ends when it is killed.
            "daemon off; master_process off; worker_processes 1; pid {place}/pid; error_log {place}/log error;\n\
             events {{ worker_connections 1024; }}\n\
             http {{\n\
               access_log off; client_body_temp_path {place}/a; proxy_temp_path {place}/b;\n\
               fastcgi_temp_path {place}/c; uwsgi_temp_path {place}/d; scgi_temp_path {place}/e;\n\
               keepalive_requests 1000000000; proxy_max_temp_file_size 0; proxy_buffers 16 64k;\n\
               proxy_buffer_size 64k; proxy_busy_buffers_size 512k;\n\
               upstream peers {{ server {upstream}; keepalive 64; keepalive_requests 1000000000; }}\n\
               server {{\n\
                 listen 127.0.0.1:{port};\n\
                 location / {{ proxy_pass http://peers; proxy_http_version 1.1; proxy_set_header Connection \"\"; }}\n\
               }}\n\
             }}\n"
        );
        let path = folder.path().join("nginx.conf");
        fs::write(&path, config)?;
        let mut command = Command::new("nginx");
        command.arg("-c").arg(&path).arg("-e").arg(folder.path().join("log")).arg("-p").arg(folder.path());
        Self::start(command, folder, port).await
    }

    /// `LiteLLM`'s proxy with one worker, before an upstream with the profile of `OpenAI`.
    pub(crate) async fn litellm(python: &str, upstream: &str) -> Result<Self> {
        let (folder, port) = (tempfile::tempdir()?, free_port()?);
        let model = json!({"model_name": "gpt-4", "litellm_params": {
            "model": "openai/gpt-4", "api_base": format!("http://{upstream}/v1"), "api_key": KEY}});
        let path = folder.path().join("config.yaml");
        // JSON is YAML.
        fs::write(&path, json!({"model_list": [model]}).to_string())?;
        let program = Path::new(python).with_file_name("litellm");
        let mut command = Command::new(program);
        command.arg("--config").arg(&path).args(["--host", "127.0.0.1", "--num_workers", "1"]);
        command.args(["--telemetry", "False", "--port", &port.to_string()]);
        command.envs([
            ("LITELLM_LOG", "ERROR"),
            ("LITELLM_LOCAL_MODEL_COST_MAP", "True"),
            // Any key passes, as at our side.
            ("LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY", "true"),
        ]);
        command.current_dir(folder.path());
        Self::start(command, folder, port).await
    }

    async fn start(mut command: Command, folder: TempDir, port: u16) -> Result<Self> {
        let output = fs::File::create(folder.path().join("output"))?;
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output).kill_on_drop(true);
        let mut child = command.spawn().with_context(|| format!("could not start {command:?}"))?;
        let addr = format!("127.0.0.1:{port}");
        let (every, times) = ASKS;
        for _ in 0..times {
            if TcpStream::connect(&addr).await.is_ok() {
                return Ok(Self { child, addr, _folder: folder });
            }
            if let Some(status) = child.try_wait()? {
                let output = fs::read_to_string(folder.path().join("output")).unwrap_or_default();
                let log = fs::read_to_string(folder.path().join("log")).unwrap_or_default();
                bail!("{command:?} ended with {status}: {output}{log}");
            }
            sleep(every).await;
        }
        bail!("{command:?} does not listen on {addr}")
    }

    /// Where callers send their requests.
    pub(crate) fn target(&self, path: &str) -> Target {
        Target { addr: self.addr.clone(), path: path.to_owned(), key: KEY.to_owned() }
    }

    /// The CPU time so far, of a peer with one process.
    pub(crate) fn cpu(&self) -> Result<Duration> {
        tidegate_bench::side::cpu(self.child.id().context("the peer has ended")?)
    }
}

fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}
