//! Opens the store. The default is a file in the user's data folder.

use std::env;
use std::ffi::OsString;
use std::fs::{DirBuilder, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tidegate::store::{lifecycle, open};
use tidegate::{Durability, SqliteOptions, Store, StoreError};
use tidegate_core::limit::name::Namespace;
use tokio::time::timeout;

use crate::failure::Failure;

/// An open store, and its address.
#[derive(Debug, Clone)]
pub(crate) struct OpenStore {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) url: String,
    pub(crate) namespace: Namespace,
}

impl OpenStore {
    /// Closes the store after flushing its writes.
    pub(crate) async fn close(self) {
        // A store that fails to close is released when the process exits.
        drop(self.store.close().await);
    }
}

/// Durability of writes if the address sets none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WriteMode {
    /// Sync before each response, for a program that exits at once.
    Sync,
    /// The store's own default, for a long-running program.
    StoreDefault,
}

/// Opens the store at `url`, or the one in the user's data folder, which is created if it does not exist. A
/// store that does not open `within` the timeout is unavailable.
pub(crate) async fn open_store(
    url: Option<String>,
    writes: WriteMode,
    within: Option<Duration>,
) -> Result<OpenStore, Failure> {
    let opening = open_at(url, writes);
    let Some(within) = within else { return opening.await };
    let millis = u64::try_from(within.as_millis()).unwrap_or(u64::MAX);
    timeout(within, opening).await.unwrap_or_else(|_| Err(StoreError::TimedOut { millis }.into()))
}

async fn open_at(url: Option<String>, writes: WriteMode) -> Result<OpenStore, Failure> {
    if let Some(url) = url {
        let written = if writes == WriteMode::Sync { durable(&url) } else { url.clone() };
        let store = open(&written).await.map_err(|error| store_failure(error, &url))?;
        let namespace = namespace(&url)?;
        return Ok(OpenStore { store, url: without_password(&url), namespace });
    }
    let path = default_path(env::var_os("XDG_DATA_HOME"), env::var_os("HOME"))?;
    make_private(&path)?;
    let durable = if writes == WriteMode::Sync { Durability::Commit } else { Durability::EverySecond };
    let file = SqliteOptions::file(&path).durable(durable).open().await?;
    let url = format!("sqlite:{}", path.display());
    Ok(OpenStore { store: Arc::new(file), url, namespace: namespace("")? })
}

/// The address of the store: the configured one, or the file in the user's data folder, which is created only
/// if `makes` is set.
pub(crate) fn address(configured: Option<String>, makes: bool) -> Result<String, Failure> {
    if let Some(url) = configured {
        return Ok(url);
    }
    let path = default_path(env::var_os("XDG_DATA_HOME"), env::var_os("HOME"))?;
    if makes {
        make_private(&path)?;
    }
    Ok(format!("sqlite:{}", path.display()))
}

/// An invalid address is a usage error; every other error is about the store.
pub(crate) fn store_failure(error: StoreError, url: &str) -> Failure {
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
        // Not a file or a table of another program or version, but the address: a restart does not help.
        StoreError::Invalid { what } if lifecycle::at(url).is_err() => {
            Failure::usage(what).next("correct the options of --store or TIDEGATE_STORE")
        }
        error @ StoreError::Denied { .. } if url.starts_with("dynamodb:") => Failure::from(error).next(
            "check the credentials in the environment (AWS_PROFILE, AWS_ACCESS_KEY_ID) and their permissions on the table",
        ),
        error if url.contains("://") && !url.starts_with("sqlite:") => server_failure(error),
        error => error.into(),
    }
}

/// An error of a store on a server, with a hint that fits servers.
fn server_failure(error: StoreError) -> Failure {
    let next = match &error {
        StoreError::Unavailable { .. } | StoreError::TimedOut { .. } => {
            "check that the server runs and is reachable, or choose another store with --store URL"
        }
        StoreError::Denied { .. } => {
            "check the user and password in the address, the user's permissions, and that it is the right server"
        }
        StoreError::Corrupt { .. } => "choose the right server with --store URL, or restore a backup",
        _ => return error.into(),
    };
    Failure::from(error).next(next)
}

