//! Shutting a throttle down: refuse new requests, then wait for those in flight.

use std::pin::pin;

use crate::thread_waker::block_on;
use crate::throttle::Throttle;

impl Throttle {
    /// Refuses new requests and all waiters. It cannot be re-opened. Returns whether it was open.
    pub fn close(&self) -> bool {
        self.change(|state, _, effects| state.gates.close(&mut effects.events))
    }

    /// Closes, and waits until the last request in flight has completed.
    ///
    /// # Cancel safety
    /// Dropping the future stops waiting; the throttle stays closed.
    pub async fn drain(&self) {
        self.close();
        loop {
            let mut ended = pin!(self.inner.drained().notified());
            // Enabled before the check, so that a completion in between is not missed.
            ended.as_mut().enable();
            if self.inner.lock().gates.is_drained() {
                return;
            }
            ended.await;
        }
    }

    /// [`drain`](Self::drain) for threads.
    pub fn drain_blocking(&self) {
        block_on(self.drain());
    }
}
