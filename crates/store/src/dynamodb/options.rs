//! Options of a store in a DynamoDB table.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use aws_config::BehaviorVersion;
use aws_config::retry::RetryConfig;
use aws_config::stalled_stream_protection::StalledStreamProtectionConfig;
use aws_config::timeout::TimeoutConfig;
use aws_sdk_dynamodb::Client;
use aws_sdk_dynamodb::config::interceptors::{
    BeforeDeserializationInterceptorContextRef, BeforeTransmitInterceptorContextRef,
};
use aws_sdk_dynamodb::config::{ConfigBag, Credentials, Intercept, Region, RuntimeComponents};
use aws_sdk_dynamodb::error::BoxError;
use aws_smithy_http_client::tls::{self, rustls_provider::CryptoMode};
use aws_smithy_types::config_bag::{Storable, StoreReplace};
use tidegate_core::duration::Exact;
use tidegate_core::time::Stamp;

use super::cache::Cache;
use super::client::TableClient;
use super::clock::CorrectedClock;
use super::errors::ErrorContext;
use super::group_lock::GroupLock;
use super::keys::Keys;
use super::lifecycle::{create_namespace_on_open, schema_of, wrong_version};
use super::records::SCHEMA;
use super::{DynamoDb, Inner};
use crate::background::{SweepTimer, UniqueNames};
use crate::clock::{HostWall, WallClock};
use crate::error::StoreError;
use crate::lifecycle::namespace;
use crate::retention::Retention;
use crate::setters::setters;

/// The default timeout of a call.
const TIMEOUT: Duration = Duration::from_secs(2);
/// The default deadline of a call, after which the engine counts as unavailable.
const DEADLINE: Duration = Duration::from_millis(50);

/// The longest time that a cached bucket may refuse without a request.
const REJECTED_FOR_MAX: Duration = Duration::from_secs(1);

/// Opens a store in a DynamoDB table.
///
/// The SDK finds credentials: in environment variables, a profile, or the role of a machine. The table must
/// exist; [`create`](Self::create) creates it.
#[derive(Debug, Clone)]
#[must_use = "options do nothing until they are opened"]
pub struct DynamoDbOptions {
    table: String,
    region: Option<String>,
    endpoint: Option<String>,
    /// Their `Debug` does not show secrets.
    credentials: Option<Credentials>,
    namespace: String,
    /// The address has the option `speculative`, which is ignored.
    pub(super) is_speculative_given: bool,
    pub(super) retention: Retention,
    timeout: Duration,
    pub(super) deadline: Duration,
    /// How long a cached bucket may refuse without a request.
    pub(super) rejections: Duration,
    swept_every: Duration,
    clock: Option<Arc<dyn WallClock>>,
}

impl DynamoDbOptions {
    /// Options for a table, with the namespace `default`.
    pub fn new(table: impl Into<String>) -> Self {
        Self {
            table: table.into(),
            region: None,
            endpoint: None,
            credentials: None,
            namespace: "default".to_owned(),
            is_speculative_given: false,
            retention: Retention::default(),
            timeout: TIMEOUT,
            deadline: DEADLINE,
            rejections: REJECTED_FOR_MAX,
            swept_every: SweepTimer::INTERVAL,
            clock: None,
        }
    }

    /// Sets the table.
    pub fn of_table(mut self, table: impl Into<String>) -> Self {
        self.table = table.into();
        self
    }

    /// Sets the region of the table; by default the SDK finds it.
    pub fn region(mut self, region: impl Into<String>) -> Self {
        self.region = Some(region.into());
        self
    }

    /// Sets an endpoint other than the region's, such as a local server.
    pub fn endpoint(mut self, endpoint: impl Into<String>) -> Self {
        self.endpoint = Some(endpoint.into());
        self
    }

    /// Sets the credentials, instead of those that the SDK finds.
    pub fn credentials(mut self, key: impl Into<String>, secret: impl Into<String>) -> Self {
        self.credentials = Some(Credentials::new(key, secret, None, None, "given"));
        self
    }

    /// Sets the namespace.
    pub fn namespace(mut self, name: impl Into<String>) -> Self {
        self.namespace = name.into();
        self
    }

    setters! {
        /// Sets how long usage and audit are kept. The engine deletes old usage, and
        /// [`sweep`](crate::Store::sweep) deletes old audit entries.
        retention: Retention,
        /// Sets the timeout of a call including its retries, two seconds by default.
        timeout: Duration,
        /// Sets how long a call may take before the engine [counts as
        /// unavailable](crate::Capabilities::deadline), 50 ms by default.
        deadline: Duration,
        /// Sets how long a cached bucket may refuse draws without a request: a second by default, which is the
        /// maximum; zero disables it.
        ///
        /// Refills are computed, and returns by this process are seen at once. Returns by other processes are
        /// seen this much later, and so is a draw of the same lease that another process made without a reply.
        rejections: Duration,
        /// Sets how often a process that draws sweeps; tests that count requests use a long interval.
        #[doc(hidden)]
        swept_every: Duration,
    }

    /// Notes that the address has the option `speculative`, which is ignored.
    pub(crate) const fn ignore_speculative(mut self) -> Self {
        self.is_speculative_given = true;
        self
    }

    /// Sets the clock. The default is the host's clock, corrected by the dates of the engine's responses;
    /// this one is not corrected.
    pub fn clock(mut self, clock: impl WallClock) -> Self {
        self.clock = Some(Arc::new(clock));
        self
    }

