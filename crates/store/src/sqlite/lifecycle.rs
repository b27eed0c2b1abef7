//! Administration of a file: init, check, upgrade and list. Checks open it read-only and create nothing
//! beside it.

use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use rusqlite::{Connection, OpenFlags, OptionalExtension};

use super::errors::file_error;
use super::options::{Durability, SqliteOptions, canonical};
use super::records;
use super::schema::{self, CURRENT};
use super::syncer::wal_path;
use super::writer::read_anchor;
use crate::error::StoreError;
use crate::lifecycle::{
    BackupReport, CheckReport, InitPart, InitReport, LISTED_MAX, Lifecycle, NamespaceList, Part, Setting,
    Space, StoreLocation, UpgradePart, UpgradeReport, not_there, other_version,
};
use crate::reply::Reply;

const WANTED: u64 = CURRENT.unsigned_abs();

/// Manages a file.
#[derive(Debug)]
pub(crate) struct SqliteLifecycle(SqliteOptions);

impl SqliteOptions {
    /// The administration of this store.
    pub(crate) fn lifecycle(self) -> Result<SqliteLifecycle, StoreError> {
        self.check()?;
        Ok(SqliteLifecycle(self))
    }
}

impl Lifecycle for SqliteLifecycle {
    fn init(&self) -> Reply<'_, InitReport> {
        self.run_blocking(StoreFile::init)
    }

    fn check(&self) -> Reply<'_, CheckReport> {
        self.run_blocking(StoreFile::check)
    }

    fn upgrade(&self) -> Reply<'_, UpgradeReport> {
        self.run_blocking(StoreFile::upgrade)
    }

    fn list(&self) -> Reply<'_, NamespaceList> {
        self.run_blocking(StoreFile::list)
    }

    fn backup<'a>(&'a self, file: &'a Path) -> Reply<'a, BackupReport> {
        let file = file.to_owned();
        self.run_blocking(move |store| store.backup(file))
    }
}

impl SqliteLifecycle {
    /// Runs `work` on a thread that may block.
    fn run_blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&StoreFile) -> Result<T, StoreError> + Send + 'static,
    ) -> Reply<'_, T> {
        let options = self.0.clone();
        Reply::later(async move {
            let work = move || work(&StoreFile::new(options)?);
            let done = tokio::task::spawn_blocking(work).await;
            done.unwrap_or_else(|error| Err(StoreError::unavailable(format!("a thread: {error}"))))
        })
    }
}

struct StoreFile {
    options: SqliteOptions,
    path: PathBuf,
    /// The path as it was given.
    place: String,
}

impl StoreFile {
    fn new(options: SqliteOptions) -> Result<Self, StoreError> {
        let path = options.path.clone().unwrap_or_default();
        let place = path.display().to_string();
        let denied = |error| StoreError::Denied { what: format!("`{place}` cannot be opened: {error}") };
        Ok(Self { path: canonical(&path).map_err(denied)?, place, options })
    }

    fn whereabouts(&self) -> StoreLocation {
        StoreLocation { engine: "sqlite", place: self.place.clone() }
    }

    fn part(&self) -> Part {
        Part::new("file", &self.place)
    }

    fn namespace(&self) -> Part {
        Part::new("namespace", &self.options.namespace)
    }

    fn store_error(&self) -> impl Fn(rusqlite::Error) -> StoreError {
        |error| file_error(&self.place, &error)
    }

    /// Whether the file exists and is not empty.
    fn exists(&self) -> Result<bool, StoreError> {
        match std::fs::metadata(&self.path) {
            Ok(found) => Ok(found.len() > 0),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => {
                Err(StoreError::Denied { what: format!("`{}` cannot be opened: {error}", self.place) })
            }
        }
    }

