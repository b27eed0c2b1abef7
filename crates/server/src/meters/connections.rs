//! The metrics of the connections of one listener.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use metrics::{Counter, Gauge};

/// The metrics of the connections of one listener.
pub struct ConnectionMeters {
    pub(crate) listener: &'static str,
    pub(crate) open: Gauge,
    /// Closed for a new connection.
    pub(crate) evicted: Counter,
    pub(crate) refused: Counter,
    pub(crate) stalled: Counter,
    pub(crate) flooded: Counter,
}

/// The counts of a listener that has no registry of metrics. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct ConnectionCounts {
    /// The bits of a float, as for every gauge.
    open: Arc<AtomicU64>,
    evicted: Arc<AtomicU64>,
    refused: Arc<AtomicU64>,
}

impl ConnectionCounts {
    /// Meters that count here.
    pub fn meters(&self, listener: &'static str) -> ConnectionMeters {
        ConnectionMeters {
            listener,
            open: Gauge::from_arc(Arc::clone(&self.open)),
            evicted: Counter::from_arc(Arc::clone(&self.evicted)),
            refused: Counter::from_arc(Arc::clone(&self.refused)),
            stalled: Counter::noop(),
            flooded: Counter::noop(),
        }
    }

    /// Open connections.
    pub fn open(&self) -> f64 {
        f64::from_bits(self.open.load(Ordering::Relaxed))
    }

    /// Idle connections that were closed for new ones.
    pub fn evicted(&self) -> u64 {
        self.evicted.load(Ordering::Relaxed)
    }

    /// Connections that were refused, because their address had its share.
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }
}

impl fmt::Debug for ConnectionMeters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ConnectionMeters({})", self.listener)
    }
}
