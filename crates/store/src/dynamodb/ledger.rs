//! Usage and the entries of the audit. The marks of ended leases are counted before usage is read.

use std::collections::BTreeMap;
use std::time::Duration;

use tidegate_core::limit::lease::REMEMBERED;
use tidegate_core::limit::name::{EntityId, LimitName, ResourceName, Subject};
use tidegate_core::limit::usage::{Tally, Usage, Window};
use tidegate_core::time::Stamp;

use super::DynamoDb;
use super::keys::{DUE_PARTS, GSI1, GSI2, Item, Key, PART, padded, window_word};
use super::link::Range;
use super::marks::EndMark;
use super::view::{View, number, number_of, text_of};
use crate::cursor::{UsagePlace, name_of};
use crate::error::StoreError;
use crate::ledger::{UsageOf, UsageQuery};

/// Items of an index that are read at a time.
const READ_AT_ONCE: usize = 1_000;
/// Buckets that are read at a time.
const BUCKETS_AT_ONCE: usize = 100;
/// When an index that does not show everything yet is asked again.
const LOOKED_AGAIN_AFTER: [Duration; 3] =
    [Duration::from_millis(20), Duration::from_millis(100), Duration::from_millis(400)];
/// The number of the first entry of the audit that was not pruned, at the version record.
pub(super) const PRUNED: &str = "pruned";

