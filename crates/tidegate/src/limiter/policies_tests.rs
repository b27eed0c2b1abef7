//! Tests of the policy cache: version checks and the spread of expiries.

use super::*;

#[tokio::test(start_paused = true)]
async fn version_check_is_shared_until_refreshed_or_past() {
    let cache = PolicyCache::new(Duration::from_secs(60), 64);
    let check_of = |version, epoch| {
        let now = Instant::now();
        let (again, until) = (now + Duration::from_secs(45), now + Duration::from_secs(60));
        VersionCheck { version: Version::new(version), again, until, epoch }
    };
    let version = |epoch| cache.checked(epoch).map(|checked| checked.version.number());
    assert_eq!(version(0), None);
    let first = check_of(5, 0);
    cache.check(first);
    tokio::time::advance(Duration::from_secs(45)).await;
    assert_eq!((version(0), version(0)), (None, Some(5)), "one caller refreshes it");
    // An overtaken response does not replace a later one, nor one requested after an invalidation.
    cache.check(check_of(6, 0));
    cache.check(first);
    assert_eq!(version(0), Some(6));
    cache.check(check_of(6, 1));
    cache.check(check_of(6, 0));
    assert_eq!((version(0), version(1)), (None, Some(6)));
    cache.record_seen(Version::new(7));
    assert_eq!(version(1), None);
    // The store was restored to an earlier state, and a caller has read its version.
    cache.reset_seen(Version::new(6), 7);
    assert_eq!(version(1), Some(6));
    cache.discard_check(Version::new(5));
    assert_eq!(version(1), Some(6));
    cache.discard_check(Version::new(6));
    assert_eq!(version(1), None);
}

#[test]
fn expiries_spread_over_last_quarter_of_ttl() {
    let cache = PolicyCache::new(Duration::from_secs(60), 64);
    let until = Instant::now() + cache.ttl;
    for hash in 0..1_000 {
        let early = until - cache.spread(until, hash);
        assert!(early < Duration::from_secs(15), "{early:?}");
    }
    assert_ne!(cache.spread(until, 1), cache.spread(until, 2));
}

#[test]
fn overtaken_response_does_not_hide_newer_version() {
    let cache = PolicyCache::new(Duration::from_secs(60), 64);
    let seen = || cache.seen.load(Ordering::Relaxed);
    cache.record_seen(Version::new(5));
    // The version was read as 5, but the response arrived after a draw was decided by 6.
    cache.record_seen(Version::new(6));
    cache.reset_seen(Version::new(5), 5);
    assert_eq!(seen(), 6);
    // The store was restored to an earlier state.
    cache.reset_seen(Version::new(3), 6);
    assert_eq!(seen(), 3);
    // And has advanced since.
    cache.record_seen(Version::new(4));
    cache.reset_seen(Version::new(2), 3);
    assert_eq!(seen(), 4);
}
