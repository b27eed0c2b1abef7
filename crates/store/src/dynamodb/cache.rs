//! A cache of the items of buckets and of the homes of leases. Its contents may be outdated.
//!
//! Only refusals may be based on it alone, for a moment after an item was read: otherwise a refused caller
//! that retries in a loop would cost a request each time, and a write if the cache was wrong. Refills since
//! the read are computed; a return by this process and a newer rule end the moment. Returns by other
//! processes are noticed after it.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use foldhash::{HashMap, HashSet};
use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::name::Subject;
use tokio::time::Instant;

use super::bucket_view::BucketView;
use crate::sync::lock;

/// The capacity for buckets; the cache is cleared beyond it.
const VIEWS_MAX: usize = 1 << 16;
/// The capacity for leases.
const LEASES_MAX: usize = 1 << 18;

/// Cached items and homes of leases.
#[derive(Debug, Default)]
pub(super) struct Cache {
    views: Mutex<HashMap<Subject, CachedView>>,
    homes: Mutex<HashMap<LeaseId, Subject>>,
    /// Buckets whose marks are being counted in the background.
    counting: Mutex<HashSet<Subject>>,
}

#[derive(Debug)]
struct CachedView {
    view: Arc<BucketView>,
    /// When the last read of the whole item was sent.
    read_at: Option<Instant>,
    /// When this process last returned units to it.
    returned_at: Option<Instant>,
}

impl Cache {
    pub(super) fn view(&self, subject: &Subject) -> Option<Arc<BucketView>> {
        lock(&self.views).get(subject).map(|seen| Arc::clone(&seen.view))
    }

    /// Updates the view of an item. An older one than the cached is ignored, unless its rules differ: it may
    /// be a new item.
    pub(super) fn update_view(&self, subject: &Subject, view: &Arc<BucketView>) {
        self.put(subject, view, None);
    }

    /// Updates the view by a read of the whole item, sent at `sent`.
    pub(super) fn record_read(&self, subject: &Subject, view: &Arc<BucketView>, sent: Instant) {
        self.put(subject, view, Some(sent));
    }

    fn put(&self, subject: &Subject, view: &Arc<BucketView>, sent: Option<Instant>) {
        let mut views = lock(&self.views);
        let is_newer = |known: &BucketView| known.rules == view.rules && known.revision > view.revision;
        match views.get_mut(subject) {
            Some(known) if is_newer(&known.view) => {}
            Some(known) => {
                known.view = Arc::clone(view);
                // The read may not include units that were returned after it was sent.
                if sent.is_some_and(|sent| known.returned_at.is_none_or(|returned_at| returned_at < sent)) {
                    known.read_at = sent;
                }
            }
            None => {
                if views.len() >= VIEWS_MAX {
                    views.clear();
                }
                views.insert(
                    subject.clone(),
                    CachedView { view: Arc::clone(view), read_at: sent, returned_at: None },
                );
            }
        }
    }

    /// Records a return by this process: the cached read may not refuse any more.
    pub(super) fn record_return(&self, subject: &Subject) {
        if let Some(seen) = lock(&self.views).get_mut(subject) {
            (seen.read_at, seen.returned_at) = (None, Some(Instant::now()));
        }
    }

    /// Whether a bucket was read within `span`.
    pub(super) fn was_read_within(&self, subject: &Subject, span: Duration) -> bool {
        let read = lock(&self.views).get(subject).and_then(|seen| seen.read_at);
        read.is_some_and(|read| read.elapsed() < span)
    }

    /// Evicts a bucket.
    pub(super) fn evict(&self, subject: &Subject) {
        lock(&self.views).remove(subject);
    }

    /// Marks a bucket as being counted; `false` if it is already.
    pub(super) fn begin_count(&self, subject: &Subject) -> bool {
        lock(&self.counting).insert(subject.clone())
    }

    pub(super) fn finish_count(&self, subject: &Subject) {
        lock(&self.counting).remove(subject);
    }

    pub(super) fn home(&self, lease: LeaseId) -> Option<Subject> {
        lock(&self.homes).get(&lease).cloned()
    }

    /// Records the home of a lease that has drawn, or may have.
    pub(super) fn remember_home(&self, lease: LeaseId, home: &Subject) {
        let mut homes = lock(&self.homes);
        if homes.len() >= LEASES_MAX {
            homes.clear();
        }
        homes.insert(lease, home.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LATELY: Duration = Duration::from_secs(1);

    fn view(revision: u64) -> Arc<BucketView> {
        Arc::new(BucketView { rules: Some("a".to_owned()), revision, ..BucketView::default() })
    }

    #[tokio::test(start_paused = true)]
    async fn read_refuses_for_a_moment_until_a_return() {
        let (cache, subject) = (Cache::default(), Subject::new("acme", "gpt").unwrap());
        let lately = || cache.was_read_within(&subject, LATELY);
        cache.update_view(&subject, &view(1));
        assert!(!lately(), "a write returns only the limits that it wrote");
        cache.record_read(&subject, &view(2), Instant::now());
        assert!(lately() && !cache.was_read_within(&subject, Duration::ZERO));
        tokio::time::advance(LATELY).await;
        assert!(!lately());

        let sent = Instant::now();
        tokio::time::advance(Duration::from_millis(1)).await;
        cache.record_return(&subject);
        cache.record_read(&subject, &view(3), sent);
        assert!(!lately(), "it was sent before the return and may not include it");
        tokio::time::advance(Duration::from_millis(1)).await;
        cache.record_read(&subject, &view(2), Instant::now());
        assert!(!lately(), "an older view is ignored");
        cache.record_read(&subject, &view(3), Instant::now());
        assert!(lately());
        cache.record_return(&subject);
        assert!(!lately());
    }
}
