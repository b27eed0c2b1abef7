//! Archiving moves the audit to a folder: wherever a run stops, no entry is lost or archived twice.

use std::fs;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::{Arc, Mutex, mpsc};
use std::task::Poll;
use std::time::Duration;

use tempfile::TempDir;
use tidegate_core::limit::audit::Entry;
use tidegate_core::limit::entity::Entity;
use tidegate_core::limit::name::{EntityId, ResourceName};
use tidegate_core::limit::policy::{Expect, Policy, Scope, Version};
use tidegate_core::limit::rule::Limit;
use tidegate_core::time::Stamp;
use tidegate_store::archive::{
    ArchiveError, ArchiveOptions, ArchivePlace, ArchiveReport, archive as archive_once, read_archive,
};
use tidegate_store::wrap::{CallEnd, FaultPlan, Faulty, Measured, Verb, Watcher};
use tidegate_store::{
    AuditQuery, Entities, Ledger, ManualWall, Memory, Paging, Policies, PolicyChange, Prune, Sqlite, Store,
    StoreError,
};

const START: Stamp = Stamp::from_secs(1_800_000_000);

struct Kit {
    store: Memory,
    clock: ManualWall,
    /// Contains the folder, which the first run creates.
    _root: TempDir,
    folder: PathBuf,
}

impl Kit {
    fn new() -> Self {
        let clock = ManualWall::new(START);
        let root = tempfile::tempdir().expect("a folder for the test");
        let folder = root.path().join("audit");
        Self { store: Memory::with_clock(clock.clone()), clock, _root: root, folder }
    }

    /// Changes of one, two, three, one … entries each, a second apart.
    async fn with_changes(count: u64) -> Self {
        let kit = Self::new();
        for number in 0..count {
            kit.change(number % 3 + 1).await;
        }
        kit
    }

    async fn change(&self, entries: u64) -> Version {
        let change = |number: u64| PolicyChange {
            scope: Scope::Resource(ResourceName::new(&format!("r{number}")).expect("valid")),
            expect: Expect::Any,
            policy: Some(Policy::new([Limit::per_minute("rpm", self.clock_seconds() + 1)]).expect("valid")),
        };
        let changes: Vec<_> = (0..entries).map(change).collect();
        let version = self.store.apply(&changes, "ann").await.expect("a change is made");
        self.clock.advance(Duration::from_secs(1));
        version
    }

    fn clock_seconds(&self) -> u64 {
        use tidegate_store::WallClock;
        self.clock.now().since(START).as_secs()
    }

    /// Archives all changes so far, in files of `file_entries` entries.
    fn all(&self, file_entries: usize) -> ArchiveOptions {
        ArchiveOptions::new(&self.folder, Stamp::MAX).file_entries(file_entries)
    }

    async fn archives(&self, options: &ArchiveOptions) -> ArchiveReport {
        archive(&self.store, options).await.expect("archiving succeeds")
    }

    async fn assert_complete(&self, expected: &[Entry]) {
        let (archived, mut stored) = (archived(&self.folder).await, audit(&self.store).await);
        let mut both = archived;
        both.append(&mut stored);
        assert_eq!(both.len(), expected.len(), "each entry once");
        assert_eq!(both, expected);
    }

    /// Every entry is in the archive or in the store, or in both.
    async fn lost_nothing(&self, expected: &[Entry]) {
        let (archived, stored) = (archived(&self.folder).await, audit(&self.store).await);
        assert_eq!(archived, expected[..archived.len()], "the archive is a prefix");
        assert_eq!(stored, expected[expected.len() - stored.len()..], "the store is a suffix");
        assert!(archived.len() + stored.len() >= expected.len(), "no entry is missing");
    }

    fn files(&self) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(&self.folder)
            .expect("the folder exists")
            .map(|file| file.expect("a directory entry").file_name().into_string().expect("a UTF-8 name"))
            .filter(|name| name != "archive.lock")
            .collect();
        names.sort();
        names
    }
}

async fn audit(store: &dyn Store) -> Vec<Entry> {
    let query = AuditQuery { filed: None, range: Stamp::ZERO..Stamp::MAX };
    let (mut entries, mut next) = (Vec::new(), Some(Paging::first(1_000).expect("within bounds")));
    while let Some(paging) = next {
        let page = store.audit(&query, &paging).await.expect("the audit is listed");
        entries.extend(page.items);
        next = page.next.map(|cursor| paging.after(cursor));
    }
    entries
}

