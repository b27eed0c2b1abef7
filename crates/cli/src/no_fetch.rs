//! `tidegate fetch` in a build without the feature: reports that it is missing.

use std::time::Duration;

use clap::Args;

use crate::failure::Failure;
use crate::output::{Format, Output};

/// Accepts any arguments.
#[derive(Debug, Args)]
pub(crate) struct FetchArgs {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
    args: Vec<String>,
}

/// Fails with the name of the missing feature.
#[expect(clippy::unused_async, reason = "as the real one")]
pub(crate) async fn run(args: FetchArgs, _: Option<Duration>, _: Format) -> Result<Output, Failure> {
    drop(args.args);
    Err(Failure::failed("this program was built without `fetch`").next("build it with the feature `fetch`"))
}