    /// Opens the store: reads the namespace's record, and creates it if the table is ours or empty.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] for an invalid namespace, a table that does not exist, belongs to another
    /// program or was written by a newer version, [`StoreError::Denied`] for missing credentials or rights,
    /// and [`StoreError::Unavailable`] if the engine does not respond.
    ///
    /// # Cancel safety
    /// Dropping the future may leave a new namespace behind, which the next call opens.
    pub async fn open(self) -> Result<DynamoDb, StoreError> {
        self.check()?;
        let namespace = namespace(&self.namespace)?;
        let corrected = Arc::new(CorrectedClock::new(HostWall));
        let requests = Arc::new(AtomicU64::new(0));
        let client = self.connect(Arc::clone(&corrected), Arc::clone(&requests)).await?;
        let clock = self.clock.clone().unwrap_or(corrected);
        let inner = Inner {
            group_lock: GroupLock::new(&client.context.place),
            client,
            keys: Keys::new(&namespace),
            cache: Cache::default(),
            clock,
            requests,
            rejections: AtomicU64::new(0),
            epochs: UniqueNames::new(),
            sweep_timer: SweepTimer::new(self.swept_every),
            options: self,
        };
        match schema_of(&inner.client, &namespace).await? {
            Some(SCHEMA) => {}
            Some(older) => return Err(wrong_version(&inner.client, &namespace, older)),
            None => create_namespace_on_open(&inner.client, &namespace).await?,
        }
        Ok(DynamoDb { inner: Arc::new(inner) })
    }

    pub(super) fn table_name(&self) -> &str {
        &self.table
    }

    pub(super) fn namespace_name(&self) -> &str {
        &self.namespace
    }

    /// Validates the options without a request.
    pub(super) fn check(&self) -> Result<(), StoreError> {
        self.retention.check()?;
        let what = if self.table.is_empty() {
            "a table without a name".to_owned()
        } else if self.timeout.is_zero() {
            "`timeout` is 0s, and must be longer".to_owned()
        } else if self.rejections > REJECTED_FOR_MAX {
            let (span, most) = (Exact(self.rejections), Exact(REJECTED_FOR_MAX));
            format!("rejections for {span}, and must be from 0s to {most}")
        } else {
            return Ok(());
        };
        Err(StoreError::Invalid { what })
    }

    /// Connects to the table.
    pub(super) async fn connect(
        &self,
        clock: Arc<CorrectedClock>,
        requests: Arc<AtomicU64>,
    ) -> Result<TableClient, StoreError> {
        let provider = tls::Provider::Rustls(CryptoMode::AwsLc);
        let http = aws_smithy_http_client::Builder::new().tls_provider(provider).build_https();
        let timeouts = TimeoutConfig::builder()
            .connect_timeout(self.timeout)
            .operation_attempt_timeout(self.timeout)
            .operation_timeout(self.timeout);
        let mut config = aws_config::defaults(BehaviorVersion::latest())
            .http_client(http)
            .retry_config(RetryConfig::disabled())
            .stalled_stream_protection(StalledStreamProtectionConfig::disabled())
            .timeout_config(timeouts.build());
        if let Some(region) = &self.region {
            config = config.region(Region::new(region.clone()));
        }
        if let Some(endpoint) = &self.endpoint {
            config = config.endpoint_url(endpoint);
        }
        if let Some(credentials) = &self.credentials {
            config = config.credentials_provider(credentials.clone());
        }
        let config = config.load().await;
        if config.region().is_none() {
            let what = format!("the table `{}` needs a region: `dynamodb://{0}?region=…`", self.table);
            return Err(StoreError::Invalid { what });
        }
        let observer = RequestObserver { clock, requests };
        let config = aws_sdk_dynamodb::config::Builder::from(&config).interceptor(observer).build();
        let region = config.region().map(ToString::to_string).unwrap_or_default();
        let place = match &self.endpoint {
            Some(endpoint) => format!("dynamodb://{}?endpoint={endpoint}", self.table),
            None => format!("dynamodb://{}?region={region}", self.table),
        };
        Ok(TableClient {
            sdk: Client::from_conf(config),
            table: self.table.clone(),
            context: ErrorContext { place },
            timeout: self.timeout,
        })
    }
}

/// Counts requests, and learns the engine's time from its responses.
#[derive(Debug)]
struct RequestObserver {
    clock: Arc<CorrectedClock>,
    requests: Arc<AtomicU64>,
}

/// When a request was sent.
#[derive(Debug, Clone, Copy)]
struct SentAt(Stamp);

impl Storable for SentAt {
    type Storer = StoreReplace<Self>;
}

impl Intercept for RequestObserver {
    fn name(&self) -> &'static str {
        "tidegate"
    }

    fn read_before_transmit(
        &self,
        _: &BeforeTransmitInterceptorContextRef<'_>,
        _: &RuntimeComponents,
        bag: &mut ConfigBag,
    ) -> Result<(), BoxError> {
        self.requests.fetch_add(1, Ordering::Relaxed);
        bag.interceptor_state().store_put(SentAt(self.clock.uncorrected()));
        Ok(())
    }

    fn read_before_deserialization(
        &self,
        context: &BeforeDeserializationInterceptorContextRef<'_>,
        _: &RuntimeComponents,
        bag: &mut ConfigBag,
    ) -> Result<(), BoxError> {
        let arrived = self.clock.uncorrected();
        let date =
            context.response().headers().get("date").and_then(|date| httpdate::parse_http_date(date).ok());
        let date = date.and_then(|date| date.duration_since(std::time::UNIX_EPOCH).ok());
        if let (Some(date), Some(SentAt(sent))) = (date, bag.load::<SentAt>().copied()) {
            self.clock.learn(sent, Stamp::from_secs(date.as_secs()), arrived);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_show_no_secret() {
        let options = DynamoDbOptions::new("limits").credentials("AKIA", "s3cret");
        assert!(!format!("{options:?}").contains("s3cret"), "{options:?}");
    }
}
