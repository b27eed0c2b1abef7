//! Drawing from buckets, and what becomes of it: the part of a store that every request meets.

use std::sync::Arc;
use std::time::Duration;

use tidegate_core::limit::cascade::{Deltas, Levels, Line, Units};
use tidegate_core::limit::lease::{Ended, LeaseId, RENEWAL_MAX, Record};
use tidegate_core::limit::meter::Meter;
use tidegate_core::limit::name::{EntityId, ResourceName, Subject};
use tidegate_core::limit::policy::{OnExpiry, Version};
use tidegate_core::limit::rule::Rule;
use tidegate_core::time::Stamp;

use crate::cursor::{entity_cursor, parse_entity};
use crate::engine::{Applied, Change, Engine, Step, Taking};
use crate::entities::Entities;
use crate::error::StoreError;
use crate::page::{Page, Paging};
use crate::reply::Reply;

/// A lease that begins: what it draws, from which levels.
#[derive(Debug, Clone)]
pub struct Draw {
    /// The lease's id, chosen by its holder. The draw is its step 0.
    pub lease: LeaseId,
    /// Whose buckets, and the rules that hold for them.
    pub levels: Arc<Levels>,
    /// How much of each limit; at least one is above 0.
    pub units: Units,
    /// What becomes of it if it is never ended.
    pub terms: Terms,
    /// Whether the readings of a grant are wanted; those of a refusal always are.
    pub is_watched: bool,
}

/// What becomes of a lease that is never ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Terms {
    /// How long after the draw it expires.
    pub deadline: Duration,
    /// What happens then.
    pub on_expiry: OnExpiry,
}

/// A lease that asks for more.
#[derive(Debug, Clone)]
pub struct Extend {
    /// Which lease.
    pub lease: LeaseId,
    /// Its next step.
    pub step: u32,
    /// The levels it drew from.
    pub levels: Arc<Levels>,
    /// How much more of each limit.
    pub units: Units,
}

/// A lease that has used more or less than it drew, and says so before its end.
#[derive(Debug, Clone)]
pub struct Adjust {
    /// Which lease.
    pub lease: LeaseId,
    /// Its next step.
    pub step: u32,
    /// The levels it drew from.
    pub levels: Arc<Levels>,
    /// More, or less, of each limit.
    pub deltas: Deltas,
}

/// A lease that is to stay open for longer.
#[derive(Debug, Clone)]
pub struct Renew {
    /// Which lease.
    pub lease: LeaseId,
    /// Its next step.
    pub step: u32,
    /// The levels it drew from.
    pub levels: Arc<Levels>,
    /// How long from now on it has: at most [`RENEWAL_MAX`](tidegate_core::limit::lease::RENEWAL_MAX).
    pub span: Duration,
}

/// A lease that ends, and what it used.
#[derive(Debug, Clone)]
pub struct Settle {
    /// Which lease.
    pub lease: LeaseId,
    /// Its next step.
    pub step: u32,
    /// The levels it drew from.
    pub levels: Arc<Levels>,
    /// What it used of each limit; `None` is what it holds.
    pub actual: Units,
    /// Whether the readings are wanted: most who settle are done.
    pub is_watched: bool,
}

/// A lease that ends as if it had never been.
#[derive(Debug, Clone)]
pub struct Cancel {
    /// Which lease.
    pub lease: LeaseId,
    /// Its next step.
    pub step: u32,
    /// The levels it drew from, or was to.
    pub levels: Arc<Levels>,
    /// Whether the readings are wanted.
    pub is_watched: bool,
}

/// The answer to a draw.
#[derive(Debug, Clone)]
pub enum Drawn {
    /// All of it was drawn.
    Granted(Moved),
    /// None of it was: the readings tell which limits are short.
    Refused(Moved),
}

/// What a call moved, by the store's clock.
#[derive(Debug, Clone)]
pub struct Moved {
    /// When it was decided. A repeat tells when it was decided first.
    pub at: Stamp,
    /// It was done before: this is the answer of then, and nothing moved now.
    pub is_repeat: bool,
    /// Each limit of each level that took part, its own level first. A repeat may leave them out, and so may a grant
    /// and an ending that nobody watches.
    pub readings: Readings,
}

