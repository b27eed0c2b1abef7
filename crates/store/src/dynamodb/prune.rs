//! Pruning of usage and of the audit.

use std::collections::HashMap;

use tidegate_core::limit::name::LimitName;
use tidegate_core::limit::usage::{Tally, Window};
use tidegate_core::time::Stamp;

use super::DynamoDb;
use super::bucket_view::number_of;
use super::client::Action;
use super::expression::{UpdateExpression, Value};
use super::keys::{Item, Key, SK, window_word};
use super::ledger::{EntryPage, PRUNED, tallies};
use crate::error::StoreError;
use crate::tables::ended_by;

/// Entries per deleting transaction.
const DELETE_BATCH: usize = 99;

impl DynamoDb {
    /// Deletes up to `max` lines of usage, the oldest first.
    pub(super) async fn prune_usage(
        &self,
        window: Window,
        before: Stamp,
        max: usize,
    ) -> Result<u64, StoreError> {
        if max == 0 {
            return Ok(0);
        }
        self.sweep_up_to(usize::MAX).await?;
        self.count_all(|_| true).await?;
        let mut old: Vec<(u64, Item)> = Vec::new();
        let names =
            HashMap::from([("#sk".to_owned(), SK.to_owned()), ("#start".to_owned(), "start".to_owned())]);
        let values = HashMap::from([
            (":usage".to_owned(), Value::from("#USAGE#").0),
            (":window".to_owned(), Value::from(format!("#{}#", window_word(window))).0),
            (":before".to_owned(), Value::from(ended_by(window, before)).0),
        ]);
        let filter = "begins_with(#sk, :usage) AND contains(#sk, :window) AND #start < :before";
        for item in self.inner.client.scan(filter, &names, &values).await? {
            if self.usage_of(&item).is_some_and(|(_, of)| of == window) {
                old.push((number_of(&item, "start")?, item));
            }
        }
        old.sort_by_cached_key(|(start, item)| (*start, Key::of(item).map(|key| (key.pk, key.sk))));
        let mut pruned = 0_usize;
        for (_, item) in &old {
            if pruned == max {
                break;
            }
            pruned += self.prune_item(item, max - pruned).await?;
        }
        Ok(pruned as u64)
    }

    /// Deletes up to `max` lines of an item. Lines that change concurrently stay for the next prune.
    async fn prune_item(&self, item: &Item, max: usize) -> Result<usize, StoreError> {
        let Some(key) = Key::of(item) else { return Ok(0) };
        let lines: Vec<(LimitName, Tally)> = tallies(item)?.into_iter().collect();
        let is_all = lines.len() <= max;
        let count = lines.len().min(max);
        let mut write = UpdateExpression::new(key);
        for (name, tally) in &lines[..count] {
            write.only_if(&format!("k:{name}"), "=", tally.leases);
            if !is_all {
                for kind in ["u", "w", "k"] {
                    write.remove(&format!("{kind}:{name}"));
                }
            }
        }
        let action = if is_all { Action::Delete(write) } else { Action::Update(write) };
        let is_done = self.inner.client.commit(None, &[action]).await?;
        Ok(if is_done { count } else { 0 })
    }

    /// Deletes up to `max` audit entries, the oldest first, until one is not `is_old`.
    pub(super) async fn prune_audit(
        &self,
        max: usize,
        is_old: impl Fn(&Item) -> Result<bool, StoreError>,
    ) -> Result<u64, StoreError> {
        let (mut pruned, mut after) = (0_usize, None);
        while pruned < max {
            let wanted = (max - pruned).min(DELETE_BATCH);
            let EntryPage { items, next } = self.entries(None, after, wanted).await?;
            let (mut actions, mut is_last, mut left) = (Vec::new(), next.is_none(), None);
            for item in &items {
                if !is_old(item)? {
                    is_last = true;
                    break;
                }
                left = Some(number_of::<u64>(item, "number")? + 1);
                actions.extend(Key::of(item).map(|key| Action::Delete(UpdateExpression::new(key))));
            }
            after = next;
            let removed = actions.len();
            if let Some(left) = left {
                let mut write = UpdateExpression::new(self.inner.keys.version());
                write.only_unless_or(PRUNED, "<=", left);
                write.set(PRUNED, left);
                actions.push(Action::Update(write));
            }
            // Another process may have pruned at least as much.
            if !actions.is_empty() && !self.inner.client.commit(None, &actions).await? {
                return Ok(pruned as u64);
            }
            pruned += removed;
            if is_last {
                break;
            }
        }
        Ok(pruned as u64)
    }
}
