//! Invalid and changing files: each error names the file and the reason, and nothing is lost or half done.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::time::Duration;

use tidegate_core::limit::entity::Entity;
use tidegate_core::limit::name::EntityId;
use tidegate_core::limit::policy::Expect;
use tidegate_core::limit::rule::Limit;
use tidegate_core::time::Stamp;
use tidegate_store::{
    AuditQuery, Buckets, Entities, Ledger, ManualWall, Paging, Sqlite, SqliteOptions, Store, StoreError,
};

use super::dropped_calls::poll_once;
use crate::kit::common::{
    START, balance, cancel_of, draw_of, error_text, granted, is_granted, levels, own, settle_of, slow, used,
};
use crate::kit::contents::{all_records, fill_records};
use crate::kit::sqlite::{TIMEOUT, TempFile};

/// It was created with the umask, and so readable by every user on most systems.
#[tokio::test]
async fn new_file_is_private_to_its_owner() {
    let place = TempFile::new();
    let store = Sqlite::open(&place.path).await.unwrap();
    for file in fs::read_dir(place.folder.path()).unwrap() {
        let file = file.unwrap();
        let mode = file.metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, 0o600, "{}", file.path().display());
    }
    store.close().await;
}

#[tokio::test]
async fn missing_folder_is_named() {
    let place = TempFile::new();
    let path = place.folder.path().join("nowhere/limits.db");
    let error = Sqlite::open(&path).await.unwrap_err();
    assert!(matches!(&error, StoreError::Denied { what } if what.contains("nowhere")), "{error}");
    assert!(!path.exists());
    let error = Sqlite::open(place.folder.path()).await.unwrap_err();
    assert!(matches!(error, StoreError::Denied { .. }), "a folder is not a file: {error}");
}

#[tokio::test]
async fn file_that_is_no_database_is_refused_unchanged() {
    let place = TempFile::new();
    let text = "limits are kept elsewhere\n".repeat(400);
    fs::write(&place.path, &text).unwrap();
    let error = Sqlite::open(&place.path).await.unwrap_err();
    assert!(matches!(&error, StoreError::Corrupt { what } if what.contains("limits.db")), "{error}");
    assert_eq!(fs::read_to_string(&place.path).unwrap(), text);
    assert_eq!(fs::read_dir(&place.folder).unwrap().count(), 1, "no other file is created");
}

/// The journal mode used to be changed before the owner was checked.
#[tokio::test]
async fn foreign_database_is_refused_unchanged() {
    for application in [0, 77] {
        let place = TempFile::new();
        let theirs = place.outside();
        theirs.execute_batch("CREATE TABLE theirs (x); INSERT INTO theirs VALUES (1);").unwrap();
        theirs.pragma_update(None, "application_id", application).unwrap();
        drop(theirs);
        let before = fs::read(&place.path).unwrap();
        let error = Sqlite::open(&place.path).await.unwrap_err();
        let wanted = format!("is a database of another program: its application id is {application}");
        assert!(matches!(&error, StoreError::Invalid { what } if what.ends_with(&wanted)), "{error}");
        assert!(fs::read(&place.path).unwrap() == before, "no byte has changed");
        assert_eq!(fs::read_dir(&place.folder).unwrap().count(), 1, "no other file is created");
    }
}

#[tokio::test]
async fn newer_file_is_refused_unchanged() {
    let (place, clock) = (TempFile::new(), ManualWall::new(START));
    let store = place.open(&clock).await;
    granted(store.draw(&draw_of(&own("acme", 10), 3)).await);
    store.close().await;
    place.outside().pragma_update(None, "user_version", 99).unwrap();
    let before = fs::read(&place.path).unwrap();
    let error = error_text(place.options(&clock).open().await);
    assert!(error.contains("has schema version 99, newer than"), "{error}");
    assert!(fs::read(&place.path).unwrap() == before, "no byte has changed");
    place.outside().pragma_update(None, "user_version", 5).unwrap();
    assert_eq!(balance(&place.open(&clock).await, "acme").await, Some((7, 3)));
}

#[tokio::test]
async fn older_files_keep_their_records() {
    for version in 1..=4 {
        let (place, clock) = (TempFile::new(), ManualWall::new(START));
        let store = place.open(&clock).await;
        fill_records(&store).await;
        let mut before = all_records(&store).await;
        store.close().await;
        place.downgrade(version);
        let store = place.open(&clock).await;
        if version < 3 {
            before = before.without_tokens();
        }
        assert_eq!(all_records(&store).await, before, "version {version}");
        let entity = Entity::new(EntityId::new("late").unwrap());
        store.put(&entity, Expect::Absent, "ops").await.expect("the upgraded file accepts changes");
        assert_eq!(
            store
                .audit(&AuditQuery { filed: None, range: Stamp::ZERO..Stamp::MAX }, &Paging::default())
                .await
                .unwrap()
                .items
                .len(),
            10
        );
    }
}

