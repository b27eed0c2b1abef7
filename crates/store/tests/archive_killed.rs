//! A process that archives is killed, again and again: each entry is in the archive once when the last one has ended.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use tidegate_core::limit::audit::Entry;
use tidegate_core::limit::name::ResourceName;
use tidegate_core::limit::policy::{Expect, Policy, Scope};
use tidegate_core::limit::rule::Limit;
use tidegate_core::time::Stamp;
use tidegate_store::archive::{ArchiveOptions, archive, read_archive};
use tidegate_store::{AuditQuery, Ledger, Paging, Policies, PolicyChange, Sqlite};

/// Where the process that is killed finds its store; not set, there is nothing for it to do.
const PLACE: &str = "TIDEGATE_ARCHIVE_KILLED";
const CHANGES: u64 = 300;

fn options(root: &Path) -> ArchiveOptions {
    ArchiveOptions::new(root.join("audit"), Stamp::MAX).file_entries(4)
}

async fn open(root: &Path) -> Sqlite {
    Sqlite::open(root.join("limits.db")).await.expect("the store is opened")
}

fn archived(root: &Path) -> Vec<Entry> {
    match read_archive(root.join("audit")) {
        Ok(entries) => entries.map(|entry| entry.expect("a file that has its name is whole")).collect(),
        Err(_) => Vec::new(),
    }
}

/// What the killed process does.
#[tokio::test]
async fn the_process_that_is_killed() {
    if let Some(root) = std::env::var_os(PLACE) {
        let store = open(Path::new(&root)).await;
        archive(&store, &options(Path::new(&root)))
            .await
            .expect("the store and the folder are as it left them");
    }
}

#[tokio::test]
async fn a_process_that_is_killed_loses_nothing_and_writes_nothing_twice() {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path()).await;
    for number in 0..CHANGES {
        let change = |part: u64| PolicyChange {
            scope: Scope::Resource(ResourceName::new(&format!("r{part}")).unwrap()),
            expect: Expect::Any,
            policy: Some(Policy::new([Limit::per_minute("rpm", number + 1)]).unwrap()),
        };
        store.apply(&(0..=number % 3).map(change).collect::<Vec<_>>(), "ann").await.unwrap();
    }
    let query = AuditQuery { filed: None, range: Stamp::ZERO..Stamp::MAX };
    let expected = store.audit(&query, &Paging::first(1_000).unwrap()).await.unwrap().items;
    assert_eq!(expected.len(), 600);
    store.close().await;
    drop(store);

    let mut kills = 0;
    for wait in (0..).map(|number| Duration::from_millis(40 + number * 7 % 80)) {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "the_process_that_is_killed"])
            .env(PLACE, root.path())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        tokio::time::sleep(wait).await;
        if kills == 25 {
            assert!(process.wait().unwrap().success(), "left alone, it comes to an end");
            break;
        }
        process.kill().unwrap();
        process.wait().unwrap();
        kills += 1;
        let there = archived(root.path());
        assert!(there == expected[..there.len()], "killed {kills} times: the archive is a beginning");
    }
    assert!(archived(root.path()) == expected, "each entry once");
    let store = open(root.path()).await;
    assert!(store.audit(&query, &Paging::default()).await.unwrap().items.is_empty());
    store.close().await;
}
