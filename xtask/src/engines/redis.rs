//! Redis and Valkey: one server, six that form a cluster, or a pair that three sentinels watch.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{Ipv4Addr, TcpStream};
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use super::fetch::RedisPrograms;
use super::process::{Process, free_ports, together, wait};
use super::state::Running;
use super::{Engine, fresh};
use crate::step;

/// What the sentinels call the pair they watch.
const WATCHED: &str = "tidegate";

/// Without this a primary that is killed early is never replaced: its replica is still waiting to be synced.
const SYNC_SOON: [&str; 2] = ["--repl-diskless-sync-delay", "0"];

/// One server that keeps nothing.
pub(super) fn single(engine: Engine, programs: &RedisPrograms) -> Result<Running> {
    let folder = fresh(engine)?;
    let [port] = free_ports()?;
    let process = node(programs, &folder, port, &[])?;
    Ok(Running {
        engine,
        url: format!("redis://{}:{port}", Ipv4Addr::LOCALHOST),
        program: programs.server.clone(),
        folder,
        processes: vec![process],
    })
}

/// Six nodes, each on its own port, and one more for the cluster bus.
pub(super) fn cluster(programs: &RedisPrograms) -> Result<Running> {
    let folder = fresh(Engine::RedisCluster)?;
    let ports: [u16; 6] = free_ports()?;
    let buses: [u16; 6] = free_ports()?;
    let nodes = ports.map(|port| format!("{}:{port}", Ipv4Addr::LOCALHOST));
    let processes = together(|processes| {
        for (port, bus) in ports.into_iter().zip(buses) {
            let bus = bus.to_string();
            // None is lost, however long it takes to answer: a test that loses one has a cluster of its own.
            let options =
                ["--cluster-enabled", "yes", "--cluster-node-timeout", "60000", "--cluster-port", &bus];
            processes.push(node(programs, &folder, port, &[&options[..], &SYNC_SOON].concat())?);
        }
        form(programs, &nodes, &ports)
    })?;
    Ok(Running {
        engine: Engine::RedisCluster,
        url: format!("redis+cluster://{}", nodes.join(",")),
        program: programs.server.clone(),
        folder,
        processes,
    })
}

/// Makes the nodes one cluster, and waits until each of them knows it.
fn form(programs: &RedisPrograms, nodes: &[String], ports: &[u16]) -> Result<()> {
    let mut create = Command::new(programs.cli.as_ref().context("there is no redis-cli")?);
    create.args(["--cluster", "create"]).args(nodes).args(["--cluster-replicas", "1", "--cluster-yes"]);
    step::capture("forming a cluster", &mut create)?;
    for &port in ports {
        let formed = wait(|| Ok(ask(port, "CLUSTER INFO")?.iter().any(|line| line == "cluster_state:ok")))?;
        ensure!(formed, "the node on {port} is in no cluster");
    }
    Ok(())
}

/// A primary, its replica, and three who agree when the primary is lost.
pub(super) fn sentinel(programs: &RedisPrograms) -> Result<Running> {
    let folder = fresh(Engine::Sentinel)?;
    let [primary, replica, ports @ ..]: [u16; 5] = free_ports()?;
    let host = Ipv4Addr::LOCALHOST;
    let follows = format!("{host} {primary}");
    let processes = together(|processes| {
        processes.push(node(programs, &folder, primary, &SYNC_SOON)?);
        let replicates = [&SYNC_SOON[..], &["--replicaof", &follows]].concat();
        processes.push(node(programs, &folder, replica, &replicates)?);
        for port in ports {
            let file = folder.join(format!("sentinel-{port}.conf"));
            let text = format!(
                "port {port}\nbind {host}\nsentinel monitor {WATCHED} {host} {primary} 2\n\
                 sentinel down-after-milliseconds {WATCHED} 1000\nsentinel failover-timeout {WATCHED} 5000\n"
            );
            fs::write(&file, text).with_context(|| format!("could not write {}", file.display()))?;
            let mut command = Command::new(&programs.server);
            command.arg(&file).arg("--sentinel").current_dir(&folder);
            processes.push(Process::start(&mut command, port, &folder.join(format!("{port}.log")))?);
        }
        Ok(())
    })?;
    let nodes = ports.map(|port| format!("{host}:{port}"));
    Ok(Running {
        engine: Engine::Sentinel,
        url: format!("redis+sentinel://{}/{WATCHED}", nodes.join(",")),
        program: programs.server.clone(),
        folder,
        processes,
    })
}

fn node(programs: &RedisPrograms, folder: &Path, port: u16, options: &[&str]) -> Result<Process> {
    let own = folder.join(port.to_string());
    fs::create_dir_all(&own).with_context(|| format!("could not create {}", own.display()))?;
    let mut command = Command::new(&programs.server);
    command.args(["--port", &port.to_string(), "--bind", &Ipv4Addr::LOCALHOST.to_string()]);
    command.args(["--save", "", "--appendonly", "no", "--dir"]).arg(&own).args(options).current_dir(&own);
    Process::start(&mut command, port, &folder.join(format!("{port}.log")))
}

/// What a server answers to one command, as the lines it sends until it has nothing more to say.
fn ask(port: u16, command: &str) -> Result<Vec<String>> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    stream.write_all(format!("{command}\r\nQUIT\r\n").as_bytes())?;
    let lines: Result<Vec<_>, _> = BufReader::new(stream).lines().collect();
    Ok(lines?)
}
