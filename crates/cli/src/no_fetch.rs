//! `tidegate fetch` in a program that was built without it: it says so.

use std::time::Duration;

use clap::Args;

use crate::answer::{Answer, Format};
use crate::failure::Failure;

/// Whatever is typed.
#[derive(Debug, Args)]
pub(crate) struct FetchArgs {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
    words: Vec<String>,
}

/// Says that there is none.
#[expect(clippy::unused_async, reason = "as the real one")]
pub(crate) async fn run(args: FetchArgs, _: Option<Duration>, _: Format) -> Result<Answer, Failure> {
    drop(args.words);
    Err(Failure::failed("this program was built without `fetch`").next("build it with the feature `fetch`"))
}
