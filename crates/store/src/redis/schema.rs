//! How a namespace comes to be, and how far it has come.
//!
//! Every namespace tells its version by itself: there is no one place that a script could change together with all of them. Since
//! version 2 all are enrolled under one key, so that they can be listed without a look at every key. Since version 3 leases that
//! have ended are kept by the moment of their ids, where older programs do not look. An older namespace is not brought up to date when it is opened, but by whoever asks for that: on a cluster no script reaches all of its keys at once,
//! and programs of the version before may be drawing from it.

use ::redis::Value;
use tidegate_core::limit::name::Namespace;

use super::link::Link;
use super::places::{Layout, Places};
use super::records::{META, number};
use super::script::{PREPARE, SWAP};
use crate::error::StoreError;
use crate::lifecycle::other_version;

/// The version that this program writes.
pub(super) const CURRENT: u64 = 3;
/// The names of all namespaces.
const ENROLLED: &str = "tidegate:namespaces";
/// Keys that are looked at in one call.
const LOOKED_AT: usize = 1_000;
/// How often somebody else may be faster, or a version be written as we do not.
const TRIES: u32 = 5;

/// A namespace that is there.
#[derive(Debug, Clone, Copy)]
pub(super) struct Found {
    pub(super) version: u64,
    pub(super) layout: Layout,
}

/// Makes a namespace, or looks whether it is one that this program can use. Answers how it is laid out, and whether it is new.
pub(super) async fn prepare(
    link: &Link,
    namespace: &Namespace,
    layout: Layout,
) -> Result<(Layout, bool), StoreError> {
    match find(link, namespace).await? {
        Some(found) => fits(link, namespace, found)?,
        // First, at its other place: what is enrolled and not there is not listed, and what is there is to be.
        None => enroll(link, namespace).await?,
    }
    let (key, version) = (key(namespace), CURRENT.to_string());
    let args = [version.as_bytes(), layout.as_str().as_bytes()];
    // Even where it is there: a server that only reads is found out now and not by the first draw.
    let parts = match link.run(&PREPARE, &[key.as_bytes()], &args).await? {
        Value::Array(parts) => parts,
        other => return Err(link.whose().unexpected(&other)),
    };
    let [version, layout, made] = &parts[..] else {
        return Err(link.whose().unexpected(&Value::Array(parts)));
    };
    let found = read(&key, version, layout)?;
    fits(link, namespace, found)?;
    Ok((found.layout, *made == Value::Int(1)))
}

/// Reads the namespace's version and layout; `None` if it does not exist. Changes nothing.
pub(super) async fn find(link: &Link, namespace: &Namespace) -> Result<Option<Found>, StoreError> {
    if let Some(found) = look(link, namespace).await? {
        return Ok(Some(found));
    }
    let key = key(namespace);
    if link.query(::redis::cmd("EXISTS").arg(&key)).await? == Value::Int(0) {
        return Ok(None);
    }
    // Another process may have created it between the two calls: a namespace is created with its schema, at once.
    let found = look(link, namespace).await?;
    let foreign = || {
        let place = &link.whose().place;
        let what = format!("the key `{key}` at `{place}` belongs to another program: it has no schema");
        StoreError::Invalid { what }
    };
    found.map(Some).ok_or_else(foreign)
}

async fn look(link: &Link, namespace: &Namespace) -> Result<Option<Found>, StoreError> {
    let key = key(namespace);
    let mut call = ::redis::cmd("HMGET");
    call.arg(&key).arg("schema").arg("layout");
    match link.query(&call).await? {
        Value::Array(parts) => match &parts[..] {
            [Value::Nil, Value::Nil] => Ok(None),
            [version, layout] => read(&key, version, layout).map(Some),
            _ => Err(link.whose().unexpected(&Value::Array(parts))),
        },
        other => Err(link.whose().unexpected(&other)),
    }
}

