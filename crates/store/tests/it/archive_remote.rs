//! Archiving moves the audit to an object store: wherever a run stops, no entry is lost or archived twice.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use tidegate_core::limit::audit::Entry;
use tidegate_core::limit::name::ResourceName;
use tidegate_core::limit::policy::{Expect, Policy, Scope};
use tidegate_core::limit::rule::Limit;
use tidegate_core::time::Stamp;
use tidegate_store::archive::object_store::aws::AmazonS3Builder;
use tidegate_store::archive::object_store::memory::InMemory;
use tidegate_store::archive::object_store::prefix::PrefixStore;
use tidegate_store::archive::{
    ArchiveError, ArchiveOptions, ArchivePlace, ArchiveReport, archive, read_archive,
};
use tidegate_store::{AuditQuery, Memory, Paging, PolicyChange, Sqlite, Store};

use crate::kit;
use crate::kit::child::test_name;
use crate::kit::common::join_all;
use crate::kit::s3::{FakeS3, Fault};

/// The folder of the store of a killed child process. Not set in the parent.
const PLACE: &str = "TIDEGATE_ARCHIVE_S3_KILLED";
const BUCKET: &str = "TIDEGATE_ARCHIVE_S3_BUCKET";
const CHANGES: u64 = 60;

/// The prefix `a` of a bucket.
fn place(s3: &FakeS3, bucket: &str) -> ArchivePlace {
    let store = AmazonS3Builder::new()
        .with_bucket_name(bucket)
        .with_endpoint(format!("http://{}", s3.address))
        .with_allow_http(true)
        .with_access_key_id("tidegate")
        .with_secret_access_key("tidegate")
        .build();
    let store = PrefixStore::new(store.expect("the options are valid"), "a");
    ArchivePlace::from_store(Arc::new(store), format!("s3://{bucket}/a"))
}

/// Archives the whole audit to a bucket.
async fn archive_all(store: &dyn Store, place: ArchivePlace) -> Result<ArchiveReport, ArchiveError> {
    archive(store, &ArchiveOptions::at(place, Stamp::MAX).file_entries(8)).await
}

/// Changes of one, two and three entries.
async fn apply_changes(store: &dyn Store, changes: u64) -> Vec<Entry> {
    for number in 0..changes {
        let change = |part: u64| PolicyChange {
            scope: Scope::Resource(ResourceName::new(&format!("r{part}")).expect("a name")),
            expect: Expect::Any,
            policy: Some(Policy::new([Limit::per_minute("rpm", number + 1)]).expect("a policy")),
        };
        let changes: Vec<_> = (0..=number % 3).map(change).collect();
        store.apply(&changes, "ann").await.expect("the change is applied");
    }
    audit(store).await
}

async fn audit(store: &dyn Store) -> Vec<Entry> {
    let query = AuditQuery { filed: None, range: Stamp::ZERO..Stamp::MAX };
    store.audit(&query, &Paging::first(1_000).expect("a page")).await.expect("the audit is listed").items
}

/// All entries in the bucket.
async fn archived(place: &ArchivePlace) -> Vec<Entry> {
    let mut entries = read_archive(place).await.expect("the names do not overlap");
    let mut read = Vec::new();
    while let Some(entry) = entries.next_entry().await.expect("a file with its final name is complete") {
        read.push(entry);
    }
    read
}

#[tokio::test]
async fn runs_continue_in_the_same_bucket() {
    let (s3, _) = FakeS3::start().await;
    let place = place(&s3, "archive");
    let store = Memory::new();
    let expected = apply_changes(&store, 30).await;
    let done = archive_all(&store, place.clone()).await.unwrap();
    assert_eq!((done.entries, done.pruned), (60, 60));
    assert_eq!(s3.keys().len() as u64, done.files + 1, "{:?}", s3.keys());
    let first = "a/audit-00000000000000000001-00000000000000000005.jsonl.gz";
    assert_eq!(s3.keys()[..2], ["a/archive.lock", first]);
    assert!(audit(&store).await.is_empty());
    let more = apply_changes(&store, 3).await;
    assert_eq!(archive_all(&store, place.clone()).await.unwrap().entries, 6);
    assert_eq!(archive_all(&store, place.clone()).await.unwrap().entries, 0, "no entries are left to move");
    assert!(archived(&place).await == [expected, more].concat(), "each entry once, in order");
}

