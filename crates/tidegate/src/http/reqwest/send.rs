//! One hop: a request to one upstream, with retries.

use ::http::header::HeaderName;
use ::http::{Extensions, Method, StatusCode};
use ::reqwest::{Body, Request, Response};
use reqwest_middleware::{Error, Next};
use tidegate_core::classes::Completion;
use tidegate_core::outcome::{Kind, Outcome};

use super::error::ThrottleError;
use super::rejection::{from_parts, into_parts, with_body};
use super::usage::UsageBody;
use super::{Replay, Throttling, authority};
use crate::permit::Permit;
use crate::permit_body::{Hold, OwnedCharge, PermitBody};
use crate::run::{Class, RetryState, RunError, Step};

const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// The number of attempts and redirects behind a response, as one of its extensions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Tries {
    /// Attempts at the upstream that sent the response.
    pub attempts: u32,
    /// Redirects that were followed before.
    pub redirects: u32,
}

impl Throttling {
    /// Sends a request under its throttle, with retries according to the rule.
    pub(super) async fn send(
        &self,
        request: Request,
        extensions: &mut Extensions,
        next: &Next<'_>,
    ) -> Result<Response, Error> {
        let throttle = self.throttle(&request).map_err(ThrottleError::NoHost)?;
        let cost = self.weigh(&request);
        let retry = self.retry.clone().unwrap_or_else(|| throttle.retry_rule());
        let target = Target::of(&request);
        let mut request = Some(request);
        let mut retry_state = RetryState::begin(&throttle.inner, &retry);
        let done = loop {
            let step = match throttle.acquire(cost).await {
                Err(refused) => retry_state.refused(refused.retry_after(), refused),
                Ok(permit) => {
                    let permit = permit.into_owned();
                    let attempts = retry_state.admitted() + 1;
                    // The request is kept for a retry if it can be cloned; otherwise the original is sent.
                    let copy = request.as_ref().and_then(Request::try_clone);
                    let Some(attempt) = copy.or_else(|| request.take()) else {
                        unreachable!("a request that cannot be cloned is not retried")
                    };
                    let mut result = next.clone().run(attempt, extensions).await;
                    if let Ok(response) = &mut result {
                        response.extensions_mut().insert(Tries { attempts, redirects: 0 });
                    }
                    let mut class = self.class(&target, &result);
                    if request.is_none() || !self.may_replay(&target, &class, &result) {
                        class = Class::end(class.outcome());
                    }
                    let ending = retry_state.completed(class);
                    let outcome = ending.outcome();
                    let result = match result {
                        Ok(response) if ending.is_last() => {
                            Ok(self.hold_until_body_end(permit, outcome, response))
                        }
                        // If no retry is admitted, the caller gets this response.
                        Ok(response) if throttle.inner.is_decided_by_body(&outcome, cost) => {
                            let clock = throttle.inner.clock();
                            let (outcome, response) = with_body(clock, outcome, response).await;
                            permit.settle(outcome);
                            Ok(response)
                        }
                        result => {
                            permit.settle(outcome);
                            result
                        }
                    };
                    retry_state.settled(ending, result)
                }
            };
            match step {
                Step::Done(result) => break result,
                Step::Retry(None) => {}
                Step::Retry(Some(at)) => throttle.inner.clock().sleep_until(at).await,
            }
        };
        done.map_err(|error| match error {
            RunError::Refused(refused) => ThrottleError::Refused(refused).into(),
            RunError::Failed { error, .. } => error,
        })
    }

    /// Classifies an attempt's result for the requested upstream.
    fn class(&self, target: &Target, result: &Result<Response, Error>) -> Class {
        match result {
            Ok(response) => {
                let class = self.classes.read(response.status(), response.headers());
                if target.is(response) {
                    return class;
                }
                // The client has followed a redirect by itself: the requested host has responded
                // successfully.
                self.record(response.url(), class.outcome());
                Class::end(Outcome::success())
            }
            Err(error) => Class::of(self.classes.classes(), completion(error)),
        }
    }

    /// Attaches the request's permit to the response's body.
    fn hold_until_body_end(&self, permit: Permit<'static>, outcome: Outcome, response: Response) -> Response {
        let used = self.used.clone().filter(|_| outcome.kind() == Kind::Success);
        if self.hold == Hold::Headers && used.is_none() {
            permit.settle(outcome);
            return response;
        }
        let (parts, body) = into_parts(response);
        let body = match used {
            Some(used) => Body::wrap(UsageBody::new(permit, outcome, parts.headers.clone(), body, used)),
            None => Body::wrap(PermitBody::new(OwnedCharge::of(permit), outcome, self.hold, body)),
        };
        from_parts(parts, body)
    }

    /// Whether a retryable attempt may be repeated.
    fn may_replay(&self, target: &Target, class: &Class, result: &Result<Response, Error>) -> bool {
        if self.replay == Replay::Always || target.is_idempotent {
            return true;
        }
        match result {
            // Proxies also send a 503 without a retry time when their upstream failed halfway through the
            // request.
            Ok(response) => {
                let is_sure =
                    response.status() != StatusCode::SERVICE_UNAVAILABLE || class.outcome().has_hint();
                is_sure && class.outcome().kind() == Kind::Overload
            }
            Err(error) => matches!(error, Error::Reqwest(error) if error.is_connect()),
        }
    }
}

/// The properties of a request that are needed after it is sent.
struct Target {
    /// The host of its address.
    host: Option<tidegate_core::authority::Authority>,
    is_idempotent: bool,
}

impl Target {
    fn of(request: &Request) -> Self {
        let method = request.method();
        // PUT and DELETE, and the safe methods (RFC 9110 §9.2.2).
        let is_idempotent = method.is_idempotent() || *method == Method::TRACE;
        Self {
            host: authority(request.url()).ok(),
            is_idempotent: is_idempotent || request.headers().contains_key(IDEMPOTENCY_KEY),
        }
    }

    /// Whether the response comes from this host.
    fn is(&self, response: &Response) -> bool {
        authority(response.url()).ok() == self.host
    }
}

/// How a request without a response completed.
fn completion(error: &Error) -> Completion {
    match error {
        // An error of another middleware: the upstream may not have received the request.
        Error::Middleware(_) => Completion::Unsent,
        Error::Reqwest(error) if error.is_builder() || error.is_redirect() => Completion::Unsent,
        Error::Reqwest(error) if error.is_timeout() => Completion::Timeout,
        Error::Reqwest(_) => Completion::Connection,
    }
}
