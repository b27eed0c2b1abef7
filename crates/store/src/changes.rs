//! How those who remember policies hear that there are newer ones.

use std::sync::{Arc, Mutex};

use tidegate_core::limit::policy::Version;
use tokio::sync::watch;

use crate::sync::lock;

/// The newest version of a namespace that its store has heard of. Clones hear the same.
///
/// A store makes one with [`channel`](Self::channel) and tells it whatever its engine announces. Nobody relies on it: what
/// is announced while the engine is away may be missed, and is then noticed as it is without announcements, by the time
/// that policies are remembered for or by the version that a draw is decided by.
#[derive(Debug, Clone)]
pub struct Changes(watch::Receiver<Version>);

/// Where a store tells what it has heard.
#[derive(Debug)]
pub struct Announcer(watch::Sender<Version>);

impl Changes {
    /// Both ends, before anything was heard.
    pub fn channel() -> (Announcer, Self) {
        let (sender, receiver) = watch::channel(Version::ZERO);
        (Announcer(sender), Self(receiver))
    }

    /// The newest version that was heard of; [`Version::ZERO`] before any was.
    pub fn newest(&self) -> Version {
        *self.0.borrow()
    }

    /// The same from now on: what was heard so far is not waited for.
    #[must_use]
    pub fn from_now(&self) -> Self {
        let mut receiver = self.0.clone();
        receiver.mark_unchanged();
        Self(receiver)
    }

    /// Comes back when another version is heard of. Of a store that is gone nothing is heard: it never does.
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
    /// A version was announced. They may come out of order: only a newer one is news.
    pub fn announce(&self, version: Version) {
        self.0.send_if_modified(|newest| {
            let is_news = version > *newest;
            *newest = version.max(*newest);
            is_news
        });
    }

    /// The version as it is now, read after announcements may have been missed. It counts even if it is an older one: the
    /// engine may have been restored to an earlier state.
    pub fn restate(&self, version: Version) {
        self.0.send_if_modified(|newest| std::mem::replace(newest, version) != version);
    }
}

/// What an engine that announces versions has said over one connection. The version is read besides, because some may have
/// been missed; whoever reads it is overtaken by what is announced meanwhile, and must not put the older one in its place.
#[derive(Debug)]
pub(crate) struct Heard {
    announcer: Arc<Announcer>,
    /// The newest that was announced since somebody began to read, if somebody reads.
    meanwhile: Mutex<Option<Version>>,
}

// Which features there are decides whether an engine announces.
#[allow(dead_code, reason = "stores in this process announce nothing")]
impl Heard {
    pub(crate) fn new(announcer: Arc<Announcer>) -> Self {
        Self { announcer, meanwhile: Mutex::new(None) }
    }

    /// A version was announced.
    pub(crate) fn announced(&self, version: Version) {
        let mut meanwhile = lock(&self.meanwhile);
        if let Some(newest) = &mut *meanwhile {
            *newest = version.max(*newest);
        }
        self.announcer.announce(version);
    }

    /// From here on what is announced may be newer than what is read.
    pub(crate) fn is_about_to_be_read(&self) {
        *lock(&self.meanwhile) = Some(Version::ZERO);
    }

    /// This was read, at some time since.
    pub(crate) fn was_read(&self, version: Version) {
        // Held until it is told: nobody announces between the two.
        let mut meanwhile = lock(&self.meanwhile);
        self.announcer.restate(version.max(meanwhile.take().unwrap_or(Version::ZERO)));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_version_that_was_read_does_not_take_the_place_of_a_newer_one_that_was_announced_meanwhile() {
        let (announcer, changes) = Changes::channel();
        let heard = Heard::new(Arc::new(announcer));
        heard.announced(Version::new(9));
        // The engine was restored to an earlier state, and goes on from there.
        heard.is_about_to_be_read();
        heard.announced(Version::new(4));
        heard.was_read(Version::new(3));
        assert_eq!(changes.newest(), Version::new(4));
        heard.is_about_to_be_read();
        heard.was_read(Version::new(4));
        heard.announced(Version::new(5));
        assert_eq!(changes.newest(), Version::new(5));
        // Nobody has announced anything since: what is read counts.
        heard.is_about_to_be_read();
        heard.was_read(Version::new(2));
        assert_eq!(changes.newest(), Version::new(2));
    }

    #[tokio::test(start_paused = true)]
    async fn only_what_is_new_is_waited_for() {
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
