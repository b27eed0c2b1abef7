//! Repairing the index: it is at another place than the buckets, so that no script writes both.
//!
//! A subject is made known before its first draw. What could still go wrong, a failover that forgot it or a bucket that has
//! gone for good, is put right by looking through all keys and all names: all of them at once by whoever asks for it, and a
//! few at a time by [whoever looks after the store](super::tend).

use ::redis::Value;
use tidegate_core::limit::name::Subject;

use super::Redis;
use super::index::{Prefix, member};
use super::places::Layout;
use crate::error::StoreError;
use crate::tables::subject;

/// Keys that are looked at in one call.
const LOOKED_AT: usize = 1_000;
/// Names that are fetched at a time.
const FETCHED: usize = 200;

/// What a repair did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Repaired {
    /// Subjects that have a bucket or usage and were not known.
    pub added: u64,
    /// Subjects that were known and have neither any more.
    pub removed: u64,
}

/// How far somebody who looks through the keys has come.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Among {
    /// The address of the server that he is at; the first one's where it is empty.
    pub(super) server: String,
    /// Where he goes on there; zero is its beginning.
    pub(super) cursor: u64,
}

impl Redis {
    /// Looks through all keys of the namespace, and makes the index of subjects what they say. Draws go on meanwhile. A store
    /// that is used does so by itself, a little at a time; this is for one that cannot wait.
    ///
    /// # Errors
    /// What the engine says.
    ///
    /// # Cancel safety
    /// What has been repaired by then stays so.
    pub async fn repair(&self) -> Result<Repaired, StoreError> {
        let (mut repaired, mut among) = (Repaired::default(), Some(Among::default()));
        while let Some(from) = among {
            let (added, next) = self.make_some_known(&from).await?;
            repaired.added += added;
            among = next;
        }
        let (prefix, mut last) = (Prefix::of(&["s"]), None::<String>);
        loop {
            let names = self.range(&prefix, last.as_deref(), FETCHED).await?;
            for name in &names {
                let Some((entity, resource)) = name.split_once('\0') else { continue };
                repaired.removed += u64::from(self.forget_if_gone(&subject(entity, resource)?).await?);
            }
            if names.len() < FETCHED {
                return Ok(repaired);
            }
            last = names.last().cloned();
        }
    }

    /// Looks at some keys, and makes known whose they are. Answers how many were not, and where to go on; nowhere when all
    /// keys of all servers were looked at.
    pub(super) async fn make_some_known(&self, from: &Among) -> Result<(u64, Option<Among>), StoreError> {
        let (places, link) = (&self.inner.places, &self.inner.link);
        let address = |server: &Option<(String, u16)>| {
            server.as_ref().map_or_else(String::new, |(host, port)| format!("{host}:{port}"))
        };
        let mut servers = link.servers().await?;
        servers.sort();
        // One that has gone meanwhile is passed over.
        let Some(place) = servers.iter().position(|server| address(server) >= from.server) else {
            return Ok((0, None));
        };
        let server = &servers[place];
        let cursor = if address(server) == from.server { from.cursor } else { 0 };
        let (next, found) = link.scan(server.as_ref(), cursor, &places.pattern(), LOOKED_AT).await?;
        let mut subjects: Vec<_> = found.iter().filter_map(|key| places.subject_in(key)).collect();
        subjects.sort();
        subjects.dedup();
        let added = self.make_known(&subjects).await?;
        let next = match (next, servers.get(place + 1)) {
            (0, None) => None,
            (0, Some(server)) => Some(Among { server: address(server), cursor: 0 }),
            (cursor, _) => Some(Among { server: address(server), cursor }),
        };
        Ok((added, next))
    }

    /// Makes subjects known, and where they are.
    async fn make_known(&self, subjects: &[(String, String, String)]) -> Result<u64, StoreError> {
        let (places, link) = (&self.inner.places, &self.inner.link);
        if subjects.is_empty() {
            return Ok(0);
        }
        if places.layout() == Layout::Trees {
            let mut trees = ::redis::cmd("SADD");
            trees.arg(places.admin("trees"));
            for (home, entity, _) in subjects {
                trees.arg(home);
                let mut live = ::redis::cmd("HSETNX");
                link.query(live.arg(places.admin("homes")).arg(entity).arg(home)).await?;
            }
            link.query(&trees).await?;
        }
        let (mut by_entity, mut by_resource) = (::redis::cmd("ZADD"), ::redis::cmd("ZADD"));
        by_entity.arg(places.admin("index"));
        by_resource.arg(places.admin("index"));
        for (_, entity, resource) in subjects {
            by_entity.arg(0).arg(member(&["s", entity, resource]));
            by_resource.arg(0).arg(member(&["r", resource, entity]));
        }
        let mut added = 0;
        for call in [by_entity, by_resource] {
            match link.query(&call).await? {
                Value::Int(count) => added = count.max(added),
                other => return Err(link.whose().unexpected(&other)),
            }
        }
        Ok(added.unsigned_abs())
    }

    /// Forgets a subject that has neither a bucket nor usage, and answers whether it was one.
    pub(super) async fn forget_if_gone(&self, gone: &Subject) -> Result<bool, StoreError> {
        let (places, link) = (&self.inner.places, &self.inner.link);
        let home = places.home_of(link, &gone.entity).await?;
        let exists = async || {
            let Some(home) = home else { return Ok(false) };
            let mut exists = ::redis::cmd("EXISTS");
            exists.arg(places.bucket(home, gone)).arg(places.usage(home, gone));
            Ok::<_, StoreError>(!matches!(link.query(&exists).await?, Value::Int(0)))
        };
        if exists().await? {
            return Ok(false);
        }
        let (key, entity, resource) = (places.admin("index"), gone.entity.as_str(), gone.resource.as_str());
        let members = [member(&["s", entity, resource]), member(&["r", resource, entity])];
        let mut remove = ::redis::cmd("ZREM");
        link.query(remove.arg(&key).arg(&members)).await?;
        // Drawn meanwhile, it is there by now.
        if exists().await? {
            let mut add = ::redis::cmd("ZADD");
            link.query(add.arg(&key).arg(0).arg(&members[0]).arg(0).arg(&members[1])).await?;
            return Ok(false);
        }
        Ok(true)
    }
}
