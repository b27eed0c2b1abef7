//! A file's life beside its use. Whoever looks opens it to read, and leaves nothing beside it.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use rusqlite::{Connection, OpenFlags, OptionalExtension};

use super::options::{Durable, SqliteOptions, real};
use super::records;
use super::schema::{self, CURRENT};
use super::syncer::log_of;
use super::trouble::of_file;
use super::writer::read_anchor;
use crate::error::StoreError;
use crate::lifecycle::{
    Checked, LISTED_MAX, Lifecycle, Listed, Made, MadePart, Part, Setting, Space, Upgraded, UpgradedPart,
    Whereabouts, not_there, other_version,
};
use crate::reply::Reply;

const WANTED: u64 = CURRENT.unsigned_abs();

/// What an operator does with a file.
#[derive(Debug)]
pub(crate) struct SqliteLifecycle(SqliteOptions);

impl SqliteOptions {
    /// What an operator does with the file.
    pub(crate) fn lifecycle(self) -> Result<SqliteLifecycle, StoreError> {
        self.check()?;
        Ok(SqliteLifecycle(self))
    }
}

impl Lifecycle for SqliteLifecycle {
    fn init(&self) -> Reply<'_, Made> {
        self.apart(File::init)
    }

    fn check(&self) -> Reply<'_, Checked> {
        self.apart(File::check)
    }

    fn upgrade(&self) -> Reply<'_, Upgraded> {
        self.apart(File::upgrade)
    }

    fn list(&self) -> Reply<'_, Listed> {
        self.apart(File::list)
    }
}

impl SqliteLifecycle {
    /// Does it on a thread that may wait for the disk.
    fn apart<T: Send + 'static>(
        &self,
        work: impl FnOnce(&File) -> Result<T, StoreError> + Send + 'static,
    ) -> Reply<'_, T> {
        let options = self.0.clone();
        Reply::later(async move {
            let work = move || work(&File::of(options)?);
            let done = tokio::task::spawn_blocking(work).await;
            done.unwrap_or_else(|error| Err(StoreError::unavailable(format!("a thread: {error}"))))
        })
    }
}

struct File {
    options: SqliteOptions,
    path: PathBuf,
    /// The path as it was said.
    place: String,
}

impl File {
    fn of(options: SqliteOptions) -> Result<Self, StoreError> {
        let said = options.path.clone().unwrap_or_default();
        let place = said.display().to_string();
        let denied = |error| StoreError::Denied { what: format!("`{place}` cannot be opened: {error}") };
        Ok(Self { path: real(&said).map_err(denied)?, place, options })
    }

    fn whereabouts(&self) -> Whereabouts {
        Whereabouts { engine: "sqlite", place: self.place.clone() }
    }

    fn part(&self) -> Part {
        Part::new("file", &self.place)
    }

    fn namespace(&self) -> Part {
        Part::new("namespace", &self.options.namespace)
    }

    fn trouble(&self) -> impl Fn(rusqlite::Error) -> StoreError {
        |error| of_file(&self.place, &error)
    }

    /// Whether there is anything: a file of no length is an empty store.
    fn is_there(&self) -> Result<bool, StoreError> {
        match std::fs::metadata(&self.path) {
            Ok(found) => Ok(found.len() > 0),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
            Err(error) => {
                Err(StoreError::Denied { what: format!("`{}` cannot be opened: {error}", self.place) })
            }
        }
    }

    fn init(&self) -> Result<Made, StoreError> {
        if self.is_there()? {
            let (_, version) = self.look()?;
            if version != 0 && version != WANTED {
                return Err(other_version(&format!("`{}`", self.place), version, WANTED));
            }
        }
        let mut connection = self.options.connect(Some(&self.path), &self.place)?;
        let from = schema::prepare(&mut connection, &self.place)?;
        let has_it = has_namespace(&connection, &self.options.namespace).map_err(self.trouble())?;
        records::namespace(&connection, &self.options.namespace).map_err(self.trouble())?;
        let parts = vec![
            MadePart { part: self.part(), is_new: from == 0 },
            MadePart { part: self.namespace(), is_new: !has_it },
        ];
        Ok(Made { of: self.whereabouts(), parts, schema: WANTED })
    }

    fn check(&self) -> Result<Checked, StoreError> {
        let (mut schema, mut missing, mut size) = (None, vec![self.part(), self.namespace()], None);
        let mut clock_offset = None;
        if self.is_there()? {
            let (connection, version) = self.look()?;
            if version > 0 {
                schema = Some(version);
                clock_offset = Some(read_anchor(&connection).map_err(self.trouble())?.offset());
                missing.remove(0);
                if has_namespace(&connection, &self.options.namespace).map_err(self.trouble())? {
                    missing.clear();
                }
            }
            size = std::fs::metadata(&self.path).ok().map(|found| found.len());
        }
        let (durable, durability) = match self.options.durable {
            Durable::Commit => ("commit", "what was answered is on the disk"),
            Durable::Second => (
                "second",
                "what was answered survives the process; should the machine stop, at most the last second is lost",
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
        Ok(Checked {
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

    fn upgrade(&self) -> Result<Upgraded, StoreError> {
        if !self.is_there()? || self.look()?.1 == 0 {
            return Err(not_there(&self.part().to_string()));
        }
        let mut connection = self.options.connect(Some(&self.path), &self.place)?;
        let from = schema::prepare(&mut connection, &self.place)?;
        let parts = vec![UpgradedPart { part: self.part(), from }];
        Ok(Upgraded { of: self.whereabouts(), parts, schema: WANTED })
    }

    fn list(&self) -> Result<Listed, StoreError> {
        if !self.is_there()? {
            return Err(not_there(&self.part().to_string()));
        }
        let (connection, version) = self.look()?;
        let spaces =
            if version == 0 { Vec::new() } else { spaces(&connection, version).map_err(self.trouble())? };
        Ok(Listed::cut(self.whereabouts(), WANTED, spaces))
    }

    /// A connection that reads, and the version there.
    fn look(&self) -> Result<(Connection, u64), StoreError> {
        let flags =
            OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX | OpenFlags::SQLITE_OPEN_URI;
        // Where nobody has it open, and nobody was stopped while he had, there is no log: SQLite would make one to read.
        let has_log = std::fs::metadata(log_of(&self.path)).is_ok_and(|found| found.len() > 0);
        let connection =
            Connection::open_with_flags(uri(&self.path, has_log), flags).map_err(self.trouble())?;
        connection.busy_timeout(super::options::OPENED_WITHIN).map_err(self.trouble())?;
        let version = schema::version(&connection, &self.place);
        let version = version.map_err(|trouble| trouble.into_error(&self.place))?;
        Ok((connection, version))
    }
}

/// A path as SQLite reads it with options behind it.
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

/// One more of them than are listed, if there are.
fn spaces(connection: &Connection, version: u64) -> rusqlite::Result<Vec<Space>> {
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
    fn a_path_is_written_so_that_nothing_in_it_is_an_option() {
        assert_eq!(uri(Path::new("/a b/ä?mode=rw#%"), true), "file:/a%20b/%c3%a4%3fmode%3drw%23%25?mode=ro");
    }
}
