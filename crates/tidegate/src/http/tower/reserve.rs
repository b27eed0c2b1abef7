//! The layer for one throttle and requests of one unit each: a ready service has its permit already.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};

use ::http::{Request, Response};
use http_body::Body;
use tidegate_core::cost::{Charge, Cost};
use tidegate_core::refused::Refused;
use tower_layer::Layer;
use tower_service::Service;

use super::answer::{Answering, Gone, Reads, Shared};
use super::error::{BoxError, CallError};
use super::reserved::undo;
use super::wait::WaitLayer;
use crate::held::{HeldBody, Hold};
use crate::http::{HttpClasses, Lost, ReadError};
use crate::state::Entry;
use crate::throttle::{Inner, Throttle};
use crate::waiting::Waiting;

const UNIT: Cost = Cost::request();

/// Puts one throttle in front of a service, for requests of one unit each.
///
/// The permit is reserved in `poll_ready`: whoever is ready may call at once, and nobody is ready before its turn. So it works
/// with what chooses among ready services, and pushes back on what stands before it. See [the module](super).
///
/// ```
/// use http::{Request, Response};
/// use http_body_util::Empty;
/// use tidegate::tower::ThrottleLayer;
/// use tidegate::{Rate, Slots, Throttle};
/// use tower::{Layer as _, Service as _, ServiceExt as _};
///
/// # type Body = Empty<&'static [u8]>;
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
/// let throttle = Throttle::builder().slots(Slots::fixed(8)).rate(Rate::per_second(50)).build()?;
/// let client = tower::service_fn(|_: Request<Body>| async {
///     Ok::<_, std::io::Error>(Response::new(Body::new()))
/// });
/// let mut client = ThrottleLayer::new(throttle).layer(client);
///
/// let response = client.ready().await?.call(Request::get("https://example.com/").body(Body::new())?).await?;
/// assert_eq!(response.status(), 200);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct ThrottleLayer<F = Lost> {
    shared: Arc<Shared<F>>,
}

impl ThrottleLayer {
    /// A layer that reads responses by the usual [`Classes`](crate::Classes), every error as a lost connection, and holds a
    /// slot until the body ends.
    pub fn new(throttle: Throttle) -> Self {
        Self::of(throttle, Reads::default())
    }
}

impl<F> ThrottleLayer<F> {
    fn of(throttle: Throttle, reads: Reads<F>) -> Self {
        Self { shared: Arc::new(Shared { throttle, reads: Arc::new(reads) }) }
    }

    /// The same with another reading of responses and errors.
    pub fn classes<G>(self, classes: HttpClasses<G>) -> ThrottleLayer<G> {
        ThrottleLayer::of(self.shared.throttle.clone(), Reads { classes, hold: self.shared.reads.hold })
    }

    /// The same with another end of the slot.
    #[must_use]
    pub fn hold(self, hold: Hold) -> Self
    where
        F: Clone,
    {
        Self::of(self.shared.throttle.clone(), Reads { classes: self.shared.reads.classes.clone(), hold })
    }

    /// The same for requests that cost what `weigh` says: a service that is always ready and waits inside the call.
    ///
    /// `weigh` is a `Fn(&Request<B>) -> Cost`.
    pub fn cost<W>(self, weigh: W) -> WaitLayer<Throttle, W, F> {
        WaitLayer::of(self.shared.throttle.clone(), weigh, Arc::clone(&self.shared.reads))
    }
}

impl<F> Clone for ThrottleLayer<F> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

impl<S, F> Layer<S> for ThrottleLayer<F> {
    type Service = Throttled<S, F>;

    fn layer(&self, inner: S) -> Throttled<S, F> {
        Throttled { inner, shared: Arc::clone(&self.shared), turn: Turn::default() }
    }
}

/// A service behind a throttle; made by [`ThrottleLayer`].
///
/// Clones share the throttle and not the turn: each becomes ready for itself. Dropped while it is ready, it gives back what it
/// reserved, whole; dropped while it waits, it leaves the line.
///
/// Refusals come out of `call`, and never out of `poll_ready`, where an error means that the service is of no more use.
pub struct Throttled<S, F = Lost> {
    inner: S,
    shared: Arc<Shared<F>>,
    turn: Turn,
}

impl<S, F> Throttled<S, F> {
    /// The service behind it.
    pub const fn get_ref(&self) -> &S {
        &self.inner
    }

    /// The throttle in front of it.
    pub fn throttle(&self) -> &Throttle {
        &self.shared.throttle
    }
}

