//! A store that breaks a promise, wrapped around one that keeps it.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tidegate_core::limit::audit::Entry;
use tidegate_core::limit::cascade::{Level, Levels, Line, Units};
use tidegate_core::limit::entity::Entity;
use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::name::{EntityId, ResourceName, Subject};
use tidegate_core::limit::policy::{Expect, OnExpiry, Policy, Scope, Version, Versioned};
use tidegate_core::limit::resolve::{Held, Resolved};
use tidegate_core::limit::token::{NewToken, Token, TokenHash, TokenId};
use tidegate_core::limit::usage::Usage;
use tidegate_core::time::Stamp;
use tidegate_store::{
    Adjust, AuditQuery, Bucket, Buckets, Cancel, Capabilities, Changes, Draw, Drawn, Entities, Extend,
    Ledger, Listing, Lookup, Memory, Moved, Page, Paging, Policies, PolicyChange, Prune, Readings, Renew,
    Renewed, Reply, Seen, Settle, Standing, Store, StoreError, Swept, Tokens, UsageQuery, Written,
};

/// Which promise is broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Defect {
    /// None: what is wrapped around it changes nothing.
    Nothing,
    /// A draw that comes again takes again.
    ChargesRepeats,
    /// A draw that is refused takes what there is.
    TakesPartially,
    /// A draw that is refused is granted.
    GrantsWhatIsNotThere,
    /// Only the first level is drawn.
    ForgetsParents,
    /// A caller that is behind flips the rule.
    FollowsStaleRules,
    /// A refusal says nothing of the limits.
    SaysNothing,
    /// A repeat tells the time of the repeat.
    TellsAnotherTime,
    /// A cancel leaves everything spent.
    KeepsWhatIsCancelled,
    /// A cancel that comes first is forgotten.
    ForgetsMarks,
    /// A lease that has ended is settled once more.
    SettlesTwice,
    /// An adjustment gives back what was never held.
    ReturnsTooMuch,
    /// Leases expire at once.
    ExpiresEarly,
    /// Leases never expire.
    NeverExpires,
    /// Leases are settled where they should return, and return where they should be settled.
    MixesUpExpiry,
    /// A renewal sets the deadline, back as well.
    RenewsBack,
    /// A renewal is answered, and the deadline stays.
    RenewsNothing,
    /// Changes are made until one is refused.
    AppliesOneByOne,
    /// What the writer expects is not looked at.
    IgnoresExpectations,
    /// A lineage goes all the way up.
    IgnoresCascade,
    /// A cursor that is none begins at the beginning.
    AnswersBadCursors,
    /// A page begins with what comes after its first item.
    SkipsAtPageEdges,
    /// A token is answered to be revoked, and is good.
    RevokesNothing,
    /// Usage is counted twice.
    CountsUsageTwice,
    /// A spend is not in the ledger.
    SpendsUnseen,
    /// What is not old is pruned too.
    PrunesWhatIsNew,
    /// More is pruned at a time than asked for.
    PrunesTooMuch,
}

/// A store that breaks one promise and keeps all others.
#[derive(Debug)]
pub(crate) struct Broken {
    store: Memory,
    defect: Defect,
    seen: Mutex<BTreeSet<LeaseId>>,
    fresh: AtomicU64,
}

impl Broken {
    pub(crate) fn new(store: Memory, defect: Defect) -> Self {
        Self { store, defect, seen: Mutex::default(), fresh: AtomicU64::new(1) }
    }

    fn is(&self, defect: Defect) -> bool {
        self.defect == defect
    }

    /// A lease id, or a version, that nobody else uses.
    fn fresh(&self) -> u64 {
        self.fresh.fetch_add(1, Ordering::Relaxed)
    }

    fn see(&self, lease: LeaseId) -> bool {
        !self.seen.lock().unwrap_or_else(PoisonError::into_inner).insert(lease)
    }

