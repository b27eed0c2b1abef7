//! Queries of usage and of the audit. Marks of ended leases are counted before usage is read.

use std::collections::BTreeMap;
use std::time::Duration;

use tidegate_core::limit::lease::REMEMBERED;
use tidegate_core::limit::name::{LimitName, Subject};
use tidegate_core::limit::usage::{Tally, Usage, Window};
use tidegate_core::time::Stamp;

use super::DynamoDb;
use super::bucket_view::{BucketView, number, number_of, text_of};
use super::client::Range;
use super::keys::{DUE_PARTS, GSI1, GSI2, Item, Key, PART, SK, padded, window_word};
use super::lease_marks::EndMark;
use crate::cursor::{UsagePlace, name_of};
use crate::error::StoreError;
use crate::ledger::{UsageOf, UsageQuery};

/// Items of an index per read.
const READ_BATCH: usize = 1_000;
/// Buckets per read.
pub(super) const BUCKET_BATCH: usize = 100;
/// The delays before an incomplete index is read again.
const INDEX_RETRY_DELAYS: [Duration; 3] =
    [Duration::from_millis(20), Duration::from_millis(100), Duration::from_millis(400)];
/// The attribute of the version record with the number of the first audit entry that was not pruned.
pub(super) const PRUNED: &str = "pruned";

impl DynamoDb {
    pub(super) async fn query_usage(
        &self,
        query: &UsageQuery,
        after: Option<UsagePlace<'_>>,
        max: usize,
    ) -> Result<Vec<Usage>, StoreError> {
        if after.is_none() {
            // Usage includes leases that are past their deadline.
            self.sweep_up_to(usize::MAX).await?;
            self.count_all(|subject| match &query.of {
                UsageOf::Entity(entity) => subject.entity == *entity,
                UsageOf::Resource(resource) => subject.resource == *resource,
            })
            .await?;
        }
        let lines = self.usage_from(query, after.as_ref(), max).await?;
        let is_after = |line: &Usage| {
            after.as_ref().is_none_or(|place| {
                let at = (name_of(&query.of, &line.subject), line.limit.as_str(), line.start);
                at > (place.name, place.limit, place.start)
            })
        };
        let mut lines: Vec<Usage> = lines.into_iter().filter(is_after).collect();
        lines.sort_by(|one, other| {
            let key =
                |line: &Usage| (name_of(&query.of, &line.subject).to_owned(), line.limit.clone(), line.start);
            key(one).cmp(&key(other))
        });
        lines.truncate(max);
        Ok(lines)
    }

    /// Counts the items with marks that add to the usage of the queried subjects, at any level.
    pub(super) async fn count_all(&self, is_queried: impl Fn(&Subject) -> bool) -> Result<(), StoreError> {
        for part in 0..DUE_PARTS {
            // An item is due when its ended leases are no longer remembered, or earlier. Clocks may differ.
            let up_to = padded((self.now() + 2 * REMEMBERED).as_micros());
            for keys in self.due_buckets(part, Some(up_to)).await?.chunks(BUCKET_BATCH) {
                for (key, item) in self.inner.client.get_all(keys).await? {
                    let Some(subject) = self.inner.keys.subject(&key) else { continue };
                    let view = match BucketView::read(Some(&item)) {
                        Err(error) if is_queried(&subject) => return Err(error),
                        // Its own usage cannot be read either.
                        Err(_) => continue,
                        Ok(view) => view,
                    };
                    let adds = |mark: &EndMark| {
                        is_queried(&subject) || mark.others.iter().any(|(subject, _)| is_queried(subject))
                    };
                    if view.ended.values().any(adds) {
                        self.count_item(&subject).await?;
                    }
                }
            }
        }
        Ok(())
    }

    /// The keys of the buckets with marks in a part of the index of due items, up to a time.
    pub(super) async fn due_buckets(&self, part: u64, up_to: Option<String>) -> Result<Vec<Key>, StoreError> {
        let range = Range { up_to, ..Range::new(Some(GSI1), self.inner.keys.due(part), String::new()) };
        let found = self.inner.client.range(&range, usize::MAX).await?;
        let is_bucket = |key: &Key| self.inner.keys.subject(key).is_some();
        Ok(found.iter().filter_map(Key::of).filter(is_bucket).collect())
    }

