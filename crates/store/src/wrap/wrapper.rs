//! A trait for engines that wrap another one: each call goes through one function.

use std::fmt;
use std::sync::Arc;

use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::name::{Across, EntityId, ResourceName};
use tidegate_core::limit::policy::Version;
use tidegate_core::limit::usage::Usage;

use super::verb::Verb;
use crate::record::{Key, Record, RecordWrite, Records, Scan};
use crate::{
    Bucket, BucketSnapshot, Capabilities, Changes, Engine, LeaseStatus, Lookup, Prune, Reply, Step,
    StepResult, SweepReport, UsagePlace, UsageQuery,
};

/// An engine that wraps another one. All calls go through [`call`](Self::call), which forwards them by
/// default.
pub trait Wrapper: fmt::Debug + Send + Sync + 'static {
    /// The wrapped engine.
    type Inner: Engine + ?Sized;

    /// The wrapped engine.
    fn inner(&self) -> &Self::Inner;

    /// Makes a call of the wrapped engine. It may be made again, or not at all.
    #[inline]
    fn call<'a, T: Unpin + Send + 'a>(
        &'a self,
        verb: Verb,
        call: impl Fn() -> Reply<'a, T> + Send + Sync + 'a,
    ) -> Reply<'a, T> {
        let _ = verb;
        call()
    }

    /// Applies a step.
    #[inline]
    fn step<'a>(&'a self, step: Step<'a>) -> Reply<'a, StepResult> {
        self.call(step.verb(), move || self.inner().apply_step(step))
    }

    /// What the engine is and can do.
    #[inline]
    fn describe(&self) -> Capabilities {
        self.inner().about()
    }

    /// What the engine announces of administrative changes.
    fn announced(&self) -> Option<Changes> {
        self.inner().announcements()
    }
}

impl<W: Wrapper> Engine for W {
    #[inline]
    fn about(&self) -> Capabilities {
        self.describe()
    }

    #[inline]
    fn apply_step<'a>(&'a self, step: Step<'a>) -> Reply<'a, StepResult> {
        self.step(step)
    }

    fn find_lease(&self, lease: LeaseId) -> Reply<'_, LeaseStatus> {
        self.call(Verb::Lease, move || self.inner().find_lease(lease))
    }

    fn look<'a>(&'a self, lookup: &'a Lookup) -> Reply<'a, BucketSnapshot> {
        self.call(Verb::Look, move || self.inner().look(lookup))
    }

    fn scan_buckets<'a>(
        &'a self,
        resource: &'a ResourceName,
        after: Option<EntityId>,
        max: usize,
    ) -> Reply<'a, Vec<Bucket>> {
        self.call(Verb::Buckets, move || self.inner().scan_buckets(resource, after.clone(), max))
    }

    fn scan_usage<'a>(
        &'a self,
        query: &'a UsageQuery,
        after: Option<UsagePlace<'a>>,
        max: usize,
    ) -> Reply<'a, Vec<Usage>> {
        self.call(Verb::Usage, move || self.inner().scan_usage(query, after, max))
    }

    fn prune_ledger<'a>(&'a self, prune: &'a Prune, max: usize) -> Reply<'a, u64> {
        self.call(Verb::Prune, move || self.inner().prune_ledger(prune, max))
    }

    fn sweep_leases(&self, max: usize) -> Reply<'_, SweepReport> {
        self.call(Verb::Sweep, move || self.inner().sweep_leases(max))
    }

    fn read_records<'a>(&'a self, keys: &'a [Key]) -> Reply<'a, Records> {
        // A read without keys returns only the version.
        let verb = if keys.is_empty() { Verb::Version } else { Verb::Read };
        self.call(verb, move || self.inner().read_records(keys))
    }

    fn scan_records<'a>(&'a self, scan: &'a Scan) -> Reply<'a, Vec<Record>> {
        self.call(Verb::Scan, move || self.inner().scan_records(scan))
    }

    fn write_records<'a>(&'a self, write: &'a RecordWrite) -> Reply<'a, bool> {
        self.call(Verb::Write, move || self.inner().write_records(write))
    }

    #[inline]
    fn newest_version(&self) -> Reply<'_, Version> {
        self.call(Verb::Version, move || self.inner().newest_version())
    }

    fn chain<'a>(&'a self, id: &'a EntityId, max: usize) -> Reply<'a, Vec<Record>> {
        self.call(Verb::Chain, move || self.inner().chain(id, max))
    }

    fn shut_down(&self) -> Reply<'_, ()> {
        self.inner().shut_down()
    }

    fn announcements(&self) -> Option<Changes> {
        self.announced()
    }

    fn pool_refusal(&self, across: Across) -> Option<&'static str> {
        self.inner().pool_refusal(across)
    }

    fn warning(&self) -> Option<String> {
        self.inner().warning()
    }
}

impl<E: Engine + ?Sized> Wrapper for Arc<E> {
    type Inner = E;

    #[inline]
    fn inner(&self) -> &E {
        self
    }
}