    async fn draw_or_break(&self, draw: &Draw) -> Result<Drawn, StoreError> {
        let is_again = self.see(draw.lease);
        let mut draw = draw.clone();
        match self.defect {
            Defect::ChargesRepeats if is_again => draw.lease = LeaseId::new(7, self.fresh().into()),
            Defect::ForgetsParents => (draw.levels, draw.units) = own_level(&draw),
            Defect::FollowsStaleRules => draw.levels = at_version(&draw.levels, self.fresh()),
            Defect::ExpiresEarly => draw.terms.deadline = Duration::ZERO,
            Defect::NeverExpires => draw.terms.deadline = Duration::from_secs(35_996_400),
            Defect::MixesUpExpiry => {
                draw.terms.on_expiry = match draw.terms.on_expiry {
                    OnExpiry::Settle => OnExpiry::Return,
                    OnExpiry::Return => OnExpiry::Settle,
                }
            }
            _ => {}
        }
        match self.store.draw(&draw).await? {
            Drawn::Refused(moved) => self.refuse(&draw, moved).await,
            Drawn::Granted(mut moved) => {
                if self.is(Defect::TellsAnotherTime) && moved.is_repeat {
                    moved.at = moved.at + Duration::from_micros(1);
                }
                Ok(Drawn::Granted(moved))
            }
        }
    }

    async fn refuse(&self, draw: &Draw, mut moved: Moved) -> Result<Drawn, StoreError> {
        match self.defect {
            Defect::TakesPartially => {
                for name in 0..draw.units.len() {
                    let mut units = vec![None; draw.units.len()];
                    units[name] = draw.units[name];
                    let lease = LeaseId::new(7, self.fresh().into());
                    self.store.spend(&Draw { lease, units: units.into(), ..draw.clone() }).await?;
                }
            }
            Defect::SaysNothing => moved.readings.clear(),
            Defect::GrantsWhatIsNotThere => return Ok(Drawn::Granted(moved)),
            _ => {}
        }
        Ok(Drawn::Refused(moved))
    }

    async fn cancel_or_break(&self, cancel: &Cancel) -> Result<Moved, StoreError> {
        let is_known = self.see(cancel.lease);
        let Cancel { lease, step, levels, is_watched } = cancel.clone();
        let actual = vec![None; levels.names().len()].into();
        match self.defect {
            Defect::KeepsWhatIsCancelled => {
                self.store.settle(&Settle { lease, step, levels, actual, is_watched }).await
            }
            Defect::ForgetsMarks if !is_known => {
                let at = self.store.balances(&Lookup::Subjects(Vec::new())).await?.at;
                self.seen.lock().unwrap_or_else(PoisonError::into_inner).remove(&lease);
                Ok(Moved { at, is_repeat: false, readings: Readings::new() })
            }
            _ => self.store.cancel(cancel).await,
        }
    }

    async fn settle_or_break(&self, settle: &Settle) -> Result<Moved, StoreError> {
        match self.store.settle(settle).await {
            Err(StoreError::Ended { .. }) if self.is(Defect::SettlesTwice) => {
                let at = self.store.balances(&Lookup::Subjects(Vec::new())).await?.at;
                Ok(Moved { at, is_repeat: false, readings: Readings::new() })
            }
            answer => answer,
        }
    }

    async fn adjust_or_break(&self, adjust: &Adjust) -> Result<Moved, StoreError> {
        let mut moved = self.store.adjust(adjust).await?;
        if self.is(Defect::ReturnsTooMuch) {
            for reading in &mut moved.readings {
                reading.moved = reading.moved.min(adjust.deltas[reading.name].unwrap_or(0));
            }
        }
        Ok(moved)
    }

    async fn renew_or_break(&self, renew: &Renew) -> Result<Renewed, StoreError> {
        let span = if self.is(Defect::RenewsNothing) { Duration::ZERO } else { renew.span };
        let mut renewed = self.store.renew(&Renew { span, ..renew.clone() }).await?;
        if self.is(Defect::RenewsBack) || self.is(Defect::RenewsNothing) {
            renewed.deadline = renewed.at + renew.span;
        }
        Ok(renewed)
    }

    async fn spend_or_break(&self, draw: &Draw) -> Result<Drawn, StoreError> {
        if self.is(Defect::SpendsUnseen) {
            return self.store.draw(draw).await;
        }
        self.store.spend(draw).await
    }

    async fn apply_or_break(&self, changes: &[PolicyChange], actor: &str) -> Result<Version, StoreError> {
        let mut changes = changes.to_vec();
        if self.is(Defect::IgnoresExpectations) {
            for change in &mut changes {
                change.expect = Expect::Any;
            }
        }
        if !self.is(Defect::AppliesOneByOne) {
            return self.store.apply(&changes, actor).await;
        }
        let mut version = self.store.version().await?;
        for change in changes {
            version = self.store.apply(&[change], actor).await?;
        }
        Ok(version)
    }

