//! The data of a chart: a panel per limit, since units differ, with a series per entity or resource.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

use tidegate::{Stamp, Subject, Usage, UsageQuery, Window};

use super::{owner, series_name};
use crate::codec;
use crate::failure::Failure;
use crate::format;

/// Maximum windows that a large picture can resolve.
const WINDOWS_MAX: usize = 10_000;
/// Maximum series per panel; the others are counted.
pub(crate) const SERIES_MAX: usize = 8;
/// Maximum panels; the others are counted.
pub(crate) const PANELS_MAX: usize = 16;

/// Usage, ready to be rendered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Chart {
    /// The owner of the usage, in words.
    pub(crate) owner: String,
    pub(crate) window: Window,
    /// Start of each window, without gaps.
    pub(crate) starts: Vec<Stamp>,
    pub(crate) panels: Vec<Panel>,
    /// Number of limits that are not drawn.
    pub(crate) left_out: usize,
}

/// One limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Panel {
    pub(crate) limit: String,
    /// The series, by usage in descending order.
    pub(crate) series: Vec<Series>,
    /// Number of series that are not drawn.
    pub(crate) left_out: usize,
    /// The units that its limits refill in a window, in ascending order.
    pub(crate) refills: Vec<u64>,
}

/// The usage of a limit by one entity or resource.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Series {
    pub(crate) limit: String,
    /// Its name, escaped for display.
    pub(crate) name: String,
    /// The subject that drew.
    pub(crate) subject: Option<Subject>,
    /// Units by window.
    pub(crate) units: Vec<u64>,
    /// The number of its colour, below [`SERIES_MAX`]. One name has one colour in all panels.
    pub(crate) colour: usize,
}

impl Series {
    pub(crate) fn total(&self) -> u64 {
        self.units.iter().fold(0, |sum, units| sum.saturating_add(*units))
    }

    pub(crate) fn most(&self) -> u64 {
        self.units.iter().copied().max().unwrap_or_default()
    }
}

impl Panel {
    pub(crate) fn most(&self) -> u64 {
        self.series.iter().map(Series::most).max().unwrap_or_default()
    }
}

impl Chart {
    /// A chart of this usage; `None` if there is none.
    pub(crate) fn new(query: &UsageQuery, lines: &[Usage]) -> Result<Option<Self>, Failure> {
        let starts =
            match (lines.iter().map(|line| line.start).min(), lines.iter().map(|line| line.start).max()) {
                (Some(first), Some(last)) => starts(query, first, last)?,
                _ => return Ok(None),
            };
        // Totals first, so that only the largest series are allocated: each is as long as the number of
        // windows.
        let mut limits: BTreeMap<&str, BTreeMap<&str, u64>> = BTreeMap::new();
        let drawn = || lines.iter().filter_map(|line| Some((line, starts.binary_search(&line.start).ok()?)));
        for (line, _) in drawn() {
            let totals = limits.entry(line.limit.as_str()).or_default();
            let total = totals.entry(series_name(&query.of, line)).or_default();
            *total = total.saturating_add(line.tally.units);
        }
        let left_out = limits.len().saturating_sub(PANELS_MAX);
        let mut places = BTreeMap::new();
        let mut panels = Vec::new();
        for (limit, totals) in limits.into_iter().take(PANELS_MAX) {
            let chosen = most(totals);
            for (index, name) in chosen.names.iter().enumerate() {
                places.insert((limit, *name), (panels.len(), index));
            }
            panels.push(chosen.panel(limit, starts.len()));
        }
        for (line, window) in drawn() {
            if let Some((panel, index)) = places.get(&(line.limit.as_str(), series_name(&query.of, line))) {
                let series = &mut panels[*panel].series[*index];
                series.subject.get_or_insert_with(|| line.subject.clone());
                let units = &mut series.units[window];
                *units = units.saturating_add(line.tally.units);
            }
        }
        colour(&mut panels);
        Ok(Some(Self { owner: owner(&query.of), window: query.window, starts, panels, left_out }))
    }

    pub(crate) fn all_series(&self) -> Vec<&Series> {
        self.panels.iter().flat_map(|panel| &panel.series).collect()
    }

    /// Number of series that are not drawn, of the limits that are.
    pub(crate) fn series_left_out(&self) -> usize {
        self.panels.iter().map(|panel| panel.left_out).sum()
    }

