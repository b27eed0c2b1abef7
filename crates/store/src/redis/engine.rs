//! The engine trait on Redis: steps run in the lease script; buckets, leases and records are read by
//! commands.

use std::collections::BTreeMap;
use std::time::Duration;

use ::redis::Cmd;
use futures_util::future::join_all;
use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::meter::Meter;
use tidegate_core::limit::name::{Across, EntityId, ResourceName, Subject};
use tidegate_core::limit::policy::OnExpiry;
use tidegate_core::limit::usage::Usage;
use tidegate_core::time::Stamp;

use super::Redis;
use super::index::Prefix;
use super::keyspace::{Home, Keyspace, Layout, moment_of};
use super::leases;
use super::lua_codec::Unpacker;
use super::script::{DUE, FIND, LOOK, NO_ARGS};
use crate::buckets::{Bucket, BucketSnapshot, LeaseStatus, Lookup};
use crate::changes::Changes;
use crate::cursor::UsagePlace;
use crate::engine::{self, Change, Engine, StepResult, TakeMode};
use crate::error::StoreError;
use crate::ledger::{Prune, UsageQuery};
use crate::record::{Key, Record, RecordWrite, Records, Scan};
use crate::reply::Reply;
use crate::shared_engine::LeaseState;
use crate::store::{Capabilities, ClockSource, SweepReport};
use crate::tables::{MeterRow, column, subject};

/// The most expired leases that are fetched at a time.
const SWEEP_BATCH: usize = 1_000;
/// The expired leases that are ended at the same time: two batches of steps.
const ENDED_AT_ONCE: usize = 64;

impl Engine for Redis {
    fn about(&self) -> Capabilities {
        Capabilities {
            engine: "redis",
            is_immediate: false,
            is_durable: true,
            clock: ClockSource::Engine,
            deadline: self.inner.options.deadline,
        }
    }

    fn pool_refusal(&self, across: Across) -> Option<&'static str> {
        self.inner.keyspace.pool_refusal(across)
    }

    fn apply_step<'a>(&'a self, step: engine::Step<'a>) -> Reply<'a, StepResult> {
        Reply::later(async move {
            if matches!(step.change, Change::Take(_, TakeMode::Open(_) | TakeMode::Spend)) {
                self.sweep_if_due();
            }
            self.step(step).await
        })
    }

    fn find_lease(&self, lease: LeaseId) -> Reply<'_, LeaseStatus> {
        Reply::later(async move {
            let (home, at, mut found) = self.search_lease(lease).await?;
            if let LeaseState::Open(record, levels) = &found
                && record.is_due(at)
            {
                self.expire(lease, levels).await?;
                (_, found) = self.lease_at(home, lease).await?;
            }
            found.status(lease, at)
        })
    }

    fn look<'a>(&'a self, lookup: &'a Lookup) -> Reply<'a, BucketSnapshot> {
        Reply::later(async move {
            let subjects = match lookup {
                Lookup::Subjects(subjects) => subjects.clone(),
                Lookup::Entities(entities) => self.subjects_of(entities).await?,
                Lookup::Lineage(entity) => self.subjects_of(std::slice::from_ref(entity)).await?,
            };
            self.read_buckets(&subjects).await
        })
    }

    fn scan_buckets<'a>(
        &'a self,
        resource: &'a ResourceName,
        after: Option<EntityId>,
        max: usize,
    ) -> Reply<'a, Vec<Bucket>> {
        Reply::later(async move {
            let prefix = Prefix::of(&["r", resource.as_str()]);
            let (mut found, mut after) = (Vec::new(), after.map(|entity| entity.to_string()));
            // Buckets of idle subjects have expired.
            while found.len() < max {
                let names = self.range(&prefix, after.as_deref(), max).await?;
                let is_last = names.len() < max;
                after = names.last().cloned();
                let subjects = names.iter().map(|entity| subject(entity, resource.as_str()));
                let BucketSnapshot { buckets, .. } =
                    self.read_buckets(&subjects.collect::<Result<Vec<_>, _>>()?).await?;
                found.extend(buckets);
                if is_last {
                    break;
                }
            }
            found.truncate(max);
            Ok(found)
        })
    }

    fn scan_usage<'a>(
        &'a self,
        query: &'a UsageQuery,
        after: Option<UsagePlace<'a>>,
        max: usize,
    ) -> Reply<'a, Vec<Usage>> {
        Reply::later(self.usage_lines(query, after, max))
    }

    fn prune_ledger<'a>(&'a self, prune: &'a Prune, max: usize) -> Reply<'a, u64> {
        Reply::later(self.prune_lines(prune, max))
    }

    fn sweep_leases(&self, max: usize) -> Reply<'_, SweepReport> {
        Reply::later(self.sweep_and_clean_up(max))
    }

    fn read_records<'a>(&'a self, keys: &'a [Key]) -> Reply<'a, Records> {
        Reply::later(self.read_all(keys))
    }

    fn scan_records<'a>(&'a self, scan: &'a Scan) -> Reply<'a, Vec<Record>> {
        Reply::later(self.scan(scan))
    }

    fn write_records<'a>(&'a self, write: &'a RecordWrite) -> Reply<'a, bool> {
        Reply::later(self.write(write))
    }

    fn chain<'a>(&'a self, id: &'a EntityId, max: usize) -> Reply<'a, Vec<Record>> {
        Reply::later(self.ancestors(id, max))
    }

    fn announcements(&self) -> Option<Changes> {
        self.inner.listener.get().map(|listener| listener.changes.clone())
    }

    fn warning(&self) -> Option<String> {
        self.inner.caution.clone()
    }
}

