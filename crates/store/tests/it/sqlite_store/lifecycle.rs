//! The lifecycle of a file: created, checked without side effects, upgraded with its data.

use std::fs;

use tidegate_core::limit::entity::Entity;
use tidegate_core::limit::name::EntityId;
use tidegate_core::limit::policy::Expect;
use tidegate_store::lifecycle::{self, Lifecycle, Readiness};
use tidegate_store::{Entities, ManualWall, Sqlite, SqliteOptions, Tokens};

use crate::kit::common::{START, balance, error_text};
use crate::kit::contents::{assert_intact, fill};
use crate::kit::sqlite::TempFile;

fn life(place: &TempFile, options: &str) -> Box<dyn Lifecycle> {
    lifecycle::at(&format!("sqlite:{}{options}", place.path.display())).expect("an address")
}

/// All files of the folder with their bytes.
fn bytes(place: &TempFile) -> Vec<(String, Vec<u8>)> {
    let read = |entry: fs::DirEntry| {
        (entry.file_name().to_string_lossy().into_owned(), fs::read(entry.path()).expect("a file"))
    };
    let entries = fs::read_dir(&place.folder).expect("a folder");
    let mut all: Vec<_> = entries.map(|entry| read(entry.expect("an entry"))).collect();
    all.sort();
    all
}

/// A closed file with data of every kind.
async fn filled(place: &TempFile) {
    let store = place.open(&ManualWall::new(START)).await;
    fill(&store).await;
    store.close().await;
}

#[tokio::test]
async fn file_is_created_once() {
    let place = TempFile::new();
    for is_new in [true, false] {
        let made = life(&place, "?namespace=prod").init().await.unwrap();
        let parts: Vec<_> = made.parts.iter().map(|made| (made.part.kind, made.is_new)).collect();
        assert_eq!((parts, made.schema), (vec![("file", is_new), ("namespace", is_new)], 5));
    }
    let made = life(&place, "").init().await.unwrap();
    assert_eq!(made.parts.iter().map(|made| made.is_new).collect::<Vec<_>>(), [false, true]);
}

#[tokio::test]
async fn check_and_list_create_nothing() {
    let place = TempFile::new();
    let checked = life(&place, "").check().await.unwrap();
    assert_eq!((checked.readiness(), checked.schema), (Readiness::Missing, None));
    let what: Vec<_> = checked.missing.iter().map(|part| part.kind).collect();
    assert_eq!(what, ["file", "namespace"]);
    let wanted = format!("the file `{}` does not exist: run `tidegate store init`", place.path.display());
    assert_eq!(error_text(life(&place, "").list().await), wanted);
    assert_eq!(error_text(life(&place, "").upgrade().await), wanted);
    assert_eq!(bytes(&place), []);
}

/// Programs that have it open go on, and what they write afterwards is not in the copy.
#[tokio::test]
async fn backup_is_a_store_of_one_moment() {
    let place = TempFile::new();
    let missing = life(&place, "").backup(&place.folder.path().join("no.db")).await;
    assert!(error_text(missing).contains("does not exist: run `tidegate store init`"));
    let store = place.open(&ManualWall::new(START)).await;
    fill(&store).await;
    let file = place.folder.path().join("copy of 'it'.db");
    let made = life(&place, "").backup(&file).await.unwrap();
    assert_eq!((made.file.as_path(), made.bytes), (file.as_path(), fs::metadata(&file).unwrap().len()));
    let later = store.put(&Entity::new(EntityId::new("later").unwrap()), Expect::Any, "ops").await;
    assert!(later.is_ok(), "the store goes on");
    store.close().await;

    let copy = SqliteOptions::file(&file).clock(ManualWall::new(START)).open().await.unwrap();
    assert_eq!(copy.get(&EntityId::new("later").unwrap()).await.unwrap(), None);
    assert_intact(&copy).await;
    copy.close().await;
    let again = life(&place, "").backup(&file).await;
    assert_eq!(error_text(again), format!("`{}` exists already", file.display()));
    let nowhere = place.folder.path().join("none").join("copy.db");
    assert!(error_text(life(&place, "").backup(&nowhere).await).contains("cannot be written: No such file"));
}

