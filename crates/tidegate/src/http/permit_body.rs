//! A response body that holds its request's slot: the outcome is learned at the headers, the slot returns
//! when the body ends.
//!
//! The upstream works on a request as long as it sends the body, so the slot is held that long. Status,
//! headers and latency are known earlier, so the throttle learns from them at once. Only a rejection of a request
//! with tokens may have to wait for the beginning of its body, which names the quota that was exceeded; the pause
//! that its retry time begins does not wait.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Buf as _;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;
use tidegate_core::cause::Cause;
use tidegate_core::cost::{Charge, Cost};
use tidegate_core::gate::Ending;
use tidegate_core::outcome::{Kind, Outcome};
use tidegate_core::time::Instant;

use crate::permit::Permit;
use crate::queue::Refund;
use crate::settle::Time;
use crate::state::{Effects, State};
use crate::throttle::Inner;

/// How long a request holds its slot.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Hold {
    /// Until its body has ended, failed, or was dropped.
    #[default]
    Body,
    /// Until its headers arrive: for upstreams that are done by then, and for bodies that last for hours.
    Headers,
}

/// A handle that keeps a throttle alive.
pub(crate) trait ThrottleHandle: Send + Sync {
    /// The throttle.
    fn throttle(&self) -> &Inner;
}

impl ThrottleHandle for Inner {
    fn throttle(&self) -> &Inner {
        self
    }
}

/// The charge of a request with a handle to its throttle. It does not settle on drop.
pub struct OwnedCharge {
    pub(crate) handle: Arc<dyn ThrottleHandle>,
    pub(crate) charge: Charge,
}

impl OwnedCharge {
    /// Takes the charge of a permit.
    pub(crate) fn of(mut permit: Permit<'static>) -> Self {
        let charge = permit.charge.take();
        let charge = charge.unwrap_or_else(|| unreachable!("settling consumes a permit"));
        let handle: Arc<Inner> = Arc::clone(permit.inner());
        Self { handle, charge }
    }

    /// Ends the request.
    #[inline(never)]
    pub(crate) fn settle(self, outcome: Outcome) {
        let throttle = self.handle.throttle();
        if !throttle.settle_plain(&self.charge, outcome.is_always_learned()) {
            throttle.settle_apart(self.charge, None, &outcome);
        }
    }
}

impl fmt::Debug for OwnedCharge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnedCharge").finish_non_exhaustive()
    }
}

/// The charge of a request while its body is received.
struct BodyCharge {
    /// `None` once settled.
    charge: Option<(Arc<dyn ThrottleHandle>, Charge)>,
    is_success: bool,
    /// A rejection that was not learned from yet. Boxed: most responses are none.
    rejected: Option<Box<Rejection>>,
}

/// A rejection whose body decides what is cut.
struct Rejection {
    outcome: Outcome,
    /// When its headers arrived: its retry time counts from there.
    received_at: Instant,
}

impl BodyCharge {
    /// Learns from the response, and keeps the charge.
    #[inline]
    fn new(charge: OwnedCharge, outcome: Outcome) -> Self {
        let OwnedCharge { handle, mut charge } = charge;
        let throttle = handle.throttle();
        let rejected = if throttle.is_decided_by_body(&outcome, charge.cost()) {
            Some(Box::new(throttle.pause_early(&charge, outcome)))
        } else {
            throttle.learn_early(&mut charge, outcome);
            None
        };
        Self { charge: Some((handle, charge)), is_success: outcome.kind() == Kind::Success, rejected }
    }

    /// Learns from a rejection, with the beginning of its body.
    #[cold]
    fn learn_rejection(&mut self, body: &[u8]) {
        if let (Some(rejection), Some((handle, charge))) = (self.rejected.take(), &mut self.charge) {
            let Rejection { mut outcome, received_at } = *rejection;
            let throttle = handle.throttle();
            if let Some(hint) = outcome.hint() {
                let elapsed = throttle.clock().now().since(received_at);
                outcome = outcome.retry_after(hint.saturating_sub(elapsed));
            }
            throttle.learn_early(charge, outcome.exceeded_in(body));
        }
    }

    #[cold]
    fn give_back(&mut self) {
        if let Some((handle, charge)) = self.charge.take() {
            handle.throttle().give_back(charge, self.is_success);
        }
    }

    /// The body failed. A failure at the headers is not counted twice.
    fn fail(mut self) {
        if let (true, Some((handle, charge))) = (self.is_success, &mut self.charge) {
            // It was already counted as completed.
            handle.throttle().learn_early(charge, Outcome::failure().because(Cause::Network).retried());
        }
    }
}