/// The answer to a renewal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Renewed {
    /// When it was decided. A repeat tells when it was decided first.
    pub at: Stamp,
    /// It was done before: this is the answer of then.
    pub is_repeat: bool,
    /// When the lease expires.
    pub deadline: Stamp,
}

/// What a store knows of a lease.
#[derive(Debug, Clone)]
pub enum Standing {
    /// It is open.
    Open(Held),
    /// It has ended, not long ago.
    Ended(Ended),
}

/// An open lease as the store has it.
#[derive(Debug, Clone)]
pub struct Held {
    /// When it was looked at.
    pub at: Stamp,
    /// The levels it drew from: what its further steps name.
    pub levels: Arc<Levels>,
    /// What it holds of each, its last step and its deadline.
    pub record: Record,
}

/// The readings of a call.
pub type Readings = Vec<Reading>;

/// One limit of one level after a call.
#[derive(Debug, Clone)]
pub struct Reading {
    /// Which of the [`Levels`].
    pub level: usize,
    /// The limit's place in [`Levels::names`].
    pub name: usize,
    /// What the call took; below zero is what it gave back.
    pub moved: i64,
    bucket: tidegate_core::bucket::Bucket<Stamp>,
    version: Version,
    consumed: i64,
    /// The rule that the limit follows, where it is not the caller's: to count who shares a rule takes time.
    rule: Option<Arc<Rule>>,
}

impl Reading {
    /// The limit of `line` on the level numbered `level`, whose state after the call is `meter`.
    #[inline]
    pub fn new(level: usize, line: &Line, moved: i64, meter: &Meter) -> Self {
        let is_callers = Arc::ptr_eq(meter.rule(), &line.rule);
        Self {
            level,
            name: line.name,
            moved,
            bucket: *meter.bucket(),
            version: meter.version(),
            consumed: meter.consumed(),
            rule: (!is_callers).then(|| Arc::clone(meter.rule())),
        }
    }

    /// The same for a caller whose levels are not the `drawn` ones that it was read with: it tells its rule itself.
    pub(crate) fn for_others(mut self, drawn: &Levels) -> Self {
        self.rule = Some(Arc::clone(self.meter(drawn).rule()));
        self
    }

    /// The limit's state after the call, which was made with `levels`.
    ///
    /// # Panics
    /// With other levels.
    pub fn meter(&self, levels: &Levels) -> Meter {
        let rule = self.rule.clone().unwrap_or_else(|| {
            let mut lines = levels.levels()[self.level].limits.iter();
            let line = lines.find(|line| line.name == self.name).expect("the levels of the call");
            Arc::clone(&line.rule)
        });
        Meter::restored(self.bucket, rule, self.version, self.consumed)
    }

    /// The newest version that a caller has brought to the limit.
    pub const fn version(&self) -> Version {
        self.version
    }
}

/// Whose buckets to look at.
#[derive(Debug, Clone)]
pub enum Lookup {
    /// These.
    Subjects(Vec<Subject>),
    /// Every bucket of these entities.
    Entities(Vec<EntityId>),
    /// Every bucket of an entity, and of those above it that it cascades to.
    Lineage(EntityId),
}

/// Buckets as they were found.
#[derive(Debug, Clone)]
pub struct Seen {
    /// When.
    pub at: Stamp,
    /// How far the store's time is ahead of its clock, because the clock stepped back.
    pub clock_offset: Duration,
    /// Those that are there; what is not there is full.
    pub buckets: Vec<Bucket>,
}

/// A subject's limits as they were found.
#[derive(Debug, Clone)]
pub struct Bucket {
    /// Whose.
    pub subject: Subject,
    /// When.
    pub at: Stamp,
    /// Every limit that was ever drawn, by row.
    pub meters: Vec<Meter>,
}

