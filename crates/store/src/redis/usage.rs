//! The stored form of usage: totals per minute, and corrections for hours, days and months.
//!
//! A settle adds to the minute of its draw only, so that a window more costs it nothing. The others are the
//! sums of the stored values of shorter windows and of their own correction. A pruned minute is added to the
//! correction of its hour, and a pruned hour to those of its day and month. The correction of a pruned window
//! subtracts what is stored for shorter ones, so that only later usage counts.

use std::collections::BTreeMap;

use tidegate_core::limit::usage::{Tally, Window};
use tidegate_core::time::Stamp;

use super::lua_codec::{Packer, Unpacker, to_signed_double};
use crate::error::StoreError;

/// Units, own units and leases. A correction may be negative.
type Sums = [i64; 3];

/// The usage of one subject.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct UsageTallies {
    /// By window, start and limit: totals of minutes, and corrections of the others.
    stored: BTreeMap<(Window, Stamp, String), Sums>,
}

impl UsageTallies {
    /// Decodes the fields of a hash.
    pub(super) fn read<'a>(fields: impl Iterator<Item = (&'a [u8], &'a [u8])>) -> Result<Self, StoreError> {
        let mut stored = BTreeMap::new();
        for (field, value) in fields {
            let (window, start) = read_field(field)?;
            let mut read = Unpacker::new(value, "a line of usage");
            while !read.is_empty() {
                let limit = read.text()?.to_owned();
                stored.insert((window, start, limit), [read.signed()?, read.signed()?, read.signed()?]);
            }
        }
        Ok(Self { stored })
    }

    /// The sums of a window, by limit and start. A line without leases is empty.
    fn sums(&self, window: Window) -> BTreeMap<(&str, Stamp), Sums> {
        let mut sums: BTreeMap<(&str, Stamp), Sums> = BTreeMap::new();
        for ((of, start, limit), stored) in &self.stored {
            if counts_in(*of, window) {
                add(sums.entry((limit, window.around(*start).start)).or_default(), *stored);
            }
        }
        sums.retain(|_, sums| sums[2] > 0);
        sums
    }

    /// The lines of a window, by limit and start.
    pub(super) fn lines(&self, window: Window) -> BTreeMap<(&str, Stamp), Tally> {
        let tally = |[units, own, leases]: Sums| {
            let count = |sum: i64| u64::try_from(sum).unwrap_or(0);
            Tally { units: count(units), own: count(own), leases: count(leases) }
        };
        self.sums(window).into_iter().map(|(line, sums)| (line, tally(sums))).collect()
    }

    /// Deletes up to `max` lines of a window that ended at `before` or earlier, and returns how many.
    pub(super) fn prune(&mut self, window: Window, before: Stamp, max: usize) -> usize {
        let sums = self.sums(window).into_iter();
        let old = sums.filter(|((_, start), _)| window.around(*start).end <= before);
        let mut old: Vec<_> = old.map(|((limit, start), sums)| (start, limit.to_owned(), sums)).collect();
        old.sort();
        old.truncate(max);
        let longer: &[Window] = match window {
            Window::Minute => &[Window::Hour],
            Window::Hour => &[Window::Day, Window::Month],
            Window::Day | Window::Month => &[],
        };
        for (start, limit, sums) in &old {
            let left = sums.map(|sum| -sum);
            add(self.stored.entry((window, *start, limit.clone())).or_default(), left);
            for longer in longer {
                let key = (*longer, longer.around(*start).start, limit.clone());
                add(self.stored.entry(key).or_default(), *sums);
            }
        }
        self.stored.retain(|_, sums| *sums != Sums::default());
        old.len()
    }

    /// Encodes the fields of the hash.
    pub(super) fn fields(&self) -> BTreeMap<String, Vec<u8>> {
        let mut fields: BTreeMap<String, Packer> = BTreeMap::new();
        for ((window, start, limit), sums) in &self.stored {
            let packed = fields.entry(field(*window, *start)).or_default().text(limit);
            for sum in sums {
                packed.double(to_signed_double(*sum));
            }
        }
        fields.into_iter().map(|(field, packed)| (field, packed.0.into_vec())).collect()
    }
}

/// Whether a field has lines of a window that ended at `before` or earlier. One that cannot be read has none:
/// reading it reports the error.
pub(super) fn is_old(field: &[u8], window: Window, before: Stamp) -> bool {
    let is_old = |(of, start): (Window, Stamp)| counts_in(of, window) && window.around(start).end <= before;
    read_field(field).is_ok_and(is_old)
}

