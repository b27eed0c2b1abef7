//! Latency and errors of store calls.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use metrics::Histogram;
use metrics_exporter_prometheus::PrometheusRecorder;
use tidegate::StoreError;
use tidegate::store::Store;
use tidegate::store::wrap::{CallEnd, Measured, Verb, Watcher};

use super::{counter, histogram};

/// Measures a store for the metrics of a server. Build the limiter over the watched store, then pass the
/// meters to the server's [`State`](crate::State); until then nothing is recorded. Clones share the same
/// meters.
///
/// ```
/// use std::sync::Arc;
/// use tidegate::{Limiter, Memory};
/// use tidegate_server::{State, StoreMeters};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let meters = StoreMeters::new();
/// let limiter = Limiter::over(meters.watch(Arc::new(Memory::new()))).build()?;
/// let state = State::new(limiter).await?.measured_by(meters);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Default)]
pub struct StoreMeters(pub(super) Arc<Inner>);

#[derive(Default)]
pub(super) struct Inner {
    recorder: OnceLock<Arc<PrometheusRecorder>>,
    /// Registered on first use: most servers call few verbs.
    seconds: [OnceLock<Histogram>; Verb::ALL.len()],
}

impl StoreMeters {
    /// Creates meters that are not attached to a server yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Wraps a store so that its calls are measured.
    pub fn watch(&self, store: Arc<dyn Store>) -> Arc<dyn Store> {
        Arc::new(Measured::new(store, self.0.clone()))
    }

    pub(super) fn attach(&self, recorder: Arc<PrometheusRecorder>) {
        let _ = self.0.recorder.set(recorder);
    }
}

impl Watcher for Inner {
    fn ended(&self, verb: Verb, took: Duration, end: CallEnd<'_>) {
        let Some(recorder) = self.recorder.get() else { return };
        let seconds = self.seconds[verb as usize]
            .get_or_init(|| histogram(recorder, "tidegate_store_seconds", &[("verb", verb.name())]));
        seconds.record(took);
        let kind = match end {
            CallEnd::Failed(error) => kind(error),
            CallEnd::GivenUp => Some("given_up"),
            _ => None,
        };
        if let Some(kind) = kind {
            counter(recorder, "tidegate_store_errors_total", &[("verb", verb.name()), ("kind", kind)])
                .increment(1);
        }
    }
}

/// The error label for store failures. Most errors are regular outcomes, such as an ended lease or a stale
/// version.
const fn kind(error: &StoreError) -> Option<&'static str> {
    Some(match error {
        StoreError::Unavailable { .. } => "away",
        StoreError::TimedOut { .. } => "timed_out",
        StoreError::Busy { .. } => "busy",
        StoreError::Closed { .. } => "closed",
        StoreError::Denied { .. } => "denied",
        StoreError::Corrupt { .. } => "corrupt",
        StoreError::Full { .. } => "full",
        _ => return None,
    })
}

impl fmt::Debug for StoreMeters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StoreMeters")
    }
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StoreMeters")
    }
}