    async fn lineage_or_break(&self, id: &EntityId) -> Result<Vec<Versioned<Entity>>, StoreError> {
        if !self.is(Defect::IgnoresCascade) {
            return self.store.lineage(id).await;
        }
        let (mut lineage, mut next) = (Vec::new(), Some(id.clone()));
        while let Some(id) = next {
            let found = self.store.get(&id).await?;
            next = found.as_ref().and_then(|found| found.value.parent_id().cloned());
            lineage.extend(found);
        }
        Ok(lineage)
    }

    async fn entities_or_break(&self, paging: &Paging) -> Result<Page<Versioned<Entity>>, StoreError> {
        match self.store.entities(paging).await {
            Err(StoreError::Invalid { .. }) if self.is(Defect::AnswersBadCursors) => {
                self.store.entities(&Paging::default()).await
            }
            Ok(mut page) if self.is(Defect::SkipsAtPageEdges) && paging.cursor().is_some() => {
                page.items.drain(..1.min(page.items.len()));
                Ok(page)
            }
            answer => answer,
        }
    }

    async fn usage_or_break(&self, query: &UsageQuery, paging: &Paging) -> Result<Page<Usage>, StoreError> {
        let mut page = self.store.usage(query, paging).await?;
        if self.is(Defect::CountsUsageTwice) {
            for line in &mut page.items {
                line.tally.units *= 2;
            }
        }
        Ok(page)
    }

    async fn prune_or_break(&self, mut prune: Prune, mut max: usize) -> Result<u64, StoreError> {
        if self.is(Defect::PrunesWhatIsNew) {
            match &mut prune {
                Prune::Usage { before, .. } => *before = Stamp::MAX,
                Prune::Audit { through } => *through = Version::new(u64::MAX),
            }
        }
        if self.is(Defect::PrunesTooMuch) {
            max += 1;
        }
        self.store.prune(&prune, max).await
    }
}

/// The draw's own level by itself. Its names come first.
fn own_level(draw: &Draw) -> (Arc<Levels>, Units) {
    let levels = rebuilt(&draw.levels, draw.levels.version(), 1);
    let units = draw.units[..levels.names().len()].into();
    (levels, units)
}

fn at_version(levels: &Levels, version: u64) -> Arc<Levels> {
    rebuilt(levels, Version::new(1_000 + version), levels.levels().len())
}

fn rebuilt(levels: &Levels, version: Version, count: usize) -> Arc<Levels> {
    let level = |level: &Level| -> (Subject, Resolved) {
        let held = |line: &Line| Held { rule: Arc::clone(&line.rule), source: line.source.clone() };
        let resolved = Resolved {
            limits: level.limits.iter().map(held).collect(),
            on_unavailable: levels.on_unavailable().clone(),
            on_expiry: levels.on_expiry().clone(),
        };
        (level.subject.clone(), resolved)
    };
    Arc::new(Levels::new(version, levels.levels()[..count].iter().map(level).collect()))
}

impl Buckets for Broken {
    fn draw<'a>(&'a self, draw: &'a Draw) -> Reply<'a, Drawn> {
        Reply::later(self.draw_or_break(draw))
    }

    fn extend<'a>(&'a self, extend: &'a Extend) -> Reply<'a, Drawn> {
        self.store.extend(extend)
    }

    fn adjust<'a>(&'a self, adjust: &'a Adjust) -> Reply<'a, Moved> {
        Reply::later(self.adjust_or_break(adjust))
    }

    fn renew<'a>(&'a self, renew: &'a Renew) -> Reply<'a, Renewed> {
        Reply::later(self.renew_or_break(renew))
    }

    fn settle<'a>(&'a self, settle: &'a Settle) -> Reply<'a, Moved> {
        Reply::later(self.settle_or_break(settle))
    }

    fn cancel<'a>(&'a self, cancel: &'a Cancel) -> Reply<'a, Moved> {
        Reply::later(self.cancel_or_break(cancel))
    }

    fn spend<'a>(&'a self, draw: &'a Draw) -> Reply<'a, Drawn> {
        Reply::later(self.spend_or_break(draw))
    }