    /// The units that a limit refills in the last window.
    pub(crate) fn refill(&self, amount: u64, period: Duration) -> u64 {
        let Some(start) = self.starts.last() else { return 0 };
        let window = self.window.around(*start);
        let micros = window.end.since(window.start).as_micros();
        let units = u128::from(amount) * micros / period.as_micros().max(1);
        u64::try_from(units).unwrap_or(u64::MAX)
    }

    /// The word for a window.
    pub(crate) const fn each(&self) -> &'static str {
        codec::window(self.window)
    }
}

/// The series of a limit that are drawn.
struct Chosen<'a> {
    names: Vec<&'a str>,
    left_out: usize,
}

/// Selects the largest totals. Ties are in order of name, as in the map.
fn most(totals: BTreeMap<&str, u64>) -> Chosen<'_> {
    let mut totals: Vec<(&str, u64)> = totals.into_iter().collect();
    totals.sort_by_key(|(_, total)| Reverse(*total));
    let left_out = totals.len().saturating_sub(SERIES_MAX);
    Chosen { names: totals.into_iter().take(SERIES_MAX).map(|(name, _)| name).collect(), left_out }
}

impl Chosen<'_> {
    /// A panel of these series, with zero usage.
    fn panel(&self, limit: &str, windows: usize) -> Panel {
        let limit = format::escape(limit);
        let series = |name: &&str| Series {
            limit: limit.clone(),
            name: format::escape(name),
            subject: None,
            units: vec![0; windows],
            colour: 0,
        };
        let series = self.names.iter().map(series).collect();
        Panel { limit, series, left_out: self.left_out, refills: Vec::new() }
    }
}

/// Gives each name a colour, in the order of panels and usage. With more names than colours, names of different panels
/// share one; names of one panel do not.
fn colour(panels: &mut [Panel]) {
    let mut colours: BTreeMap<String, usize> = BTreeMap::new();
    let mut used = [0_usize; SERIES_MAX];
    for panel in panels {
        let mut is_taken = [false; SERIES_MAX];
        let (known, new): (Vec<_>, Vec<_>) =
            panel.series.iter_mut().partition(|series| colours.contains_key(&series.name));
        for series in known.into_iter().chain(new) {
            let known = colours.get(&series.name).copied().filter(|colour| !is_taken[*colour]);
            let free =
                || (0..SERIES_MAX).filter(|colour| !is_taken[*colour]).min_by_key(|colour| used[*colour]);
            let colour = known.or_else(free).unwrap_or(0);
            colours.entry(series.name.clone()).or_insert(colour);
            (series.colour, is_taken[colour]) = (colour, true);
            used[colour] += 1;
        }
    }
}

/// Every window of the requested range, or of the range with usage where the request is open.
fn starts(query: &UsageQuery, first: Stamp, last: Stamp) -> Result<Vec<Stamp>, Failure> {
    let range = &query.range;
    let first = if range.start > Stamp::ZERO { range.start.min(first) } else { first };
    let mut next = query.window.around(first).start;
    if next < range.start {
        next = query.window.around(first).end;
    }
    let until = if range.end < Stamp::MAX { range.end } else { query.window.around(last).end };
    let mut starts = Vec::new();
    while next < until {
        if starts.len() == WINDOWS_MAX {
            let what = format!("there are more than {WINDOWS_MAX} windows to plot");
            return Err(
                Failure::usage(what).next("choose fewer with --since and --until, or a longer --window")
            );
        }
        starts.push(next);
        next = query.window.around(next).end;
    }
    Ok(starts)
}

#[cfg(test)]
pub(crate) mod tests {
    use tidegate::{EntityId, LimitName, Tally, UsageOf};

    use super::*;

    pub(crate) fn line(resource: &str, limit: &str, window: Window, start: &str, units: u64) -> Usage {
        Usage {
            subject: Subject::new("acme", resource).unwrap(),
            limit: LimitName::new(limit).unwrap(),
            window,
            start: start.parse().unwrap(),
            tally: Tally { units, own: units, leases: 1 },
        }
    }

    pub(crate) fn query(window: Window) -> UsageQuery {
        let of = UsageOf::Entity(EntityId::new("acme").unwrap());
        UsageQuery { of, window, range: Stamp::ZERO..Stamp::MAX }
    }

