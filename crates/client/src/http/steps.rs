//! Step numbers of a lease, and what its holder knows about its state.
//!
//! The server executes each number once. A call whose response was lost keeps its number, so that
//! repeating it is idempotent. Every other call gets a new number, so that it never receives the response of
//! another call.

use super::ClientError;
use super::call::{Call, Idempotency};
use crate::amounts::{Changes, Cost};
use crate::lease::{Adjust, Cancel, Extend, Renew, Settle, StepDone};
use crate::problem::Problem;
use crate::seconds::Seconds;
use crate::text::LeaseRef;

/// An operation on a lease.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Verb {
    Extend(Cost),
    Adjust(Changes),
    Renew(Seconds),
    Settle(Cost),
    Cancel,
}

impl Verb {
    /// The API call of this operation.
    pub(super) fn call(&self, lease: &LeaseRef, step: u32) -> Call {
        let idempotent = Idempotency::Yes;
        let call = match self.clone() {
            Self::Extend(cost) => Call::post("/v1/leases/{lease}/extend", &Extend { step, cost }, idempotent),
            Self::Adjust(changes) => {
                Call::post("/v1/leases/{lease}/adjust", &Adjust { step, changes }, idempotent)
            }
            Self::Renew(expires_in) => {
                Call::post("/v1/leases/{lease}/renew", &Renew { step, expires_in }, idempotent)
            }
            Self::Settle(actual) => {
                Call::post("/v1/leases/{lease}/settle", &Settle { step, actual }, idempotent)
            }
            Self::Cancel => Call::post("/v1/leases/{lease}/cancel", &Cancel { step }, idempotent),
        };
        call.at(lease)
    }

    const fn is_end(&self) -> bool {
        matches!(self, Self::Settle(_) | Self::Cancel)
    }

    const fn is_renewal(&self) -> bool {
        matches!(self, Self::Renew(_))
    }
}

/// The known state of a lease.
#[derive(Debug, Clone, PartialEq)]
enum State {
    Open,
    /// An ending was sent but not confirmed. No other ending can replace it.
    Ending(Verb),
    Ended(Verb),
    /// It ended, but not by this holder.
    Lost(Box<Problem>),
    /// The handle was detached.
    Detached,
}

/// The holder's record of a lease.
#[derive(Debug)]
pub(super) struct Steps {
    /// The last used step number.
    last: u32,
    /// The operation sent with `last`, if its outcome is unknown.
    unconfirmed: Option<Verb>,
    /// The result of an operation that was confirmed after its caller got an error.
    recovered: Option<(Verb, StepDone)>,
    state: State,
}

/// How to proceed with an operation.
pub(super) enum Dispatch {
    /// Send it with this step number.
    Send(u32),
    /// It was already executed.
    Done(Option<StepDone>),
    /// The lease is closed.
    Rejected(ClientError),
}

impl Steps {
    /// An open lease whose last step was `last`.
    pub(super) const fn after(last: u32) -> Self {
        Self { last, unconfirmed: None, recovered: None, state: State::Open }
    }

    /// Begins an operation. Its step number is used from here on, even if it fails.
    pub(super) fn begin(&mut self, verb: &Verb) -> Dispatch {
        match &self.state {
            State::Open => {}
            State::Ending(end) if end == verb => return Dispatch::Send(self.last),
            State::Ended(end) if end == verb => return Dispatch::Done(None),
            State::Lost(problem) => {
                return Dispatch::Rejected(ClientError::Ended { problem: problem.clone() });
            }
            State::Ending(_) | State::Ended(_) | State::Detached => {
                return Dispatch::Rejected(self.closed_error());
            }
        }
        if let Some((_, done)) = self.recovered.take_if(|(recovered, _)| recovered == verb) {
            return Dispatch::Done(Some(done));
        }
        if !verb.is_renewal() {
            self.recovered = None;
        }
        // A repeated renewal would return the deadline of the first one.
        if self.unconfirmed.as_ref() != Some(verb) || verb.is_renewal() {
            self.last = self.last.saturating_add(1);
            self.unconfirmed = Some(verb.clone());
        }
        if verb.is_end() {
            self.state = State::Ending(verb.clone());
        }
        Dispatch::Send(self.last)
    }

    /// The holder's operation with unknown outcome, to be repeated before another number is used.
    pub(super) fn unconfirmed(&self) -> Option<(Verb, u32)> {
        let unconfirmed = self.unconfirmed.as_ref().filter(|verb| !verb.is_renewal())?;
        Some((unconfirmed.clone(), self.last))
    }

    /// Stores the result of an operation whose caller got an error.
    pub(super) fn store_result(&mut self, verb: Verb, done: StepDone) {
        self.recovered = Some((verb, done));
    }

    /// Completes an operation. Returns whether this revealed that the lease had ended.
    pub(super) fn complete<T>(&mut self, verb: &Verb, result: &Result<T, ClientError>) -> bool {
        match result {
            Ok(_) => {
                self.unconfirmed = None;
                if verb.is_end() {
                    self.state = State::Ended(verb.clone());
                }
            }
            Err(ClientError::Ended { problem }) => {
                self.unconfirmed = None;
                let is_first = matches!(self.state, State::Open | State::Ending(_));
                self.state = State::Lost(problem.clone());
                return is_first;
            }
            Err(error) if error.is_definitive() => {
                self.unconfirmed = None;
                // The server rejected this ending: the lease stays open.
                if verb.is_end() {
                    self.state = State::Open;
                }
            }
            // The outcome is unknown: the number stays reserved for this operation.
            Err(_) => {}
        }
        false
    }

    pub(super) const fn is_open(&self) -> bool {
        matches!(self.state, State::Open)
    }

    pub(super) const fn is_lost(&self) -> bool {
        matches!(self.state, State::Lost(_))
    }

    /// Whether no further operation is possible.
    pub(super) const fn is_closed(&self) -> bool {
        matches!(self.state, State::Ended(_) | State::Lost(_) | State::Detached)
    }

    /// Detaches the lease and returns the ending to send, with its step number. A pending ending is kept.
    pub(super) fn take_ending(&mut self) -> Option<(Verb, u32)> {
        let end = match std::mem::replace(&mut self.state, State::Detached) {
            State::Open => {
                self.last = self.last.saturating_add(1);
                Verb::Cancel
            }
            State::Ending(end) => end,
            State::Ended(_) | State::Lost(_) | State::Detached => return None,
        };
        Some((end, self.last))
    }

    /// Detaches the lease without an ending, unless one is pending.
    pub(super) fn detach(&mut self) {
        if self.is_open() {
            self.state = State::Detached;
        }
    }

    fn closed_error(&self) -> ClientError {
        let how = match &self.state {
            State::Ending(Verb::Cancel) => "is being cancelled",
            State::Ending(_) => "is being settled",
            State::Ended(Verb::Cancel) => "was cancelled",
            State::Ended(_) => "was settled",
            _ => "was detached",
        };
        let detail = format!("the lease {how} by its holder");
        ClientError::Ended {
            problem: Box::new(Problem::new(410, "lease-ended", "The lease has ended", detail)),
        }
    }
}
