//! The shared limiter on the in-memory store, against limitador in memory, and its memory.

use std::collections::HashMap;
use std::hint::black_box;

use anyhow::{Context, Result, bail};
use limitador::RateLimiter;
use limitador::limit::{Context as PeerContext, Limit as PeerLimit};
use tidegate::{Across, Entity, EntityId, Expect, Limit, Limiter, Memory, Policy, Scope};
use tokio::runtime::Runtime;

use tidegate_bench::Case;
use tidegate_bench::counters::{instructions, numbers_by};
use tidegate_bench::measure::best_of_batches;
use tidegate_bench::report::Row;

const PLENTY: u64 = 1 << 39;
const ENTITIES: usize = 1_000;
const COST: [(&str, u64); 2] = [("rpm", 1), ("tpm", 800)];

pub(crate) const CASES: [Case; 6] = [
    ("memory_acquire", memory_acquire),
    ("memory_spend", |rounds| memory_spend(rounds).map(|row| vec![row])),
    ("memory_bucket_bytes", |_| memory_bucket_bytes()),
    ("cascade", |rounds| cascade(rounds).map(|row| vec![row])),
    ("pooled_acquire_memory", |rounds| pooled(rounds).map(|row| vec![row])),
    ("instructions", |_| counts()),
];

/// Runs a hot path for callgrind.
pub(crate) fn run_hot(name: &str, times: u32) -> Result<()> {
    let ours = Ours::new(1, false)?;
    let names = names();
    match name {
        "shared_acquire" => ours.acquire_and_settle(&names[..1], times),
        "shared_spend" => ours.spend(&names[..1], times),
        "shared_peer" => {
            let (peer, contexts) = peer(true)?;
            check_and_update(&peer, &contexts[..1], times);
        }
        other => bail!("unknown hot path `{other}`"),
    }
    Ok(())
}

/// A limiter whose entities have so many levels, each with two limits that are never reached, and a pool of all
/// entities if it `has_pool`.
struct Ours {
    limiter: Limiter,
    runtime: Runtime,
}

impl Ours {
    fn new(levels: usize, has_pool: bool) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
        let limiter = Limiter::new(Memory::new());
        runtime.block_on(async {
            let admin = limiter.admin("bench");
            let limits = [Limit::per_minute("rpm", PLENTY), Limit::per_minute("tpm", PLENTY)];
            let pool = has_pool.then(|| Limit::per_minute("tpm", PLENTY).across(Across::Entities));
            let limits = limits.into_iter().chain(pool);
            admin.set_policy(Scope::System, Policy::new(limits)?).await?;
            let mut parent: Option<EntityId> = None;
            for level in 1..levels {
                let id = EntityId::new(&format!("parent-{level}"))?;
                let entity = Entity::new(id.clone()).cascade();
                let entity = parent.into_iter().fold(entity, Entity::parent);
                admin.put_entity(&entity, Expect::Any).await?;
                parent = Some(id);
            }
            if let Some(parent) = parent {
                for name in names() {
                    let entity = Entity::new(EntityId::new(&name)?).parent(parent.clone()).cascade();
                    admin.put_entity(&entity, Expect::Any).await?;
                }
            }
            anyhow::Ok(())
        })?;
        Ok(Self { limiter, runtime })
    }

    fn acquire_and_settle(&self, names: &[String], times: u32) {
        self.runtime.block_on(async {
            for name in names.iter().cycle().take(times as usize) {
                let lease = self.limiter.try_acquire((name.as_str(), "gpt-4"), COST).await;
                let mut lease = lease.expect("there is plenty");
                black_box(lease.settle([("tpm", 640)]).await).expect("the store is in memory");
            }
        });
    }

    fn spend(&self, names: &[String], times: u32) {
        self.runtime.block_on(async {
            for name in names.iter().cycle().take(times as usize) {
                let spent = self.limiter.spend((name.as_str(), "gpt-4"), COST).await;
                black_box(spent).expect("there is plenty");
            }
        });
    }
}

fn names() -> Vec<String> {
    (0..ENTITIES).map(|number| format!("user-{number}")).collect()
}

