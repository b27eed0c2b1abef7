//! Opens a store by its address: `memory:`, `sqlite:limits.db`, `postgres://db.internal/limits`,
//! `redis://localhost`, `dynamodb://limits`.

use std::str::FromStr;
use std::sync::Arc;

use tidegate_core::excerpt::excerpt;

use crate::error::StoreError;
use crate::lifecycle::Lifecycle;
use crate::memory::{Memory, MemoryOptions};
use crate::retention::{OPTIONS, Retention};
use crate::store::Store;
use crate::zae_limiter::ZaeLimiterContents;

/// The longest deadline of an engine, in milliseconds.
#[cfg(any(feature = "sqlite", feature = "redis", feature = "postgres", feature = "dynamodb"))]
const DEADLINE_MAX: u64 = 60_000;

/// Opens the store at an address.
///
/// | address | store |
/// |---|---|
/// | `memory:` | in this process's memory |
/// | `sqlite:limits.db` | a file, which is created if it does not exist (feature `sqlite`); `sqlite:///var/lib/limits.db` too |
/// | `sqlite::memory:` | SQLite in this process's memory |
/// | `postgres://user:password@host:5432/database` | a PostgreSQL server (feature `postgres`); `postgresql://` too |
/// | `redis://[user:password@]host[:port][/db]` | a Redis or Valkey server (feature `redis`) |
/// | `redis+sentinel://host:port[,host:port…]/primary[/db]` | the primary according to the sentinels |
/// | `redis+cluster://host:port[,host:port…]` | a Redis or Valkey cluster |
/// | `rediss://…`, `rediss+sentinel://…`, `rediss+cluster://…` | the same over TLS (feature `redis-tls`) |
/// | `dynamodb://table` | a table of DynamoDB (feature `dynamodb`) |
///
/// Options follow a `?`, separated by `&`:
///
/// | option | of | meaning |
/// |---|---|---|
/// | `namespace=prod` | all | the namespace (`default`) |
/// | `minutely_usage_days=1` | all | days to keep usage by the minute (1) |
/// | `hourly_usage_days=62` | all | days to keep usage by the hour, 1 to 36,500, or `forever` (62) |
/// | `daily_usage_days=800` | all | days to keep usage by the day (800) |
/// | `monthly_usage_days=forever` | all | days to keep usage by the month (forever) |
/// | `audit_days=forever` | all | days to keep audit entries (forever) |
/// | `subjects_max=10000` | memory | the maximum number of subjects with a bucket; further ones are refused (1,048,576) |
/// | `durable=commit` | a file | durable before the reply |
/// | `durable=second` | a file | durable within a second (the default) |
/// | `size_max=1000000000` | a file | the maximum size of the file in bytes |
/// | `deadline_ms=50` | all but memory | the engine counts as unavailable if a call takes longer (50; a file 1,000) |
/// | `timeout_ms=2000` | Redis, DynamoDB | the timeout of a response |
/// | `region=eu-central-1` | DynamoDB | the region of the table, instead of the environment's |
/// | `endpoint=http://localhost:8000` | DynamoDB | another endpoint than the region's own |
/// | `rejections_ms=0` | DynamoDB | how long an insufficient balance is cached to refuse without a request (1,000, the maximum) |
/// | `schema=limits` | a PostgreSQL server | the schema (`tidegate`) |
/// | `connections=16` | a PostgreSQL server | the maximum number of connections (8) |
/// | `sslmode=require` | a PostgreSQL server | over TLS only (feature `postgres-tls`), with certificate verification |
/// | `sslrootcert=PATH` | a PostgreSQL server | a file of certificates to trust besides the system's |
///
/// Further options of a PostgreSQL address are passed to its driver: `connect_timeout` and others.
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
/// [`StoreError::Invalid`] for an invalid address, an unknown option, or a store that this build does not
/// include; and errors of the store itself when it is opened.
#[allow(clippy::unused_async, reason = "without features it opens only a store in memory")]
pub async fn open(url: &str) -> Result<Arc<dyn Store>, StoreError> {
    check_login(url)?;
    let (place, options) = url.split_once('?').unwrap_or((url, ""));
    match place.split_once(':') {
        Some(("memory", "")) => Ok(Arc::new(memory(url, options)?)),
        #[cfg(feature = "sqlite")]
        Some(("sqlite", path)) => Ok(Arc::new(sqlite_options(url, path, options)?.open().await?)),
        #[cfg(feature = "postgres")]
        Some(("postgres" | "postgresql", _)) => match postgres_options(place, options)? {
            (postgres, None) => Ok(Arc::new(postgres.open().await?)),
            #[cfg(feature = "postgres-tls")]
            (postgres, Some(roots)) => Ok(Arc::new(postgres.open_secured(&roots).await?)),
            #[cfg(not(feature = "postgres-tls"))]
            (_, Some(_)) => Err(lacks("sslmode=require", "postgres-tls")),
        },
        #[cfg(feature = "redis")]
        Some((scheme, _)) if is_redis(scheme) => Ok(Arc::new(redis_options(place, options)?.open().await?)),
        #[cfg(feature = "dynamodb")]
        Some(("dynamodb", table)) => {
            // Boxed: the driver's future is large, and would be part of every future that opens a store.
            Ok(Arc::new(Box::pin(dynamodb_options(url, table, options)?.open()).await?))
        }
        _ => Err(not_an_address(url)),
    }
}

