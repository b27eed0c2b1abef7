//! Ten thousand leases of vanished clients: all expire, are settled or returned by policy, are counted, and
//! their memory is freed. The clock is manual.

use std::time::Duration;

use tidegate::store::{ManualWall, SqliteOptions};
use tidegate::{Limit, Limiter, Memory, OnExpiry, Policy, ResourceName, Scope};
use tidegate_server::Bounds;

use crate::kit::codec::{Value, json};
use crate::kit::{Kit, NOW, soon};
use crate::{ALONE, in_use};

const LEASES: u64 = 10_000;
/// Requests of one batch.
const BATCH: u64 = 100;

/// Starts a server that sweeps often. Leases on `back` return their units when they expire.
async fn server(limiter: Limiter, clock: ManualWall) -> Kit {
    let returning =
        Policy::new([Limit::per_hour("tpm", 1_000)]).expect("a policy").on_expiry(OnExpiry::Return);
    let scope = Scope::Resource(ResourceName::new("back").expect("a name"));
    limiter.admin("test").set_policy(scope, returning).await.expect("written");
    let mut bounds = Bounds::default();
    (bounds.sweep_every, bounds.report_time) = (Duration::from_millis(50), Duration::from_mins(10));
    Kit::over(limiter, clock, bounds).await
}

/// Draws ten leases for each of a thousand entities, half of them on `back`, for five seconds.
async fn vanish(kit: &Kit) {
    for batch in 0..LEASES / BATCH {
        let ask = |number: u64| {
            let number = batch * BATCH + number;
            let resource = if number.is_multiple_of(2) { "kept" } else { "back" };
            json!({"entity": format!("e{}", number % 1_000), "resource": resource, "cost": {"tpm": 10}, "deadline": 5})
        };
        let requests: Vec<Value> = (0..BATCH).map(ask).collect();
        let answer = kit.post("/v1/acquire/batch", json!({"requests": requests})).await;
        assert_eq!(answer.text.matches("\"lease\"").count() as u64, BATCH, "{}", answer.text);
    }
}

/// Returns the number of expired leases by outcome, from the metrics.
async fn expired(kit: &Kit, how: &str) -> u64 {
    let text = kit.get("/metrics").await.text;
    let name = format!("tidegate_leases_expired_total{{how=\"{how}\"}} ");
    let count = text.lines().find_map(|line| line.strip_prefix(&name)).expect("it is counted");
    count.parse().expect("a number")
}

async fn all_expire(kit: &Kit, times: u64) {
    let half = times * LEASES / 2;
    let mut counts = (0, 0);
    let counted = async {
        while counts != (half, half) {
            tokio::task::yield_now().await;
            counts = (expired(kit, "settled").await, expired(kit, "returned").await);
        }
    };
    let is_counted = tokio::time::timeout(Duration::from_mins(1), counted).await.is_ok();
    assert!(is_counted, "{half} of each are to end, and {counts:?} have");
    let used = kit.get("/v1/usage/summary?resource=kept").await;
    assert_eq!(used.body["limits"]["tpm"]["units"], 10 * half, "{}", used.text);
    assert_eq!(used.body["limits"]["tpm"]["leases"], half, "{}", used.text);
    let used = kit.get("/v1/usage/summary?resource=back").await;
    assert!(used.body["limits"]["tpm"].is_null(), "nothing was used of what returned: {}", used.text);
}

/// Runs two waves, each followed by the retention time of ended leases. Returns how many more bytes the
/// second wave leaves.
async fn two_waves(kit: &Kit, mut between: impl FnMut(u64)) -> usize {
    let mut left = [0, 0];
    for (wave, left) in (1..).zip(&mut left) {
        vanish(kit).await;
        between(LEASES);
        kit.clock.advance(Duration::from_secs(6));
        // A draw also ends some expired leases, which are counted too.
        let ask = json!({"entity": "busy", "resource": "kept", "cost": {"rpm": 1}});
        assert_eq!(kit.post("/v1/spend", ask).await.status, 204);
        all_expire(kit, wave).await;
        between(0);
        kit.clock.advance(Duration::from_hours(1));
        for _ in 0..20 {
            kit.limiter.store().sweep(usize::MAX).await.expect("it is swept");
        }
        *left = in_use();
    }
    left[1].saturating_sub(left[0])
}

#[tokio::test]
async fn abandoned_leases_end_and_free_memory() {
    let _alone = ALONE.lock().await;
    let clock = ManualWall::new(NOW);
    let store = Memory::with_clock(clock.clone());
    let kit = server(Limiter::new(store.clone()), clock).await;
    let more = two_waves(&kit, |open| assert_eq!(store.stats().leases_open, open)).await;
    let stats = store.stats();
    assert_eq!((stats.leases_open, stats.leases_ended), (0, 0), "{stats:?}");
    // Subjects on `back` have no usage and are evicted; the others are in the ledger.
    assert_eq!((stats.subjects, stats.subjects_refused), (501, 0), "{stats:?}");
    assert!(more < 1 << 20, "the second ten thousand leave {more} bytes more than the first");
    kit.stopper.stop();
    soon("the end", kit.stopped()).await;

    let clock = ManualWall::new(NOW);
    let store = SqliteOptions::memory().clock(clock.clone()).open().await.expect("it is opened");
    let limiter = Limiter::builder(store).store_deadline(Duration::from_mins(1)).build().expect("a limiter");
    let kit = server(limiter, clock).await;
    let more = two_waves(&kit, |_| ()).await;
    assert!(more < 1 << 20, "the second ten thousand leave {more} bytes more than the first");
}