impl Redis {
    /// Ends up to `max` leases that are past their deadline.
    pub(super) async fn sweep_up_to(&self, max: usize) -> Result<SweepReport, StoreError> {
        let (mut swept, mut left) = (SweepReport::default(), max);
        for home in self.inner.keyspace.homes(&self.inner.connection).await? {
            while left > 0 {
                let wanted = left.min(SWEEP_BATCH);
                let due = self.due(home, wanted).await?;
                for leases in due.chunks(ENDED_AT_ONCE) {
                    for how in join_all(leases.iter().map(|lease| self.end(home, *lease))).await {
                        how?.into_iter().for_each(|how| swept.ended(how));
                    }
                }
                left -= due.len();
                if due.len() < wanted {
                    break;
                }
            }
        }
        Ok(swept)
    }

    /// Ends a lease that is past its deadline. One that cannot be read is removed from the deadlines, so that
    /// it does not block others.
    async fn end(&self, home: Home, lease: LeaseId) -> Result<Option<OnExpiry>, StoreError> {
        let ended = match self.lease_at(home, lease).await {
            Ok((_, LeaseState::Open(record, levels))) => {
                self.expire(lease, &levels).await.map(|has_ended| (has_ended, Some(record.on_expiry())))
            }
            Ok((_, LeaseState::Ended(_) | LeaseState::Unknown)) => Ok((false, None)),
            Err(error) => Err(error),
        };
        match ended {
            // An open lease that was not due stays: it was renewed, or the script's clock is behind the one
            // that was read.
            Ok((has_ended, Some(how))) => return Ok(Some(how).filter(|_| has_ended)),
            Ok((_, None)) | Err(StoreError::Corrupt { .. } | StoreError::Invalid { .. }) => {}
            Err(error) => return Err(error),
        }
        let forget = Cmd::zrem(self.inner.keyspace.open_leases(home), lease.to_string());
        self.inner.connection.query(&forget).await.map(|()| None)
    }

    async fn due(&self, home: Home, max: usize) -> Result<Vec<LeaseId>, StoreError> {
        let keyspace = &self.inner.keyspace;
        let keys = [keyspace.clock(home), keyspace.open_leases(home)];
        let ids: Vec<Vec<u8>> = self.inner.connection.run(&DUE, &keys, &[max]).await?;
        let id = |id: &Vec<u8>| std::str::from_utf8(id).ok()?.parse().ok();
        Ok(ids.iter().filter_map(id).collect())
    }

    /// The time at a home, and a lease there.
    async fn lease_at(&self, home: Home, lease: LeaseId) -> Result<(Stamp, LeaseState), StoreError> {
        let keyspace = &self.inner.keyspace;
        let moment = moment_of(lease).map(|moment| format!("{}{moment:x}", keyspace.moments(home)));
        let keys: Vec<_> =
            [keyspace.clock(home), keyspace.lease(home, lease)].into_iter().chain(moment).collect();
        let found = self.inner.connection.run(&FIND, &keys, &[lease.to_string()]).await?;
        let (at, kept): (u64, Option<Vec<u8>>) = found;
        let state = kept.map_or(Ok(LeaseState::Unknown), |kept| leases::read(&kept))?;
        Ok((Stamp::from_micros(at), state))
    }

