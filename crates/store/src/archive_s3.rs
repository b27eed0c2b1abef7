//! An archive in a bucket of S3, or of a server that speaks as S3 does.
//!
//! A file is put as a whole or not at all, with its checksum, and only if there is none of its name. The place is held by an
//! object that only one can make, and that only one can take over once it was not renewed for a while. Nothing else is
//! asked of the engine, and nothing is ever removed from it but that object.

use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, SystemTime};

use aws_config::BehaviorVersion;
use aws_sdk_s3::Client;
use aws_sdk_s3::config::{Credentials, Region};
use aws_sdk_s3::error::{DisplayErrorContext, ProvideErrorMetadata, SdkError};
use aws_sdk_s3::primitives::ByteStream;
use aws_smithy_http_client::tls::{self, rustls_provider::CryptoMode};
use tokio::io::AsyncWriteExt as _;
use tokio::time::Instant;

use crate::archive::{ArchiveError, ArchivePlace, Later};
use crate::error::StoreError;
use crate::sync::lock;

/// The object by which a place is held.
const LOCK: &str = "archive.lock";
/// How long it is held without being renewed.
const HELD_FOR: Duration = Duration::from_secs(120);

/// An archive in a bucket. Whoever uses it is known by the SDK's own means.
///
/// ```no_run
/// use std::sync::Arc;
/// use tidegate_core::time::Stamp;
/// use tidegate_store::archive::{ArchiveOptions, archive};
/// use tidegate_store::{Memory, S3Archive};
///
/// # async fn example(month_ago: Stamp) -> Result<(), Box<dyn std::error::Error>> {
/// let bucket = S3Archive::open("s3://backups/tidegate/audit?region=eu-central-1").await?;
/// archive(&Memory::new(), &ArchiveOptions::at(Arc::new(bucket), month_ago)).await?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct S3Archive {
    client: Client,
    bucket: String,
    /// Ends with a `/`, if there is any.
    prefix: String,
    held_for: Duration,
    held: Mutex<Option<Held>>,
}

/// That this one holds the place.
#[derive(Debug, Clone)]
struct Held {
    etag: String,
    since: Instant,
}

impl S3Archive {
    /// The bucket and the prefix at an address: `s3://bucket/prefix`. Behind a `?`, parted by `&`, may stand `region=…` and,
    /// for another server than Amazon's, `endpoint=…`. Nothing is asked yet.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] for an address that is none, and where no region is known.
    pub async fn open(url: &str) -> Result<Self, StoreError> {
        Self::opened(url, None).await
    }

