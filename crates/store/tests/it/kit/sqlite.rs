//! A file for a test of the store in a file.

use std::path::PathBuf;
use std::time::Duration;

use tidegate_store::{ManualWall, Sqlite, SqliteOptions};

/// A process that waits longer for the file hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A folder that is removed with it, and the file in it.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) folder: tempfile::TempDir,
    pub(crate) path: PathBuf,
}

impl Place {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder for a test");
        let path = folder.path().join("limits.db");
        Self { folder, path }
    }

    pub(crate) fn options(&self, clock: &ManualWall) -> SqliteOptions {
        SqliteOptions::file(&self.path).clock(clock.clone())
    }

    pub(crate) async fn open(&self, clock: &ManualWall) -> Sqlite {
        self.options(clock).open().await.expect("the file is opened")
    }

    /// Looks into the file from outside, as another program could.
    pub(crate) fn outside(&self) -> rusqlite::Connection {
        rusqlite::Connection::open(&self.path).expect("the file is there")
    }
}
