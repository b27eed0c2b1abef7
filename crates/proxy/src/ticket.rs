//! What a call holds: its place at the upstream, and its tenant's limits. It is settled exactly once, however
//! the call ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tidegate::{Outcome, Permit};

use crate::estimate::{Estimates, UsageSample, input_max, output_max};
use crate::profile::{Profile, Tokens};
use crate::tenant::{CallTokens, TenantLease};
use crate::usage::{StreamError, Usage};

/// What a call is about.
#[derive(Debug)]
pub(crate) struct CallInfo {
    pub(crate) profile: Arc<Profile>,
    /// The entity; empty without a tenant.
    pub(crate) tenant: String,
    /// The model, if the call names one.
    pub(crate) model: Option<String>,
    /// Whether tokens are estimated: of a call that names a model, and of other JSON.
    pub(crate) has_estimate: bool,
    /// Whether the response may report usage.
    pub(crate) reads_usage: bool,
    /// The size of the request.
    pub(crate) bytes: u64,
    pub(crate) tokens: Tokens,
}

/// What a call holds.
#[derive(Debug)]
pub(crate) struct Ticket {
    info: CallInfo,
    estimates: Arc<Estimates>,
    counts: Arc<Counts>,
    permit: Option<Permit<'static>>,
    lease: Option<TenantLease>,
    /// Whether the upstream may have received the call.
    is_sent: bool,
}

/// How a call ended.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Ending {
    /// The upstream did not do it: never sent, or an error.
    NotDone,
    /// The upstream may have done it, and its response is lost.
    Unknown,
    /// It responded.
    Response {
        /// The usage that the response reported.
        usage: Usage,
        /// Whether the response was received to its end.
        is_complete: bool,
    },
}

/// What the proxy has counted since it started.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) calls: AtomicU64,
    /// Refused by the limits of a tenant.
    pub(crate) refused_by_limits: AtomicU64,
    /// Refused because the store of the limits and tokens was unavailable.
    pub(crate) refused_by_store: AtomicU64,
    /// Refused because the upstream would not accept them in time.
    pub(crate) refused_by_upstream: AtomicU64,
    /// Attempts that the upstream rejected and that were repeated.
    pub(crate) retries: AtomicU64,
    /// Responses that passed with a 429 or 529.
    pub(crate) rejected: AtomicU64,
    /// Calls that were booked at estimates.
    pub(crate) estimated: AtomicU64,
    /// Calls without a response.
    pub(crate) failed: AtomicU64,
    pub(crate) input_tokens: AtomicU64,
    pub(crate) output_tokens: AtomicU64,
}

pub(crate) fn count(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}

impl Ticket {
    pub(crate) const fn new(
        info: CallInfo,
        estimates: Arc<Estimates>,
        counts: Arc<Counts>,
        lease: Option<TenantLease>,
    ) -> Self {
        Self { info, estimates, counts, permit: None, lease, is_sent: false }
    }

    pub(crate) const fn info(&self) -> &CallInfo {
        &self.info
    }

    /// The upstream accepts the call, which is sent now.
    pub(crate) fn send(&mut self, permit: Permit<'static>) {
        self.permit = Some(permit);
        self.is_sent = true;
    }

    /// The throttle learns from the beginning of a response.
    pub(crate) fn learn(&mut self, outcome: Outcome) {
        if let Some(permit) = &mut self.permit {
            permit.record(outcome);
        }
    }

    /// The upstream rejected the call, which is to be repeated: its place returns.
    pub(crate) fn retry(&mut self, outcome: Outcome) {
        count(&self.counts.retries, 1);
        if let Some(permit) = self.permit.take() {
            permit.settle(outcome.retried());
        }
        self.is_sent = false;
    }

    /// Settles the call.
    pub(crate) fn end(mut self, ending: Ending) {
        self.settle(ending);
    }

    fn settle(&mut self, ending: Ending) {
        let (used, is_estimated) = match ending {
            Ending::NotDone => {
                drop(self.permit.take());
                if let Some(lease) = self.lease.take() {
                    lease.cancel();
                }
                return;
            }
            Ending::Unknown => (self.estimated(Usage::default()), self.info.has_estimate),
            Ending::Response { usage, is_complete } => self.used(usage, is_complete),
        };
        if is_estimated {
            count(&self.counts.estimated, 1);
        } else if self.info.has_estimate && used != CallTokens::default() {
            let CallInfo { tenant, model, bytes, tokens, .. } = &self.info;
            let (bytes, estimate) = (*bytes, tokens.input);
            let sample = UsageSample { bytes, estimate, input: used.input, output: used.output };
            self.estimates.learn(tenant, model.as_deref().unwrap_or_default(), sample);
        }
        count(&self.counts.input_tokens, used.input);
        count(&self.counts.output_tokens, used.output);
        if let Some(mut permit) = self.permit.take() {
            if let Ending::Response { usage: Usage { error: Some(error), .. }, .. } = ending {
                permit.record(match error {
                    StreamError::Overload => Outcome::overload(),
                    StreamError::Other => Outcome::failure(),
                });
            }
            let spent = self.info.profile.spent(permit.cost(), used.input, used.output);
            // The outcome was learned from the beginning of the response.
            permit.settle(Outcome::ignored().spent(spent));
        }
        if let Some(lease) = self.lease.take() {
            lease.settle(used, is_estimated);
        }
    }

    /// What a response used, and whether that is an estimate.
    fn used(&self, usage: Usage, is_complete: bool) -> (CallTokens, bool) {
        if !self.info.reads_usage {
            return (CallTokens::default(), false);
        }
        let plausible = self.plausible(usage);
        let is_complete = is_complete && usage.has_ended && plausible == usage;
        let usage = plausible;
        match (usage.input, usage.output) {
            (Some(input), output) if is_complete && usage.error.is_none() => {
                (CallTokens { input, output: output.unwrap_or(0) }, false)
            }
            // A call without a model, such as a file or a batch, uses nothing unless the response says so.
            (None, _) if is_complete && usage.error.is_none() && self.info.model.is_none() => {
                (CallTokens::default(), false)
            }
            _ => (self.estimated(usage), self.info.has_estimate),
        }
    }

    /// The usage without numbers that this request and this response cannot have.
    fn plausible(&self, usage: Usage) -> Usage {
        let Tokens { output_max: requested, choices, .. } = self.info.tokens;
        let up_to = |tokens: Option<u64>, max: u64| tokens.filter(|tokens| *tokens <= max);
        Usage {
            input: up_to(usage.input, input_max(self.info.bytes)),
            output: up_to(usage.output, output_max(usage.received, requested, choices)),
            ..usage
        }
    }

    /// An estimate from what is known: about one token per event that arrived.
    fn estimated(&self, usage: Usage) -> CallTokens {
        if !self.info.has_estimate {
            return CallTokens::default();
        }
        let Tokens { input, output, .. } = self.info.tokens;
        let streamed = (usage.events > 0).then(|| usage.output.unwrap_or(0).max(usage.events));
        CallTokens {
            input: usage.input.unwrap_or(input),
            output: streamed.or(usage.output).unwrap_or(output),
        }
    }
}

impl Drop for Ticket {
    /// The caller disconnected before the response began, which cancels the call at the upstream.
    fn drop(&mut self) {
        if self.permit.is_some() || self.lease.is_some() {
            self.settle(if self.is_sent { Ending::Unknown } else { Ending::NotDone });
        }
    }
}