#[cfg(unix)]
#[tokio::test]
async fn backup_is_readable_by_its_owner_only() {
    use std::os::unix::fs::PermissionsExt as _;
    let place = TempFile::new();
    filled(&place).await;
    let file = place.folder.path().join("copy.db");
    life(&place, "").backup(&file).await.unwrap();
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
}

#[tokio::test]
async fn check_and_list_leave_no_trace() {
    let place = TempFile::new();
    filled(&place).await;
    let before = bytes(&place);
    assert_eq!(before.len(), 1, "the log is removed");
    assert_eq!(life(&place, "").check().await.unwrap().readiness(), Readiness::Ready);
    assert_eq!(life(&place, "?namespace=none").check().await.unwrap().readiness(), Readiness::Missing);
    let listed = life(&place, "").list().await.unwrap();
    let space = &listed.spaces[0];
    assert_eq!(
        (space.namespace.as_deref(), space.schema, space.changes, space.entities, space.policies),
        (Some("default"), Some(5), Some(2), Some(1), Some(1))
    );
    assert!(bytes(&place) == before, "no byte has changed");

    // While the file is in use, its log is read too.
    let store = place.open(&ManualWall::new(START)).await;
    store.namespace("late").await.unwrap();
    assert_eq!(life(&place, "?namespace=late").check().await.unwrap().readiness(), Readiness::Ready);
    assert_eq!(life(&place, "").list().await.unwrap().spaces.len(), 2);
    store.close().await;
    assert_eq!(bytes(&place).len(), 1, "no other file is left");
}

#[tokio::test]
async fn upgraded_file_keeps_its_data() {
    let place = TempFile::new();
    filled(&place).await;
    place.downgrade(1);
    let before = bytes(&place);
    let checked = life(&place, "").check().await.unwrap();
    assert_eq!((checked.readiness(), checked.schema, checked.schema_wanted), (Readiness::Older, Some(1), 5));
    assert_eq!(life(&place, "").list().await.unwrap().spaces[0].schema, Some(1));
    let refused = error_text(life(&place, "").init().await);
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
    assert_intact(&store).await;
    assert!(store.tokens(&tidegate_store::Paging::default()).await.unwrap().items.is_empty());
}

#[tokio::test]
async fn one_of_many_concurrent_upgrades_runs() {
    let place = TempFile::new();
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
    assert_eq!(
        balance(&Sqlite::open(&place.path).await.unwrap(), "acme").await.map(|(_, used)| used),
        Some(2)
    );
}

#[tokio::test]
async fn newer_file_is_refused_by_every_verb_unchanged() {
    let place = TempFile::new();
    filled(&place).await;
    place.outside().pragma_update(None, "user_version", 99).unwrap();
    let before = bytes(&place);
    let life = life(&place, "");
    let refusals = [
        error_text(life.init().await),
        error_text(life.check().await),
        error_text(life.upgrade().await),
        error_text(life.list().await),
    ];
    for refused in refusals {
        assert!(refused.ends_with("has schema version 99, newer than 5: use a newer tidegate"), "{refused}");
    }
    assert!(bytes(&place) == before, "no byte has changed");
}

#[tokio::test]
async fn check_reports_durability_of_options() {
    let place = TempFile::new();
    filled(&place).await;
    let second = life(&place, "").check().await.unwrap();
    assert!(second.durability.contains("at most the last second is lost"), "{}", second.durability);
    assert_eq!((second.clock, second.dangers().count()), (None, 0));
    let commit = life(&place, "?durable=commit&size_max=1048576").check().await.unwrap();
    assert_eq!(commit.durability, "acknowledged writes are on the disk");
    let settings: Vec<_> = commit.settings.iter().map(|setting| setting.name).collect();
    assert_eq!(settings, ["durable", "size", "size_max"]);
}
