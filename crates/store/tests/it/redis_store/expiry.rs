//! How long keys are kept, and by which clock.

use std::time::Duration;

use redis::aio::MultiplexedConnection;
use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::name::ResourceName;
use tidegate_core::limit::policy::OnExpiry;
use tidegate_core::limit::rule::Limit;
use tidegate_core::limit::usage::Window;
use tidegate_core::time::Stamp;
use tidegate_store::{
    Adjust, Buckets as _, Cancel, Draw, LeaseStatus, Ledger as _, Lookup, Paging, Policies as _,
    RepairReport, Settle, Store as _, StoreError, Terms, UsageOf, UsageQuery,
};

use crate::kit::common::{OPEN, balance, draw_on, eventually, join_all, own, until_answered};
use crate::kit::engine::{address, skip_without, unique};
use crate::kit::proxy::{Proxy, local};
use crate::kit::redis::{
    NEVER_SWEPT, REDIS, ask, connect, draw, granted, keys, levels, next_lease, options_at, settle, slow,
    subject,
};

#[tokio::test]
async fn bucket_expires_when_full_and_debt_when_paid() {
    skip_without!(REDIS);
    let (namespace, url) = (unique("kept"), address(REDIS));
    let store = options_at(&url).namespace(&namespace).open().await.unwrap();
    let mut connection = connect(&url).await;
    // Refills at once, but its lease lasts an hour.
    let quick = levels(1, &[("quick", &[Limit::per_second("rpm", 1_000)])]);
    let lease = draw(&quick, &[("rpm", 5)]);
    granted(store.draw(&lease).await);
    // Refills in ten days.
    let slow_levels = levels(1, &[("slow", &[slow("rpm", 10), Limit::per_second("tpm", 10)])]);
    granted(store.spend(&draw(&slow_levels, &[("rpm", 10), ("tpm", 1)])).await);
    // A debt of a thousand days.
    let debtor = levels(1, &[("debtor", &[slow("rpm", 10).debt_max(1_000)])]);
    let held = draw(&debtor, &[("rpm", 10)]);
    granted(store.draw(&held).await);
    let deltas = debtor.deltas(&[("rpm", 1_000)]).unwrap();
    let adjust = Adjust { lease: held.lease, step: 1, levels: debtor.clone(), deltas };
    store.adjust(&adjust).await.unwrap();
    let table = [
        ("quick", 3_600.0, 3.0 * 3_600.0),
        ("slow", 10.0 * 86_400.0, 11.0 * 86_400.0),
        ("debtor", 1_010.0 * 86_400.0, 1_011.0 * 86_400.0),
    ];
    for (entity, at_least, at_most) in table {
        let found = keys(&mut connection, &namespace, &format!("b:{entity}")).await;
        let [key] = &found[..] else { panic!("expected one bucket: {found:?}") };
        let millis: f64 = ask(&mut connection, &["PTTL", key]).await;
        let seconds = millis / 1_000.0;
        assert!((at_least..at_most).contains(&seconds), "`{entity}` expires in {seconds} s");
        // A draw from another limit does not shorten the expiry.
        let before: i64 = ask(&mut connection, &["PEXPIRETIME", key]).await;
        if entity == "slow" {
            granted(store.spend(&draw(&slow_levels, &[("tpm", 1)])).await);
            let after: i64 = ask(&mut connection, &["PEXPIRETIME", key]).await;
            assert!(after >= before, "{after} is earlier than {before}");
        }
    }
}

/// The server's time in milliseconds.
async fn millis(connection: &mut MultiplexedConnection) -> i64 {
    let [seconds, micros]: [i64; 2] = ask(connection, &["TIME"]).await;
    seconds * 1_000 + micros / 1_000
}

