//! A correct store with one planted defect.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tidegate_core::limit::cascade::{Level, Levels, Line, Units};
use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::name::{EntityId, ResourceName, Subject};
use tidegate_core::limit::policy::{OnExpiry, Version};
use tidegate_core::limit::resolve::{EffectiveLimit, EffectiveLimits};
use tidegate_core::limit::usage::Usage;
use tidegate_core::time::Stamp;
use tidegate_store::record::{Key, Of, Record, RecordWrite, Records, Scan};
use tidegate_store::{
    Bucket, BucketSnapshot, Capabilities, Change, Engine, LeaseStatus, Lookup, Memory, Movement, Prune,
    Readings, Reply, Step, StepResult, StoreError, SweepReport, TakeMode, Terms, UsagePlace, UsageQuery,
};

/// The planted defect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Defect {
    /// None: every call is passed through.
    Nothing,
    /// A repair is recorded but not made.
    RepairsNothing,
    /// A repeated draw takes again.
    ChargesRepeats,
    /// A refused draw takes the available units.
    TakesPartially,
    /// A draw beyond the limit is granted.
    GrantsBeyondLimit,
    /// Only the first level is drawn.
    ForgetsParents,
    /// A caller with older rules flips the bucket's rule.
    FollowsStaleRules,
    /// A refusal has no readings.
    OmitsReadings,
    /// A repeat returns the time of the repeat.
    ChangesTimeOfRepeat,
    /// A cancel returns no units.
    KeepsCancelled,
    /// A cancel before its draw is forgotten.
    ForgetsCancels,
    /// An ended lease is settled once more.
    SettlesTwice,
    /// An adjustment returns more than is held.
    ReturnsTooMuch,
    /// A settle or an adjustment may leave any debt.
    IgnoresDebtBound,
    /// A cancel returns the held units, including those that the bucket never took.
    ReturnsShortfall,
    /// Each subject has pools of its own.
    SplitsPools,
    /// Leases expire at once.
    ExpiresEarly,
    /// Leases never expire.
    NeverExpires,
    /// Leases are settled where they should be returned, and the reverse.
    MixesUpExpiry,
    /// A renewal sets the deadline, even to an earlier time.
    RenewsBack,
    /// A renewal is answered, but the deadline stays.
    RenewsNothing,
    /// Only the last record of a change is written.
    WritesOne,
    /// A change is written although the namespace has changed since it was read.
    IgnoresVersion,
    /// Records are not found by their link.
    ForgetsLinks,
    /// A chain ends with the first ancestor.
    ForgetsAncestors,
    /// A scan skips the first record of a page.
    SkipsAtPageEdges,
    /// A rewritten record keeps its old value.
    KeepsOldRecords,
    /// Usage is counted twice.
    CountsUsageTwice,
    /// A spend is missing in the ledger.
    SpendsUnseen,
    /// Recent entries are pruned too.
    PrunesRecent,
    /// More entries are pruned than requested.
    PrunesTooMuch,
}

/// A store that breaks one promise and keeps all others.
#[derive(Debug)]
pub(crate) struct BrokenStore {
    engine: Memory,
    defect: Defect,
    seen: Mutex<BTreeSet<LeaseId>>,
    fresh: AtomicU64,
}

impl BrokenStore {
    pub(crate) fn new(engine: Memory, defect: Defect) -> Self {
        Self { engine, defect, seen: Mutex::default(), fresh: AtomicU64::new(1) }
    }

    fn is(&self, defect: Defect) -> bool {
        self.defect == defect
    }

    /// A unique lease id or version.
    fn fresh(&self) -> u64 {
        self.fresh.fetch_add(1, Ordering::Relaxed)
    }

    fn see(&self, lease: LeaseId) -> bool {
        !self.seen.lock().unwrap_or_else(PoisonError::into_inner).insert(lease)
    }

