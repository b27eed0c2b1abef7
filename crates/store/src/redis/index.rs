//! The index: names in the order of their bytes, found by what they begin with.
//!
//! One sorted set has all of it, its members made of parts with zeros between them, which no name holds and which sort before
//! everything else: `s entity resource` and `r resource entity` for subjects, `e entity` and `c parent entity` for
//! entities, `p kind …` and `x resource entity` for policies, `t token`, `a number` and `f filed number` for the audit.

use ::redis::Value;

use super::Redis;
use crate::error::StoreError;

/// Names that are fetched at a time.
const FETCHED: usize = 1_000;

/// What members of the index begin with.
#[derive(Debug, Clone)]
pub(super) struct Prefix(String);

impl Prefix {
    pub(super) fn of(parts: &[&str]) -> Self {
        Self(parts.iter().flat_map(|part| [*part, "\0"]).collect())
    }
}

/// A member of the index.
pub(super) fn member(parts: &[&str]) -> String {
    parts.join("\0")
}

impl Redis {
    /// Up to `max` of what stands behind a prefix, from the first after `after` on.
    pub(super) async fn range(
        &self,
        prefix: &Prefix,
        after: Option<&str>,
        max: usize,
    ) -> Result<Vec<String>, StoreError> {
        let from = after.map_or_else(|| format!("[{}", prefix.0), |after| format!("({}{after}", prefix.0));
        // Parts end with a zero: with a one there all have been passed.
        let to = format!("({}\u{1}", prefix.0.trim_end_matches('\0'));
        let mut call = ::redis::cmd("ZRANGE");
        call.arg(self.inner.places.admin("index"))
            .arg(from)
            .arg(to)
            .arg("BYLEX")
            .arg("LIMIT")
            .arg(0)
            .arg(max);
        let link = &self.inner.link;
        let Value::Array(found) = link.query(&call).await? else { return Ok(Vec::new()) };
        let name = |found: &Value| match found {
            Value::BulkString(member) => {
                let rest = member.strip_prefix(prefix.0.as_bytes()).unwrap_or(member);
                Ok(String::from_utf8_lossy(rest).into_owned())
            }
            other => Err(link.whose().unexpected(other)),
        };
        found.iter().map(name).collect()
    }

    /// All that stands behind a prefix.
    pub(super) async fn range_all(&self, prefix: &Prefix) -> Result<Vec<String>, StoreError> {
        let mut all: Vec<String> = Vec::new();
        loop {
            let page = self.range(prefix, all.last().map(String::as_str), FETCHED).await?;
            let is_last = page.len() < FETCHED;
            all.extend(page);
            if is_last {
                return Ok(all);
            }
        }
    }
}
