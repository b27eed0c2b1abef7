//! A budget shared by an organisation, its teams and their users, with a usage report.
//!
//! `cargo run --example tenants`
//!
//! The store uses a manual clock, so that minutes pass at once and every run prints the same.
#![allow(clippy::print_stdout, reason = "an example prints its results")]

use std::error::Error;
use std::time::Duration;

use tidegate::store::ManualWall;
use tidegate::{
    Entity, EntityId, Expect, Limit, LimitLine, Limited, Limiter, Memory, Paging, Policy, ResourceName,
    Scope, Stamp, Subject, UsageOf, UsageQuery, Window,
};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// 2027-01-15, 08:00 UTC.
const START: Stamp = Stamp::from_secs(1_800_000_000);
const MODEL: &str = "large-model";

/// Entities and their parents: an organisation, two teams, three users.
const ENTITIES: [(&str, Option<&str>); 6] = [
    ("org", None),
    ("search", Some("org")),
    ("user-1", Some("search")),
    ("user-2", Some("search")),
    ("support", Some("org")),
    ("user-3", Some("support")),
];

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let clock = ManualWall::new(START);
    let limiter = Limiter::new(Memory::with_clock(clock.clone()));

    heading("Entities");
    write_entities(&limiter).await?;

    heading("Policies: for each limit the narrowest scope that defines it applies");
    write_policies(&limiter).await?;

    heading("Limits of user-1: a call is charged on three levels, all or nothing");
    show_balances(&limiter, "user-1").await?;

    heading("A call: acquire with an estimate, settle with the actual usage");
    let mut lease = limiter.try_acquire(("user-1", MODEL), [("rpm", 1), ("tpm", 3_000)]).await?;
    println!("user-1 holds {} tokens while the call runs", held_tokens(&lease));
    lease.settle([("tpm", 2_400)]).await?;
    println!("settled at 2,400: the other 600 are refunded on all three levels");

    heading("A response longer than estimated: adjust, which is never refused");
    let mut lease = limiter.try_acquire(("user-2", MODEL), [("rpm", 1), ("tpm", 2_000)]).await?;
    lease.adjust([("tpm", 4_500)]).await?;
    lease.settle_full().await?;
    println!("user-2 acquired 2,000 and adjusted by 4,500: its limit of 6,000 is in debt");
    println!();
    show_balances(&limiter, "user-2").await?;

    heading("Refused: the limit, its entity, its policy, and when to retry");
    show_refusal(&limiter, "user-2", 1_000).await?;
    limiter.spend(("user-3", MODEL), [("rpm", 1), ("tpm", 9_000)]).await?;
    println!("user-3, of the other team, spends 9,000");
    show_refusal(&limiter, "user-1", 2_500).await?;
    show_refusal(&limiter, "user-1", 7_000).await?;

    heading("Explain: the decision and its reasons, without a charge");
    let cost = [("rpm", 1), ("tpm", 2_500)];
    print!("{}", limiter.explain(("user-1", MODEL), cost).await?);

    let wait = limiter.time_until_available(("user-1", MODEL), cost).await?;
    heading(&format!("{} later, by the manual clock", seconds(wait)));
    clock.advance(wait);
    let mut lease = limiter.try_acquire(("user-1", MODEL), cost).await?;
    println!("user-1 acquires {}, all that the organisation has left", held_tokens(&lease));
    lease.settle([("tpm", 2_100)]).await?;
    println!("settled at 2,100");

    heading("A failed call: dropping its lease refunds all of it");
    drop(limiter.try_acquire(("user-3", MODEL), [("rpm", 1), ("tpm", 300)]).await?);
    println!("nothing is spent, and nothing is written to the ledger");

    heading("Balances");
    show_balances(&limiter, "user-1").await?;

    heading("Usage of this hour");
    report(&limiter).await
}

/// Writes the entities. A charge to one is also charged to its ancestors.
async fn write_entities(limiter: &Limiter) -> Result<()> {
    let admin = limiter.admin("tenants.rs");
    for (id, parent) in ENTITIES {
        let mut entity = Entity::new(EntityId::new(id)?);
        if let Some(parent) = parent {
            entity = entity.parent(EntityId::new(parent)?).cascade();
        }
        admin.put_entity(&entity, Expect::Absent).await?;
    }
    println!("org ─┬─ search ──┬─ user-1");
    println!("     │           └─ user-2");
    println!("     └─ support ─── user-3");
    Ok(())
}

