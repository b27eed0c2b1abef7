//! A gateway: several tenants, one upstream that rejects overload, and a file with limits and usage.
//!
//! `cargo run --example gateway [FILE] [SECONDS]`
//!
//! Each tenant has its own limits, the house limits all tenants together, and the upstream rejects calls
//! above its capacity as busy, with a retry delay. One permit covers all three. Kill the process while it
//! runs (`kill -9`, Ctrl-C) and start it again: usage and limits continue from the file.
#![allow(clippy::print_stdout, reason = "an example prints its results")]

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tidegate::{
    Class, Cost, Entity, EntityId, Expect, Joined, Limit, Limiter, Outcome, Paging, Policy, RunError, Scope,
    Slots, Stamp, Subject, Tally, Throttle, Window,
};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep, timeout_at};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

const MODEL: &str = "large-model";
const HOUSE: &str = "house";
/// Tenants with their tokens per minute and their burst.
const TENANTS: [(&str, u64, u64); 3] =
    [("acme", 120_000, 6_000), ("birch", 60_000, 3_000), ("cedar", 12_000, 1_200)];
/// Concurrent callers per tenant.
const CALLERS: usize = 6;
/// The estimated tokens of a call.
const ESTIMATE: u64 = 400;
/// The tokens that a call actually uses.
const USED: u64 = 300;
/// The number of calls between two progress lines.
const PROGRESS_EVERY: u64 = 10;

#[tokio::main]
async fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let file = arguments
        .next()
        .unwrap_or_else(|| std::env::temp_dir().join("tidegate-gateway.db").display().to_string());
    let seconds = arguments.next().map_or(Ok(3), |seconds| seconds.parse())?;

    let store = tidegate::store::open(&format!("sqlite:{file}")).await?;
    let limiter = Limiter::over(store)
        // Leases of a killed process expire after this time; the charged estimate stays.
        .lease_deadline(Duration::from_secs(30))
        // Tolerate a slow disk: without its store this example cannot continue.
        .store_deadline(Duration::from_secs(30))
        .build()?;
    let is_new = write_policies(&limiter).await?;
    println!("{} {file} (process {})", if is_new { "created" } else { "continuing" }, std::process::id());
    report(&limiter).await?;

    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let upstream = listener.local_addr()?;
    tokio::spawn(serve(listener));
    let throttle = Throttle::builder().slots(Slots::adaptive(1..=16)).build()?;
    let joined = throttle.limited_by(&limiter);
    println!("\nserving {} tenants for {seconds} s; kill the process and start it again", TENANTS.len());
    let until = Instant::now() + Duration::from_secs(seconds);
    let callers = TENANTS.iter().flat_map(|(tenant, ..)| (0..CALLERS).map(move |_| *tenant));
    let done = Arc::new(AtomicU64::new(0));
    let callers: Vec<_> = callers
        .map(|tenant| {
            let caller = Caller { joined: joined.clone(), tenant, port: upstream.port(), done: done.clone() };
            tokio::spawn(caller.call_until(until))
        })
        .collect();
    for caller in callers {
        caller.await??;
    }

    let snapshot = throttle.snapshot();
    let slots = snapshot.slots.unwrap_or_default();
    let (busy, calls) = (snapshot.outcomes.throttled, snapshot.admitted);
    println!("the upstream rejected {busy} of {calls} calls; {slots} slots at the end\n");
    // Waits until every lease is settled, so that the report includes all usage.
    limiter.drain().await;
    report(&limiter).await
}

/// Writes the policies unless the file already has them. Returns whether it wrote them.
async fn write_policies(limiter: &Limiter) -> Result<bool> {
    let admin = limiter.admin("gateway.rs");
    let (requests, per_minute) = (Limit::per_minute("rpm", 6_000), Limit::per_minute);
    let mut declared = vec![
        (Scope::System, Policy::new([requests])?),
        // All tenants together.
        (
            Scope::Subject(Subject::new(HOUSE, MODEL)?),
            Policy::new([per_minute("tpm", 150_000).burst(9_000)])?,
        ),
    ];
    for (tenant, tokens, burst) in TENANTS {
        let scope = Scope::Entity(EntityId::new(tenant)?);
        declared.push((scope, Policy::new([per_minute("tpm", tokens).burst(burst)])?));
    }
    let plan = admin.plan(&declared, tidegate::Undeclared::Keep).await?;
    let is_new = !plan.is_empty();
    if is_new {
        let house = EntityId::new(HOUSE)?;
        admin.put_entity(&Entity::new(house.clone()), Expect::Any).await?;
        for (tenant, ..) in TENANTS {
            // Each charge is also charged to the house, all or nothing.
            let entity = Entity::new(EntityId::new(tenant)?).parent(house.clone()).cascade();
            admin.put_entity(&entity, Expect::Any).await?;
        }
        admin.apply(&plan).await?;
    }
    Ok(is_new)
}

