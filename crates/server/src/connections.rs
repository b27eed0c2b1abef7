//! The open connections of a listener: their number, how many each address has, and which are idle.
//!
//! An address may have at most as many connections as are free, and more as long as the others can double
//! theirs. At a bound, the connection that has been idle longest is closed for the new one, so that clients
//! which connect and send nothing lock no client out.

use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use metrics::Counter;
use tokio::sync::Notify;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep, timeout};

use crate::log_throttle::LogThrottle;
use crate::meters::ConnectionMeters;
use crate::slots::may_take;

/// Interval of the checks for connections that must be closed.
const CHECK_EVERY: Duration = Duration::from_secs(1);
/// How long a connection may be idle while the server stops: Envoy may have sent a call before it learned of
/// the shutdown, and a response may still be on its way.
const STOP_IDLE: Duration = Duration::from_millis(500);

/// How long a connection is idle before another one may take its place: a response may still be on its way. One
/// that never had a call has no response.
pub(crate) const EVICT_IDLE: Duration = Duration::from_millis(100);

/// The connections of one listener.
pub struct Connections {
    max: usize,
    table: Mutex<Table>,
    /// A connection was closed, or has become idle.
    freed: Arc<Notify>,
    meters: ConnectionMeters,
    log_throttle: LogThrottle,
}

#[derive(Default)]
struct Table {
    open: HashMap<u64, Entry>,
    by_address: HashMap<IpAddr, usize>,
    last_id: u64,
}

struct Entry {
    activity: Arc<Activity>,
    task: Option<AbortHandle>,
    /// The number of ended calls at the last check, and when it last changed or no call was in flight.
    progress: (u64, Instant),
}

/// The calls of one connection.
#[derive(Debug)]
pub struct Activity {
    address: IpAddr,
    opened_at: Instant,
    in_flight: AtomicUsize,
    ended: AtomicU64,
    /// When the last call ended, in milliseconds after the connection was opened.
    last_end: AtomicU64,
    /// Of all connections: this one has become idle.
    freed: Arc<Notify>,
}

/// A call in flight.
#[derive(Debug)]
#[must_use = "the call ends when it is dropped"]
pub struct Call(Arc<Activity>);

/// An open connection, which is removed on drop.
#[derive(Debug)]
pub struct Connection {
    connections: Arc<Connections>,
    id: u64,
    activity: Arc<Activity>,
}

/// Whether a connection may be opened.
pub(crate) enum Admission {
    Admitted(Connection),
    /// The address has its share, and none of its connections is idle.
    Refused,
    /// None is free, and none is idle.
    Full,
}

impl Activity {
    fn new(address: IpAddr, freed: &Arc<Notify>) -> Arc<Self> {
        Arc::new(Self {
            address,
            opened_at: Instant::now(),
            in_flight: AtomicUsize::new(0),
            ended: AtomicU64::new(0),
            last_end: AtomicU64::new(0),
            freed: Arc::clone(freed),
        })
    }

    /// Counts a call until the guard is dropped.
    pub fn begin(self: &Arc<Self>) -> Call {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        Call(Arc::clone(self))
    }

    /// The address of the peer, as shares are counted.
    pub const fn address(&self) -> IpAddr {
        self.address
    }

    fn is_idle(&self) -> bool {
        self.in_flight.load(Ordering::Relaxed) == 0
    }

    fn idle_since(&self) -> Instant {
        self.opened_at + Duration::from_millis(self.last_end.load(Ordering::Relaxed))
    }

    /// Whether another connection may take the place of this one.
    fn is_evictable(&self) -> bool {
        let is_flushed =
            || self.ended.load(Ordering::Relaxed) == 0 || self.idle_since().elapsed() >= EVICT_IDLE;
        self.is_idle() && is_flushed()
    }

    /// Orders idle connections: those that never had a call come first, then the longest idle.
    fn eviction_rank(&self) -> (bool, Instant) {
        (self.ended.load(Ordering::Relaxed) > 0, self.idle_since())
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        let Self(activity) = self;
        let age = u64::try_from(activity.opened_at.elapsed().as_millis()).unwrap_or(u64::MAX);
        activity.last_end.store(age, Ordering::Relaxed);
        activity.ended.fetch_add(1, Ordering::Relaxed);
        if activity.in_flight.fetch_sub(1, Ordering::Release) == 1 {
            activity.freed.notify_one();
        }
    }
}

impl Connection {
    /// Its calls.
    pub const fn activity(&self) -> &Arc<Activity> {
        &self.activity
    }

    /// Its number among those of the listener.
    pub const fn id(&self) -> u64 {
        self.id
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.connections.lock().remove(self.id, &self.connections.meters);
        self.connections.freed.notify_one();
    }
}

impl Connections {
    /// None is open yet, and at most `max` will be.
    pub fn new(max: usize, meters: ConnectionMeters) -> Arc<Self> {
        Arc::new(Self {
            max,
            table: Mutex::default(),
            freed: Arc::default(),
            meters,
            log_throttle: LogThrottle::new(),
        })
    }

