//! Renewing a lease in the background, for as long as its handle lives.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::lease::Held;
use super::steps::{Turn, Verb};
use super::{count, lock};
use crate::seconds::Seconds;

/// No lease is renewed more often, however short it is.
const EVERY_MIN: Duration = Duration::from_millis(100);

/// Renews a lease of which `left` is left for `span` at a time, each time a third of that has passed, until it is over.
pub(super) async fn keep(held: Arc<Held>, left: Duration, span: Duration) {
    let mut next = left;
    loop {
        sleep((next / 3).max(EVERY_MIN)).await;
        next = span;
        let _turn = held.turn.lock().await;
        if lock(&held.steps).is_over() {
            return;
        }
        held.catch_up().await;
        held.renew(span).await;
    }
}

impl Held {
    /// Says again what its holder said and was not answered: another number before it would make it too late.
    async fn catch_up(&self) {
        let unanswered = lock(&self.steps).unanswered();
        // An end is said again by its holder, or when the handle is dropped.
        let Some((verb, step)) = unanswered.filter(|_| lock(&self.steps).is_open()) else { return };
        let answer = self.send(&verb, step).await;
        self.note(&verb, &answer);
        if let Ok(done) = answer {
            lock(&self.steps).keep(verb, done);
        }
    }

    /// Gives it `span` from now on, if it is open and nothing is unanswered.
    async fn renew(&self, span: Duration) {
        let verb = Verb::Renew(Seconds::from(span));
        let step = {
            let mut steps = lock(&self.steps);
            if !steps.is_open() || steps.unanswered().is_some() {
                return;
            }
            match steps.begin(&verb) {
                Turn::Send(step) => step,
                Turn::Done(_) | Turn::Over(_) => return,
            }
        };
        let sent = Instant::now();
        let answer = self.send_renewal(&verb, step).await;
        self.note(&verb, &answer);
        if let Ok(renewed) = answer {
            count(&self.client.inner.counts.renewals);
            self.expires(sent, renewed.expires_in.as_duration());
        }
    }
}
