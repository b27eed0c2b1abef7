//! The model under sequences of updates and keys.

use std::time::Duration;

use tidegate::{EntityId, Stamp, Subject};
use tidegate_client::{Event, Seconds};

use super::model::{Flow, Health, Key, Kind, Link, Mode, Model, Totals, Update};
use super::subjects::{Level, Sort};

pub(super) fn at(seconds: u64) -> Stamp {
    Stamp::from_secs(1_800_000_000 + seconds)
}

pub(super) fn refused(entity: &str, resource: &str, of: &str, retry_after: Option<u64>) -> Update {
    Update::Event(Event::Refused {
        entity: entity.parse().unwrap(),
        resource: resource.parse().unwrap(),
        of: of.parse().ok(),
        limit: "rpm".to_owned(),
        retry_after: retry_after.map(|seconds| Seconds::from(Duration::from_secs(seconds))),
    })
}

pub(super) fn totals(granted: u64, refused: u64) -> Totals {
    Totals {
        up_since: at(0),
        granted,
        refused,
        degraded: 0,
        unsettled: 2,
        expired: 3,
        open_leases: 4,
        waiting: 1,
        store_away: None,
    }
}

pub(super) fn level(limit: &str, available: i64, burst: u64, consumed: i64) -> Level {
    let period = Duration::from_mins(1);
    let (name, of) = limit.split_once(" of ").unwrap_or((limit, "acme"));
    let (name, of) = (name.parse().unwrap(), EntityId::new(of).ok());
    Level { limit: limit.to_owned(), name, of, available, burst, amount: burst, period, consumed }
}

pub(super) fn subject(entity: &str, resource: &str) -> Subject {
    Subject::new(entity, resource).unwrap()
}

fn server() -> Model {
    Model::new(Kind::Server, "http://h:1/")
}

fn type_all(model: &mut Model, text: &str, now: Stamp) {
    for letter in text.chars() {
        assert_eq!(model.key(Key::Letter(letter), now), Flow::Continue, "{text}");
    }
}

fn entities(model: &Model, now: Stamp) -> Vec<String> {
    model.rows(now).0.iter().map(|row| row.entity.clone()).collect()
}

#[test]
fn loss_has_its_start_and_counts_retries() {
    let mut model = server();
    assert_eq!(model.link, Link::Connecting);
    model.apply(Update::Up, at(1));
    model.apply(Update::Up, at(2));
    assert_eq!(model.link, Link::Up { since: at(1) });
    for second in 5..8 {
        model.apply(Update::Lost { why: format!("no\u{7} {second}") }, at(second));
    }
    assert_eq!(model.link, Link::Lost { since: at(5), why: "no\\u{7} 7".to_owned(), tries: 3 });
    model.apply(Update::Up, at(9));
    assert_eq!(model.link, Link::Up { since: at(9) });
}

#[test]
fn counters_span_a_loss_and_restart_with_the_server() {
    let mut model = server();
    model.apply(Update::Totals(totals(1_000, 100)), at(1));
    assert_eq!(model.data().decided.last(5, at(2)), [0; 5], "earlier counts are no increase");
    model.apply(Update::Totals(totals(1_008, 102)), at(2));
    assert_eq!(model.data().decided.last(2, at(3)), [10, 0], "between the first second and the second");
    // Four seconds without a response: the increase is spread over them.
    model.apply(Update::Totals(totals(1_048, 102)), at(6));
    assert_eq!(model.data().decided.last(6, at(6)), [0, 10, 10, 10, 10, 10]);
    assert_eq!(model.data().refused.last(6, at(6)), [0, 2, 0, 0, 0, 0]);
    let restarted = Totals { up_since: at(6), ..totals(3, 1) };
    model.apply(Update::Totals(restarted), at(7));
    assert_eq!(model.data().decided.last(1, at(7)), [4], "all of the new server's count");
}