    /// More than `max` lines, from a name on, with all lines of each name.
    async fn usage_from(
        &self,
        query: &UsageQuery,
        after: Option<&UsagePlace<'_>>,
        max: usize,
    ) -> Result<Vec<Usage>, StoreError> {
        let keys = &self.inner.keys;
        let (index, order, pk, prefix, end) = match &query.of {
            UsageOf::Entity(entity) => (None, SK, keys.entity_pk(entity), "#USAGE#".to_owned(), '#'),
            UsageOf::Resource(resource) => {
                let prefix = format!("USAGE#{}#", window_word(query.window));
                (Some(GSI2), "GSI2SK", keys.resource(resource), prefix, PART)
            }
        };
        let name_in = |item: &Item| -> Option<String> {
            Some(item.get(order)?.as_s().ok()?.strip_prefix(&prefix)?.split(end).next()?.to_owned())
        };
        let mut from = after.map(|place| format!("{prefix}{}", place.name));
        let (mut lines, mut at_once) = (Vec::new(), READ_BATCH);
        loop {
            let range = Range::new(index, pk.clone(), prefix.clone()).after(from.clone());
            let mut found = self.inner.client.range(&range, at_once).await?;
            let is_last = found.len() < at_once;
            let last = found.last().and_then(name_in);
            if !is_last && found.first().and_then(name_in) == last {
                // One name has more windows than that, and all are needed for sorting.
                at_once *= 2;
                continue;
            }
            if !is_last {
                found.retain(|item| name_in(item) != last);
                from = last.map(|name| format!("{prefix}{name}"));
            }
            if index.is_some() {
                let keys: Vec<Key> = found.iter().filter_map(Key::of).collect();
                found = self.inner.client.get_all(&keys).await?.into_values().collect();
            }
            for item in &found {
                lines.extend(self.lines(item, query)?);
            }
            let names = || lines.iter().map(|line| name_of(&query.of, &line.subject));
            // The order of the keys is that of the names, except for letters below the end of a name.
            let is_ordered = names().all(|name| name.chars().all(|letter| letter > end));
            let count = names().filter(|name| after.is_none_or(|place| *name > place.name)).count();
            if is_last || (is_ordered && count > max) {
                return Ok(lines);
            }
        }
    }

    /// The lines of an item of usage that match the query.
    fn lines(&self, item: &Item, query: &UsageQuery) -> Result<Vec<Usage>, StoreError> {
        let start = Stamp::from_micros(number_of(item, "start")?);
        let Some((subject, window)) = self.usage_of(item) else { return Ok(Vec::new()) };
        if window != query.window || !query.range.contains(&start) {
            return Ok(Vec::new());
        }
        let line = |(limit, tally)| Usage { subject: subject.clone(), limit, window, start, tally };
        Ok(tallies(item)?.into_iter().map(line).collect())
    }

    /// The subject and window of an item of usage.
    pub(super) fn usage_of(&self, item: &Item) -> Option<(Subject, Window)> {
        let Key { pk, sk } = Key::of(item)?;
        let entity = self.inner.keys.own(&pk)?.strip_prefix("ENTITY#")?;
        let mut parts = sk.strip_prefix("#USAGE#")?.split('#');
        let subject = Subject::stored(entity, parts.next()?).ok()?;
        let word = parts.next()?;
        Some((subject, Window::ALL.into_iter().find(|window| window_word(*window) == word)?))
    }

    /// Audit entries after a number, in order.
    pub(super) async fn entries(
        &self,
        filed: Option<&str>,
        after: Option<u64>,
        max: usize,
    ) -> Result<EntryPage, StoreError> {
        let keys = &self.inner.keys;
        if let Some(filed) = filed {
            let after = after.map(|number| format!("#AUDIT#{}", padded(number)));
            let range = Range::new(None, keys.audit_pk(filed), "#AUDIT#".to_owned()).after(after);
            let items = self.inner.client.range(&range, max).await?;
            let last = items.last().filter(|_| items.len() >= max);
            let next = last.map(|item| number_of(item, "number")).transpose()?;
            return Ok(EntryPage { items, next });
        }
        let mut pauses = INDEX_RETRY_DELAYS.into_iter();
        loop {
            let span = self.span_of_audit().await?;
            let range = Range::new(Some(GSI2), keys.all("AUDITS"), String::new()).after(after.map(padded));
            let found = self.inner.client.range(&range, max).await?;
            let numbers: Vec<u64> = found.iter().filter_map(audit_number).collect();
            let coverage = index_coverage(&numbers, after, span);
            let is_full = found.len() >= max;
            // A full page is complete, whatever follows it.
            let is_answer = coverage == IndexCoverage::All || (is_full && coverage == IndexCoverage::UpTo);
            if !is_answer && let Some(pause) = pauses.next() {
                tokio::time::sleep(pause).await;
                continue;
            }
            if let IndexCoverage::Without(number) = coverage {
                let what = format!("the index does not show entry {number} of the audit yet");
                return Err(StoreError::unavailable(what));
            }
            let keys: Vec<Key> = found.iter().filter_map(Key::of).collect();
            let mut stored = self.inner.client.get_all(&keys).await?;
            let mut items: Vec<Item> = keys.iter().filter_map(|key| stored.remove(key)).collect();
            let next = numbers.last().copied().filter(|_| is_full);
            if next.is_none() && matches!(coverage, IndexCoverage::UpTo) {
                // The index may not show the rest of the last change yet: a change is listed as a whole or
                // not at all.
                let last = items.last().map(|item| number_of::<u64>(item, "version")).transpose()?;
                let is_before = |item: &Item| number_of::<u64>(item, "version").ok() < last;
                items.retain(is_before);
            }
            return Ok(EntryPage { items, next });
        }
    }

