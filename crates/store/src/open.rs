//! Opens a store by its address: `memory:`, `sqlite:limits.db`, `postgres://db.internal/limits`,
//! `redis://localhost`, `dynamodb://limits`.

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
/// | `minutely_usage_days=1` | all but DynamoDB | days to keep usage by the minute (1) |
/// | `hourly_usage_days=62` | all but DynamoDB | days to keep usage by the hour, 1 to 36,500, or `forever` (62) |
/// | `daily_usage_days=800` | all but DynamoDB | days to keep usage by the day (800) |
/// | `monthly_usage_days=forever` | all but DynamoDB | days to keep usage by the month (forever) |
/// | `audit_days=forever` | all but DynamoDB | days to keep audit entries (forever) |
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
pub async fn open(url: &str) -> Result<Arc<dyn Store>, StoreError> {
    check_login(url)?;
    let (place, options) = url.split_once('?').unwrap_or((url, ""));
    match place.split_once(':') {
        Some(("memory", "")) => Ok(Arc::new(memory(url, options)?)),
        Some(("sqlite", place)) => open_sqlite(url, place, options).await,
        Some(("postgres" | "postgresql", _)) => open_postgres(place, options).await,
        Some((scheme, _)) if is_redis(scheme) => open_redis(place, options).await,
        Some(("dynamodb", place)) => open_dynamodb(url, place, options).await,
        _ => Err(no_address(url)),
    }
}

/// The [`Lifecycle`] of the store at an address of [`open`]. Makes no request yet.
///
/// # Errors
/// [`StoreError::Invalid`] as [`open`], and for a store that exists only in its process.
pub fn lifecycle_at(url: &str) -> Result<Box<dyn Lifecycle>, StoreError> {
    check_login(url)?;
    let (place, options) = url.split_once('?').unwrap_or((url, ""));
    match place.split_once(':') {
        Some(("memory", "") | ("sqlite", ":memory:")) => {
            let what = format!(
                "`{}` exists only in its process: there is nothing to init, check or upgrade",
                excerpt(url)
            );
            Err(StoreError::Invalid { what })
        }
        Some(("sqlite", place)) => sqlite_lifecycle(url, place, options),
        Some(("postgres" | "postgresql", _)) => postgres_lifecycle(place, options),
        Some((scheme, _)) if is_redis(scheme) => redis_lifecycle(place, options),
        Some(("dynamodb", place)) => dynamodb_lifecycle(url, place, options),
        _ => Err(no_address(url)),
    }
}

fn memory(url: &str, options: &str) -> Result<Memory, StoreError> {
    let (mut memory, mut namespace, mut retention) = (MemoryOptions::new(), None, Retention::default());
    for (key, value) in pairs(options, url)? {
        if retention.set(key, value)? {
            continue;
        }
        match key {
            "namespace" => namespace = Some(value),
            "subjects_max" => {
                memory = memory.subjects_max(value.parse().map_err(|_| {
                    let what =
                        format!("subjects_max is `{}`, which is not a number of subjects", excerpt(value));
                    StoreError::Invalid { what }
                })?);
            }
            other => return Err(unknown(url, other, &format!("namespace, subjects_max, {OPTIONS}"))),
        }
    }
    let store = Memory::with(memory.retention(retention))?;
    namespace.map_or(Ok(store.clone()), |name| store.namespace(name))
}

#[cfg(feature = "sqlite")]
async fn open_sqlite(url: &str, place: &str, options: &str) -> Result<Arc<dyn Store>, StoreError> {
    Ok(Arc::new(sqlite_options(url, place, options)?.open().await?))
}

#[cfg(feature = "sqlite")]
fn sqlite_lifecycle(url: &str, place: &str, options: &str) -> Result<Box<dyn Lifecycle>, StoreError> {
    Ok(Box::new(sqlite_options(url, place, options)?.lifecycle()?))
}