async fn archived(folder: &Path) -> Vec<Entry> {
    if !folder.exists() {
        return Vec::new();
    }
    read(folder).await.expect("the archive is valid")
}

async fn read(folder: &Path) -> Result<Vec<Entry>, ArchiveError> {
    let mut entries = read_archive(&ArchivePlace::folder(folder)).await?;
    let mut read = Vec::new();
    while let Some(entry) = entries.next_entry().await? {
        read.push(entry);
    }
    Ok(read)
}

/// Archives, and retries while the folder is locked. A dropped run holds the lock until its write ends, and
/// so does a child process that another test is starting: it has a copy of every open file until it executes
/// its program.
async fn archive(store: &dyn Store, options: &ArchiveOptions) -> Result<ArchiveReport, ArchiveError> {
    for _ in 0..60_000 {
        match archive_once(store, options).await {
            Err(ArchiveError::Locked { .. }) => tokio::time::sleep(Duration::from_millis(1)).await,
            answer => return answer,
        }
    }
    panic!("the folder stays locked");
}

#[tokio::test]
async fn old_changes_are_moved_and_newer_ones_stay() {
    let kit = Kit::with_changes(9).await;
    let acme = Entity::new(EntityId::new("acme").unwrap()).name("Acme\n").metadata("tier", "gold");
    kit.store.put(&acme, Expect::Any, "bob").await.unwrap();
    let expected = audit(&kit.store).await;
    // The changes of the first five seconds, with 1 + 2 + 3 + 1 + 2 entries.
    let options = ArchiveOptions::new(&kit.folder, START + Duration::from_secs(5)).file_entries(4);
    let done = kit.archives(&options).await;
    assert_eq!((done.files, done.entries, done.pruned, done.through), (2, 9, 9, Some(Version::new(5))));
    let files = [
        "audit-00000000000000000001-00000000000000000003.jsonl.gz",
        "audit-00000000000000000004-00000000000000000005.jsonl.gz",
    ];
    assert_eq!(kit.files(), files);
    kit.assert_complete(&expected).await;
    assert_eq!(audit(&kit.store).await, expected[9..]);

    let again = kit.archives(&options).await;
    assert_eq!((again.files, again.entries, again.through), (0, 0, Some(Version::new(5))));
    let rest = kit.archives(&kit.all(10_000)).await;
    assert_eq!((rest.files, rest.entries, rest.through), (1, 10, Some(Version::new(10))));
    kit.assert_complete(&expected).await;
    assert!(audit(&kit.store).await.is_empty());
}

#[tokio::test]
async fn empty_audit_makes_no_file() {
    let kit = Kit::new();
    assert_eq!(kit.archives(&kit.all(10)).await, ArchiveReport::default());
    assert!(kit.files().is_empty());
    kit.change(1).await;
    let nothing = ArchiveOptions::new(&kit.folder, START);
    assert_eq!(
        kit.archives(&nothing).await,
        ArchiveReport::default(),
        "a change at that time is not before it"
    );
    assert_eq!(audit(&kit.store).await.len(), 1);
}

#[tokio::test]
async fn large_change_stays_in_one_file() {
    let kit = Kit::new();
    for entries in [7, 3_000, 2] {
        kit.change(entries).await;
    }
    let expected = audit(&kit.store).await;
    let done = kit.archives(&kit.all(10)).await;
    assert_eq!((done.files, done.entries, done.pruned), (2, 3_009, 3_009));
    let files = [
        "audit-00000000000000000001-00000000000000000002.jsonl.gz",
        "audit-00000000000000000003-00000000000000000003.jsonl.gz",
    ];
    assert_eq!(kit.files(), files);
    kit.assert_complete(&expected).await;
}

#[tokio::test]
async fn change_behind_a_newer_one_waits() {
    let kit = Kit::with_changes(3).await;
    kit.clock.set(START + Duration::from_secs(1_000));
    let late = kit.change(1).await;
    kit.clock.set(START + Duration::from_secs(10));
    kit.change(1).await;
    let expected = audit(&kit.store).await;
    let options = ArchiveOptions::new(&kit.folder, START + Duration::from_secs(500));
    let done = kit.archives(&options).await;
    assert_eq!(done.through.map(Version::next), Some(late));
    assert_eq!(audit(&kit.store).await, expected[6..]);
    kit.assert_complete(&expected).await;
}