    /// The numbers of the first entry that was not pruned, if known, and of the next new entry.
    async fn span_of_audit(&self) -> Result<(Option<u64>, u64), StoreError> {
        let Some(item) = self.inner.client.get(&self.inner.keys.version()).await? else {
            return Ok((None, 0));
        };
        let first = item.contains_key(PRUNED).then(|| number_of(&item, PRUNED)).transpose()?;
        Ok((first, number_of(&item, "audited")?))
    }
}

/// A page of audit entries, and the number to continue after, if there may be more.
pub(super) struct EntryPage {
    pub(super) items: Vec<Item>,
    pub(super) next: Option<u64>,
}

/// How much of consecutive entries an index shows.
#[derive(Debug, PartialEq, Eq)]
enum IndexCoverage {
    All,
    /// All up to the last one that it shows.
    UpTo,
    /// A later entry but not this one.
    Without(u64),
}

/// Whether the index shows all entries after a number, given the first that was not pruned and the next new
/// one.
fn index_coverage(numbers: &[u64], after: Option<u64>, (first, next): (Option<u64>, u64)) -> IndexCoverage {
    // Without the first number, the first that the index shows is taken for it.
    let first = first.or_else(|| numbers.first().copied().filter(|_| after.is_none())).unwrap_or(0);
    let mut expected = after.map_or(first, |after| first.max(after + 1));
    for number in numbers.iter().copied().filter(|number| *number >= first) {
        if number > expected {
            return IndexCoverage::Without(expected);
        }
        expected = number + 1;
    }
    if expected < next { IndexCoverage::UpTo } else { IndexCoverage::All }
}

/// The number of an entry, from its sort key in the index.
fn audit_number(item: &Item) -> Option<u64> {
    item.get("GSI2SK")?.as_s().ok()?.parse().ok()
}

/// The tallies of an item of usage, by limit.
pub(super) fn tallies(item: &Item) -> Result<BTreeMap<LimitName, Tally>, StoreError> {
    let mut tallies: BTreeMap<LimitName, Tally> = BTreeMap::new();
    for (name, value) in item {
        let Some((kind @ ("u" | "w" | "k"), limit)) = name.split_once(':') else { continue };
        let limit = LimitName::new(limit).map_err(|error| StoreError::Corrupt { what: error.to_string() })?;
        let (tally, count) = (tallies.entry(limit).or_default(), number(name, value)?);
        match kind {
            "u" => tally.units = count,
            "w" => tally.own = count,
            _ => tally.leases = count,
        }
    }
    // Every item of usage has a partition key.
    text_of(item, super::keys::PK)?;
    Ok(tallies)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Shown numbers, the one to start after, the span, and the expected coverage.
    type Case<'a> = (&'a [u64], Option<u64>, (Option<u64>, u64), IndexCoverage);

    #[test]
    fn audit_index_is_used_without_gaps() {
        let table: [Case<'_>; 12] = [
            (&[], None, (None, 0), IndexCoverage::All),
            (&[0, 1, 2], None, (Some(0), 3), IndexCoverage::All),
            (&[0, 1], None, (Some(0), 3), IndexCoverage::UpTo),
            (&[], None, (Some(0), 3), IndexCoverage::UpTo),
            (&[0, 2], None, (Some(0), 3), IndexCoverage::Without(1)),
            (&[1, 2], None, (Some(0), 3), IndexCoverage::Without(0)),
            // Pruned but still shown.
            (&[0, 1, 2], None, (Some(2), 3), IndexCoverage::All),
            (&[3], Some(2), (Some(0), 4), IndexCoverage::All),
            (&[4], Some(2), (Some(0), 5), IndexCoverage::Without(3)),
            // A concurrent prune.
            (&[4], Some(2), (Some(4), 5), IndexCoverage::All),
            // Written by a version that did not store the first number.
            (&[5, 6], None, (None, 7), IndexCoverage::All),
            (&[5, 7], None, (None, 8), IndexCoverage::Without(6)),
        ];
        for (numbers, after, span, expected) in table {
            assert_eq!(
                index_coverage(numbers, after, span),
                expected,
                "{numbers:?} after {after:?} of {span:?}"
            );
        }
    }
}
