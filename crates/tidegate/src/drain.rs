//! The end of a throttle: nobody new, and then nobody at all.

use std::pin::pin;

use crate::thread_waker::block_on;
use crate::throttle::Throttle;

impl Throttle {
    /// Takes no new requests and refuses all who wait. Nothing re-opens it. Answers whether it was open.
    pub fn close(&self) -> bool {
        self.change(|state, _, effects| state.gates.close(&mut effects.events))
    }

    /// Closes, and waits until the last request in flight has ended.
    ///
    /// # Cancel safety
    /// Dropping the future stops the waiting; the throttle stays closed.
    pub async fn drain(&self) {
        self.close();
        loop {
            let mut ended = pin!(self.inner.drained().notified());
            // Enabled before looking: an end in between is not missed.
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