/// Stops a run before each of its store calls, one after the other.
async fn assert_survives_a_stop_at_every_call(changes: &[u64], file_entries: usize) {
    for calls in 0.. {
        let kit = Kit::new();
        for entries in changes {
            kit.change(*entries).await;
        }
        let expected = audit(&kit.store).await;
        let faulty = Faulty::new(kit.store.clone(), FaultPlan::seeded(1)).expect("a plan without faults");
        faulty.go_away_after(calls);
        let first = archive(&faulty, &kit.all(file_entries)).await;
        kit.lost_nothing(&expected).await;
        faulty.come_back();
        let second = archive(&faulty, &kit.all(file_entries)).await.expect("the second run continues");
        kit.assert_complete(&expected).await;
        assert!(audit(&kit.store).await.is_empty(), "stopped after {calls} calls");
        assert_eq!(second.through, expected.last().map(|entry| entry.version));
        match first {
            Ok(_) => {
                assert!(calls > 3, "it makes several calls");
                return;
            }
            Err(error) => assert!(error.is_transient(), "{error}"),
        }
    }
}

#[tokio::test]
async fn run_continues_after_a_failed_store_call() {
    assert_survives_a_stop_at_every_call(&[1, 2, 3, 4, 5, 6, 7, 8], 5).await;
}

/// A partial prune leaves the store with the end of a change that is in the archive as a whole.
#[tokio::test]
async fn run_continues_after_a_partial_prune() {
    assert_survives_a_stop_at_every_call(&[3, 2_500, 4], 10).await;
}

/// The store is closed and reopened between the runs.
#[tokio::test]
async fn run_continues_after_a_store_restart() {
    for calls in 0.. {
        let root = tempfile::tempdir().unwrap();
        let (file, folder) = (root.path().join("limits.db"), root.path().join("audit"));
        let store = Sqlite::open(&file).await.unwrap();
        let change = |number: u64| PolicyChange {
            scope: Scope::Resource(ResourceName::new(&format!("r{number}")).unwrap()),
            expect: Expect::Any,
            policy: Some(Policy::new([Limit::per_minute("rpm", number + 1)]).unwrap()),
        };
        for entries in [2, 3, 1_100, 1] {
            let changes: Vec<_> = (0..entries).map(change).collect();
            store.apply(&changes, "ann").await.unwrap();
        }
        let expected = audit(&store).await;
        let options = ArchiveOptions::new(&folder, Stamp::MAX).file_entries(5);
        let faulty = Faulty::new(store, FaultPlan::seeded(1)).unwrap();
        faulty.go_away_after(calls);
        let first = archive(&faulty, &options).await;
        faulty.inner().close().await;
        drop(faulty);

        let store = Sqlite::open(&file).await.unwrap();
        archive(&store, &options).await.unwrap();
        assert!(archived(&folder).await == expected, "stopped after {calls} calls: each entry once");
        assert!(audit(&store).await.is_empty());
        store.close().await;
        if first.is_ok() {
            assert!(calls > 3, "it makes several calls");
            return;
        }
    }
}

#[tokio::test]
async fn lost_and_repeated_calls_lose_nothing() {
    for seed in 0..20 {
        let kit = Kit::with_changes(60).await;
        let expected = audit(&kit.store).await;
        let plan = FaultPlan::seeded(seed).fails(150).loses(150).repeats(150);
        let faulty = Faulty::new(kit.store.clone(), plan).unwrap();
        let mut tries = 0;
        while let Err(error) = archive(&faulty, &kit.all(20)).await {
            assert!(error.is_transient(), "seed {seed}: {error}");
            kit.lost_nothing(&expected).await;
            tries += 1;
            assert!(tries < 1_000, "seed {seed}");
        }
        kit.assert_complete(&expected).await;
        assert!(audit(&kit.store).await.is_empty(), "seed {seed}");
    }
}

