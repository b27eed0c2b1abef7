//! Usage queries, and pruning of usage and of the audit.

use std::collections::BTreeMap;

use ::redis::Cmd;
use tidegate_core::limit::audit::Entry;
use tidegate_core::limit::name::{LimitName, Subject};
use tidegate_core::limit::usage::{Usage, Window};
use tidegate_core::time::Stamp;

use super::Redis;
use super::index::{Prefix, member, subject_named};
use super::records::{INDEX, hash_of};
use super::script::{FORGET, SWAP};
use super::usage::UsageTallies;
use crate::cursor::UsagePlace;
use crate::error::StoreError;
use crate::ledger::{Prune, UsageOf, UsageQuery};
use crate::record::{Kind, Record};
use crate::tables::subject;

/// Names and entries per call.
const PAGE_SIZE: usize = 200;
/// How often a prune is retried after a concurrent settle (optimistic locking).
const RETRIES_MAX: usize = 64;

impl Redis {
    /// Up to `max` lines of usage, those after `after` only.
    pub(super) async fn usage_lines(
        &self,
        query: &UsageQuery,
        after: Option<UsagePlace<'_>>,
        max: usize,
    ) -> Result<Vec<Usage>, StoreError> {
        let prefix = match &query.of {
            UsageOf::Entity(entity) => Prefix::of(&["s", entity.as_str()]),
            UsageOf::Resource(resource) => Prefix::of(&["r", resource.as_str()]),
        };
        let subject_of = |name: &str| match &query.of {
            UsageOf::Entity(entity) => subject(entity.as_str(), name),
            UsageOf::Resource(resource) => subject(name, resource.as_str()),
        };
        let (mut lines, mut last) = (Vec::new(), None::<String>);
        if let Some(place) = after {
            let rest = self.lines(&subject_of(place.name)?, query).await?.into_iter();
            let is_after = |line: &Usage| (line.limit.as_str(), line.start) > (place.limit, place.start);
            lines.extend(rest.filter(is_after));
            last = Some(place.name.to_owned());
        }
        while lines.len() < max {
            let names = self.range(&prefix, last.as_deref(), PAGE_SIZE).await?;
            for name in &names {
                lines.extend(self.lines(&subject_of(name)?, query).await?);
                if lines.len() >= max {
                    break;
                }
            }
            if names.len() < PAGE_SIZE {
                break;
            }
            last = names.last().cloned();
        }
        lines.truncate(max);
        Ok(lines)
    }

    pub(super) async fn prune_lines(&self, prune: &Prune, max: usize) -> Result<u64, StoreError> {
        match prune {
            Prune::Usage { window, before } => self.prune_usage(*window, *before, max).await,
            Prune::Audit { through } => self.prune_audit(|entry| entry.version <= *through, max).await,
        }
    }

    /// The lines of a subject that match a query.
    async fn lines(&self, subject: &Subject, query: &UsageQuery) -> Result<Vec<Usage>, StoreError> {
        let Some(fields) = self.usage_of(subject).await? else { return Ok(Vec::new()) };
        let tallies = read(&fields)?;
        let mut lines = Vec::new();
        for ((limit, start), tally) in tallies.lines(query.window) {
            if query.range.contains(&start) {
                let limit = LimitName::new(limit)
                    .map_err(|error| StoreError::Corrupt { what: format!("a line of usage: {error}") })?;
                lines.push(Usage { subject: subject.clone(), limit, window: query.window, start, tally });
            }
        }
        Ok(lines)
    }

    /// The fields of a subject's usage; `None` if it never drew.
    async fn usage_of(&self, subject: &Subject) -> Result<Option<BTreeMap<Vec<u8>, Vec<u8>>>, StoreError> {
        let (keyspace, connection) = (&self.inner.keyspace, &self.inner.connection);
        let Some(home) = keyspace.home_of(connection, &subject.entity).await? else { return Ok(None) };
        connection.query(&Cmd::hgetall(keyspace.usage(home, subject))).await.map(Some)
    }

