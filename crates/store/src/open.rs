//! A store by its address: `memory:`, `sqlite:limits.db`.

use std::sync::Arc;

use crate::error::StoreError;
use crate::memory::Memory;
use crate::store::Store;

/// Opens the store at an address.
///
/// | address | store |
/// |---|---|
/// | `memory:` | in this process, gone with it |
/// | `sqlite:limits.db` | a file, which is made if it is not there (feature `sqlite`); `sqlite:///var/lib/limits.db` too |
/// | `sqlite::memory:` | SQLite in this process's memory |
///
/// Behind a `?` come options, parted by `&`:
///
/// | option | of | meaning |
/// |---|---|---|
/// | `namespace=prod` | all | the namespace; `default` unless said otherwise |
/// | `durable=commit` | a file | on the disk before it is answered |
/// | `durable=second` | a file | on the disk within a second (the default) |
/// | `size_max=1000000000` | a file | it grows to at most so many bytes |
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tidegate_store::StoreError> {
/// let store = tidegate_store::open("memory:?namespace=prod").await?;
/// assert_eq!(store.capabilities().engine, "memory");
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`StoreError::Invalid`] for an address that is none, an option that is not known, and a store that this program was
/// built without; and what the store itself says when it is opened.
pub async fn open(url: &str) -> Result<Arc<dyn Store>, StoreError> {
    let (place, options) = url.split_once('?').unwrap_or((url, ""));
    match place.split_once(':') {
        Some(("memory", "")) => {
            let mut store = Memory::new();
            for (key, value) in pairs(options, url)? {
                match key {
                    "namespace" => store = store.namespace(value)?,
                    other => return Err(unknown(url, other, "namespace")),
                }
            }
            Ok(Arc::new(store))
        }
        Some(("sqlite", place)) => open_sqlite(url, place, options).await,
        _ => {
            let what = format!("`{}` is no address of a store: write memory: or sqlite:PATH", shown(url));
            Err(StoreError::Invalid { what })
        }
    }
}

#[cfg(feature = "sqlite")]
async fn open_sqlite(url: &str, place: &str, options: &str) -> Result<Arc<dyn Store>, StoreError> {
    use crate::sqlite::{Durable, SqliteOptions};
    // As addresses of files are written: an empty host, and then a path that begins with `/`.
    let path = place.strip_prefix("//").filter(|path| path.starts_with('/')).unwrap_or(place);
    if path.starts_with("//") {
        let what = format!("`{}` names no file: write sqlite:PATH or sqlite:///PATH", shown(url));
        return Err(StoreError::Invalid { what });
    }
    let mut sqlite = match path {
        ":memory:" => SqliteOptions::memory(),
        "" => {
            let what = format!("`{}` names no file: write sqlite:PATH or sqlite::memory:", shown(url));
            return Err(StoreError::Invalid { what });
        }
        path => SqliteOptions::file(path),
    };
    for (key, value) in pairs(options, url)? {
        sqlite = match (key, value) {
            ("namespace", name) => sqlite.namespace(name),
            (other, _) if path == ":memory:" => return Err(unknown(url, other, "namespace")),
            ("durable", "commit") => sqlite.durable(Durable::Commit),
            ("durable", "second") => sqlite.durable(Durable::Second),
            ("durable", other) => {
                let what = format!("durable is `{}`, and may be commit or second", shown(other));
                return Err(StoreError::Invalid { what });
            }
            ("size_max", bytes) => sqlite.size_max(bytes.parse().map_err(|_| {
                let what = format!("size_max is `{}`, which is no number of bytes", shown(bytes));
                StoreError::Invalid { what }
            })?),
            (other, _) => return Err(unknown(url, other, "namespace, durable and size_max")),
        };
    }
    Ok(Arc::new(sqlite.open().await?))
}

#[cfg(not(feature = "sqlite"))]
async fn open_sqlite(url: &str, _: &str, _: &str) -> Result<Arc<dyn Store>, StoreError> {
    let what = format!("`{}` needs the feature `sqlite`, which this program was built without", shown(url));
    Err(StoreError::Invalid { what })
}

