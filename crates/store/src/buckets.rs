//! Draws from buckets and the steps of leases: the hot path of a store.

use std::sync::Arc;
use std::time::Duration;

use tidegate_core::limit::audit::{self, AuditKey};
use tidegate_core::limit::cascade::{Deltas, Level, Levels, Line, Units};
use tidegate_core::limit::lease::{EndRecord, LeaseId, RENEWAL_MAX, Record};
use tidegate_core::limit::meter::Meter;
use tidegate_core::limit::name::{EntityId, ResourceName, Subject};
use tidegate_core::limit::policy::{OnExpiry, Version, Versioned};
use tidegate_core::limit::rule::Rule;
use tidegate_core::time::Stamp;

use crate::cursor::{entity_cursor, parse_entity};
use crate::engine::{Change, Engine, Step, StepResult, TakeMode};
use crate::entities::Entities;
use crate::error::StoreError;
use crate::page::{Page, Paging};
use crate::records::note_change;
use crate::reply::Reply;

/// A request to open a lease: the units to draw and the levels to draw from.
#[derive(Debug, Clone)]
pub struct Draw {
    /// The id of the lease, chosen by its holder. The draw is step 0.
    pub lease: LeaseId,
    /// The buckets and their rules.
    pub levels: Arc<Levels>,
    /// The units of each limit; at least one is above 0.
    pub units: Units,
    /// What to do if the lease is never ended.
    pub terms: Terms,
    /// Whether the readings of a grant are wanted; those of a refusal always are.
    pub is_watched: bool,
}

/// What to do with a lease that is never ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Terms {
    /// How long after the draw the lease expires.
    pub deadline: Duration,
    /// What to do when it expires.
    pub on_expiry: OnExpiry,
}

/// A request to take more units for a lease.
#[derive(Debug, Clone)]
pub struct Extend {
    /// The lease.
    pub lease: LeaseId,
    /// Its next step.
    pub step: u32,
    /// The levels it drew from.
    pub levels: Arc<Levels>,
    /// The additional units of each limit.
    pub units: Units,
}

/// A report that a lease uses more or less than it drew.
#[derive(Debug, Clone)]
pub struct Adjust {
    /// The lease.
    pub lease: LeaseId,
    /// Its next step.
    pub step: u32,
    /// The levels it drew from.
    pub levels: Arc<Levels>,
    /// The change of each limit.
    pub deltas: Deltas,
}

/// A request to extend the deadline of a lease.
#[derive(Debug, Clone)]
pub struct Renew {
    /// The lease.
    pub lease: LeaseId,
    /// Its next step.
    pub step: u32,
    /// The levels it drew from.
    pub levels: Arc<Levels>,
    /// The time until the new deadline: at most [`RENEWAL_MAX`](tidegate_core::limit::lease::RENEWAL_MAX).
    pub span: Duration,
}

/// A request to end a lease at its actual usage.
#[derive(Debug, Clone)]
pub struct Settle {
    /// The lease.
    pub lease: LeaseId,
    /// Its next step.
    pub step: u32,
    /// The levels it drew from.
    pub levels: Arc<Levels>,
    /// The actual usage of each limit; `None` for the units held.
    pub actual: Units,
    /// Whether the readings are wanted. Most callers ignore them.
    pub is_watched: bool,
}

/// A request to end a lease and return all of its units.
#[derive(Debug, Clone)]
pub struct Cancel {
    /// The lease.
    pub lease: LeaseId,
    /// Its next step.
    pub step: u32,
    /// The levels it drew from, or was to draw from.
    pub levels: Arc<Levels>,
    /// Whether the readings are wanted.
    pub is_watched: bool,
}

/// A request to set the units available in one limit of one bucket.
#[derive(Debug, Clone)]
pub struct Repair {
    /// A new id, by which a retry finds the repair.
    pub lease: LeaseId,
    /// The [bucket and its limit](Levels::single).
    pub levels: Arc<Levels>,
    /// The units that will be available, at most the burst.
    pub units: u64,
}

/// The result of a draw.
#[derive(Debug, Clone)]
pub enum DrawResult {
    /// All units were drawn.
    Granted(Movement),
    /// Nothing was drawn. The readings show which limits are short.
    Refused(Movement),
}