    async fn take(&self, step: Step<'_>, units: &Units, taking: TakeMode) -> Result<StepResult, StoreError> {
        let is_again = taking != TakeMode::Extend && self.see(step.lease);
        let (mut lease, mut levels, mut units, mut taking) =
            (step.lease, Arc::clone(step.levels), units.clone(), taking);
        match (self.defect, &mut taking) {
            (Defect::SpendsUnseen, TakeMode::Spend) => {
                let terms = Terms { deadline: Duration::from_secs(600), on_expiry: OnExpiry::Settle };
                taking = TakeMode::Open(terms);
            }
            (Defect::ChargesRepeats, TakeMode::Open(_)) if is_again => lease = self.fresh_lease(),
            (Defect::ForgetsParents, TakeMode::Open(_)) => (levels, units) = own_level(&levels, &units),
            (Defect::FollowsStaleRules, TakeMode::Open(_)) => levels = at_version(&levels, self.fresh()),
            (Defect::ExpiresEarly, TakeMode::Open(terms)) => terms.deadline = Duration::ZERO,
            (Defect::NeverExpires, TakeMode::Open(terms)) => terms.deadline = Duration::from_secs(35_996_400),
            (Defect::MixesUpExpiry, TakeMode::Open(terms)) => {
                terms.on_expiry = match terms.on_expiry {
                    OnExpiry::Settle => OnExpiry::Return,
                    OnExpiry::Return => OnExpiry::Settle,
                }
            }
            _ => {}
        }
        let change = Change::Take(&units, taking);
        let answer = self.engine.apply_step(Step { lease, levels: &levels, change, ..step }).await?;
        match answer {
            StepResult::Refused(moved) if matches!(taking, TakeMode::Open(_)) => {
                self.refuse(Step { lease, levels: &levels, change, ..step }, &units, moved).await
            }
            StepResult::Granted(mut moved) => {
                if self.is(Defect::ChangesTimeOfRepeat) && moved.is_repeat {
                    moved.at = moved.at + Duration::from_micros(1);
                }
                Ok(StepResult::Granted(moved))
            }
            answer => Ok(answer),
        }
    }

    async fn refuse(
        &self,
        step: Step<'_>,
        units: &Units,
        mut moved: Movement,
    ) -> Result<StepResult, StoreError> {
        match self.defect {
            Defect::TakesPartially => {
                for name in 0..units.len() {
                    let mut one = vec![None; units.len()];
                    one[name] = units[name];
                    let (lease, one) = (self.fresh_lease(), one.into());
                    let change = Change::Take(&one, TakeMode::Spend);
                    self.engine.apply_step(Step { lease, change, ..step }).await?;
                }
            }
            Defect::OmitsReadings => moved.readings.clear(),
            Defect::GrantsBeyondLimit => return Ok(StepResult::Granted(moved)),
            _ => {}
        }
        Ok(StepResult::Refused(moved))
    }

    async fn end(&self, step: Step<'_>, actual: Option<&Units>) -> Result<StepResult, StoreError> {
        let nothing = |at| StepResult::Granted(Movement { at, is_repeat: false, readings: Readings::new() });
        if actual.is_some() {
            return match self.engine.apply_step(step).await {
                Err(StoreError::Ended { .. }) if self.is(Defect::SettlesTwice) => {
                    Ok(nothing(self.now().await?))
                }
                answer => answer,
            };
        }
        let is_known = self.see(step.lease);
        match self.defect {
            Defect::ReturnsShortfall => {
                let found = self.engine.find_lease(step.lease).await?;
                let mut answer = self.engine.apply_step(step).await?;
                if let (LeaseStatus::Open(open), StepResult::Granted(moved)) = (found, &mut answer) {
                    for reading in &mut moved.readings {
                        reading.moved = -open.record.held()[reading.name].unwrap_or(0).cast_signed();
                    }
                }
                Ok(answer)
            }
            Defect::KeepsCancelled => {
                let held = vec![None; step.levels.names().len()].into();
                self.engine.apply_step(Step { change: Change::End(Some(&held)), ..step }).await
            }
            Defect::ForgetsCancels if !is_known => {
                self.seen.lock().unwrap_or_else(PoisonError::into_inner).remove(&step.lease);
                Ok(nothing(self.now().await?))
            }
            _ => self.engine.apply_step(step).await,
        }
    }