/// The [`Lifecycle`] of the store at an address of [`open`]. Makes no request yet.
///
/// # Errors
/// [`StoreError::Invalid`] as [`open`], and for a store that exists only in its process.
pub fn lifecycle_at(url: &str) -> Result<Box<dyn Lifecycle>, StoreError> {
    check_login(url)?;
    let (place, options) = url.split_once('?').unwrap_or((url, ""));
    // Without features, no store has options here.
    let _ = options;
    match place.split_once(':') {
        Some(("memory", "") | ("sqlite", ":memory:")) => Err(invalid(format!(
            "`{}` exists only in its process: there is nothing to init, check or upgrade",
            excerpt(url)
        ))),
        #[cfg(feature = "sqlite")]
        Some(("sqlite", path)) => Ok(Box::new(sqlite_options(url, path, options)?.lifecycle()?)),
        #[cfg(feature = "postgres")]
        Some(("postgres" | "postgresql", _)) => match postgres_options(place, options)? {
            (postgres, None) => Ok(Box::new(postgres.lifecycle()?)),
            #[cfg(feature = "postgres-tls")]
            (postgres, Some(roots)) => Ok(Box::new(postgres.lifecycle_secured(&roots)?)),
            #[cfg(not(feature = "postgres-tls"))]
            (_, Some(_)) => Err(lacks("sslmode=require", "postgres-tls")),
        },
        #[cfg(feature = "redis")]
        Some((scheme, _)) if is_redis(scheme) => Ok(Box::new(redis_options(place, options)?.lifecycle()?)),
        #[cfg(feature = "dynamodb")]
        Some(("dynamodb", table)) => Ok(Box::new(dynamodb_options(url, table, options)?.lifecycle()?)),
        _ => Err(not_an_address(url)),
    }
}

/// Reads the entities and limits of a table of zae-limiter, at an address of DynamoDB whose `namespace` is its
/// namespace. Nothing is written.
///
/// # Errors
/// [`StoreError::Invalid`] for another address, and for a table without this namespace of zae-limiter 0.10 or later.
///
/// # Cancel safety
/// Changes nothing.
#[allow(clippy::unused_async, reason = "without the feature it fails")]
pub async fn read_zae_limiter(url: &str) -> Result<ZaeLimiterContents, StoreError> {
    check_login(url)?;
    if !url.starts_with("dynamodb:") {
        return Err(invalid(format!("`{}` is no address dynamodb://TABLE", excerpt(url))));
    }
    #[cfg(feature = "dynamodb")]
    {
        let (place, options) = url.split_once('?').unwrap_or((url, ""));
        let table = place.trim_start_matches("dynamodb:");
        let namespace = pairs(options, url)?.into_iter().find(|(key, _)| *key == "namespace");
        let namespace = namespace.map_or("default", |(_, name)| name);
        dynamodb_options(url, table, options)?.read_zae_limiter(namespace).await
    }
    #[cfg(not(feature = "dynamodb"))]
    Err(not_an_address(url))
}

