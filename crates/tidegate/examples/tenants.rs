//! A budget that an organisation shares: org, teams, users, and who used what.
//!
//! `cargo run --example tenants`
//!
//! The store goes by a clock that is moved by hand, so that minutes pass at once and every run prints the same.
#![allow(clippy::print_stdout, reason = "an example talks on its terminal")]

use std::error::Error;
use std::time::Duration;

use tidegate::store::ManualWall;
use tidegate::{
    Entity, EntityId, Expect, Limit, LimitLine, Limited, Limiter, Memory, Paging, Policy, ResourceName,
    Scope, Stamp, Subject, UsageOf, UsageQuery, Window,
};

type Done = Result<(), Box<dyn Error>>;

/// 2027-01-15, 08:00 UTC.
const START: Stamp = Stamp::from_secs(1_800_000_000);
const MODEL: &str = "large-model";

/// Who there is, and under whom: an organisation, two teams, three users.
const ENTITIES: [(&str, Option<&str>); 6] = [
    ("org", None),
    ("search", Some("org")),
    ("user-1", Some("search")),
    ("user-2", Some("search")),
    ("support", Some("org")),
    ("user-3", Some("support")),
];

#[tokio::main(flavor = "current_thread")]
async fn main() -> Done {
    let clock = ManualWall::new(START);
    let limiter = Limiter::new(Memory::with_clock(clock.clone()));

    heading("Who there is");
    write_entities(&limiter).await?;

    heading("What is agreed: the narrowest scope that speaks of a limit wins");
    write_policies(&limiter).await?;

    heading("What that means for user-1: a call draws from three levels, all or nothing");
    show_balances(&limiter, "user-1").await?;

    heading("A call: acquire with an estimate, settle with what it used");
    let mut lease = limiter.try_acquire(("user-1", MODEL), [("rpm", 1), ("tpm", 3_000)]).await?;
    println!("user-1 holds {} tokens while the call runs", held(&lease));
    lease.settle([("tpm", 2_400)]).await?;
    println!("settled at 2,400: the other 600 are back on all three levels");

    heading("An answer longer than expected: adjust, which is never refused");
    let mut lease = limiter.try_acquire(("user-2", MODEL), [("rpm", 1), ("tpm", 2_000)]).await?;
    lease.adjust([("tpm", 4_500)]).await?;
    lease.settle_full().await?;
    println!("user-2 drew 2,000 and adjusted by 4,500: its limit of 6,000 is in debt");
    println!();
    show_balances(&limiter, "user-2").await?;

    heading("Refused: which limit, whose it is, which policy says so, and when to come back");
    refuse(&limiter, "user-2", 1_000).await?;
    limiter.spend(("user-3", MODEL), [("rpm", 1), ("tpm", 9_000)]).await?;
    println!("user-3, of the other team, spends 9,000");
    refuse(&limiter, "user-1", 2_500).await?;
    refuse(&limiter, "user-1", 7_000).await?;

    heading("Explain: what would happen, and why; nothing is taken");
    let cost = [("rpm", 1), ("tpm", 2_500)];
    print!("{}", limiter.explain(("user-1", MODEL), cost).await?);

    let wait = limiter.time_until_available(("user-1", MODEL), cost).await?;
    heading(&format!("{} later (the clock is moved by hand)", seconds(wait)));
    clock.advance(wait);
    let mut lease = limiter.try_acquire(("user-1", MODEL), cost).await?;
    println!("user-1 draws {}, the last that the organisation has", held(&lease));
    lease.settle([("tpm", 2_100)]).await?;
    println!("settled at 2,100");

    heading("A call that fails: its lease is dropped, and all of it returns");
    drop(limiter.try_acquire(("user-3", MODEL), [("rpm", 1), ("tpm", 300)]).await?);
    println!("nothing is spent, and nothing is written to the ledger");

    heading("How things stand");
    show_balances(&limiter, "user-1").await?;

    heading("Who used what this hour");
    report(&limiter).await
}

/// Each draws from those above it too.
async fn write_entities(limiter: &Limiter) -> Done {
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

async fn write_policies(limiter: &Limiter) -> Done {
    let (per_minute, model) = (Limit::per_minute, ResourceName::new(MODEL)?);
    let policies = [
        // Whoever it is, whatever they use.
        (Scope::System, Policy::new([per_minute("rpm", 60)])?),
        // This model is dear: so much of it for each.
        (Scope::Resource(model), Policy::new([per_minute("tpm", 6_000)])?),
        // A team may use more than a user may, and so may one user.
        (Scope::Entity(EntityId::new("search")?), Policy::new([per_minute("tpm", 12_000)])?),
        (Scope::Entity(EntityId::new("support")?), Policy::new([per_minute("tpm", 12_000).burst(15_000)])?),
        (Scope::Entity(EntityId::new("user-3")?), Policy::new([per_minute("tpm", 10_000)])?),
        // What all of them have together.
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

/// Asks for what cannot be had, and reads the refusal.
async fn refuse(limiter: &Limiter, who: &str, tokens: u64) -> Done {
    let Err(error) = limiter.try_acquire((who, MODEL), [("rpm", 1), ("tpm", tokens)]).await else {
        return Err("there was more than expected".into());
    };
    println!("{who} asks for {}, and is refused:", grouped(tokens));
    for LimitLine { balance, source } in error.limited().into_iter().flat_map(Limited::short) {
        let (whose, limit) = (&balance.subject.entity, &balance.limit);
        let (there, burst) = (grouped_signed(balance.available), grouped(balance.burst));
        println!("    {limit} of {whose:<8}{there:>6} of {burst:>6} there   (by {source})");
    }
    match error.retry_after() {
        Some(wait) => println!("    come back in {}", seconds(wait)),
        None => println!("    never: it is more than a limit holds when it is full"),
    }
    Ok(())
}

async fn show_balances(limiter: &Limiter, who: &str) -> Done {
    println!("{:<10}{:<6}{:>10}{:>10}   by", "whose", "limit", "there", "of");
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

/// A row for each who used the model. `tokens` has what those below have used, `own` counts each token once.
async fn report(limiter: &Limiter) -> Done {
    let hour = Window::Hour.around(START);
    let page = limiter.usage_of_resource(MODEL, Window::Hour, hour.clone(), &Paging::default()).await?;
    println!("{:<14}{:>8}{:>10}{:>10}", "who", "calls", "tokens", "own");
    for (id, parent) in ENTITIES {
        let of = |line: &&tidegate::Usage| line.subject.entity.as_str() == id && line.limit.as_str() == "tpm";
        let tally = page.items.iter().find(of).map(|line| line.tally).unwrap_or_default();
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
    let tokens = sum.limits.get("tpm").map_or(0, |tally| tally.own);
    println!("{:<14}{:>8}{:>10}{:>10}", "together", "", "", grouped(tokens));
    Ok(())
}

fn heading(text: &str) {
    println!();
    println!("── {text}");
}

fn held(lease: &tidegate::Lease) -> String {
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