#[test]
fn speed_is_that_of_the_last_poll_and_zero_when_lost() {
    for every in [1, 10] {
        let mut model = server();
        model.apply(Update::Up, at(0));
        let half = Duration::from_millis(500);
        for look in 0..5 {
            model.apply(Update::Totals(totals(100 * every * look, 0)), at(every * look) + half);
        }
        let polled = at(4 * every) + half;
        for millis in (0..every * 1_000).step_by(100) {
            let now = polled + Duration::from_millis(millis);
            let speed = model.data().decided.per_second(model.counted_at(now));
            assert!((speed - 100.0).abs() < 1e-9, "{speed} with looks every {every} s, {millis} ms later");
        }
        let later = polled + Duration::from_secs(5);
        model.apply(Update::Silent { why: "status 503".to_owned() }, later);
        assert_eq!(model.counted_at(later), later, "an unresponsive server is not shown as if it went on");
        assert!(matches!(model.link, Link::Up { .. }), "the connection is up");
        model.apply(Update::Totals(totals(100 * every * 4 + 500, 0)), later);
        assert_eq!(model.counted_at(later + half), later);
        model.apply(Update::Lost { why: "gone".to_owned() }, later);
        assert_eq!(model.counted_at(later + half), later + half);
    }
}

#[test]
fn replicas_at_one_address_add_no_old_counts() {
    let mut model = server();
    let other = |granted| Totals { up_since: at(3), ..totals(granted, 0) };
    model.apply(Update::Totals(totals(1_000, 0)), at(5));
    model.apply(Update::Totals(other(7)), at(6));
    assert_eq!(model.data().decided.last(1, at(6)), [7], "it may have been restarted");
    model.apply(Update::Totals(totals(1_001, 0)), at(7));
    model.apply(Update::Totals(other(9)), at(8));
    model.apply(Update::Totals(totals(1_002, 0)), at(9));
    assert_eq!(model.data().decided.last(4, at(10)), [0; 4], "the time of each count is unknown");
    model.apply(Update::Totals(totals(1_005, 0)), at(10));
    assert_eq!(model.data().decided.last(1, at(10)), [3]);
}

#[test]
fn lost_events_are_reported() {
    let mut model = server();
    model.apply(Update::Lost { why: "no".to_owned() }, at(1));
    assert!(!model.data().has_gaps, "no event was missed before the first connection");
    model.apply(Update::Up, at(2));
    model.apply(Update::Lost { why: "no".to_owned() }, at(3));
    model.apply(Update::Up, at(4));
    assert!(model.data().has_gaps);
    let mut model = server();
    model.apply(Update::Unknown { count: 3 }, at(1));
    assert_eq!(model.data().news, Some((at(1), "3 unknown events from a newer server".to_owned())));
    assert!(model.data().has_gaps);
}

#[test]
fn pause_freezes_the_display_and_loses_no_event() {
    let mut model = server();
    model.apply(refused("acme", "gpt", "acme", Some(5)), at(1));
    model.key(Key::Letter('p'), at(2));
    model.apply(refused("zeta", "gpt", "zeta", Some(5)), at(3));
    assert_eq!((entities(&model, at(4)), model.paused_at()), (vec!["acme".to_owned()], Some(at(2))));
    assert_eq!(model.shown_at(at(4)), at(2));
    model.key(Key::Letter('p'), at(5));
    assert_eq!((entities(&model, at(5)), model.paused_at()), (vec!["acme".into(), "zeta".into()], None));
}

#[test]
fn letters_edit_the_filter_in_filter_mode() {
    let mut model = server();
    for entity in ["acme", "zeta", "quartz"] {
        model.apply(refused(entity, "gpt", entity, None), at(1));
    }
    model.key(Key::Letter('/'), at(2));
    type_all(&mut model, "qQ", at(2));
    model.key(Key::Backspace, at(2));
    assert_eq!(
        (model.filter.as_str(), model.mode, entities(&model, at(2))),
        ("q", Mode::Filter, vec!["quartz".into()])
    );
    model.key(Key::Enter, at(2));
    assert_eq!((model.filter.as_str(), model.mode), ("q", Mode::Table));
    model.key(Key::Letter('/'), at(2));
    model.key(Key::Escape, at(2));
    assert_eq!((model.filter.as_str(), model.mode, entities(&model, at(2)).len()), ("", Mode::Table, 3));
    model.key(Key::Letter('/'), at(2));
    type_all(&mut model, &"x".repeat(1_000), at(2));
    assert_eq!(model.filter.len(), 64, "it is bounded");
}

