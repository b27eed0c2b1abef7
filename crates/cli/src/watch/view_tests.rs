//! Snapshot tests of the screen at 80 by 24, on a small terminal and on a large one.

use std::time::Duration;

use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::buffer::Cell;
use ratatui::style::{Color, Modifier};
use tidegate::Stamp;
use tidegate_client::{Event, UpstreamState};

use super::model::{Health, Key, Kind, Model, Update};
use super::model_tests::{at, level, refused, subject, totals};
use super::view::{Theme, draw};

const PLAIN: Theme = Theme { is_coloured: false };

fn terminal(model: &Model, now: Stamp, size: (u16, u16), theme: Theme) -> Terminal<TestBackend> {
    let mut terminal = Terminal::new(TestBackend::new(size.0, size.1)).unwrap();
    terminal.draw(|frame| draw(frame, model, now, theme)).unwrap();
    terminal
}

/// The screen as text, without trailing spaces.
fn screen(model: &Model, now: Stamp, size: (u16, u16)) -> Vec<String> {
    let terminal = terminal(model, now, size, PLAIN);
    let buffer = terminal.backend().buffer();
    let lines = buffer.content().chunks(size.0.into());
    lines.map(|line| line.iter().map(Cell::symbol).collect::<String>().trim_end().to_owned()).collect()
}

#[track_caller]
fn pinned(model: &Model, now: Stamp, size: (u16, u16), expected: &str) {
    let shown = screen(model, now, size).join("\n");
    let expected = expected.trim_start_matches('\n').trim_end_matches('\n');
    assert_eq!(shown.trim_end_matches('\n'), expected, "\n{shown}\n");
}

/// A server with refusals.
fn busy() -> Model {
    let mut model = Model::new(Kind::Server, "http://127.0.0.1:8707/");
    model.apply(Update::Up, at(0));
    let took = Duration::from_micros(1_400);
    model.apply(Update::Store(Health::Good { engine: "sqlite".into(), version: 12, took }), at(0));
    let counted = [(0, 0), (10, 0), (30, 5), (60, 15), (64, 15), (70, 35), (90, 40)];
    for (second, (granted, refused)) in (0..).zip(counted) {
        model.apply(Update::Totals(totals(granted, refused)), at(second));
    }
    for second in [2, 3, 4, 5, 5] {
        model.apply(refused("acme", "gpt-4", "acme", Some(30)), at(second));
    }
    model.apply(refused("kid", "images", "acme", None), at(4));
    model.apply(refused("evil-company", "gpt-4", "evil", Some(1)), at(1));
    let levels =
        vec![level("tpm", 90_000, 100_000, 0), level("rpm", 0, 60, 0), level("day of parent", -15, 60, 0)];
    model.apply(Update::Levels { subject: subject("acme", "gpt-4"), levels }, at(5));
    model
}

#[test]
fn server_at_80_by_24() {
    pinned(&busy(), at(6), (80, 24), include_str!("screens/server-80x24.txt"));
}

#[test]
fn server_on_a_small_terminal() {
    pinned(&busy(), at(6), (40, 10), include_str!("screens/server-40x10.txt"));
}

#[test]
fn server_on_a_large_terminal() {
    pinned(&busy(), at(6), (140, 30), include_str!("screens/server-140x30.txt"));
}

#[test]
fn upstreams_are_shown_with_rate_and_reason() {
    let mut model = busy();
    let upstream = |name: &str, quota| UpstreamState {
        name: name.parse().unwrap(),
        in_flight: 4,
        waiting: 12,
        admitted: 7,
        rate: Some(8.3),
        slots: Some(32),
        quota,
        reason: Some("probing".to_owned()),
    };
    let names = ["openai/gpt-4", "anthropic", "b", "c"];
    let upstreams = names.into_iter().zip([Some(9.5), None, None, None]);
    let upstreams = upstreams.map(|(name, quota)| upstream(name, quota)).collect();
    model.apply(Update::Upstreams(upstreams), at(6));
    let lines = screen(&model, at(6), (80, 24));
    assert!(lines.iter().any(|line| line.contains(" upstreams: 4, by admissions ")), "{lines:#?}");
    let line = lines.iter().find(|line| line.contains("openai/gpt-4")).unwrap();
    let words: Vec<&str> = line.trim_matches('│').split_whitespace().collect();
    assert_eq!(words.join(" "), "openai/gpt-4 8.3/s of 9.5 4 in flight, 12 waiting probing", "{lines:#?}");
    assert!(lines.iter().any(|line| line.contains("anthropic")), "{lines:#?}");
    assert!(lines.iter().any(|line| line.contains("> acme")), "the table stays: {lines:#?}");
    model.apply(Update::Upstreams(Vec::new()), at(6));
    pinned(&model, at(6), (80, 24), include_str!("screens/server-80x24.txt"));
}

