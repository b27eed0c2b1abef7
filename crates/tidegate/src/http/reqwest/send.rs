//! One hop: a request to one far side, sent again as often as it is worth it.

use ::http::header::HeaderName;
use ::http::{Extensions, Method, StatusCode};
use ::reqwest::{Body, Request, Response, ResponseBuilderExt as _};
use reqwest_middleware::{Error, Next};
use tidegate_core::classes::Ended;
use tidegate_core::outcome::{Kind, Outcome};

use super::error::ThrottleError;
use super::{Replay, Throttling, authority};
use crate::held::{HeldBody, Hold, Taken};
use crate::permit::Permit;
use crate::run::{Class, Course, RunError, Step};

const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// What it took to get an answer; among the extensions of a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Tries {
    /// Attempts at the far side that gave the answer.
    pub attempts: u32,
    /// Redirects that were followed before.
    pub redirects: u32,
}

impl Throttling {
    /// Sends a request under its throttle, and again as the rule says.
    pub(super) async fn send(
        &self,
        request: Request,
        extensions: &mut Extensions,
        next: &Next<'_>,
    ) -> Result<Response, Error> {
        let throttle = self.throttle(&request).map_err(ThrottleError::NoHost)?;
        let cost = self.weigh(&request);
        let retry = self.retry.clone().unwrap_or_else(|| throttle.retry_rule());
        let far = Far::of(&request);
        let mut request = Some(request);
        let mut course = Course::begin(&throttle.inner, &retry);
        let done = loop {
            let step = match throttle.acquire(cost).await {
                Err(refused) => course.refused(refused),
                Ok(permit) => {
                    let permit = permit.into_owned();
                    let attempts = course.admitted().number + 1;
                    // Kept for another attempt where it can be copied; what is left after the last is sent as it is.
                    let copy = request.as_ref().and_then(Request::try_clone);
                    let Some(attempt) = copy.or_else(|| request.take()) else {
                        unreachable!("what cannot be sent twice is not tried twice")
                    };
                    let result = next.clone().run(attempt, extensions).await;
                    let mut class = self.class(&far, &result);
                    if request.is_none() || !self.may_replay(&far, &class, &result) {
                        class = Class::end(class.outcome());
                    }
                    let result = result.map(|mut response| {
                        response.extensions_mut().insert(Tries { attempts, redirects: 0 });
                        response
                    });
                    course.judge_held(permit, result, class, |permit, outcome, response| {
                        held(permit, outcome, response, self.hold)
                    })
                }
            };
            match step {
                Step::Done(result) => break result,
                Step::AskAgain(None) => {}
                Step::AskAgain(Some(at)) => throttle.inner.clock().sleep_until(at).await,
            }
        };
        done.map_err(|error| match error {
            RunError::Refused(refused) => ThrottleError::Refused(refused).into(),
            RunError::Failed { error, .. } => error,
        })
    }

    /// What an attempt's result means to the far side that was asked.
    fn class(&self, far: &Far, result: &Result<Response, Error>) -> Class {
        match result {
            Ok(response) => {
                let class = self.classes.read(response.status(), response.headers());
                if far.is(response) {
                    return class;
                }
                // The client has followed a redirect by itself: whoever was asked has answered well.
                self.record(response.url(), class.outcome());
                Class::end(Outcome::success())
            }
            Err(error) => Class::of(self.classes.classes(), ended(error)),
        }
    }

    /// Whether what may be worth another attempt may have one.
    fn may_replay(&self, far: &Far, class: &Class, result: &Result<Response, Error>) -> bool {
        if self.replay == Replay::Always || far.is_idempotent {
            return true;
        }
        match result {
            // A 503 without a word on when to come back is also what proxies say whose far side broke off in the middle of it.
            Ok(response) => {
                let is_sure =
                    response.status() != StatusCode::SERVICE_UNAVAILABLE || class.outcome().has_hint();
                is_sure && class.outcome().kind() == Kind::Overload
            }
            Err(error) => matches!(error, Error::Reqwest(error) if error.is_connect()),
        }
    }
}

/// What has to be known of a request once it is sent.
struct Far {
    /// As its address had it, for comparison.
    host: Option<tidegate_core::authority::Authority>,
    is_idempotent: bool,
}

impl Far {
    fn of(request: &Request) -> Self {
        let method = request.method();
        // PUT and DELETE, and what changes nothing (RFC 9110 §9.2.2).
        let is_idempotent = method.is_idempotent() || *method == Method::TRACE;
        Self {
            host: authority(request.url()).ok(),
            is_idempotent: is_idempotent || request.headers().contains_key(IDEMPOTENCY_KEY),
        }
    }

    /// Whether the response is this far side's.
    fn is(&self, response: &Response) -> bool {
        authority(response.url()).ok() == self.host
    }
}

/// How a request ended that brought an error and no response.
fn ended(error: &Error) -> Ended {
    match error {
        // Another middleware's word on it: the far side may never have heard of the request.
        Error::Middleware(_) => Ended::Unsent,
        Error::Reqwest(error) if error.is_builder() || error.is_redirect() => Ended::Unsent,
        Error::Reqwest(error) if error.is_timeout() => Ended::Timeout,
        Error::Reqwest(_) => Ended::Connection,
    }
}

/// The response with what its request holds until its body ends.
fn held(permit: Permit<'static>, outcome: Outcome, response: Response, hold: Hold) -> Response {
    if hold == Hold::Headers {
        permit.settle(outcome);
        return response;
    }
    let url = response.url().clone();
    let (mut parts, body) = ::http::Response::<Body>::from(response).into_parts();
    // Only by this builder can a response be told where it is from.
    if let Ok(told) = ::http::Response::builder().url(url).body(()) {
        parts.extensions.extend(told.into_parts().0.extensions);
    }
    let body = Body::wrap(HeldBody::new(Taken::of(permit), outcome, hold, body));
    ::http::Response::from_parts(parts, body).into()
}
