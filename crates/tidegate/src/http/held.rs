//! A request whose answer has begun: it was learned from at its headers, and keeps its place until its body ends.
//!
//! The far side works for a request as long as it sends the body, so that is how long a slot is taken. What the status and
//! the headers say is known before that, and so is how long they took: the throttle learns it at once.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;
use tidegate_core::cause::Cause;
use tidegate_core::cost::{Charge, Cost};
use tidegate_core::gate::Ending;
use tidegate_core::outcome::{Kind, Outcome};

use crate::permit::Permit;
use crate::settle::Time;
use crate::throttle::Inner;

/// How long a request holds its slot.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Hold {
    /// Until its body has ended, has broken, or was dropped.
    #[default]
    Body,
    /// Until its headers have come: for far sides that are done by then, and for bodies that go on for hours.
    Headers,
}

/// Whoever keeps a throttle alive.
pub(crate) trait Way: Send + Sync {
    /// The throttle.
    fn throttle(&self) -> &Inner;
}

impl Way for Inner {
    fn throttle(&self) -> &Inner {
        self
    }
}

/// What was taken for a request, and the way back. It is for whoever has it to see that it goes back.
pub(crate) struct Taken {
    pub(crate) way: Arc<dyn Way>,
    pub(crate) charge: Charge,
}

impl Taken {
    /// What a permit took.
    pub(crate) fn of(mut permit: Permit<'static>) -> Self {
        let charge = permit.charge.take();
        let charge = charge.unwrap_or_else(|| unreachable!("a permit is settled by giving it away"));
        let way: Arc<Inner> = Arc::clone(&permit.inner);
        Self { way, charge }
    }

    /// Ends the request.
    #[inline(never)]
    pub(crate) fn settle(self, outcome: Outcome) {
        self.way.throttle().settle(self.charge, None, outcome);
    }
}

/// What a request still holds while its body comes.
struct Kept {
    /// Taken at the end.
    taken: Option<(Arc<dyn Way>, Charge)>,
    is_success: bool,
}

impl Kept {
    /// Learns from the answer, and keeps what was taken.
    #[inline]
    fn new(taken: Taken, outcome: Outcome) -> Self {
        let Taken { way, mut charge } = taken;
        way.throttle().learn_early(&mut charge, outcome);
        Self { taken: Some((way, charge)), is_success: outcome.kind() == Kind::Success }
    }

    #[cold]
    fn give_back(&mut self) {
        if let Some((way, charge)) = self.taken.take() {
            way.throttle().give_back(charge, self.is_success);
        }
    }

    /// The body broke. What failed at its headers has failed once.
    fn broke(mut self) {
        if let (true, Some((way, charge))) = (self.is_success, &mut self.taken) {
            // It was counted as completed already.
            way.throttle().learn_early(charge, Outcome::failure().because(Cause::Network).retried());
        }
    }
}

impl Drop for Kept {
    #[inline]
    fn drop(&mut self) {
        let Some((way, charge)) = &self.taken else { return };
        let throttle = way.throttle();
        // Looked at where it is: most of the time its slot is all that goes back, and it need not be moved for that.
        if throttle.settles_timed() || !throttle.leave_plain(charge) {
            self.give_back();
        }
    }
}

impl Inner {
    /// Learns of a request that goes on holding what it holds; where nothing learns there is nobody to tell.
    #[inline]
    fn learn_early(&self, charge: &mut Charge, outcome: Outcome) {
        if self.needs_reading(outcome) || outcome.malformed() > 0 {
            self.learn_now(charge, outcome);
        }
    }

    #[inline(never)]
    fn learn_now(&self, charge: &mut Charge, outcome: Outcome) {
        self.record(Some(charge), outcome);
    }

    /// Ends a request that was learned from before: what it holds returns. A success has used its tokens, as many as were
    /// thought; a failure none.
    fn give_back(&self, charge: Charge, is_success: bool) {
        let used = if is_success { charge.tokens_held() } else { 0 };
        let outcome = Outcome::ignored().spent(Cost::request().tokens(used));
        let time = if self.settles_timed() { Time::Read(self.clock().now()) } else { Time::Idle };
        self.settle_locked(Ending { charge, reported: None, outcome }, time);
        self.show();
    }
}

pin_project! {
    /// The body of an answer, with what the request holds until it ends.
    ///
    /// A slot returns when the body has ended, has broken, or is dropped. A body that breaks after a good answer is a failure
    /// of the far side too.
    pub struct HeldBody<B> {
        #[pin]
        body: B,
        kept: Option<Kept>,
    }
}

impl<B: Body> HeldBody<B> {
    /// Ends a request that was answered like this: now, or when its body ends.
    #[inline]
    pub(crate) fn new(taken: Taken, outcome: Outcome, hold: Hold, body: B) -> Self {
        if hold == Hold::Headers || body.is_end_stream() {
            taken.settle(outcome);
            return Self { body, kept: None };
        }
        Self { body, kept: Some(Kept::new(taken, outcome)) }
    }
}

impl<B> HeldBody<B> {
    /// Whether the request still holds its slot.
    pub const fn is_held(&self) -> bool {
        self.kept.is_some()
    }
}

impl<B: Body> Body for HeldBody<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let mut this = self.project();
        let frame = ready!(this.body.as_mut().poll_frame(context));
        match &frame {
            Some(Ok(_)) if !this.body.is_end_stream() => {}
            Some(Ok(_)) | None => *this.kept = None,
            Some(Err(_)) => {
                if let Some(kept) = this.kept.take() {
                    kept.broke();
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

impl<B: fmt::Debug> fmt::Debug for HeldBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeldBody")
            .field("body", &self.body)
            .field("is_held", &self.is_held())
            .finish_non_exhaustive()
    }
}

impl<B: Default> Default for HeldBody<B> {
    /// A body that holds nothing.
    fn default() -> Self {
        Self { body: B::default(), kept: None }
    }
}
