//! A memory store behind a simulated network that a test controls call by call.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tidegate::store::wrap::{Verb, Wrapper};
use tidegate::store::{Capabilities, Changes, Engine, Reply};
use tidegate::{Memory, StoreError};

/// When a hook runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Moment {
    /// Before the call.
    Before,
    /// After the call, and before its reply arrives.
    After,
}

/// The decision of a hook.
#[derive(Debug)]
pub(crate) enum Act {
    /// Proceed.
    Pass,
    /// Return this error instead.
    Fail(StoreError),
    /// Sleep for this long.
    Sleep(Duration),
    /// Never reply.
    Hang,
    /// Panic, like a buggy store.
    Panic,
}

type Hook = dyn Fn(Verb, Moment) -> Act + Send + Sync;

/// A store with a hook that runs before and after every call.
pub(crate) struct HookStore {
    store: Memory,
    hook: Box<Hook>,
    /// Replies at once: the hook runs only before the call, and can only pass or fail.
    is_immediate: bool,
    /// The announced changes, if the store announces any.
    changes: Option<Changes>,
}

impl HookStore {
    pub(crate) fn new(
        store: &Memory,
        hook: impl Fn(Verb, Moment) -> Act + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Self { store: store.clone(), hook: Box::new(hook), is_immediate: false, changes: None })
    }

    /// The same for a store that replies at once.
    pub(crate) fn immediate(
        store: &Memory,
        hook: impl Fn(Verb, Moment) -> Act + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Self { store: store.clone(), hook: Box::new(hook), is_immediate: true, changes: None })
    }

    /// A reliable network whose store announces changes.
    pub(crate) fn announcing(store: &Memory, changes: Changes) -> Arc<Self> {
        let hook = Box::new(|_, _| Act::Pass);
        Arc::new(Self { store: store.clone(), hook, is_immediate: false, changes: Some(changes) })
    }

    async fn run_hook(&self, verb: Verb, moment: Moment) -> Result<(), StoreError> {
        match (self.hook)(verb, moment) {
            Act::Pass => Ok(()),
            Act::Fail(error) => Err(error),
            Act::Sleep(span) => {
                tokio::time::sleep(span).await;
                Ok(())
            }
            Act::Hang => std::future::pending().await,
            Act::Panic => panic!("injected panic"),
        }
    }
}

impl fmt::Debug for HookStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HookStore").finish_non_exhaustive()
    }
}

impl Wrapper for HookStore {
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
            self.run_hook(verb, Moment::Before).await?;
            let answer = call().await;
            self.run_hook(verb, Moment::After).await?;
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
