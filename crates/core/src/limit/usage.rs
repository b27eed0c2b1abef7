//! Usage: settled units by minute, hour, day and month of the draw.

use std::ops::Range;

use crate::calendar;
use crate::limit::name::{LimitName, Subject};
use crate::time::Stamp;

const MINUTE: u64 = 60;
const HOUR: u64 = 3_600;
const DAY: u64 = 86_400;

/// The length of a usage window. Engines store the number of the variant, so that it never changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Window {
    /// One hour, UTC.
    Hour = 0,
    /// One day, UTC.
    Day = 1,
    /// One calendar month, UTC.
    Month = 2,
    /// One minute, UTC.
    Minute = 3,
}

impl Window {
    /// All windows, the shortest first.
    pub const ALL: [Self; 4] = [Self::Minute, Self::Hour, Self::Day, Self::Month];

    /// The window that contains `at`.
    pub fn around(self, at: Stamp) -> Range<Stamp> {
        let seconds = at.as_micros() / 1_000_000;
        let (start, end) = match self {
            Self::Minute => (seconds / MINUTE * MINUTE, (seconds / MINUTE + 1) * MINUTE),
            Self::Hour => (seconds / HOUR * HOUR, (seconds / HOUR + 1) * HOUR),
            Self::Day => (seconds / DAY * DAY, (seconds / DAY + 1) * DAY),
            Self::Month => {
                let today = seconds / DAY;
                let date = calendar::date(today);
                let first = today - (date.day - 1);
                (first * DAY, (first + calendar::days_in(date.year, date.month)) * DAY)
            }
        };
        Stamp::from_secs(start)..Stamp::from_secs(end)
    }
}

/// The usage within a window.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    /// Units settled, those of children that cascade included.
    pub units: u64,
    /// Units settled by the subject's own leases. Summed over all subjects, each unit counts once.
    pub own: u64,
    /// Leases settled, those of children that cascade included.
    pub leases: u64,
}

impl Tally {
    /// Adds another tally.
    pub const fn add(&mut self, more: Self) {
        self.units = self.units.saturating_add(more.units);
        self.own = self.own.saturating_add(more.own);
        self.leases = self.leases.saturating_add(more.leases);
    }
}

/// A line of a usage report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Usage {
    /// The subject.
    pub subject: Subject,
    /// The limit.
    pub limit: LimitName,
    /// The length of the window.
    pub window: Window,
    /// The start of the window.
    pub start: Stamp,
    /// The usage.
    pub tally: Tally,
}

/// The usage of one limit of one subject, for engines that keep it in memory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Windows {
    /// The newest counted minute with its hour, day and month, which nearly all additions go to.
    newest: [WindowCount; 4],
    past: [Vec<WindowCount>; 4],
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct WindowCount {
    start: Stamp,
    /// [`Stamp::ZERO`] before anything was counted.
    end: Stamp,
    tally: Tally,
}

impl WindowCount {
    /// Whether anything was counted. Every lease adds at least one to `leases`.
    fn is_used(&self) -> bool {
        self.tally != Tally::default()
    }
}

/// The number of hours, days, months and minutes retained; the oldest are dropped first.
const RETAINED: [usize; 4] = [24 * 62, 800, 240, 24 * 60];

impl Windows {
    /// Adds the usage of a lease drawn at `at` to its minute, hour, day and month.
    #[inline]
    pub fn add(&mut self, at: Stamp, tally: Tally) {
        let minute = &self.newest[Window::Minute as usize];
        if minute.start <= at && at < minute.end {
            for newest in &mut self.newest {
                newest.tally.add(tally);
            }
        } else {
            for window in Window::ALL {
                self.add_to(window, at, tally);
            }
        }
    }

    #[cold]
    fn add_to(&mut self, window: Window, at: Stamp, tally: Tally) {
        let (newest, past) = (&mut self.newest[window as usize], &mut self.past[window as usize]);
        if newest.start <= at && at < newest.end {
            newest.tally.add(tally);
            return;
        }
        let Range { start, end } = window.around(at);
        let counted = WindowCount { start, end, tally };
        if at >= newest.end {
            let before = std::mem::replace(newest, counted);
            if before.is_used() {
                past.push(before);
            }
        } else {
            let place = past.partition_point(|counted| counted.end <= at);
            match past.get_mut(place) {
                Some(found) if found.start <= at => found.tally.add(tally),
                _ => past.insert(place, counted),
            }
        }
        if past.len() >= RETAINED[window as usize] {
            past.remove(0);
        }
    }