#[test]
fn every_key_has_its_documented_effect() {
    let mut model = server();
    for key in [Key::Letter('q'), Key::Escape, Key::Interrupt] {
        assert_eq!(model.key(key, at(1)), Flow::Quit, "{key:?}");
    }
    model.key(Key::Letter('?'), at(1));
    assert_eq!(model.mode, Mode::Help);
    assert_eq!(
        (model.key(Key::Letter('q'), at(1)), model.mode),
        (Flow::Continue, Mode::Table),
        "any key closes it"
    );
    model.filter = "acme".to_owned();
    assert_eq!(
        (model.key(Key::Escape, at(1)), model.filter.as_str()),
        (Flow::Continue, ""),
        "first the filter"
    );
    assert_eq!(model.key(Key::Suspend, at(1)), Flow::Suspend);
    model.key(Key::Letter('/'), at(1));
    assert_eq!(model.key(Key::Interrupt, at(1)), Flow::Quit, "in every mode");
    model.key(Key::Escape, at(1));
    for sort in [Sort::Speed, Sort::Last, Sort::Name, Sort::Granted, Sort::Count] {
        model.key(Key::Letter('s'), at(1));
        assert_eq!(model.sort, sort);
    }
}

#[test]
fn selection_follows_its_subject_within_the_table() {
    let mut model = server();
    assert_eq!(model.key(Key::Down, at(1)), Flow::Continue, "in an empty table too");
    assert_eq!(model.wanted(at(1)), None);
    for (entity, count) in [("a", 3), ("b", 2), ("c", 1)] {
        for _ in 0..count {
            model.apply(refused(entity, "gpt", entity, None), at(1));
        }
    }
    let wanted =
        |model: &Model| model.wanted(at(2)).map(|subject| subject.entity.to_string()).unwrap_or_default();
    assert_eq!(wanted(&model), "a", "the first by default");
    let table = [
        (Key::Down, "b"),
        (Key::Letter('j'), "c"),
        (Key::Down, "c"),
        (Key::Letter('k'), "b"),
        (Key::Home, "a"),
        (Key::Up, "a"),
        (Key::PageDown, "c"),
        (Key::PageUp, "a"),
        (Key::End, "c"),
    ];
    for (key, entity) in table {
        model.key(key, at(2));
        assert_eq!(wanted(&model), entity, "{key:?}");
    }
    for _ in 0..9 {
        model.apply(refused("c", "gpt", "c", None), at(3));
    }
    assert_eq!((model.rows(at(3)).1, wanted(&model)), (Some(0), "c".to_owned()), "it is the first now");
    model.filter = "b".to_owned();
    assert_eq!(wanted(&model), "b", "a hidden row is not selected");
}

#[test]
fn event_without_a_subject_is_the_news() {
    let mut model = server();
    let table = [
        (Event::StoreBack, "the store is available again"),
        (Event::Changed { version: 7, actor: "o\u{1b}ps".to_owned() }, "change 7 by o\\u{1b}ps"),
        (Event::Lagged { dropped: 9 }, "9 events were missed: there are too many"),
        (Event::LeasesExpired { settled: 1, returned: 2 }, "expired leases: 1 settled, 2 returned"),
        (Event::Busy { requests_max: 5 }, "the server is busy: 5 requests in flight"),
    ];
    for (event, words) in table {
        model.apply(Update::Event(event), at(1));
        assert_eq!(model.data().news, Some((at(1), words.to_owned())));
    }
    assert_eq!(model.data().missed, 9);
}

#[test]
fn store_shows_units_taken_between_scans() {
    let mut model = Model::new(Kind::Store, "sqlite:x");
    let look = |consumed| Update::Scan {
        subjects: vec![
            (
                subject("acme", "gpt"),
                vec![level("rpm", 5, 10, consumed), level("tpm", 90, 100, 10 * consumed)],
            ),
            (subject("calm", "gpt"), vec![level("rpm", 10, 10, 0)]),
        ],
        has_more: true,
    };
    model.apply(Update::Store(Health::Away { why: "x\ny".to_owned() }), at(1));
    assert_eq!(model.data().health, Some(Health::Away { why: "x\\ny".to_owned() }));
    model.apply(look(100), at(1));
    model.apply(look(103), at(2));
    let (rows, _) = model.rows(at(2));
    assert_eq!(
        rows.iter().map(|row| (row.entity.as_str(), row.count)).collect::<Vec<_>>(),
        [("acme", 33), ("calm", 0)]
    );
    assert_eq!((rows[0].limit.as_str(), model.data().has_more), ("rpm", true), "the lowest level");
    assert_eq!(model.data().decided.last(1, at(2)), [33]);
}