fn memory(url: &str, options: &str) -> Result<Memory, StoreError> {
    let (memory, mut namespace) = ((MemoryOptions::new(), MemoryOptions::retention as _), None);
    let memory = read_options(url, options, "namespace, subjects_max", memory, |memory, option| {
        Ok(Some(match option {
            ("namespace", name) => {
                namespace = Some(name);
                memory
            }
            ("subjects_max", value) => memory.subjects_max(number("subjects_max", value, " of subjects")?),
            _ => return Ok(None),
        }))
    })?;
    let store = Memory::with(memory)?;
    namespace.map_or(Ok(store.clone()), |name| store.namespace(name))
}

#[cfg(feature = "sqlite")]
fn sqlite_options(url: &str, place: &str, options: &str) -> Result<crate::sqlite::SqliteOptions, StoreError> {
    use crate::sqlite::{Durability, SqliteOptions};
    // Like a file URL: an empty host, then a path that begins with `/`.
    let path = place.strip_prefix("//").filter(|path| path.starts_with('/')).unwrap_or(place);
    let no_file =
        |form| Err(invalid(format!("`{}` names no file: write sqlite:PATH or {form}", excerpt(url))));
    let (sqlite, known) = match path {
        ":memory:" => (SqliteOptions::memory(), "namespace"),
        "" => return no_file("sqlite::memory:"),
        path if path.starts_with("//") => return no_file("sqlite:///PATH"),
        path => (SqliteOptions::file(path), "namespace, durable, size_max, deadline_ms"),
    };
    read_options(url, options, known, (sqlite, SqliteOptions::retention), |sqlite, option| {
        Ok(Some(match option {
            ("namespace", name) => sqlite.namespace(name),
            _ if path == ":memory:" => return Ok(None),
            ("durable", "commit") => sqlite.durable(Durability::Commit),
            ("durable", "second") => sqlite.durable(Durability::EverySecond),
            ("durable", other) => {
                return Err(invalid(format!("durable is `{}`, expected commit or second", excerpt(other))));
            }
            ("deadline_ms", value) => sqlite.deadline(deadline(value)?),
            ("size_max", value) => sqlite.size_max(number("size_max", value, " of bytes")?),
            _ => return Ok(None),
        }))
    })
}

/// A server, and the additional root certificates if it is reached over TLS.
#[cfg(feature = "postgres")]
type Server = (crate::postgres::PostgresOptions, Option<Vec<u8>>);

#[cfg(feature = "postgres")]
fn postgres_options(place: &str, options: &str) -> Result<Server, StoreError> {
    use crate::postgres::PostgresOptions;
    let (mut is_secured, mut roots) = (false, None);
    let postgres = (PostgresOptions::new(place), PostgresOptions::retention as _);
    // All other options are the driver's.
    let postgres = read_options(&without_login(place), options, "", postgres, |postgres, option| {
        Ok(Some(match option {
            ("namespace", name) => postgres.namespace(name),
            ("schema", name) => postgres.schema(name),
            ("connections", value) => postgres.connections(number("connections", value, "")?),
            ("deadline_ms", value) => postgres.deadline(deadline(value)?),
            ("sslrootcert", path) => {
                roots = Some(path);
                postgres
            }
            (key, value) => {
                is_secured |= option == ("sslmode", "require");
                postgres.driver_option(key, value)
            }
        }))
    })?;
    if !is_secured {
        return Ok((postgres, None));
    }
    let unreadable =
        |path, error| invalid(format!("sslrootcert is `{}`, which cannot be read: {error}", excerpt(path)));
    let read = |path| std::fs::read(path).map_err(|error| unreadable(path, error));
    Ok((postgres, Some(roots.map(read).transpose()?.unwrap_or_default())))
}