    async fn prune_usage(&self, window: Window, before: Stamp, max: usize) -> Result<u64, StoreError> {
        if max == 0 {
            return Ok(0);
        }
        // Expired leases are settled first, so that they count in the window that goes.
        self.sweep_up_to(usize::MAX).await?;
        let (prefix, mut pruned, mut last) = (Prefix::of(&["s"]), 0, None::<String>);
        while pruned < max {
            let names = self.range(&prefix, last.as_deref(), PAGE_SIZE).await?;
            for name in &names {
                pruned += self.prune_subject(&subject_named(name)?, window, before, max - pruned).await?;
            }
            if names.len() < PAGE_SIZE {
                break;
            }
            last = names.last().cloned();
        }
        Ok(pruned as u64)
    }

    /// Deletes up to `max` lines of a subject, and returns how many.
    pub(super) async fn prune_subject(
        &self,
        subject: &Subject,
        window: Window,
        before: Stamp,
        max: usize,
    ) -> Result<usize, StoreError> {
        let (keyspace, connection) = (&self.inner.keyspace, &self.inner.connection);
        let Some(home) = keyspace.home_of(connection, &subject.entity).await? else { return Ok(0) };
        let key = keyspace.usage(home, subject);
        for _ in 0..RETRIES_MAX {
            let Some(seen) = self.usage_of(subject).await? else { return Ok(0) };
            let mut tallies = read(&seen)?;
            let pruned = tallies.prune(window, before, max);
            if pruned == 0 {
                return Ok(0);
            }
            let after = tallies.fields();
            let mut args: Vec<&[u8]> = Vec::new();
            let names = seen.keys().map(Vec::as_slice).chain(after.keys().map(String::as_bytes));
            for name in names.collect::<std::collections::BTreeSet<_>>() {
                let was = seen.get(name).map_or(&[][..], Vec::as_slice);
                let text = std::str::from_utf8(name).unwrap_or_default();
                let is = after.get(text).map_or(&[][..], Vec::as_slice);
                if was != is {
                    args.extend([name, was, is]);
                }
            }
            if connection.run(&SWAP, &[&key], &args).await? {
                return Ok(pruned);
            }
        }
        Err(StoreError::unavailable(format!(
            "the prune of `{subject}` gave up after {RETRIES_MAX} concurrent settles"
        )))
    }

    /// Deletes up to `max` audit entries from the start, as long as they are old.
    pub(super) async fn prune_audit(
        &self,
        is_old: impl Fn(&Entry) -> bool + Send,
        max: usize,
    ) -> Result<u64, StoreError> {
        let (keyspace, connection) = (&self.inner.keyspace, &self.inner.connection);
        let mut pruned = 0;
        while pruned < max {
            let numbers = self.range(&Prefix::of(&["a"]), None, PAGE_SIZE.min(max - pruned)).await?;
            let entries = self.records_at(Kind::Entry, &numbers).await?;
            let mut gone: Vec<String> = Vec::new();
            for (number, entry) in numbers.iter().zip(entries) {
                let entry = entry.map(Record::entry).transpose()?;
                if entry.as_ref().is_some_and(|entry| !is_old(entry)) {
                    break;
                }
                let filed = entry.as_ref().map_or("", |entry| entry.filed.as_str());
                gone.extend([number.clone(), member(&["a", number]), member(&["f", filed, number])]);
            }
            if gone.is_empty() {
                break;
            }
            let keys = [hash_of(Kind::Entry), INDEX].map(|key| keyspace.admin(key));
            // A concurrent prune counts only what it deleted itself.
            pruned += connection.run::<usize>(&FORGET, &keys, &gone).await?;
            let gone = gone.len() / 3;
            if gone < numbers.len() {
                break;
            }
        }
        Ok(pruned as u64)
    }
}

fn read(fields: &BTreeMap<Vec<u8>, Vec<u8>>) -> Result<UsageTallies, StoreError> {
    UsageTallies::read(fields.iter().map(|(field, value)| (&field[..], &value[..])))
}
