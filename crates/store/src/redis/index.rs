//! The index: names sorted by their bytes, found by prefix.
//!
//! A single sorted set. Its members are parts joined by zero bytes, which no name contains and which sort
//! before all others: `s entity resource` and `r resource entity` for subjects, `e entity` and `c parent
//! entity` for entities, `p kind …` and `x resource entity` for policies, `t token`, `a number` and `f filed
//! number` for the audit.

use tidegate_core::limit::name::Subject;

use super::Redis;
use crate::error::StoreError;
use crate::tables::subject;

/// Names per call.
const PAGE_SIZE: usize = 1_000;

/// A prefix of members.
#[derive(Debug, Clone)]
pub(super) struct Prefix(String);

impl Prefix {
    pub(super) fn of(parts: &[&str]) -> Self {
        Self(parts.iter().flat_map(|part| [*part, "\0"]).collect())
    }
}

/// The subject with this name behind the prefix `s`.
pub(super) fn subject_named(name: &str) -> Result<Subject, StoreError> {
    let (entity, resource) = name.split_once('\0').unwrap_or((name, ""));
    subject(entity, resource)
}

/// A member of the index.
pub(super) fn member(parts: &[&str]) -> String {
    parts.join("\0")
}

impl Redis {
    /// Up to `max` names with a prefix, after `after`.
    pub(super) async fn range(
        &self,
        prefix: &Prefix,
        after: Option<&str>,
        max: usize,
    ) -> Result<Vec<String>, StoreError> {
        let from = after.map_or_else(|| format!("[{}", prefix.0), |after| format!("({}{after}", prefix.0));
        // A part ends with byte 0, so byte 1 in its place is past all members of the prefix.
        let to = format!("({}\u{1}", prefix.0.trim_end_matches('\0'));
        let mut call = ::redis::cmd("ZRANGE");
        call.arg(self.inner.keyspace.admin("index")).arg(from).arg(to);
        call.arg("BYLEX").arg("LIMIT").arg(0).arg(max);
        let found: Vec<Vec<u8>> = self.inner.connection.query(&call).await?;
        let name = |member: &Vec<u8>| {
            let rest = member.strip_prefix(prefix.0.as_bytes()).unwrap_or(member);
            String::from_utf8_lossy(rest).into_owned()
        };
        Ok(found.iter().map(name).collect())
    }

    /// All names with a prefix.
    pub(super) async fn range_all(&self, prefix: &Prefix) -> Result<Vec<String>, StoreError> {
        let mut all: Vec<String> = Vec::new();
        loop {
            let page = self.range(prefix, all.last().map(String::as_str), PAGE_SIZE).await?;
            let is_last = page.len() < PAGE_SIZE;
            all.extend(page);
            if is_last {
                return Ok(all);
            }
        }
    }
}
