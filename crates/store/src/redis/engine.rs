//! The engine: steps are calls of scripts, records and buckets are read beside them.

use std::sync::Arc;
use std::time::Duration;

use ::redis::Value;
use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::meter::Meter;
use tidegate_core::limit::name::{EntityId, ResourceName, Subject};
use tidegate_core::limit::policy::{OnExpiry, Version};
use tidegate_core::limit::usage::Usage;
use tidegate_core::time::Stamp;

use super::Redis;
use super::index::Prefix;
use super::leases::Kept as Lease;
use super::pack::Unpack;
use super::places::{Home, Layout, Places, moment_of};
use super::records::{META, number};
use super::script::{DUE, LOOK};
use super::steps::{Op, Step, Told};
use crate::buckets::{Bucket, Held, Lookup, Seen, Standing};
use crate::changes::Changes;
use crate::cursor::UsagePlace;
use crate::engine::{self, Applied, Change, Engine, Taking};
use crate::error::StoreError;
use crate::ledger::{Prune, UsageQuery};
use crate::record::{Key, Record, RecordWrite, Records, Scan};
use crate::reply::Reply;
use crate::store::{Capabilities, Clocked, Swept};
use crate::tables::{MeterRow, column, subject};

/// Leases that are looked for at a time.
const SWEPT_AT_ONCE: usize = 1_000;

impl Engine for Redis {
    fn about(&self) -> Capabilities {
        Capabilities {
            engine: "redis",
            is_immediate: false,
            is_durable: true,
            clock: Clocked::Engine,
            deadline: self.inner.deadline,
        }
    }

    fn apply_step<'a>(&'a self, step: engine::Step<'a>) -> Reply<'a, Applied> {
        Reply::later(async move {
            if matches!(step.change, Change::Take(_, Taking::Open(_) | Taking::Spend)) {
                self.sweep_now_and_then();
            }
            match self.step(step.into()).await? {
                Told::Granted(moved) => Ok(Applied::Granted(moved)),
                Told::Refused(moved) => Ok(Applied::Refused(moved)),
                Told::Renewed(renewed) => Ok(Applied::Renewed(renewed)),
                Told::Expired(_) | Told::NotDue => {
                    let what = "the script answers what it was not asked".to_owned();
                    Err(StoreError::Corrupt { what })
                }
            }
        })
    }