#[tokio::test]
async fn ended_lease_expires_after_ten_minutes() {
    skip_without!(REDIS);
    let (namespace, url) = (unique("leases"), address(REDIS));
    let store = options_at(&url).namespace(&namespace).open().await.unwrap();
    let mut connection = connect(&url).await;
    let levels = levels(1, &[("acme", &[slow("rpm", 10)])]);
    let before = millis(&mut connection).await;
    let lease = draw(&levels, &[("rpm", 1)]);
    granted(store.draw(&lease).await);
    let found = keys(&mut connection, &namespace, "l:").await;
    assert_eq!(found.len(), 1);
    let ttl: i64 = ask(&mut connection, &["PTTL", &found[0]]).await;
    assert_eq!(ttl, -1, "an open lease does not expire");
    store.settle(&settle(&lease, &[])).await.unwrap();
    let never = next_lease();
    let cancel = Cancel { lease: never, step: 1, levels: levels.clone(), is_watched: true };
    store.cancel(&cancel).await.unwrap();
    granted(store.spend(&draw(&levels, &[("rpm", 1)])).await);
    // A lease id chosen by the caller has no timestamp.
    let chosen = Draw { lease: LeaseId::chosen(7), ..draw(&levels, &[("rpm", 1)]) };
    granted(store.draw(&chosen).await);
    store.settle(&settle(&chosen, &[])).await.unwrap();
    let in_ten_minutes = before + 600_000..=millis(&mut connection).await + 600_000;
    let mut found = 0;
    for key in keys(&mut connection, &namespace, "e:").await {
        let expires_at: i64 = ask(&mut connection, &["PEXPIRETIME", &key]).await;
        assert!(
            in_ten_minutes.contains(&expires_at),
            "{key} expires at {expires_at}, expected {in_ten_minutes:?}"
        );
        found += ask::<u64>(&mut connection, &["HLEN", &key]).await;
    }
    assert_eq!(found, 3, "a settled lease, a cancel mark, and a spent lease");
    let found = keys(&mut connection, &namespace, "l:").await;
    assert_eq!(found, [format!("tidegate:{{{namespace}}}:l:{}", LeaseId::chosen(7))]);
    let expires_at: i64 = ask(&mut connection, &["PEXPIRETIME", &found[0]]).await;
    assert!(
        in_ten_minutes.contains(&expires_at),
        "the lease expires at {expires_at}, expected {in_ten_minutes:?}"
    );
    let open: u64 = ask(&mut connection, &["ZCARD", &format!("tidegate:{{{namespace}}}:open")]).await;
    assert_eq!(open, 0);
}

/// A test cannot set the server's clock, but it can change the stored reading.
#[tokio::test]
async fn clock_step_back_gives_no_credit() {
    skip_without!(REDIS);
    let (namespace, url) = (unique("clock"), address(REDIS));
    let store = options_at(&url).namespace(&namespace).open().await.unwrap();
    let mut connection = connect(&url).await;
    let levels = levels(1, &[("acme", &[Limit::per_hour("rpm", 60)])]);
    granted(store.spend(&draw(&levels, &[("rpm", 60)])).await);
    let now = async || store.balances(&Lookup::Subjects(Vec::new())).await.unwrap().at;
    let before = now().await;
    // As if the last draw had been an hour later, and the clock had stepped back since.
    let ahead = before + Duration::from_secs(3_600);
    let seconds = ahead.as_micros() / 1_000_000;
    let mut kept = Vec::new();
    for number in [f64::from(u32::try_from(seconds).unwrap()), 0.0, 0.0, 0.0] {
        kept.extend(number.to_le_bytes());
    }
    let key = format!("tidegate:{{{namespace}}}:clock");
    redis::cmd("SET").arg(&key).arg(kept).exec_async(&mut connection).await.unwrap();
    let moved = granted(store.spend(&draw(&levels, &[("rpm", 30)])).await);
    assert!(moved.at.as_micros() >= seconds * 1_000_000, "time continues from the last reading");
    assert!(moved.at.as_micros() < (seconds + 600) * 1_000_000);
    // The stored hour is credited once, and no more.
    let later = now().await;
    assert!(later >= moved.at);
    let seen = store.balances(&Lookup::Subjects(vec![subject("acme")])).await.unwrap();
    assert!(seen.clock_offset <= Duration::from_secs(3_600));
    assert!(seen.clock_offset > Duration::from_secs(3_000), "{:?}", seen.clock_offset);
    assert!(seen.buckets[0].meters[0].available(seen.at) <= 30);
    // A small step is waited out: time does not run backwards.
    for _ in 0..3 {
        let next = granted(store.spend(&draw(&levels, &[("rpm", 1)])).await).at;
        assert!(next >= later);
    }
}