    fn init(&self) -> Result<InitReport, StoreError> {
        if self.exists()? {
            let (_, version) = self.open_read_only()?;
            if version != 0 && version != WANTED {
                return Err(other_version(&format!("`{}`", self.place), version, WANTED));
            }
        }
        let mut connection = self.options.connect(Some(&self.path), &self.place)?;
        let from = schema::prepare(&mut connection, &self.place)?;
        let had_namespace =
            has_namespace(&connection, &self.options.namespace).map_err(self.store_error())?;
        records::namespace(&connection, &self.options.namespace).map_err(self.store_error())?;
        let parts = vec![
            InitPart { part: self.part(), is_new: from == 0 },
            InitPart { part: self.namespace(), is_new: !had_namespace },
        ];
        Ok(InitReport { of: self.whereabouts(), parts, schema: WANTED })
    }

    fn check(&self) -> Result<CheckReport, StoreError> {
        let (mut schema, mut missing, mut size) = (None, vec![self.part(), self.namespace()], None);
        let mut clock_offset = None;
        if self.exists()? {
            let (connection, version) = self.open_read_only()?;
            if version > 0 {
                schema = Some(version);
                clock_offset = Some(read_anchor(&connection).map_err(self.store_error())?.offset());
                missing.remove(0);
                if has_namespace(&connection, &self.options.namespace).map_err(self.store_error())? {
                    missing.clear();
                }
            }
            size = std::fs::metadata(&self.path).ok().map(|found| found.len());
        }
        let (durable, durability) = match self.options.durable {
            Durability::Commit => ("commit", "acknowledged writes are on the disk"),
            Durability::EverySecond => (
                "second",
                "acknowledged writes survive the process; if the machine stops, at most the last second is lost",
            ),
        };
        let mut settings = vec![Setting::new("durable", durable)];
        settings.extend(size.map(|bytes| Setting::new("size", bytes.to_string())));
        settings.extend(self.options.size_max.map(|bytes| {
            let is_reached = size.is_some_and(|size| size >= bytes);
            Setting::new("size_max", bytes.to_string()).danger_if(
                is_reached,
                "the file has reached size_max: draws are refused until something is pruned",
            )
        }));
        Ok(CheckReport {
            of: self.whereabouts(),
            server: format!("SQLite {}, built in", rusqlite::version()),
            schema,
            schema_wanted: WANTED,
            namespace: self.options.namespace.clone(),
            missing,
            durability: durability.to_owned(),
            settings,
            clock: None,
            clock_offset,
        })
    }

    fn upgrade(&self) -> Result<UpgradeReport, StoreError> {
        if !self.exists()? || self.open_read_only()?.1 == 0 {
            return Err(not_there(&self.part().to_string()));
        }
        let mut connection = self.options.connect(Some(&self.path), &self.place)?;
        let from = schema::prepare(&mut connection, &self.place)?;
        let parts = vec![UpgradePart { part: self.part(), from }];
        Ok(UpgradeReport { of: self.whereabouts(), parts, schema: WANTED })
    }

    fn list(&self) -> Result<NamespaceList, StoreError> {
        if !self.exists()? {
            return Err(not_there(&self.part().to_string()));
        }
        let (connection, version) = self.open_read_only()?;
        let spaces = if version == 0 {
            Vec::new()
        } else {
            namespaces(&connection, version).map_err(self.store_error())?
        };
        Ok(NamespaceList::cut(self.whereabouts(), WANTED, spaces))
    }

    /// Copies one moment of the file into a new one that only its owner can read: it holds hashes of tokens.
    fn backup(&self, file: PathBuf) -> Result<BackupReport, StoreError> {
        if !self.exists()? {
            return Err(not_there(&self.part().to_string()));
        }
        let place = file.display().to_string();
        let failed = |error: std::io::Error| match error.kind() {
            ErrorKind::AlreadyExists => StoreError::Invalid { what: format!("`{place}` exists already") },
            _ => StoreError::Denied { what: format!("`{place}` cannot be written: {error}") },
        };
        // VACUUM INTO accepts an empty file.
        let made = create_private(&file).map_err(failed)?;
        let copied = self.copy_into(&file).and_then(|()| {
            // SQLite does not sync a copy.
            made.sync_all().map_err(failed)?;
            made.metadata().map_err(failed)
        });
        match copied {
            Ok(metadata) => Ok(BackupReport { of: self.whereabouts(), file, bytes: metadata.len() }),
            Err(error) => {
                // An incomplete copy is of no use.
                let _ = std::fs::remove_file(&file);
                Err(error)
            }
        }
    }

