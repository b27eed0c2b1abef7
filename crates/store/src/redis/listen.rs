//! Listens for changes of policies on a pub/sub connection of its own.
//!
//! Every change publishes the new version. Messages that are published while no connection listens are lost,
//! and a dead connection may go unnoticed; the version is therefore also read after each subscription and at
//! intervals.

use std::sync::{Arc, Weak};
use std::time::Duration;

use ::redis::sentinel::SentinelClient;
use ::redis::{
    AsyncConnectionConfig, Client, ConnectionInfo, ProtocolVersion, PushInfo, PushKind, RedisError, Value,
};
use tidegate_core::limit::policy::Version;
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use super::{Inner, Redis};
use crate::changes::{AnnouncedVersion, Announcer, Changes};
use crate::engine::Engine;

/// The delay before a reconnect, at first and at most (exponential backoff).
const RECONNECT_DELAY: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(5)];
/// How often the version is read, and the connection pinged, while no message arrives.
const READ_EVERY: Duration = Duration::from_secs(30);

/// The servers to subscribe to.
pub(super) enum ChangeSource {
    /// One of these servers: on a cluster each forwards what is published on any.
    Servers(Vec<ConnectionInfo>),
    /// The primary that the sentinels report.
    Sentinels(Box<SentinelClient>),
}

/// The versions announced so far, and the task that listens until this is dropped.
pub(super) struct ChangeListener {
    pub(super) changes: Changes,
    task: JoinHandle<()>,
}

impl Drop for ChangeListener {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl ChangeListener {
    /// Starts to listen for a store.
    pub(super) fn open(
        change_source: ChangeSource,
        store: Weak<Inner>,
        channel: String,
        timeout: Duration,
    ) -> Self {
        let (announcer, changes) = Changes::channel();
        let task = tokio::spawn(listen(change_source, store, channel, Arc::new(announcer), timeout));
        Self { changes, task }
    }
}

async fn listen(
    mut change_source: ChangeSource,
    store: Weak<Inner>,
    channel: String,
    announcer: Arc<Announcer>,
    timeout: Duration,
) {
    let (mut pause, mut attempt) = (RECONNECT_DELAY[0], 0_usize);
    loop {
        let (lost, heard) =
            (Arc::new(Notify::new()), Arc::new(AnnouncedVersion::new(Arc::clone(&announcer))));
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(timeout))
            .set_response_timeout(Some(timeout))
            .set_push_sender(push_handler(Arc::clone(&heard), Arc::clone(&lost)));
        attempt = attempt.wrapping_add(1);
        let subscribed = async {
            let client = change_source.client(attempt).await?;
            let mut connection = client.get_multiplexed_async_connection_with_config(&config).await?;
            connection.subscribe(&channel).await?;
            Ok::<_, RedisError>(connection)
        };
        if let Ok(mut connection) = subscribed.await {
            pause = RECONNECT_DELAY[0];
            loop {
                // Messages from before the subscription are not repeated.
                let Some(inner) = store.upgrade() else { return };
                heard.is_about_to_be_read();
                let again = match (Redis { inner }).newest_version().await {
                    Ok(version) => {
                        heard.was_read(version);
                        READ_EVERY
                    }
                    Err(_) => RECONNECT_DELAY[1],
                };
                if tokio::time::timeout(again, lost.notified()).await.is_ok() {
                    break;
                }
                let ping = ::redis::cmd("PING");
                if ping.query_async::<Value>(&mut connection).await.is_err() {
                    break;
                }
            }
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(RECONNECT_DELAY[1]);
    }
}

impl ChangeSource {
    async fn client(&mut self, attempt: usize) -> Result<Client, RedisError> {
        let info = match self {
            Self::Servers(nodes) => nodes[attempt % nodes.len()].clone(),
            Self::Sentinels(client) => client.async_get_client().await?.get_connection_info().clone(),
        };
        // RESP3 delivers messages on the same connection as replies.
        let settings = info.redis_settings().clone().set_protocol(ProtocolVersion::RESP3);
        Client::open(info.set_redis_settings(settings))
    }
}

/// Handles pushes of the server.
fn push_handler(
    heard: Arc<AnnouncedVersion>,
    lost: Arc<Notify>,
) -> impl Fn(PushInfo) -> Result<(), std::convert::Infallible> + Send + Sync + 'static {
    move |info| {
        match (info.kind, info.data.get(1)) {
            (PushKind::Message, Some(Value::BulkString(version))) => {
                let version = std::str::from_utf8(version).ok().and_then(|version| version.parse().ok());
                if let Some(version) = version {
                    heard.announced(Version::new(version));
                }
            }
            (PushKind::Disconnection, _) => lost.notify_one(),
            _ => {}
        }
        Ok(())
    }
}