    /// The same with keys to sign with, where those that the SDK finds are not meant.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub async fn open_with_keys(url: &str, key: &str, secret: &str) -> Result<Self, StoreError> {
        Self::opened(url, Some(Credentials::new(key, secret, None, None, "given"))).await
    }

    /// How long a run that was killed holds the place; two minutes unless said otherwise.
    #[must_use]
    pub const fn held_for(mut self, span: Duration) -> Self {
        self.held_for = span;
        self
    }

    async fn opened(url: &str, keys: Option<Credentials>) -> Result<Self, StoreError> {
        let invalid = |what: String| StoreError::Invalid { what };
        let shown: String = url.chars().take(200).flat_map(char::escape_debug).collect();
        let (place, options) = url.split_once('?').unwrap_or((url, ""));
        let Some(place) =
            place.strip_prefix("s3://").filter(|place| !place.starts_with('/') && !place.is_empty())
        else {
            return Err(invalid(format!(
                "`{shown}` names no bucket: write s3://BUCKET/PREFIX?region=REGION"
            )));
        };
        let (bucket, prefix) = place.split_once('/').unwrap_or((place, ""));
        let prefix = prefix.trim_matches('/');
        let prefix = if prefix.is_empty() { String::new() } else { format!("{prefix}/") };
        let provider = tls::Provider::Rustls(CryptoMode::AwsLc);
        let http = aws_smithy_http_client::Builder::new().tls_provider(provider).build_https();
        let mut config = aws_config::defaults(BehaviorVersion::latest()).http_client(http);
        let mut is_path = false;
        for option in options.split('&').filter(|option| !option.is_empty()) {
            config = match option.split_once('=') {
                Some(("region", region)) => config.region(Region::new(region.to_owned())),
                Some(("endpoint", endpoint)) => {
                    is_path = true;
                    config.endpoint_url(endpoint)
                }
                _ => {
                    return Err(invalid(format!(
                        "`{shown}` may have the options region and endpoint, each with a value"
                    )));
                }
            };
        }
        if let Some(keys) = keys {
            config = config.credentials_provider(keys);
        }
        let config = config.load().await;
        if config.region().is_none() {
            return Err(invalid(format!("`{shown}` needs a region: s3://{bucket}/…?region=REGION")));
        }
        // Other servers than Amazon's have no name for each bucket.
        let config = aws_sdk_s3::config::Builder::from(&config).force_path_style(is_path).build();
        let client = Client::from_conf(config);
        Ok(Self { client, bucket: bucket.to_owned(), prefix, held_for: HELD_FOR, held: Mutex::new(None) })
    }

    fn key(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    fn locked(&self) -> ArchiveError {
        ArchiveError::Locked { folder: self.shown().into() }
    }

    fn failed<E, R>(&self, doing: &str, error: &SdkError<E, R>) -> ArchiveError
    where
        E: ProvideErrorMetadata + std::error::Error + Send + Sync + 'static,
        R: std::fmt::Debug + Send + Sync + 'static,
    {
        let code = error.code().unwrap_or_default();
        let is_answer = matches!(error, SdkError::ConstructionFailure(_))
            || (matches!(error, SdkError::ServiceError(_))
                && !["SlowDown", "InternalError", "ServiceUnavailable", "RequestTimeout"].contains(&code));
        let told: String = DisplayErrorContext(error).to_string().chars().take(300).collect();
        self.trouble(format!("cannot {doing}: {told}"), !is_answer)
    }

    fn trouble(&self, what: String, is_away: bool) -> ArchiveError {
        ArchiveError::Place { place: self.shown(), what, is_away }
    }

    /// Writes the object that holds the place: if there is none, or if it is the one of this name. Answers whether it was so.
    async fn write_lock(&self, replaced: Option<&str>) -> Result<bool, ArchiveError> {
        // Another text each time, so that it has another name.
        let text = format!("{:?} {}", SystemTime::now(), std::process::id());
        let call = self.client.put_object().bucket(&self.bucket).key(self.key(LOCK));
        let call = match replaced {
            Some(etag) => call.if_match(etag),
            None => call.if_none_match("*"),
        };
        let since = Instant::now();
        let etag = match call.body(ByteStream::from(text.clone().into_bytes())).send().await {
            Ok(done) => done.e_tag,
            // Perhaps by the first try of this very call, whose answer was lost.
            Err(error) if is_unmet(&error) => self.etag_of_lock(&text).await?,
            Err(error) => return Err(self.failed("hold it", &error)),
        };
        let held = etag.map(|etag| Held { etag, since });
        let is_held = held.is_some();
        *lock(&self.held) = held;
        Ok(is_held)
    }

    /// The name of the object that holds the place, if it has this text.
    async fn etag_of_lock(&self, text: &str) -> Result<Option<String>, ArchiveError> {
        let call = self.client.get_object().bucket(&self.bucket).key(self.key(LOCK));
        let found = match call.send().await {
            Ok(found) => found,
            Err(SdkError::ServiceError(said)) if said.err().is_no_such_key() => return Ok(None),
            Err(error) => return Err(self.failed("look who holds it", &error)),
        };
        let (etag, body) = (found.e_tag, found.body.collect().await);
        let body = body.map_err(|error| self.trouble(format!("cannot read {LOCK}: {error}"), true))?;
        Ok(etag.filter(|_| body.into_bytes() == text.as_bytes()))
    }

    async fn take(&self) -> Result<(), ArchiveError> {
        if self.write_lock(None).await? {
            return Ok(());
        }
        let found = self.client.head_object().bucket(&self.bucket).key(self.key(LOCK)).send().await;
        let found = match found {
            Ok(found) => found,
            Err(SdkError::ServiceError(said)) if said.err().is_not_found() => return Err(self.locked()),
            Err(error) => return Err(self.failed("look who holds it", &error)),
        };
        let written = found.last_modified().and_then(|at| SystemTime::try_from(*at).ok());
        let age = written.and_then(|at| SystemTime::now().duration_since(at).ok()).unwrap_or_default();
        match found.e_tag() {
            Some(etag) if age >= self.held_for && self.write_lock(Some(etag)).await? => Ok(()),
            _ => Err(self.locked()),
        }
    }

    async fn renew(&self, held: Held) -> Result<(), ArchiveError> {
        if held.since.elapsed() < self.held_for / 3 {
            return Ok(());
        }
        if self.write_lock(Some(&held.etag)).await? {
            return Ok(());
        }
        Err(self.locked())
    }

    async fn get(&self, name: &str) -> Result<ByteStream, ArchiveError> {
        let call = self.client.get_object().bucket(&self.bucket).key(self.key(name));
        Ok(call.send().await.map_err(|error| self.failed("read", &error))?.body)
    }

    async fn fetch_to(&self, name: &str, to: &Path) -> Result<(), ArchiveError> {
        let mut body = self.get(name).await?;
        let mut file = tokio::fs::File::create(to).await.map_err(io("make", to))?;
        loop {
            let part = body.try_next().await;
            match part.map_err(|error| self.trouble(format!("cannot read {name}: {error}"), true))? {
                Some(part) => file.write_all(&part).await.map_err(io("write", to))?,
                None => return file.flush().await.map_err(io("write", to)),
            }
        }
    }

    async fn put_from(&self, name: &str, from: &Path) -> Result<(), ArchiveError> {
        let bytes = tokio::fs::read(from).await.map_err(io("read", from))?;
        let call = self.client.put_object().bucket(&self.bucket).key(self.key(name)).if_none_match("*");
        let call = call.content_type("application/gzip").body(ByteStream::from(bytes.clone()));
        match call.send().await {
            Ok(_) => Ok(()),
            // Perhaps by the first try of this very call, whose answer was lost.
            Err(error) if is_unmet(&error) => {
                let there = self.get(name).await?.collect().await;
                let there =
                    there.map_err(|error| self.trouble(format!("cannot read {name}: {error}"), true))?;
                if there.into_bytes() == bytes {
                    return Ok(());
                }
                Err(self.trouble(format!("it has another {name} already"), false))
            }
            Err(error) => Err(self.failed("write", &error)),
        }
    }

    async fn list(&self) -> Result<Vec<String>, ArchiveError> {
        let (mut names, mut next) = (Vec::new(), None);
        loop {
            let call = self.client.list_objects_v2().bucket(&self.bucket).prefix(&self.prefix);
            let page = call.set_continuation_token(next).send().await;
            let page = page.map_err(|error| self.failed("list", &error))?;
            let found = page.contents().iter().filter_map(|object| object.key()?.strip_prefix(&self.prefix));
            names.extend(found.map(str::to_owned));
            next = page.next_continuation_token.filter(|_| page.is_truncated == Some(true));
            if next.is_none() {
                return Ok(names);
            }
        }
    }
}

