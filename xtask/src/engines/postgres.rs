//! PostgreSQL: one server with its own database, run as a user other than root.

use std::env;
use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use super::owner::{Owner, is_open_to_all};
use super::process::{Process, free_ports, wait};
use super::state::Running;
use super::{Engine, folder};
use crate::step;

/// The database role, which is not the server's system user.
const USER: &str = "tidegate";
/// The only role that needs a password, for tests of a wrong one; the server is reachable from this machine
/// only. Checking a password takes an unoptimized client a good part of a second.
const PASSWORD_USER: &str = "keyed";
/// Each test has its own pool, and many run concurrently.
const CONNECTIONS_MAX: &str = "300";

/// Starts a server with the binaries in `programs`.
pub(super) fn start(programs: &Path) -> Result<Running> {
    let owner = Owner::instead_of_root()?;
    let home = home(owner)?;
    let data = home.join("data");
    make(programs, owner, &home, &data)?;
    let [port] = free_ports()?;
    let program = programs.join("postgres");
    let mut command = Command::new(&program);
    command.arg("-D").arg(&data).args(["-h", &Ipv4Addr::LOCALHOST.to_string(), "-p", &port.to_string()]);
    // The last option counts calls per statement.
    let options = ["unix_socket_directories=", "shared_preload_libraries=pg_stat_statements"];
    for option in [&format!("max_connections={CONNECTIONS_MAX}")[..]].into_iter().chain(options) {
        command.args(["-c", option]);
    }
    // Commits stay durable, which is the default: the tests cover the promises that users get.
    let process = Process::start(as_owner(owner, command.current_dir(&home)), port, &home.join("log"))?;
    let url = format!("postgres://{USER}@{}:{port}/postgres", Ipv4Addr::LOCALHOST);
    let is_serving = wait(|| is_ready(programs, port))?;
    ensure!(is_serving, "the server on port {port} listens but is not ready");
    Ok(Running { engine: Engine::Postgres, url, program, folder: home, processes: vec![process] })
}

/// Creates a database cluster.
fn make(programs: &Path, owner: Option<Owner>, home: &Path, data: &Path) -> Result<()> {
    let mut initdb = Command::new(programs.join("initdb"));
    initdb.arg("-D").arg(data).args(["-U", USER, "-A", "trust", "-E", "UTF8", "--locale=C"]);
    step::capture("initdb", as_owner(owner, initdb.current_dir(home)))?;
    let rules = data.join("pg_hba.conf");
    let usual = fs::read_to_string(&rules).with_context(|| format!("could not read {}", rules.display()))?;
    // The first matching rule applies.
    let text = format!("host all {PASSWORD_USER} all scram-sha-256\n{usual}");
    fs::write(&rules, text).with_context(|| format!("could not write {}", rules.display()))
}

fn is_ready(programs: &Path, port: u16) -> Result<bool> {
    let mut ready = Command::new(programs.join("pg_isready"));
    ready.args(["-q", "-h", &Ipv4Addr::LOCALHOST.to_string(), "-p", &port.to_string()]);
    Ok(ready.status().context("could not start pg_isready")?.success())
}

fn as_owner(owner: Option<Owner>, command: &mut Command) -> &mut Command {
    match owner {
        Some(owner) => owner.run(command),
        None => command,
    }
}

/// An empty folder that the server's user owns and can reach: below `target` if possible, otherwise in the
/// temporary folder.
fn home(owner: Option<Owner>) -> Result<PathBuf> {
    let usual = folder();
    let home = if owner.is_some() && !is_open_to_all(&usual) {
        env::temp_dir().join(format!("tidegate-engines-{}", std::process::id()))
    } else {
        usual.join("postgres")
    };
    if home.exists() {
        fs::remove_dir_all(&home).with_context(|| format!("could not empty {}", home.display()))?;
    }
    fs::create_dir_all(&home).with_context(|| format!("could not create {}", home.display()))?;
    owner.map_or(Ok(()), |owner| owner.give(&home))?;
    Ok(home)
}