/// Two limits, per user or for all, and the prebuilt contexts of the users' requests.
fn peer(per_user: bool) -> Result<(RateLimiter, Vec<PeerContext<'static>>)> {
    let peer = RateLimiter::new(2 * ENTITIES as u64);
    for (value, seconds) in [(PLENTY, 60), (PLENTY - 1, 60)] {
        let user = if per_user { vec!["user_id".try_into().context("a variable")?] } else { Vec::new() };
        peer.add_limit(PeerLimit::new("gpt-4", value, seconds, Vec::new(), user));
    }
    let context = |name| PeerContext::from(HashMap::from([("user_id".to_owned(), name)]));
    Ok((peer, names().into_iter().map(context).collect()))
}

fn check_and_update(peer: &RateLimiter, contexts: &[PeerContext<'_>], times: u32) {
    let namespace = "gpt-4".into();
    for context in contexts.iter().cycle().take(times as usize) {
        let checked = peer.check_rate_limited_and_update(&namespace, context, 1);
        assert!(!black_box(checked).expect("the limits apply").limited, "there is plenty");
    }
}

fn memory_acquire(rounds: u32) -> Result<Vec<Row>> {
    let (ours, names) = (Ours::new(1, false)?, names());
    let (peer, contexts) = peer(true)?;
    let pair = |count: usize| {
        best_of_batches(
            rounds,
            |times| ours.acquire_and_settle(&names[..count], times),
            |times| check_and_update(&peer, &contexts[..count], times),
        )
    };
    let one =
        "acquire + settle of two limits, lease and ledger included, vs limitador check and update of two";
    let many = "the same for a thousand users in turn";
    Ok(vec![
        Row::new("memory_acquire", pair(1), Some(0.5), "ns", one),
        Row::new("memory_acquire_1000", pair(ENTITIES), None, "ns", many),
    ])
}

fn memory_spend(rounds: u32) -> Result<Row> {
    let (ours, names) = (Ours::new(1, false)?, names());
    let (peer, contexts) = peer(false)?;
    let pair = best_of_batches(
        rounds,
        |times| ours.spend(&names, times),
        |times| check_and_update(&peer, &contexts, times),
    );
    let what = "spend of two limits per user vs limitador with two limits for all users, nothing per user";
    Ok(Row::new("memory_spend", pair, None, "ns", what))
}

fn cascade(rounds: u32) -> Result<Row> {
    let (three, one, names) = (Ours::new(3, false)?, Ours::new(1, false)?, names());
    let pair = best_of_batches(
        rounds,
        |times| three.acquire_and_settle(&names, times),
        |times| one.acquire_and_settle(&names, times),
    );
    Ok(Row::new("cascade", pair, Some(3.0), "ns", "acquire + settle on three levels vs on one"))
}

fn pooled(rounds: u32) -> Result<Row> {
    let (pooled, plain, names) = (Ours::new(1, true)?, Ours::new(1, false)?, names());
    let pair = best_of_batches(
        rounds,
        |times| pooled.acquire_and_settle(&names, times),
        |times| plain.acquire_and_settle(&names, times),
    );
    let what = "acquire + settle of two limits and a pooled one, vs without the pooled one";
    Ok(Row::new("pooled_acquire_memory", pair, Some(1.6), "ns", what))
}

fn memory_bucket_bytes() -> Result<Vec<Row>> {
    let bytes = numbers_by("memory", &["buckets"])?;
    let number = |name: &str| bytes.get(name).copied().with_context(|| format!("no `{name}`"));
    let what = "a bucket of two limits, of a million entities, without ledger and leases";
    let with_ledger = "the same with an hour of usage and the entity's lease remembered";
    Ok(vec![
        Row::new("memory_bucket_bytes", (number("bucket_bytes")?, 512.0), Some(1.0), "bytes", what),
        Row::new("memory_ledger_bytes", (number("ledger_bytes")?, 512.0), None, "bytes", with_ledger),
    ])
}

fn counts() -> Result<Vec<Row>> {
    let peer = instructions("shared_peer")?;
    let acquire = (instructions("shared_acquire")?, peer);
    let spend = (instructions("shared_spend")?, peer);
    let what = "memory_acquire on one entity, counted by callgrind";
    Ok(vec![
        Row::new("instructions_acquire", acquire, None, "instructions", what),
        Row::new("instructions_spend", spend, None, "instructions", "spend, counted by callgrind"),
    ])
}