/// The address without its password, which is between the user name and the host.
pub(crate) fn without_password(url: &str) -> String {
    let redacted = || {
        let (scheme, rest) = url.split_once("://")?;
        // A password may contain `@`, and so may the options after `?`, which contain no host.
        let (base, options) =
            rest.split_once('?').map_or((rest, None), |(base, options)| (base, Some(options)));
        let (login, hosts) = base.rsplit_once('@').unwrap_or(("", base));
        let login = match login.split_once(':') {
            Some((name, _)) => format!("{name}:***@"),
            None if login.is_empty() => String::new(),
            None => format!("{login}@"),
        };
        // The PostgreSQL driver accepts a password as an option, too.
        let hide = |option: &str| match option.split_once('=') {
            Some(("password", _)) => "password=***".to_owned(),
            // An option without a value may be the tail of a password.
            None if option.contains('@') => "***".to_owned(),
            _ => option.to_owned(),
        };
        let options: Vec<_> = options.into_iter().flat_map(|options| options.split('&')).map(hide).collect();
        let behind = if options.is_empty() { String::new() } else { format!("?{}", options.join("&")) };
        Some(format!("{scheme}://{login}{hosts}{behind}"))
    };
    redacted().unwrap_or_else(|| url.to_owned())
}

/// The namespace in the address, or the default one.
fn namespace(url: &str) -> Result<Namespace, Failure> {
    let options = url.split_once('?').map_or("", |(_, options)| options);
    let configured = options.split('&').find_map(|option| option.strip_prefix("namespace="));
    Namespace::new(configured.unwrap_or("default")).map_err(|error| Failure::usage(error.to_string()))
}

/// The address with full durability, if it is a file.
fn durable(url: &str) -> String {
    let (base, options) = url.split_once('?').unwrap_or((url, ""));
    let is_file = base.starts_with("sqlite:") && base != "sqlite::memory:" && base != "sqlite:";
    if !is_file || options.split('&').any(|option| option.starts_with("durable=")) {
        return url.to_owned();
    }
    let options = if options.is_empty() { String::new() } else { format!("{options}&") };
    format!("{base}?{options}durable=commit")
}

/// `$XDG_DATA_HOME/tidegate/tidegate.db`, or `~/.local/share/tidegate/tidegate.db` if that is not set.
fn default_path(data: Option<OsString>, home: Option<OsString>) -> Result<PathBuf, Failure> {
    // The XDG specification requires that relative paths are ignored.
    let data = data.map(PathBuf::from).filter(|data| data.is_absolute());
    let home = home.map(PathBuf::from).filter(|home| home.is_absolute());
    let data = data.or_else(|| Some(home?.join(".local").join("share")));
    let data = data.ok_or_else(|| {
        Failure::usage("there is no data folder: neither XDG_DATA_HOME nor HOME is an absolute path")
            .next("choose a store with --store sqlite:PATH or TIDEGATE_STORE")
    })?;
    Ok(data.join("tidegate").join("tidegate.db"))
}

/// Creates the file and its folder, readable by the owner only, since it stores hashes of tokens. An existing
/// file is left as it is.
fn make_private(path: &Path) -> Result<(), Failure> {
    let failed = |what: &Path, error: &io::Error| {
        Failure::failed(format!("`{}` cannot be created: {error}", what.display()))
            .next("choose another store with --store sqlite:PATH or TIDEGATE_STORE")
    };
    if let Some(folder) = path.parent() {
        let made = DirBuilder::new().recursive(true).mode(0o700).create(folder);
        made.map_err(|error| failed(folder, &error))?;
    }
    // An empty file is a valid empty store, and SQLite gives its side files the same mode.
    let file = OpenOptions::new().append(true).create(true).mode(0o600).open(path);
    file.map(drop).map_err(|error| failed(path, &error))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn store_file_is_private_to_its_owner() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("tidegate").join("tidegate.db");
        make_private(&path).unwrap();
        make_private(&path).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(path.parent().unwrap()), mode(&path)), (0o700, 0o600));
    }

    #[test]
    fn displayed_address_has_no_password() {
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
    fn default_path_is_in_data_folder_or_home() {
        let path = |data: Option<&str>, home: Option<&str>| {
            default_path(data.map(Into::into), home.map(Into::into)).map(|path| path.display().to_string())
        };
        assert_eq!(path(Some("/data"), Some("/me")).unwrap(), "/data/tidegate/tidegate.db");
        assert_eq!(path(None, Some("/me")).unwrap(), "/me/.local/share/tidegate/tidegate.db");
        assert_eq!(path(Some("relative"), Some("/me")).unwrap(), "/me/.local/share/tidegate/tidegate.db");
        assert!(path(None, Some("")).unwrap_err().what.contains("neither XDG_DATA_HOME nor HOME"));
    }

    #[test]
    fn namespace_comes_from_the_address() {
        for (url, name) in [("sqlite:a.db?durable=commit&namespace=prod", "prod"), ("memory:", "default")] {
            assert_eq!(namespace(url).unwrap().as_str(), name);
        }
    }

    #[test]
    fn durability_is_commit_unless_the_address_sets_it() {
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
