//! Archiving processes are killed repeatedly: in the end the archive has each entry once.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tidegate_core::limit::audit::Entry;
use tidegate_core::limit::name::ResourceName;
use tidegate_core::limit::policy::{Expect, Policy, Scope};
use tidegate_core::limit::rule::Limit;
use tidegate_core::time::Stamp;
use tidegate_store::archive::{ArchiveOptions, ArchivePlace, archive, read_archive};
use tidegate_store::wrap::{CallEnd, Measured, Verb, Watcher};
use tidegate_store::{AuditQuery, Ledger, Paging, Policies, PolicyChange, Sqlite};

use crate::kit::child::{Child, ChildArgs, test_name};

const CHANGES: u64 = 300;
const KILLS: u64 = 25;

fn options(root: &Path) -> ArchiveOptions {
    ArchiveOptions::new(root.join("audit"), Stamp::MAX).file_entries(4)
}

async fn open(root: &Path) -> Sqlite {
    Sqlite::open(root.join("limits.db")).await.expect("the store is opened")
}

async fn archived(root: &Path) -> Vec<Entry> {
    let mut read = Vec::new();
    if let Ok(mut entries) = read_archive(&ArchivePlace::folder(root.join("audit"))).await {
        while let Some(entry) = entries.next_entry().await.expect("a file with its final name is complete") {
            read.push(entry);
        }
    }
    read
}

/// Stops the child after every store call, until the parent lets it continue.
#[derive(Debug)]
struct CallStepper;

impl Watcher for CallStepper {
    fn ended(&self, _: Verb, _: Duration, _: CallEnd<'_>) {
        ChildArgs::wait_for_go();
    }
}

/// The body of the killed process.
#[tokio::test]
async fn process_that_is_killed() {
    let Some(args) = ChildArgs::from_env() else { return };
    let store = Measured::new(open(&args.path).await, Arc::new(CallStepper));
    archive(&store, &options(&args.path)).await.expect("the store and the folder are consistent");
}

/// The names of the files in the archive, including unfinished ones.
fn files(root: &Path) -> Vec<std::ffi::OsString> {
    let files = std::fs::read_dir(root.join("audit")).into_iter().flatten();
    let mut names: Vec<_> = files.map(|file| file.expect("a directory entry").file_name()).collect();
    names.sort();
    names
}

/// Starts an archiving process and kills it: after some store calls, either while it waits, when it
/// continues, or when it has created or renamed a file.
fn kill_one(root: &Path, number: u64) {
    let mut child = Child::start(test_name!(process_that_is_killed), root, number, 0);
    child.wait_ready();
    for _ in 0..number * 5 % 12 {
        child.go();
        child.wait_ready();
    }
    let before = files(root);
    if !number.is_multiple_of(3) {
        child.go();
    }
    while number % 3 == 2 && files(root) == before && child.lines_so_far().is_empty() {
        std::thread::yield_now();
    }
    child.kill();
}

#[tokio::test]
async fn killed_process_loses_and_repeats_nothing() {
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

    for number in 0..KILLS {
        kill_one(root.path(), number);
        let in_archive = archived(root.path()).await;
        assert!(in_archive == expected[..in_archive.len()], "after kill {number} the archive is a prefix");
        assert!(in_archive.len() < expected.len(), "every process was killed before it finished");
    }
    let mut last = Child::start(test_name!(process_that_is_killed), root.path(), KILLS, 0);
    while last.next_line().is_some() {
        last.go();
    }
    last.wait();
    assert!(archived(root.path()).await == expected, "each entry once");
    let store = open(root.path()).await;
    assert!(store.audit(&query, &Paging::default()).await.unwrap().items.is_empty());
    store.close().await;
}
