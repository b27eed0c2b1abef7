//! What is kept for how long, and by which clock.

use std::time::Duration;

use redis::aio::MultiplexedConnection;
use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::name::ResourceName;
use tidegate_core::limit::rule::Limit;
use tidegate_core::limit::usage::Window;
use tidegate_core::time::Stamp;
use tidegate_store::{
    Adjust, Buckets as _, Cancel, Draw, Ledger as _, Lookup, Paging, Policies as _, Repaired, Settle,
    Standing, Store as _, StoreError, UsageOf, UsageQuery,
};

use crate::kit::engine::{address, skip_without, unique};
use crate::kit::proxy::{Proxy, local};
use crate::kit::redis::{
    REDIS, ask, connect, draw, granted, keys, levels, next_lease, patient, settle, slow, subject,
};
use crate::kit::words::until_answered;

#[tokio::test]
async fn a_bucket_is_kept_until_it_is_full_and_a_debt_until_it_is_paid() {
    skip_without!(REDIS);
    let (namespace, url) = (unique("kept"), address(REDIS));
    let store = patient(&url).namespace(&namespace).open().await.unwrap();
    let mut connection = connect(&url).await;
    // Full again in a moment, but its lease has an hour.
    let quick = levels(1, &[("quick", &[Limit::per_second("rpm", 1_000)])]);
    let lease = draw(&quick, &[("rpm", 5)]);
    granted(store.draw(&lease).await);
    // Full again in ten days.
    let slowly = levels(1, &[("slow", &[slow("rpm", 10), Limit::per_second("tpm", 10)])]);
    granted(store.spend(&draw(&slowly, &[("rpm", 10), ("tpm", 1)])).await);
    // A thousand days of debt.
    let debtor = levels(1, &[("debtor", &[slow("rpm", 10)])]);
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
        let [key] = &found[..] else { panic!("one bucket, and not {found:?}") };
        let millis: f64 = ask(&mut connection, &["PTTL", key]).await;
        let seconds = millis / 1_000.0;
        assert!((at_least..at_most).contains(&seconds), "`{entity}` goes in {seconds} s");
        // A draw of another limit does not shorten what is left.
        let before: i64 = ask(&mut connection, &["PEXPIRETIME", key]).await;
        if entity == "slow" {
            granted(store.spend(&draw(&slowly, &[("tpm", 1)])).await);
            let after: i64 = ask(&mut connection, &["PEXPIRETIME", key]).await;
            assert!(after >= before, "{after} is earlier than {before}");
        }
    }
}

/// The server's time.
async fn millis(connection: &mut MultiplexedConnection) -> i64 {
    let [seconds, micros]: [i64; 2] = ask(connection, &["TIME"]).await;
    seconds * 1_000 + micros / 1_000
}

#[tokio::test]
async fn an_open_lease_is_kept_and_an_ended_one_goes_after_ten_minutes() {
    skip_without!(REDIS);
    let (namespace, url) = (unique("leases"), address(REDIS));
    let store = patient(&url).namespace(&namespace).open().await.unwrap();
    let mut connection = connect(&url).await;
    let levels = levels(1, &[("acme", &[slow("rpm", 10)])]);
    let before = millis(&mut connection).await;
    let lease = draw(&levels, &[("rpm", 1)]);
    granted(store.draw(&lease).await);
    let found = keys(&mut connection, &namespace, "l:").await;
    assert_eq!(found.len(), 1);
    let ttl: i64 = ask(&mut connection, &["PTTL", &found[0]]).await;
    assert_eq!(ttl, -1, "an open lease is ended, not forgotten");
    store.settle(&settle(&lease, &[])).await.unwrap();
    let never = next_lease();
    let cancel = Cancel { lease: never, step: 1, levels: levels.clone(), is_watched: true };
    store.cancel(&cancel).await.unwrap();
    granted(store.spend(&draw(&levels, &[("rpm", 1)])).await);
    // One that a caller has chosen tells no moment.
    let chosen = Draw { lease: LeaseId::chosen(7), ..draw(&levels, &[("rpm", 1)]) };
    granted(store.draw(&chosen).await);
    store.settle(&settle(&chosen, &[])).await.unwrap();
    let ten_minutes_on = before + 600_000..=millis(&mut connection).await + 600_000;
    let mut found = 0;
    for key in keys(&mut connection, &namespace, "e:").await {
        let gone: i64 = ask(&mut connection, &["PEXPIRETIME", &key]).await;
        assert!(ten_minutes_on.contains(&gone), "{key} goes at {gone}, and not in {ten_minutes_on:?}");
        found += ask::<u64>(&mut connection, &["HLEN", &key]).await;
    }
    assert_eq!(found, 3, "one that was settled, a mark, and one that was spent");
    let found = keys(&mut connection, &namespace, "l:").await;
    assert_eq!(found, [format!("tidegate:{{{namespace}}}:l:{}", LeaseId::chosen(7))]);
    let gone: i64 = ask(&mut connection, &["PEXPIRETIME", &found[0]]).await;
    assert!(ten_minutes_on.contains(&gone), "it goes at {gone}, and not in {ten_minutes_on:?}");
    let open: u64 = ask(&mut connection, &["ZCARD", &format!("tidegate:{{{namespace}}}:open")]).await;
    assert_eq!(open, 0);
}

