//! What this process saw last of each bucket, and where the leases are that it knows. It is only ever a guess.
//!
//! One thing may be answered by it alone, and only for a moment after an item was read: that there is too little. A refused
//! caller who asks again and again would cost a request each time, and a write where the guess was wrong. What has refilled
//! since is worked out, what this process gave back ends it, and a rule that is newer than what was read does too. What others
//! give back is seen when the moment is over.

use std::fmt::Write as _;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use foldhash::{HashMap, HashSet};
use sha2::{Digest as _, Sha256};
use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::name::Subject;
use tokio::time::Instant;

use super::view::View;
use crate::codec::levels_to_text;
use crate::sync::lock;

/// Buckets that are remembered; at the bound all are forgotten, and are read again.
const VIEWS_MAX: usize = 1 << 16;
/// Leases whose buckets are remembered.
const LEASES_MAX: usize = 1 << 18;
/// Texts of levels that are remembered: mostly the same are drawn from again.
const TEXTS_MAX: usize = 1 << 10;

/// What was seen last.
#[derive(Debug, Default)]
pub(super) struct Cache {
    views: Mutex<HashMap<Subject, Seen>>,
    homes: Mutex<HashMap<LeaseId, Subject>>,
    /// Those whose marks are being counted in the background.
    counting: Mutex<HashSet<Subject>>,
    /// By their address, which stays theirs while they are held here.
    texts: Mutex<HashMap<usize, (Arc<Levels>, LevelsText)>>,
}

#[derive(Debug)]
struct Seen {
    view: Arc<View>,
    /// When all of it was asked for last.
    read: Option<Instant>,
    /// When this process gave something back to it last.
    given: Option<Instant>,
}

/// Levels as items have them, and what they are called there.
#[derive(Debug, Clone)]
pub(super) struct LevelsText {
    pub(super) name: Arc<str>,
    pub(super) text: Arc<str>,
}

impl LevelsText {
    pub(super) fn of(levels: &Levels) -> Self {
        let text = levels_to_text(levels);
        let digest = Sha256::digest(text.as_bytes());
        let name = digest[..10].iter().fold(String::new(), |mut name, byte| {
            // To a string nothing fails.
            let _ = write!(name, "{byte:02x}");
            name
        });
        Self { name: name.into(), text: text.into() }
    }
}

impl Cache {
    pub(super) fn view(&self, subject: &Subject) -> Option<Arc<View>> {
        lock(&self.views).get(subject).map(|seen| Arc::clone(&seen.view))
    }

    /// What an item is as of now. An older one than is known is no news; one with other rules may be a new item.
    pub(super) fn saw(&self, subject: &Subject, view: &Arc<View>) {
        self.put(subject, view, None);
    }

    /// The same of an item that was read as a whole, and asked for at this time.
    pub(super) fn looked(&self, subject: &Subject, view: &Arc<View>, asked: Instant) {
        self.put(subject, view, Some(asked));
    }

    fn put(&self, subject: &Subject, view: &Arc<View>, asked: Option<Instant>) {
        let mut views = lock(&self.views);
        let is_newer = |known: &View| known.rules == view.rules && known.revision > view.revision;
        match views.get_mut(subject) {
            Some(known) if is_newer(&known.view) => {}
            Some(known) => {
                known.view = Arc::clone(view);
                // What was given back while it was asked for may not be in it.
                if asked.is_some_and(|asked| known.given.is_none_or(|given| given < asked)) {
                    known.read = asked;
                }
            }
            None => {
                if views.len() >= VIEWS_MAX {
                    views.clear();
                }
                views.insert(subject.clone(), Seen { view: Arc::clone(view), read: asked, given: None });
            }
        }
    }

    /// This process gave something back to a bucket: what was read of it does not refuse any more.
    pub(super) fn gave(&self, subject: &Subject) {
        if let Some(seen) = lock(&self.views).get_mut(subject) {
            (seen.read, seen.given) = (None, Some(Instant::now()));
        }
    }

    /// Whether a bucket was read so lately.
    pub(super) fn was_read_within(&self, subject: &Subject, span: Duration) -> bool {
        let read = lock(&self.views).get(subject).and_then(|seen| seen.read);
        read.is_some_and(|read| read.elapsed() < span)
    }

    /// Evicts what was seen of a bucket.
    pub(super) fn evict(&self, subject: &Subject) {
        lock(&self.views).remove(subject);
    }

    /// Begins to count the marks of a bucket, unless a task of this process does.
    pub(super) fn counts(&self, subject: &Subject) -> bool {
        lock(&self.counting).insert(subject.clone())
    }

    pub(super) fn counted(&self, subject: &Subject) {
        lock(&self.counting).remove(subject);
    }

    pub(super) fn home(&self, lease: LeaseId) -> Option<Subject> {
        lock(&self.homes).get(&lease).cloned()
    }

    /// A lease has drawn, or may have.
    pub(super) fn drew(&self, lease: LeaseId, home: &Subject) {
        let mut homes = lock(&self.homes);
        if homes.len() >= LEASES_MAX {
            homes.clear();
        }
        homes.insert(lease, home.clone());
    }

    pub(super) fn text(&self, levels: &Arc<Levels>) -> LevelsText {
        let address = Arc::as_ptr(levels).addr();
        if let Some((_, text)) = lock(&self.texts).get(&address) {
            return text.clone();
        }
        let text = LevelsText::of(levels);
        let mut texts = lock(&self.texts);
        if texts.len() >= TEXTS_MAX {
            texts.clear();
        }
        texts.insert(address, (Arc::clone(levels), text.clone()));
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LATELY: Duration = Duration::from_secs(1);

    fn view(revision: u64) -> Arc<View> {
        Arc::new(View { rules: Some("a".to_owned()), revision, ..View::default() })
    }

    #[tokio::test(start_paused = true)]
    async fn read_refuses_for_a_moment_until_a_return() {
        let (cache, subject) = (Cache::default(), Subject::new("acme", "gpt").unwrap());
        let lately = || cache.was_read_within(&subject, LATELY);
        cache.saw(&subject, &view(1));
        assert!(!lately(), "a write returns only the limits that it wrote");
        cache.looked(&subject, &view(2), Instant::now());
        assert!(lately() && !cache.was_read_within(&subject, Duration::ZERO));
        tokio::time::advance(LATELY).await;
        assert!(!lately());

        let asked = Instant::now();
        tokio::time::advance(Duration::from_millis(1)).await;
        cache.gave(&subject);
        cache.looked(&subject, &view(3), asked);
        assert!(!lately(), "it was asked for before, and may be without what was given back");
        tokio::time::advance(Duration::from_millis(1)).await;
        cache.looked(&subject, &view(2), Instant::now());
        assert!(!lately(), "an older one is no news");
        cache.looked(&subject, &view(3), Instant::now());
        assert!(lately());
        cache.gave(&subject);
        assert!(!lately());
    }
}