#[tokio::test]
async fn failed_or_lost_responses_are_recovered() {
    let run = async |fault, number| {
        let (s3, _) = FakeS3::start().await;
        let place = place(&s3, "archive");
        let store = Memory::new();
        let expected = apply_changes(&store, 9).await;
        let mut count = 0;
        s3.plan(move |_| {
            count += 1;
            if count == number + 1 { fault } else { Fault::None }
        });
        archive_all(&store, place.clone())
            .await
            .unwrap_or_else(|error| panic!("{fault:?} of request {number}: {error}"));
        assert!(archived(&place).await == expected, "{fault:?} of request {number}");
        assert!(audit(&store).await.is_empty());
    };
    // All runs are concurrent, because each one waits before it retries.
    let runs = [Fault::Refused, Fault::Lost].map(|fault| (0..12).map(move |number| (fault, number)));
    let runs = runs.into_iter().flatten().map(|(fault, number)| Box::pin(run(fault, number)));
    join_all(runs.collect()).await;
}

#[tokio::test]
async fn run_continues_after_a_drop_at_any_request() {
    let (s3, mut stuck) = FakeS3::start().await;
    let place = place(&s3, "archive");
    let store = Memory::new();
    let expected = apply_changes(&store, CHANGES).await;
    let mut drops = 0;
    for fault in [Fault::Stuck, Fault::StuckAfter].into_iter().cycle() {
        let mut number = 0;
        s3.plan(move |_| {
            number += 1;
            if number == 2 + drops { fault } else { Fault::None }
        });
        let done = tokio::select! {
            done = archive_all(&store, place.clone()) => Some(done),
            _ = stuck.recv() => None,
        };
        s3.plan(|_| Fault::None);
        let in_archive = archived(&place).await;
        assert!(in_archive == expected[..in_archive.len()], "dropped {drops} times: the archive is a prefix");
        let left = audit(&store).await;
        assert!(
            in_archive.len() + left.len() >= expected.len(),
            "an entry that is not archived is in the store"
        );
        if let Some(done) = done {
            done.unwrap();
            break;
        }
        drops += 1;
    }
    assert!(drops >= 10, "dropped {drops} times");
    assert!(archived(&place).await == expected && audit(&store).await.is_empty(), "each entry once");
}

/// The body of the killed process.
#[tokio::test]
async fn process_that_is_killed() {
    if let (Some(root), Ok(url)) = (std::env::var_os(PLACE), std::env::var(BUCKET)) {
        let store = Sqlite::open(Path::new(&root).join("limits.db")).await.expect("the store is opened");
        let place = ArchivePlace::open(&url).expect("a valid address");
        archive_all(&store, place).await.expect("the store and the bucket are consistent");
        store.close().await;
    }
}

#[tokio::test]
async fn killed_process_loses_and_repeats_nothing() {
    let (s3, mut stuck) = FakeS3::start().await;
    let place = place(&s3, "archive");
    let root = tempfile::tempdir().unwrap();
    let open = async || Sqlite::open(root.path().join("limits.db")).await.expect("the store is opened");
    let store = open().await;
    let expected = apply_changes(&store, CHANGES).await;
    store.close().await;
    drop(store);
    let (mut kills, mut ended) = (0, None);
    while ended.is_none() {
        let mut number = 0;
        s3.plan(move |_| {
            number += 1;
            let fault = if kills % 2 == 0 { Fault::StuckAfter } else { Fault::Stuck };
            if number == 3 + kills { fault } else { Fault::None }
        });
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test_name!(process_that_is_killed)])
            .env(PLACE, root.path())
            .env(BUCKET, s3.url("a"))
            .env("AWS_ACCESS_KEY_ID", "tidegate")
            .env("AWS_SECRET_ACCESS_KEY", "tidegate")
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        // It is killed while it waits for the bucket, at another request each time, or it exits.
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
        s3.plan(|_| Fault::None);
        let in_archive = archived(&place).await;
        assert!(in_archive == expected[..in_archive.len()], "killed {kills} times: the archive is a prefix");
    }
    assert!(ended.is_some_and(|status| status.success()), "the last process succeeds");
    assert!(kills >= 8, "killed {kills} times");
    assert!(archived(&place).await == expected, "each entry once");
    let store = open().await;
    assert!(audit(&store).await.is_empty());
    store.close().await;
}

#[tokio::test]
async fn lock_is_taken_over_only_after_it_expired() {
    let (s3, _) = FakeS3::start().await;
    let place = place(&s3, "archive");
    let store = Memory::new();
    apply_changes(&store, 3).await;
    s3.write("a/archive.lock", b"another run");
    s3.write_times(kit::s3::FUTURE);
    let error = archive_all(&store, place.clone()).await.unwrap_err();
    assert!(matches!(error, ArchiveError::Locked { .. }) && error.is_transient(), "{error}");
    assert_eq!(error.to_string(), "`s3://archive/a` is locked by another run");
    assert_eq!(audit(&store).await.len(), 6, "nothing was pruned");
    s3.write_times(kit::s3::PAST);
    assert_eq!(archive_all(&store, place.clone()).await.unwrap().entries, 6);
    // The lock is released: it can be taken at once, however recent it is.
    s3.write_times(kit::s3::FUTURE);
    assert_eq!(archive_all(&store, place).await.unwrap().entries, 0);
}