    /// Opens a connection from this address, at the cost of an idle one if necessary.
    pub(crate) fn open(self: &Arc<Self>, peer: IpAddr) -> Admission {
        let address = shared_address(peer);
        let mut table = self.lock();
        let (held, free) = (table.held(address), self.max.saturating_sub(table.open.len()));
        if !may_take(self.max, free, held) {
            // An address that has connections gives up one of its own.
            let of = (held > 0).then_some(address);
            let Some(evicted) = table.longest_idle(of) else {
                drop(table);
                self.warn_at_bound(address, held, "all are in use");
                if of.is_none() {
                    return Admission::Full;
                }
                self.meters.refused.increment(1);
                return Admission::Refused;
            };
            table.close(evicted, &self.meters);
            drop(table);
            self.meters.evicted.increment(1);
            self.warn_at_bound(address, held, "closed the longest idle");
            table = self.lock();
        }
        let activity = Activity::new(address, &self.freed);
        table.last_id += 1;
        let (id, progress) = (table.last_id, (0, activity.opened_at));
        let entry = Entry { activity: Arc::clone(&activity), task: None, progress };
        table.open.insert(id, entry);
        *table.by_address.entry(address).or_default() += 1;
        self.meters.open.increment(1.0);
        Admission::Admitted(Connection { connections: Arc::clone(self), id, activity })
    }

    /// Sets the task of a connection, which is aborted to close it.
    pub fn started(&self, id: u64, task: AbortHandle) {
        match self.lock().open.get_mut(&id) {
            Some(entry) => entry.task = Some(task),
            None => task.abort(),
        }
    }

    /// Counts connections closed because of a flood.
    pub(crate) fn floods(&self) -> Counter {
        self.meters.flooded.clone()
    }

    /// Waits until a connection was closed, or one that has become idle may be evicted.
    pub(crate) async fn freed(&self) {
        let _ = timeout(EVICT_IDLE, self.freed.notified()).await;
    }

    /// Closes connections on which no call has ended for `unread_max`, although some are in flight: the peer
    /// does not read its responses.
    pub(crate) async fn close_stalled(self: Arc<Self>, unread_max: Duration) -> JoinSet<()> {
        loop {
            sleep(CHECK_EVERY).await;
            let closed = self.lock().close_stalled(unread_max, &self.meters);
            self.meters.stalled.increment(closed);
        }
    }

    /// Closes idle connections while the server stops. It never ends.
    pub async fn close_idle(&self) {
        sleep(STOP_IDLE).await;
        loop {
            self.lock().close_idle(STOP_IDLE, &self.meters);
            sleep(STOP_IDLE / 5).await;
        }
    }

    fn warn_at_bound(&self, address: IpAddr, held: usize, what: &'static str) {
        if let Some(left_out) = self.log_throttle.allow() {
            let (listener, connections_max) = (self.meters.listener, self.max);
            tracing::warn!(listener, connections_max, %address, held, left_out, "connection bound reached: {what}");
        }
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    fn held(&self, address: IpAddr) -> usize {
        self.by_address.get(&address).copied().unwrap_or(0)
    }

    /// The connection that is idle longest, of one address or of all.
    fn longest_idle(&self, of: Option<IpAddr>) -> Option<u64> {
        let idle = self.open.iter().filter(|(_, entry)| {
            entry.task.is_some()
                && entry.activity.is_evictable()
                && of.is_none_or(|address| entry.activity.address == address)
        });
        idle.min_by_key(|(_, entry)| entry.activity.eviction_rank()).map(|(id, _)| *id)
    }

    /// Removes a connection and ends its task.
    fn close(&mut self, id: u64, meters: &ConnectionMeters) {
        if let Some(task) = self.remove(id, meters).and_then(|entry| entry.task) {
            task.abort();
        }
    }

    fn remove(&mut self, id: u64, meters: &ConnectionMeters) -> Option<Entry> {
        let entry = self.open.remove(&id)?;
        meters.open.decrement(1.0);
        let address = entry.activity.address;
        if let Some(held) = self.by_address.get_mut(&address) {
            *held -= 1;
            if *held == 0 {
                self.by_address.remove(&address);
            }
        }
        Some(entry)
    }

    fn close_stalled(&mut self, unread_max: Duration, meters: &ConnectionMeters) -> u64 {
        let (now, mut stalled) = (Instant::now(), Vec::new());
        for (id, Entry { activity, progress, .. }) in &mut self.open {
            let ended = activity.ended.load(Ordering::Relaxed);
            if activity.is_idle() || progress.0 != ended {
                *progress = (ended, now);
            } else if now.duration_since(progress.1) >= unread_max {
                stalled.push(*id);
            }
        }
        for id in &stalled {
            self.close(*id, meters);
        }
        stalled.len() as u64
    }

    fn close_idle(&mut self, idle: Duration, meters: &ConnectionMeters) {
        let is_idle =
            |entry: &Entry| entry.activity.is_idle() && entry.activity.idle_since().elapsed() >= idle;
        let closed: Vec<_> =
            self.open.iter().filter(|(_, entry)| is_idle(entry)).map(|(id, _)| *id).collect();
        for id in closed {
            self.close(id, meters);
        }
    }
}

/// The address that shares are counted by. A host has a whole IPv6 network of 64 bits, and counts as one.
fn shared_address(peer: IpAddr) -> IpAddr {
    match peer.to_canonical() {
        IpAddr::V6(peer) => Ipv6Addr::from_bits(peer.to_bits() & !u128::from(u64::MAX)).into(),
        peer @ IpAddr::V4(_) => peer,
    }
}

impl fmt::Debug for Connections {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connections").field("max", &self.max).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::meters::Meters;