impl Drop for BodyCharge {
    #[inline]
    fn drop(&mut self) {
        if self.rejected.is_some() {
            self.learn_rejection(b"");
        }
        let Some((handle, charge)) = &self.charge else { return };
        let throttle = handle.throttle();
        // Checked by reference: usually only a slot returns, which needs no move of the charge.
        if !throttle.settle_plain(charge, false) {
            self.give_back();
        }
    }
}

impl Inner {
    /// Whether the body of this response decides which quota is cut: it is a rejection whose headers name none, of a
    /// request that counts for several, and the controller cuts quotas.
    pub(crate) fn is_decided_by_body(&self, outcome: &Outcome, cost: Cost) -> bool {
        outcome.kind() == Kind::Overload
            && outcome.exceeded_quota().is_none()
            && cost.total_tokens() > 0
            && self.lock().plan.cuts_quotas()
    }

    /// Begins the pause of a rejection whose body decides what is cut.
    fn pause_early(&self, charge: &Charge, outcome: Outcome) -> Rejection {
        let now = self.clock().now();
        if !outcome.has_hint() {
            return Rejection { outcome, received_at: now };
        }
        let mut effects = Effects::default();
        let mut state = self.lock();
        let waiting = state.waiting();
        let State { plan, gates, .. } = &mut *state;
        let paused = gates.pause_early(plan, charge, &outcome, waiting, now, &mut effects.events);
        state.pump_after(now, Refund::Nothing, &mut effects);
        self.release(state, effects);
        Rejection { outcome: paused.map_or(outcome, |span| outcome.retry_after(span)), received_at: now }
    }

    /// Learns from a request that keeps its charge; skipped if nothing learns.
    #[inline]
    fn learn_early(&self, charge: &mut Charge, outcome: Outcome) {
        if self.settles_timed() || outcome.is_always_learned() {
            self.learn_now(charge, outcome);
        }
    }

    #[inline(never)]
    fn learn_now(&self, charge: &mut Charge, outcome: Outcome) {
        self.record(Some(charge), outcome);
    }

    /// Settles a request that was learned from before: its charge returns. A success has used its estimated
    /// tokens, a failure none.
    fn give_back(&self, charge: Charge, is_success: bool) {
        let used = if is_success { charge.cost() } else { Cost::request() };
        let outcome = Outcome::ignored().spent(used);
        let time = if self.settles_timed() { Time::Read(self.clock().now()) } else { Time::Idle };
        self.settle_locked(Ending { charge, reported: None, outcome: &outcome }, time);
        self.show();
    }
}

pin_project! {
    /// A response body that holds its request's charge.
    ///
    /// The slot returns when the body has ended, failed, or is dropped. A body that fails after a successful
    /// response counts as a failure of the upstream.
    pub struct PermitBody<B> {
        #[pin]
        body: B,
        held: Option<BodyCharge>,
    }
}

impl<B: Body> PermitBody<B> {
    /// Settles a request with a response: now, or when its body ends.
    #[inline]
    pub(crate) fn new(charge: OwnedCharge, outcome: Outcome, hold: Hold, body: B) -> Self {
        if hold == Hold::Headers || body.is_end_stream() {
            charge.settle(outcome);
            return Self { body, held: None };
        }
        Self { body, held: Some(BodyCharge::new(charge, outcome)) }
    }
}

impl<B> PermitBody<B> {
    /// Whether the request still holds its slot.
    pub const fn holds_permit(&self) -> bool {
        self.held.is_some()
    }
}

impl<B: Body> Body for PermitBody<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let mut this = self.project();
        let frame = ready!(this.body.as_mut().poll_frame(context));
        if let (Some(Ok(frame)), Some(held)) = (&frame, this.held.as_mut())
            && held.rejected.is_some()
            && let Some(data) = frame.data_ref()
        {
            held.learn_rejection(data.chunk());
        }
        match &frame {
            Some(Ok(_)) if !this.body.is_end_stream() => {}
            Some(Ok(_)) | None => *this.held = None,
            Some(Err(_)) => {
                if let Some(held) = this.held.take() {
                    held.fail();
                }
            }
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl<B: fmt::Debug> fmt::Debug for PermitBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PermitBody")
            .field("body", &self.body)
            .field("holds_permit", &self.holds_permit())
            .finish_non_exhaustive()
    }
}

impl<B: Default> Default for PermitBody<B> {
    /// A body that holds nothing.
    fn default() -> Self {
        Self { body: B::default(), held: None }
    }
}