/// The units that a call moved.
#[derive(Debug, Clone)]
pub struct Movement {
    /// When the store decided, by its clock; for a repeat, when it decided first.
    pub at: Stamp,
    /// Whether the step was applied before. This is then the first result, and nothing moved now.
    pub is_repeat: bool,
    /// The state of each limit of each level that took part, the subject's own level first. May be empty for
    /// a repeat, and for a grant or an ending without `is_watched`.
    pub readings: Readings,
}

/// The result of a renewal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Renewal {
    /// When the store decided, by its clock; for a repeat, when it decided first.
    pub at: Stamp,
    /// Whether the step was applied before. This is then the first result.
    pub is_repeat: bool,
    /// The deadline of the lease.
    pub deadline: Stamp,
}

/// The state of a lease.
#[derive(Debug, Clone)]
pub enum LeaseStatus {
    /// The lease is open.
    Open(LeaseSnapshot),
    /// The lease has ended recently.
    Ended(EndRecord),
}

/// An open lease.
#[derive(Debug, Clone)]
pub struct LeaseSnapshot {
    /// When it was read.
    pub at: Stamp,
    /// The levels it drew from, which its further steps must name.
    pub levels: Arc<Levels>,
    /// Its units, last step and deadline.
    pub record: Record,
}

/// The readings of a call.
pub type Readings = Vec<Reading>;

/// The state of one limit of one level after a call.
#[derive(Debug, Clone)]
pub struct Reading {
    /// The index of the level in [`Levels`].
    pub level: usize,
    /// The index of the limit in [`Levels::names`].
    pub name: usize,
    /// The units that the call took; below zero, units returned.
    pub moved: i64,
    bucket: tidegate_core::bucket::Bucket<Stamp>,
    version: Version,
    consumed: i64,
    /// The rule of the limit, if it differs from the caller's: cloning an `Arc` has a cost.
    rule: Option<Arc<Rule>>,
}

impl Reading {
    /// The reading of `line` on level `level`, whose state after the call is `meter`.
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

    /// The reading for a caller with other levels than the `drawn` ones it was taken with: it includes its
    /// rule.
    pub(crate) fn for_others(mut self, drawn: &Levels) -> Self {
        self.rule = Some(Arc::clone(self.meter(drawn).rule()));
        self
    }

    /// The limit's state after the call, which was made with `levels`.
    ///
    /// # Panics
    /// If `levels` are not those of the call.
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

/// The buckets to read.
#[derive(Debug, Clone)]
pub enum Lookup {
    /// The buckets of these subjects.
    Subjects(Vec<Subject>),
    /// All buckets of these entities.
    Entities(Vec<EntityId>),
    /// All buckets of an entity and of the ancestors that it cascades to.
    Lineage(EntityId),
}

/// A snapshot of buckets.
#[derive(Debug, Clone)]
pub struct BucketSnapshot {
    /// When they were read.
    pub at: Stamp,
    /// How far the store's time is ahead of its clock because the clock was set back.
    pub clock_offset: Duration,
    /// The buckets that exist. A bucket that does not exist is full.
    pub buckets: Vec<Bucket>,
}

/// A snapshot of a subject's limits.
#[derive(Debug, Clone)]
pub struct Bucket {
    /// The subject.
    pub subject: Subject,
    /// When it was read.
    pub at: Stamp,
    /// Every limit that was ever drawn from, by row.
    pub meters: Vec<Meter>,
}

/// Draws, leases and balances.
///
/// # The contract
///
/// *All or nothing.* A draw or an extension takes from every limit of every level that its units name, or
/// from none. Concurrent calls are decided one after the other, each at one reading of the store's clock.
///
/// *The rule.* A limit admits `units` exactly when they are available: in every span of time *t*, units taken
/// minus units returned are at most burst + rate·*t*, regardless of polling. Zero units only require that the
/// limit is not in debt. More than the burst is never available.
///
/// *Rules change.* A bucket keeps the newest version that a caller has brought, with that caller's rule; the
/// level stays, capped to the new burst. A call with an older version is decided by the current rule. The
/// readings of a refusal have every limit that took part, with the rule that is current after the call.
///
/// *Steps are idempotent.* A call with the lease and step of the last one returns its result and moves
/// nothing. An earlier step is refused ([`Late`](crate::StoreError::Late)), and so is a step of a lease that
/// has ended ([`Ended`](crate::StoreError::Ended)), except a retry of the same ending. A refused step does
/// not count as applied. The record of an ended lease is kept for ten minutes. A store may bound the number
/// of these records; it then refuses a draw whose record it may have dropped, by the time in its id, as one
/// that has ended. An id [chosen](LeaseId::is_chosen) by a caller has no time, and draws if it is unknown; no
/// store returns its units because the reply was dropped.
///
/// *A cancel may overtake its draw.* Cancelling an unknown lease leaves a tombstone, which refuses the draw
/// when it arrives.
///
/// *Deadlines.* A lease past its deadline ends by itself: settled at the units it holds, or returned,
/// according to its terms. The store ends it at the latest when [`sweep`](crate::Store::sweep) is called, the
/// lease is read, or a step of it arrives: an extension, adjustment, renewal, settle or cancel after the
/// deadline changes nothing else and fails as for a lease that has
/// [expired](tidegate_core::limit::lease::Ending::Expired). A renewal moves the deadline forward by the
/// store's clock, never back, and keeps the units held.
///
/// *The ledger* is written in the transaction that ends the lease, in the windows of the draw's time.
pub trait Buckets {
    /// Takes the units from every level, or nothing.
    fn draw<'a>(&'a self, draw: &'a Draw) -> Reply<'a, DrawResult>;