/// The server's clock cannot be set by a test; what is kept of it can.
#[tokio::test]
async fn a_clock_that_was_set_back_goes_on_from_where_it_was_without_credit() {
    skip_without!(REDIS);
    let (namespace, url) = (unique("clock"), address(REDIS));
    let store = patient(&url).namespace(&namespace).open().await.unwrap();
    let mut connection = connect(&url).await;
    let levels = levels(1, &[("acme", &[Limit::per_hour("rpm", 60)])]);
    granted(store.spend(&draw(&levels, &[("rpm", 60)])).await);
    let now = async || store.balances(&Lookup::Subjects(Vec::new())).await.unwrap().at;
    let before = now().await;
    // As if the last draw had been an hour from now, and the clock set back since.
    let ahead = before + Duration::from_secs(3_600);
    let seconds = ahead.as_micros() / 1_000_000;
    let mut kept = Vec::new();
    for number in [f64::from(u32::try_from(seconds).unwrap()), 0.0, 0.0, 0.0] {
        kept.extend(number.to_le_bytes());
    }
    let key = format!("tidegate:{{{namespace}}}:clock");
    redis::cmd("SET").arg(&key).arg(kept).exec_async(&mut connection).await.unwrap();
    let moved = granted(store.spend(&draw(&levels, &[("rpm", 30)])).await);
    assert!(moved.at.as_micros() >= seconds * 1_000_000, "time goes on from where it was");
    assert!(moved.at.as_micros() < (seconds + 600) * 1_000_000);
    // That hour was really there by the clock of then, and no more.
    let later = now().await;
    assert!(later >= moved.at);
    let seen = store.balances(&Lookup::Subjects(vec![subject("acme")])).await.unwrap();
    assert!(seen.clock_offset <= Duration::from_secs(3_600));
    assert!(seen.clock_offset > Duration::from_secs(3_000), "{:?}", seen.clock_offset);
    assert!(seen.buckets[0].meters[0].available(seen.at) <= 30);
    // A small step is waited out: time does not run back.
    for _ in 0..3 {
        let next = granted(store.spend(&draw(&levels, &[("rpm", 1)])).await).at;
        assert!(next >= later);
    }
}