#[cfg(feature = "sqlite")]
fn sqlite_options(url: &str, place: &str, options: &str) -> Result<crate::sqlite::SqliteOptions, StoreError> {
    use crate::sqlite::{Durability, SqliteOptions};
    // Like a file URL: an empty host, then a path that begins with `/`.
    let path = place.strip_prefix("//").filter(|path| path.starts_with('/')).unwrap_or(place);
    if path.starts_with("//") {
        let what = format!("`{}` names no file: write sqlite:PATH or sqlite:///PATH", excerpt(url));
        return Err(StoreError::Invalid { what });
    }
    let mut sqlite = match path {
        ":memory:" => SqliteOptions::memory(),
        "" => {
            let what = format!("`{}` names no file: write sqlite:PATH or sqlite::memory:", excerpt(url));
            return Err(StoreError::Invalid { what });
        }
        path => SqliteOptions::file(path),
    };
    let mut retention = Retention::default();
    for (key, value) in pairs(options, url)? {
        if retention.set(key, value)? {
            continue;
        }
        sqlite = match (key, value) {
            ("namespace", name) => sqlite.namespace(name),
            (other, _) if path == ":memory:" => {
                return Err(unknown(url, other, &format!("namespace, {OPTIONS}")));
            }
            ("durable", "commit") => sqlite.durable(Durability::Commit),
            ("durable", "second") => sqlite.durable(Durability::EverySecond),
            ("durable", other) => {
                let what = format!("durable is `{}`, expected commit or second", excerpt(other));
                return Err(StoreError::Invalid { what });
            }
            ("deadline_ms", value) => sqlite.deadline(deadline(value)?),
            ("size_max", bytes) => sqlite.size_max(bytes.parse().map_err(|_| {
                let what = format!("size_max is `{}`, which is not a number of bytes", excerpt(bytes));
                StoreError::Invalid { what }
            })?),
            (other, _) => {
                let known = format!("namespace, durable, size_max, deadline_ms, {OPTIONS}");
                return Err(unknown(url, other, &known));
            }
        };
    }
    Ok(sqlite.retention(retention))
}

/// The value of `deadline_ms`.
#[cfg(any(feature = "sqlite", feature = "redis", feature = "postgres", feature = "dynamodb"))]
fn deadline(value: &str) -> Result<std::time::Duration, StoreError> {
    let millis = value.parse().ok().filter(|millis| (1..=DEADLINE_MAX).contains(millis));
    millis.map(std::time::Duration::from_millis).ok_or_else(|| StoreError::Invalid {
        what: format!("deadline_ms is `{}`, outside 1..={DEADLINE_MAX} milliseconds", excerpt(value)),
    })
}

#[cfg(any(feature = "redis", feature = "dynamodb"))]
fn millis(key: &str, value: &str) -> Result<std::time::Duration, StoreError> {
    let bad = |_| StoreError::Invalid {
        what: format!("{key} is `{}`, which is not a number of milliseconds", excerpt(value)),
    };
    value.parse().map(std::time::Duration::from_millis).map_err(bad)
}

#[cfg(not(feature = "sqlite"))]
fn open_sqlite(url: &str, _: &str, _: &str) -> Opening {
    std::future::ready(Err(lacks(url, "sqlite")))
}

#[cfg(not(feature = "sqlite"))]
fn sqlite_lifecycle(url: &str, _: &str, _: &str) -> Result<Box<dyn Lifecycle>, StoreError> {
    Err(lacks(url, "sqlite"))
}

/// A server, and the additional root certificates if it is reached over TLS.
#[cfg(feature = "postgres")]
type Server = (crate::postgres::PostgresOptions, Option<Vec<u8>>);

#[cfg(feature = "postgres")]
async fn open_postgres(place: &str, options: &str) -> Result<Arc<dyn Store>, StoreError> {
    match postgres_options(place, options)? {
        (postgres, Some(roots)) => secured(postgres, &roots).await,
        (postgres, None) => Ok(Arc::new(postgres.open().await?)),
    }
}