    /// Finds a lease. Its id does not name its home: if this process has not drawn it, all homes are searched
    /// at once.
    async fn search_lease(&self, lease: LeaseId) -> Result<(Home, Stamp, LeaseState), StoreError> {
        let keyspace = &self.inner.keyspace;
        if let Some(home) = keyspace.home_of_lease(lease) {
            let (at, found) = self.lease_at(home, lease).await?;
            if found != LeaseState::Unknown {
                return Ok((home, at, found));
            }
        }
        let homes = keyspace.homes(&self.inner.connection).await?;
        let mut error = StoreError::NoLease { lease };
        let found = join_all(homes.iter().map(|home| self.lease_at(*home, lease))).await;
        for (home, found) in homes.into_iter().zip(found) {
            match found {
                Ok((_, LeaseState::Unknown)) => {}
                Ok((at, found)) => {
                    keyspace.remember_lease(lease, home);
                    return Ok((home, at, found));
                }
                Err(failed) => error = failed,
            }
        }
        Err(error)
    }

    async fn subjects_of(&self, entities: &[EntityId]) -> Result<Vec<Subject>, StoreError> {
        let mut subjects = Vec::new();
        for entity in entities {
            for resource in self.range_all(&Prefix::of(&["s", entity.as_str()])).await? {
                subjects.push(subject(entity.as_str(), &resource)?);
            }
        }
        Ok(subjects)
    }

    /// The existing buckets of these subjects, and the time.
    async fn read_buckets(&self, subjects: &[Subject]) -> Result<BucketSnapshot, StoreError> {
        let keyspace = &self.inner.keyspace;
        let mut by_home: BTreeMap<Home, Vec<&Subject>> = BTreeMap::new();
        for subject in subjects {
            let home = keyspace.home_of(&self.inner.connection, &subject.entity).await?;
            let Some(home) = home else { continue };
            by_home.entry(home).or_default().push(subject);
        }
        if by_home.is_empty() {
            by_home.insert(Keyspace::admin_home(), Vec::new());
        }
        let (mut at, mut clock_offset, mut found) = (Stamp::ZERO, Duration::ZERO, Vec::new());
        for (home, subjects) in by_home {
            let keys: Vec<String> = subjects.iter().map(|subject| keyspace.bucket(home, subject)).collect();
            let read = self.read_values(home, &keys).await?;
            (at, clock_offset) = (at, clock_offset).max((read.at, read.clock_offset));
            for (subject, value) in subjects.into_iter().zip(read.values) {
                if let Some(value) = value {
                    let meters = meters(&value)?;
                    found.push(Bucket { subject: subject.clone(), at: read.at, meters });
                }
            }
        }
        // In the order of the request.
        let place = |bucket: &Bucket| subjects.iter().position(|subject| *subject == bucket.subject);
        if subjects.len() > 1 && keyspace.layout() == Layout::Trees {
            found.sort_by_key(place);
        }
        Ok(BucketSnapshot { at, clock_offset, buckets: found })
    }

    /// The time at a home and the values of these keys.
    pub(super) async fn read_values(&self, home: Home, keys: &[String]) -> Result<TimedValues, StoreError> {
        let clock = self.inner.keyspace.clock(home);
        let all: Vec<&String> = std::iter::once(&clock).chain(keys).collect();
        let found = self.inner.connection.run(&LOOK, &all, NO_ARGS).await?;
        let (at, offset, values): (u64, u64, Vec<Option<Vec<u8>>>) = found;
        Ok(TimedValues { at: Stamp::from_micros(at), clock_offset: Duration::from_micros(offset), values })
    }
}

/// The time at a home, its offset from the server's clock, and the values of some keys.
pub(super) struct TimedValues {
    pub(super) at: Stamp,
    pub(super) clock_offset: Duration,
    values: Vec<Option<Vec<u8>>>,
}

/// Decodes the limits of a bucket.
fn meters(value: &[u8]) -> Result<Vec<Meter>, StoreError> {
    let mut read = Unpacker::new(value, "a bucket");
    read.double()?;
    let mut meters = Vec::new();
    while !read.is_empty() {
        let row = read.text()?;
        let shape = [column(read.number()?), column(read.number()?), column(read.number()?)];
        let version = column(read.number()?);
        let (full_at, consumed) = (read.full_at()?, read.signed()?);
        let (full_at, part) = (full_at.whole.cast_signed(), column(full_at.part));
        meters.push(MeterRow { row, shape, full_at, part, version, consumed }.meter()?);
    }
    Ok(meters)
}