    /// Takes more units for a lease, or nothing. A refusal leaves the lease as it is.
    fn extend<'a>(&'a self, extend: &'a Extend) -> Reply<'a, DrawResult>;

    /// Takes or returns units. Never refused: missing units become debt. No more is returned than is held.
    fn adjust<'a>(&'a self, adjust: &'a Adjust) -> Reply<'a, Movement>;

    /// Extends the deadline of a lease, unless it is later already. A span above
    /// [`RENEWAL_MAX`](tidegate_core::limit::lease::RENEWAL_MAX) is [invalid](crate::StoreError::Invalid).
    fn renew<'a>(&'a self, renew: &'a Renew) -> Reply<'a, Renewal>;

    /// Ends a lease at its actual usage, which may leave a debt, and writes the usage to the ledger.
    fn settle<'a>(&'a self, settle: &'a Settle) -> Reply<'a, Movement>;

    /// Ends a lease and returns all of its units. Nothing is written to the ledger.
    fn cancel<'a>(&'a self, cancel: &'a Cancel) -> Reply<'a, Movement>;

    /// Draws and settles at once. The lease counts as settled at its first step.
    fn spend<'a>(&'a self, draw: &'a Draw) -> Reply<'a, DrawResult>;

    /// Sets the units available in one limit, whether it is in debt or not. The audit entry is written first: if the
    /// call fails between the two, the audit has a repair that was not made. Open leases keep their units, and
    /// return them. Returns the version of the audit entry with the result.
    fn repair<'a>(&'a self, repair: &'a Repair, actor: &'a str) -> Reply<'a, Versioned<Movement>>;

    /// The state of a lease by its id. A lease that never drew, or ended long ago, is
    /// [unknown](crate::StoreError::NoLease).
    fn lease(&self, lease: LeaseId) -> Reply<'_, LeaseStatus>;

    /// Reads buckets, in one round trip. Nothing is written.
    fn balances<'a>(&'a self, lookup: &'a Lookup) -> Reply<'a, BucketSnapshot>;

    /// The buckets of a resource, by entity.
    fn buckets<'a>(&'a self, resource: &'a ResourceName, paging: &'a Paging) -> Reply<'a, Page<Bucket>>;
}

impl<E: Engine> Buckets for E {
    #[inline]
    fn draw<'a>(&'a self, draw: &'a Draw) -> Reply<'a, DrawResult> {
        self.apply_step(draw.as_step(TakeMode::Open(draw.terms))).map(StepResult::drawn)
    }