#[tokio::test]
async fn run_continues_after_a_drop_at_any_poll() {
    for polls_max in 0.. {
        let kit = Kit::with_changes(12).await;
        let expected = audit(&kit.store).await;
        let options = kit.all(6);
        let mut left = polls_max;
        let is_done = {
            let mut run = pin!(archive(&kit.store, &options));
            std::future::poll_fn(|context| {
                if left == 0 {
                    return Poll::Ready(false);
                }
                left -= 1;
                run.as_mut().poll(context).map(|answer| answer.is_ok())
            })
            .await
        };
        let done = archive(&kit.store, &options).await.unwrap();
        assert_eq!(done.through, Some(Version::new(12)));
        kit.assert_complete(&expected).await;
        assert!(audit(&kit.store).await.is_empty(), "dropped after {polls_max} polls");
        if is_done {
            assert!(polls_max > 5, "it waits several times");
            return;
        }
    }
}

/// Writes a file with the name that the run is about to use.
#[derive(Debug)]
struct Intruder(PathBuf);

impl Watcher for Intruder {
    fn ended(&self, _: Verb, _: Duration, _: CallEnd<'_>) {
        fs::write(&self.0, b"not ours").expect("the file is written");
    }
}

#[tokio::test]
async fn existing_file_is_not_replaced() {
    let kit = Kit::with_changes(6).await;
    let expected = audit(&kit.store).await;
    let file = kit.folder.join("audit-00000000000000000001-00000000000000000006.jsonl.gz");
    let store = Measured::new(kit.store.clone(), Arc::new(Intruder(file.clone())));
    let error = archive(&store, &kit.all(100)).await.unwrap_err();
    assert!(matches!(&error, ArchiveError::Io { path, .. } if *path == file), "{error:?}");
    assert_eq!(fs::read(&file).unwrap(), b"not ours");
    assert_eq!(audit(&kit.store).await, expected, "nothing is pruned");
    fs::remove_file(&file).unwrap();
    kit.archives(&kit.all(100)).await;
    kit.assert_complete(&expected).await;
}

/// Blocks the only blocking thread after the first store call, until it receives a message.
#[derive(Debug)]
struct Blocker(Mutex<Option<mpsc::Receiver<()>>>);

impl Watcher for Blocker {
    fn ended(&self, _: Verb, _: Duration, _: CallEnd<'_>) {
        if let Some(unblock) = self.0.lock().expect("no test panics while holding it").take() {
            tokio::task::spawn_blocking(move || unblock.recv());
        }
    }
}

async fn folder_stays_locked_until_the_put_ends() {
    let kit = Kit::with_changes(6).await;
    let (expected, options) = (audit(&kit.store).await, kit.all(100));
    let (unblock, blocked) = mpsc::channel();
    let watcher = Arc::new(Blocker(Mutex::new(Some(blocked))));
    let store = Measured::new(kit.store.clone(), Arc::<Blocker>::clone(&watcher));
    {
        let mut run = pin!(archive_once(&store, &options));
        // After the store call, 100 polls are far more than it takes to queue the put.
        let mut polls = 0;
        while polls < 100 {
            polls += u32::from(watcher.0.lock().expect("no test panics while holding it").is_none());
            tokio::select! {
                biased;
                answer = &mut run => panic!("the put is blocked: {answer:?}"),
                () = tokio::task::yield_now() => {}
            }
        }
    }
    assert!(kit.files().is_empty(), "the put waits");
    let lock = fs::File::options().write(true).open(kit.folder.join("archive.lock"));
    let lock = lock.expect("the run created it");
    assert!(lock.try_lock().is_err(), "the run is dropped, its put is not");
    unblock.send(()).expect("the thread is waiting");
    while lock.try_lock().is_err() {
        tokio::task::yield_now().await;
    }
    drop(lock);
    assert_eq!(kit.files(), ["audit-00000000000000000001-00000000000000000006.jsonl.gz"]);
    assert_eq!(kit.archives(&options).await.pruned, 12);
    kit.assert_complete(&expected).await;
}

#[test]
fn dropped_run_keeps_the_lock_until_its_put_ends() {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_all().max_blocking_threads(1).build().unwrap();
    runtime.block_on(folder_stays_locked_until_the_put_ends());
}

