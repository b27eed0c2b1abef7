//! Usage: the sum of settled units, in the windows of the draws.

use std::collections::BTreeMap;
use std::time::Duration;

use tidegate_core::limit::name::Subject;
use tidegate_core::limit::usage::{Tally, Usage, Window};
use tidegate_core::time::Stamp;

use super::Fixture;
use super::kit::{
    ALWAYS, OPEN, entity_id, granted, levels, levels_of, on, own, refused, resource, slow, subject,
};
use crate::{Paging, UsageOf, UsageQuery};

pub(super) async fn usage(fixture: &Fixture, of: UsageOf, window: Window) -> Vec<Usage> {
    let query = UsageQuery { of, window, range: ALWAYS };
    let page = fixture.store.usage(&query, &Paging::default()).await.expect("usage is listed");
    assert!(page.next.is_none(), "a case has no more than a page of usage");
    page.items
}

/// Units, own units and leases of an entity's limit, over all time and all resources.
pub(super) async fn used_by(fixture: &Fixture, entity: &str, limit: &str) -> (u64, u64, u64) {
    let lines = usage(fixture, UsageOf::Entity(entity_id(entity)), Window::Hour).await;
    let mut sum = Tally::default();
    for line in lines.iter().filter(|line| line.limit.as_str() == limit) {
        sum.add(line.tally);
    }
    (sum.units, sum.own, sum.leases)
}

/// For each minute, hour, day and month, over the leases drawn in it.
pub async fn usage_is_the_sum_of_settlements(fixture: Fixture) {
    let levels = own("acme", &[slow("rpm", 100), slow("tpm", 1_000)]);
    let mut expected: BTreeMap<(Window, &str, Stamp), Tally> = BTreeMap::new();
    for (drawn, settled) in [(10, 7), (20, 50), (5, 5)] {
        let mut lease = fixture.takes(&levels, &[("rpm", 1), ("tpm", drawn)]).await;
        lease.settles(&[("tpm", settled)]).await;
        for window in Window::ALL {
            for (limit, units) in [("rpm", 1), ("tpm", settled)] {
                let start = window.around(lease.at).start;
                let tally = Tally { units, own: units, leases: 1 };
                expected.entry((window, limit, start)).or_default().add(tally);
            }
        }
    }
    for window in Window::ALL {
        let lines = usage(&fixture, UsageOf::Entity(entity_id("acme")), window).await;
        let expected = expected.iter().filter(|((of, ..), _)| *of == window);
        let expected: Vec<_> = expected.map(|((_, limit, start), tally)| (*limit, *start, *tally)).collect();
        let found = lines.iter().map(|line| (line.limit.as_str(), line.start, line.tally));
        assert_eq!(found.collect::<Vec<_>>(), expected, "{window:?}");
        assert!(lines.iter().all(|line| line.subject == subject("acme") && line.window == window));
    }
    assert_eq!(used_by(&fixture, "acme", "tpm").await, (62, 62, 3));
}

/// Units count as used when they are settled.
pub async fn open_lease_is_not_in_the_ledger(fixture: Fixture) {
    let levels = own("acme", &[slow("tpm", 100)]);
    let mut lease = fixture.takes(&levels, &[("tpm", 10)]).await;
    lease.adjusts(&[("tpm", 10)]).await;
    assert_eq!(used_by(&fixture, "acme", "tpm").await, (0, 0, 0));
    lease.settles(&[]).await;
    assert_eq!(used_by(&fixture, "acme", "tpm").await, (20, 20, 1));
}

/// Neither does a refusal.
pub async fn cancel_writes_nothing_to_the_ledger(fixture: Fixture) {
    let levels = own("acme", &[slow("tpm", 100)]);
    let mut lease = fixture.takes(&levels, &[("tpm", 10)]).await;
    lease.extends(&[("tpm", 10)]).await;
    lease.cancels().await;
    fixture.is_refused(&levels, &[("tpm", 101)]).await;
    refused(fixture.store.spend(&fixture.draw_of(&levels, &[("tpm", 101)])).await);
    assert_eq!(used_by(&fixture, "acme", "tpm").await, (0, 0, 0));
}

