//! What one request, and all of them together, may ask of a server.

use std::time::Duration;

/// The bounds of a server. Each is told in the error of whoever reaches it.
///
/// Whoever reaches a bound of a request's head is answered before any route is known, by a status without a body, and the
/// connection ends: 431 for more bytes than `head_max` or more headers than `headers_max`, 400 for what is no HTTP/1, and
/// 408 or nothing at all when the head does not arrive within `head_time`. Every other answer to an error is a problem with a body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Bounds {
    /// Bytes of a body. By default 256 KiB.
    pub body_max: usize,
    /// How long a body may take to arrive, and how long an answer may lie unread. By default 10 seconds.
    pub body_time: Duration,
    /// Requests that are under way at the same time, those that wait for a limit included. By default 4,096.
    pub requests_max: usize,
    /// How long an acquire may wait. By default a minute.
    pub within_max: Duration,
    /// How long a lease has where its request does not say. By default five minutes.
    pub lease_deadline: Duration,
    /// How long a lease may have at once. By default a day.
    pub lease_deadline_max: Duration,
    /// How long a listing or a report may take. By default 10 seconds.
    pub report_time: Duration,
    /// Bytes of a request's line and headers. By default 16 KiB; a server takes no fewer than 8 KiB.
    pub head_max: usize,
    /// How many headers a request may have. By default 64.
    pub headers_max: usize,
    /// How long the headers may take to arrive, and how long a connection may be idle. By default 15 seconds.
    pub head_time: Duration,
    /// Connections that are open at the same time; further ones wait to be accepted. By default 8,192.
    pub connections_max: usize,
    /// How long a server that stops waits for what is under way. By default 30 seconds.
    pub drain_time: Duration,
    /// How often leases past their deadline are ended. By default every 5 seconds.
    pub sweep_every: Duration,
    /// Those who listen to events at the same time; they do not count as requests. By default 64.
    pub listeners_max: usize,
    /// How often they hear that the server is there, and their tokens are looked at again. By default every 15 seconds.
    pub alive_every: Duration,
}

impl Default for Bounds {
    fn default() -> Self {
        Self {
            body_max: 256 * 1_024,
            body_time: Duration::from_secs(10),
            requests_max: 4_096,
            within_max: Duration::from_mins(1),
            lease_deadline: Duration::from_mins(5),
            lease_deadline_max: Duration::from_hours(24),
            report_time: Duration::from_secs(10),
            head_max: 16 * 1_024,
            headers_max: 64,
            head_time: Duration::from_secs(15),
            connections_max: 8_192,
            drain_time: Duration::from_secs(30),
            sweep_every: Duration::from_secs(5),
            listeners_max: 64,
            alive_every: Duration::from_secs(15),
        }
    }
}