#[cfg(feature = "postgres")]
fn postgres_lifecycle(place: &str, options: &str) -> Result<Box<dyn Lifecycle>, StoreError> {
    match postgres_options(place, options)? {
        (postgres, Some(roots)) => secured_lifecycle(postgres, &roots),
        (postgres, None) => Ok(Box::new(postgres.lifecycle()?)),
    }
}

#[cfg(feature = "postgres")]
fn postgres_options(place: &str, options: &str) -> Result<Server, StoreError> {
    // An error about an option must not reveal the password of the address.
    let without_password = without_login(place);
    let (mut ours, mut theirs, mut roots) = (Vec::new(), Vec::new(), None);
    let mut retention = Retention::default();
    for (key, value) in pairs(options, &without_password)? {
        match key {
            "namespace" | "schema" | "connections" | "deadline_ms" => ours.push((key, value)),
            _ if retention.set(key, value)? => {}
            "sslrootcert" => roots = Some(value),
            _ => theirs.push(format!("{key}={value}")),
        }
    }
    let address = if theirs.is_empty() { place.to_owned() } else { format!("{place}?{}", theirs.join("&")) };
    let mut postgres = crate::postgres::PostgresOptions::new(address).retention(retention);
    for (key, value) in ours {
        postgres = match key {
            "namespace" => postgres.namespace(value),
            "schema" => postgres.schema(value),
            "deadline_ms" => postgres.deadline(deadline(value)?),
            _ => postgres.connections(value.parse().map_err(|_| {
                let what = format!("connections is `{}`, which is not a number", excerpt(value));
                StoreError::Invalid { what }
            })?),
        };
    }
    if !theirs.iter().any(|option| option == "sslmode=require") {
        return Ok((postgres, None));
    }
    let roots = match roots {
        Some(path) => std::fs::read(path).map_err(|error| StoreError::Invalid {
            what: format!("sslrootcert is `{}`, which cannot be read: {error}", excerpt(path)),
        })?,
        None => Vec::new(),
    };
    Ok((postgres, Some(roots)))
}

#[cfg(feature = "postgres-tls")]
async fn secured(
    postgres: crate::postgres::PostgresOptions,
    roots: &[u8],
) -> Result<Arc<dyn Store>, StoreError> {
    Ok(Arc::new(postgres.open_secured(roots).await?))
}

#[cfg(feature = "postgres-tls")]
fn secured_lifecycle(
    postgres: crate::postgres::PostgresOptions,
    roots: &[u8],
) -> Result<Box<dyn Lifecycle>, StoreError> {
    Ok(Box::new(postgres.lifecycle_secured(roots)?))
}

#[cfg(all(feature = "postgres", not(feature = "postgres-tls")))]
fn secured(_: crate::postgres::PostgresOptions, _: &[u8]) -> Opening {
    std::future::ready(Err(lacks("sslmode=require", "postgres-tls")))
}

#[cfg(all(feature = "postgres", not(feature = "postgres-tls")))]
fn secured_lifecycle(
    _: crate::postgres::PostgresOptions,
    _: &[u8],
) -> Result<Box<dyn Lifecycle>, StoreError> {
    Err(lacks("sslmode=require", "postgres-tls"))
}

#[cfg(not(feature = "postgres"))]
fn open_postgres(_: &str, _: &str) -> Opening {
    std::future::ready(Err(lacks("postgres:", "postgres")))
}

#[cfg(not(feature = "postgres"))]
fn postgres_lifecycle(_: &str, _: &str) -> Result<Box<dyn Lifecycle>, StoreError> {
    Err(lacks("postgres:", "postgres"))
}

/// Whether an address with this scheme is one of Redis.
fn is_redis(scheme: &str) -> bool {
    let scheme = scheme.strip_prefix("rediss").or_else(|| scheme.strip_prefix("redis"));
    matches!(scheme, Some("" | "+sentinel" | "+cluster"))
}

#[cfg(feature = "redis")]
async fn open_redis(place: &str, options: &str) -> Result<Arc<dyn Store>, StoreError> {
    Ok(Arc::new(redis_options(place, options)?.open().await?))
}