    fn copy_into(&self, file: &Path) -> Result<(), StoreError> {
        // Not read-only: such a connection ignores the log if another process creates it later.
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let connection = Connection::open_with_flags(&self.path, flags).map_err(self.store_error())?;
        connection.busy_timeout(super::options::OPEN_TIMEOUT).map_err(self.store_error())?;
        schema::version(&connection, &self.place).map_err(|error| error.into_error(&self.place))?;
        let Some(file) = file.to_str() else {
            return Err(StoreError::Invalid { what: format!("`{}` is not UTF-8", file.display()) });
        };
        connection.execute("VACUUM INTO ?1", [file]).map_err(self.store_error())?;
        Ok(())
    }

    /// A read-only connection, and the schema version.
    fn open_read_only(&self) -> Result<(Connection, u64), StoreError> {
        let flags =
            OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX | OpenFlags::SQLITE_OPEN_URI;
        // A file that was closed cleanly has no log, and SQLite would create one to read it.
        let has_log = std::fs::metadata(wal_path(&self.path)).is_ok_and(|found| found.len() > 0);
        let connection =
            Connection::open_with_flags(uri(&self.path, has_log), flags).map_err(self.store_error())?;
        connection.busy_timeout(super::options::OPEN_TIMEOUT).map_err(self.store_error())?;
        let version = schema::version(&connection, &self.place);
        let version = version.map_err(|error| error.into_error(&self.place))?;
        Ok((connection, version))
    }
}

/// Creates a file that only its owner can read.
fn create_private(path: &Path) -> std::io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path)
}

/// A path as a URI with SQLite options.
fn uri(path: &Path, has_log: bool) -> String {
    let mut uri = "file:".to_owned();
    for byte in path.as_os_str().as_encoded_bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'/' | b'.' | b'_' | b'-' => {
                uri.push(char::from(*byte));
            }
            byte => drop(write!(uri, "%{byte:02x}")),
        }
    }
    uri + if has_log { "?mode=ro" } else { "?mode=ro&immutable=1" }
}

fn has_namespace(connection: &Connection, name: &str) -> rusqlite::Result<bool> {
    let find = "SELECT 1 FROM namespaces WHERE name = ?1";
    Ok(connection.query_row(find, [name], |_| Ok(())).optional()?.is_some())
}

/// The namespaces, up to one more than are listed.
fn namespaces(connection: &Connection, version: u64) -> rusqlite::Result<Vec<Space>> {
    let (entities, policies) = if version < schema::RECORDS {
        ("entities WHERE true", "policies WHERE true")
    } else {
        ("records WHERE kind = 4", "records WHERE kind < 4")
    };
    let select = format!(
        "SELECT name, version, (SELECT count(*) FROM {entities} AND namespace = namespaces.id),
         (SELECT count(*) FROM {policies} AND namespace = namespaces.id) FROM namespaces ORDER BY name LIMIT ?1"
    );
    let mut statement = connection.prepare(&select)?;
    let number = |row: &rusqlite::Row<'_>, place: usize| {
        row.get::<_, i64>(place).map(|number| Some(number.unsigned_abs()))
    };
    let rows = statement.query_map([i64::from(LISTED_MAX) + 1], |row| {
        Ok(Space {
            within: None,
            namespace: row.get(0)?,
            schema: Some(version),
            changes: number(row, 1)?,
            entities: number(row, 2)?,
            policies: number(row, 3)?,
        })
    })?;
    rows.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_characters_are_escaped_in_uris() {
        assert_eq!(uri(Path::new("/a b/ä?mode=rw#%"), true), "file:/a%20b/%c3%a4%3fmode%3drw%23%25?mode=ro");
    }
}
