//! Changes that others announce: a connection of its own that listens, for as long as the store is used.

use std::future::poll_fn;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tidegate_core::limit::policy::Version;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::sleep;
use tokio_postgres::tls::{MakeTlsConnect, TlsConnect};
use tokio_postgres::{AsyncMessage, Client, Config, Connection, Socket};

use super::{Alive, Inner};
use crate::changes::Heard;
use crate::sync::lock;

/// How long after it was lost a connection is made anew, at first and at most.
const AGAIN_AFTER: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// How often the versions are read, and the connection shown to lead somewhere, while nothing is heard.
const READ_EVERY: Duration = Duration::from_secs(30);

/// Listens until nobody uses the store any more.
pub(super) async fn run<T>(config: Config, tls: T, inner: Arc<Inner>, alive: Weak<Alive>)
where
    T: MakeTlsConnect<Socket> + Clone + Sync + Send + 'static,
    T::Stream: Sync + Send,
    T::TlsConnect: Sync + Send,
    <T::TlsConnect as TlsConnect<Socket>>::Future: Send,
{
    let mut again_after = AGAIN_AFTER.0;
    loop {
        let stirred = inner.stirred.notified();
        if alive.strong_count() == 0 || inner.check_open().is_err() {
            return;
        }
        let heard = async {
            if let Ok((client, connection)) = config.connect(tls.clone()).await
                && listen(&inner, client, connection).await
            {
                again_after = AGAIN_AFTER.0;
            }
            sleep(again_after).await;
        };
        tokio::select! {
            () = heard => again_after = (again_after * 2).min(AGAIN_AFTER.1),
            () = stirred => {}
        }
    }
}

/// Listens until the connection is lost. Answers whether it ever did.
async fn listen<S, T>(inner: &Arc<Inner>, client: Client, mut connection: Connection<S, T>) -> bool
where
    S: AsyncRead + AsyncWrite + Unpin,
    T: AsyncRead + AsyncWrite + Unpin,
{
    let mut listens = false;
    // Without its client a connection ends.
    let reading = async {
        // Listens first: what is announced after the version was read is heard.
        if !matches!(inner.in_time(client.batch_execute(&inner.sql.listen())).await, Ok(Ok(()))) {
            return;
        }
        listens = true;
        // A connection may lead nowhere without anybody saying so.
        while restate(inner, &client).await {
            sleep(READ_EVERY).await;
        }
    };
    let hearing = async {
        while let Some(Ok(message)) = poll_fn(|context| connection.poll_message(context)).await {
            if let AsyncMessage::Notification(notification) = message {
                hear(inner, notification.payload());
            }
        }
    };
    tokio::select! {
        () = reading => {}
        () = hearing => {}
    }
    listens
}

/// The versions as they are: some may have been announced while nobody listened. Answers whether they were read.
async fn restate(inner: &Inner, client: &Client) -> bool {
    let open: Vec<(i64, Arc<Heard>)> = lock(&inner.announced)
        .iter()
        .map(|(namespace, (heard, _))| (*namespace, Arc::clone(heard)))
        .collect();
    for (_, heard) in &open {
        heard.is_about_to_be_read();
    }
    let namespaces: Vec<i64> = open.iter().map(|(namespace, _)| *namespace).collect();
    let read = inner.sql.text("SELECT id, version FROM @.namespaces WHERE id = ANY ($1)");
    let Ok(Ok(rows)) = inner.in_time(client.query(&read, &[&namespaces])).await else { return false };
    for row in rows {
        if let (Ok(namespace), Ok(version)) = (row.try_get::<_, i64>(0), row.try_get::<_, i64>(1))
            && let Some((_, heard)) = open.iter().find(|(open, _)| *open == namespace)
        {
            heard.was_read(Version::new(version.unsigned_abs()));
        }
    }
    true
}

/// A namespace and its version: `7 42`. Others may announce on the same channel, and are not understood.
fn hear(inner: &Inner, payload: &str) {
    let Some((namespace, version)) = payload.split_once(' ') else { return };
    if let (Ok(namespace), Ok(version)) = (namespace.parse::<i64>(), version.parse())
        && let Some((heard, _)) = lock(&inner.announced).get(&namespace)
    {
        heard.announced(Version::new(version));
    }
}
