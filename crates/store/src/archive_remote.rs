//! Object stores by their address: Amazon S3, Google Cloud Storage and Azure Blob Storage.

use std::sync::Arc;
use std::time::Duration;

use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::path::Path;
use object_store::prefix::PrefixStore;
use object_store::{ObjectStore, RetryConfig};
use url::Url;

/// What an address may configure. Keys come from the environment only.
const OPTIONS: [&str; 3] = ["account_name", "endpoint", "region"];

/// The prefix of the object store at this address, or what is wrong with it.
pub(crate) fn open(url: &Url) -> Result<Arc<dyn ObjectStore>, String> {
    if url.host_str().is_none_or(str::is_empty) {
        return Err("no bucket: write s3://BUCKET/PREFIX?region=REGION".to_owned());
    }
    let defaults = [("default_content_type", "application/gzip"), ("timeout", "60 seconds")];
    let mut options = Vec::from(defaults.map(|(key, value)| (key.to_owned(), value.to_owned())));
    for (key, value) in url.query_pairs() {
        if !OPTIONS.contains(&&*key) || value.is_empty() {
            return Err("the options are region, endpoint and account_name, each with a value".to_owned());
        }
        if key == "endpoint" && value.starts_with("http://") {
            options.push(("allow_http".to_owned(), "true".to_owned()));
        }
        options.push((key.into_owned(), value.into_owned()));
    }
    build(url, options).map_err(|error| error.to_string())
}

fn build(
    url: &Url,
    options: Vec<(String, String)>,
) -> Result<Arc<dyn ObjectStore>, Box<dyn std::error::Error>> {
    /// The builders have the same methods, but no trait.
    macro_rules! build {
        ($builder:ty) => {{
            // Less than the default of three minutes, in which the lock would expire.
            let retry =
                RetryConfig { max_retries: 6, retry_timeout: Duration::from_secs(30), ..Default::default() };
            let mut builder = <$builder>::from_env().with_url(url.as_str()).with_retry(retry);
            for (key, value) in options {
                builder = builder.with_config(key.parse()?, value);
            }
            Ok(Arc::new(PrefixStore::new(builder.build()?, Path::from_url_path(url.path())?)))
        }};
    }
    match url.scheme() {
        "s3" => build!(AmazonS3Builder),
        "gs" => build!(GoogleCloudStorageBuilder),
        "az" => build!(MicrosoftAzureBuilder),
        other => Err(format!("unknown scheme `{other}`: use file, s3, gs or az").into()),
    }
}
