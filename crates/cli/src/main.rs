//! The program `tidegate`: inspects and changes shared limits from the command line, and fetches files at the
//! rate that their hosts sustain.
//!
//! `arguments → verb → Backend → Output`. A verb calls a [`Backend`](backend::Backend), which is a store in
//! this process or a server, and returns text for people and one JSON document for programs. Errors are a
//! [`Failure`](failure::Failure), which carries its exit code and a hint.

mod args;
mod backend;
mod bounds;
mod child;
mod codec;
mod config;
mod default_paths;
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
mod format;
mod manifest;
mod output;
mod parse;
mod plot;
mod proxy;
#[cfg(all(test, feature = "envoy", feature = "fetch", feature = "watch"))]
mod reference_tests;
mod remote;
mod replay;
mod signals;
mod store;
mod upstreams;
mod verbs;
#[cfg(feature = "watch")]
mod watch;
#[cfg(not(feature = "watch"))]
#[path = "no_watch.rs"]
mod watch;

use std::process::ExitCode;

use tokio::runtime::Builder;

use crate::args::{Args, Verb};
use crate::failure::Failure;

fn main() -> ExitCode {
    let args = match Args::read() {
        Ok(args) => args,
        Err(error) => return args::print_error(&error),
    };
    let format = args.format();
    let runtime = match args.verb {
        Verb::Serve(_) | Verb::Proxy(_) | Verb::Mock(_) => Builder::new_multi_thread().enable_all().build(),
        _ => Builder::new_current_thread().enable_all().build(),
    };
    let output = runtime
        .map_err(|error| Failure::failed(format!("the runtime cannot be started: {error}")))
        .and_then(|runtime| runtime.block_on(verbs::run(args, format)));
    match output {
        Ok(output) => output.print(format),
        Err(failure) => failure.print(format),
    }
}