impl ArchivePlace for S3Archive {
    fn shown(&self) -> String {
        format!("s3://{}/{}", self.bucket, self.prefix)
    }

    fn hold(&self) -> Later<'_, ()> {
        Box::pin(async {
            let held = lock(&self.held).clone();
            match held {
                Some(held) => self.renew(held).await,
                None => self.take().await,
            }
        })
    }

    fn release(&self) -> Later<'_, ()> {
        Box::pin(async {
            let held = lock(&self.held).take();
            // One that is too old may be somebody else's by now.
            if held.is_some_and(|held| self.held_for.is_zero() || held.since.elapsed() < self.held_for / 2) {
                let call = self.client.delete_object().bucket(&self.bucket).key(self.key(LOCK));
                call.send().await.map_err(|error| self.failed("release it", &error))?;
            }
            Ok(())
        })
    }

    fn names(&self) -> Later<'_, Vec<String>> {
        Box::pin(self.list())
    }

    fn fetch<'a>(&'a self, name: &'a str, to: &'a Path) -> Later<'a, ()> {
        Box::pin(self.fetch_to(name, to))
    }

    fn put<'a>(&'a self, name: &'a str, from: &'a Path) -> Later<'a, ()> {
        Box::pin(self.put_from(name, from))
    }
}

/// Whether what must hold for a write did not: something is there, or was changed meanwhile.
fn is_unmet<E: ProvideErrorMetadata, R>(error: &SdkError<E, R>) -> bool {
    matches!(error.code(), Some("PreconditionFailed" | "ConditionalRequestConflict" | "NoSuchKey"))
}

fn io(doing: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> ArchiveError {
    let path = path.to_owned();
    move |source| ArchiveError::Io { path, doing, source }
}