    fn find_lease(&self, lease: LeaseId) -> Reply<'_, Standing> {
        Reply::later(async move {
            let Some((home, found)) = self.lease_anywhere(lease).await? else {
                return Err(StoreError::NoLease { lease });
            };
            let at = self.look_for(home, &[]).await?.at;
            match found {
                Lease::Open(levels, record) if record.is_due(at) => {
                    self.expire(lease, &levels).await?;
                    match self.lease_at(home, lease).await? {
                        Some(Lease::Ended(ended)) => Ok(Standing::Ended(ended)),
                        Some(Lease::Open(levels, record)) => Ok(Standing::Open(Held { at, levels, record })),
                        None => Err(StoreError::NoLease { lease }),
                    }
                }
                Lease::Open(levels, record) => Ok(Standing::Open(Held { at, levels, record })),
                Lease::Ended(ended) => Ok(Standing::Ended(ended)),
            }
        })
    }

    fn look<'a>(&'a self, lookup: &'a Lookup) -> Reply<'a, Seen> {
        Reply::later(async move {
            let subjects = match lookup {
                Lookup::Subjects(subjects) => subjects.clone(),
                Lookup::Entities(entities) => self.subjects_of(entities).await?,
                Lookup::Lineage(entity) => self.subjects_of(std::slice::from_ref(entity)).await?,
            };
            self.look_at(&subjects).await
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
            // Subjects that were idle for long have no bucket.
            while found.len() < max {
                let names = self.range(&prefix, after.as_deref(), max).await?;
                let is_last = names.len() < max;
                after = names.last().cloned();
                let subjects = names.iter().map(|entity| subject(entity, resource.as_str()));
                let Seen { buckets, .. } = self.look_at(&subjects.collect::<Result<Vec<_>, _>>()?).await?;
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

    fn sweep_leases(&self, max: usize) -> Reply<'_, Swept> {
        Reply::later(self.sweep_and_tend(max))
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

    fn newest_version(&self) -> Reply<'_, Version> {
        Reply::later(async move {
            let mut read = ::redis::cmd("HGET");
            read.arg(self.inner.places.admin(META)).arg("version");
            Ok(Version::new(number(&self.inner.link.query(&read).await?)?))
        })
    }

    fn chain<'a>(&'a self, id: &'a EntityId, max: usize) -> Reply<'a, Vec<Record>> {
        Reply::later(self.ancestors(id, max))
    }

    fn announcements(&self) -> Option<Changes> {
        self.inner.ear.get().map(|ear| ear.changes.clone())
    }

    fn warning(&self) -> Option<String> {
        self.inner.caution.clone()
    }
}

impl Redis {
    /// Ends up to `max` leases that are past their deadline.
    pub(super) async fn sweep_up_to(&self, max: usize) -> Result<Swept, StoreError> {
        let (mut swept, mut left) = (Swept::default(), max);
        for home in self.inner.places.homes(&self.inner.link).await? {
            while left > 0 {
                let asked = left.min(SWEPT_AT_ONCE);
                let due = self.due(home, asked).await?;
                for lease in &due {
                    match self.end(home, *lease).await? {
                        Some(OnExpiry::Settle) => swept.settled += 1,
                        Some(OnExpiry::Return) => swept.returned += 1,
                        None => {}
                    }
                }
                left -= due.len();
                if due.len() < asked {
                    break;
                }
            }
        }
        Ok(swept)
    }

    /// Ends a lease that is past its deadline. One that is not as we write it, or whose limits are not, is due no more: others
    /// must not wait behind it.
    async fn end(&self, home: Home, lease: LeaseId) -> Result<Option<OnExpiry>, StoreError> {
        let (how, is_open) = match self.lease_at(home, lease).await {
            Ok(Some(Lease::Open(levels, _))) => (self.expire(lease, &levels).await, true),
            Ok(Some(Lease::Ended(_)) | None) => (Ok(None), false),
            Err(error) => (Err(error), false),
        };
        let (how, is_open) = match how {
            Err(StoreError::Corrupt { .. } | StoreError::Invalid { .. }) => (None, false),
            how => (how?, is_open),
        };
        // One that was not due after all stays: it was renewed, or the time that decides is before the one that was read.
        if how.is_none() && !is_open {
            let mut forget = ::redis::cmd("ZREM");
            forget.arg(self.inner.places.open_leases(home)).arg(lease.to_string());
            self.inner.link.query(&forget).await?;
        }
        Ok(how)
    }

    async fn due(&self, home: Home, max: usize) -> Result<Vec<LeaseId>, StoreError> {
        let places = &self.inner.places;
        let (clock, open) = (places.clock(home), places.open_leases(home));
        let (keys, max) = ([clock.as_bytes(), open.as_bytes()], max.to_string());
        match self.inner.link.run(&DUE, &keys, &[max.as_bytes()]).await? {
            Value::Array(ids) => {
                let id = |id: &Value| match id {
                    Value::BulkString(id) => std::str::from_utf8(id).ok().and_then(|id| id.parse().ok()),
                    _ => None,
                };
                Ok(ids.iter().filter_map(id).collect())
            }
            other => Err(self.inner.link.whose().unexpected(&other)),
        }
    }

    /// Ends a lease that is past its deadline, unless another process was first.
    async fn expire(
        &self,
        lease: LeaseId,
        levels: &Arc<tidegate_core::limit::cascade::Levels>,
    ) -> Result<Option<OnExpiry>, StoreError> {
        match self.step(Step::new(Op::Expire, lease, 0, levels)).await? {
            Told::Expired(how) => Ok(Some(how)),
            _ => Ok(None),
        }
    }

    /// A lease at a home: where it is while it is open, and then where it is afterwards, so that none is missed that ends meanwhile.
    async fn lease_at(&self, home: Home, lease: LeaseId) -> Result<Option<Lease>, StoreError> {
        let places = &self.inner.places;
        let mut open = ::redis::cmd("GET");
        open.arg(places.lease(home, lease));
        let ended = moment_of(lease).map(|moment| {
            let mut ended = ::redis::cmd("HGET");
            ended.arg(format!("{}{moment:x}", places.moments(home))).arg(lease.to_string());
            ended
        });
        for get in [Some(open), ended].into_iter().flatten() {
            match self.inner.link.query(&get).await? {
                Value::Nil => {}
                Value::BulkString(kept) => return Lease::read(&kept).map(Some),
                other => return Err(self.inner.link.whose().unexpected(&other)),
            }
        }
        Ok(None)
    }

    /// A lease, and at which home it is: nothing in its id tells.
    async fn lease_anywhere(&self, lease: LeaseId) -> Result<Option<(Home, Lease)>, StoreError> {
        for home in self.inner.places.homes(&self.inner.link).await? {
            if let Some(found) = self.lease_at(home, lease).await? {
                return Ok(Some((home, found)));
            }
        }
        Ok(None)
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

    /// These buckets, those that are there, and what time it is.
    async fn look_at(&self, subjects: &[Subject]) -> Result<Seen, StoreError> {
        let places = &self.inner.places;
        let mut by_home: Vec<(Home, Vec<&Subject>)> = Vec::new();
        for subject in subjects {
            let home = match places.layout() {
                Layout::One => Some(Places::center()),
                Layout::Trees => places.home_of(&self.inner.link, &subject.entity).await?,
            };
            let Some(home) = home else { continue };
            match by_home.iter_mut().find(|(other, _)| *other == home) {
                Some((_, all)) => all.push(subject),
                None => by_home.push((home, vec![subject])),
            }
        }
        let (mut clock, mut found) = (None, Vec::new());
        for (home, subjects) in by_home {
            let keys: Vec<String> = subjects.iter().map(|subject| places.bucket(home, subject)).collect();
            let Looked { at, clock_offset, values } = self.look_for(home, &keys).await?;
            clock = clock.max(Some((at, clock_offset)));
            for (subject, value) in subjects.into_iter().zip(values) {
                if let Some(value) = value {
                    found.push(Bucket { subject: subject.clone(), at, meters: meters(&value)? });
                }
            }
        }
        let (at, clock_offset) = if let Some(clock) = clock {
            clock
        } else {
            let looked = self.look_for(Places::center(), &[]).await?;
            (looked.at, looked.clock_offset)
        };
        // In the order that was asked for.
        let place = |bucket: &Bucket| subjects.iter().position(|subject| *subject == bucket.subject);
        if subjects.len() > 1 && places.layout() == Layout::Trees {
            found.sort_by_key(place);
        }
        Ok(Seen { at, clock_offset, buckets: found })
    }

    /// What time it is at a home, and what these keys have.
    pub(super) async fn look_for(&self, home: Home, keys: &[String]) -> Result<Looked, StoreError> {
        let clock = self.inner.places.clock(home);
        let all: Vec<&[u8]> = std::iter::once(&clock).chain(keys).map(String::as_bytes).collect();
        let whose = self.inner.link.whose();
        let Value::Array(values) = self.inner.link.run(&LOOK, &all, &[]).await? else {
            return Err(StoreError::Corrupt { what: format!("`{}` does not tell the time", whose.place) });
        };
        let mut values = values.into_iter();
        let mut part = || match values.next() {
            Some(Value::BulkString(part)) => {
                std::str::from_utf8(&part).ok().and_then(|part| part.parse().ok())
            }
            _ => None,
        };
        let (Some(seconds), Some(micros), Some(offset)) = (part(), part(), part()) else {
            return Err(StoreError::Corrupt { what: format!("`{}` does not tell the time", whose.place) });
        };
        let at = Stamp::from_micros(u64::saturating_add(u64::saturating_mul(seconds, 1_000_000), micros));
        let value = |value: Value| match value {
            Value::Nil => Ok(None),
            Value::BulkString(value) => Ok(Some(value)),
            other => Err(whose.unexpected(&other)),
        };
        let values = values.map(value).collect::<Result<_, _>>()?;
        Ok(Looked { at, clock_offset: Duration::from_micros(offset), values })
    }
}

/// The time at a home, how far that is ahead of the server's clock, and the values of some keys there.
pub(super) struct Looked {
    pub(super) at: Stamp,
    pub(super) clock_offset: Duration,
    values: Vec<Option<Vec<u8>>>,
}

/// A subject's limits as the script keeps them.
fn meters(value: &[u8]) -> Result<Vec<Meter>, StoreError> {
    let mut read = Unpack::new(value, "a bucket");
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
