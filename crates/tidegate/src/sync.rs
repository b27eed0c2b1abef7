//! Locks and the atomics beside them, from the standard library or, under `--cfg tidegate_model`, from the
//! model checker.
//!
//! No user code runs under a lock, so poisoning could only mean a bug of our own; it is ignored.

use std::sync::PoisonError;

#[cfg(not(tidegate_model))]
use std::sync as provider;

#[cfg(tidegate_model)]
use shuttle::sync as provider;

pub(crate) use provider::atomic::{AtomicU32, AtomicUsize};
pub(crate) use provider::{MutexGuard, RwLockReadGuard, RwLockWriteGuard};

/// A mutex that ignores poisoning.
#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(provider::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(provider::Mutex::new(value))
    }

    #[inline]
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A reader-writer lock that ignores poisoning.
#[derive(Debug, Default)]
pub(crate) struct RwLock<T>(provider::RwLock<T>);

impl<T> RwLock<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(provider::RwLock::new(value))
    }

    pub(crate) fn read(&self) -> RwLockReadGuard<'_, T> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn write(&self) -> RwLockWriteGuard<'_, T> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}
