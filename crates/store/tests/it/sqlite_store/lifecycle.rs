//! A file's life beside its use: made, looked at without a trace, brought up to date with all it holds.

use std::fs;

use tidegate_store::lifecycle::{self, Lifecycle, Readiness};
use tidegate_store::{ManualWall, Sqlite, Tokens};

use crate::kit::held::{fill, is_held};
use crate::kit::sqlite::Place;
use crate::kit::words::{START, said, shows};

fn life(place: &Place, options: &str) -> Box<dyn Lifecycle> {
    lifecycle::at(&format!("sqlite:{}{options}", place.path.display())).expect("an address")
}

/// All files of the folder, byte by byte.
fn bytes(place: &Place) -> Vec<(String, Vec<u8>)> {
    let read = |entry: fs::DirEntry| {
        (entry.file_name().to_string_lossy().into_owned(), fs::read(entry.path()).expect("a file"))
    };
    let entries = fs::read_dir(&place.folder).expect("a folder");
    let mut all: Vec<_> = entries.map(|entry| read(entry.expect("an entry"))).collect();
    all.sort();
    all
}

/// A file with something of everything in it, which is closed.
async fn filled(place: &Place) {
    let store = place.open(&ManualWall::new(START)).await;
    fill(&store).await;
    store.close().await;
}

#[tokio::test]
async fn a_file_is_made_once_and_then_was_there() {
    let place = Place::new();
    for is_new in [true, false] {
        let made = life(&place, "?namespace=prod").init().await.unwrap();
        let parts: Vec<_> = made.parts.iter().map(|made| (made.part.kind, made.is_new)).collect();
        assert_eq!((parts, made.schema), (vec![("file", is_new), ("namespace", is_new)], 5));
    }
    let made = life(&place, "").init().await.unwrap();
    assert_eq!(made.parts.iter().map(|made| made.is_new).collect::<Vec<_>>(), [false, true]);
}

#[tokio::test]
async fn a_look_at_what_is_not_there_makes_nothing() {
    let place = Place::new();
    let checked = life(&place, "").check().await.unwrap();
    assert_eq!((checked.readiness(), checked.schema), (Readiness::Missing, None));
    let what: Vec<_> = checked.missing.iter().map(|part| part.kind).collect();
    assert_eq!(what, ["file", "namespace"]);
    let wanted = format!("the file `{}` is not there: run `tidegate store init`", place.path.display());
    assert_eq!(said(life(&place, "").list().await), wanted);
    assert_eq!(said(life(&place, "").upgrade().await), wanted);
    assert_eq!(bytes(&place), []);
}

#[tokio::test]
async fn a_look_leaves_no_trace_whether_the_file_is_in_use_or_not() {
    let place = Place::new();
    filled(&place).await;
    let before = bytes(&place);
    assert_eq!(before.len(), 1, "it is closed");
    assert_eq!(life(&place, "").check().await.unwrap().readiness(), Readiness::Ready);
    assert_eq!(life(&place, "?namespace=none").check().await.unwrap().readiness(), Readiness::Missing);
    let listed = life(&place, "").list().await.unwrap();
    let space = &listed.spaces[0];
    assert_eq!(
        (space.namespace.as_deref(), space.schema, space.changes, space.entities, space.policies),
        (Some("default"), Some(5), Some(2), Some(1), Some(1))
    );
    assert!(bytes(&place) == before, "no byte has changed");

    // In use, what is in the log is seen too.
    let store = place.open(&ManualWall::new(START)).await;
    store.namespace("late").await.unwrap();
    assert_eq!(life(&place, "?namespace=late").check().await.unwrap().readiness(), Readiness::Ready);
    assert_eq!(life(&place, "").list().await.unwrap().spaces.len(), 2);
    store.close().await;
    assert_eq!(bytes(&place).len(), 1, "nothing is left beside it");
}

#[tokio::test]
async fn an_older_file_is_upgraded_with_what_it_holds() {
    let place = Place::new();
    filled(&place).await;
    place.downgrade(1);
    let before = bytes(&place);
    let checked = life(&place, "").check().await.unwrap();
    assert_eq!((checked.readiness(), checked.schema, checked.schema_wanted), (Readiness::Older, Some(1), 5));
    assert_eq!(life(&place, "").list().await.unwrap().spaces[0].schema, Some(1));
    let refused = said(life(&place, "").init().await);
    assert!(
        refused.ends_with("has schema version 1, older than 5: run `tidegate store upgrade`"),
        "{refused}"
    );
    assert!(bytes(&place) == before, "no byte has changed");

    let upgraded = life(&place, "").upgrade().await.unwrap();
    assert_eq!((upgraded.parts[0].from, upgraded.schema), (1, 5));
    let again = life(&place, "").upgrade().await.unwrap();
    assert_eq!((again.parts[0].from, again.schema), (5, 5));

    let store = place.open(&ManualWall::new(START)).await;
    is_held(&store).await;
    assert!(store.tokens(&tidegate_store::Paging::default()).await.unwrap().items.is_empty());
}

#[tokio::test]
async fn of_many_who_upgrade_at_once_one_does() {
    let place = Place::new();
    filled(&place).await;
    place.downgrade(1);
    let url = format!("sqlite:{}", place.path.display());
    let upgrades: Vec<_> = (0..8)
        .map(|_| {
            let life = lifecycle::at(&url).unwrap();
            tokio::spawn(async move { life.upgrade().await })
        })
        .collect();
    let mut from = Vec::new();
    for upgrade in upgrades {
        from.push(upgrade.await.unwrap().unwrap().parts[0].from);
    }
    from.sort_unstable();
    assert_eq!(from, [1, 5, 5, 5, 5, 5, 5, 5]);
    assert_eq!(shows(&Sqlite::open(&place.path).await.unwrap(), "acme").await.map(|(_, used)| used), Some(2));
}

#[tokio::test]
async fn a_newer_file_is_refused_by_all_with_both_versions_and_left_as_it_is() {
    let place = Place::new();
    filled(&place).await;
    place.outside().pragma_update(None, "user_version", 99).unwrap();
    let before = bytes(&place);
    let life = life(&place, "");
    let refusals = [
        said(life.init().await),
        said(life.check().await),
        said(life.upgrade().await),
        said(life.list().await),
    ];
    for refused in refusals {
        assert!(refused.ends_with("has schema version 99, newer than 5: use a newer tidegate"), "{refused}");
    }
    assert!(bytes(&place) == before, "no byte has changed");
}

#[tokio::test]
async fn a_check_says_what_the_options_of_a_file_are_worth() {
    let place = Place::new();
    filled(&place).await;
    let second = life(&place, "").check().await.unwrap();
    assert!(second.durability.contains("at most the last second is lost"), "{}", second.durability);
    assert_eq!((second.clock, second.dangers().count()), (None, 0));
    let commit = life(&place, "?durable=commit&size_max=1048576").check().await.unwrap();
    assert_eq!(commit.durability, "what was answered is on the disk");
    let settings: Vec<_> = commit.settings.iter().map(|setting| setting.name).collect();
    assert_eq!(settings, ["durable", "size", "size_max"]);
}
