//! An archive in a bucket, in a program that was built without.

use std::sync::Arc;

use tidegate::store::archive::ArchivePlace;

use crate::failure::Failure;

/// Says which feature it needs.
#[expect(clippy::unused_async, reason = "with the feature it waits")]
pub(crate) async fn open(url: &str) -> Result<Arc<dyn ArchivePlace>, Failure> {
    let url = crate::words::shown(url);
    let what = format!("`{url}` needs the feature `archive-s3`, which this program was built without");
    Err(Failure::usage(what)
        .next("build it: cargo install tidegate-cli --features archive-s3, or name a folder"))
}
