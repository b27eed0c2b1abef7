//! The audit goes to a bucket and is whole there before the store forgets it, whoever stops it, and wherever.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use tidegate_core::limit::audit::Entry;
use tidegate_core::limit::name::ResourceName;
use tidegate_core::limit::policy::{Expect, Policy, Scope};
use tidegate_core::limit::rule::Limit;
use tidegate_core::time::Stamp;
use tidegate_store::archive::{ArchiveError, ArchiveOptions, Archived, archive, copy_archive, read_archive};
use tidegate_store::{AuditQuery, Memory, Paging, PolicyChange, S3Archive, Sqlite, Store};

use crate::kit::child::test_name;
use crate::kit::s3::{Double, Fault};
use crate::kit::words::join_all;

/// Where the process that is killed finds its store and its bucket; not set, there is nothing for it to do.
const PLACE: &str = "TIDEGATE_ARCHIVE_S3_KILLED";
const BUCKET: &str = "TIDEGATE_ARCHIVE_S3_BUCKET";
const CHANGES: u64 = 40;

async fn bucket(url: &str, held_for: Duration) -> Arc<S3Archive> {
    let opened = S3Archive::open_with_keys(url, "tidegate", "tidegate").await.expect("an address");
    Arc::new(opened.held_for(held_for))
}

/// Moves all of the audit to a bucket; a run that was killed holds it no more.
async fn moved(store: &dyn Store, url: &str) -> Result<Archived, ArchiveError> {
    archive(store, &ArchiveOptions::at(bucket(url, Duration::ZERO).await, Stamp::MAX).file_entries(8)).await
}

/// Changes of one, two and three entries.
async fn changed(store: &dyn Store, changes: u64) -> Vec<Entry> {
    for number in 0..changes {
        let change = |part: u64| PolicyChange {
            scope: Scope::Resource(ResourceName::new(&format!("r{part}")).expect("a name")),
            expect: Expect::Any,
            policy: Some(Policy::new([Limit::per_minute("rpm", number + 1)]).expect("a policy")),
        };
        let changes: Vec<_> = (0..=number % 3).map(change).collect();
        store.apply(&changes, "ann").await.expect("it is applied");
    }
    audit(store).await
}

async fn audit(store: &dyn Store) -> Vec<Entry> {
    let query = AuditQuery { filed: None, range: Stamp::ZERO..Stamp::MAX };
    store.audit(&query, &Paging::first(1_000).expect("a page")).await.expect("it is listed").items
}

/// What is in the bucket, read back.
async fn archived(url: &str) -> Vec<Entry> {
    let folder = tempfile::tempdir().expect("a folder");
    copy_archive(&*bucket(url, Duration::ZERO).await, folder.path()).await.expect("it is copied");
    let entries = read_archive(folder.path()).expect("the names fit");
    entries.map(|entry| entry.expect("a file that has its name is whole")).collect()
}

#[tokio::test]
async fn what_is_old_goes_to_the_bucket_in_files_of_the_same_form_and_later_runs_go_on() {
    let (double, _) = Double::start().await;
    let url = double.url("prod/audit");
    let store = Memory::new();
    let expected = changed(&store, 30).await;
    let done = moved(&store, &url).await.unwrap();
    assert_eq!((done.entries, done.pruned), (60, 60));
    assert_eq!(double.keys().len() as u64, done.files, "nothing else stays: {:?}", double.keys());
    let first = "prod/audit/audit-00000000000000000001-00000000000000000005.jsonl.gz";
    assert_eq!(double.keys()[0], first);
    assert!(audit(&store).await.is_empty());
    let more = changed(&store, 3).await;
    assert_eq!(moved(&store, &url).await.unwrap().entries, 6);
    assert_eq!(moved(&store, &url).await.unwrap().entries, 0, "there is nothing more to move");
    assert!(archived(&url).await == [expected, more].concat(), "each entry once, in their order");
}