    #[test]
    fn gaps_are_zeros_and_limits_are_panels() {
        let hour = |resource, limit, hour: u64, units| {
            line(resource, limit, Window::Hour, &format!("2026-01-31T{hour:02}:00:00Z"), units)
        };
        let lines = [
            hour("gpt", "tpm", 9, 5),
            hour("gpt", "tpm", 12, 7),
            hour("img", "tpm", 10, 90),
            hour("gpt", "rpm", 9, 1),
        ];
        let chart = Chart::new(&query(Window::Hour), &lines).unwrap().unwrap();
        assert_eq!(
            chart.starts.iter().map(ToString::to_string).collect::<Vec<_>>().join(" "),
            "2026-01-31T09:00:00Z 2026-01-31T10:00:00Z 2026-01-31T11:00:00Z 2026-01-31T12:00:00Z"
        );
        let names: Vec<_> = chart
            .all_series()
            .iter()
            .map(|series| (series.limit.clone(), series.name.clone(), series.units.clone()))
            .collect();
        assert_eq!(
            names,
            [
                ("rpm".into(), "gpt".into(), vec![1, 0, 0, 0]),
                ("tpm".into(), "img".into(), vec![0, 90, 0, 0]),
                ("tpm".into(), "gpt".into(), vec![5, 0, 0, 7]),
            ]
        );
    }

    #[test]
    fn name_has_one_colour_in_all_panels() {
        let day =
            |name: &str, limit: &str, units| line(name, limit, Window::Day, "2026-01-31T00:00:00Z", units);
        // The order of usage differs by panel, and more names than colours are drawn.
        let lines: Vec<_> = (0..8)
            .map(|at| day(&format!("r{at}"), "a", at))
            .chain((4..12).map(|at| day(&format!("r{at}"), "b", 100 - at)))
            .collect();
        let chart = Chart::new(&query(Window::Day), &lines).unwrap().unwrap();
        let [first, second] = &chart.panels[..] else { panic!("two limits") };
        for panel in [first, second] {
            let mut colours: Vec<_> = panel.series.iter().map(|series| series.colour).collect();
            colours.sort_unstable();
            assert_eq!(colours, [0, 1, 2, 3, 4, 5, 6, 7]);
        }
        for series in &second.series {
            let same = first.series.iter().find(|other| other.name == series.name);
            assert!(same.is_none_or(|same| same.colour == series.colour), "{series:?}");
        }
    }

    #[test]
    fn requested_range_is_drawn_in_full() {
        let query_with_range = UsageQuery {
            range: "2026-01-30T00:00:00Z".parse().unwrap().."2026-02-02T00:00:00Z".parse().unwrap(),
            ..query(Window::Day)
        };
        let lines = [line("gpt", "rpm", Window::Day, "2026-01-31T00:00:00Z", 3)];
        let chart = Chart::new(&query_with_range, &lines).unwrap().unwrap();
        assert_eq!(chart.panels[0].series[0].units, [0, 3, 0]);
        assert!(Chart::new(&query_with_range, &[]).unwrap().is_none());
    }

    #[test]
    fn excess_series_are_counted_and_windows_refused() {
        let many: Vec<Usage> = (0..20)
            .map(|at| line(&format!("r{at:02}"), "rpm", Window::Day, "2026-01-31T00:00:00Z", at))
            .collect();
        let chart = Chart::new(&query(Window::Day), &many).unwrap().unwrap();
        assert_eq!((chart.panels[0].series.len(), chart.panels[0].left_out), (SERIES_MAX, 12));
        assert_eq!(chart.panels[0].series[0].name, "r19");
        let (few, many) = (line("few", "rpm", Window::Day, "2026-01-31T00:00:00Z", 1), many);
        let chosen = most(
            many.iter()
                .chain([&few])
                .map(|line| (line.subject.resource.as_str(), line.tally.units))
                .collect(),
        );
        let panel = chosen.panel("rpm", 10_000);
        let allocated: usize = panel.series.iter().map(|series| series.units.len()).sum();
        assert_eq!(
            (allocated, panel.left_out),
            (SERIES_MAX * 10_000, 13),
            "series that are not drawn are not allocated"
        );
        let far = ["1970-01-01T00:00:00Z", "2026-01-31T00:00:00Z"]
            .map(|start| line("r", "rpm", Window::Hour, start, 1));
        let error = Chart::new(&query(Window::Hour), &far).unwrap_err();
        assert_eq!(error.what, "there are more than 10000 windows to plot");
    }
}
