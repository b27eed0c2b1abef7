//! Servers with DynamoDB's API: DynamoDB Local, Amazon's own and the reference, and dynoxide, which is
//! faster.

use std::net::Ipv4Addr;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result};

use super::process::{Process, free_ports};
use super::state::Running;
use super::{Engine, empty_folder};
use crate::install;

/// Starts DynamoDB Local in memory, from the folder of its program.
pub(super) fn local(program: &Path) -> Result<Running> {
    let folder = empty_folder(Engine::Dynamodb)?;
    let [port] = free_ports()?;
    let home = program.parent().context("a program is in a folder")?;
    let mut command = Command::new(install::on_path("java").context("java is missing")?);
    command.arg("-Xmx1g").arg("-Djava.library.path=./DynamoDBLocal_lib").arg("-jar").arg(program);
    // One database for all clients, regardless of their credentials.
    command
        .args(["-inMemory", "-sharedDb", "-disableTelemetry", "-port", &port.to_string()])
        .current_dir(home);
    let process = Process::start(&mut command, port, &folder.join("server.log"))?;
    Ok(running(Engine::Dynamodb, program, folder, process))
}

/// Starts dynoxide in memory.
pub(super) fn dynoxide(program: &Path) -> Result<Running> {
    let folder = empty_folder(Engine::Dynoxide)?;
    let [port] = free_ports()?;
    let mut command = Command::new(program);
    command.args(["serve", "--port", &port.to_string()]).current_dir(&folder);
    let process = Process::start(&mut command, port, &folder.join("server.log"))?;
    Ok(running(Engine::Dynoxide, program, folder, process))
}

fn running(engine: Engine, program: &Path, folder: std::path::PathBuf, process: Process) -> Running {
    let url = format!("http://{}:{}", Ipv4Addr::LOCALHOST, process.port);
    Running { engine, url, program: program.to_owned(), folder, processes: vec![process] }
}