/// Whether what is stored for `of` counts in the sum of `window`.
fn counts_in(of: Window, window: Window) -> bool {
    match window {
        Window::Minute => of == Window::Minute,
        Window::Hour => matches!(of, Window::Minute | Window::Hour),
        Window::Day | Window::Month => of == window || matches!(of, Window::Minute | Window::Hour),
    }
}

fn add(sums: &mut Sums, more: Sums) {
    for (sum, more) in sums.iter_mut().zip(more) {
        *sum = sum.saturating_add(more);
    }
}

/// The name of a field: the start in seconds, after a letter for all but hours.
fn field(window: Window, start: Stamp) -> String {
    let letter = match window {
        Window::Minute => "n",
        Window::Hour => "",
        Window::Day => "d",
        Window::Month => "m",
    };
    format!("{letter}{}", start.as_micros() / 1_000_000)
}

fn read_field(field: &[u8]) -> Result<(Window, Stamp), StoreError> {
    let (window, seconds) = match field {
        [b'n', rest @ ..] => (Window::Minute, rest),
        [b'd', rest @ ..] => (Window::Day, rest),
        [b'm', rest @ ..] => (Window::Month, rest),
        rest => (Window::Hour, rest),
    };
    let seconds = std::str::from_utf8(seconds).ok().and_then(|text| text.parse().ok());
    let corrupt = || StoreError::Corrupt { what: format!("usage of the window `{}`", field.escape_ascii()) };
    Ok((window, Stamp::from_secs(seconds.ok_or_else(corrupt)?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 2027-01-15T08:00:00Z.
    const HOUR: u64 = 1_800_000_000;

    fn tallies() -> UsageTallies {
        let line = |limit: &str, units: f64| {
            let mut packed = Packer::default();
            packed.text(limit).double(units).double(units).double(1.0);
            packed.0
        };
        let fields = [
            ((HOUR).to_string(), [line("rpm", 1.0), line("tpm", 10.0)].concat()),
            ((HOUR + 3_600).to_string(), line("tpm", 5.0).into_vec()),
            ((HOUR + 86_400).to_string(), line("tpm", 7.0).into_vec()),
        ];
        UsageTallies::read(fields.iter().map(|(field, value)| (field.as_bytes(), &value[..]))).unwrap()
    }

    fn units(tallies: &UsageTallies, window: Window) -> Vec<(String, u64)> {
        tallies.lines(window).iter().map(|((limit, _), tally)| ((*limit).to_owned(), tally.units)).collect()
    }

    fn named(units: &[(&str, u64)]) -> Vec<(String, u64)> {
        units.iter().map(|(limit, units)| ((*limit).to_owned(), *units)).collect()
    }

    #[test]
    fn days_and_months_are_the_sums_of_their_hours() {
        let tallies = tallies();
        assert_eq!(units(&tallies, Window::Hour), named(&[("rpm", 1), ("tpm", 10), ("tpm", 5), ("tpm", 7)]));
        assert_eq!(units(&tallies, Window::Day), named(&[("rpm", 1), ("tpm", 15), ("tpm", 7)]));
        assert_eq!(units(&tallies, Window::Month), named(&[("rpm", 1), ("tpm", 22)]));
        let fields = tallies.fields();
        let read = UsageTallies::read(fields.iter().map(|(field, value)| (field.as_bytes(), &value[..])));
        assert_eq!(read.unwrap(), tallies);
    }

    #[test]
    fn pruned_window_keeps_the_other_windows() {
        let mut hours = tallies();
        assert_eq!(hours.prune(Window::Hour, Stamp::from_secs(HOUR + 3_600), 9), 2);
        assert_eq!(units(&hours, Window::Hour), named(&[("tpm", 5), ("tpm", 7)]));
        assert_eq!(units(&hours, Window::Month), named(&[("rpm", 1), ("tpm", 22)]));
        let mut days = tallies();
        let end = Window::Day.around(Stamp::from_secs(HOUR)).end;
        assert_eq!((days.prune(Window::Day, end, 1), days.prune(Window::Day, end, 9)), (1, 1));
        assert_eq!(units(&days, Window::Day), named(&[("tpm", 7)]));
        assert_eq!(units(&days, Window::Hour).len(), 4);
        assert_eq!(units(&days, Window::Month), named(&[("rpm", 1), ("tpm", 22)]));
        // Hours that are pruned after their day do not restore it.
        days.prune(Window::Hour, Stamp::MAX, 99);
        assert_eq!(units(&days, Window::Day), named(&[("tpm", 7)]));
    }
}