impl DynamoDb {
    pub(super) async fn used(
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
        let lines = match &query.of {
            UsageOf::Entity(entity) => self.used_by(entity, query).await?,
            UsageOf::Resource(resource) => self.used_of(resource, query, after.as_ref(), max).await?,
        };
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

    /// Counts the items with marks that add to the usage of these subjects, their own or as another level.
    pub(super) async fn count_all(&self, is_meant: impl Fn(&Subject) -> bool) -> Result<(), StoreError> {
        for part in 0..DUE_PARTS {
            // An item is due when its ended leases are no longer remembered, or earlier. Clocks may differ.
            let up_to = padded((self.now() + 2 * REMEMBERED).as_micros());
            let range = Range::new(Some(GSI1), self.inner.keys.due(part), String::new()).up_to(up_to);
            let found = self.inner.link.range(&range, usize::MAX).await?;
            let buckets: Vec<Key> = found
                .iter()
                .filter_map(Key::of)
                .filter(|key| self.inner.keys.subject(key).is_some())
                .collect();
            for keys in buckets.chunks(BUCKETS_AT_ONCE) {
                for (key, item) in self.inner.link.get_all(keys).await? {
                    let Some(subject) = self.inner.keys.subject(&key) else { continue };
                    let view = match View::read(Some(&item)) {
                        Err(error) if is_meant(&subject) => return Err(error),
                        // Its own usage cannot be read either.
                        Err(_) => continue,
                        Ok(view) => view,
                    };
                    let adds = |mark: &EndMark| {
                        is_meant(&subject) || mark.others.iter().any(|(subject, _)| is_meant(subject))
                    };
                    if view.ended.values().any(adds) {
                        self.count_item(&subject).await?;
                    }
                }
            }
        }
        Ok(())
    }

    async fn used_by(&self, entity: &EntityId, query: &UsageQuery) -> Result<Vec<Usage>, StoreError> {
        let range = Range::new(None, self.inner.keys.entity_pk(entity), "#USAGE#".to_owned());
        let mut lines = Vec::new();
        for item in self.inner.link.range(&range, usize::MAX).await? {
            lines.extend(self.lines(&item, query)?);
        }
        Ok(lines)
    }

    /// More lines than `max` of a resource, from an entity on; all lines of each entity that there is one of.
    async fn used_of(
        &self,
        resource: &ResourceName,
        query: &UsageQuery,
        after: Option<&UsagePlace<'_>>,
        max: usize,
    ) -> Result<Vec<Usage>, StoreError> {
        let prefix = format!("USAGE#{}#", window_word(query.window));
        let entity_of = |item: &Item| -> Option<String> {
            let order = item.get("GSI2SK")?.as_s().ok()?;
            Some(order.strip_prefix(&prefix)?.split(PART).next()?.to_owned())
        };
        let mut from = after.map(|place| format!("{prefix}{}", place.name));
        let (mut lines, mut at_once) = (Vec::new(), READ_AT_ONCE);
        loop {
            let range = Range::new(Some(GSI2), self.inner.keys.resource(resource), prefix.clone());
            let mut found = self.inner.link.range(&range.after(from.clone()), at_once).await?;
            let is_last = found.len() < at_once;
            let last = found.last().and_then(entity_of);
            if !is_last && found.first().and_then(entity_of) == last {
                // One entity has more windows than that: all of them are needed to sort them.
                at_once *= 2;
                continue;
            }
            if !is_last {
                found.retain(|item| entity_of(item) != last);
                from = last.map(|entity| format!("{prefix}{entity}"));
            }
            let keys: Vec<Key> = found.iter().filter_map(Key::of).collect();
            for item in self.inner.link.get_all(&keys).await?.values() {
                lines.extend(self.lines(item, query)?);
            }
            let is_enough = lines
                .iter()
                .filter(|line| after.is_none_or(|place| line.subject.entity.as_str() > place.name))
                .count()
                > max;
            if is_last || is_enough {
                return Ok(lines);
            }
        }
    }

    /// The lines of an item of usage that are asked for.
    fn lines(&self, item: &Item, query: &UsageQuery) -> Result<Vec<Usage>, StoreError> {
        let start = Stamp::from_micros(number_of(item, "start")?);
        let Some((subject, window)) = self.usage_of(item) else { return Ok(Vec::new()) };
        if window != query.window || !query.range.contains(&start) {
            return Ok(Vec::new());
        }
        let line = |(limit, tally)| Usage { subject: subject.clone(), limit, window, start, tally };
        Ok(tallies(item)?.into_iter().map(line).collect())
    }

    /// Whose usage an item is, and over which span.
    pub(super) fn usage_of(&self, item: &Item) -> Option<(Subject, Window)> {
        let Key { pk, sk } = Key::of(item)?;
        let entity = self.inner.keys.own(&pk)?.strip_prefix("ENTITY#")?;
        let mut parts = sk.strip_prefix("#USAGE#")?.split('#');
        let subject = Subject::stored(entity, parts.next()?).ok()?;
        let word = parts.next()?;
        Some((subject, Window::ALL.into_iter().find(|window| window_word(*window) == word)?))
    }

    /// Items of the audit after a number, in their order.
    pub(super) async fn entries(
        &self,
        filed: Option<&str>,
        after: Option<u64>,
        max: usize,
    ) -> Result<Entries, StoreError> {
        let keys = &self.inner.keys;
        if let Some(filed) = filed {
            let after = after.map(|number| format!("#AUDIT#{}", padded(number)));
            let range = Range::new(None, keys.audit_pk(filed), "#AUDIT#".to_owned()).after(after);
            let items = self.inner.link.range(&range, max).await?;
            let last = items.last().filter(|_| items.len() >= max);
            let next = last.map(|item| number_of(item, "number")).transpose()?;
            return Ok(Entries { items, next });
        }
        let mut pauses = LOOKED_AGAIN_AFTER.into_iter();
        loop {
            let span = self.span_of_audit().await?;
            let range = Range::new(Some(GSI2), keys.all("AUDITS"), String::new()).after(after.map(padded));
            let found = self.inner.link.range(&range, max).await?;
            let numbers: Vec<u64> = found.iter().filter_map(audit_number).collect();
            let shown = shown(&numbers, after, span);
            let is_full = found.len() >= max;
            // A page that is full ends where it ends, whatever comes after it.
            let is_answer = shown == Shown::All || (is_full && shown == Shown::UpTo);
            if !is_answer && let Some(pause) = pauses.next() {
                tokio::time::sleep(pause).await;
                continue;
            }
            if let Shown::Without(number) = shown {
                let what =
                    format!("entry {number} of the audit is there, and its index does not show it yet");
                return Err(StoreError::unavailable(what));
            }
            let keys: Vec<Key> = found.iter().filter_map(Key::of).collect();
            let mut there = self.inner.link.get_all(&keys).await?;
            let mut items: Vec<Item> = keys.iter().filter_map(|key| there.remove(key)).collect();
            let next = numbers.last().copied().filter(|_| is_full);
            if next.is_none() && matches!(shown, Shown::UpTo) {
                // The index may not show the rest of the last change yet: it is listed as a whole or not at all.
                let last = items.last().map(|item| number_of::<u64>(item, "version")).transpose()?;
                let is_before = |item: &Item| number_of::<u64>(item, "version").ok() < last;
                items.retain(is_before);
            }
            return Ok(Entries { items, next });
        }
    }

    /// The numbers of the first entry of the audit that was not pruned, if that is known, and of the next one.
    async fn span_of_audit(&self) -> Result<(Option<u64>, u64), StoreError> {
        let Some(item) = self.inner.link.get(&self.inner.keys.version()).await? else { return Ok((None, 0)) };
        let first = item.contains_key(PRUNED).then(|| number_of(&item, PRUNED)).transpose()?;
        Ok((first, number_of(&item, "audited")?))
    }
}

/// Entries of the audit, and after which number to go on, if there may be more.
pub(super) struct Entries {
    pub(super) items: Vec<Item>,
    pub(super) next: Option<u64>,
}

/// What an index shows of entries whose numbers follow each other.
#[derive(Debug, PartialEq, Eq)]
enum Shown {
    All,
    /// All up to the last one that it shows.
    UpTo,
    /// Not this one, and one after it.
    Without(u64),
}

/// Whether these are all entries after a number, of those that there are: the first that was not pruned, and the next one.
fn shown(numbers: &[u64], after: Option<u64>, (first, next): (Option<u64>, u64)) -> Shown {
    // If nothing is known of what was pruned, the first that is shown is taken for the first.
    let first = first.or_else(|| numbers.first().copied().filter(|_| after.is_none())).unwrap_or(0);
    let mut expected = after.map_or(first, |after| first.max(after + 1));
    for number in numbers.iter().copied().filter(|number| *number >= first) {
        if number > expected {
            return Shown::Without(expected);
        }
        expected = number + 1;
    }
    if expected < next { Shown::UpTo } else { Shown::All }
}

/// The number of an entry, by its place in the index.
fn audit_number(item: &Item) -> Option<u64> {
    item.get("GSI2SK")?.as_s().ok()?.parse().ok()
}

/// What an item of usage has of each limit.
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
    // Made sure of above: an item of usage has a start.
    text_of(item, super::keys::PK)?;
    Ok(tallies)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers that are shown, after which one, of which span, and what that is.
    type Case<'a> = (&'a [u64], Option<u64>, (Option<u64>, u64), Shown);

    #[test]
    fn audit_index_is_used_without_gaps() {
        let table: [Case<'_>; 12] = [
            (&[], None, (None, 0), Shown::All),
            (&[0, 1, 2], None, (Some(0), 3), Shown::All),
            (&[0, 1], None, (Some(0), 3), Shown::UpTo),
            (&[], None, (Some(0), 3), Shown::UpTo),
            (&[0, 2], None, (Some(0), 3), Shown::Without(1)),
            (&[1, 2], None, (Some(0), 3), Shown::Without(0)),
            // What was pruned and is still shown.
            (&[0, 1, 2], None, (Some(2), 3), Shown::All),
            (&[3], Some(2), (Some(0), 4), Shown::All),
            (&[4], Some(2), (Some(0), 5), Shown::Without(3)),
            // Others have pruned meanwhile.
            (&[4], Some(2), (Some(4), 5), Shown::All),
            // By a program that noted nothing.
            (&[5, 6], None, (None, 7), Shown::All),
            (&[5, 7], None, (None, 8), Shown::Without(6)),
        ];
        for (numbers, after, span, expected) in table {
            assert_eq!(shown(numbers, after, span), expected, "{numbers:?} after {after:?} of {span:?}");
        }
    }
}
