//! Items of leases: `LEASE#id`, the tombstone of a lease whose end was counted.
//!
//! Older versions kept some open leases in such items too. The first call that reads one moves it into its
//! home bucket.

use std::sync::Arc;

use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::lease::{EndRecord, LeaseId, REMEMBERED};
use tidegate_core::limit::policy::OnExpiry;
use tidegate_core::time::Stamp;

use super::DynamoDb;
use super::bucket_update;
use super::bucket_view::{BucketView, OPENS, is_remembered, text_of};
use super::client::Action;
use super::errors::RequestError;
use super::expression::UpdateExpression;
use super::keys::{Item, TTL};
use super::lease_marks::{EndMark, OpenMark, end_name, levels_text, open_name};
use super::snapshot::write_of;
use crate::codec;
use crate::error::StoreError;

/// The mark.
const MARK: &str = "s";
/// The levels of an open lease.
const LEVELS: &str = "l";
/// A tombstone counts until this time.
const UNTIL: &str = "u";

/// An open lease that an older version wrote.
pub(super) struct LegacyLease {
    text: String,
    mark: OpenMark,
    pub(super) levels: Arc<Levels>,
}

impl LegacyLease {
    /// The open lease of an item; `None` for a tombstone.
    pub(super) fn read(item: &Item) -> Result<Option<Self>, StoreError> {
        if !item.contains_key(LEVELS) {
            return Ok(None);
        }
        let levels = Arc::new(codec::levels_from_text(text_of(item, LEVELS)?)?);
        let text = text_of(item, MARK)?;
        Ok(Some(Self { text: text.to_owned(), mark: text.parse()?, levels }))
    }

    pub(super) fn is_due(&self, now: Stamp) -> bool {
        self.mark.record.is_due(now)
    }

    pub(super) const fn on_expiry(&self) -> OnExpiry {
        self.mark.record.on_expiry()
    }
}

/// How a lease ended, by its item, if that is still remembered.
pub(super) fn tombstone_in(item: Option<&Item>, now: Stamp) -> Result<Option<EndRecord>, StoreError> {
    let Some(item) = item.filter(|item| !item.contains_key(LEVELS)) else { return Ok(None) };
    let mark: EndMark = text_of(item, MARK)?.parse()?;
    Ok(Some(mark.ended).filter(|ended| is_remembered(ended.at, now)))
}

impl DynamoDb {
    /// Moves an open lease of an older version from its item into its home, unless another process has done
    /// so.
    pub(super) async fn migrate_lease(&self, lease: LeaseId, old: &LegacyLease) -> Result<(), StoreError> {
        let LegacyLease { text: old_text, mark, levels } = old;
        let (home, (name, levels_text)) = (&levels.levels()[0], levels_text(levels));
        let (open, deadline) = (open_name(lease), mark.record.deadline());
        let mut retries = self.inner.client.retries();
        loop {
            let item = self.inner.client.get(&self.inner.keys.bucket(&home.subject)).await?;
            let seen = BucketView::read(item.as_ref())?;
            if seen.is_marked(lease) {
                return Ok(());
            }
            let mut moved = UpdateExpression::new(self.inner.keys.lease(lease));
            moved.only_if(MARK, "=", old_text.as_str());
            let mut write = write_of(self, home);
            bucket_update::begin_update(&mut write, &seen, &self.inner.epochs.next());
            write.only_without(&open);
            write.only_without(&end_name(lease));
            let mark = OpenMark { level: 0, record: mark.record.clone(), levels: name.clone() };
            write.set(&open, mark.to_string());
            write.set(&format!("l:{name}"), levels_text.as_str());
            write.add(OPENS, 1_u64);
            bucket_update::set_due_by(&mut write, &seen, deadline, (&self.inner.keys, &home.subject));
            if !seen.exists() || seen.ttl.is_some() {
                bucket_update::extend_lifetime(&mut write, &seen, home, (self.now(), deadline));
            }
            match self.inner.client.transact(None, &[Action::Delete(moved), Action::Update(write)]).await {
                Ok(()) => return Ok(()),
                // Another process has moved it, or a step of an older version has changed it.
                Err(RequestError::Condition(_)) => {
                    let item = self.inner.client.get(&self.inner.keys.lease(lease)).await?;
                    let left = item.as_ref().map(LegacyLease::read).transpose()?.flatten();
                    if left.is_none_or(|left| left.text != *old_text) {
                        return Ok(());
                    }
                    retries.wait_or_fail(RequestError::Conflict).await?;
                }
                Err(error) => retries.wait_or_fail(error).await?,
            }
        }
    }

    /// Writes the tombstone of a lease. The same transaction counts its usage.
    pub(super) fn tombstone_write(&self, lease: LeaseId, mark: &EndMark) -> Action {
        let mut write = UpdateExpression::new(self.inner.keys.lease(lease));
        let bare = EndMark { used: Vec::new(), others: Vec::new(), ..mark.clone() };
        write.set(MARK, bare.to_string());
        let until = mark.ended.at + REMEMBERED;
        write.set(UNTIL, until.as_micros());
        write.set(TTL, until.as_micros().div_ceil(1_000_000));
        Action::Update(write)
    }

    /// Checks that a lease has no item, or one that is no longer remembered.
    pub(super) fn no_tombstone_check(&self, lease: LeaseId, now: Stamp) -> Action {
        let mut check = UpdateExpression::new(self.inner.keys.lease(lease));
        check.only_if_new_or(UNTIL, "<=", now.as_micros());
        Action::Check(check)
    }
}