/// Brings an older namespace to this version. Whoever was faster has done the same.
pub(super) async fn upgrade(link: &Link, namespace: &Namespace, found: Found) -> Result<(), StoreError> {
    let mut found = found;
    for _ in 0..TRIES {
        if found.version >= CURRENT {
            break;
        }
        // From 1 to 2: its name is enrolled. From 2 to 3: nothing moves, since what has ended is still looked for where it was.
        enroll(link, namespace).await?;
        let seen = if found.version == 0 { String::new() } else { found.version.to_string() };
        let args = [b"schema", seen.as_bytes(), CURRENT.to_string().as_bytes()].map(<[u8]>::to_vec);
        let args: Vec<&[u8]> = args.iter().map(Vec::as_slice).collect();
        link.run(&SWAP, &[key(namespace).as_bytes()], &args).await?;
        let gone = || StoreError::unavailable(format!("the namespace `{namespace}` was removed meanwhile"));
        found = find(link, namespace).await?.ok_or_else(gone)?;
    }
    fits(link, namespace, found)
}

/// Namespaces that are enrolled, in the order of their names.
pub(super) async fn enrolled(link: &Link) -> Result<Vec<Namespace>, StoreError> {
    let mut call = ::redis::cmd("SMEMBERS");
    call.arg(ENROLLED);
    let (Value::Array(names) | Value::Set(names)) = link.query(&call).await? else { return Ok(Vec::new()) };
    let name = |name: &Value| match name {
        Value::BulkString(name) => std::str::from_utf8(name).ok().and_then(|name| Namespace::new(name).ok()),
        _ => None,
    };
    // What somebody else has put there is no namespace of ours.
    let mut names: Vec<Namespace> = names.iter().filter_map(name).collect();
    names.sort_unstable();
    Ok(names)
}

/// All namespaces, enrolled or not: looks at every key of every server.
pub(super) async fn all(link: &Link) -> Result<Vec<Namespace>, StoreError> {
    let mut names = enrolled(link).await?;
    for server in link.servers().await? {
        let mut cursor = 0;
        loop {
            let pattern = format!("tidegate:{{*}}:{META}");
            let (next, keys) = link.scan(server.as_ref(), cursor, &pattern, LOOKED_AT).await?;
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

/// Whether this program can use it.
pub(super) fn fits(link: &Link, namespace: &Namespace, found: Found) -> Result<(), StoreError> {
    if found.version == CURRENT {
        return Ok(());
    }
    let place = format!("the namespace `{namespace}` at `{}`", link.whose().place);
    Err(other_version(&place, found.version, CURRENT))
}

async fn enroll(link: &Link, namespace: &Namespace) -> Result<(), StoreError> {
    let mut call = ::redis::cmd("SADD");
    call.arg(ENROLLED).arg(namespace.as_str());
    link.query(&call).await.map(drop)
}

fn read(key: &str, version: &Value, layout: &Value) -> Result<Found, StoreError> {
    let layout = match layout {
        Value::BulkString(found) if found == b"one" => Layout::One,
        Value::BulkString(found) if found == b"trees" => Layout::Trees,
        other => return Err(StoreError::Corrupt { what: format!("`{key}` has the layout {other:?}") }),
    };
    Ok(Found { version: number(version)?, layout })
}

/// Where what is kept of a namespace is: at the same place in every layout.
fn key(namespace: &Namespace) -> String {
    Places::new(namespace, Layout::One).admin(META)
}

/// Whose key this is, if it is one where what is kept of a namespace is.
fn namespace_in(key: &str) -> Option<Namespace> {
    let name = key.strip_prefix("tidegate:{")?.strip_suffix(META)?.strip_suffix("}:")?;
    let name = name.replace("%7D", "}").replace("%7B", "{").replace("%25", "%");
    Namespace::new(&name).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_is_read_from_its_key_and_from_no_other() {
        for name in ["default", "a{b}c", "100%7B", "größe 7"] {
            let namespace = Namespace::new(name).unwrap();
            assert_eq!(namespace_in(&key(&namespace)), Some(namespace));
        }
        for other in ["tidegate:{a#07}:meta", "tidegate:{a}:index", "theirs:{a}:meta", "tidegate:{}:meta"] {
            assert_eq!(namespace_in(other), None, "{other}");
        }
    }
}
