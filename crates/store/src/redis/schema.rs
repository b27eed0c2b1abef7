//! Creation and versions of a namespace's schema.
//!
//! Every namespace stores its own version, because no script reaches all of them. Version 2 added a set of
//! all names, so that they can be listed without a scan of the keys. Version 3 keeps ended leases by the
//! moment of their ids, where older programs do not look. Version 4 counts usage by the minute, in fields that
//! older programs cannot read. Opening a namespace does not upgrade it: on a
//! cluster no script reaches all of its keys, and programs of the previous version may be using it.

use ::redis::Value;
use tidegate_core::limit::name::Namespace;

use super::connection::Connection;
use super::keyspace::{Keyspace, Layout};
use super::records::{META, number};
use super::script::{PREPARE, SWAP};
use crate::error::StoreError;
use crate::lifecycle::other_version;

/// The version that this program writes.
pub(super) const CURRENT: u64 = 4;
/// The set of all namespaces.
const ENROLLED: &str = "tidegate:namespaces";
/// The `COUNT` of one `SCAN`.
const SCAN_COUNT: usize = 1_000;
/// How often an upgrade is retried after a concurrent change, or a version that was written differently.
const TRIES: u32 = 5;

/// The schema of an existing namespace.
#[derive(Debug, Clone, Copy)]
pub(super) struct StoredSchema {
    pub(super) version: u64,
    pub(super) layout: Layout,
}

/// Creates a namespace, or checks that this program can use it. Returns its layout and whether it is new.
pub(super) async fn prepare(
    connection: &Connection,
    namespace: &Namespace,
    layout: Layout,
) -> Result<(Layout, bool), StoreError> {
    match find(connection, namespace).await? {
        Some(found) => check_version(connection, namespace, found)?,
        // The name is added to the set first: a listed name without a namespace is skipped, but every
        // namespace must be listed.
        None => enroll(connection, namespace).await?,
    }
    let (key, version) = (key(namespace), CURRENT.to_string());
    let args = [version.as_bytes(), layout.as_str().as_bytes()];
    // Runs for an existing namespace too, so that a read-only server is reported now and not by the first
    // draw.
    let parts = match connection.run(&PREPARE, &[key.as_bytes()], &args).await? {
        Value::Array(parts) => parts,
        other => return Err(connection.context().unexpected(&other)),
    };
    let [version, layout, made] = &parts[..] else {
        return Err(connection.context().unexpected(&Value::Array(parts)));
    };
    let found = read(&key, version, layout)?;
    check_version(connection, namespace, found)?;
    Ok((found.layout, *made == Value::Int(1)))
}

/// Reads the namespace's version and layout; `None` if it does not exist. Changes nothing.
pub(super) async fn find(
    connection: &Connection,
    namespace: &Namespace,
) -> Result<Option<StoredSchema>, StoreError> {
    if let Some(found) = read_schema(connection, namespace).await? {
        return Ok(Some(found));
    }
    let key = key(namespace);
    if connection.query(::redis::cmd("EXISTS").arg(&key)).await? == Value::Int(0) {
        return Ok(None);
    }
    // Another process may have created it between the two calls: a namespace is created with its schema, at
    // once.
    let found = read_schema(connection, namespace).await?;
    let foreign = || {
        let place = &connection.context().place;
        let what = format!("the key `{key}` at `{place}` belongs to another program: it has no schema");
        StoreError::Invalid { what }
    };
    found.map(Some).ok_or_else(foreign)
}

async fn read_schema(
    connection: &Connection,
    namespace: &Namespace,
) -> Result<Option<StoredSchema>, StoreError> {
    let key = key(namespace);
    let mut call = ::redis::cmd("HMGET");
    call.arg(&key).arg("schema").arg("layout");
    match connection.query(&call).await? {
        Value::Array(parts) => match &parts[..] {
            [Value::Nil, Value::Nil] => Ok(None),
            [version, layout] => read(&key, version, layout).map(Some),
            _ => Err(connection.context().unexpected(&Value::Array(parts))),
        },
        other => Err(connection.context().unexpected(&other)),
    }
}

