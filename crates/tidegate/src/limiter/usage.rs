//! Reports: past usage, and how much of a resource's limits is in use.

use std::collections::BTreeMap;
use std::ops::Range;

use tidegate_core::limit::name::{EntityId, LimitKey, ResourceName};
use tidegate_core::limit::usage::{Tally, Usage, Window};
use tidegate_core::time::Stamp;
use tidegate_store::{Page, Paging, UsageOf, UsageQuery};

use super::Limiter;
use super::error::LimitError;

/// Usage summed over windows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UsageSum {
    /// Usage per limit. A pooled limit has a line of its own: the same leases may count in another limit of
    /// that name, too.
    pub limits: BTreeMap<LimitKey, Tally>,
    /// The number of windows summed.
    pub windows: u64,
}

/// How much of a resource's limits is in use, over all its buckets.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Capacity {
    /// Buckets with this limit.
    pub buckets: u64,
    /// Their total capacity.
    pub burst: u64,
    /// Units available; debts count as negative.
    pub available: i64,
    /// Units drawn minus units returned, since each bucket's first use.
    pub consumed: i64,
}

impl Limiter {
    /// A page of an entity's usage of all resources, in windows that begin in `range`.
    ///
    /// # Errors
    /// [`LimitError::Name`] for an invalid name, [`LimitError::Unavailable`] if the store is unavailable.
    ///
    /// # Cancel safety
    /// Changes nothing.
    pub async fn usage_of_entity(
        &self,
        entity: &str,
        window: Window,
        range: Range<Stamp>,
        paging: &Paging,
    ) -> Result<Page<Usage>, LimitError> {
        let of = UsageOf::Entity(EntityId::new(entity)?);
        self.usage(&UsageQuery { of, window, range }, paging).await
    }

    /// A page of all entities' usage of a resource, in windows that begin in `range`.
    ///
    /// # Errors
    /// As [`usage_of_entity`](Self::usage_of_entity).
    ///
    /// # Cancel safety
    /// Changes nothing.
    pub async fn usage_of_resource(
        &self,
        resource: &str,
        window: Window,
        range: Range<Stamp>,
        paging: &Paging,
    ) -> Result<Page<Usage>, LimitError> {
        let of = UsageOf::Resource(ResourceName::new(resource)?);
        self.usage(&UsageQuery { of, window, range }, paging).await
    }

    /// Usage summed per limit. For a resource each unit counts once: what parents account for their
    /// children is not in [`Tally::own`], but in [`Tally::units`].
    ///
    /// # Errors
    /// [`LimitError::Unavailable`] if the store is unavailable.
    ///
    /// # Cancel safety
    /// Changes nothing.
    pub async fn usage_sum(&self, query: &UsageQuery) -> Result<UsageSum, LimitError> {
        let first = Paging::first(1_000).map_err(LimitError::Store)?;
        let (mut sum, mut paging) = (UsageSum { limits: BTreeMap::new(), windows: 0 }, first.clone());
        loop {
            let page = self.usage(query, &paging).await?;
            for line in page.items {
                sum.windows += 1;
                let key = LimitKey { across: line.subject.across(), name: line.limit };
                sum.limits.entry(key).or_default().add(line.tally);
            }
            match page.next {
                Some(next) => paging = first.clone().after(next),
                None => return Ok(sum),
            }
        }
    }

    /// How much of a resource's limits is in use, per limit, over all its buckets. A limit that is pooled across
    /// entities has one bucket; limits that are pooled across resources, and those given with calls, are not
    /// included. A bucket counts by the rule of its last draw.
    ///
    /// # Errors
    /// [`LimitError::Name`] for an invalid name, [`LimitError::Unavailable`] if the store is unavailable.
    ///
    /// # Cancel safety
    /// Changes nothing.
    pub async fn capacity(&self, resource: &str) -> Result<BTreeMap<LimitKey, Capacity>, LimitError> {
        let resource = ResourceName::new(resource)?;
        let first = Paging::first(1_000).map_err(LimitError::Store)?;
        let (mut sum, mut paging): (BTreeMap<LimitKey, Capacity>, _) = (BTreeMap::new(), first.clone());
        loop {
            let shared = &self.shared;
            let page = shared.call_store_slow(shared.store.buckets(&resource, &paging)).await?;
            for bucket in page.items {
                for meter in bucket.meters.iter().filter(|meter| !meter.rule().is_of_call()) {
                    let (name, across) = (meter.rule().name().clone(), bucket.subject.across());
                    let capacity = sum.entry(LimitKey { name, across }).or_default();
                    capacity.buckets += 1;
                    capacity.burst = capacity.burst.saturating_add(meter.rule().shape().burst());
                    capacity.available = capacity.available.saturating_add(meter.available(bucket.at));
                    capacity.consumed = capacity.consumed.saturating_add(meter.consumed());
                }
            }
            match page.next {
                Some(next) => paging = first.clone().after(next),
                None => return Ok(sum),
            }
        }
    }

    async fn usage(&self, query: &UsageQuery, paging: &Paging) -> Result<Page<Usage>, LimitError> {
        self.shared.call_store_slow(self.shared.store.usage(query, paging)).await
    }
}
