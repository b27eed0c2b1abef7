//! Watching a server: what it knows of itself, and what happens to it.

use std::convert::Infallible;
use std::time::Duration;

use axum::extract::State as With;
use axum::http::StatusCode;
use axum::response::sse::{self, KeepAlive, Sse};
use futures_util::stream::{self, Stream};
use tidegate_client::{Event, Problem, Snapshot};
use tokio::sync::mpsc;
use tokio::time::{interval, timeout};

use crate::codec::{self, Done};
use crate::gate::Caller;
use crate::hub::Listening;
use crate::refusal::Refusal;
use crate::state::State;

/// How long a listener may leave an event lying before its place goes to somebody else.
const LEFT_LYING: Duration = Duration::from_secs(30);

/// What the server knows of itself.
#[utoipa::path(get, path = "/v1/snapshot", responses(
    (status = 200, description = "How it is.", body = Snapshot),
))]
pub(super) async fn snapshot(With(state): With<State>) -> Done<Snapshot> {
    let limiter = state.limiter().stats();
    let ([expired_settled, expired_returned], busy) = state.hub().counted();
    let (listeners, listeners_max) = state.hub().listeners();
    let requests_max = state.bounds().requests_max;
    Done(Snapshot {
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
    })
}

/// What happens to the server from now on, as server-sent events. Each has its `type` as its name and its fields as JSON.
///
/// A listener that is too slow misses events, and is told how many. It ends when the server stops, and when the token is good
/// no more.
#[utoipa::path(get, path = "/v1/events", responses(
    (status = 200, description = "Events, one after the other.", body = Event, content_type = "text/event-stream"),
    (status = 503, description = "As many listen as may, or the server is stopping.", body = Problem),
))]
pub(super) async fn events(
    With(state): With<State>,
    caller: Caller,
) -> Result<Sse<impl Stream<Item = Result<sse::Event, Infallible>>>, Refusal> {
    let listening = state.hub().listen().map_err(|listeners_max| {
        let detail = format!("{listeners_max} listen to events, as many as may");
        let refusal = Refusal::new(StatusCode::SERVICE_UNAVAILABLE, "many-listeners", "Busy", detail);
        refusal.after(Duration::from_secs(5))
    })?;
    // One that is on its way: what else is not fetched waits in the hub, which is bounded.
    let (to, from) = mpsc::channel(1);
    let alive_every = state.bounds().alive_every.max(Duration::from_millis(1));
    tokio::spawn(pass_on(state, caller, listening, to));
    let events = stream::unfold(from, async |mut from: mpsc::Receiver<sse::Event>| {
        let event = from.recv().await?;
        Some((Ok(event), from))
    });
    Ok(Sse::new(events).keep_alive(KeepAlive::new().interval(alive_every)))
}

/// Hands events to a connection until one of the two has gone, the server stops, or the token is good no more.
async fn pass_on(state: State, caller: Caller, mut listening: Listening, to: mpsc::Sender<sse::Event>) {
    let mut looks = interval(state.bounds().alive_every.max(Duration::from_millis(1)));
    loop {
        let event = tokio::select! {
            biased;
            () = to.closed() => return,
            _ = looks.tick() => {
                if state.is_still_good(&caller).await {
                    continue;
                }
                return;
            }
            event = listening.next() => event,
        };
        let text = sse::Event::default().event(event.name()).data(codec::text(&*event));
        if *event == Event::Stopping {
            // If there is room for it: nobody is waited for any more.
            let _ = to.try_send(text);
            return;
        }
        let sent = listening.unless_closed(timeout(LEFT_LYING, to.send(text))).await;
        match sent {
            Some(Ok(Ok(()))) | None => {}
            // It takes longer than it may, or has gone.
            Some(Ok(Err(_)) | Err(_)) => return,
        }
    }
}