    async fn apply_or_break(&self, step: Step<'_>) -> Result<StepResult, StoreError> {
        let levels = match self.defect {
            Defect::IgnoresDebtBound => Arc::new(Levels::clone(step.levels).with_debt_max(|_, _| None)),
            Defect::SplitsPools => without_pools(step.levels),
            _ => Arc::clone(step.levels),
        };
        let step = Step { levels: &levels, ..step };
        match step.change {
            Change::Take(units, taking) => self.take(step, units, taking).await,
            Change::End(actual) => self.end(step, actual).await,
            Change::Shift(deltas) => {
                let mut answer = self.engine.apply_step(step).await?;
                if let StepResult::Granted(moved) = &mut answer
                    && self.is(Defect::ReturnsTooMuch)
                {
                    for reading in &mut moved.readings {
                        reading.moved = reading.moved.min(deltas[reading.name].unwrap_or(0));
                    }
                }
                Ok(answer)
            }
            Change::Set(_) if self.is(Defect::RepairsNothing) => {
                let held = vec![Some(0); step.levels.names().len()].into();
                self.engine.apply_step(Step { change: Change::Take(&held, TakeMode::Spend), ..step }).await
            }
            Change::Set(_) => self.engine.apply_step(step).await,
            Change::Renew(span) => {
                let made = if self.is(Defect::RenewsNothing) { Duration::ZERO } else { span };
                let mut answer = self.engine.apply_step(Step { change: Change::Renew(made), ..step }).await?;
                if let StepResult::Renewed(renewed) = &mut answer
                    && (self.is(Defect::RenewsBack) || self.is(Defect::RenewsNothing))
                {
                    renewed.deadline = renewed.at + span;
                }
                Ok(answer)
            }
        }
    }

    async fn now(&self) -> Result<Stamp, StoreError> {
        Ok(self.engine.look(&Lookup::Subjects(Vec::new())).await?.at)
    }

    fn fresh_lease(&self) -> LeaseId {
        LeaseId::new(7, self.fresh().into())
    }

    async fn usage_or_break(
        &self,
        query: &UsageQuery,
        after: Option<UsagePlace<'_>>,
        max: usize,
    ) -> Result<Vec<Usage>, StoreError> {
        let mut lines = self.engine.scan_usage(query, after, max).await?;
        if self.is(Defect::CountsUsageTwice) {
            for line in &mut lines {
                line.tally.units *= 2;
            }
        }
        Ok(lines)
    }

    async fn prune_or_break(&self, mut prune: Prune, mut max: usize) -> Result<u64, StoreError> {
        if self.is(Defect::PrunesRecent) {
            match &mut prune {
                Prune::Usage { before, .. } => *before = Stamp::MAX,
                Prune::Audit { through } => *through = Version::new(u64::MAX),
            }
        }
        if self.is(Defect::PrunesTooMuch) {
            max += 1;
        }
        self.engine.prune_ledger(&prune, max).await
    }

    async fn scan_or_break(&self, scan: &Scan) -> Result<Vec<Record>, StoreError> {
        match self.defect {
            Defect::ForgetsLinks if matches!(scan.of, Of::Link(_)) => return Ok(Vec::new()),
            Defect::SkipsAtPageEdges if scan.after.is_some() => {
                let records = self.engine.scan_records(scan).await?;
                return Ok(records.into_iter().skip(1).collect());
            }
            _ => {}
        }
        self.engine.scan_records(scan).await
    }

    async fn write_or_break(&self, write: &RecordWrite) -> Result<bool, StoreError> {
        let mut write = write.clone();
        match self.defect {
            Defect::WritesOne => drop(write.changes.drain(..write.changes.len() - 1)),
            Defect::KeepsOldRecords => write.changes.retain(|change| change.before.is_none()),
            Defect::IgnoresVersion => {
                // Lets other writers read at the same time.
                tokio::task::yield_now().await;
                write.seen = self.engine.newest_version().await?;
            }
            _ => {}
        }
        self.engine.write_records(&write).await
    }
}