/// Neither redelivered nor late endings count again.
pub async fn ledger_counts_each_ending_once(fixture: Fixture) {
    let levels = own("acme", &[slow("tpm", 100)]);
    let lease = fixture.takes(&levels, &[("tpm", 10)]).await;
    let settle = lease.settlement(1, &[("tpm", 8)]);
    for _ in 0..3 {
        fixture.store.settle(&settle).await.expect("the same settle is no error");
    }
    drop(fixture.store.settle(&lease.settlement(2, &[("tpm", 30)])).await);
    drop(fixture.store.cancel(&lease.cancellation(2)).await);
    assert_eq!(used_by(&fixture, "acme", "tpm").await, (8, 8, 1));
}

/// Immediately.
pub async fn spend_is_in_the_ledger_once(fixture: Fixture) {
    let limits = [slow("tpm", 100)];
    let levels = levels(0, &[("child", &limits), ("parent", &limits)]);
    let draw = fixture.draw_of(&levels, &[("tpm", 10)]);
    for _ in 0..3 {
        granted(fixture.store.spend(&draw).await);
    }
    assert_eq!(used_by(&fixture, "child", "tpm").await, (10, 10, 1));
    assert_eq!(used_by(&fixture, "parent", "tpm").await, (10, 0, 1));
}

/// The parent's usage includes its children's, and the own units of all add up to the total.
pub async fn parent_usage_separates_own_from_childrens(fixture: Fixture) {
    let limits = [slow("tpm", 1_000)];
    for (child, units) in [("one", 10), ("two", 20)] {
        let levels = levels(0, &[(child, &limits), ("parent", &limits)]);
        fixture.takes(&levels, &[("tpm", 500)]).await.settles(&[("tpm", units)]).await;
    }
    fixture.takes(&own("parent", &limits), &[("tpm", 1)]).await.settles(&[("tpm", 5)]).await;
    assert_eq!(used_by(&fixture, "one", "tpm").await, (10, 10, 1));
    assert_eq!(used_by(&fixture, "two", "tpm").await, (20, 20, 1));
    assert_eq!(used_by(&fixture, "parent", "tpm").await, (35, 5, 3));
}

/// An entity's resources or a resource's entities, in the order of subjects.
pub async fn usage_is_listed_by_entity_or_by_resource(fixture: Fixture) {
    let limits = [slow("rpm", 100), slow("tpm", 100)];
    let pairs = [("acme", "gpt"), ("globex", "gpt"), ("acme", "embed")];
    for (units, (entity, name)) in (1..).zip(pairs) {
        let subject = on(entity, name);
        let levels = levels_of(0, &[(subject, &limits)]);
        fixture.spends(&levels, &[("tpm", units), ("rpm", 10 + units)]).await;
    }
    let table = [
        (
            UsageOf::Entity(entity_id("acme")),
            vec![
                ("acme", "embed", "rpm", 13),
                ("acme", "embed", "tpm", 3),
                ("acme", "gpt", "rpm", 11),
                ("acme", "gpt", "tpm", 1),
            ],
        ),
        (
            UsageOf::Resource(resource("gpt")),
            vec![
                ("acme", "gpt", "rpm", 11),
                ("acme", "gpt", "tpm", 1),
                ("globex", "gpt", "rpm", 12),
                ("globex", "gpt", "tpm", 2),
            ],
        ),
        (UsageOf::Entity(entity_id("absent")), Vec::new()),
        (UsageOf::Resource(resource("nothing")), Vec::new()),
    ];
    for (of, expected) in table {
        let lines = usage(&fixture, of.clone(), Window::Month).await;
        let found = lines.iter().map(|line| {
            let Subject { entity, resource } = &line.subject;
            (entity.as_str(), resource.as_str(), line.limit.as_str(), line.tally.units)
        });
        assert_eq!(found.collect::<Vec<_>>(), expected, "{of:?}");
    }
}