    /// Adds all windows of another.
    pub fn absorb(&mut self, other: &Self) {
        for window in Window::ALL {
            for (start, tally) in other.within(window, &(Stamp::ZERO..Stamp::MAX)) {
                self.add_to(window, start, tally);
            }
        }
        self.align();
    }

    /// Moves newest windows to the past that are not in the newest of the next longer ones. Minutes are kept for
    /// less time than hours, so another's newest hour may come without its minutes.
    fn align(&mut self) {
        for (short, long) in
            [(Window::Day, Window::Month), (Window::Hour, Window::Day), (Window::Minute, Window::Hour)]
        {
            let WindowCount { start, end, .. } = self.newest[long as usize];
            let newest = &mut self.newest[short as usize];
            if !(start..end).contains(&newest.start) {
                let none = WindowCount { start, end: start, tally: Tally::default() };
                let before = std::mem::replace(newest, none);
                if before.is_used() {
                    self.past[short as usize].push(before);
                }
            }
        }
    }

    /// The windows that begin in `range`, the oldest first.
    pub fn within(&self, window: Window, range: &Range<Stamp>) -> impl Iterator<Item = (Stamp, Tally)> {
        let (newest, past) = (&self.newest[window as usize], &self.past[window as usize]);
        let from = past.partition_point(|counted| counted.start < range.start);
        let all = past[from..].iter().chain([newest]).filter(|counted| counted.is_used());
        let range = range.clone();
        all.filter(move |counted| range.contains(&counted.start))
            .map(|counted| (counted.start, counted.tally))
    }

    /// Removes the windows that ended at `before` or earlier, and returns their number.
    pub fn prune(&mut self, window: Window, before: Stamp) -> usize {
        let (newest, past) = (&mut self.newest[window as usize], &mut self.past[window as usize]);
        let mut count = past.partition_point(|counted| counted.end <= before);
        past.drain(..count);
        past.shrink_to_fit();
        if newest.end <= before && newest.is_used() {
            // Keep the span, so that the newest windows stay aligned.
            newest.tally = Tally::default();
            count += 1;
        }
        count
    }

