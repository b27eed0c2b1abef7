//! Where the store is when nobody says: a file in the user's data folder.

use std::env;
use std::ffi::OsString;
use std::fs::{DirBuilder, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tidegate::store::open;
use tidegate::{Durable, SqliteOptions, Store, StoreError};
use tidegate_core::limit::name::Namespace;
use tokio::time::timeout;

use crate::failure::Failure;

/// An open store, and its address.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) url: String,
    pub(crate) namespace: Namespace,
}

impl Opened {
    /// Ends it, with everything where it is to last.
    pub(crate) async fn close(self) {
        // One that cannot end by itself ends with the process.
        drop(self.store.close().await);
    }
}

/// When what is written is on the disk, where the address does not say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Writes {
    /// Before it is answered: for a program that ends at once.
    Through,
    /// As the store has it by itself: for one that goes on.
    AsSaid,
}

/// Opens the store at `url`, or the one in the user's data folder, which is made if it is not there. A store that is not open
/// `within` the time that was said is away.
pub(crate) async fn open_store(
    url: Option<String>,
    writes: Writes,
    within: Option<Duration>,
) -> Result<Opened, Failure> {
    let opening = open_at(url, writes);
    let Some(within) = within else { return opening.await };
    let millis = u64::try_from(within.as_millis()).unwrap_or(u64::MAX);
    timeout(within, opening).await.unwrap_or_else(|_| Err(StoreError::TimedOut { millis }.into()))
}

async fn open_at(url: Option<String>, writes: Writes) -> Result<Opened, Failure> {
    if let Some(url) = url {
        let written = if writes == Writes::Through { durable(&url) } else { url.clone() };
        let store = open(&written).await.map_err(|error| refused(error, &url))?;
        let namespace = namespace(&url)?;
        return Ok(Opened { store, url: without_password(&url), namespace });
    }
    let path = default_path(env::var_os("XDG_DATA_HOME"), env::var_os("HOME"))?;
    make_private(&path)?;
    let durable = if writes == Writes::Through { Durable::Commit } else { Durable::Second };
    let file = SqliteOptions::file(&path).durable(durable).open().await?;
    let url = format!("sqlite:{}", path.display());
    Ok(Opened { store: Arc::new(file), url, namespace: namespace("")? })
}

/// The address of the store that is meant: the one that was said, or that of the file in the user's data folder. That file is
/// made only for somebody who `makes` a store.
pub(crate) fn address(said: Option<String>, makes: bool) -> Result<String, Failure> {
    if let Some(url) = said {
        return Ok(url);
    }
    let path = default_path(env::var_os("XDG_DATA_HOME"), env::var_os("HOME"))?;
    if makes {
        make_private(&path)?;
    }
    Ok(format!("sqlite:{}", path.display()))
}

/// An address that is none is the user's to correct; everything else is about the store.
pub(crate) fn refused(error: StoreError, url: &str) -> Failure {
    let schemes = [
        "sqlite:",
        "memory:",
        "postgres:",
        "postgresql:",
        "redis:",
        "rediss:",
        "redis+",
        "rediss+",
        "dynamodb:",
    ];
    let is_address = schemes.iter().any(|scheme| url.starts_with(scheme));
    match error {
        StoreError::Invalid { what } if !is_address => {
            Failure::usage(what).next("correct --store or TIDEGATE_STORE")
        }
        error @ StoreError::Denied { .. } if url.starts_with("dynamodb:") => Failure::from(error).next(
            "see which keys the environment has (AWS_PROFILE, AWS_ACCESS_KEY_ID), and what they may do with the table",
        ),
        error if url.contains("://") && !url.starts_with("sqlite:") => of_server(error),
        error => error.into(),
    }
}

/// What goes wrong with a store in a server, with what helps there.
fn of_server(error: StoreError) -> Failure {
    let next = match &error {
        StoreError::Unavailable { .. } | StoreError::TimedOut { .. } => {
            "see whether the server runs and can be reached, or name another store with --store URL"
        }
        StoreError::Denied { .. } => {
            "see which user and password the address has, what they may do there, and whether the server is the one that is meant"
        }
        StoreError::Corrupt { .. } => "name the right server with --store URL, or bring back a backup",
        _ => return error.into(),
    };
    Failure::from(error).next(next)
}

/// The address as it may be shown: what stands between a user's name and the host is the password.
pub(crate) fn without_password(url: &str) -> String {
    let hidden = || {
        let (scheme, rest) = url.split_once("://")?;
        // A password may hold `@`; what stands behind the `?` may too, and is no host.
        let (place, options) =
            rest.split_once('?').map_or((rest, None), |(place, options)| (place, Some(options)));
        let (login, hosts) = place.rsplit_once('@').unwrap_or(("", place));
        let login = match login.split_once(':') {
            Some((name, _)) => format!("{name}:***@"),
            None if login.is_empty() => String::new(),
            None => format!("{login}@"),
        };
        // The driver of PostgreSQL takes one there too.
        let hide = |option: &str| match option.split_once('=') {
            Some(("password", _)) => "password=***".to_owned(),
            // What has no value may be what is left of a password.
            None if option.contains('@') => "***".to_owned(),
            _ => option.to_owned(),
        };
        let options: Vec<_> = options.into_iter().flat_map(|options| options.split('&')).map(hide).collect();
        let behind = if options.is_empty() { String::new() } else { format!("?{}", options.join("&")) };
        Some(format!("{scheme}://{login}{hosts}{behind}"))
    };
    hidden().unwrap_or_else(|| url.to_owned())
}