#[tokio::test]
async fn open_upgrades_an_older_file_with_its_data() {
    let (place, clock) = (TempFile::new(), ManualWall::new(START));
    let store = place.open(&clock).await;
    let (open, ended) = (draw_of(&own("acme", 10), 3), draw_of(&own("acme", 10), 2));
    granted(store.draw(&open).await);
    granted(store.draw(&ended).await);
    store.settle(&settle_of(&ended, 1)).await.unwrap();
    store.close().await;
    place.downgrade(1);
    let store = place.open(&clock).await;
    assert_eq!(balance(&store, "acme").await, Some((6, 4)));
    assert_eq!(used(&store, "acme").await, 1);
    store.settle(&settle_of(&open, 3)).await.unwrap();
    assert_eq!(used(&store, "acme").await, 4);
    store.close().await;
    let outside = place.outside();
    let version: i64 = outside.pragma_query_value(None, "user_version", |row| row.get(0)).unwrap();
    assert!(version >= 2);
    let count = "SELECT COUNT(*) FROM sqlite_schema WHERE name IN ('usage_by_age', 'records_by_age')";
    assert_eq!(outside.query_row(count, [], |row| row.get::<_, i64>(0)), Ok(2));
}

/// Whichever page is damaged, the store reports it or continues; it never returns invented data.
#[tokio::test]
async fn damaged_file_is_reported() {
    let (place, clock) = (TempFile::new(), ManualWall::new(START));
    let store = place.open(&clock).await;
    for number in 0..200 {
        granted(store.spend(&draw_of(&own(&format!("entity-{number}"), 10), 3)).await);
    }
    store.close().await;
    let whole = fs::read(&place.path).unwrap();
    let mut corrupt = 0;
    for page in 1..whole.len() / 4096 {
        let mut bytes = whole.clone();
        bytes[page * 4096..(page + 1) * 4096].fill(0xa5);
        fs::write(&place.path, &bytes).unwrap();
        let store = match place.options(&clock).open().await {
            Ok(store) => store,
            Err(error) => {
                assert!(matches!(error, StoreError::Corrupt { .. }), "page {page}: {error}");
                corrupt += 1;
                continue;
            }
        };
        match store.spend(&draw_of(&own("entity-7", 10), 3)).await {
            Ok(drawn) => assert!(is_granted(&Ok(drawn)), "page {page}"),
            Err(error) => {
                assert!(matches!(error, StoreError::Corrupt { .. }), "page {page}: {error}");
                corrupt += 1;
            }
        }
        store.close().await;
    }
    assert!(corrupt > 0, "at least one damaged page was detected");
    fs::write(&place.path, &whole).unwrap();
    assert_eq!(balance(&place.open(&clock).await, "entity-7").await, Some((7, 3)));
}

/// A privileged user may write here too; any other is denied.
#[tokio::test]
async fn read_only_file_is_denied() {
    let (place, clock) = (TempFile::new(), ManualWall::new(START));
    place.open(&clock).await.close().await;
    let mut permissions = fs::metadata(&place.path).unwrap().permissions();
    permissions.set_readonly(true);
    fs::set_permissions(&place.path, permissions).unwrap();
    let may_write = fs::OpenOptions::new().append(true).open(&place.path).is_ok();
    match place.options(&clock).open().await {
        Ok(store) => {
            assert!(may_write);
            granted(store.spend(&draw_of(&own("acme", 10), 1)).await);
        }
        Err(error) => {
            assert!(!may_write);
            assert!(matches!(&error, StoreError::Denied { what } if what.contains("limits.db")), "{error}");
        }
    }
}