    /// Opens a connection whose task never ends.
    fn open(connections: &Arc<Connections>, last: u8) -> Option<Connection> {
        open_from(connections, IpAddr::from([10, 0, 0, last]))
    }

    fn open_from(connections: &Arc<Connections>, peer: IpAddr) -> Option<Connection> {
        match connections.open(peer) {
            Admission::Admitted(connection) => {
                let task = tokio::spawn(std::future::pending::<()>());
                connections.started(connection.id(), task.abort_handle());
                Some(connection)
            }
            Admission::Refused | Admission::Full => None,
        }
    }

    fn is_open(connections: &Connections, connection: &Connection) -> bool {
        connections.lock().open.contains_key(&connection.id)
    }

    #[tokio::test(start_paused = true)]
    async fn longest_idle_connection_makes_room() {
        let connections = Connections::new(3, Meters::new().connections("api"));
        let (first, second) = (open(&connections, 1).unwrap(), open(&connections, 1).unwrap());
        drop(first.activity().begin());
        sleep(Duration::from_secs(1)).await;
        let third = open(&connections, 1).unwrap();
        assert!(!is_open(&connections, &second), "the one that never had a call is closed first");
        let _call = third.activity().begin();
        let fourth = open(&connections, 1).unwrap();
        assert!(!is_open(&connections, &first) && is_open(&connections, &third), "then the longest idle");
        let _other = fourth.activity().begin();
        assert!(open(&connections, 1).is_none(), "the address has its share, and all are in use");
        assert!(open(&connections, 2).is_some(), "another address finds one");
    }

    /// Regression: a new connection waited for one to be closed, however long others were idle.
    #[tokio::test(start_paused = true)]
    async fn connection_that_becomes_idle_makes_room() {
        let connections = Connections::new(1, Meters::new().connections("envoy"));
        let first = open(&connections, 1).unwrap();
        let call = first.activity().begin();
        assert!(open(&connections, 2).is_none());
        drop(call);
        let opened = async {
            loop {
                match open(&connections, 2) {
                    Some(opened) => break opened,
                    None => connections.freed().await,
                }
            }
        };
        let _second = timeout(2 * EVICT_IDLE, opened).await.expect("a place");
        assert!(!is_open(&connections, &first));
    }

    /// A response that was decided may be in the buffer of the connection: it was dropped with it.
    #[tokio::test(start_paused = true)]
    async fn connection_is_not_evicted_before_its_response() {
        let connections = Connections::new(1, Meters::new().connections("envoy"));
        let first = open(&connections, 1).unwrap();
        drop(first.activity().begin());
        for peer in [1, 2] {
            assert!(open(&connections, peer).is_none() && is_open(&connections, &first));
        }
        sleep(EVICT_IDLE).await;
        assert!(open(&connections, 2).is_some() && !is_open(&connections, &first));
    }

    /// Each of the 2⁶⁴ addresses of one host had a share of its own.
    #[tokio::test(start_paused = true)]
    async fn addresses_of_one_ipv6_network_share() {
        let connections = Connections::new(3, Meters::new().connections("api"));
        let open = |peer: &str| open_from(&connections, peer.parse().unwrap());
        let busy = ["2001:db8::1", "2001:db8::2:0:0:9"].map(|peer| open(peer).unwrap());
        let _calls = [busy[0].activity().begin(), busy[1].activity().begin()];
        assert!(open("2001:db8::3").is_none(), "the network has its share");
        assert!(open("2001:db8:0:1::1").is_some(), "another network has a share of its own");
        assert_eq!(shared_address("::ffff:10.0.0.1".parse().unwrap()), IpAddr::from([10, 0, 0, 1]));
    }

    #[tokio::test(start_paused = true)]
    async fn stalled_connection_is_closed() {
        let connections = Connections::new(4, Meters::new().connections("envoy"));
        let (stalled, idle) = (open(&connections, 1).unwrap(), open(&connections, 2).unwrap());
        tokio::spawn(Arc::clone(&connections).close_stalled(Duration::from_secs(20)));
        let _unread = stalled.activity().begin();
        for _ in 0..19 {
            sleep(Duration::from_secs(1)).await;
            drop(stalled.activity().begin());
        }
        sleep(Duration::from_secs(19)).await;
        assert!(is_open(&connections, &stalled), "calls ended until then");
        sleep(Duration::from_secs(4)).await;
        assert!(!is_open(&connections, &stalled) && is_open(&connections, &idle));
    }
}
