//! A two-generation cache, for answers of a store that are worth remembering.
//!
//! When the young generation is full it becomes the old one, and the previous old one is dropped as a whole. A hit in the old
//! generation moves the entry to the young one. So the cache is bounded, keeps what is used, and does nothing per eviction.

use std::mem;
use std::sync::Arc;

use hashbrown::HashTable;

/// An entry that knows the hash of its key.
pub trait Hashed {
    /// The hash of the key.
    fn key_hash(&self) -> u64;
}

impl<T: Hashed> Hashed for Arc<T> {
    fn key_hash(&self) -> u64 {
        (**self).key_hash()
    }
}

/// A bounded cache of entries.
///
/// ```
/// use tidegate_store::two_generations::{Hashed, TwoGenerations};
///
/// struct Square(u64, u64);
///
/// impl Hashed for Square {
///     fn key_hash(&self) -> u64 {
///         self.0
///     }
/// }
///
/// let mut squares = TwoGenerations::new(100);
/// squares.insert(Square(12, 144), |other| other.0 == 12);
/// assert_eq!(squares.find(12, |square| square.0 == 12).map(|square| square.1), Some(144));
/// ```
#[derive(Debug)]
pub struct TwoGenerations<T> {
    young: HashTable<T>,
    old: HashTable<T>,
    /// Entries of one generation.
    generation_max: usize,
}

impl<T: Hashed> TwoGenerations<T> {
    /// An empty cache of at most `entries_max` entries, and at least two.
    pub fn new(entries_max: usize) -> Self {
        Self { young: HashTable::new(), old: HashTable::new(), generation_max: (entries_max / 2).max(1) }
    }

    /// The entry with this hash that `is_it` recognizes by its key.
    #[inline]
    pub fn find(&mut self, hash: u64, is_it: impl Fn(&T) -> bool) -> Option<&T> {
        if let Some(place) = self.young.find_bucket_index(hash, &is_it) {
            return self.young.get_bucket(place);
        }
        let (entry, _) = self.old.find_entry(hash, &is_it).ok()?.remove();
        self.push(entry);
        self.young.find(hash, is_it)
    }

    /// Inserts an entry, and replaces the one that `is_it` recognizes by the same key.
    pub fn insert(&mut self, entry: T, is_it: impl Fn(&T) -> bool) {
        let hash = entry.key_hash();
        if let Ok(found) = self.young.find_entry(hash, &is_it) {
            *found.into_mut() = entry;
            return;
        }
        if let Ok(found) = self.old.find_entry(hash, &is_it) {
            found.remove();
        }
        self.push(entry);
    }

    /// Entries in both generations.
    pub fn len(&self) -> usize {
        self.young.len() + self.old.len()
    }

    /// Whether there is no entry.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn push(&mut self, entry: T) {
        if self.young.len() >= self.generation_max {
            self.old = mem::take(&mut self.young);
        }
        self.young.insert_unique(entry.key_hash(), entry, T::key_hash);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq)]
    struct Entry {
        key: u64,
        value: u32,
    }

    impl Hashed for Entry {
        /// Two keys share each hash.
        fn key_hash(&self) -> u64 {
            self.key / 2
        }
    }

    fn insert(cache: &mut TwoGenerations<Entry>, key: u64, value: u32) {
        cache.insert(Entry { key, value }, |entry| entry.key == key);
    }

    fn find(cache: &mut TwoGenerations<Entry>, key: u64) -> Option<u32> {
        cache.find(key / 2, |entry| entry.key == key).map(|entry| entry.value)
    }

    #[test]
    fn used_entries_stay_and_memory_is_bounded() {
        let mut cache = TwoGenerations::new(8);
        insert(&mut cache, 0, 7);
        for key in 1..1_000 {
            insert(&mut cache, key, 0);
            assert_eq!(find(&mut cache, 0), Some(7), "{key}");
            assert!(cache.len() <= 8);
        }
        assert_eq!(find(&mut cache, 1), None);
    }

    #[test]
    fn newer_entry_replaces_older_in_either_generation() {
        let mut cache = TwoGenerations::new(4);
        for (key, value) in [(0, 1), (0, 2), (1, 3), (2, 4), (0, 5), (1, 6)] {
            insert(&mut cache, key, value);
            assert_eq!(find(&mut cache, key), Some(value));
        }
        assert_eq!((find(&mut cache, 0), find(&mut cache, 1)), (Some(5), Some(6)));
        assert!(!cache.is_empty() && cache.len() <= 3);
    }
}