    #[inline]
    fn spend<'a>(&'a self, draw: &'a Draw) -> Reply<'a, DrawResult> {
        self.apply_step(draw.as_step(TakeMode::Spend)).map(StepResult::drawn)
    }

    fn extend<'a>(&'a self, extend: &'a Extend) -> Reply<'a, DrawResult> {
        self.apply_step(extend.as_step()).map(StepResult::drawn)
    }

    fn adjust<'a>(&'a self, adjust: &'a Adjust) -> Reply<'a, Movement> {
        self.apply_step(adjust.as_step()).map(StepResult::moved)
    }

    fn renew<'a>(&'a self, renew: &'a Renew) -> Reply<'a, Renewal> {
        if let Err(error) = check_renewal(renew.span) {
            return Reply::ready(Err(error));
        }
        self.apply_step(renew.as_step()).map(StepResult::renewed)
    }

    #[inline]
    fn settle<'a>(&'a self, settle: &'a Settle) -> Reply<'a, Movement> {
        self.apply_step(settle.as_step()).map(StepResult::moved)
    }

    fn cancel<'a>(&'a self, cancel: &'a Cancel) -> Reply<'a, Movement> {
        self.apply_step(cancel.as_step()).map(StepResult::moved)
    }

    fn repair<'a>(&'a self, repair: &'a Repair, actor: &'a str) -> Reply<'a, Versioned<Movement>> {
        Reply::after(self.about().is_immediate, async move {
            let (level, line) = repair.target()?;
            let seen = self.look(&Lookup::Subjects(vec![level.subject.clone()])).await?;
            let meters = seen.buckets.iter().flat_map(|bucket| &bucket.meters);
            let meter = meters.into_iter().find(|meter| meter.rule().row() == line.rule.row());
            let full = i64::try_from(line.rule.shape().burst()).unwrap_or(i64::MAX);
            let change = audit::Change::Bucket {
                bucket: level.subject.clone(),
                limit: line.rule.name().clone(),
                before: meter.map_or(full, |meter| meter.available(seen.at)),
                after: repair.units,
            };
            let version = note_change(self, AuditKey::bucket(&level.subject), change, actor).await?;
            let units = Units::from_elem(Some(repair.units), 1);
            let Repair { lease, levels, .. } = repair;
            let step =
                Step { lease: *lease, number: 0, levels, change: Change::Set(&units), is_watched: true };
            let value = self.apply_step(step).await?.moved();
            Ok(Versioned { version, value })
        })
    }

    fn lease(&self, lease: LeaseId) -> Reply<'_, LeaseStatus> {
        self.find_lease(lease)
    }

    fn balances<'a>(&'a self, lookup: &'a Lookup) -> Reply<'a, BucketSnapshot> {
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

/// Checks the span of a renewal.
pub(crate) fn check_renewal(span: Duration) -> Result<(), StoreError> {
    if span <= RENEWAL_MAX {
        return Ok(());
    }
    Err(StoreError::Invalid { what: format!("a renewal for {span:?}, more than {RENEWAL_MAX:?}") })
}

impl Draw {
    #[inline]
    pub(crate) const fn as_step(&self, taking: TakeMode) -> Step<'_> {
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

impl Repair {
    /// The one limit of the one bucket to repair.
    fn target(&self) -> Result<(&Level, &Line), StoreError> {
        let invalid = |what: String| StoreError::Invalid { what };
        let ([level], [_]) = (self.levels.levels(), self.levels.names()) else {
            return Err(invalid("a repair is of one limit of one bucket".to_owned()));
        };
        let line = level.limits.first().ok_or_else(|| invalid("a repair without a limit".to_owned()))?;
        let burst = line.rule.shape().burst();
        if self.units > burst {
            let name = line.rule.name();
            return Err(invalid(format!(
                "{} units available in `{name}`, more than its burst of {burst}",
                self.units
            )));
        }
        Ok((level, line))
    }
}

impl Extend {
    pub(crate) const fn as_step(&self) -> Step<'_> {
        let Self { lease, step, levels, units } = self;
        let change = Change::Take(units, TakeMode::Extend);
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