#[tokio::test]
async fn staged_files_are_removed_and_others_stay() {
    let kit = Kit::with_changes(6).await;
    let expected = audit(&kit.store).await;
    fs::create_dir(&kit.folder).unwrap();
    fs::write(kit.folder.join("audit-00000000000000000001.jsonl.gz.tmp"), b"\x1f\x8b half").unwrap();
    fs::write(kit.folder.join("audit-00000000000000000009.jsonl.gz.tmp"), b"").unwrap();
    let staged = "audit-00000000000000000001-00000000000000000006.jsonl.gz#1";
    fs::write(kit.folder.join(staged), b"half").unwrap();
    fs::write(kit.folder.join("audit-notes.tmp"), b"mine").unwrap();
    kit.archives(&kit.all(100)).await;
    assert_eq!(kit.files(), ["audit-00000000000000000001-00000000000000000006.jsonl.gz", "audit-notes.tmp"]);
    kit.assert_complete(&expected).await;
}

#[tokio::test]
async fn folder_of_another_store_is_refused() {
    let (kit, longer, shorter) = (Kit::with_changes(6).await, Kit::new(), Kit::with_changes(3).await);
    longer.clock.set(START + Duration::from_secs(60));
    for entries in [1, 2, 3, 1, 2, 3, 1, 2] {
        longer.change(entries).await;
    }
    kit.archives(&kit.all(4)).await;
    let (files, there) = (kit.files(), archived(&kit.folder).await);
    let table = [
        (&longer, "the store's entry of version 1 for `$RESOURCE:r0`"),
        (&shorter, "it has changes up to version 6, and the store is at version 3"),
    ];
    for (other, sentence) in table {
        let before = audit(&other.store).await;
        let options = ArchiveOptions::new(&kit.folder, Stamp::MAX);
        let error = archive(&other.store, &options).await.unwrap_err();
        assert!(matches!(&error, ArchiveError::Foreign { folder, .. } if *folder == kit.folder), "{error:?}");
        assert!(error.to_string().contains(sentence), "{error}");
        assert!(!error.is_transient());
        assert_eq!(audit(&other.store).await, before, "nothing is pruned");
        assert_eq!((kit.files(), archived(&kit.folder).await), (files.clone(), there.clone()));
    }
}

/// A restored store has made other changes with the same versions since.
#[tokio::test]
async fn folder_of_a_restored_store_is_refused() {
    let (before, after) = (Kit::with_changes(6).await, Kit::with_changes(4).await);
    before.archives(&before.all(4)).await;
    after.clock.set(START + Duration::from_secs(60));
    for entries in [2, 3, 1] {
        after.change(entries).await;
    }
    // The common entries are no longer in the store.
    let through = Version::new(4);
    after.store.prune(&Prune::Audit { through }, 100).await.unwrap();
    let options = ArchiveOptions::new(&before.folder, Stamp::MAX);
    let error = archive(&after.store, &options).await.unwrap_err().to_string();
    assert!(error.contains("the store's entry of version 5 for `$RESOURCE:r0`"), "{error}");
    assert_eq!(audit(&after.store).await.len(), 6);
}

#[tokio::test]
async fn concurrent_run_is_locked_out() {
    let kit = Kit::with_changes(30).await;
    let (expected, options) = (audit(&kit.store).await, kit.all(10));
    let (one, other) = tokio::join!(archive_once(&kit.store, &options), archive_once(&kit.store, &options));
    let refused = [&one, &other].into_iter().filter(|answer| answer.is_err()).count();
    assert!(refused <= 1, "{one:?} {other:?}");
    kit.assert_complete(&expected).await;

    let lock = fs::File::options().write(true).open(kit.folder.join("archive.lock")).unwrap();
    lock.lock().unwrap();
    kit.change(1).await;
    let error = archive_once(&kit.store, &options).await.unwrap_err();
    assert!(matches!(&error, ArchiveError::Locked { folder } if *folder == kit.folder), "{error:?}");
    assert!(error.is_transient() && error.to_string().ends_with("is locked by another run"), "{error}");
    assert_eq!(audit(&kit.store).await.len(), 1);
    drop(lock);
    assert_eq!(kit.archives(&options).await.entries, 1);
}

/// Corrupts the bytes of a file.
type Spoil = fn(&mut Vec<u8>);

