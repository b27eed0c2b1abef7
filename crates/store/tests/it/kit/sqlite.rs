//! A store file for a test.

use std::path::PathBuf;
use std::time::Duration;

use tidegate_store::{ManualWall, Sqlite, SqliteOptions};

/// A process that waits longer for the file hangs.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

/// A temporary folder with the path of the file, removed on drop.
#[derive(Debug)]
pub(crate) struct TempFile {
    pub(crate) folder: tempfile::TempDir,
    pub(crate) path: PathBuf,
}

impl TempFile {
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

    /// A direct connection to the file, as another program would have.
    pub(crate) fn outside(&self) -> rusqlite::Connection {
        rusqlite::Connection::open(&self.path).expect("the file exists")
    }

    /// Downgrades the file to an older version of its schema, with the data that the version could hold.
    pub(crate) fn downgrade(&self, version: usize) {
        let undo = [
            "DROP INDEX usage_by_age; DROP INDEX audit_by_age",
            "DROP TABLE tokens",
            "ALTER TABLE subjects DROP COLUMN kept_until; ALTER TABLE clock DROP COLUMN held_until",
            "CREATE TABLE policies (
                 namespace INTEGER NOT NULL, kind INTEGER NOT NULL, entity TEXT NOT NULL, resource TEXT NOT NULL,
                 version INTEGER NOT NULL, body TEXT NOT NULL,
                 PRIMARY KEY (namespace, kind, entity, resource)) STRICT, WITHOUT ROWID;
             CREATE TABLE entities (
                 namespace INTEGER NOT NULL, id TEXT NOT NULL, version INTEGER NOT NULL, parent TEXT,
                 body TEXT NOT NULL, PRIMARY KEY (namespace, id)) STRICT, WITHOUT ROWID;
             CREATE TABLE tokens (
                 namespace INTEGER NOT NULL, id TEXT NOT NULL, hash BLOB NOT NULL, version INTEGER NOT NULL,
                 body TEXT NOT NULL, PRIMARY KEY (namespace, id)) STRICT, WITHOUT ROWID;
             CREATE TABLE audit (
                 namespace INTEGER NOT NULL, number INTEGER NOT NULL, version INTEGER NOT NULL, at INTEGER NOT NULL,
                 actor TEXT NOT NULL, filed TEXT NOT NULL, change TEXT NOT NULL,
                 PRIMARY KEY (namespace, number)) STRICT, WITHOUT ROWID;
             CREATE INDEX audit_by_age ON audit (at);
             INSERT INTO policies SELECT namespace, kind, first, second, version, body FROM records WHERE kind < 4;
             INSERT INTO entities SELECT namespace, first, version, link, body FROM records WHERE kind = 4;
             INSERT INTO tokens SELECT namespace, first, unhex(link), version, body FROM records WHERE kind = 5;
             INSERT INTO audit SELECT namespace, CAST(first AS INTEGER), version, at,
                     substr(rest, 1, instr(rest, char(10)) - 1), link, substr(rest, instr(rest, char(10)) + 1)
                 FROM (SELECT *, substr(body, instr(body, char(10)) + 1) AS rest FROM records WHERE kind = 6);
             DROP TABLE records",
        ];
        let outside = self.outside();
        for undo in undo[version - 1..].iter().rev() {
            outside.execute_batch(undo).expect("the previous version's schema");
        }
        outside.pragma_update(None, "user_version", version.to_string()).expect("the file is ours");
    }
}
