//! Reports the duration of each call to a watcher.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::verb::Verb;
use super::wrapper::Wrapper;
use crate::{Engine, Reply, StoreError};

/// How a call ended.
#[derive(Debug)]
#[non_exhaustive]
pub enum CallEnd<'a> {
    /// With a result, possibly a refusal.
    Answered,
    /// With an error.
    Failed(&'a StoreError),
    /// The reply was dropped before it was ready.
    GivenUp,
}

/// Receives each call of a [`Measured`] engine. Called on the caller's thread, so it must not block.
pub trait Watcher: fmt::Debug + Send + Sync + 'static {
    /// A call has ended.
    fn ended(&self, verb: Verb, took: Duration, end: CallEnd<'_>);
}

/// An engine whose calls are timed. It replies as the wrapped engine does, immediately if that does, and does
/// not allocate.
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

/// A running call.
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

    use super::super::{FaultPlan, Faulty};
    use super::*;
    use crate::{Memory, Policies, Store};

    /// Records the calls.
    #[derive(Debug, Default)]
    struct Recorder(Mutex<Vec<(Verb, String)>>);

    impl Watcher for Recorder {
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
    async fn each_call_is_reported_once_with_its_end() {
        let recorder = Arc::new(Recorder::default());
        let store = Measured::new(Memory::new(), recorder.clone());
        assert!(store.capabilities().is_immediate && store.version().now().is_some());
        let faulty = Faulty::new(Memory::new(), FaultPlan::seeded(1)).unwrap();
        faulty.hang();
        let faulty = Measured::new(faulty, recorder.clone());
        assert!(faulty.version().now().is_none(), "dropped before it is polled");
        faulty.engine.go_away();
        let error = faulty.version().await.unwrap_err().to_string();
        faulty.engine.come_back();
        faulty.version().await.unwrap();
        let ends: Vec<String> = recorder.0.lock().unwrap().iter().map(|(_, end)| end.clone()).collect();
        assert_eq!(ends, ["answered", "given up", &error, "answered"]);
    }

    #[test]
    fn every_verb_has_the_name_of_its_method() {
        for (number, verb) in Verb::ALL.into_iter().enumerate() {
            assert_eq!(verb as usize, number);
            assert_eq!(verb.name().replace('_', ""), format!("{verb:?}").to_lowercase());
        }
    }
}
