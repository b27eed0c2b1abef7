//! Notifications of policy changes, for caches of policies.

use std::sync::{Arc, Mutex};

use tidegate_core::limit::policy::Version;
use tokio::sync::watch;

use crate::sync::lock;

/// A subscription to the newest version of a namespace. Clones receive the same versions.
///
/// A store creates one with [`channel`](Self::channel) and forwards its engine's announcements. They are an
/// optimization: announcements may be missed while the engine is unavailable. A stale policy is then noticed
/// as without announcements, when its cache entry expires or by the version of a draw's result.
#[derive(Debug, Clone)]
pub struct Changes(watch::Receiver<Version>);

/// The sending side of [`Changes`].
#[derive(Debug)]
pub struct Announcer(watch::Sender<Version>);

impl Changes {
    /// Both ends, at [`Version::ZERO`].
    pub fn channel() -> (Announcer, Self) {
        let (sender, receiver) = watch::channel(Version::ZERO);
        (Announcer(sender), Self(receiver))
    }

    /// The newest announced version; [`Version::ZERO`] before the first.
    pub fn newest(&self) -> Version {
        *self.0.borrow()
    }

    /// A subscription from now on, which ignores earlier announcements.
    #[must_use]
    pub fn from_now(&self) -> Self {
        let mut receiver = self.0.clone();
        receiver.mark_unchanged();
        Self(receiver)
    }

    /// Waits for another version. Never completes once the store is dropped.
    ///
    /// # Cancel safety
    /// Dropping the future misses nothing.
    pub async fn changed(&mut self) {
        if self.0.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

impl Announcer {
    /// Announces a version. Announcements may be out of order: older ones are ignored.
    pub fn announce(&self, version: Version) {
        self.0.send_if_modified(|newest| {
            let is_news = version > *newest;
            *newest = version.max(*newest);
            is_news
        });
    }

    /// Sets the version that was read after announcements may have been missed. It may be older: the engine
    /// may have been restored from a backup.
    pub fn restate(&self, version: Version) {
        self.0.send_if_modified(|newest| std::mem::replace(newest, version) != version);
    }
}

/// The announcements of one connection. The version is also read, because announcements may have been missed.
/// An announcement that arrives during the read wins over an older version that was read.
#[derive(Debug)]
pub(crate) struct AnnouncedVersion {
    announcer: Arc<Announcer>,
    /// The newest version announced since a read began; `None` if no read is in progress.
    during_read: Mutex<Option<Version>>,
}

// Whether an engine announces depends on the features.
#[allow(dead_code, reason = "stores in this process announce nothing")]
impl AnnouncedVersion {
    pub(crate) fn new(announcer: Arc<Announcer>) -> Self {
        Self { announcer, during_read: Mutex::new(None) }
    }

    /// Records an announced version.
    pub(crate) fn announced(&self, version: Version) {
        let mut during_read = lock(&self.during_read);
        if let Some(newest) = &mut *during_read {
            *newest = version.max(*newest);
        }
        self.announcer.announce(version);
    }

    /// Records that a read begins: later announcements may be newer than its result.
    pub(crate) fn is_about_to_be_read(&self) {
        *lock(&self.during_read) = Some(Version::ZERO);
    }

    /// Records the version that was read.
    pub(crate) fn was_read(&self, version: Version) {
        // Locked until the version is set, so that no announcement comes in between.
        let mut during_read = lock(&self.during_read);
        self.announcer.restate(version.max(during_read.take().unwrap_or(Version::ZERO)));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn announcement_during_a_read_wins_over_older_read() {
        let (sender, changes) = Changes::channel();
        let announced = AnnouncedVersion::new(Arc::new(sender));
        announced.announced(Version::new(9));
        // The engine was restored from a backup and continues.
        announced.is_about_to_be_read();
        announced.announced(Version::new(4));
        announced.was_read(Version::new(3));
        assert_eq!(changes.newest(), Version::new(4));
        announced.is_about_to_be_read();
        announced.was_read(Version::new(4));
        announced.announced(Version::new(5));
        assert_eq!(changes.newest(), Version::new(5));
        // No announcement since: the version that was read counts.
        announced.is_about_to_be_read();
        announced.was_read(Version::new(2));
        assert_eq!(changes.newest(), Version::new(2));
    }

    #[tokio::test(start_paused = true)]
    async fn changed_waits_for_a_new_version() {
        let (announcer, changes) = Changes::channel();
        let mut waiting = changes.from_now();
        announcer.announce(Version::new(3));
        waiting.changed().await;
        assert_eq!(changes.newest(), Version::new(3));
        announcer.announce(Version::new(2));
        announcer.restate(Version::new(3));
        let mut late = changes.from_now();
        let nothing = tokio::time::timeout(Duration::from_secs(1), async {
            tokio::select! { () = waiting.changed() => {}, () = late.changed() => {} }
        });
        assert!(nothing.await.is_err(), "nothing newer was announced");
        announcer.restate(Version::new(1));
        late.changed().await;
        assert_eq!(changes.newest(), Version::new(1));
        drop(announcer);
        assert!(tokio::time::timeout(Duration::from_secs(1), late.changed()).await.is_err());
    }
}
