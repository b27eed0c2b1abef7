//! Leases and buckets as the trait asks for them.

use std::sync::Arc;
use std::time::Duration;

use ::redis::Value;
use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::meter::Meter;
use tidegate_core::limit::name::{EntityId, ResourceName, Subject};
use tidegate_core::limit::policy::OnExpiry;
use tidegate_core::time::Stamp;

use super::Redis;
use super::index::Prefix;
use super::leases::Kept as Lease;
use super::pack::Unpack;
use super::places::{Home, Layout, Places, moment_of};
use super::script::{DUE, LOOK};
use super::steps::{Amounts, Op, Step, Told};
use crate::buckets::{
    Adjust, Bucket, Buckets, Cancel, Draw, Drawn, Extend, Held, Lookup, Moved, Renew, Renewed, Seen, Settle,
    Standing,
};
use crate::cursor::{entity_cursor, parse_entity};
use crate::desk::check_renewal;
use crate::error::StoreError;
use crate::page::{Page, Paging};
use crate::reply::Reply;
use crate::store::Swept;
use crate::tables::{MeterRow, column, subject};

/// Leases that are looked for at a time.
const SWEPT_AT_ONCE: usize = 1_000;

impl Buckets for Redis {
    fn draw<'a>(&'a self, draw: &'a Draw) -> Reply<'a, Drawn> {
        let Draw { lease, levels, units, terms, is_watched } = draw;
        Reply::later(async move {
            self.sweep_now_and_then();
            let step = Step {
                amounts: Amounts::Units(units),
                span: terms.deadline,
                on_expiry: terms.on_expiry,
                is_watched: *is_watched,
                ..Step::new(Op::Draw, *lease, 0, levels)
            };
            drawn(self.step(step).await?)
        })
    }

    fn extend<'a>(&'a self, extend: &'a Extend) -> Reply<'a, Drawn> {
        let Extend { lease, step, levels, units } = extend;
        Reply::later(async move {
            let step =
                Step { amounts: Amounts::Units(units), ..Step::new(Op::Extend, *lease, *step, levels) };
            drawn(self.step(step).await?)
        })
    }

    fn adjust<'a>(&'a self, adjust: &'a Adjust) -> Reply<'a, Moved> {
        let Adjust { lease, step, levels, deltas } = adjust;
        Reply::later(async move {
            let step =
                Step { amounts: Amounts::Deltas(deltas), ..Step::new(Op::Adjust, *lease, *step, levels) };
            moved(self.step(step).await?)
        })
    }

    fn renew<'a>(&'a self, renew: &'a Renew) -> Reply<'a, Renewed> {
        let Renew { lease, step, levels, span } = renew;
        Reply::later(async move {
            check_renewal(renew)?;
            match self.step(Step { span: *span, ..Step::new(Op::Renew, *lease, *step, levels) }).await? {
                Told::Renewed(renewed) => Ok(renewed),
                _ => Err(unasked()),
            }
        })
    }

    fn settle<'a>(&'a self, settle: &'a Settle) -> Reply<'a, Moved> {
        let Settle { lease, step, levels, actual, is_watched } = settle;
        Reply::later(async move {
            let step = Step {
                amounts: Amounts::Units(actual),
                is_watched: *is_watched,
                digest: if actual.len() == levels.names().len() { levels.digest(actual) } else { 0 },
                ..Step::new(Op::Settle, *lease, *step, levels)
            };
            moved(self.step(step).await?)
        })
    }

    fn cancel<'a>(&'a self, cancel: &'a Cancel) -> Reply<'a, Moved> {
        let Cancel { lease, step, levels, is_watched } = cancel;
        Reply::later(async move {
            let step = Step { is_watched: *is_watched, ..Step::new(Op::Cancel, *lease, *step, levels) };
            moved(self.step(step).await?)
        })
    }

    fn spend<'a>(&'a self, draw: &'a Draw) -> Reply<'a, Drawn> {
        let Draw { lease, levels, units, is_watched, .. } = draw;
        Reply::later(async move {
            self.sweep_now_and_then();
            let step = Step {
                amounts: Amounts::Units(units),
                is_watched: *is_watched,
                digest: if units.len() == levels.names().len() { levels.digest(units) } else { 0 },
                ..Step::new(Op::Spend, *lease, 0, levels)
            };
            drawn(self.step(step).await?)
        })
    }

    fn lease(&self, lease: LeaseId) -> Reply<'_, Standing> {
        Reply::later(async move {
            let Some((home, found)) = self.find_lease(lease).await? else {
                return Err(StoreError::NoLease { lease });
            };
            let at = self.look(home, &[]).await?.at;
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

    fn balances<'a>(&'a self, lookup: &'a Lookup) -> Reply<'a, Seen> {
        Reply::later(async move {
            let subjects = match lookup {
                Lookup::Subjects(subjects) => subjects.clone(),
                Lookup::Entities(entities) => self.subjects_of(entities).await?,
                Lookup::Lineage(entity) => {
                    let lineage = self.chain(entity, false).await?;
                    let above = lineage.iter().filter_map(|above| above.value.next().cloned());
                    let entities: Vec<EntityId> = std::iter::once(entity.clone()).chain(above).collect();
                    self.subjects_of(&entities).await?
                }
            };
            self.look_at(&subjects).await
        })
    }

    fn buckets<'a>(&'a self, resource: &'a ResourceName, paging: &'a Paging) -> Reply<'a, Page<Bucket>> {
        Reply::later(async move {
            let after = paging.cursor().map(parse_entity).transpose()?;
            let prefix = Prefix::of(&["r", resource.as_str()]);
            let (mut found, mut after) = (Vec::new(), after.map(|entity| entity.as_str().to_owned()));
            // Those that were idle for long have gone, and are listed no more.
            while found.len() <= paging.max() {
                let names = self.range(&prefix, after.as_deref(), paging.max() + 1).await?;
                let is_last = names.len() <= paging.max();
                after = names.last().cloned();
                let subjects = names.iter().map(|entity| subject(entity, resource.as_str()));
                let Seen { buckets, .. } = self.look_at(&subjects.collect::<Result<Vec<_>, _>>()?).await?;
                found.extend(buckets);
                if is_last {
                    break;
                }
            }
            Ok(Page::cut(found, paging, |bucket| entity_cursor(&bucket.subject.entity)))
        })
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

    /// Ends a lease that is past its deadline, unless somebody was faster.
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
    async fn find_lease(&self, lease: LeaseId) -> Result<Option<(Home, Lease)>, StoreError> {
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
            let Looked { at, clock_offset, values } = self.look(home, &keys).await?;
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
            let looked = self.look(Places::center(), &[]).await?;
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
    pub(super) async fn look(&self, home: Home, keys: &[String]) -> Result<Looked, StoreError> {
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

fn drawn(told: Told) -> Result<Drawn, StoreError> {
    match told {
        Told::Granted(moved) => Ok(Drawn::Granted(moved)),
        Told::Refused(moved) => Ok(Drawn::Refused(moved)),
        _ => Err(unasked()),
    }
}

fn moved(told: Told) -> Result<Moved, StoreError> {
    match told {
        Told::Granted(moved) => Ok(moved),
        _ => Err(unasked()),
    }
}

fn unasked() -> StoreError {
    StoreError::Corrupt { what: "the script answers what it was not asked".to_owned() }
}
