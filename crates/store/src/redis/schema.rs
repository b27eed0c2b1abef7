//! Creation and versions of a namespace's schema.
//!
//! Every namespace stores its own version, because no script reaches all of them. Version 2 added a set of
//! all names, so that they can be listed without a scan of the keys. Version 3 keeps ended leases by the
//! moment of their ids, where older programs do not look. Version 4 counts usage by the minute, in fields that
//! older programs cannot read. Opening a namespace does not upgrade it: on a
//! cluster no script reaches all of its keys, and programs of the previous version may be using it.

use ::redis::Cmd;
use tidegate_core::limit::name::Namespace;

use super::connection::Connection;
use super::keyspace::{Keyspace, Layout};
use super::records::META;
use super::script::{PREPARE, SWAP};
use crate::error::StoreError;
use crate::lifecycle::other_version;

/// The version that this program writes.
pub(super) const CURRENT: u64 = 4;
/// The set of all namespaces.
const ENROLLED: &str = "tidegate:namespaces";
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
    let key = key(namespace);
    let args = [&CURRENT.to_string(), layout.as_str()];
    // Runs for an existing namespace too, so that a read-only server is reported now and not by the first
    // draw.
    let (version, layout, is_new): (u64, Option<String>, bool) =
        connection.run(&PREPARE, &[&key], &args).await?;
    let found = read(&key, version, layout.as_deref())?;
    check_version(connection, namespace, found)?;
    Ok((found.layout, is_new))
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
    if !connection.query(&Cmd::exists(&key)).await? {
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
    let found = connection.query(&Cmd::hmget(&key, &["schema", "layout"])).await?;
    let (version, layout): (Option<u64>, Option<String>) = found;
    if version.is_none() && layout.is_none() {
        return Ok(None);
    }
    read(&key, version.unwrap_or(0), layout.as_deref()).map(Some)
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
        let args = ["schema", &seen, &CURRENT.to_string()];
        connection.run::<()>(&SWAP, &[key(namespace)], &args).await?;
        let gone =
            || StoreError::unavailable(format!("the namespace `{namespace}` was removed during the upgrade"));
        found = find(connection, namespace).await?.ok_or_else(gone)?;
    }
    check_version(connection, namespace, found)
}

/// The listed namespaces, by name.
pub(super) async fn enrolled(connection: &Connection) -> Result<Vec<Namespace>, StoreError> {
    let names: Vec<Vec<u8>> = connection.query(&Cmd::smembers(ENROLLED)).await?;
    // Foreign members of the set are ignored.
    let name = |name: &Vec<u8>| Namespace::new(std::str::from_utf8(name).ok()?).ok();
    let mut names: Vec<Namespace> = names.iter().filter_map(name).collect();
    names.sort_unstable();
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
    connection.query(&Cmd::sadd(ENROLLED, namespace.as_str())).await
}

fn read(key: &str, version: u64, layout: Option<&str>) -> Result<StoredSchema, StoreError> {
    let layout = match layout {
        Some("one") => Layout::One,
        Some("trees") => Layout::Trees,
        other => return Err(StoreError::Corrupt { what: format!("`{key}` has the layout {other:?}") }),
    };
    Ok(StoredSchema { version, layout })
}

/// The key of a namespace's metadata, which is the same in every layout.
fn key(namespace: &Namespace) -> String {
    Keyspace::new(namespace, Layout::One).admin(META)
}