#[cfg(feature = "redis")]
fn redis_lifecycle(place: &str, options: &str) -> Result<Box<dyn Lifecycle>, StoreError> {
    Ok(Box::new(redis_options(place, options)?.lifecycle()?))
}

#[cfg(feature = "redis")]
fn redis_options(place: &str, options: &str) -> Result<crate::redis::RedisOptions, StoreError> {
    let mut redis = crate::redis::RedisOptions::new(place);
    let place = without_login(place);
    let mut retention = Retention::default();
    for (key, value) in pairs(options, &place)? {
        if retention.set(key, value)? {
            continue;
        }
        redis = match key {
            "namespace" => redis.namespace(value),
            "deadline_ms" => redis.deadline(deadline(value)?),
            "timeout_ms" => redis.timeout(millis(key, value)?),
            other => {
                let known = format!("namespace, deadline_ms, timeout_ms, {OPTIONS}");
                return Err(unknown(&place, other, &known));
            }
        };
    }
    Ok(redis.retention(retention))
}

#[cfg(not(feature = "redis"))]
fn open_redis(place: &str, _: &str) -> Opening {
    std::future::ready(Err(lacks(&without_login(place), "redis")))
}

#[cfg(not(feature = "redis"))]
fn redis_lifecycle(place: &str, _: &str) -> Result<Box<dyn Lifecycle>, StoreError> {
    Err(lacks(&without_login(place), "redis"))
}

#[cfg(feature = "dynamodb")]
async fn open_dynamodb(url: &str, place: &str, options: &str) -> Result<Arc<dyn Store>, StoreError> {
    let dynamodb = dynamodb_options(url, place, options)?;
    // Boxed: the driver's future is large, and would be part of every future that opens a store.
    Ok(Arc::new(Box::pin(dynamodb.open()).await?))
}

#[cfg(feature = "dynamodb")]
fn dynamodb_lifecycle(url: &str, place: &str, options: &str) -> Result<Box<dyn Lifecycle>, StoreError> {
    Ok(Box::new(dynamodb_options(url, place, options)?.lifecycle()?))
}

#[cfg(feature = "dynamodb")]
fn dynamodb_options(
    url: &str,
    place: &str,
    options: &str,
) -> Result<crate::dynamodb::DynamoDbOptions, StoreError> {
    let Some(table) = place.strip_prefix("//").filter(|table| !table.is_empty() && !table.contains('/'))
    else {
        let what = format!("`{}` names no table: write dynamodb://TABLE", excerpt(url));
        return Err(StoreError::Invalid { what });
    };
    let mut dynamodb = crate::dynamodb::DynamoDbOptions::new(table);
    let mut retention = Retention::default();
    for (key, value) in pairs(options, url)? {
        if retention.set(key, value)? {
            continue;
        }
        dynamodb = match (key, value) {
            ("namespace", name) => dynamodb.namespace(name),
            ("region", region) => dynamodb.region(region),
            ("endpoint", endpoint) => dynamodb.endpoint(endpoint),
            ("deadline_ms", _) => dynamodb.deadline(deadline(value)?),
            ("timeout_ms", _) => dynamodb.timeout(millis(key, value)?),
            ("rejections_ms", _) => dynamodb.rejections(millis(key, value)?),
            // Older versions had two layouts.
            ("speculative", _) => dynamodb.ignore_speculative(),
            // And a worker that read the table's stream.
            ("stream_endpoint", _) => dynamodb,
            (other, _) => {
                let known =
                    format!("namespace, region, endpoint, rejections_ms, deadline_ms, timeout_ms, {OPTIONS}");
                return Err(unknown(url, other, &known));
            }
        };
    }
    Ok(dynamodb.retention(retention))
}

#[cfg(not(feature = "dynamodb"))]
fn open_dynamodb(url: &str, _: &str, _: &str) -> Opening {
    std::future::ready(Err(lacks(url, "dynamodb")))
}