/// Whether an address with this scheme is one of Redis.
fn is_redis(scheme: &str) -> bool {
    let scheme = scheme.strip_prefix("rediss").or_else(|| scheme.strip_prefix("redis"));
    matches!(scheme, Some("" | "+sentinel" | "+cluster"))
}

#[cfg(feature = "redis")]
fn redis_options(place: &str, options: &str) -> Result<crate::redis::RedisOptions, StoreError> {
    use crate::redis::RedisOptions;
    let redis = (RedisOptions::new(place), RedisOptions::retention as _);
    let known = "namespace, deadline_ms, timeout_ms";
    read_options(&without_login(place), options, known, redis, |redis, option| {
        Ok(Some(match option {
            ("namespace", name) => redis.namespace(name),
            ("deadline_ms", value) => redis.deadline(deadline(value)?),
            ("timeout_ms", value) => redis.timeout(millis("timeout_ms", value)?),
            _ => return Ok(None),
        }))
    })
}

#[cfg(feature = "dynamodb")]
fn dynamodb_options(
    url: &str,
    place: &str,
    options: &str,
) -> Result<crate::dynamodb::DynamoDbOptions, StoreError> {
    use crate::dynamodb::DynamoDbOptions;
    let Some(table) = place.strip_prefix("//").filter(|table| !table.is_empty() && !table.contains('/'))
    else {
        return Err(invalid(format!("`{}` names no table: write dynamodb://TABLE", excerpt(url))));
    };
    let dynamodb = (DynamoDbOptions::new(table), DynamoDbOptions::retention as _);
    let known = "namespace, region, endpoint, rejections_ms, deadline_ms, timeout_ms";
    read_options(url, options, known, dynamodb, |dynamodb, option| {
        Ok(Some(match option {
            ("namespace", name) => dynamodb.namespace(name),
            ("region", region) => dynamodb.region(region),
            ("endpoint", endpoint) => dynamodb.endpoint(endpoint),
            ("deadline_ms", value) => dynamodb.deadline(deadline(value)?),
            ("timeout_ms", value) => dynamodb.timeout(millis("timeout_ms", value)?),
            ("rejections_ms", value) => dynamodb.rejections(millis("rejections_ms", value)?),
            // Older versions had two layouts.
            ("speculative", _) => dynamodb.ignore_speculative(),
            // And a worker that read the table's stream.
            ("stream_endpoint", _) => dynamodb,
            _ => return Ok(None),
        }))
    })
}

/// Sets the options of an address: the retention, and others with `set`, which returns `None` for an unknown one.
fn read_options<'a, O>(
    url: &str,
    options: &'a str,
    known: &str,
    (mut engine, retain): (O, fn(O, Retention) -> O),
    mut set: impl FnMut(O, (&'a str, &'a str)) -> Result<Option<O>, StoreError>,
) -> Result<O, StoreError> {
    let mut retention = Retention::default();
    for (key, value) in pairs(options, url)? {
        if !retention.set(key, value)? {
            engine = set(engine, (key, value))?.ok_or_else(|| {
                let (url, key) = (excerpt(url), excerpt(key));
                invalid(format!("`{url}` has no option `{key}`; expected {known}, {OPTIONS}"))
            })?;
        }
    }
    Ok(retain(engine, retention))
}

/// The value of `deadline_ms`.
#[cfg(any(feature = "sqlite", feature = "redis", feature = "postgres", feature = "dynamodb"))]
fn deadline(value: &str) -> Result<std::time::Duration, StoreError> {
    let millis = value.parse().ok().filter(|millis| (1..=DEADLINE_MAX).contains(millis));
    let bounds = || format!("deadline_ms is `{}`, outside 1..={DEADLINE_MAX} milliseconds", excerpt(value));
    millis.map(std::time::Duration::from_millis).ok_or_else(|| invalid(bounds()))
}

#[cfg(any(feature = "redis", feature = "dynamodb"))]
fn millis(key: &str, value: &str) -> Result<std::time::Duration, StoreError> {
    number(key, value, " of milliseconds").map(std::time::Duration::from_millis)
}