#[tokio::test]
async fn usage_is_booked_at_the_servers_clock() {
    skip_without!(REDIS);
    let (namespace, url) = (unique("booked"), address(REDIS));
    let store = patient(&url).namespace(&namespace).open().await.unwrap();
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
async fn a_change_is_heard_of_by_other_processes_at_once() {
    skip_without!(REDIS);
    let (namespace, url) = (unique("heard"), address(REDIS));
    let writer = patient(&url).namespace(&namespace).open().await.unwrap();
    let reader = patient(&url).namespace(&namespace).open().await.unwrap();
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
async fn what_was_announced_while_nobody_listened_is_read_later() {
    skip_without!(REDIS);
    let (namespace, url) = (unique("missed"), address(REDIS));
    let port = url.rsplit(':').next().and_then(|port| port.parse().ok()).expect("an address with a port");
    let wire = Proxy::to(local(port)).await;
    let near = patient(&url).namespace(&namespace).open().await.unwrap();
    let far = patient(&wire.redis()).namespace(&namespace).open().await.unwrap();
    let mut changes = far.changes().expect("Redis announces changes");
    for round in 0..3 {
        wire.take_down(true);
        let policy = Some(tidegate_core::limit::policy::Policy::new([slow("rpm", 1 + round)]).unwrap());
        let change = tidegate_store::PolicyChange {
            scope: tidegate_core::limit::policy::Scope::System,
            expect: tidegate_core::limit::policy::Expect::Any,
            policy,
        };
        let version = near.apply(&[change], "ops").await.unwrap();
        wire.take_down(false);
        // Connected again: a listener whose first read fails waits for seconds until the next.
        until_answered(|| far.version()).await.unwrap();
        while changes.newest() < version {
            changes.changed().await;
        }
    }
}

#[tokio::test]
async fn an_index_that_has_lost_a_subject_is_repaired_by_looking_through_the_keys() {
    skip_without!(REDIS);
    let (namespace, url) = (unique("repair [x]"), address(REDIS));
    let store = patient(&url).namespace(&namespace).open().await.unwrap();
    for entity in ["acme", "globex", "initech"] {
        let levels = levels(1, &[(entity, &[slow("rpm", 10)])]);
        granted(store.spend(&draw(&levels, &[("rpm", 1)])).await);
    }
    assert_eq!(store.repair().await.unwrap(), Repaired::default());
    let listed = async || {
        let page = store.buckets(&subject("x").resource, &Paging::default()).await.unwrap();
        page.items.iter().map(|bucket| bucket.subject.entity.to_string()).collect::<Vec<_>>()
    };
    let all = listed().await;
    assert_eq!(all, ["acme", "globex", "initech"]);
    // One is lost, and one is known that is not there.
    let index = format!("tidegate:{{{namespace}}}:index");
    let mut calls = vec![redis::cmd("ZREM"), redis::cmd("ZADD")];
    calls[0].arg(&index).arg("s\0globex\0gpt").arg("r\0gpt\0globex");
    calls[1].arg(&index).arg(0).arg("s\0nobody\0gpt").arg(0).arg("r\0gpt\0nobody");
    for call in calls {
        call.exec_async(&mut connect(&url).await).await.unwrap();
    }
    assert_eq!(listed().await, ["acme", "initech"]);
    assert_eq!(store.repair().await.unwrap(), Repaired { added: 1, removed: 1 });
    assert_eq!(listed().await, all);
}

/// The key of those that have ended whose ids were made when this one was.
fn moment(namespace: &str, lease: LeaseId) -> String {
    format!("tidegate:{{{namespace}}}:e:{:x}", lease.millis() >> 6)
}

#[tokio::test]
async fn a_lease_that_ended_under_an_older_version_is_found_where_it_was() {
    skip_without!(REDIS);
    let (namespace, url) = (unique("older"), address(REDIS));
    let store = patient(&url).namespace(&namespace).open().await.unwrap();
    let mut connection = connect(&url).await;
    let levels = levels(1, &[("acme", &[slow("rpm", 10)])]);
    let spent = draw(&levels, &[("rpm", 3)]);
    granted(store.spend(&spent).await);
    let (there, id) = (moment(&namespace, spent.lease), spent.lease.to_string());
    let mut read = redis::cmd("HGET");
    let ended: Vec<u8> = read.arg(&there).arg(&id).query_async(&mut connection).await.unwrap();
    ask::<i64>(&mut connection, &["DEL", &there]).await;
    let own = format!("tidegate:{{{namespace}}}:l:{id}");
    redis::cmd("SET").arg(&own).arg(ended).exec_async(&mut connection).await.unwrap();
    assert!(granted(store.spend(&spent).await).is_repeat);
    assert!(matches!(store.lease(spent.lease).await.unwrap(), Standing::Ended(_)));
    let seen = store.balances(&Lookup::Subjects(vec![subject("acme")])).await.unwrap();
    assert_eq!(seen.buckets[0].meters[0].consumed(), 3);
}

#[tokio::test]
async fn what_is_not_ours_where_ended_leases_are_kept_charges_nobody_and_ends_nothing() {
    skip_without!(REDIS);
    let (namespace, url) = (unique("moments"), address(REDIS));
    let store = patient(&url).namespace(&namespace).open().await.unwrap();
    let mut connection = connect(&url).await;
    let levels = levels(1, &[("acme", &[slow("rpm", 10)])]);
    granted(store.spend(&draw(&levels, &[("rpm", 1)])).await);
    let at = |random| Draw { lease: LeaseId::new(7 << 6, random), ..draw(&levels, &[("rpm", 2)]) };
    let open = at(1);
    granted(store.draw(&open).await);
    let there = moment(&namespace, open.lease);
    ask::<String>(&mut connection, &["SET", &there, "what is this?"]).await;
    for is_watched in [true, false] {
        let spent = store.spend(&Draw { is_watched, ..at(2) }).await.unwrap_err();
        let settled = store.settle(&Settle { is_watched, ..settle(&open, &[]) }).await.unwrap_err();
        for error in [spent, settled] {
            assert!(matches!(error, StoreError::Corrupt { .. }), "{error}");
        }
    }
    ask::<i64>(&mut connection, &["DEL", &there]).await;
    assert!(matches!(store.lease(open.lease).await.unwrap(), Standing::Open(_)));
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