#[tokio::test]
async fn a_bucket_that_breaks_and_loses_answers_has_each_entry_once() {
    let run = async |fault, place| {
        let (double, _) = Double::start().await;
        let url = double.url("a");
        let store = Memory::new();
        let expected = changed(&store, 9).await;
        let mut number = 0;
        double.plan(move |_| {
            number += 1;
            if number == place + 1 { fault } else { Fault::None }
        });
        moved(&store, &url).await.unwrap_or_else(|error| panic!("{fault:?} of request {place}: {error}"));
        assert!(archived(&url).await == expected, "{fault:?} of request {place}");
        assert!(audit(&store).await.is_empty());
    };
    // All at once: each waits before it tries again.
    let runs = [Fault::Refused, Fault::Lost].map(|fault| (0..12).map(move |place| (fault, place)));
    let runs = runs.into_iter().flatten().map(|(fault, place)| Box::pin(run(fault, place)));
    join_all(runs.collect()).await;
}

#[tokio::test]
async fn a_run_dropped_at_any_request_loses_nothing_and_is_gone_on_with() {
    let (double, mut stuck) = Double::start().await;
    let url = double.url("a");
    let store = Memory::new();
    let expected = changed(&store, CHANGES).await;
    let mut drops = 0;
    for fault in [Fault::Stuck, Fault::StuckAfter].into_iter().cycle() {
        let mut number = 0;
        double.plan(move |_| {
            number += 1;
            if number == 2 + drops { fault } else { Fault::None }
        });
        let done = tokio::select! {
            done = moved(&store, &url) => Some(done),
            _ = stuck.recv() => None,
        };
        double.plan(|_| Fault::None);
        let there = archived(&url).await;
        assert!(there == expected[..there.len()], "dropped {drops} times: the archive is a beginning");
        let left = audit(&store).await;
        assert!(there.len() + left.len() >= expected.len(), "what is not there is still in the store");
        if let Some(done) = done {
            done.unwrap();
            break;
        }
        drops += 1;
    }
    assert!(drops >= 10, "dropped {drops} times");
    assert!(archived(&url).await == expected && audit(&store).await.is_empty(), "each entry once");
}

/// What the killed process does.
#[tokio::test]
async fn the_process_that_is_killed() {
    if let (Some(root), Ok(url)) = (std::env::var_os(PLACE), std::env::var(BUCKET)) {
        let store = Sqlite::open(Path::new(&root).join("limits.db")).await.expect("the store is opened");
        moved(&store, &url).await.expect("the store and the bucket are as it left them");
        store.close().await;
    }
}

#[tokio::test]
async fn a_process_that_is_killed_loses_nothing_and_writes_nothing_twice() {
    let (double, mut stuck) = Double::start().await;
    let url = double.url("killed");
    let root = tempfile::tempdir().unwrap();
    let open = async || Sqlite::open(root.path().join("limits.db")).await.expect("the store is opened");
    let store = open().await;
    let expected = changed(&store, CHANGES).await;
    store.close().await;
    drop(store);
    let (mut kills, mut ended) = (0, None);
    while ended.is_none() {
        let mut number = 0;
        double.plan(move |_| {
            number += 1;
            let fault = if kills % 2 == 0 { Fault::StuckAfter } else { Fault::Stuck };
            if number == 3 + kills { fault } else { Fault::None }
        });
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test_name!(the_process_that_is_killed)])
            .env(PLACE, root.path())
            .env(BUCKET, &url)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        // It is killed while it waits for the bucket, at another request each time, or ends by itself.
        ended = loop {
            let waited = tokio::time::timeout(Duration::from_millis(20), stuck.recv()).await;
            if waited.is_ok() {
                process.kill().unwrap();
                process.wait().unwrap();
                break None;
            }
            if let Some(status) = process.try_wait().unwrap() {
                break Some(status);
            }
        };
        kills += usize::from(ended.is_none());
        double.plan(|_| Fault::None);
        let there = archived(&url).await;
        assert!(there == expected[..there.len()], "killed {kills} times: the archive is a beginning");
    }
    assert!(ended.is_some_and(|status| status.success()), "left alone, it comes to an end");
    assert!(kills >= 8, "killed {kills} times");
    assert!(archived(&url).await == expected, "each entry once");
    let store = open().await;
    assert!(audit(&store).await.is_empty());
    store.close().await;
}

