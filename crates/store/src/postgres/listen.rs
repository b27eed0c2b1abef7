//! Listens for changes of other processes (`LISTEN`), on a connection of its own.

use std::future::poll_fn;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tidegate_core::limit::policy::Version;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::sleep;
use tokio_postgres::tls::{MakeTlsConnect, TlsConnect};
use tokio_postgres::{AsyncMessage, Client, Config, Connection, Socket};

use super::{Inner, StoreGuard};
use crate::changes::AnnouncedVersion;
use crate::sync::lock;

/// The delay before a reconnect, at first and at most (exponential backoff).
const RECONNECT_DELAY: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// How often the versions are read, which also tests the connection, while no notification arrives.
const READ_EVERY: Duration = Duration::from_secs(30);

/// Listens until the store is closed or its last clone is dropped.
pub(super) async fn run<T>(config: Config, tls: T, inner: Arc<Inner>, guard: Weak<StoreGuard>)
where
    T: MakeTlsConnect<Socket> + Clone + Sync + Send + 'static,
    T::Stream: Sync + Send,
    T::TlsConnect: Sync + Send,
    <T::TlsConnect as TlsConnect<Socket>>::Future: Send,
{
    let mut delay = RECONNECT_DELAY.0;
    loop {
        let stop_signal = inner.stop_signal.notified();
        if guard.strong_count() == 0 || inner.check_open().is_err() {
            return;
        }
        let heard = async {
            if let Ok((client, connection)) = config.connect(tls.clone()).await
                && listen(&inner, client, connection).await
            {
                delay = RECONNECT_DELAY.0;
            }
            sleep(delay).await;
        };
        tokio::select! {
            () = heard => delay = (delay * 2).min(RECONNECT_DELAY.1),
            () = stop_signal => {}
        }
    }
}

/// Listens until the connection is lost, and returns whether it ever listened.
async fn listen<S, T>(inner: &Arc<Inner>, client: Client, mut connection: Connection<S, T>) -> bool
where
    S: AsyncRead + AsyncWrite + Unpin,
    T: AsyncRead + AsyncWrite + Unpin,
{
    let mut listens = false;
    // The connection ends when its client is dropped.
    let reading = async {
        // Listens first, so that no change after the read of the versions is missed.
        if !matches!(inner.with_timeout(client.batch_execute(&inner.sql.listen())).await, Ok(Ok(()))) {
            return;
        }
        listens = true;
        // A dead connection may go unnoticed.
        while read_versions(inner, &client).await {
            sleep(READ_EVERY).await;
        }
    };
    let hearing = async {
        while let Some(Ok(message)) = poll_fn(|context| connection.poll_message(context)).await {
            if let AsyncMessage::Notification(notification) = message {
                handle_notification(inner, notification.payload());
            }
        }
    };
    tokio::select! {
        () = reading => {}
        () = hearing => {}
    }
    listens
}

/// Reads the versions, because announcements may have been missed. Returns whether it could.
async fn read_versions(inner: &Inner, client: &Client) -> bool {
    let open: Vec<(i64, Arc<AnnouncedVersion>)> = lock(&inner.open_namespaces)
        .iter()
        .map(|(namespace, (heard, _))| (*namespace, Arc::clone(heard)))
        .collect();
    for (_, heard) in &open {
        heard.is_about_to_be_read();
    }
    let namespaces: Vec<i64> = open.iter().map(|(namespace, _)| *namespace).collect();
    let read = inner.sql.text("SELECT id, version FROM @.namespaces WHERE id = ANY ($1)");
    let Ok(Ok(rows)) = inner.with_timeout(client.query(&read, &[&namespaces])).await else { return false };
    for row in rows {
        if let (Ok(namespace), Ok(version)) = (row.try_get::<_, i64>(0), row.try_get::<_, i64>(1))
            && let Some((_, heard)) = open.iter().find(|(open, _)| *open == namespace)
        {
            heard.was_read(Version::new(version.unsigned_abs()));
        }
    }
    true
}

/// Parses a namespace and its version: `7 42`. Ignores messages of other programs on the channel.
fn handle_notification(inner: &Inner, payload: &str) {
    let Some((namespace, version)) = payload.split_once(' ') else { return };
    if let (Ok(namespace), Ok(version)) = (namespace.parse::<i64>(), version.parse())
        && let Some((heard, _)) = lock(&inner.open_namespaces).get(&namespace)
    {
        heard.announced(Version::new(version));
    }
}