#[tokio::test]
async fn vanished_file_takes_no_writes_until_it_returns() {
    let (place, clock) = (TempFile::new(), ManualWall::new(START));
    let store = place.open(&clock).await;
    let (levels, elsewhere) = (own("acme", 10), place.folder.path().join("elsewhere.db"));
    let kept = draw_of(&levels, 3);
    granted(store.draw(&kept).await);
    fs::rename(&place.path, &elsewhere).unwrap();
    let lost = draw_of(&levels, 1);
    for error in [error_text(store.draw(&lost).await), error_text(store.version_read().await)] {
        assert!(error.contains("limits.db` has vanished while it was open"), "{error}");
    }
    // Another file in its place is not written to either.
    fs::write(&place.path, "another file").unwrap();
    for error in [error_text(store.draw(&lost).await), error_text(store.version_read().await)] {
        assert!(error.contains("was replaced by another file while it was open: reopen it"), "{error}");
    }
    assert_eq!(fs::read_to_string(&place.path).unwrap(), "another file");
    fs::rename(&elsewhere, &place.path).unwrap();
    assert_eq!(balance(&store, "acme").await, Some((7, 3)), "the file is back, and nothing is lost");
    granted(store.draw(&lost).await);
    store.settle(&settle_of(&kept, 2)).await.unwrap();
    assert_eq!(balance(&store, "acme").await, Some((7, 3)));
}

/// A process that created a new file in the place of a moved one used to remove the old log, with answered
/// steps in it.
#[tokio::test]
async fn new_file_is_not_created_over_a_foreign_log() {
    let (place, clock) = (TempFile::new(), ManualWall::new(START));
    let store = place.open(&clock).await;
    granted(store.draw(&draw_of(&own("acme", 10), 3)).await);
    let elsewhere = place.folder.path().join("elsewhere.db");
    fs::rename(&place.path, &elsewhere).unwrap();
    let error = place.options(&clock).open().await.unwrap_err();
    assert!(matches!(&error, StoreError::Denied { what } if what.contains("limits.db-wal")), "{error}");
    fs::rename(&elsewhere, &place.path).unwrap();
    drop(store);
    assert_eq!(balance(&place.open(&clock).await, "acme").await, Some((7, 3)));
}

/// A call that only reads.
trait Look {
    async fn version_read(&self) -> Result<(), StoreError>;
}

impl Look for Sqlite {
    async fn version_read(&self) -> Result<(), StoreError> {
        tidegate_store::Policies::version(self).await.map(drop)
    }
}

#[tokio::test]
async fn removed_file_is_not_written_to() {
    let (place, clock) = (TempFile::new(), ManualWall::new(START));
    let store = place.open(&clock).await;
    granted(store.draw(&draw_of(&own("acme", 10), 3)).await);
    fs::remove_file(&place.path).unwrap();
    let error = store.draw(&draw_of(&own("acme", 10), 3)).await.unwrap_err();
    assert!(error.is_transient() && error.to_string().contains("has vanished"), "{error}");
    store.close().await;
    assert!(!place.path.exists(), "closing creates no new file");
}

/// Refused draws leave nothing behind, answered steps are kept, and ended leases free space.
///
/// For most file sizes they did not: ending a lease needs a page before it frees one, and no page was left.
#[tokio::test]
async fn full_disk_refuses_until_space_is_free() {
    for pages in [0, 2] {
        let (place, clock) = (TempFile::new(), ManualWall::new(START));
        let size_max = (1 << 20) + pages * 4_096;
        let store = place.options(&clock).size_max(size_max).open().await.unwrap();
        let levels = levels(&[("acme", &[Limit::per_hour("rpm", 1).burst(100_000)])]);
        let mut drawn = Vec::new();
        let error = loop {
            let draw = draw_of(&levels, 1);
            match store.draw(&draw).await {
                Ok(_) => drawn.push(draw),
                Err(error) => break error,
            }
            assert!(drawn.len() < 100_000, "a mebibyte fills up");
        };
        assert!(error.is_transient() && error.to_string().contains("no space for"), "{error}");
        let count = i64::try_from(drawn.len()).unwrap();
        assert_eq!(balance(&store, "acme").await, Some((100_000 - count, count)));
        let (settled, cancelled) = drawn.split_at(drawn.len() / 2);
        for draw in settled {
            store.settle(&settle_of(draw, 1)).await.unwrap();
        }
        for draw in cancelled {
            store.cancel(&cancel_of(draw)).await.unwrap();
        }
        let count = i64::try_from(settled.len()).unwrap();
        assert_eq!(balance(&store, "acme").await, Some((100_000 - count, count)));
        clock.advance(Duration::from_secs(660));
        while store.sweep(10_000).await.unwrap().forgotten > 0 {}
        for _ in 0..50 {
            granted(store.draw(&draw_of(&levels, 1)).await);
        }
        store.close().await;
        let length = fs::metadata(&place.path).unwrap().len();
        assert!(length <= size_max, "{length} bytes");
    }
    let (place, clock) = (TempFile::new(), ManualWall::new(START));
    let error = error_text(place.options(&clock).size_max(1_000).open().await);
    assert_eq!(error, "`size_max` is 1000 bytes, and must be at least 1048576");
}

