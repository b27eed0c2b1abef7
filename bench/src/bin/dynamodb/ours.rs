//! Our side: a limiter over a DynamoDB table, and the requests that it sends.

use std::time::{Duration, Instant};

use anyhow::Result;
use tidegate::{DynamoDb, DynamoDbOptions, Lease, Limit, Limiter, Policy, ResourceName, Scope};
use tidegate_bench::measure::cpu_seconds;
use tokio::runtime::Runtime;

use crate::{ACQUIRES, CALLERS, Cost, ENTITIES, to_f64};

/// No timeout may expire on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(30);
const PLENTY: u64 = 1 << 39;
/// The resource of every other entity: its limits are not full again at the next acquire, those of `gpt-4`
/// are.
const SLOW: &str = "slow";

/// The operation to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Acquires; the leases are settled outside the measurement.
    Acquire,
    /// Acquires, each settled at once.
    Lease,
    /// Spends, without leases.
    Spend,
}

pub(crate) struct Side {
    store: DynamoDb,
    limiter: Limiter,
    runtime: Runtime,
}

impl Side {
    pub(crate) fn open(endpoint: &str) -> Result<Self> {
        // Single-threaded, like the peer.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let options = DynamoDbOptions::new(format!("bench-{}", std::process::id()))
            .endpoint(endpoint)
            .region("eu-central-1")
            .credentials("bench", "bench")
            .timeout(TIMEOUT);
        let store = runtime.block_on(async {
            options.create().await?;
            options.open().await
        })?;
        let limiter = Limiter::builder(store.clone())
            .defaults([Limit::per_minute("rpm", PLENTY), Limit::per_minute("tpm", PLENTY)])
            .store_deadline(TIMEOUT)
            .build()?;
        let slow = Policy::new([Limit::per_day("rpm", 5_000), Limit::per_day("tpm", 4_000_000)])?;
        runtime
            .block_on(limiter.admin("bench").set_policy(Scope::Resource(ResourceName::new(SLOW)?), slow))?;
        let side = Self { store, limiter, runtime };
        // Every entity is used before the measurement starts, as on the peer's side.
        side.measure(Kind::Spend, 2 * ENTITIES)?;
        Ok(side)
    }

    /// Costs of acquires, of acquires with their settles, and of spends.
    pub(crate) fn round(&self) -> Result<[Cost; 3]> {
        Ok([
            self.measure(Kind::Acquire, ACQUIRES)?,
            self.measure(Kind::Lease, ACQUIRES)?,
            self.measure(Kind::Spend, ACQUIRES)?,
        ])
    }

    fn measure(&self, kind: Kind, acquires: usize) -> Result<Cost> {
        let (requests, cpu, start) = (self.store.requests(), cpu_seconds(), Instant::now());
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
        let (seconds, cpu) = (start.elapsed().as_secs_f64(), cpu_seconds() - cpu);
        let (count, requests) = (to_f64(acquires / CALLERS * CALLERS), self.store.requests() - requests);
        self.runtime.block_on(async {
            for mut lease in open {
                lease.settle_full().await?;
            }
            anyhow::Ok(())
        })?;
        Ok(Cost {
            requests: to_f64(usize::try_from(requests)?) / count,
            cpu_micros: cpu * 1e6 / count,
            rate: count / seconds,
        })
    }
}

/// One caller: a number of sequential acquires. Returns the open leases.
async fn call(limiter: Limiter, kind: Kind, caller: usize, times: usize) -> Result<Vec<Lease>> {
    let mut open = Vec::new();
    // Each caller starts at another entity, and the stride visits all of them.
    let mut number = caller * 16;
    for _ in 0..times {
        let entity = number % ENTITIES;
        let (name, resource) =
            (format!("user-{entity}"), if entity.is_multiple_of(2) { SLOW } else { "gpt-4" });
        let (subject, cost) = ((&*name, resource), [("rpm", 1), ("tpm", 800)]);
        match kind {
            Kind::Acquire => open.push(limiter.try_acquire(subject, cost).await?),
            Kind::Lease => {
                limiter.try_acquire(subject, cost).await?.settle_full().await?;
            }
            Kind::Spend => limiter.spend(subject, cost).await?,
        }
        number += 17;
    }
    Ok(open)
}