/// The namespace that an address says, or the one there is where it says none.
fn namespace(url: &str) -> Result<Namespace, Failure> {
    let options = url.split_once('?').map_or("", |(_, options)| options);
    let said = options.split('&').find_map(|option| option.strip_prefix("namespace="));
    Namespace::new(said.unwrap_or("default")).map_err(|error| Failure::usage(error.to_string()))
}

/// The same address, of a file that is written through.
fn durable(url: &str) -> String {
    let (place, options) = url.split_once('?').unwrap_or((url, ""));
    let is_file = place.starts_with("sqlite:") && place != "sqlite::memory:" && place != "sqlite:";
    if !is_file || options.split('&').any(|option| option.starts_with("durable=")) {
        return url.to_owned();
    }
    let options = if options.is_empty() { String::new() } else { format!("{options}&") };
    format!("{place}?{options}durable=commit")
}

/// `$XDG_DATA_HOME/tidegate/tidegate.db`, and where that is not said `~/.local/share/tidegate/tidegate.db`.
fn default_path(data: Option<OsString>, home: Option<OsString>) -> Result<PathBuf, Failure> {
    // A relative folder is to be ignored, says the specification of these.
    let data = data.map(PathBuf::from).filter(|data| data.is_absolute());
    let home = home.map(PathBuf::from).filter(|home| home.is_absolute());
    let data = data.or_else(|| Some(home?.join(".local").join("share")));
    let data = data.ok_or_else(|| {
        Failure::usage("there is no data folder: neither XDG_DATA_HOME nor HOME names a folder")
            .next("name a store with --store sqlite:PATH or TIDEGATE_STORE")
    })?;
    Ok(data.join("tidegate").join("tidegate.db"))
}

/// Makes the file and its folder, for nobody else to read: hashes of tokens are in it. What is there already is left as it is.
fn make_private(path: &Path) -> Result<(), Failure> {
    let failed = |what: &Path, error: &io::Error| {
        Failure::failed(format!("`{}` cannot be made: {error}", what.display()))
            .next("name another store with --store sqlite:PATH or TIDEGATE_STORE")
    };
    if let Some(folder) = path.parent() {
        let made = DirBuilder::new().recursive(true).mode(0o700).create(folder);
        made.map_err(|error| failed(folder, &error))?;
    }
    // An empty file is an empty store; what SQLite puts beside it has the same mode.
    let file = OpenOptions::new().append(true).create(true).mode(0o600).open(path);
    file.map(drop).map_err(|error| failed(path, &error))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn the_file_in_the_data_folder_is_for_nobody_else_to_read() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("tidegate").join("tidegate.db");
        make_private(&path).unwrap();
        make_private(&path).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(path.parent().unwrap()), mode(&path)), (0o700, 0o600));
    }

    #[test]
    fn an_address_is_shown_without_its_password() {
        let table = [
            ("postgres://me:secret@db/limits?schema=a", "postgres://me:***@db/limits?schema=a"),
            ("postgres://me@db/limits", "postgres://me@db/limits"),
            ("postgres://me@db/x?password=secret&schema=a", "postgres://me@db/x?password=***&schema=a"),
            ("redis://:p@ss@a:1/0", "redis://:***@a:1/0"),
            ("redis+cluster://a:1,b:2?namespace=x@y", "redis+cluster://a:1,b:2?namespace=x@y"),
            ("sqlite:a:b@c.db", "sqlite:a:b@c.db"),
        ];
        for (url, shown) in table {
            assert_eq!(without_password(url), shown);
        }
    }

    #[test]
    fn the_store_is_in_the_data_folder_or_below_home() {
        let path = |data: Option<&str>, home: Option<&str>| {
            default_path(data.map(Into::into), home.map(Into::into)).map(|path| path.display().to_string())
        };
        assert_eq!(path(Some("/data"), Some("/me")).unwrap(), "/data/tidegate/tidegate.db");
        assert_eq!(path(None, Some("/me")).unwrap(), "/me/.local/share/tidegate/tidegate.db");
        assert_eq!(path(Some("relative"), Some("/me")).unwrap(), "/me/.local/share/tidegate/tidegate.db");
        assert!(path(None, Some("")).unwrap_err().what.contains("neither XDG_DATA_HOME nor HOME"));
    }

    #[test]
    fn the_namespace_is_what_the_address_says() {
        for (url, name) in [("sqlite:a.db?durable=commit&namespace=prod", "prod"), ("memory:", "default")] {
            assert_eq!(namespace(url).unwrap().as_str(), name);
        }
    }

    #[test]
    fn what_is_said_to_be_done_is_on_the_disk_unless_the_address_says_otherwise() {
        let table = [
            ("sqlite:a.db", "sqlite:a.db?durable=commit"),
            ("sqlite:a.db?namespace=b", "sqlite:a.db?namespace=b&durable=commit"),
            ("sqlite:a.db?durable=second", "sqlite:a.db?durable=second"),
            ("sqlite::memory:", "sqlite::memory:"),
            ("memory:", "memory:"),
            ("sqlite:", "sqlite:"),
        ];
        for (url, opened) in table {
            assert_eq!(durable(url), opened);
        }
    }
}