/// Upgrades a namespace to this version. A concurrent upgrade has the same result.
pub(super) async fn upgrade(
    connection: &Connection,
    namespace: &Namespace,
    found: StoredSchema,
) -> Result<(), StoreError> {
    let mut found = found;
    for _ in 0..TRIES {
        if found.version >= CURRENT {
            break;
        }
        // From 1 to 2 the name is added to the set. After that nothing moves, because ended leases are still
        // found at their old keys, and usage in its old fields.
        enroll(connection, namespace).await?;
        let seen = if found.version == 0 { String::new() } else { found.version.to_string() };
        let args = [b"schema", seen.as_bytes(), CURRENT.to_string().as_bytes()].map(<[u8]>::to_vec);
        let args: Vec<&[u8]> = args.iter().map(Vec::as_slice).collect();
        connection.run(&SWAP, &[key(namespace).as_bytes()], &args).await?;
        let gone =
            || StoreError::unavailable(format!("the namespace `{namespace}` was removed during the upgrade"));
        found = find(connection, namespace).await?.ok_or_else(gone)?;
    }
    check_version(connection, namespace, found)
}

/// The listed namespaces, by name.
pub(super) async fn enrolled(connection: &Connection) -> Result<Vec<Namespace>, StoreError> {
    let mut call = ::redis::cmd("SMEMBERS");
    call.arg(ENROLLED);
    let (Value::Array(names) | Value::Set(names)) = connection.query(&call).await? else {
        return Ok(Vec::new());
    };
    let name = |name: &Value| match name {
        Value::BulkString(name) => std::str::from_utf8(name).ok().and_then(|name| Namespace::new(name).ok()),
        _ => None,
    };
    // Foreign members of the set are ignored.
    let mut names: Vec<Namespace> = names.iter().filter_map(name).collect();
    names.sort_unstable();
    Ok(names)
}

/// All namespaces, listed or not: scans the keys of every server.
pub(super) async fn all(connection: &Connection) -> Result<Vec<Namespace>, StoreError> {
    let mut names = enrolled(connection).await?;
    for server in connection.servers().await? {
        let mut cursor = 0;
        loop {
            let pattern = format!("tidegate:{{*}}:{META}");
            let (next, keys) = connection.scan(server.as_ref(), cursor, &pattern, SCAN_COUNT).await?;
            names.extend(keys.iter().filter_map(|key| namespace_in(key)));
            cursor = next;
            if cursor == 0 {
                break;
            }
        }
    }
    names.sort_unstable();
    names.dedup();
    Ok(names)
}

/// Checks that this program can use a namespace.
pub(super) fn check_version(
    connection: &Connection,
    namespace: &Namespace,
    found: StoredSchema,
) -> Result<(), StoreError> {
    if found.version == CURRENT {
        return Ok(());
    }
    let place = format!("the namespace `{namespace}` at `{}`", connection.context().place);
    Err(other_version(&place, found.version, CURRENT))
}

async fn enroll(connection: &Connection, namespace: &Namespace) -> Result<(), StoreError> {
    let mut call = ::redis::cmd("SADD");
    call.arg(ENROLLED).arg(namespace.as_str());
    connection.query(&call).await.map(drop)
}

fn read(key: &str, version: &Value, layout: &Value) -> Result<StoredSchema, StoreError> {
    let layout = match layout {
        Value::BulkString(found) if found == b"one" => Layout::One,
        Value::BulkString(found) if found == b"trees" => Layout::Trees,
        other => return Err(StoreError::Corrupt { what: format!("`{key}` has the layout {other:?}") }),
    };
    Ok(StoredSchema { version: number(version)?, layout })
}

/// The key of a namespace's metadata, which is the same in every layout.
fn key(namespace: &Namespace) -> String {
    Keyspace::new(namespace, Layout::One).admin(META)
}

/// The namespace whose metadata is at this key, if it is such a key.
fn namespace_in(key: &str) -> Option<Namespace> {
    let name = key.strip_prefix("tidegate:{")?.strip_suffix(META)?.strip_suffix("}:")?;
    let name = name.replace("%7D", "}").replace("%7B", "{").replace("%25", "%");
    Namespace::new(&name).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn namespace_parses_only_from_its_own_key() {
        for name in ["default", "a{b}c", "100%7B", "größe 7"] {
            let namespace = Namespace::new(name).unwrap();
            assert_eq!(namespace_in(&key(&namespace)), Some(namespace));
        }
        for other in ["tidegate:{a#07}:meta", "tidegate:{a}:index", "theirs:{a}:meta", "tidegate:{}:meta"] {
            assert_eq!(namespace_in(other), None, "{other}");
        }
    }
}