/// The range of the query is half-open.
pub async fn usage_is_listed_for_windows_starting_in_a_range(fixture: Fixture) {
    let levels = own("acme", &[slow("tpm", 100)]);
    let at = fixture.spends(&levels, &[("tpm", 10)]).await;
    let tick = Duration::from_micros(1);
    for window in Window::ALL {
        let start = window.around(at).start;
        let before = Stamp::from_micros(start.as_micros() - 1);
        let table = [
            (start..start + tick, 1),
            (before..start, 0),
            (before..start + tick, 1),
            (start + tick..Stamp::MAX, 0),
            (start..start, 0),
        ];
        for (range, expected) in table {
            let query = UsageQuery { of: UsageOf::Entity(entity_id("acme")), window, range };
            let page = fixture.store.usage(&query, &Paging::default()).await.expect("usage is listed");
            assert_eq!(page.items.len(), expected, "{query:?}");
        }
    }
}

/// Together with the stored limit.
pub async fn call_limit_is_counted_under_its_name(fixture: Fixture) {
    let stored = own("acme", &[slow("tpm", 100)]);
    let rule = slow("tpm", 7).check().expect("the suite's limits are valid");
    let called = std::sync::Arc::new(stored.with_call_limits([rule]));
    fixture.spends(&stored, &[("tpm", 20)]).await;
    fixture.spends(&called, &[("tpm", 3)]).await;
    assert_eq!(used_by(&fixture, "acme", "tpm").await, (23, 23, 2));
}

/// A late settlement or expiry counts in the hour of the draw.
pub async fn usage_is_stamped_with_the_time_of_the_draw(fixture: Fixture) {
    assert!(fixture.time.can_jump(), "this case lets hours pass");
    let levels = own("acme", &[slow("tpm", 100)]);
    let terms = crate::Terms { deadline: Duration::from_secs(10_800), ..OPEN };
    let mut settled = fixture.takes_on(terms, &levels, &[("tpm", 10)]).await;
    let expired = fixture.takes_on(terms, &levels, &[("tpm", 5)]).await;
    let drawn = Window::Hour.around(settled.at).start;
    assert_eq!(settled.at, expired.at, "time stands still unless it is passed");
    fixture.time.pass(Duration::from_secs(7_200)).await;
    settled.settles(&[]).await;
    fixture.time.pass(Duration::from_secs(7_200)).await;
    fixture.sweep_all().await;
    let later = fixture.spends(&levels, &[("tpm", 1)]).await;
    let lines = usage(&fixture, UsageOf::Entity(entity_id("acme")), Window::Hour).await;
    let found: Vec<_> = lines.iter().map(|line| (line.start, line.tally.units, line.tally.leases)).collect();
    assert_eq!(found, [(drawn, 15, 2), (Window::Hour.around(later).start, 1, 1)]);
}

/// Each draw in its own minute, settled at once or later; no unit is in two of them.
pub async fn minutes_are_counted_apart_and_sum_to_their_hour(fixture: Fixture) {
    assert!(fixture.time.can_jump(), "this case lets minutes pass");
    let levels = own("acme", &[slow("tpm", 100)]);
    let terms = crate::Terms { deadline: Duration::from_secs(10_800), ..OPEN };
    let (mut minutes, mut hours) = (BTreeMap::new(), BTreeMap::new());
    let mut late = Vec::new();
    for (units, seconds) in [(1, 0), (2, 61), (4, 0), (8, 185), (16, 3_600)] {
        fixture.time.pass(Duration::from_secs(seconds)).await;
        let at = fixture.spends(&levels, &[("tpm", units)]).await;
        late.push(fixture.takes_on(terms, &levels, &[("tpm", 1)]).await);
        *minutes.entry(Window::Minute.around(at).start).or_default() += units + 1;
        *hours.entry(Window::Hour.around(at).start).or_default() += units + 1;
    }
    for lease in &mut late {
        lease.settles(&[]).await;
    }
    for (window, expected) in [(Window::Minute, minutes), (Window::Hour, hours)] {
        let lines = usage(&fixture, UsageOf::Entity(entity_id("acme")), window).await;
        let found: Vec<_> = lines.iter().map(|line| (line.start, line.tally.units)).collect();
        assert_eq!(found, expected.into_iter().collect::<Vec<_>>(), "{window:?}");
    }
}
