//! The bounds of a server, per request and in total.

use std::time::Duration;

/// The bounds of a server. An error caused by a bound names it.
///
/// The bounds of a request head are enforced before routing. The server responds with a status without a body
/// and closes the connection: 431 for more than `head_max` bytes or `headers_max` headers, 400 for data that
/// is not HTTP/1, and 408 or no response if the head does not arrive within `head_time`. All other error
/// responses have a problem body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Bounds {
    /// Maximum size of a body in bytes. Default: 256 KiB.
    pub body_max: usize,
    /// Timeout for receiving a body, and for a client that does not read a response. Default: 10 seconds.
    pub body_time: Duration,
    /// Maximum number of concurrent requests, including those waiting for a limit. A token may have 15 of
    /// 16, and less while others need them. Default: 4,096.
    pub requests_max: usize,
    /// Maximum time that an acquire may wait. Default: one minute.
    pub within_max: Duration,
    /// Duration of a lease whose request does not set one. Default: five minutes.
    pub lease_deadline: Duration,
    /// Maximum duration of a lease, and of each renewal. Default: one day.
    pub lease_deadline_max: Duration,
    /// Timeout of a listing or report. Default: 10 seconds.
    pub report_time: Duration,
    /// Maximum size of a request head in bytes. Default: 16 KiB; values below 8 KiB are raised to it.
    pub head_max: usize,
    /// Maximum number of headers of a request. Default: 64.
    pub headers_max: usize,
    /// Timeout for receiving a request head, and for an idle connection. Default: 15 seconds.
    pub head_time: Duration,
    /// Maximum number of open connections. An address may have 15 of 16, and less while others need them. At
    /// the bound, the connection that has been idle longest is closed. Default: 8,192.
    pub connections_max: usize,
    /// Time that a stopping server waits for requests in flight. Default: 30 seconds.
    pub drain_time: Duration,
    /// Interval of the sweep that ends expired leases. Default: 5 seconds.
    pub sweep_every: Duration,
    /// Maximum number of event listeners, which do not count as requests. A token may have 15 of 16, and less
    /// while others need them. Default: 64.
    pub listeners_max: usize,
    /// Interval of keep-alive comments to event listeners, and of checks whether their tokens are still
    /// valid. Default: 15 seconds.
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
