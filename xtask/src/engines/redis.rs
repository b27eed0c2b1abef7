//! Redis and Valkey: one server, a cluster of six, or a pair with three sentinels.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{Ipv4Addr, TcpStream};
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use super::fetch::RedisPrograms;
use super::process::{Process, free_ports, start_all, wait};
use super::state::Running;
use super::{Engine, empty_folder};
use crate::step;

/// The name of the watched pair.
const WATCHED: &str = "tidegate";

/// Otherwise a primary that is killed early is never replaced: its replica still waits for the first sync.
const SYNC_SOON: [&str; 2] = ["--repl-diskless-sync-delay", "0"];

/// One server without persistence.
pub(super) fn single(engine: Engine, programs: &RedisPrograms) -> Result<Running> {
    let folder = empty_folder(engine)?;
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

/// Six nodes, each with its own port and cluster bus port.
pub(super) fn cluster(programs: &RedisPrograms) -> Result<Running> {
    let folder = empty_folder(Engine::RedisCluster)?;
    let ports: [u16; 6] = free_ports()?;
    let buses: [u16; 6] = free_ports()?;
    let nodes = ports.map(|port| format!("{}:{port}", Ipv4Addr::LOCALHOST));
    let processes = start_all(|processes| {
        for (port, bus) in ports.into_iter().zip(buses) {
            let bus = bus.to_string();
            // No node is considered lost, however slow it is: tests of lost nodes have their own cluster.
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

/// Forms a cluster and waits until every node reports it.
fn form(programs: &RedisPrograms, nodes: &[String], ports: &[u16]) -> Result<()> {
    let mut create = Command::new(programs.cli.as_ref().context("redis-cli is missing")?);
    create.args(["--cluster", "create"]).args(nodes).args(["--cluster-replicas", "1", "--cluster-yes"]);
    step::capture("forming a cluster", &mut create)?;
    for &port in ports {
        let formed = wait(|| Ok(ask(port, "CLUSTER INFO")?.iter().any(|line| line == "cluster_state:ok")))?;
        ensure!(formed, "the node on port {port} did not join the cluster");
    }
    Ok(())
}

/// A primary, its replica, and three sentinels that agree on a failover.
pub(super) fn sentinel(programs: &RedisPrograms) -> Result<Running> {
    let folder = empty_folder(Engine::Sentinel)?;
    let [primary, replica, ports @ ..]: [u16; 5] = free_ports()?;
    let host = Ipv4Addr::LOCALHOST;
    let follows = format!("{host} {primary}");
    let processes = start_all(|processes| {
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

/// Sends one command and returns the lines of the response.
fn ask(port: u16, command: &str) -> Result<Vec<String>> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    stream.write_all(format!("{command}\r\nQUIT\r\n").as_bytes())?;
    let lines: Result<Vec<_>, _> = BufReader::new(stream).lines().collect();
    Ok(lines?)
}