#[tokio::test]
async fn usage_is_booked_at_the_servers_clock() {
    skip_without!(REDIS);
    let (namespace, url) = (unique("booked"), address(REDIS));
    let store = options_at(&url).namespace(&namespace).open().await.unwrap();
    let mut connection = connect(&url).await;
    let levels = levels(1, &[("acme", &[slow("rpm", 60)])]);
    let hour = async |connection: &mut _| {
        let [seconds, _]: [u64; 2] = ask(connection, &["TIME"]).await;
        Stamp::from_secs(seconds - seconds % 3_600)
    };
    let before = hour(&mut connection).await;
    let two_hours_on = u32::try_from(before.as_micros() / 1_000_000 + 7_200).unwrap();
    let kept: Vec<u8> =
        [f64::from(two_hours_on), 0.0, 0.0, 0.0].into_iter().flat_map(f64::to_le_bytes).collect();
    let key = format!("tidegate:{{{namespace}}}:clock");
    redis::cmd("SET").arg(&key).arg(kept).exec_async(&mut connection).await.unwrap();
    let at = granted(store.spend(&draw(&levels, &[("rpm", 1)])).await).at;
    assert!(at >= before + Duration::from_secs(7_200));
    let lease = draw(&levels, &[("rpm", 2)]);
    granted(store.draw(&lease).await);
    store.settle(&settle(&lease, &[("rpm", 2)])).await.unwrap();
    let after = hour(&mut connection).await;
    let of = UsageOf::Resource(ResourceName::new("gpt").unwrap());
    let query = UsageQuery { of, window: Window::Hour, range: Stamp::ZERO..Stamp::MAX };
    let lines = store.usage(&query, &Paging::default()).await.unwrap().items;
    assert_eq!(lines.iter().map(|line| line.tally.units).sum::<u64>(), 3);
    assert!(lines.iter().all(|line| (before..=after).contains(&line.start)), "{lines:?}");
}

#[tokio::test]
async fn change_is_announced_to_other_processes() {
    skip_without!(REDIS);
    let (namespace, url) = (unique("heard"), address(REDIS));
    let writer = options_at(&url).namespace(&namespace).open().await.unwrap();
    let reader = options_at(&url).namespace(&namespace).open().await.unwrap();
    let mut changes = reader.changes().expect("Redis announces changes");
    let change = tidegate_store::PolicyChange {
        scope: tidegate_core::limit::policy::Scope::System,
        expect: tidegate_core::limit::policy::Expect::Any,
        policy: Some(tidegate_core::limit::policy::Policy::new([slow("rpm", 1)]).unwrap()),
    };
    let version = writer.apply(&[change], "ops").await.unwrap();
    while changes.newest() < version {
        changes.changed().await;
    }
    assert_eq!(changes.newest(), version);
}

