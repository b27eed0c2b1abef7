//! Handlers of the snapshot and the event stream.

use std::convert::Infallible;
use std::pin::pin;
use std::time::Duration;

use axum::extract::State as With;
use axum::http::StatusCode;
use axum::response::sse::{self, KeepAlive, Sse};
use futures_util::stream::{self, Stream};
use tidegate_client::{Event, Problem, Snapshot};
use tokio::sync::mpsc;
use tokio::time::{interval, timeout};

use crate::auth::Caller;
use crate::codec::{self, OkJson};
use crate::event_broadcast::Subscription;
use crate::refusal::Refusal;
use crate::slots::AtCapacity;
use crate::state::State;

/// The busiest subjects in a snapshot.
const BUSIEST_MAX: usize = 100;
/// How long a listener may leave an event unread before it is disconnected.
const SEND_TIMEOUT: Duration = Duration::from_secs(30);

/// Returns the server's state and counters.
#[utoipa::path(get, path = "/v1/snapshot", responses(
    (status = 200, description = "The snapshot.", body = Snapshot),
))]
pub(super) async fn snapshot(With(state): With<State>) -> OkJson<Snapshot> {
    let limiter = state.limiter().stats();
    let ([expired_settled, expired_returned], busy) = state.events().counters();
    let (listeners, listeners_max) = state.events().listeners();
    let requests_max = state.bounds().requests_max;
    OkJson(Snapshot {
        at: state.clock().now().into(),
        up_since: state.up_since().into(),
        program: env!("CARGO_PKG_VERSION").to_owned(),
        namespace: state.namespace().to_string(),
        is_stopping: state.limiter().is_closed(),
        store_away: limiter.store_away.map(Into::into),
        granted: limiter.granted,
        refused: limiter.refused,
        degraded: limiter.degraded,
        expired_settled,
        expired_returned,
        unsettled: limiter.unsettled,
        open_leases: state.meters().open_leases() + limiter.open_leases,
        waiting: limiter.waiting as u64,
        settling: limiter.settling as u64,
        requests: state.requests() as u64,
        requests_max: requests_max as u64,
        busy,
        listeners: listeners as u64,
        listeners_max: listeners_max as u64,
        cache_entries: limiter.cache.entries,
        cache_hits: limiter.cache.hits,
        cache_misses: limiter.cache.misses,
        busiest: state.events().top().busiest(BUSIEST_MAX),
    })
}

/// Streams server events as server-sent events. The event name is the event's `type`, the data is JSON.
///
/// A slow listener misses events and receives their number. The stream ends when the server stops, or when
/// the token is no longer valid.
#[utoipa::path(get, path = "/v1/events", responses(
    (status = 200, description = "A stream of events.", body = Event, content_type = "text/event-stream"),
    (status = 503, description = "Too many listeners, or the server is stopping.", body = Problem),
))]
pub(super) async fn events(
    With(state): With<State>,
    caller: Caller,
) -> Result<Sse<impl Stream<Item = Result<sse::Event, Infallible>>>, Refusal> {
    let subscription = state.events().subscribe(caller.token()).map_err(|at| {
        let (listeners_max, token) = (state.bounds().listeners_max, caller.token());
        let detail = match at {
            AtCapacity::Full => format!("too many event listeners: {listeners_max} are connected"),
            AtCapacity::Share { held } => format!(
                "too many event listeners of the token `{token}`: {held} are connected, and the rest of \
                 {listeners_max} is for other tokens"
            ),
        };
        let refusal = Refusal::new(StatusCode::SERVICE_UNAVAILABLE, "many-listeners", "Busy", detail);
        refusal.with_retry_after(Duration::from_secs(5))
    })?;
    // One event in flight; further ones wait in the bounded backlog of the broadcast.
    let (to, from) = mpsc::channel(1);
    let alive_every = state.bounds().alive_every.max(Duration::from_millis(1));
    tokio::spawn(forward_events(state, caller, subscription, to));
    let events = stream::unfold(from, async |mut from: mpsc::Receiver<sse::Event>| {
        let event = from.recv().await?;
        Some((Ok(event), from))
    });
    Ok(Sse::new(events).keep_alive(KeepAlive::new().interval(alive_every)))
}

/// Forwards events to a connection until it closes, the server stops, or the token becomes invalid.
async fn forward_events(
    state: State,
    caller: Caller,
    mut subscription: Subscription,
    to: mpsc::Sender<sse::Event>,
) {
    let mut checks = interval(state.bounds().alive_every.max(Duration::from_millis(1)));
    let mut revoked = pin!(state.until_revoked(&caller));
    loop {
        let event = tokio::select! {
            biased;
            () = to.closed() => return,
            () = &mut revoked => return,
            _ = checks.tick() => {
                if state.is_still_valid(&caller).await {
                    continue;
                }
                return;
            }
            event = subscription.next() => event,
        };
        let text = sse::Event::default().event(event.name()).data(codec::to_json(&*event));
        if *event == Event::Stopping {
            // Best effort: the server is stopping and does not wait.
            let _ = to.try_send(text);
            return;
        }
        let sent = subscription.unless_closed(timeout(SEND_TIMEOUT, to.send(text))).await;
        match sent {
            Some(Ok(Ok(()))) | None => {}
            // The listener timed out or disconnected.
            Some(Ok(Err(_)) | Err(_)) => return,
        }
    }
}