/// The writer retries for a second; readers do not wait at all.
#[tokio::test]
async fn locked_file_is_retried_then_reported() {
    let (place, clock) = (TempFile::new(), ManualWall::new(START));
    let store = place.open(&clock).await;
    let long_timeout = place.options(&clock).deadline(TIMEOUT).open().await.unwrap();
    granted(store.draw(&draw_of(&own("acme", 10), 3)).await);
    let outside = place.outside();
    outside.execute_batch("BEGIN IMMEDIATE").unwrap();
    let (lost, served) = (draw_of(&own("acme", 10), 1), draw_of(&own("acme", 10), 2));
    let error = store.draw(&lost).await.unwrap_err();
    assert!(error.is_transient() && error.to_string().contains("is held by another process"), "{error}");
    assert_eq!(balance(&store, "acme").await, Some((7, 3)));
    let mut waiting = long_timeout.draw(&served);
    assert!(!poll_once(&mut waiting));
    outside.execute_batch("COMMIT").unwrap();
    granted(waiting.await);
    assert_eq!(balance(&store, "acme").await, Some((5, 5)));
}

/// Of several processes that created a new file or namespace at the same time, one used to get an error: the
/// file was locked, or corrupt.
#[tokio::test(flavor = "multi_thread", worker_threads = 8)]
async fn racing_opens_of_a_new_file_succeed() {
    for round in 0..10 {
        let place = TempFile::new();
        let opening: Vec<_> = (0..8)
            .map(|number| {
                let options = SqliteOptions::file(&place.path).clock(ManualWall::new(START));
                let options = options.deadline(TIMEOUT);
                tokio::spawn(async move {
                    let store = options.namespace("shared").open().await?;
                    let other = store.namespace(&format!("namespace-{}", number % 2)).await?;
                    granted(store.spend(&draw_of(&own("acme", 100), 1)).await);
                    granted(other.spend(&draw_of(&own("acme", 100), 1)).await);
                    Ok::<_, StoreError>(store)
                })
            })
            .collect();
        let mut last = None;
        for opened in opening {
            last = Some(opened.await.unwrap().unwrap_or_else(|error| panic!("round {round}: {error}")));
        }
        let store = last.unwrap();
        assert_eq!(balance(&store, "acme").await, Some((92, 8)));
        let other = store.namespace("namespace-1").await.unwrap();
        assert_eq!(balance(&other, "acme").await, Some((96, 4)));
    }
}

/// Readers used to close the file after `close` had returned: a copy then lacked the contents of the log.
#[tokio::test]
async fn closed_file_is_complete_without_its_log() {
    let (place, clock) = (TempFile::new(), ManualWall::new(START));
    let store = place.open(&clock).await;
    granted(store.spend(&draw_of(&levels(&[("acme", &[slow(10)])]), 4)).await);
    assert_eq!(balance(&store, "acme").await, Some((6, 4)));
    store.close().await;
    assert_eq!(fs::read_dir(&place.folder).unwrap().count(), 1, "the log is gone");
    // Threads that closed their connections at the same time used to leave the log to each other.
    for round in 0..40 {
        let store = place.open(&clock).await;
        granted(store.spend(&draw_of(&levels(&[("busy", &[slow(100)])]), 1)).await);
        tokio::join!(balance(&store, "acme"), balance(&store, "acme"), balance(&store, "busy"));
        store.close().await;
        assert_eq!(fs::read_dir(&place.folder).unwrap().count(), 1, "the log is gone in round {round}");
    }
    let copy = TempFile::new();
    fs::copy(&place.path, &copy.path).unwrap();
    assert_eq!(balance(&copy.open(&clock).await, "acme").await, Some((6, 4)));
}

/// A newer program upgrades the file while an older one has it open.
#[tokio::test]
async fn open_file_that_becomes_newer_takes_no_writes() {
    let (place, clock) = (TempFile::new(), ManualWall::new(START));
    let store = place.open(&clock).await;
    granted(store.draw(&draw_of(&own("acme", 10), 1)).await);
    place.outside().pragma_update(None, "user_version", 99).unwrap();
    for _ in 0..3 {
        let sentence = error_text(store.draw(&draw_of(&own("acme", 10), 1)).await);
        assert!(
            sentence.ends_with("has schema version 99, newer than 5: use a newer tidegate"),
            "{sentence}"
        );
    }
}