/// Reads the entities and limits of a table of zae-limiter, at an address of DynamoDB whose `namespace` is its
/// namespace. Nothing is written.
///
/// # Errors
/// [`StoreError::Invalid`] for another address, and for a table without this namespace of zae-limiter 0.10 or later.
///
/// # Cancel safety
/// Changes nothing.
pub async fn read_zae_limiter(url: &str) -> Result<ZaeLimiterContents, StoreError> {
    check_login(url)?;
    let (place, options) = url.split_once('?').unwrap_or((url, ""));
    match place.split_once(':') {
        Some(("dynamodb", place)) => zae_limiter(url, place, options).await,
        _ => Err(StoreError::Invalid { what: format!("`{}` is no address dynamodb://TABLE", excerpt(url)) }),
    }
}

#[cfg(feature = "dynamodb")]
async fn zae_limiter(url: &str, place: &str, options: &str) -> Result<ZaeLimiterContents, StoreError> {
    let namespace = pairs(options, url)?.into_iter().find(|(key, _)| *key == "namespace");
    let namespace = namespace.map_or("default", |(_, name)| name);
    dynamodb_options(url, place, options)?.read_zae_limiter(namespace).await
}

#[cfg(not(feature = "dynamodb"))]
fn zae_limiter(url: &str, _: &str, _: &str) -> std::future::Ready<Result<ZaeLimiterContents, StoreError>> {
    std::future::ready(Err(lacks(url, "dynamodb")))
}

#[cfg(not(feature = "dynamodb"))]
fn dynamodb_lifecycle(url: &str, _: &str, _: &str) -> Result<Box<dyn Lifecycle>, StoreError> {
    Err(lacks(url, "dynamodb"))
}

/// The result for a store that is not built in, ready at once.
#[cfg(any(
    not(feature = "sqlite"),
    not(feature = "redis"),
    not(feature = "postgres"),
    not(feature = "postgres-tls"),
    not(feature = "dynamodb")
))]
type Opening = std::future::Ready<Result<Arc<dyn Store>, StoreError>>;

/// The error for an address that needs a missing feature.
#[cfg(any(
    not(feature = "sqlite"),
    not(feature = "redis"),
    not(feature = "postgres"),
    not(feature = "postgres-tls"),
    not(feature = "dynamodb")
))]
fn lacks(what: &str, feature: &str) -> StoreError {
    let what = excerpt(what);
    let what = format!("`{what}` needs the feature `{feature}`, which this program was built without");
    StoreError::Invalid { what }
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
        let what =
            "an address whose user or password has a `/` or a `?`: write them as %2F and %3F".to_owned();
        return Err(StoreError::Invalid { what });
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

fn no_address(url: &str) -> StoreError {
    let what = format!(
        "`{}` is not the address of a store: write memory:, sqlite:PATH, postgres://HOST/DATABASE, redis://HOST or dynamodb://TABLE",
        excerpt(&without_login(url))
    );
    StoreError::Invalid { what }
}

/// The options of an address, without duplicates.
fn pairs<'a>(options: &'a str, url: &str) -> Result<Vec<(&'a str, &'a str)>, StoreError> {
    let mut pairs: Vec<(&str, &str)> = Vec::new();
    for option in options.split('&').filter(|option| !option.is_empty()) {
        let Some((key, value)) = option.split_once('=') else {
            // It may be the rest of a password.
            let option = if option.contains('@') { "…" } else { option };
            let what = format!("the option `{}` of `{}` has no value", excerpt(option), excerpt(url));
            return Err(StoreError::Invalid { what });
        };
        if pairs.iter().any(|(other, _)| *other == key) {
            let what = format!("the option `{}` of `{}` is given twice", excerpt(key), excerpt(url));
            return Err(StoreError::Invalid { what });
        }
        pairs.push((key, value));
    }
    Ok(pairs)
}

fn unknown(url: &str, key: &str, known: &str) -> StoreError {
    let what = format!("`{}` has no option `{}`; expected {known}", excerpt(url), excerpt(key));
    StoreError::Invalid { what }
}

#[cfg(all(test, feature = "sqlite", feature = "redis", feature = "postgres", feature = "dynamodb"))]
#[path = "open_tests.rs"]
mod tests;