    fn lease(&self, lease: LeaseId) -> Reply<'_, Standing> {
        self.store.lease(lease)
    }

    fn balances<'a>(&'a self, lookup: &'a Lookup) -> Reply<'a, Seen> {
        self.store.balances(lookup)
    }

    fn buckets<'a>(&'a self, resource: &'a ResourceName, paging: &'a Paging) -> Reply<'a, Page<Bucket>> {
        self.store.buckets(resource, paging)
    }
}

impl Policies for Broken {
    fn read<'a>(&'a self, scopes: &'a [Scope]) -> Reply<'a, Written> {
        self.store.read(scopes)
    }

    fn version(&self) -> Reply<'_, Version> {
        self.store.version()
    }

    fn list<'a>(
        &'a self,
        listing: &'a Listing,
        paging: &'a Paging,
    ) -> Reply<'a, Page<(Scope, Versioned<Arc<Policy>>)>> {
        self.store.list(listing, paging)
    }

    fn apply<'a>(&'a self, changes: &'a [PolicyChange], actor: &'a str) -> Reply<'a, Version> {
        Reply::later(self.apply_or_break(changes, actor))
    }
}

impl Entities for Broken {
    fn put<'a>(&'a self, entity: &'a Entity, expect: Expect, actor: &'a str) -> Reply<'a, Version> {
        let expect = if self.is(Defect::IgnoresExpectations) { Expect::Any } else { expect };
        self.store.put(entity, expect, actor)
    }

    fn get<'a>(&'a self, id: &'a EntityId) -> Reply<'a, Option<Versioned<Entity>>> {
        self.store.get(id)
    }

    fn lineage<'a>(&'a self, id: &'a EntityId) -> Reply<'a, Vec<Versioned<Entity>>> {
        Reply::later(self.lineage_or_break(id))
    }

    fn remove<'a>(&'a self, id: &'a EntityId, expect: Expect, actor: &'a str) -> Reply<'a, Version> {
        self.store.remove(id, expect, actor)
    }

    fn children<'a>(
        &'a self,
        parent: &'a EntityId,
        paging: &'a Paging,
    ) -> Reply<'a, Page<Versioned<Entity>>> {
        self.store.children(parent, paging)
    }

    fn entities<'a>(&'a self, paging: &'a Paging) -> Reply<'a, Page<Versioned<Entity>>> {
        Reply::later(self.entities_or_break(paging))
    }
}

impl Ledger for Broken {
    fn usage<'a>(&'a self, query: &'a UsageQuery, paging: &'a Paging) -> Reply<'a, Page<Usage>> {
        Reply::later(self.usage_or_break(query, paging))
    }

    fn audit<'a>(&'a self, query: &'a AuditQuery, paging: &'a Paging) -> Reply<'a, Page<Entry>> {
        self.store.audit(query, paging)
    }

    fn prune<'a>(&'a self, prune: &'a Prune, max: usize) -> Reply<'a, u64> {
        Reply::later(self.prune_or_break(*prune, max))
    }
}

impl Tokens for Broken {
    fn create_token<'a>(
        &'a self,
        token: &'a NewToken,
        hash: &'a TokenHash,
        actor: &'a str,
    ) -> Reply<'a, Versioned<Token>> {
        self.store.create_token(token, hash, actor)
    }

    fn token<'a>(&'a self, id: &'a TokenId) -> Reply<'a, Option<(TokenHash, Versioned<Token>)>> {
        self.store.token(id)
    }

    fn find_token<'a>(&'a self, hash: &'a TokenHash) -> Reply<'a, Option<Versioned<Token>>> {
        self.store.find_token(hash)
    }

    fn tokens<'a>(&'a self, paging: &'a Paging) -> Reply<'a, Page<Versioned<Token>>> {
        self.store.tokens(paging)
    }

    fn revoke_token<'a>(&'a self, id: &'a TokenId, expect: Expect, actor: &'a str) -> Reply<'a, Version> {
        if self.is(Defect::RevokesNothing) {
            return self.store.version();
        }
        self.store.revoke_token(id, expect, actor)
    }
}

impl Store for Broken {
    fn capabilities(&self) -> Capabilities {
        self.store.capabilities()
    }

    fn sweep(&self, max: usize) -> Reply<'_, Swept> {
        self.store.sweep(max)
    }

    fn changes(&self) -> Option<Changes> {
        self.store.changes()
    }
}