/// A store whose prune failed after the only file was written.
async fn store_with_failed_prune() -> (Kit, PathBuf) {
    let kit = Kit::with_changes(6).await;
    let faulty = Faulty::new(kit.store.clone(), FaultPlan::seeded(1)).expect("a plan without faults");
    // The run reads the audit, writes the file, and prunes.
    faulty.go_away_after(1);
    let error = archive(&faulty, &kit.all(100)).await.expect_err("the store is unavailable");
    assert!(matches!(&error, ArchiveError::Store(StoreError::Unavailable { .. })), "{error}");
    assert_eq!((archived(&kit.folder).await.len(), audit(&kit.store).await.len()), (12, 12));
    let file = kit.folder.join("audit-00000000000000000001-00000000000000000006.jsonl.gz");
    (kit, file)
}

#[tokio::test]
async fn corrupt_file_is_refused_with_its_path() {
    let spoil: [(&str, Spoil); 6] = [
        ("cut", |bytes| bytes.truncate(bytes.len() - 9)),
        ("cut in half", |bytes| bytes.truncate(bytes.len() / 2)),
        ("emptied", Vec::clear),
        ("changed byte", |bytes| *bytes.last_mut().unwrap() ^= 1),
        ("no gzip", |bytes| *bytes = b"{}\n".to_vec()),
        ("trailing bytes", |bytes| bytes.extend(b"more")),
    ];
    for (how, spoil) in spoil {
        let (kit, file) = store_with_failed_prune().await;
        let mut bytes = fs::read(&file).unwrap();
        spoil(&mut bytes);
        fs::write(&file, bytes).unwrap();
        let error = archive(&kit.store, &kit.all(100)).await.unwrap_err();
        assert!(matches!(&error, ArchiveError::Corrupt { path, .. } if *path == file), "{how}: {error:?}");
        assert!(error.to_string().contains(file.to_str().unwrap()), "{how}: {error}");
        assert_eq!(audit(&kit.store).await.len(), 12, "{how}: nothing is pruned");
        assert!(
            matches!(read(&kit.folder).await, Err(ArchiveError::Corrupt { path, .. }) if path == file),
            "{how}"
        );
    }
}

#[tokio::test]
async fn renamed_file_is_refused() {
    let (kit, file) = store_with_failed_prune().await;
    for name in [
        "audit-00000000000000000001-00000000000000000007.jsonl.gz",
        "audit-00000000000000000002-00000000000000000006.jsonl.gz",
        "audit-old.jsonl.gz",
    ] {
        let renamed = kit.folder.join(name);
        fs::rename(&file, &renamed).unwrap();
        kit.change(1).await;
        let error = archive(&kit.store, &kit.all(100)).await.unwrap_err();
        assert!(matches!(&error, ArchiveError::Corrupt { path, .. } if *path == renamed), "{error:?}");
        fs::rename(&renamed, &file).unwrap();
    }
    let twin = kit.folder.join("audit-00000000000000000006-00000000000000000007.jsonl.gz");
    fs::copy(&file, &twin).unwrap();
    let error = archive(&kit.store, &kit.all(100)).await.unwrap_err();
    assert!(matches!(&error, ArchiveError::Corrupt { path, .. } if *path == twin), "{error:?}");
    fs::remove_file(&twin).unwrap();
    // Nothing was pruned, and the next run succeeds.
    let done = kit.archives(&kit.all(100)).await;
    assert_eq!((done.files, done.entries, done.pruned), (1, 3, 15));
}

#[tokio::test]
async fn invalid_folder_is_refused_with_its_path() {
    let kit = Kit::with_changes(1).await;
    let deep = kit.folder.join("deep");
    let error = archive(&kit.store, &ArchiveOptions::new(&deep, Stamp::MAX)).await.unwrap_err();
    assert!(matches!(&error, ArchiveError::Io { path, .. } if *path == deep), "{error:?}");
    assert!(error.to_string().starts_with("cannot create the folder `"), "{error}");
    fs::write(&kit.folder, b"a file").unwrap();
    let error = archive(&kit.store, &kit.all(1)).await.unwrap_err();
    assert!(matches!(&error, ArchiveError::Io { .. }), "{error:?}");
    for not_a_folder in [&deep, &kit.folder] {
        let error = read(not_a_folder).await.unwrap_err();
        assert!(matches!(&error, ArchiveError::Io { path, .. } if path == not_a_folder), "{error:?}");
    }
    assert_eq!(audit(&kit.store).await.len(), 1);
}