impl<S, F, B, R> Service<Request<B>> for Throttled<S, F>
where
    S: Service<Request<B>, Response = Response<R>, Error: Into<BoxError>>,
    F: ReadError<S::Error> + Send + Sync + 'static,
    R: Body,
{
    type Response = Response<HeldBody<R>>;
    type Error = CallError;
    type Future = Answering<S::Future, F>;

    #[inline]
    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), CallError>> {
        // Our turn first, as tower's own limits have it: what is behind us is not kept from others while we wait.
        match ready!(self.turn.poll(&self.shared.throttle.inner, context)) {
            Ok(()) => self.inner.poll_ready(context).map_err(CallError::of),
            // Told when it is called. Asked again before that, the throttle is too.
            Err(()) => Poll::Ready(Ok(())),
        }
    }

    #[inline]
    fn call(&mut self, request: Request<B>) -> Answering<S::Future, F> {
        let throttle = &self.shared.throttle.inner;
        if throttle.has_begun() || self.turn.come.is_none() {
            self.turn.ask_again(throttle);
        }
        let Some(charge) = self.turn.come.take() else { return Answering::refused(self.turn.refused()) };
        // Before the call: should that panic, what it holds returns.
        let gone = Gone::new(&self.shared, charge);
        Answering::running(self.inner.call(request), gone)
    }
}

impl<S: Clone, F> Clone for Throttled<S, F> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), shared: Arc::clone(&self.shared), turn: Turn::default() }
    }
}

impl<S, F> Drop for Throttled<S, F> {
    fn drop(&mut self) {
        if let Some(charge) = self.turn.come.take() {
            undo(&self.shared.throttle.inner, charge);
        }
    }
}

impl<S: fmt::Debug, F> fmt::Debug for Throttled<S, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Throttled")
            .field("inner", &self.inner)
            .field("throttle", &self.shared.throttle)
            .finish_non_exhaustive()
    }
}

type InLine = Pin<Box<dyn Future<Output = Result<Charge, Refused>> + Send>>;

/// A service's turn.
// What is reserved stands apart from the rest: as one of several variants it would be moved byte by byte on the hottest path.
#[derive(Default)]
struct Turn {
    /// Reserved, and nothing has gone out.
    come: Option<Charge>,
    asked: Asked,
}

#[derive(Default)]
enum Asked {
    #[default]
    Not,
    /// The lock is never taken: it is there because a service may be shared, and this future may not.
    InLine(Mutex<InLine>),
    Refused(Refused),
}

impl Turn {
    /// Whether its turn has come, or will not.
    #[inline]
    fn poll(&mut self, throttle: &Arc<Inner>, context: &mut Context<'_>) -> Poll<Result<(), ()>> {
        if self.come.is_none() && matches!(self.asked, Asked::Not) {
            // Most requests find room, where slots and a rate are all there is.
            self.come = throttle.enter_plain(UNIT, throttle.reading());
        }
        if self.come.is_some() { Poll::Ready(Ok(())) } else { self.poll_slowly(throttle, context) }
    }

    #[cold]
    fn poll_slowly(&mut self, throttle: &Arc<Inner>, context: &mut Context<'_>) -> Poll<Result<(), ()>> {
        if !matches!(self.asked, Asked::InLine(_)) {
            match throttle.enter(UNIT, throttle.reading()) {
                Entry::Admitted(charge) => return self.known(Ok(charge)),
                Entry::Refused(refused) => return self.known(Err(refused)),
                Entry::Wait(_) => {
                    let throttle = Arc::clone(throttle);
                    let in_line: InLine = Box::pin(async move { Waiting::new(&throttle, UNIT, None).await });
                    self.asked = Asked::InLine(Mutex::new(in_line));
                }
            }
        }
        let Asked::InLine(in_line) = &mut self.asked else { unreachable!("it was put in line above") };
        let in_line = in_line.get_mut().unwrap_or_else(PoisonError::into_inner);
        let answer = ready!(in_line.as_mut().poll(context));
        self.known(answer)
    }

    fn known(&mut self, answer: Result<Charge, Refused>) -> Poll<Result<(), ()>> {
        match answer {
            Ok(charge) => {
                (self.come, self.asked) = (Some(charge), Asked::Not);
                Poll::Ready(Ok(()))
            }
            Err(refused) => {
                self.asked = Asked::Refused(refused);
                Poll::Ready(Err(()))
            }
        }
    }

    /// It is called, and is not ready, or something has begun that may keep it: it goes now, or not at all. Whoever was not
    /// ready, or was and must not go any more, may still find room.
    #[cold]
    fn ask_again(&mut self, throttle: &Arc<Inner>) {
        let confirmed = match (self.come.take(), std::mem::take(&mut self.asked)) {
            (Some(charge), _) => throttle.confirmed(charge),
            (None, Asked::Refused(refused)) => Err(Some(refused)),
            (None, Asked::Not | Asked::InLine(_)) => Err(None),
        };
        let answer = confirmed.or_else(|refused| match refused {
            Some(refused) => Err(refused),
            None => throttle.try_charge(UNIT, throttle.reading()),
        });
        let _known = self.known(answer);
    }

    /// Why it was not let go.
    #[cold]
    fn refused(&mut self) -> Refused {
        match std::mem::take(&mut self.asked) {
            Asked::Refused(refused) => refused,
            Asked::Not | Asked::InLine(_) => unreachable!("whoever is called and may not go was refused"),
        }
    }
}
