//! Object stores by their address, in a build without the feature `archive-remote`.

use std::sync::Arc;

use object_store::ObjectStore;
use url::Url;

/// Names the missing feature.
pub(crate) fn open(_: &Url) -> Result<Arc<dyn ObjectStore>, String> {
    Err("needs the feature `archive-remote`, which is not in this build; or use a folder".to_owned())
}

#[cfg(test)]
mod tests {
    use crate::archive::ArchivePlace;

    #[test]
    fn remote_address_names_the_missing_feature() {
        let error = ArchivePlace::open("s3://bucket/audit").unwrap_err().to_string();
        assert!(error.contains("`s3://bucket/audit`: needs the feature `archive-remote`"), "{error}");
    }
}
