//! A store of several handles on one file: each call goes to the next handle. The file is removed on drop.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tidegate_store::wrap::Wrapper;
use tidegate_store::{Sqlite, SqliteOptions};

#[derive(Debug)]
pub(crate) struct RoundRobin {
    handles: Vec<Sqlite>,
    next: AtomicUsize,
    _folder: tempfile::TempDir,
}

impl RoundRobin {
    pub(crate) async fn open(
        count: usize,
        namespace: &str,
        with: impl Fn(SqliteOptions) -> SqliteOptions,
    ) -> Self {
        let folder = tempfile::tempdir().expect("a folder for a test");
        let options = SqliteOptions::file(folder.path().join("limits.db")).namespace(namespace);
        // On a busy machine one handle may hold the lock for long.
        let options = options.deadline(Duration::from_secs(60));
        let mut handles = Vec::new();
        for _ in 0..count {
            handles.push(with(options.clone()).open().await.expect("the file is opened"));
        }
        Self { handles, next: AtomicUsize::new(0), _folder: folder }
    }
}

impl Wrapper for RoundRobin {
    type Inner = Sqlite;

    fn inner(&self) -> &Sqlite {
        &self.handles[self.next.fetch_add(1, Ordering::Relaxed) % self.handles.len()]
    }
}