/// The draw's own level alone. Its names come first.
fn own_level(levels: &Levels, units: &Units) -> (Arc<Levels>, Units) {
    let levels = rebuilt(levels, levels.version(), 1);
    let units = units[..levels.names().len()].into();
    (levels, units)
}

/// A bucket for this subject alone in place of each pool.
fn without_pools(levels: &Levels) -> Arc<Levels> {
    let own = levels.subject();
    let level = |level: &Level| {
        let subject = level.subject.across().map_or_else(
            || level.subject.clone(),
            |across| {
                let entity = format!("{}-{}-{}", own.entity, own.resource, level.subject.entity);
                Subject::new(&entity, across.as_str()).expect("a valid name")
            },
        );
        Level { subject, limits: level.limits.clone() }
    };
    let (split, names) = (levels.levels().iter().map(level).collect(), levels.names().to_vec());
    let restored = Levels::restored(levels.version(), names, split, levels.on_expiry().0);
    Arc::new(restored.expect("the levels of a draw"))
}

fn at_version(levels: &Levels, version: u64) -> Arc<Levels> {
    rebuilt(levels, Version::new(1_000 + version), levels.levels().len())
}

fn rebuilt(levels: &Levels, version: Version, count: usize) -> Arc<Levels> {
    let level = |level: &Level| -> (Subject, EffectiveLimits) {
        let held = |line: &Line| EffectiveLimit { rule: Arc::clone(&line.rule), source: line.source.clone() };
        let resolved = EffectiveLimits {
            limits: level.limits.iter().map(held).collect(),
            on_unavailable: levels.on_unavailable().clone(),
            on_expiry: levels.on_expiry().clone(),
        };
        (level.subject.clone(), resolved)
    };
    Arc::new(Levels::new(version, levels.levels()[..count].iter().map(level).collect()))
}

impl Engine for BrokenStore {
    fn about(&self) -> Capabilities {
        Capabilities { is_immediate: false, ..self.engine.about() }
    }

    fn apply_step<'a>(&'a self, step: Step<'a>) -> Reply<'a, StepResult> {
        Reply::later(self.apply_or_break(step))
    }

    fn find_lease(&self, lease: LeaseId) -> Reply<'_, LeaseStatus> {
        self.engine.find_lease(lease)
    }

    fn look<'a>(&'a self, lookup: &'a Lookup) -> Reply<'a, BucketSnapshot> {
        self.engine.look(lookup)
    }

    fn scan_buckets<'a>(
        &'a self,
        resource: &'a ResourceName,
        after: Option<EntityId>,
        max: usize,
    ) -> Reply<'a, Vec<Bucket>> {
        self.engine.scan_buckets(resource, after, max)
    }

    fn scan_usage<'a>(
        &'a self,
        query: &'a UsageQuery,
        after: Option<UsagePlace<'a>>,
        max: usize,
    ) -> Reply<'a, Vec<Usage>> {
        Reply::later(self.usage_or_break(query, after, max))
    }

    fn prune_ledger<'a>(&'a self, prune: &'a Prune, max: usize) -> Reply<'a, u64> {
        Reply::later(self.prune_or_break(*prune, max))
    }

    fn sweep_leases(&self, max: usize) -> Reply<'_, SweepReport> {
        self.engine.sweep_leases(max)
    }

    fn read_records<'a>(&'a self, keys: &'a [Key]) -> Reply<'a, Records> {
        self.engine.read_records(keys)
    }

    fn scan_records<'a>(&'a self, scan: &'a Scan) -> Reply<'a, Vec<Record>> {
        Reply::later(self.scan_or_break(scan))
    }

    fn write_records<'a>(&'a self, write: &'a RecordWrite) -> Reply<'a, bool> {
        Reply::later(self.write_or_break(write))
    }

    fn chain<'a>(&'a self, id: &'a EntityId, max: usize) -> Reply<'a, Vec<Record>> {
        let max = if self.is(Defect::ForgetsAncestors) { 1 } else { max };
        self.engine.chain(id, max)
    }
}
