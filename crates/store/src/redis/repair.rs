//! Repairs the index of subjects, which may be on another server than the buckets, so that no script writes
//! both.
//!
//! A subject is registered before its first draw. A failover may still lose that, and buckets expire. The
//! repair compares the index with all keys: at once on request, or in small steps by
//! [housekeeping](super::housekeeping).

use ::redis::Cmd;
use tidegate_core::limit::name::Subject;

use super::Redis;
use super::index::{Prefix, member, subject_named};
use super::keyspace::Layout;
use crate::error::StoreError;

/// The `COUNT` of one `SCAN`.
const SCAN_COUNT: usize = 1_000;
/// Names per call.
const PAGE_SIZE: usize = 200;

/// The result of a repair.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RepairReport {
    /// Subjects with a bucket or usage that were missing from the index.
    pub added: u64,
    /// Subjects in the index that had neither.
    pub removed: u64,
}

/// The position of a scan of all keys.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct ScanPosition {
    /// The address of the server; empty before the first.
    pub(super) server: String,
    /// The cursor on that server; zero at its start.
    pub(super) cursor: u64,
}

impl Redis {
    /// Rebuilds the index of subjects from all keys of the namespace, while draws continue. A store that is
    /// in use does so by itself in small steps; this is for when that is too slow.
    ///
    /// # Errors
    /// The engine's errors.
    ///
    /// # Cancel safety
    /// A repair that is dropped keeps what it has done.
    pub async fn repair(&self) -> Result<RepairReport, StoreError> {
        let (mut repaired, mut position) = (RepairReport::default(), Some(ScanPosition::default()));
        while let Some(from) = position {
            let (added, next) = self.index_some_keys(&from).await?;
            repaired.added += added;
            position = next;
        }
        let (prefix, mut last) = (Prefix::of(&["s"]), None::<String>);
        loop {
            let names = self.range(&prefix, last.as_deref(), PAGE_SIZE).await?;
            for name in &names {
                repaired.removed += u64::from(self.remove_if_unused(&subject_named(name)?).await?);
            }
            if names.len() < PAGE_SIZE {
                return Ok(repaired);
            }
            last = names.last().cloned();
        }
    }

    /// Scans some keys and adds their subjects to the index. Returns how many were missing, and the next
    /// position; `None` at the end of the last server.
    pub(super) async fn index_some_keys(
        &self,
        from: &ScanPosition,
    ) -> Result<(u64, Option<ScanPosition>), StoreError> {
        let (keyspace, connection) = (&self.inner.keyspace, &self.inner.connection);
        let address = |server: &Option<(String, u16)>| {
            server.as_ref().map_or_else(String::new, |(host, port)| format!("{host}:{port}"))
        };
        let mut servers = connection.servers().await?;
        servers.sort();
        // A server that has left the cluster is skipped.
        let Some(place) = servers.iter().position(|server| address(server) >= from.server) else {
            return Ok((0, None));
        };
        let server = &servers[place];
        let cursor = if address(server) == from.server { from.cursor } else { 0 };
        let (next, found) = connection.scan(server.as_ref(), cursor, &keyspace.pattern(), SCAN_COUNT).await?;
        let mut subjects: Vec<_> = found.iter().filter_map(|key| keyspace.subject_in(key)).collect();
        subjects.sort();
        subjects.dedup();
        let added = self.add_to_index(&subjects).await?;
        let next = match (next, servers.get(place + 1)) {
            (0, None) => None,
            (0, Some(server)) => Some(ScanPosition { server: address(server), cursor: 0 }),
            (cursor, _) => Some(ScanPosition { server: address(server), cursor }),
        };
        Ok((added, next))
    }

    /// Adds subjects and their homes to the index.
    async fn add_to_index(&self, subjects: &[(String, String, String)]) -> Result<u64, StoreError> {
        let (keyspace, connection) = (&self.inner.keyspace, &self.inner.connection);
        if subjects.is_empty() {
            return Ok(0);
        }
        if keyspace.layout() == Layout::Trees {
            for (home, entity, _) in subjects {
                connection.query::<()>(&Cmd::hset_nx(keyspace.admin("homes"), entity, home)).await?;
            }
            let homes: Vec<&String> = subjects.iter().map(|(home, ..)| home).collect();
            connection.query::<()>(&Cmd::sadd(keyspace.admin("trees"), homes)).await?;
        }
        let by_entity = subjects.iter().map(|(_, entity, resource)| (0, member(&["s", entity, resource])));
        let by_resource = subjects.iter().map(|(_, entity, resource)| (0, member(&["r", resource, entity])));
        let mut added = 0;
        for members in [by_entity.collect::<Vec<_>>(), by_resource.collect()] {
            let add = Cmd::zadd_multiple(keyspace.admin("index"), &members);
            added = added.max(connection.query(&add).await?);
        }
        Ok(added)
    }

    /// Removes a subject without bucket and usage from the index, and returns whether it did.
    pub(super) async fn remove_if_unused(&self, gone: &Subject) -> Result<bool, StoreError> {
        let (keyspace, connection) = (&self.inner.keyspace, &self.inner.connection);
        let home = keyspace.home_of(connection, &gone.entity).await?;
        let exists = async || {
            let Some(home) = home else { return Ok(false) };
            let keys = [keyspace.bucket(home, gone), keyspace.usage(home, gone)];
            connection.query(&Cmd::exists(&keys)).await
        };
        if exists().await? {
            return Ok(false);
        }
        let (key, entity, resource) = (keyspace.admin("index"), gone.entity.as_str(), gone.resource.as_str());
        let members = [member(&["s", entity, resource]), member(&["r", resource, entity])];
        connection.query::<()>(&Cmd::zrem(&key, &members)).await?;
        // A concurrent draw has created it.
        if exists().await? {
            let members = members.map(|member| (0, member));
            connection.query::<()>(&Cmd::zadd_multiple(&key, &members)).await?;
            return Ok(false);
        }
        Ok(true)
    }
}
