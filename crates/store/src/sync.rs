//! Locking: a lock that was poisoned serves whoever comes next.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks, poisoned or not: nobody else's code runs under our locks, so poison could only mean a bug of our own.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