/// Draws, leases and balances.
///
/// # The contract
///
/// *All or nothing.* A draw or an extension takes from every limit of every level that its units name, or from
/// none. Concurrent calls are decided one after the other, each at one reading of the store's clock.
///
/// *The rule.* A limit admits `units` when they are there, exactly: in every span of time *t*, what is taken less
/// what is given back is at most burst + rate·*t*, whatever the polling. Zero units ask only that the limit is not
/// in debt. More than the burst is never there.
///
/// *Rules change.* A bucket keeps the newest version a caller has brought, and that caller's rule; the level stays,
/// capped to the new burst. A call that brings an older version is decided by the rule that is there. The readings of a
/// refusal tell of every limit that took part by the rule that holds after it.
///
/// *Each step counts once.* A call with the lease and step of one that was done is answered as the first time
/// and moves nothing. One with an earlier step is refused ([`Late`](crate::StoreError::Late)), one on a lease that
/// has ended too ([`Ended`](crate::StoreError::Ended)), except the same ending again. What was refused was not
/// done. An ended lease is remembered for ten minutes. A store may have a bound for how many it remembers; it then refuses
/// a draw that it may have forgotten, by the time in its id, as one that has ended. An id that a caller has
/// [chosen](LeaseId::is_chosen) has no time, and draws if it is not known; no store gives its lease back because nobody
/// waited for the answer.
///
/// *A cancel comes first or last.* Cancelling a lease that is not known leaves a mark, and its draw is refused when
/// it arrives.
///
/// *Deadlines.* A lease past its deadline ends by itself: settled at what it holds, or returned, as its terms say.
/// A store does so no later than [`sweep`](crate::Store::sweep) is called, the lease is looked at, or a step of it arrives:
/// an extension, adjustment, renewal, settle or cancel after the deadline changes nothing else and is answered as on a lease
/// that has [expired](tidegate_core::limit::lease::Ending::Expired). A renewal moves the deadline forward, by the store's
/// clock, and never back; it changes nothing of what is held.
///
/// *The ledger* is written with what ends the lease, in one transaction, and stamped with the draw's time.
pub trait Buckets {
    /// Takes what is asked of every level, or nothing.
    fn draw<'a>(&'a self, draw: &'a Draw) -> Reply<'a, Drawn>;

    /// Takes more for a lease, or nothing; the lease stays as it is if it is refused.
    fn extend<'a>(&'a self, extend: &'a Extend) -> Reply<'a, Drawn>;

    /// Takes or gives back, and is never refused: what is missing is debt. No more is given back than is held.
    fn adjust<'a>(&'a self, adjust: &'a Adjust) -> Reply<'a, Moved>;

    /// Gives a lease more time from now on; one that has more is left with it. A span above
    /// [`RENEWAL_MAX`](tidegate_core::limit::lease::RENEWAL_MAX) is [invalid](crate::StoreError::Invalid).
    fn renew<'a>(&'a self, renew: &'a Renew) -> Reply<'a, Renewed>;

    /// Ends a lease at what it used, which may leave a debt, and writes it to the ledger.
    fn settle<'a>(&'a self, settle: &'a Settle) -> Reply<'a, Moved>;

    /// Ends a lease and gives back all it holds. Nothing is written to the ledger.
    fn cancel<'a>(&'a self, cancel: &'a Cancel) -> Reply<'a, Moved>;

    /// Draws and settles at once. The lease is remembered as one that was settled at its first step.
    fn spend<'a>(&'a self, draw: &'a Draw) -> Reply<'a, Drawn>;

    /// What is known of a lease, for those who have nothing but its id. One that never drew, or ended long ago, is
    /// [not known](crate::StoreError::NoLease).
    fn lease(&self, lease: LeaseId) -> Reply<'_, Standing>;

    /// Buckets as they are, in one round trip. Nothing is written.
    fn balances<'a>(&'a self, lookup: &'a Lookup) -> Reply<'a, Seen>;

    /// The buckets of a resource, by entity.
    fn buckets<'a>(&'a self, resource: &'a ResourceName, paging: &'a Paging) -> Reply<'a, Page<Bucket>>;
}

impl<E: Engine> Buckets for E {
    #[inline]
    fn draw<'a>(&'a self, draw: &'a Draw) -> Reply<'a, Drawn> {
        self.apply_step(draw.as_step(Taking::Open(draw.terms))).map(Applied::drawn)
    }