#[tokio::test]
async fn run_stops_after_it_lost_its_lock() {
    let (s3, _) = FakeS3::start().await;
    let place = place(&s3, "archive");
    let store = Memory::new();
    let expected = apply_changes(&store, 12).await;
    let (mut files, other) = (0, s3.clone());
    let taken = Arc::new(std::sync::Mutex::new(None));
    let taken_over = Arc::clone(&taken);
    s3.plan(move |request| {
        files += u32::from(request.starts_with("PUT") && request.contains("audit-"));
        if files == 1 {
            // Another run takes over during the first put.
            *taken_over.lock().unwrap() = Some(());
        }
        Fault::None
    });
    let watching = Arc::clone(&taken);
    let intruder = tokio::spawn(async move {
        loop {
            if watching.lock().unwrap().is_some() {
                other.write("a/archive.lock", b"another run");
                return;
            }
            tokio::task::yield_now().await;
        }
    });
    let error = archive_all(&store, place.clone()).await.unwrap_err();
    intruder.await.unwrap();
    assert!(matches!(error, ArchiveError::Locked { .. }), "{error}");
    let in_archive = archived(&place).await;
    assert!(in_archive.len() < expected.len() && in_archive == expected[..in_archive.len()]);
    assert!(audit(&store).await.len() + in_archive.len() >= expected.len(), "nothing is lost");
    s3.plan(|_| Fault::None);
    archive_all(&store, place.clone()).await.unwrap();
    assert!(archived(&place).await == expected);
}

#[tokio::test]
async fn bucket_of_another_store_is_refused() {
    let (s3, _) = FakeS3::start().await;
    let place = place(&s3, "archive");
    let (one, other) = (Memory::new(), Memory::new());
    apply_changes(&one, 5).await;
    archive_all(&one, place.clone()).await.unwrap();
    let left = apply_changes(&other, 7).await;
    let error = archive_all(&other, place.clone()).await.unwrap_err();
    assert!(matches!(error, ArchiveError::Foreign { .. }), "{error}");
    assert!(error.to_string().starts_with("`s3://archive/a` is not the archive of this store"), "{error}");
    assert!(audit(&other).await == left);
}

/// Any object store with conditional puts works.
#[tokio::test]
async fn own_object_store_holds_an_archive() {
    let place = ArchivePlace::from_store(Arc::new(InMemory::new()), "memory");
    let store = Memory::new();
    let expected = apply_changes(&store, 9).await;
    assert_eq!(archive_all(&store, place.clone()).await.unwrap().pruned, 18);
    assert!(archived(&place).await == expected);
}

#[tokio::test]
async fn missing_bucket_is_not_transient() {
    let (s3, _) = FakeS3::start().await;
    let store = Memory::new();
    apply_changes(&store, 1).await;
    let error = archive_all(&store, place(&s3, "other")).await.unwrap_err();
    assert!(!error.is_transient() && error.to_string().contains("NoSuchBucket"), "{error}");
    assert_eq!(audit(&store).await.len(), 1);
    assert!(s3.requests().iter().all(|request| request.contains("/other/")), "{:?}", s3.requests());
}

#[test]
fn address_selects_the_object_store() {
    for (address, kind) in [
        ("audit", "Folder(\"audit\")"),
        ("file:///var/audit", "Folder(\"/var/audit\")"),
        ("s3://backups/tidegate/audit?region=eu-central-1", "root: \"s3://backups/tidegate/audit\""),
        ("s3://b?endpoint=http://127.0.0.1:9000", "AmazonS3"),
        ("gs://backups/audit/", "GoogleCloudStorage"),
        ("gs://backups/audit/", "root: \"gs://backups/audit\""),
        ("az://backups/audit?account_name=acme", "MicrosoftAzure"),
    ] {
        let place = ArchivePlace::open(address).unwrap_or_else(|error| panic!("{address}: {error}"));
        assert!(format!("{place:?}").contains(kind), "{address}: {place:?}");
    }
}

#[test]
fn invalid_address_is_refused_with_a_reason() {
    for (address, reason) in [
        ("s3:///x", "no bucket: write s3://BUCKET/PREFIX?region=REGION"),
        ("s3://b/x?region=a&size=5", "the options are region, endpoint and account_name, each with a value"),
        ("s3://b/x?secret_access_key=a", "the options are"),
        ("gs://b/x?region=a", "'region' is not valid for store"),
        ("az://b/x", "Account must be specified"),
        ("ftp://b/x", "unknown scheme `ftp`: use file, s3, gs or az"),
        ("s3://[/x", "invalid"),
    ] {
        let error = ArchivePlace::open(address).unwrap_err().to_string();
        assert!(error.contains(reason), "{address}: {error}");
    }
}
