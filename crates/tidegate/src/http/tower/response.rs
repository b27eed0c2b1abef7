//! How the result of a call is classified, and when its permit returns.

use ::http::Response;
use http_body::Body;
use tidegate_core::outcome::Outcome;

use crate::http::{HttpClasses, LostConnection, ReadError};
use crate::permit_body::{Hold, OwnedCharge, PermitBody};
use crate::run::Classify;

/// Classifies results, and settles responses. Implemented by [`HttpResponses`] and [`Results`].
pub trait Respond<T, E>: Send + Sync + 'static {
    /// The response that callers get.
    type Response;
    /// How long a response holds its permit.
    type Hold: Copy;

    /// The outcome of a call. It matters little if the throttle does not learn from outcomes.
    fn outcome(&self, result: &Result<T, E>, learns: bool) -> Outcome;

    /// How long a response holds its permit.
    fn hold(&self) -> Self::Hold;

    /// Settles a response: now or later. `taken` is called where the charge is needed.
    fn respond(
        hold: Self::Hold,
        taken: impl FnOnce() -> OwnedCharge,
        outcome: Outcome,
        response: T,
    ) -> Self::Response;
}

/// HTTP: responses are classified by status and headers, and hold their permit until their body ends.
#[derive(Debug, Clone)]
pub struct HttpResponses<F = LostConnection> {
    pub(super) classes: HttpClasses<F>,
    pub(super) hold: Hold,
}

impl Default for HttpResponses {
    fn default() -> Self {
        Self { classes: HttpClasses::default(), hold: Hold::default() }
    }
}

impl<F> HttpResponses<F> {
    // Not inlined: it is long, and not needed for responses without headers.
    #[inline(never)]
    fn read<B, E>(&self, result: &Result<Response<B>, E>) -> Outcome
    where
        F: ReadError<E>,
    {
        self.classes.classify(result).outcome()
    }
}

impl<F, B, E> Respond<Response<B>, E> for HttpResponses<F>
where
    F: ReadError<E> + Send + Sync + 'static,
    B: Body,
{
    type Response = Response<PermitBody<B>>;
    type Hold = Hold;

    #[inline]
    fn outcome(&self, result: &Result<Response<B>, E>, learns: bool) -> Outcome {
        // If nothing learns and there are no headers, the outcome does not matter.
        if !learns && matches!(result, Ok(response) if response.headers().is_empty()) {
            return Outcome::success();
        }
        self.read(result)
    }

    #[inline]
    fn hold(&self) -> Hold {
        self.hold
    }

    #[inline]
    fn respond(
        hold: Hold,
        taken: impl FnOnce() -> OwnedCharge,
        outcome: Outcome,
        response: Response<B>,
    ) -> Response<PermitBody<B>> {
        response.map(|body| PermitBody::new(taken(), outcome, hold, body))
    }
}

/// Any service: a [`Classify`] decides the outcome, and the permit returns with the response.
#[derive(Debug, Clone)]
pub struct Results<C> {
    pub(super) classifier: C,
}

impl<C, T, E> Respond<T, E> for Results<C>
where
    C: Classify<T, E> + Send + Sync + 'static,
{
    type Response = T;
    type Hold = ();

    fn outcome(&self, result: &Result<T, E>, _: bool) -> Outcome {
        self.classifier.classify(result).outcome()
    }

    fn hold(&self) {}

    fn respond((): (), taken: impl FnOnce() -> OwnedCharge, outcome: Outcome, response: T) -> T {
        taken().settle(outcome);
        response
    }
}
