//! Pools of returnable capacity: slots, recovery slots, bytes in flight.
//!
//! A pool stores only the held amount and compares it with the current limit, so a limit can change under
//! requests in flight. After a shrink, nothing is admitted until enough has been returned.

/// The held amount of a returnable capacity.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Pool {
    held: u64,
}

/// Whether a pool may be overdrawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Overdraw {
    /// The held amount never exceeds the limit.
    Never,
    /// A request may exceed the limit if no more than the limit is held: at most one request too much.
    OnEntry,
}

impl Pool {
    /// Whether `amount` may be taken under `limit`.
    #[inline]
    pub const fn admits(self, amount: u64, limit: u64, overdraw: Overdraw) -> bool {
        match overdraw {
            Overdraw::Never => self.held.saturating_add(amount) <= limit,
            Overdraw::OnEntry => self.held <= limit,
        }
    }

    /// Takes `amount`; the caller has checked that the pool admits it.
    #[inline]
    pub const fn take(&mut self, amount: u64) {
        debug_assert!(self.held.checked_add(amount).is_some(), "the held amount overflows");
        self.held = self.held.saturating_add(amount);
    }

    /// Returns `amount` to the pool.
    #[inline]
    pub const fn give_back(&mut self, amount: u64) {
        debug_assert!(amount <= self.held, "more is returned than held");
        self.held = self.held.saturating_sub(amount);
    }

    /// The held amount.
    pub const fn held(self) -> u64 {
        self.held
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_overdraw_by_one_request_at_most() {
        let (limit, overdraw) = (1_000, Overdraw::OnEntry);
        let mut pool = Pool::default();
        assert!(pool.admits(500, limit, overdraw));
        pool.take(500);
        assert!(pool.admits(600, limit, overdraw));
        pool.take(600);
        assert!(!pool.admits(100, limit, overdraw), "1,100 of 1,000 are held");
        pool.give_back(500);
        assert!(pool.admits(100, limit, overdraw));
    }

    #[test]
    fn any_size_is_admitted_at_a_balance_of_zero() {
        let mut pool = Pool::default();
        pool.take(1_000);
        assert!(pool.admits(1_000_000_000, 1_000, Overdraw::OnEntry));
        pool.take(1_000_000_000);
        assert_eq!(pool.held(), 1_000_001_000);
        assert!(!pool.admits(0, 1_000, Overdraw::OnEntry));
    }

    #[test]
    fn a_shrunk_pool_admits_once_enough_is_given_back() {
        let mut pool = Pool::default();
        pool.take(8);
        for held in (2..8).rev() {
            pool.give_back(1);
            assert!(!pool.admits(1, 2, Overdraw::Never), "{held} of 2 slots are held");
        }
        pool.give_back(1);
        assert!(pool.admits(1, 2, Overdraw::Never));
    }
}
