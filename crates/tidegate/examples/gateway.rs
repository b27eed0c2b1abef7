//! A gateway: several tenants, one upstream that pushes back, and a file that remembers.
//!
//! `cargo run --example gateway [FILE] [SECONDS]`
//!
//! Each tenant has limits of its own, the house has some for all of them, and the upstream takes no more than it likes:
//! above that it answers "busy" with a time to come back. One permit stands for all three. Kill it while it runs
//! (`kill -9`, Ctrl-C) and start it again: usage and limits go on where they were.
#![allow(clippy::print_stdout, reason = "an example talks on its terminal")]

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tidegate::{
    Cost, Entity, EntityId, Expect, Joined, Limit, Limiter, Outcome, Paging, Policy, Scope, Slots, Stamp,
    Subject, Tally, Throttle, Window,
};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

const MODEL: &str = "large-model";
const HOUSE: &str = "house";
/// Tenants, and what each may use: tokens a minute, and at once.
const TENANTS: [(&str, u64, u64); 3] =
    [("acme", 120_000, 6_000), ("birch", 60_000, 3_000), ("cedar", 12_000, 1_200)];
/// Callers of each tenant at a time.
const CALLERS: usize = 6;
/// What a call is expected to use, and what it uses.
const ESTIMATE: u64 = 400;
const USED: u64 = 300;
/// Told after every so many calls.
const TOLD: u64 = 10;

#[tokio::main]
async fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let file = arguments
        .next()
        .unwrap_or_else(|| std::env::temp_dir().join("tidegate-gateway.db").display().to_string());
    let seconds = arguments.next().map_or(Ok(3), |seconds| seconds.parse())?;

    let store = tidegate::store::open(&format!("sqlite:{file}")).await?;
    let limiter = Limiter::over(store)
        // What a killed process held is settled at what it drew after half a minute.
        .lease_deadline(Duration::from_secs(30))
        // A disk that is busy for long is waited for: this has nothing else to go by.
        .store_deadline(Duration::from_secs(30))
        .build()?;
    let is_new = agree(&limiter).await?;
    println!(
        "{} {file} (process {})",
        if is_new { "a new file:" } else { "it goes on:" },
        std::process::id()
    );
    report(&limiter).await?;

    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let upstream = listener.local_addr()?;
    tokio::spawn(serve(listener));
    let throttle = Throttle::builder().slots(Slots::adaptive(1..=16)).build()?;
    let joined = throttle.limited_by(&limiter);
    println!("\nserving {} tenants for {seconds} s; kill it and start it again", TENANTS.len());
    let until = Instant::now() + Duration::from_secs(seconds);
    let callers = TENANTS.iter().flat_map(|(tenant, ..)| (0..CALLERS).map(move |_| *tenant));
    let done = Arc::new(AtomicU64::new(0));
    let callers: Vec<_> = callers
        .map(|tenant| {
            let caller = Caller { joined: joined.clone(), tenant, port: upstream.port(), done: done.clone() };
            tokio::spawn(caller.call_until(until))
        })
        .collect();
    let mut busy = 0;
    for caller in callers {
        busy += caller.await??;
    }

    let seen = throttle.snapshot();
    let slots = seen.slots.unwrap_or_default();
    println!("the upstream said busy {busy} times in {} calls; {slots} slots at the end\n", seen.admitted);
    // Every lease has ended when this comes back: the sums below are whole.
    limiter.drain().await;
    report(&limiter).await
}

/// Writes what is agreed, unless the file knows it. Answers whether it was new.
async fn agree(limiter: &Limiter) -> Result<bool> {
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
            // What it draws is drawn from the house too, all or nothing.
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
    /// Calls that all of them have done.
    done: Arc<AtomicU64>,
}

impl Caller {
    /// One call after the other. Answers how often the upstream was busy.
    async fn call_until(self, until: Instant) -> Result<u64> {
        let mut busy = 0;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let cost = Cost::request().tokens(ESTIMATE);
            let permit = match self.joined.acquire_within((self.tenant, MODEL), cost, left).await {
                Ok(permit) => permit,
                // Its limit, or the queue, will not do in the time that is left: for this caller that is the end.
                Err(error) if error.retry_after().is_some() || !error.is_final() => return Ok(busy),
                Err(error) => return Err(error.into()),
            };
            let outcome = match ask(self.port, ESTIMATE).await? {
                Answer::Done { used } => Outcome::success().spent(cost.tokens(used)),
                Answer::Busy { retry_after } => {
                    busy += 1;
                    // The throttle pauses and has fewer slots; the tenant gets its tokens back.
                    Outcome::overload().retry_after(retry_after)
                }
            };
            permit.settle(outcome).await?;
            let done = self.done.fetch_add(1, Ordering::Relaxed) + 1;
            if done.is_multiple_of(TOLD) {
                println!("{done} calls");
            }
        }
    }
}

/// What the upstream says.
enum Answer {
    Done { used: u64 },
    Busy { retry_after: Duration },
}

/// A call: one line there, one line back.
async fn ask(port: u16, tokens: u64) -> Result<Answer> {
    let mut stream = BufReader::new(TcpStream::connect(("127.0.0.1", port)).await?);
    stream.write_all(format!("ask {tokens}\n").as_bytes()).await?;
    let mut line = String::new();
    stream.read_line(&mut line).await?;
    match line.trim().split_once(' ') {
        Some(("done", used)) => Ok(Answer::Done { used: used.parse()? }),
        Some(("busy", millis)) => Ok(Answer::Busy { retry_after: Duration::from_millis(millis.parse()?) }),
        _ => Err(format!("the upstream said {line:?}").into()),
    }
}

/// The upstream: eight calls at a time, and whoever comes on top is told to come back.
async fn serve(listener: TcpListener) -> Result<()> {
    let places = Arc::new(Semaphore::new(8));
    loop {
        let (stream, _) = listener.accept().await?;
        let places = Arc::clone(&places);
        tokio::spawn(async move {
            let mut stream = BufReader::new(stream);
            let mut line = String::new();
            stream.read_line(&mut line).await?;
            let answer = match places.try_acquire() {
                Ok(_place) => {
                    sleep(Duration::from_millis(40)).await;
                    format!("done {USED}\n")
                }
                Err(_) => "busy 100\n".to_owned(),
            };
            stream.write_all(answer.as_bytes()).await
        });
    }
}

/// Who used what so far, and what is there now.
async fn report(limiter: &Limiter) -> Result<()> {
    println!("{:<8}{:>8}{:>12}{:>16}", "who", "calls", "tokens", "tokens there");
    // In one go, so that the sums are of one moment.
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
        let there = own.map(|line| line.balance.available).unwrap_or_default();
        println!("{who:<8}{:>8}{:>12}{there:>16}", used(who).leases, used(who).units);
    }
    Ok(())
}
