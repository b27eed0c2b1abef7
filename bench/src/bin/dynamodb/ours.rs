//! Our side: a limiter over a table, and what it asks of the server.

use std::time::{Duration, Instant};

use anyhow::Result;
use tidegate::{DynamoDb, DynamoDbOptions, Lease, Limit, Limiter, Policy, ResourceName, Scope};
use tidegate_bench::measure::own_seconds;
use tokio::runtime::Runtime;

use crate::{ACQUIRES, CALLERS, Cost, ENTITIES, counted};

/// Nobody is to be away on a machine that has much to do.
const PATIENCE: Duration = Duration::from_secs(30);
const PLENTY: u64 = 1 << 39;
/// The resource of every other entity, whose limits are not full again when they are asked next; those of the others are.
const SLOW: &str = "slow";

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Leases are drawn, and settled when that is measured.
    Acquire,
    /// They are settled one by one.
    Lease,
    /// There are none.
    Spend,
}

pub(crate) struct Side {
    store: DynamoDb,
    limiter: Limiter,
    runtime: Runtime,
}

impl Side {
    pub(crate) fn open(endpoint: &str) -> Result<Self> {
        // One thread, as the peer has.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let options = DynamoDbOptions::new(format!("bench-{}", std::process::id()))
            .endpoint(endpoint)
            .region("eu-central-1")
            .credentials("bench", "bench")
            // Nobody follows it, and the server slows down with all that was ever in one.
            .timeout(PATIENCE);
        let store = runtime.block_on(async {
            options.create().await?;
            options.open().await
        })?;
        let limiter = Limiter::builder(store.clone())
            .defaults([Limit::per_minute("rpm", PLENTY), Limit::per_minute("tpm", PLENTY)])
            .store_deadline(PATIENCE)
            .build()?;
        let slow = Policy::new([Limit::per_day("rpm", 5_000), Limit::per_day("tpm", 4_000_000)])?;
        runtime
            .block_on(limiter.admin("bench").set_policy(Scope::Resource(ResourceName::new(SLOW)?), slow))?;
        let side = Self { store, limiter, runtime };
        // Every entity is seen before anything is measured, as those of the peer are.
        side.part(Kind::Spend, 2 * ENTITIES)?;
        Ok(side)
    }

    /// What acquires take, leases with their settle, and spends.
    pub(crate) fn round(&self) -> Result<[Cost; 3]> {
        Ok([
            self.part(Kind::Acquire, ACQUIRES)?,
            self.part(Kind::Lease, ACQUIRES)?,
            self.part(Kind::Spend, ACQUIRES)?,
        ])
    }

    fn part(&self, kind: Kind, acquires: usize) -> Result<Cost> {
        let (requests, processor, start) = (self.store.requests(), own_seconds(), Instant::now());
        let open = self.runtime.block_on(async {
            let each = acquires / CALLERS;
            let callers =
                (0..CALLERS).map(|caller| tokio::spawn(call(self.limiter.clone(), kind, caller, each)));
            let mut open = Vec::new();
            for caller in callers.collect::<Vec<_>>() {
                open.extend(caller.await??);
            }
            anyhow::Ok(open)
        })?;
        let (seconds, processor) = (start.elapsed().as_secs_f64(), own_seconds() - processor);
        let (count, requests) = (counted(acquires / CALLERS * CALLERS), self.store.requests() - requests);
        self.runtime.block_on(async {
            for mut lease in open {
                lease.settle_as_held().await?;
            }
            anyhow::Ok(())
        })?;
        Ok(Cost {
            requests: counted(usize::try_from(requests)?) / count,
            processor: processor * 1e6 / count,
            rate: count / seconds,
        })
    }
}

/// One caller: so many acquires, one after the other. Answers the leases that are open.
async fn call(limiter: Limiter, kind: Kind, caller: usize, times: usize) -> Result<Vec<Lease>> {
    let mut open = Vec::new();
    // Each begins elsewhere, and goes on in steps that meet every entity.
    let mut number = caller * 16;
    for _ in 0..times {
        let entity = number % ENTITIES;
        let (name, resource) =
            (format!("user-{entity}"), if entity.is_multiple_of(2) { SLOW } else { "gpt-4" });
        let (subject, cost) = ((&*name, resource), [("rpm", 1), ("tpm", 800)]);
        match kind {
            Kind::Acquire => open.push(limiter.acquire(subject, cost).await?),
            Kind::Lease => {
                limiter.acquire(subject, cost).await?.settle_as_held().await?;
            }
            Kind::Spend => limiter.spend(subject, cost).await?,
        }
        number += 17;
    }
    Ok(open)
}
