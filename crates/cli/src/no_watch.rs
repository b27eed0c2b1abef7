//! `tidegate watch` in a program that was built without it: it says so.

use clap::Args;

use crate::answer::{Answer, Format};
use crate::backend::Backend;
use crate::failure::Failure;
use crate::remote::Remote;

/// Whatever is typed.
#[derive(Debug, Args)]
pub(crate) struct WatchArgs {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
    words: Vec<String>,
}

/// Says that there is none.
#[expect(clippy::unused_async, reason = "as the real one")]
pub(crate) async fn at_server(args: WatchArgs, _: Remote, _: Format) -> Result<Answer, Failure> {
    Err(none(args))
}

/// Says that there is none.
#[expect(clippy::unused_async, reason = "as the real one")]
pub(crate) async fn at_store(
    args: WatchArgs,
    _: impl Backend,
    _: String,
    _: Format,
) -> Result<Answer, Failure> {
    Err(none(args))
}

fn none(args: WatchArgs) -> Failure {
    drop(args.words);
    Failure::failed("this program was built without `watch`").next("build it with the feature `watch`")
}