#[tokio::test]
async fn two_at_once_are_kept_apart_and_one_that_was_killed_is_waited_for_no_longer_than_it_holds() {
    let (double, _) = Double::start().await;
    let url = double.url("a");
    let store = Memory::new();
    changed(&store, 3).await;
    // Somebody holds it, for longer than the double's time is old.
    double.write("a/archive.lock", b"somebody");
    let long = bucket(&url, Duration::from_secs(24 * 365 * 100 * 3_600)).await;
    let error = archive(&store, &ArchiveOptions::at(long, Stamp::MAX)).await.unwrap_err();
    assert!(matches!(error, ArchiveError::Locked { .. }) && error.is_transient(), "{error}");
    assert_eq!(error.to_string(), "`s3://archive/a/` is locked: somebody else archives to it");
    assert_eq!(audit(&store).await.len(), 6, "nothing was pruned");
    assert_eq!(moved(&store, &url).await.unwrap().entries, 6);
    assert!(!double.keys().contains(&"a/archive.lock".to_owned()), "it is released");
}

#[tokio::test]
async fn one_that_has_lost_its_hold_writes_and_prunes_no_more() {
    let (double, _) = Double::start().await;
    let url = double.url("a");
    let store = Memory::new();
    let expected = changed(&store, 12).await;
    let (mut files, other) = (0, double.clone());
    let taken = Arc::new(std::sync::Mutex::new(None));
    let wish = Arc::clone(&taken);
    double.plan(move |asked| {
        files += u32::from(asked.starts_with("PUT") && asked.contains("audit-"));
        if files == 1 {
            // Another one takes over while the first file is on its way.
            *wish.lock().unwrap() = Some(());
        }
        Fault::None
    });
    let watching = Arc::clone(&taken);
    let thief = tokio::spawn(async move {
        loop {
            if watching.lock().unwrap().is_some() {
                other.write("a/archive.lock", b"somebody else");
                return;
            }
            tokio::task::yield_now().await;
        }
    });
    let error = moved(&store, &url).await.unwrap_err();
    thief.await.unwrap();
    assert!(matches!(error, ArchiveError::Locked { .. }), "{error}");
    let there = archived(&url).await;
    assert!(there.len() < expected.len() && there == expected[..there.len()]);
    assert!(audit(&store).await.len() + there.len() >= expected.len(), "nothing is lost");
    double.plan(|_| Fault::None);
    moved(&store, &url).await.unwrap();
    assert!(archived(&url).await == expected);
}

#[tokio::test]
async fn the_bucket_of_another_store_is_refused_and_nothing_is_pruned() {
    let (double, _) = Double::start().await;
    let url = double.url("a");
    let (one, other) = (Memory::new(), Memory::new());
    changed(&one, 5).await;
    moved(&one, &url).await.unwrap();
    let left = changed(&other, 7).await;
    let error = moved(&other, &url).await.unwrap_err();
    assert!(matches!(error, ArchiveError::Foreign { .. }), "{error}");
    assert!(error.to_string().starts_with("`s3://archive/a/` is not the archive of this store"), "{error}");
    assert!(audit(&other).await == left);
}

#[tokio::test]
async fn what_is_wrong_with_an_address_or_a_bucket_is_said() {
    for (url, part) in [
        ("s3:x", "names no bucket: write s3://BUCKET/PREFIX?region=REGION"),
        ("s3:///x", "names no bucket"),
        ("s3://b/x?region=a&size=5", "may have the options region and endpoint, each with a value"),
    ] {
        let error = S3Archive::open(url).await.unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
    let (double, _) = Double::start().await;
    let store = Memory::new();
    changed(&store, 1).await;
    let url = format!("s3://other/a?region=x&endpoint=http://{}", double.address);
    let error = moved(&store, &url).await.unwrap_err();
    assert!(!error.is_transient() && error.to_string().contains("NoSuchBucket"), "{error}");
    assert_eq!(audit(&store).await.len(), 1);
    assert!(double.asked().iter().all(|asked| asked.contains("/other/")), "{:?}", double.asked());
}