/// The options of an address, each once.
fn pairs<'a>(options: &'a str, url: &str) -> Result<Vec<(&'a str, &'a str)>, StoreError> {
    let mut pairs: Vec<(&str, &str)> = Vec::new();
    for option in options.split('&').filter(|option| !option.is_empty()) {
        let Some((key, value)) = option.split_once('=') else {
            let what = format!("the option `{}` of `{}` has no value", shown(option), shown(url));
            return Err(StoreError::Invalid { what });
        };
        if pairs.iter().any(|(other, _)| *other == key) {
            let what = format!("the option `{}` of `{}` is there twice", shown(key), shown(url));
            return Err(StoreError::Invalid { what });
        }
        pairs.push((key, value));
    }
    Ok(pairs)
}

fn unknown(url: &str, key: &str, known: &str) -> StoreError {
    let what = format!("`{}` has no option `{}`; it may have {known}", shown(url), shown(key));
    StoreError::Invalid { what }
}

/// Text from outside as it may stand in a message.
fn shown(text: &str) -> String {
    text.chars().take(200).flat_map(char::escape_debug).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(feature = "sqlite")]
    #[tokio::test]
    async fn an_address_of_a_file_says_how_it_is_opened() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("limits.db").display().to_string();
        for url in [
            format!("sqlite:{path}"),
            format!("sqlite://{path}?durable=commit&namespace=prod&size_max=8000000"),
        ] {
            assert_eq!(open(&url).await.unwrap().capabilities().engine, "sqlite");
        }
        assert!(!open("sqlite::memory:?namespace=prod").await.unwrap().capabilities().is_durable);
        let table = [
            ("sqlite:", "`sqlite:` names no file: write sqlite:PATH or sqlite::memory:"),
            ("sqlite://x.db", "`sqlite://x.db` names no file: write sqlite:PATH or sqlite:///PATH"),
            ("sqlite:x.db?durable=never", "durable is `never`, and may be commit or second"),
            ("sqlite:x.db?size_max=-1", "size_max is `-1`, which is no number of bytes"),
            ("sqlite:x.db?size_max=1000", "a size_max of 1000 bytes, less than 1048576"),
            (
                "sqlite:x.db?mode=ro",
                "`sqlite:x.db?mode=ro` has no option `mode`; it may have namespace, durable and size_max",
            ),
            (
                "sqlite::memory:?durable=commit",
                "`sqlite::memory:?durable=commit` has no option `durable`; it may have namespace",
            ),
        ];
        for (url, sentence) in table {
            assert_eq!(open(url).await.unwrap_err().to_string(), sentence);
        }
    }

    #[tokio::test]
    async fn an_address_that_is_none_is_refused_with_what_may_be() {
        let table = [
            ("", "`` is no address of a store: write memory: or sqlite:PATH"),
            ("redis://x", "`redis://x` is no address of a store: write memory: or sqlite:PATH"),
            ("memory:x", "`memory:x` is no address of a store: write memory: or sqlite:PATH"),
            (
                "memory:?durable=commit",
                "`memory:?durable=commit` has no option `durable`; it may have namespace",
            ),
            ("memory:?namespace", "the option `namespace` of `memory:?namespace` has no value"),
            (
                "memory:?namespace=a&namespace=b",
                "the option `namespace` of `memory:?namespace=a&namespace=b` is there twice",
            ),
            ("a\u{1b}b", "`a\\u{1b}b` is no address of a store: write memory: or sqlite:PATH"),
        ];
        for (url, sentence) in table {
            assert_eq!(open(url).await.unwrap_err().to_string(), sentence);
        }
        assert!(open("memory:?namespace=a%23b").await.is_ok(), "nothing is decoded");
        assert!(open("memory:?namespace=a#b").await.is_err(), "no name holds a `#`");
    }
}