    #[inline]
    fn spend<'a>(&'a self, draw: &'a Draw) -> Reply<'a, Drawn> {
        self.apply_step(draw.as_step(Taking::Spend)).map(Applied::drawn)
    }

    fn extend<'a>(&'a self, extend: &'a Extend) -> Reply<'a, Drawn> {
        self.apply_step(extend.as_step()).map(Applied::drawn)
    }

    fn adjust<'a>(&'a self, adjust: &'a Adjust) -> Reply<'a, Moved> {
        self.apply_step(adjust.as_step()).map(Applied::moved)
    }

    fn renew<'a>(&'a self, renew: &'a Renew) -> Reply<'a, Renewed> {
        if let Err(error) = check_renewal(renew.span) {
            return Reply::ready(Err(error));
        }
        self.apply_step(renew.as_step()).map(Applied::renewed)
    }

    #[inline]
    fn settle<'a>(&'a self, settle: &'a Settle) -> Reply<'a, Moved> {
        self.apply_step(settle.as_step()).map(Applied::moved)
    }

    fn cancel<'a>(&'a self, cancel: &'a Cancel) -> Reply<'a, Moved> {
        self.apply_step(cancel.as_step()).map(Applied::moved)
    }

    fn lease(&self, lease: LeaseId) -> Reply<'_, Standing> {
        self.find_lease(lease)
    }

    fn balances<'a>(&'a self, lookup: &'a Lookup) -> Reply<'a, Seen> {
        let Lookup::Lineage(entity) = lookup else { return self.look(lookup) };
        Reply::after(self.about().is_immediate, async move {
            let mut entities = vec![entity.clone()];
            for above in self.lineage(entity).await? {
                entities.extend(above.value.next().cloned());
            }
            self.look(&Lookup::Entities(entities)).await
        })
    }

    fn buckets<'a>(&'a self, resource: &'a ResourceName, paging: &'a Paging) -> Reply<'a, Page<Bucket>> {
        Reply::after(self.about().is_immediate, async move {
            let after = paging.cursor().map(parse_entity).transpose()?;
            let found = self.scan_buckets(resource, after, paging.max() + 1).await?;
            Ok(Page::cut(found, paging, |bucket| entity_cursor(&bucket.subject.entity)))
        })
    }
}

/// A renewal is for no longer than it may be.
pub(crate) fn check_renewal(span: Duration) -> Result<(), StoreError> {
    if span <= RENEWAL_MAX {
        return Ok(());
    }
    Err(StoreError::Invalid { what: format!("a renewal for {span:?}, more than {RENEWAL_MAX:?}") })
}

impl Draw {
    #[inline]
    pub(crate) const fn as_step(&self, taking: Taking) -> Step<'_> {
        let Self { lease, levels, units, is_watched, .. } = self;
        Step {
            lease: *lease,
            number: 0,
            levels,
            change: Change::Take(units, taking),
            is_watched: *is_watched,
        }
    }
}

impl Extend {
    pub(crate) const fn as_step(&self) -> Step<'_> {
        let Self { lease, step, levels, units } = self;
        let change = Change::Take(units, Taking::Extend);
        Step { lease: *lease, number: *step, levels, change, is_watched: true }
    }
}

impl Adjust {
    pub(crate) const fn as_step(&self) -> Step<'_> {
        let Self { lease, step, levels, deltas } = self;
        Step { lease: *lease, number: *step, levels, change: Change::Shift(deltas), is_watched: true }
    }
}

impl Renew {
    pub(crate) const fn as_step(&self) -> Step<'_> {
        let Self { lease, step, levels, span } = self;
        Step { lease: *lease, number: *step, levels, change: Change::Renew(*span), is_watched: false }
    }
}

impl Settle {
    #[inline]
    pub(crate) const fn as_step(&self) -> Step<'_> {
        let Self { lease, step, levels, actual, is_watched } = self;
        let change = Change::End(Some(actual));
        Step { lease: *lease, number: *step, levels, change, is_watched: *is_watched }
    }
}

impl Cancel {
    pub(crate) const fn as_step(&self) -> Step<'_> {
        let Self { lease, step, levels, is_watched } = self;
        Step { lease: *lease, number: *step, levels, change: Change::End(None), is_watched: *is_watched }
    }
}
