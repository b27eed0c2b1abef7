//! Tests of clock steps that every engine runs.

use std::time::Duration;

use tidegate_core::limit::name::ResourceName;
use tidegate_core::limit::rule::Limit;
use tidegate_core::limit::usage::Window;
use tidegate_core::time::Stamp;
use tidegate_store::{Lookup, ManualWall, Paging, Store, UsageOf, UsageQuery, WallClock as _};

use crate::kit::common::{START, draw_of, granted, is_granted, levels, own, settle_of};

const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3_600);

/// A line of core's test vectors: the clock's reading, the expected time, and the offset after it.
pub(crate) struct Line {
    pub(crate) text: &'static str,
    pub(crate) wall: Duration,
    pub(crate) time: Duration,
    pub(crate) offset: Duration,
}

/// Core's test vectors, by case.
pub(crate) fn cases() -> Vec<Vec<Line>> {
    let mut cases = Vec::new();
    for text in include_str!("../../../../core/vectors/clock.txt").lines() {
        if text.starts_with("case ") {
            cases.push(Vec::new());
        }
        let mut numbers = text.split(' ').map_while(|number| number.parse().ok()).map(Duration::from_millis);
        if let (Some(wall), Some(time), Some(offset)) = (numbers.next(), numbers.next(), numbers.next()) {
            cases.last_mut().expect("a line of a case").push(Line { text, wall, time, offset });
        }
    }
    cases
}

/// Replays each case of the vectors on a store that `open` creates with a clock.
pub(crate) async fn assert_follows_vectors<S: Store>(open: impl AsyncFn(&ManualWall) -> S) {
    for case in cases() {
        let clock = ManualWall::new(START);
        let (store, acme) = (open(&clock).await, own("acme", 1_000));
        for Line { text, wall, time, offset } in case {
            clock.set(START + wall);
            assert_eq!(granted(store.spend(&draw_of(&acme, 1)).await).at, START + time, "{text}");
            let seen = store.balances(&Lookup::Subjects(Vec::new())).await.expect("balances are returned");
            assert_eq!((seen.at, seen.clock_offset), (START + time, offset), "{text}");
        }
    }
}

/// Lets seconds pass while the store is used by a refused call: while there is an offset, idle time would be
/// absorbed.
pub(crate) async fn pass(store: &dyn Store, clock: &ManualWall, seconds: u32) {
    for _ in 0..seconds {
        clock.advance(SECOND);
        assert!(!is_granted(&store.spend(&draw_of(&own("busy", 1), 2)).await));
    }
}

/// Steps the clock back a minute and corrects it, ten times in twenty seconds. Returns the number of grants
/// for one request per second with a burst of ten.
pub(crate) async fn grants_over_ten_flaps(store: &dyn Store, clock: &ManualWall) -> u32 {
    let acme = levels(&[("acme", &[Limit::per_second("rpm", 1).burst(10)])]);
    let mut count = 0;
    for flap in 0..=20 {
        while is_granted(&store.spend(&draw_of(&acme, 1)).await) {
            count += 1;
        }
        let minute = 60 * SECOND;
        let now = clock.now() + SECOND;
        match flap {
            20 => {}
            flap if flap % 2 == 0 => clock.set(now - minute),
            _ => clock.set(now + minute),
        }
    }
    count
}

/// Usage drawn while the store's time is ahead of the clock is booked at the hour of the clock.
pub(crate) async fn assert_books_at_wall_clock(store: &dyn Store, clock: &ManualWall) {
    let acme = own("acme", 1_000);
    granted(store.spend(&draw_of(&acme, 1)).await);
    clock.set(START - 2 * HOUR);
    granted(store.spend(&draw_of(&acme, 2)).await);
    let lease = draw_of(&acme, 4);
    assert_eq!(granted(store.draw(&lease).await).at, START);
    // The clock is corrected before the lease ends.
    clock.set(START + SECOND);
    store.settle(&settle_of(&lease, 4)).await.expect("the lease is open");
    let of = UsageOf::Resource(ResourceName::new("gpt").expect("a valid name"));
    let query = UsageQuery { of, window: Window::Hour, range: Stamp::ZERO..Stamp::MAX };
    let page = store.usage(&query, &Paging::default()).await.expect("usage is returned");
    let lines: Vec<_> = page.items.iter().map(|line| (line.start, line.tally.units)).collect();
    assert_eq!(lines, [(START - 2 * HOUR, 6), (START, 1)]);
}
