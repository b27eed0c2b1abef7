//! Reports: what was used, and how much of a resource is in use.

use std::collections::BTreeMap;
use std::ops::Range;

use tidegate_core::limit::name::{EntityId, LimitName, ResourceName};
use tidegate_core::limit::usage::{Tally, Usage, Window};
use tidegate_core::time::Stamp;
use tidegate_store::{Page, Paging, UsageOf, UsageQuery};

use super::Limiter;
use super::error::LimitError;

/// Usage summed over its windows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UsageSum {
    /// Per limit name, what was used.
    pub limits: BTreeMap<LimitName, Tally>,
    /// Windows that were summed.
    pub windows: u64,
}

/// How much of a resource's limits is in use, over all its buckets.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Capacity {
    /// Buckets that have the limit.
    pub buckets: u64,
    /// What they hold when full.
    pub burst: u64,
    /// What is there; debts count below zero.
    pub available: i64,
    /// Taken less given back, since they were first used.
    pub consumed: i64,
}

impl Limiter {
    /// An entity's usage of every resource in windows that begin in `range`, a page of it.
    ///
    /// # Errors
    /// [`LimitError::Name`] for a name that cannot be, [`LimitError::Unavailable`] when the store is away.
    ///
    /// # Cancel safety
    /// Nothing is changed.
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

    /// Everybody's usage of a resource in windows that begin in `range`, a page of it.
    ///
    /// # Errors
    /// As [`usage_of_entity`](Self::usage_of_entity).
    ///
    /// # Cancel safety
    /// Nothing is changed.
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

    /// Usage summed per limit name. Of a resource, each unit counts once: what parents have of their children's is
    /// left out of [`Tally::own`], and is in [`Tally::units`].
    ///
    /// # Errors
    /// [`LimitError::Unavailable`] when the store is away.
    ///
    /// # Cancel safety
    /// Nothing is changed.
    pub async fn usage_sum(&self, query: &UsageQuery) -> Result<UsageSum, LimitError> {
        let first = Paging::first(1_000).map_err(LimitError::Store)?;
        let (mut sum, mut paging) = (UsageSum { limits: BTreeMap::new(), windows: 0 }, first.clone());
        loop {
            let page = self.usage(query, &paging).await?;
            for line in page.items {
                sum.windows += 1;
                sum.limits.entry(line.limit).or_default().add(line.tally);
            }
            match page.next {
                Some(next) => paging = first.clone().after(next),
                None => return Ok(sum),
            }
        }
    }

    /// How much of a resource's limits is in use, per limit name, over all its buckets. Limits given with calls are left
    /// out. A bucket counts by the rule it was last drawn by.
    ///
    /// # Errors
    /// [`LimitError::Name`] for a name that cannot be, [`LimitError::Unavailable`] when the store is away.
    ///
    /// # Cancel safety
    /// Nothing is changed.
    pub async fn capacity(&self, resource: &str) -> Result<BTreeMap<LimitName, Capacity>, LimitError> {
        let resource = ResourceName::new(resource)?;
        let first = Paging::first(1_000).map_err(LimitError::Store)?;
        let (mut sum, mut paging): (BTreeMap<LimitName, Capacity>, _) = (BTreeMap::new(), first.clone());
        loop {
            let shared = &self.shared;
            let page = shared.ask_patiently(shared.store.buckets(&resource, &paging)).await?;
            for bucket in page.items {
                for meter in bucket.meters.iter().filter(|meter| !meter.rule().is_of_call()) {
                    let capacity = sum.entry(meter.rule().name().clone()).or_default();
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
        self.shared.ask_patiently(self.shared.store.usage(query, paging)).await
    }
}
