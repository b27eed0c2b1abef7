//! The permit to run one request, which returns its capacity when it ends.

use std::sync::Arc;

use tidegate_core::cost::{Charge, Cost};
use tidegate_core::outcome::Outcome;

use crate::keyed::key_ref::KeyRef;
use crate::run::Spend;
use crate::throttle::Inner;

/// Permission to run one request.
///
/// Settle it with the outcome of the work. Dropping it, by an early return, a cancelled task or a panic,
/// counts as ignored: what it holds (slots, bytes, a probe) returns, what admission spent (pace, rate) stays
/// spent, tokens reported by [`spend`](Self::spend) stay used, and nothing is learned.
///
/// It borrows its throttle. To store it, or to send it to another task, call
/// [`into_owned`](Self::into_owned).
#[derive(Debug)]
#[must_use = "dropping a permit gives it back at once"]
// The charge first: it is moved in units of 16 bytes, which the loads of a moved permit then match.
#[repr(C)]
pub struct Permit<'a> {
    /// Taken by settling; a charge left on drop is settled as ignored.
    pub(crate) charge: Option<Charge>,
    /// Boxed: most permits report nothing.
    reported: Option<Box<Cost>>,
    throttle: ThrottleRef<'a>,
}

/// The throttle of a permit.
#[derive(Debug, Clone)]
enum ThrottleRef<'a> {
    Borrowed(&'a Arc<Inner>),
    Owned(Arc<Inner>),
    /// A key that may have none.
    Key(KeyRef),
}

impl<'a> Permit<'a> {
    #[inline]
    pub(crate) const fn new(inner: &'a Arc<Inner>, charge: Charge) -> Self {
        Self { throttle: ThrottleRef::Borrowed(inner), charge: Some(charge), reported: None }
    }