async fn write_policies(limiter: &Limiter) -> Result<()> {
    let (per_minute, model) = (Limit::per_minute, ResourceName::new(MODEL)?);
    let policies = [
        // The default for every entity and resource.
        (Scope::System, Policy::new([per_minute("rpm", 60)])?),
        // The default of each entity for this expensive model.
        (Scope::Resource(model), Policy::new([per_minute("tpm", 6_000)])?),
        // Teams may use more, and so may one user.
        (Scope::Entity(EntityId::new("search")?), Policy::new([per_minute("tpm", 12_000)])?),
        (Scope::Entity(EntityId::new("support")?), Policy::new([per_minute("tpm", 12_000).burst(15_000)])?),
        (Scope::Entity(EntityId::new("user-3")?), Policy::new([per_minute("tpm", 10_000)])?),
        // The limits of the whole organisation.
        (
            Scope::Subject(Subject::new("org", MODEL)?),
            Policy::new([per_minute("tpm", 20_000), per_minute("rpm", 300)])?,
        ),
    ];
    for (scope, policy) in policies {
        let limits: Vec<String> = policy.rules().iter().map(ToString::to_string).collect();
        println!("{:<34}{}", scope.to_string(), limits.join("  "));
        limiter.admin("tenants.rs").set_policy(scope, policy).await?;
    }
    Ok(())
}

/// Requests more than is available, and prints the details of the error.
async fn show_refusal(limiter: &Limiter, who: &str, tokens: u64) -> Result<()> {
    let Err(error) = limiter.try_acquire((who, MODEL), [("rpm", 1), ("tpm", tokens)]).await else {
        return Err(format!("expected a refusal of {tokens} tokens for {who}").into());
    };
    println!("{who} requests {}, and is refused:", grouped(tokens));
    for LimitLine { balance, source } in error.limited().into_iter().flat_map(Limited::short) {
        let (entity, limit) = (&balance.subject.entity, &balance.limit);
        let (available, burst) = (grouped_signed(balance.available), grouped(balance.burst));
        println!("    {limit} of {entity:<8}{available:>6} of {burst:>6} available   (by {source})");
    }
    match error.retry_after() {
        Some(wait) => println!("    retry after {}", seconds(wait)),
        None => println!("    never: the request exceeds the burst of a limit"),
    }
    Ok(())
}

async fn show_balances(limiter: &Limiter, who: &str) -> Result<()> {
    println!("{:<10}{:<6}{:>10}{:>10}   by", "entity", "limit", "available", "burst");
    for LimitLine { balance, source } in limiter.balances((who, MODEL)).await? {
        println!(
            "{:<10}{:<6}{:>10}{:>10}   {source}",
            balance.subject.entity,
            balance.limit,
            grouped_signed(balance.available),
            grouped(balance.burst),
        );
    }
    Ok(())
}

/// Prints a row per entity. `tokens` includes the usage of descendants; `own` counts each token once.
async fn report(limiter: &Limiter) -> Result<()> {
    let hour = Window::Hour.around(START);
    let page = limiter.usage_of_resource(MODEL, Window::Hour, hour.clone(), &Paging::default()).await?;
    println!("{:<14}{:>8}{:>10}{:>10}", "entity", "calls", "tokens", "own");
    for (id, parent) in ENTITIES {
        let is_match =
            |line: &&tidegate::Usage| line.subject.entity.as_str() == id && line.limit.as_str() == "tpm";
        let tally = page.items.iter().find(is_match).map(|line| line.tally).unwrap_or_default();
        let indent = match parent {
            None => "",
            Some("org") => "  ",
            Some(_) => "    ",
        };
        println!(
            "{:<14}{:>8}{:>10}{:>10}",
            format!("{indent}{id}"),
            tally.leases,
            grouped(tally.units),
            grouped(tally.own),
        );
    }
    let query =
        UsageQuery { of: UsageOf::Resource(ResourceName::new(MODEL)?), window: Window::Hour, range: hour };
    let sum = limiter.usage_sum(&query).await?;
    let tokens = sum.limits.get(&"tpm".parse()?).map_or(0, |tally| tally.own);
    println!("{:<14}{:>8}{:>10}{:>10}", "total", "", "", grouped(tokens));
    Ok(())
}

fn heading(text: &str) {
    println!();
    println!("── {text}");
}

fn held_tokens(lease: &tidegate::Lease) -> String {
    grouped(lease.held("tpm").unwrap_or(0))
}

fn seconds(span: Duration) -> String {
    format!("{:.1} s", span.as_secs_f64())
}

/// A number with a comma between thousands.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

fn grouped_signed(number: i64) -> String {
    let sign = if number < 0 { "-" } else { "" };
    format!("{sign}{}", grouped(number.unsigned_abs()))
}