#[tokio::test]
async fn missed_announcements_are_read_later() {
    skip_without!(REDIS);
    let (namespace, url) = (unique("missed"), address(REDIS));
    let port = url.rsplit(':').next().and_then(|port| port.parse().ok()).expect("an address with a port");
    let wire = Proxy::to(local(port)).await;
    let direct = options_at(&url).namespace(&namespace).open().await.unwrap();
    let proxied = options_at(&wire.redis()).namespace(&namespace).open().await.unwrap();
    let mut changes = proxied.changes().expect("Redis announces changes");
    for round in 0..3 {
        wire.take_down(true);
        let policy = Some(tidegate_core::limit::policy::Policy::new([slow("rpm", 1 + round)]).unwrap());
        let change = tidegate_store::PolicyChange {
            scope: tidegate_core::limit::policy::Scope::System,
            expect: tidegate_core::limit::policy::Expect::Any,
            policy,
        };
        let version = direct.apply(&[change], "ops").await.unwrap();
        wire.take_down(false);
        // Wait for the connection: a listener whose first read fails waits for seconds until the next.
        until_answered(|| proxied.version()).await.unwrap();
        while changes.newest() < version {
            changes.changed().await;
        }
    }
}

#[tokio::test]
async fn repair_rebuilds_a_damaged_index() {
    skip_without!(REDIS);
    let (namespace, url) = (unique("repair [x]"), address(REDIS));
    let store = options_at(&url).namespace(&namespace).open().await.unwrap();
    for entity in ["acme", "globex", "initech"] {
        let levels = levels(1, &[(entity, &[slow("rpm", 10)])]);
        granted(store.spend(&draw(&levels, &[("rpm", 1)])).await);
    }
    assert_eq!(store.repair().await.unwrap(), RepairReport::default());
    let listed = async || {
        let page = store.buckets(&subject("x").resource, &Paging::default()).await.unwrap();
        page.items.iter().map(|bucket| bucket.subject.entity.to_string()).collect::<Vec<_>>()
    };
    let all = listed().await;
    assert_eq!(all, ["acme", "globex", "initech"]);
    // One entry is lost, and one refers to a missing bucket.
    let index = format!("tidegate:{{{namespace}}}:index");
    let mut calls = vec![redis::cmd("ZREM"), redis::cmd("ZADD")];
    calls[0].arg(&index).arg("s\0globex\0gpt").arg("r\0gpt\0globex");
    calls[1].arg(&index).arg(0).arg("s\0unused\0gpt").arg(0).arg("r\0gpt\0unused");
    for call in calls {
        call.exec_async(&mut connect(&url).await).await.unwrap();
    }
    assert_eq!(listed().await, ["acme", "initech"]);
    assert_eq!(store.repair().await.unwrap(), RepairReport { added: 1, removed: 1 });
    assert_eq!(listed().await, all);
}

/// The key of ended leases whose ids have the same timestamp as this one.
fn ended_key(namespace: &str, lease: LeaseId) -> String {
    format!("tidegate:{{{namespace}}}:e:{:x}", lease.millis() >> 6)
}

#[tokio::test]
async fn lease_ended_by_an_older_version_is_found() {
    skip_without!(REDIS);
    let (namespace, url) = (unique("older"), address(REDIS));
    let store = options_at(&url).namespace(&namespace).open().await.unwrap();
    let mut connection = connect(&url).await;
    let levels = levels(1, &[("acme", &[slow("rpm", 10)])]);
    let spent = draw(&levels, &[("rpm", 3)]);
    granted(store.spend(&spent).await);
    let (there, id) = (ended_key(&namespace, spent.lease), spent.lease.to_string());
    let mut read = redis::cmd("HGET");
    let ended: Vec<u8> = read.arg(&there).arg(&id).query_async(&mut connection).await.unwrap();
    ask::<i64>(&mut connection, &["DEL", &there]).await;
    let own = format!("tidegate:{{{namespace}}}:l:{id}");
    redis::cmd("SET").arg(&own).arg(ended).exec_async(&mut connection).await.unwrap();
    assert!(granted(store.spend(&spent).await).is_repeat);
    assert!(matches!(store.lease(spent.lease).await.unwrap(), LeaseStatus::Ended(_)));
    let seen = store.balances(&Lookup::Subjects(vec![subject("acme")])).await.unwrap();
    assert_eq!(seen.buckets[0].meters[0].consumed(), 3);
}

