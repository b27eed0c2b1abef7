//! An archive in a bucket, by its address.

use std::sync::Arc;

use tidegate::store::S3Archive;
use tidegate::store::archive::ArchivePlace;

use crate::failure::Failure;

/// The bucket at an address.
pub(crate) async fn open(url: &str) -> Result<Arc<dyn ArchivePlace>, Failure> {
    let opened = S3Archive::open(url).await.map_err(|error| Failure::usage(error.to_string()))?;
    Ok(Arc::new(opened))
}
