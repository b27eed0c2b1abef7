//! A store whose calls are timed, for an observer.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::verb::Verb;
use super::wrapper::Wrapper;
use crate::{Engine, Reply, StoreError};

/// What came of a call.
#[derive(Debug)]
#[non_exhaustive]
pub enum CallEnd<'a> {
    /// An answer, be it a refusal.
    Answered,
    /// An error.
    Failed(&'a StoreError),
    /// Nobody waited for it any longer.
    GivenUp,
}

/// Hears of each call of a store that is [`Measured`]. It is asked on the thread that called, and must not wait.
pub trait Watcher: fmt::Debug + Send + Sync + 'static {
    /// A call has ended.
    fn ended(&self, verb: Verb, took: Duration, end: CallEnd<'_>);
}

/// A store whose calls are timed. It answers as the store that it wraps does, at once where that does, and allocates nothing.
#[derive(Debug)]
pub struct Measured<E> {
    engine: E,
    watcher: Arc<dyn Watcher>,
}

impl<E: Engine> Measured<E> {
    /// Reports each call of `engine` to `watcher`.
    pub fn new(engine: E, watcher: Arc<dyn Watcher>) -> Self {
        Self { engine, watcher }
    }
}

/// A call that is timed.
pub(crate) struct Watch<'a> {
    watcher: &'a dyn Watcher,
    verb: Verb,
    began: Instant,
    is_open: bool,
}

impl Watch<'_> {
    pub(crate) fn end<T>(&mut self, answer: &Result<T, StoreError>) {
        self.is_open = false;
        let end = answer.as_ref().err().map_or(CallEnd::Answered, CallEnd::Failed);
        self.watcher.ended(self.verb, self.began.elapsed(), end);
    }
}

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        if self.is_open {
            self.watcher.ended(self.verb, self.began.elapsed(), CallEnd::GivenUp);
        }
    }
}

impl<E: Engine> Wrapper for Measured<E> {
    type Inner = E;

    #[inline]
    fn inner(&self) -> &E {
        &self.engine
    }

    #[inline]
    fn call<'a, T: Unpin + Send + 'a>(
        &'a self,
        verb: Verb,
        call: impl Fn() -> Reply<'a, T> + Send + Sync + 'a,
    ) -> Reply<'a, T> {
        let watch = Watch { watcher: &*self.watcher, verb, began: Instant::now(), is_open: true };
        call().watched(watch)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::super::{Faulty, Plan};
    use super::*;
    use crate::{Memory, Policies, Store};

    /// Remembers what it hears.
    #[derive(Debug, Default)]
    struct Book(Mutex<Vec<(Verb, String)>>);

    impl Watcher for Book {
        fn ended(&self, verb: Verb, _: Duration, end: CallEnd<'_>) {
            let end = match end {
                CallEnd::Answered => "answered".to_owned(),
                CallEnd::Failed(error) => error.to_string(),
                CallEnd::GivenUp => "given up".to_owned(),
            };
            self.0.lock().unwrap().push((verb, end));
        }
    }

    #[tokio::test]
    async fn each_call_is_told_once_with_what_came_of_it_and_what_is_immediate_stays_so() {
        let book = Arc::new(Book::default());
        let store = Measured::new(Memory::new(), book.clone());
        assert!(store.capabilities().is_immediate && store.version().now().is_some());
        let far = Faulty::new(Memory::new(), Plan::seeded(1)).unwrap();
        far.hang();
        let far = Measured::new(far, book.clone());
        assert!(far.version().now().is_none(), "dropped before it is asked");
        far.engine.go_away();
        let error = far.version().await.unwrap_err().to_string();
        far.engine.come_back();
        far.version().await.unwrap();
        let heard: Vec<String> = book.0.lock().unwrap().iter().map(|(_, end)| end.clone()).collect();
        assert_eq!(heard, ["answered", "given up", &error, "answered"]);
    }

    #[test]
    fn every_verb_has_the_name_of_its_method() {
        for (number, verb) in Verb::ALL.into_iter().enumerate() {
            assert_eq!(verb as usize, number);
            assert_eq!(verb.name().replace('_', ""), format!("{verb:?}").to_lowercase());
        }
    }
}