#[test]
fn busiest_subjects_are_listed_after_refused_ones() {
    let mut model = busy();
    let busiest = vec![(subject("calm", "gpt-4"), 1_200), (subject("acme", "gpt-4"), 40)];
    model.apply(Update::Busiest(busiest), at(6));
    let table = |model: &Model| -> Vec<String> {
        let words =
            |line: String| line.trim_matches(['│', '>', ' ']).split_whitespace().map(str::to_owned).collect();
        // Not the title of the levels below.
        let rows = screen(model, at(6), (80, 24)).into_iter().filter(|line| line.starts_with('│'));
        let lines = rows.map(words);
        let lines = lines.filter(|words: &Vec<String>| words.iter().any(|word| word == "gpt-4"));
        lines.filter_map(|words| words.first().cloned()).collect()
    };
    assert_eq!(table(&model), ["acme", "evil-company", "calm"]);
    for _ in 0..4 {
        model.key(Key::Letter('s'), at(6));
    }
    let lines = screen(&model, at(6), (80, 24));
    assert!(lines[6].contains(" users: 4, by grants ") && lines[7].contains(" GRANTED "), "{lines:#?}");
    assert!(lines[8].contains("> calm") && lines[8].contains(" 1,200 "), "{lines:#?}");
}

#[test]
fn lost_server_with_a_filter_and_a_pause() {
    let mut model = busy();
    for key in [Key::Letter('s'), Key::Letter('/'), Key::Letter('i'), Key::Enter, Key::Down] {
        model.key(key, at(6));
    }
    model.key(Key::Letter('p'), at(6));
    pinned(&model, at(60), (80, 24), include_str!("screens/paused-80x24.txt"));
    model.apply(Update::Lost { why: "no connection: refused".to_owned() }, at(70));
    pinned(&model, at(200), (80, 24), include_str!("screens/lost-80x24.txt"));
}

#[test]
fn title_shows_missed_events_and_scope_of_curves() {
    let entity = tidegate::EntityId::new("acme").unwrap();
    let mut model = Model::new(Kind::Server, "http://h:1/").only(Some(&entity));
    model.apply(Update::Up, at(0));
    let lines = screen(&model, at(1), (80, 24));
    assert!(lines[0].starts_with("tidegate watch acme http://h:1/ "), "{}", lines[0]);
    assert!(lines[1].contains(" decisions/s (all) 0 ") && lines[1].contains(" refusals/s (all) 0 "));
    assert!(lines[6].contains(" users: 0, by refusals "), "{}", lines[6]);
    model.apply(Update::Lost { why: "no".to_owned() }, at(2));
    model.apply(Update::Up, at(3));
    let line = screen(&model, at(3), (80, 24)).swap_remove(6);
    assert!(line.contains(" users: 0, with gaps, by refusals "), "{line}");
    model.apply(Update::Event(Event::Lagged { dropped: 1_200 }), at(3));
    let line = screen(&model, at(3), (80, 24)).swap_remove(6);
    assert!(line.contains(" users: 0, 1,200 missed, by refusals "), "{line}");
}

#[test]
fn age_of_last_event_stops_during_a_pause() {
    let mut model = busy();
    model.apply(Update::Event(Event::StoreBack), at(4));
    model.key(Key::Letter('p'), at(6));
    let lines = screen(&model, at(600), (80, 24));
    assert_eq!(lines[22], "2s ago: the store is available again");
}

#[test]
fn help_and_filter_input() {
    let mut model = busy();
    model.key(Key::Letter('?'), at(6));
    pinned(&model, at(6), (80, 24), include_str!("screens/help-80x24.txt"));
    model.key(Key::Enter, at(6));
    for letter in "/acme".chars() {
        model.key(Key::Letter(letter), at(6));
    }
    assert_eq!(screen(&model, at(6), (80, 24))[23], "/acme");
}

#[test]
fn store_explains_what_it_lacks() {
    let mut model = Model::new(Kind::Store, "sqlite:limits.db default");
    for (second, consumed) in [(0, 0), (1, 4), (2, 30), (3, 31)] {
        let levels = vec![level("rpm", 29, 60, consumed)];
        let subjects = vec![(subject("acme", "gpt-4"), levels), (subject("calm", "gpt-4"), Vec::new())];
        model.apply(Update::Up, at(second));
        model.apply(Update::Scan { subjects, has_more: true }, at(second));
    }
    pinned(&model, at(4), (80, 24), include_str!("screens/store-80x24.txt"));
}

#[test]
fn tiny_screens_do_not_fail() {
    let mut model = busy();
    for key in [Key::Enter, Key::Letter('?')] {
        model.key(key, at(6));
        for width in [1, 2, 3, 19, 20, 21, 40, 63, 64, 200] {
            for height in [1, 4, 5, 6, 7, 9, 10, 11, 17, 18, 80] {
                screen(&model, at(6), (width, height));
            }
        }
    }
    assert_eq!(screen(&model, at(6), (19, 9))[0], "19x9: too small");
    let nothing = Model::new(Kind::Store, "sqlite:x");
    assert!(screen(&nothing, at(0), (80, 24))[0].ends_with("connecting"));
}

#[test]
fn monochrome_terminal_still_shows_the_selection() {
    for is_coloured in [false, true] {
        let terminal = terminal(&busy(), at(6), (80, 24), Theme { is_coloured });
        let cells = terminal.backend().buffer().content();
        let has_colours = cells.iter().any(|cell| cell.fg != Color::Reset || cell.bg != Color::Reset);
        assert_eq!(has_colours, is_coloured);
        assert!(cells.iter().any(|cell| cell.modifier.contains(Modifier::REVERSED)));
    }
}