    /// A permit with its own handle to the throttle.
    #[inline]
    pub(crate) const fn owned(inner: Arc<Inner>, charge: Charge) -> Permit<'static> {
        Permit { throttle: ThrottleRef::Owned(inner), charge: Some(charge), reported: None }
    }

    /// A permit of a key without a throttle.
    #[inline]
    pub(crate) const fn of_key(key: KeyRef, charge: Charge) -> Permit<'static> {
        Permit { throttle: ThrottleRef::Key(key), charge: Some(charge), reported: None }
    }

    /// The same permit with its own handle to the throttle, so that it can be stored or sent to another task.
    ///
    /// ```
    /// use tidegate::{Cost, Outcome, Permit, Throttle};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let permit: Permit<'static> = Throttle::new().acquire(Cost::request()).await?.into_owned();
    /// tokio::spawn(async move { permit.settle(Outcome::success()) }).await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn into_owned(mut self) -> Permit<'static> {
        let throttle = match &self.throttle {
            ThrottleRef::Borrowed(inner) => ThrottleRef::Owned(Arc::clone(inner)),
            ThrottleRef::Owned(inner) => ThrottleRef::Owned(Arc::clone(inner)),
            ThrottleRef::Key(key) => ThrottleRef::Key(*key),
        };
        Permit { throttle, charge: self.charge.take(), reported: self.reported.take() }
    }

    /// Ends the request.
    #[inline]
    pub fn settle(mut self, outcome: Outcome) {
        if !self.settle_plain(outcome.is_always_learned()) {
            self.settle_charge(&outcome);
        }
    }

    /// Reports the outcome of a part of the work before the end: several requests of a batch under one
    /// permit.
    ///
    /// The throttle learns from it as from a separate request; its tokens add to the tokens reported.
    pub fn record(&mut self, outcome: Outcome) {
        if let Some(spent) = outcome.spent_cost() {
            self.spend(spent);
        }
        if self.charge.is_some() {
            let inner = Arc::clone(self.inner());
            inner.record(self.charge.as_mut(), outcome);
        }
    }

    /// Reports tokens as they are used: a number, or the tokens of a cost. They stay used regardless of how the
    /// request ends. A number does not say of which kind they are: budgets of one kind then keep its estimate.
    ///
    /// What exceeds the estimate counts in the budgets at once, so that a long stream delays other callers while it
    /// runs.
    pub fn spend(&mut self, tokens: impl Into<Cost>) {
        let (before, reported) = self.add_reported(tokens.into());
        if let Some((inner, charge)) = self.budgets()
            && let Some((state, effects)) = inner.book(charge, before, reported)
        {
            inner.release(state, effects);
        }
    }

    /// Adds tokens to those reported. Returns the sums before and now.
    fn add_reported(&mut self, tokens: Cost) -> (Option<Cost>, Cost) {
        let before = self.reported.as_deref().copied();
        let reported = before.map_or(tokens, |before| before.plus_tokens(tokens));
        **self.reported.get_or_insert_default() = reported;
        (before, reported)
    }

    /// The throttle whose budgets count what is reported, and what it has reserved there.
    pub(crate) fn budgets(&self) -> Option<(&Arc<Inner>, &Charge)> {
        let inner = match &self.throttle {
            ThrottleRef::Borrowed(inner) => inner,
            ThrottleRef::Owned(inner) => inner,
            // It has no budget.
            ThrottleRef::Key(_) => return None,
        };
        Some((inner, self.charge.as_ref()?))
    }

    /// Tokens reported so far, of all kinds.
    pub fn reported(&self) -> u64 {
        self.reported.as_ref().map_or(0, |reported| reported.total_tokens())
    }

    /// The cost requested.
    pub fn cost(&self) -> Cost {
        self.charge.as_ref().map_or_else(Cost::request, Charge::cost)
    }

    /// Whether this request probes a half-open circuit.
    pub fn is_probe(&self) -> bool {
        self.charge.as_ref().is_some_and(Charge::is_probe)
    }

    /// Its throttle. A key gets one if it has none.
    pub(crate) fn inner(&mut self) -> &Arc<Inner> {
        if let ThrottleRef::Key(key) = &self.throttle {
            self.throttle = ThrottleRef::Owned(key.throttle());
        }
        match &self.throttle {
            ThrottleRef::Borrowed(inner) => inner,
            ThrottleRef::Owned(inner) => inner,
            ThrottleRef::Key(_) => unreachable!("it was just replaced"),
        }
    }

    /// The fast path, which needs no outcome: nothing learns. Returns `false` if nothing was done.
    #[inline]
    fn settle_plain(&mut self, is_always_learned: bool) -> bool {
        let Some(charge) = &self.charge else { return true };
        // By reference: usually only a slot returns, which needs no move of the charge.
        let is_done = match &self.throttle {
            ThrottleRef::Borrowed(inner) => inner.settle_plain(charge, is_always_learned),
            ThrottleRef::Owned(inner) => inner.settle_plain(charge, is_always_learned),
            // Nothing learns from a rate.
            ThrottleRef::Key(_) => !is_always_learned,
        };
        if is_done {
            self.charge = None;
        }
        is_done
    }

    /// The slow path.
    #[inline]
    fn settle_charge(&mut self, outcome: &Outcome) {
        let Some(charge) = self.charge.take() else { return };
        let reported = self.reported.take();
        match &self.throttle {
            ThrottleRef::Borrowed(inner) => inner.settle_apart(charge, reported, outcome),
            ThrottleRef::Owned(inner) => inner.settle_apart(charge, reported, outcome),
            ThrottleRef::Key(key) => key.throttle().settle_apart(charge, reported, outcome),
        }
    }
}

impl Spend for Permit<'static> {
    fn add(&mut self, tokens: Cost) -> (&Permit<'static>, Option<Cost>, Cost) {
        let (before, reported) = self.add_reported(tokens);
        (self, before, reported)
    }
}

impl Drop for Permit<'_> {
    #[inline]
    fn drop(&mut self) {
        if !self.settle_plain(false) {
            self.settle_charge(&Outcome::ignored());
        }
    }
}
