//! Hearing of changes: a connection that does nothing but listen.
//!
//! Whoever changes something publishes the version. What is published while nobody listens is lost, so that the version is
//! read whenever listening begins, and now and then: a connection may lead nowhere without anybody saying so.

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
use crate::changes::{Announcer, Changes, Heard};
use crate::engine::Engine;

/// How long after a failure it is tried again, at first and at most.
const AGAIN: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(5)];
/// How often the version is read, and the connection shown to lead somewhere, while nothing is heard.
const READ_EVERY: Duration = Duration::from_secs(30);

/// Whom to listen to.
pub(super) enum Speaker {
    /// One of these servers: on a cluster each tells what any was told.
    Servers(Vec<ConnectionInfo>),
    /// Whoever the sentinels say is the primary.
    Sentinels(Box<SentinelClient>),
}

/// What was heard so far, and who listens until this is dropped.
pub(super) struct Ear {
    pub(super) changes: Changes,
    listener: JoinHandle<()>,
}

impl Drop for Ear {
    fn drop(&mut self) {
        self.listener.abort();
    }
}

impl Ear {
    /// Begins to listen for a store.
    pub(super) fn open(speaker: Speaker, store: Weak<Inner>, channel: String, timeout: Duration) -> Self {
        let (announcer, changes) = Changes::channel();
        let listener = tokio::spawn(listen(speaker, store, channel, Arc::new(announcer), timeout));
        Self { changes, listener }
    }
}

async fn listen(
    mut speaker: Speaker,
    store: Weak<Inner>,
    channel: String,
    announcer: Arc<Announcer>,
    timeout: Duration,
) {
    let (mut pause, mut turn) = (AGAIN[0], 0_usize);
    loop {
        let (lost, heard) = (Arc::new(Notify::new()), Arc::new(Heard::new(Arc::clone(&announcer))));
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(timeout))
            .set_response_timeout(Some(timeout))
            .set_push_sender(hear(Arc::clone(&heard), Arc::clone(&lost)));
        turn = turn.wrapping_add(1);
        let subscribed = async {
            let client = speaker.client(turn).await?;
            let mut connection = client.get_multiplexed_async_connection_with_config(&config).await?;
            connection.subscribe(&channel).await?;
            Ok::<_, RedisError>(connection)
        };
        if let Ok(mut connection) = subscribed.await {
            pause = AGAIN[0];
            loop {
                // What was published before is not told again.
                let Some(inner) = store.upgrade() else { return };
                heard.is_about_to_be_read();
                let again = match (Redis { inner }).newest_version().await {
                    Ok(version) => {
                        heard.was_read(version);
                        READ_EVERY
                    }
                    Err(_) => AGAIN[1],
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
        pause = (pause * 2).min(AGAIN[1]);
    }
}

impl Speaker {
    async fn client(&mut self, turn: usize) -> Result<Client, RedisError> {
        let info = match self {
            Self::Servers(nodes) => nodes[turn % nodes.len()].clone(),
            Self::Sentinels(client) => client.async_get_client().await?.get_connection_info().clone(),
        };
        // Only then do messages come beside answers.
        let settings = info.redis_settings().clone().set_protocol(ProtocolVersion::RESP3);
        Client::open(info.set_redis_settings(settings))
    }
}

/// What is done with what the server says unasked.
fn hear(
    heard: Arc<Heard>,
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