/// One caller of a tenant.
struct Caller {
    joined: Joined,
    tenant: &'static str,
    port: u16,
    /// Completed calls of all callers.
    done: Arc<AtomicU64>,
}

impl Caller {
    /// Makes one call after another until the deadline, each with the retries of the throttle.
    async fn call_until(self, until: Instant) -> Result<()> {
        let runner = self.joined.runner().classify(|answer: &Result<Response>| match answer {
            Ok(Response::Done { used }) => Class::end(Outcome::success().spent(Cost::from(*used))),
            // The throttle pauses and cuts its slots; the tenant gets a refund of its tokens.
            Ok(Response::Busy { retry_after }) => Class::again(Outcome::overload().retry_after(*retry_after)),
            Err(_) => Class::end(Outcome::failure()),
        });
        while Instant::now() < until {
            let run = runner.run((self.tenant, MODEL), ESTIMATE, |_| call(self.port, ESTIMATE));
            // A call that waits or runs at the deadline is dropped, and holds nothing afterwards.
            let Ok(answer) = timeout_at(until, run).await else { break };
            answer.map_err(RunError::boxed)?;
            let done = self.done.fetch_add(1, Ordering::Relaxed) + 1;
            if done.is_multiple_of(PROGRESS_EVERY) {
                println!("{done} calls");
            }
        }
        Ok(())
    }
}

/// A response of the upstream.
enum Response {
    Done { used: u64 },
    Busy { retry_after: Duration },
}

/// Makes a call: one line out, one line back.
async fn call(port: u16, tokens: u64) -> Result<Response> {
    let mut stream = BufReader::new(TcpStream::connect(("127.0.0.1", port)).await?);
    stream.write_all(format!("call {tokens}\n").as_bytes()).await?;
    let mut line = String::new();
    stream.read_line(&mut line).await?;
    match line.trim().split_once(' ') {
        Some(("done", used)) => Ok(Response::Done { used: used.parse()? }),
        Some(("busy", millis)) => Ok(Response::Busy { retry_after: Duration::from_millis(millis.parse()?) }),
        _ => Err(format!("unexpected response from the upstream: {line:?}").into()),
    }
}

/// The upstream: serves eight calls at a time and rejects the rest with a retry delay.
async fn serve(listener: TcpListener) -> Result<()> {
    let workers = Arc::new(Semaphore::new(8));
    loop {
        let (stream, _) = listener.accept().await?;
        let workers = Arc::clone(&workers);
        tokio::spawn(async move {
            let mut stream = BufReader::new(stream);
            let mut line = String::new();
            stream.read_line(&mut line).await?;
            let response = match workers.try_acquire() {
                Ok(_worker) => {
                    sleep(Duration::from_millis(40)).await;
                    format!("done {USED}\n")
                }
                Err(_) => "busy 100\n".to_owned(),
            };
            stream.write_all(response.as_bytes()).await
        });
    }
}

/// Prints the usage so far and the available tokens.
async fn report(limiter: &Limiter) -> Result<()> {
    println!("{:<8}{:>8}{:>12}{:>16}", "who", "calls", "tokens", "available");
    // One query, so that all sums are of the same moment.
    let always = Stamp::ZERO..Stamp::MAX;
    let lines = limiter.usage_of_resource(MODEL, Window::Month, always, &Paging::first(1_000)?).await?.items;
    let used = |who: &str| {
        let mut sum = Tally::default();
        let tokens = lines.iter().filter(|line| line.limit.as_str() == "tpm");
        for line in tokens.filter(|line| line.subject.entity.as_str() == who) {
            sum.add(line.tally);
        }
        sum
    };
    let tenants: u64 = TENANTS.iter().map(|(tenant, ..)| used(tenant).units).sum();
    if used(HOUSE).units != tenants {
        return Err(format!("the house used {} tokens, its tenants {tenants}", used(HOUSE).units).into());
    }
    for who in TENANTS.iter().map(|(tenant, ..)| *tenant).chain([HOUSE]) {
        let balances = limiter.balances((who, MODEL)).await?;
        let own = balances.iter().find(|line| line.balance.limit.as_str() == "tpm");
        let available = own.map(|line| line.balance.available).unwrap_or_default();
        println!("{who:<8}{:>8}{:>12}{available:>16}", used(who).leases, used(who).units);
    }
    Ok(())
}