#[tokio::test]
async fn foreign_value_in_an_ended_key_changes_nothing() {
    skip_without!(REDIS);
    let (namespace, url) = (unique("moments"), address(REDIS));
    let store = options_at(&url).namespace(&namespace).open().await.unwrap();
    let mut connection = connect(&url).await;
    let levels = levels(1, &[("acme", &[slow("rpm", 10)])]);
    granted(store.spend(&draw(&levels, &[("rpm", 1)])).await);
    let at = |random| Draw { lease: LeaseId::new(7 << 6, random), ..draw(&levels, &[("rpm", 2)]) };
    let open = at(1);
    granted(store.draw(&open).await);
    let there = ended_key(&namespace, open.lease);
    ask::<String>(&mut connection, &["SET", &there, "foreign"]).await;
    for is_watched in [true, false] {
        let spent = store.spend(&Draw { is_watched, ..at(2) }).await.unwrap_err();
        let settled = store.settle(&Settle { is_watched, ..settle(&open, &[]) }).await.unwrap_err();
        for error in [spent, settled] {
            assert!(matches!(error, StoreError::Corrupt { .. }), "{error}");
        }
    }
    ask::<i64>(&mut connection, &["DEL", &there]).await;
    assert!(matches!(store.lease(open.lease).await.unwrap(), LeaseStatus::Open(_)));
    store.settle(&settle(&open, &[])).await.unwrap();
    let query = UsageQuery {
        of: UsageOf::Entity(subject("acme").entity),
        window: Window::Hour,
        range: Stamp::from_micros(0)..Stamp::MAX,
    };
    let used = store.usage(&query, &Paging::first(10).unwrap()).await.unwrap().items;
    let used: Vec<_> = used.iter().map(|line| (line.tally.units, line.tally.leases)).collect();
    assert_eq!(used.iter().fold((0, 0), |sum, line| (sum.0 + line.0, sum.1 + line.1)), (3, 2));
    let seen = store.balances(&Lookup::Subjects(vec![subject("acme")])).await.unwrap();
    assert_eq!(seen.buckets[0].meters[0].consumed(), 3);
}

/// Regression: a sweep in the background ended at most 1,000 leases, and the next one began five seconds
/// later: a namespace with more expiries than that fell behind for good.
#[tokio::test]
async fn one_sweep_ends_all_leases_that_are_due() {
    skip_without!(REDIS);
    let (namespace, url) = (unique("due"), address(REDIS));
    let options = options_at(&url).namespace(&namespace);
    let store = options.clone().swept_every(NEVER_SWEPT).open().await.unwrap();
    let sweeping = options.swept_every(Duration::ZERO).open().await.unwrap();
    let levels = own("acme", 10_000);
    let terms = Terms { deadline: Duration::from_millis(1), on_expiry: OnExpiry::Return };
    let draws: Vec<_> = (0..1_200).map(|_| draw_on(terms, &levels, 1)).collect();
    let mut last = Stamp::ZERO;
    for drawn in join_all(draws.iter().map(|draw| store.draw(draw)).collect()).await {
        last = last.max(granted(drawn).at);
    }
    let mut connection = connect(&url).await;
    let due = i64::try_from((last + terms.deadline).as_micros() / 1_000).unwrap();
    eventually("all are due", async || millis(&mut connection).await > due).await;
    // It starts one sweep, and its own lease stays.
    granted(sweeping.draw(&draw_on(OPEN, &levels, 1)).await);
    let open = format!("tidegate:{{{namespace}}}:open");
    eventually("the sweep has ended them", async || {
        ask::<u64>(&mut connection, &["ZCARD", &open]).await == 1
    })
    .await;
    assert_eq!(balance(&store, "acme").await, Some((9_999, 1)));
}
