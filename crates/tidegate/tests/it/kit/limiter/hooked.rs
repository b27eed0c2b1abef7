//! A memory store behind a network that does what a test says, call by call.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tidegate::store::wrap::{Verb, Wrapper};
use tidegate::store::{Capabilities, Changes, Engine, Reply};
use tidegate::{Memory, StoreError};

/// When a hook is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Moment {
    /// The call has not been made.
    Before,
    /// It has been made, and its answer is on the way.
    After,
}

/// What a hook says.
#[derive(Debug)]
pub(crate) enum Act {
    /// Go on.
    Pass,
    /// Answer this instead.
    Fail(StoreError),
    /// Take so long.
    Sleep(Duration),
    /// Never answer.
    Hang,
    /// A bug of the store.
    Panic,
}

type Hook = dyn Fn(Verb, Moment) -> Act + Send + Sync;

/// A store whose every call is decided by a function, before and after it is made.
pub(crate) struct Hooked {
    store: Memory,
    hook: Box<Hook>,
    /// It answers at once: a hook can only pass or fail, before the call.
    is_immediate: bool,
    /// What is announced of changes, if anything is.
    changes: Option<Changes>,
}

impl Hooked {
    pub(crate) fn new(
        store: &Memory,
        hook: impl Fn(Verb, Moment) -> Act + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Self { store: store.clone(), hook: Box::new(hook), is_immediate: false, changes: None })
    }

    /// The same in this process.
    pub(crate) fn here(
        store: &Memory,
        hook: impl Fn(Verb, Moment) -> Act + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Self { store: store.clone(), hook: Box::new(hook), is_immediate: true, changes: None })
    }

    /// A network over which nothing goes wrong, and changes are announced.
    pub(crate) fn announcing(store: &Memory, changes: Changes) -> Arc<Self> {
        let hook = Box::new(|_, _| Act::Pass);
        Arc::new(Self { store: store.clone(), hook, is_immediate: false, changes: Some(changes) })
    }

    async fn meet(&self, verb: Verb, moment: Moment) -> Result<(), StoreError> {
        match (self.hook)(verb, moment) {
            Act::Pass => Ok(()),
            Act::Fail(error) => Err(error),
            Act::Sleep(span) => {
                tokio::time::sleep(span).await;
                Ok(())
            }
            Act::Hang => std::future::pending().await,
            Act::Panic => panic!("the store has a bug, as the test planned"),
        }
    }
}

impl fmt::Debug for Hooked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hooked").finish_non_exhaustive()
    }
}

impl Wrapper for Hooked {
    type Inner = Memory;

    fn inner(&self) -> &Memory {
        &self.store
    }

    fn call<'a, T: Unpin + Send + 'a>(
        &'a self,
        verb: Verb,
        call: impl Fn() -> Reply<'a, T> + Send + Sync + 'a,
    ) -> Reply<'a, T> {
        if self.is_immediate {
            return match (self.hook)(verb, Moment::Before) {
                Act::Fail(error) => Reply::ready(Err(error)),
                _ => call(),
            };
        }
        Reply::later(async move {
            self.meet(verb, Moment::Before).await?;
            let answer = call().await;
            self.meet(verb, Moment::After).await?;
            answer
        })
    }

    fn describe(&self) -> Capabilities {
        Capabilities { is_immediate: self.is_immediate, deadline: super::DEADLINE, ..self.store.about() }
    }

    fn announced(&self) -> Option<Changes> {
        self.changes.clone()
    }
}