    /// Whether nothing was ever counted.
    pub fn is_empty(&self) -> bool {
        self.newest[0].end == Stamp::ZERO
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// 2024-02-29T13:45:10Z.
    const LEAP: Stamp = Stamp::from_secs(1_709_214_310);

    #[test]
    fn windows_begin_and_end_with_the_calendar() {
        let shown = |window: Window, at| {
            let Range { start, end } = window.around(at);
            (start.to_string(), end.to_string())
        };
        let expect = |start: &str, end: &str| (start.to_owned(), end.to_owned());
        assert_eq!(shown(Window::Minute, LEAP), expect("2024-02-29T13:45:00Z", "2024-02-29T13:46:00Z"));
        assert_eq!(shown(Window::Hour, LEAP), expect("2024-02-29T13:00:00Z", "2024-02-29T14:00:00Z"));
        assert_eq!(shown(Window::Day, LEAP), expect("2024-02-29T00:00:00Z", "2024-03-01T00:00:00Z"));
        assert_eq!(shown(Window::Month, LEAP), expect("2024-02-01T00:00:00Z", "2024-03-01T00:00:00Z"));
        let december = Stamp::from_secs(1_735_689_599);
        assert_eq!(shown(Window::Month, december), expect("2024-12-01T00:00:00Z", "2025-01-01T00:00:00Z"));
    }

    #[test]
    fn late_settlement_counts_in_the_window_of_the_draw() {
        let mut windows = Windows::default();
        assert!(windows.is_empty());
        let tally = Tally { units: 5, own: 5, leases: 1 };
        let hour = |hours: u64| Stamp::from_secs(1_709_214_310 + hours * HOUR);
        for hours in [0, 3, 1, 0, 3] {
            windows.add(hour(hours), tally);
        }
        let all = Stamp::ZERO..Stamp::MAX;
        let hours: Vec<u64> = windows.within(Window::Hour, &all).map(|(_, tally)| tally.units).collect();
        assert_eq!(hours, [10, 5, 10]);
        let months: Vec<Tally> = windows.within(Window::Month, &all).map(|(_, tally)| tally).collect();
        assert_eq!(months, [Tally { units: 25, own: 25, leases: 5 }]);
        let first = Window::Hour.around(hour(1));
        let range = first.start..first.end;
        assert_eq!(windows.within(Window::Hour, &range).count(), 1);
    }

    #[test]
    fn absorb_adds_all_windows_of_another() {
        let tally = Tally { units: 5, own: 5, leases: 1 };
        let (mut one, mut other, mut both) = (Windows::default(), Windows::default(), Windows::default());
        for hours in [0, 3, 30] {
            one.add(Stamp::from_secs(1_709_214_310 + hours * HOUR), tally);
            both.add(Stamp::from_secs(1_709_214_310 + hours * HOUR), tally);
        }
        for hours in [1, 3, 900] {
            other.add(Stamp::from_secs(1_709_214_310 + hours * HOUR), tally);
            both.add(Stamp::from_secs(1_709_214_310 + hours * HOUR), tally);
        }
        one.absorb(&other);
        let all = Stamp::ZERO..Stamp::MAX;
        for window in Window::ALL {
            assert!(one.within(window, &all).eq(both.within(window, &all)), "{window:?}");
        }
        // The newest windows are aligned, so that a new addition counts in all of them.
        one.add(Stamp::from_secs(1_709_214_310 + 900 * HOUR), tally);
        assert_eq!(one.within(Window::Month, &all).map(|(_, tally)| tally.units).sum::<u64>(), 35);
    }

    #[test]
    fn late_addition_after_absorb_counts_in_its_day() {
        let tally = Tally { units: 5, own: 5, leases: 1 };
        let (first, third) = (LEAP, LEAP + Duration::from_secs(48 * HOUR));
        let (mut one, mut other) = (Windows::default(), Windows::default());
        one.add(first, tally);
        other.add(third, tally);
        other.prune(Window::Minute, third + Duration::from_secs(HOUR));
        one.absorb(&other);
        one.add(first, tally);
        let all = Stamp::ZERO..Stamp::MAX;
        for (window, units) in
            [(Window::Minute, vec![10]), (Window::Hour, vec![10, 5]), (Window::Day, vec![10, 5])]
        {
            let counted: Vec<u64> = one.within(window, &all).map(|(_, tally)| tally.units).collect();
            assert_eq!(counted, units, "{window:?}");
        }
    }

    #[test]
    fn pruned_windows_count_later_additions_anew() {
        let tally = Tally { units: 5, own: 5, leases: 1 };
        let hour = |hours: u64| Stamp::from_secs(1_709_214_310 + hours * HOUR);
        let all = Stamp::ZERO..Stamp::MAX;
        let units = |windows: &Windows, window| -> Vec<u64> {
            windows.within(window, &all).map(|(_, tally)| tally.units).collect()
        };
        let mut windows = Windows::default();
        for hours in [0, 1, 1, 3] {
            windows.add(hour(hours), tally);
        }
        let end = Window::Hour.around(hour(1)).end;
        assert_eq!(windows.prune(Window::Hour, Stamp::from_micros(end.as_micros() - 1)), 1);
        assert_eq!(units(&windows, Window::Hour), [10, 5]);
        assert_eq!((windows.prune(Window::Hour, end), windows.prune(Window::Hour, end)), (1, 0));
        assert_eq!((units(&windows, Window::Hour), units(&windows, Window::Day)), (vec![5], vec![20]));
        // The newest day is pruned and its hour stays: a late settlement counts in both.
        assert_eq!(windows.prune(Window::Day, Window::Day.around(hour(3)).end), 1);
        assert_eq!(windows.prune(Window::Day, Stamp::MAX), 0);
        assert_eq!((units(&windows, Window::Day), units(&windows, Window::Month)), (vec![], vec![20]));
        windows.add(hour(3), tally);
        assert_eq!((units(&windows, Window::Hour), units(&windows, Window::Day)), (vec![10], vec![5]));
        assert_eq!(windows.prune(Window::Day, Stamp::MAX), 1);
        windows.add(hour(48), tally);
        windows.add(hour(1), tally);
        assert_eq!(
            (units(&windows, Window::Hour), units(&windows, Window::Day)),
            (vec![5, 10, 5], vec![5, 5])
        );
        assert!(Window::ALL.into_iter().all(|window| windows.prune(window, Stamp::MAX) > 0));
        assert!(Window::ALL.into_iter().all(|window| units(&windows, window).is_empty()));
    }

    #[test]
    fn oldest_windows_are_dropped_first() {
        let mut windows = Windows::default();
        for hours in 0..24 * 63 {
            windows.add(Stamp::from_secs(hours * HOUR), Tally { units: 1, own: 0, leases: 1 });
        }
        let all = Stamp::ZERO..Stamp::MAX;
        assert_eq!(windows.within(Window::Hour, &all).count(), 24 * 62);
        assert_eq!(windows.within(Window::Hour, &all).next().unwrap().0, Stamp::from_secs(24 * HOUR));
        assert_eq!(windows.within(Window::Day, &all).count(), 63);
    }
}
