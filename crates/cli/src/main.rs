//! The program `tidegate`: shared limits, looked at and changed from the command line, and files fetched as their hosts bear it.
//!
//! `arguments → verb → Backend → Answer`. A verb asks a [`Backend`](backend::Backend), a store in this process or a server, and answers with
//! text for people and one JSON document for programs. What goes wrong is a [`Failure`](failure::Failure), which knows its exit
//! code and what to do next.

mod answer;
mod args;
mod backend;
mod bounds;
mod child;
mod codec;
mod config;
#[cfg(feature = "envoy")]
mod envoy;
#[cfg(not(feature = "envoy"))]
#[path = "no_envoy.rs"]
mod envoy;
mod failure;
#[cfg(feature = "fetch")]
mod fetch;
#[cfg(not(feature = "fetch"))]
#[path = "no_fetch.rs"]
mod fetch;
mod place;
mod plot;
mod remote;
mod replay;
mod signals;
mod store;
mod verbs;
#[cfg(feature = "watch")]
mod watch;
#[cfg(not(feature = "watch"))]
#[path = "no_watch.rs"]
mod watch;
mod words;

use std::process::ExitCode;

use tokio::runtime::Builder;

use crate::args::{Args, Verb};
use crate::failure::Failure;

fn main() -> ExitCode {
    let args = match Args::read() {
        Ok(args) => args,
        Err(error) => return args::told(&error),
    };
    let format = args.format();
    let runtime = match args.verb {
        Verb::Serve(_) => Builder::new_multi_thread().enable_all().build(),
        _ => Builder::new_current_thread().enable_all().build(),
    };
    let answer = runtime
        .map_err(|error| Failure::failed(format!("no runtime can be started: {error}")))
        .and_then(|runtime| runtime.block_on(verbs::run(args, format)));
    match answer {
        Ok(answer) => answer.tell(format),
        Err(failure) => failure.tell(format),
    }
}