fn number<T: FromStr>(key: &str, value: &str, unit: &str) -> Result<T, StoreError> {
    let what = || format!("{key} is `{}`, which is not a number{unit}", excerpt(value));
    value.parse().map_err(|_| invalid(what()))
}

fn invalid(what: String) -> StoreError {
    StoreError::Invalid { what }
}

/// The error for an address that needs a missing feature.
fn lacks(what: &str, feature: &str) -> StoreError {
    let what = excerpt(what);
    invalid(format!("`{what}` needs the feature `{feature}`, which this program was built without"))
}

/// Installs a TLS provider, unless the program has installed one.
#[cfg(feature = "redis-tls")]
#[expect(clippy::unnecessary_wraps, reason = "without the feature it fails")]
pub(crate) fn ready_for_tls() -> Result<(), StoreError> {
    // Fails if one is installed already, which is as good.
    drop(rustls::crypto::aws_lc_rs::default_provider().install_default());
    Ok(())
}

/// The error of a build without TLS.
#[cfg(all(feature = "redis", not(feature = "redis-tls")))]
pub(crate) fn ready_for_tls() -> Result<(), StoreError> {
    let what = "TLS needs the feature `redis-tls`, which this program was built without".to_owned();
    Err(StoreError::Invalid { what })
}

/// Rejects a server address whose password contains an unescaped `/` or `?`, before an error message could
/// show the rest of it.
pub(crate) fn check_login(url: &str) -> Result<(), StoreError> {
    let Some((scheme, rest)) = url.split_once("://") else { return Ok(()) };
    let (place, options) = rest.split_once('?').unwrap_or((rest, ""));
    let (authority, path) = place.split_once('/').unwrap_or((place, ""));
    let port = authority.rsplit_once(':').map_or("", |(_, port)| port);
    let is_cut =
        !authority.contains('@') && options.contains('@') && !port.bytes().all(|b| b.is_ascii_digit());
    if scheme != "sqlite" && (path.contains('@') || is_cut) {
        let what = "an address whose user or password has a `/` or a `?`: write them as %2F and %3F";
        return Err(invalid(what.to_owned()));
    }
    Ok(())
}

/// The address without user and password, for messages.
fn without_login(place: &str) -> String {
    match (place.split_once("://"), place.rsplit_once('@')) {
        (Some((scheme, _)), Some((_, hosts))) => format!("{scheme}://{hosts}"),
        _ => place.to_owned(),
    }
}

/// The error for an address of no store, or of one that is not built in.
fn not_an_address(url: &str) -> StoreError {
    let shown = without_login(url);
    match url.split_once(':').map_or("", |(scheme, _)| scheme) {
        "sqlite" => lacks(&shown, "sqlite"),
        "postgres" | "postgresql" => lacks(&shown, "postgres"),
        "dynamodb" => lacks(&shown, "dynamodb"),
        scheme if is_redis(scheme) => lacks(&shown, "redis"),
        _ => invalid(format!(
            "`{}` is not the address of a store: write memory:, sqlite:PATH, postgres://HOST/DATABASE, redis://HOST or dynamodb://TABLE",
            excerpt(&shown)
        )),
    }
}

/// The options of an address, without duplicates.
fn pairs<'a>(options: &'a str, url: &str) -> Result<Vec<(&'a str, &'a str)>, StoreError> {
    let mut pairs: Vec<(&str, &str)> = Vec::new();
    for option in options.split('&').filter(|option| !option.is_empty()) {
        let Some((key, value)) = option.split_once('=') else {
            // It may be the rest of a password.
            let option = if option.contains('@') { "…" } else { option };
            return Err(invalid(format!(
                "the option `{}` of `{}` has no value",
                excerpt(option),
                excerpt(url)
            )));
        };
        if pairs.iter().any(|(other, _)| *other == key) {
            return Err(invalid(format!(
                "the option `{}` of `{}` is given twice",
                excerpt(key),
                excerpt(url)
            )));
        }
        pairs.push((key, value));
    }
    Ok(pairs)
}

#[cfg(all(test, feature = "sqlite", feature = "redis", feature = "postgres", feature = "dynamodb"))]
#[path = "open_tests.rs"]
mod tests;
