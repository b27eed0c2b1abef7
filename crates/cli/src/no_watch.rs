//! `tidegate watch` in a build without the feature: reports that it is missing.

use clap::Args;

use crate::backend::Backend;
use crate::failure::Failure;
use crate::output::{Format, Output};
use crate::remote::Remote;

/// Accepts any arguments.
#[derive(Debug, Args)]
pub(crate) struct WatchArgs {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
    args: Vec<String>,
}

/// Fails with the name of the missing feature.
#[expect(clippy::unused_async, reason = "as the real one")]
pub(crate) async fn at_server(args: WatchArgs, _: Remote, _: Format) -> Result<Output, Failure> {
    Err(none(args))
}

/// Fails with the name of the missing feature.
#[expect(clippy::unused_async, reason = "as the real one")]
pub(crate) async fn at_store(
    args: WatchArgs,
    _: impl Backend,
    _: String,
    _: Format,
) -> Result<Output, Failure> {
    Err(none(args))
}

fn none(args: WatchArgs) -> Failure {
    drop(args.args);
    Failure::failed("this program was built without `watch`").next("build it with the feature `watch`")
}
