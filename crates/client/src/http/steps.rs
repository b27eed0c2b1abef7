//! The steps of a lease as its holder counts them: which number a call has, and what is known of the lease.
//!
//! The server does each number once. A call whose answer was lost keeps its number, so that to say it again does no harm; any
//! other call has a number that was never used, so that no answer to another call is taken for its own.

use super::ClientError;
use super::call::{Call, Repeat};
use crate::amounts::{Changes, Cost};
use crate::lease::{Adjust, Cancel, Extend, Renew, Settle, StepDone};
use crate::problem::Problem;
use crate::seconds::Seconds;
use crate::text::LeaseRef;

/// What is asked of a lease.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Verb {
    Extend(Cost),
    Adjust(Changes),
    Renew(Seconds),
    Settle(Cost),
    Cancel,
}

impl Verb {
    /// The call that says it.
    pub(super) fn call(&self, lease: &LeaseRef, step: u32) -> Call {
        let post = Repeat::Freely;
        let call = match self.clone() {
            Self::Extend(cost) => Call::post("/v1/leases/{lease}/extend", &Extend { step, cost }, post),
            Self::Adjust(changes) => Call::post("/v1/leases/{lease}/adjust", &Adjust { step, changes }, post),
            Self::Renew(expires_in) => {
                Call::post("/v1/leases/{lease}/renew", &Renew { step, expires_in }, post)
            }
            Self::Settle(actual) => Call::post("/v1/leases/{lease}/settle", &Settle { step, actual }, post),
            Self::Cancel => Call::post("/v1/leases/{lease}/cancel", &Cancel { step }, post),
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

/// What is known of a lease.
#[derive(Debug, Clone, PartialEq)]
enum State {
    Open,
    /// The server was, or is being, told of an end, and has not said that it heard. It stays that end.
    Ending(Verb),
    Ended(Verb),
    /// It ended, and not by its holder.
    Lost(Box<Problem>),
    /// Somebody else goes on with it.
    LetGo,
}

/// What the holder of a lease remembers.
#[derive(Debug)]
pub(super) struct Steps {
    /// The last number that was used.
    last: u32,
    /// What was said with it, if nobody knows what became of it.
    unheard: Option<Verb>,
    /// What became of a call that its caller was not told of.
    found: Option<(Verb, StepDone)>,
    state: State,
}

/// What to do with a call.
pub(super) enum Turn {
    /// Send it with this number.
    Send(u32),
    /// It was done.
    Done(Option<StepDone>),
    /// It cannot be done any more.
    Over(ClientError),
}

impl Steps {
    /// A lease after this step.
    pub(super) const fn after(last: u32) -> Self {
        Self { last, unheard: None, found: None, state: State::Open }
    }

    /// Begins a call. From here on its number is used, whether it is answered or not.
    pub(super) fn begin(&mut self, verb: &Verb) -> Turn {
        match &self.state {
            State::Open => {}
            State::Ending(end) if end == verb => return Turn::Send(self.last),
            State::Ended(end) if end == verb => return Turn::Done(None),
            State::Lost(problem) => return Turn::Over(ClientError::Ended { problem: problem.clone() }),
            State::Ending(_) | State::Ended(_) | State::LetGo => return Turn::Over(self.over()),
        }
        if let Some((_, done)) = self.found.take_if(|(found, _)| found == verb) {
            return Turn::Done(Some(done));
        }
        if !verb.is_renewal() {
            self.found = None;
        }
        // A renewal that is said again would be answered with the time of the first.
        if self.unheard.as_ref() != Some(verb) || verb.is_renewal() {
            self.last = self.last.saturating_add(1);
            self.unheard = Some(verb.clone());
        }
        if verb.is_end() {
            self.state = State::Ending(verb.clone());
        }
        Turn::Send(self.last)
    }

    /// What its holder said and was not answered: to be said again before anything else takes a number.
    pub(super) fn unanswered(&self) -> Option<(Verb, u32)> {
        let unheard = self.unheard.as_ref().filter(|verb| !verb.is_renewal())?;
        Some((unheard.clone(), self.last))
    }

    /// A call was done, and its caller was not told of it.
    pub(super) fn keep(&mut self, verb: Verb, done: StepDone) {
        self.found = Some((verb, done));
    }

    /// A call was answered, or given up. Answers whether the lease was found to have ended.
    pub(super) fn end<T>(&mut self, verb: &Verb, answer: &Result<T, ClientError>) -> bool {
        match answer {
            Ok(_) => {
                self.unheard = None;
                if verb.is_end() {
                    self.state = State::Ended(verb.clone());
                }
            }
            Err(ClientError::Ended { problem }) => {
                self.unheard = None;
                let is_news = matches!(self.state, State::Open | State::Ending(_));
                self.state = State::Lost(problem.clone());
                return is_news;
            }
            Err(error) if error.is_answer() => {
                self.unheard = None;
                // The server said no to this end: another may do.
                if verb.is_end() {
                    self.state = State::Open;
                }
            }
            // Nobody knows. The number stays with what was said.
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

    /// Whether nothing can be asked of it any more.
    pub(super) const fn is_over(&self) -> bool {
        matches!(self.state, State::Ended(_) | State::Lost(_) | State::LetGo)
    }

    /// Its holder lets go. Answers what is to be said of it, and with which number: an end that has begun stays that end.
    pub(super) fn drop_it(&mut self) -> Option<(Verb, u32)> {
        let end = match std::mem::replace(&mut self.state, State::LetGo) {
            State::Open => {
                self.last = self.last.saturating_add(1);
                Verb::Cancel
            }
            State::Ending(end) => end,
            State::Ended(_) | State::Lost(_) | State::LetGo => return None,
        };
        Some((end, self.last))
    }

    /// Its holder lets go of it without an end, unless one has begun.
    pub(super) fn let_go(&mut self) {
        if self.is_open() {
            self.state = State::LetGo;
        }
    }

    fn over(&self) -> ClientError {
        let how = match &self.state {
            State::Ending(Verb::Cancel) => "is being cancelled",
            State::Ending(_) => "is being settled",
            State::Ended(Verb::Cancel) => "was cancelled",
            State::Ended(_) => "was settled",
            _ => "was let go of",
        };
        let detail = format!("the lease {how} by its holder");
        ClientError::Ended {
            problem: Box::new(Problem::new(410, "lease-ended", "The lease has ended", detail)),
        }
    }
}
