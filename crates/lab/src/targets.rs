//! Targets of `auto` per scenario, and the benchmark rows that compare scores with them.

use crate::score::Score;
use crate::strategy::Strategy;

/// One comparison of the benchmark.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Row {
    /// The scenario and the measure, such as `R50.goodput`.
    pub name: String,
    /// The measure of `auto`.
    pub ours: f64,
    /// The value it is compared with: the capacity or the bound; without a bound, the best or largest
    /// possible value.
    pub peer: f64,
    /// `ours ÷ peer`.
    pub ratio: f64,
    /// The bound of the ratio; `None` if the row is only reported.
    pub target: Option<f64>,
    /// Whether the ratio is within its bound.
    pub met: Option<bool>,
    /// Whether the target is a minimum; otherwise it is a maximum.
    pub is_at_least: bool,
    /// The unit of `ours` and `peer`.
    pub unit: &'static str,
    /// A short description of the comparison.
    pub what: &'static str,
}

/// The measure of a target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Measure {
    Goodput,
    Rejected,
    Jain,
    /// Settling time from the start.
    StartS,
    /// Settling time from the first change of the limit, a rise.
    UpS,
    /// Settling time from the second change of the limit, a fall.
    DownS,
    P99S,
    WaitMs,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Bound {
    /// At least or at most this, in the measure's unit.
    Fixed(f64),
    /// At most this multiple of the oracle's value.
    Oracle(f64),
    /// Only reported.
    Reported,
}

use Bound::{Fixed, Oracle, Reported};
use Measure::{DownS, Goodput, Jain, P99S, Rejected, StartS, UpS, WaitMs};

type Targets = (&'static str, &'static [(Measure, Bound)]);

const TARGETS: &[Targets] = &[
    ("R0.2", &[(Goodput, Fixed(0.95)), (Rejected, Fixed(1.7))]),
    ("R2", &[(Goodput, Fixed(0.98)), (Rejected, Fixed(1.2))]),
    ("R20", &[(Goodput, Fixed(0.99)), (Rejected, Fixed(1.0))]),
    ("R50", &[(Goodput, Fixed(0.99)), (Rejected, Fixed(1.0))]),
    ("R500", &[(Goodput, Fixed(0.99)), (Rejected, Fixed(0.2))]),
    ("R5000", &[(Goodput, Fixed(0.99)), (Rejected, Fixed(0.2))]),
    ("R50b1", &[(Goodput, Fixed(0.95))]),
    ("R50+RA", &[(Goodput, Fixed(0.99))]),
    ("R50+RA10x", &[(Goodput, Fixed(0.97))]),
    ("R50burn", &[(Goodput, Fixed(0.97)), (Rejected, Fixed(2.2))]),
    ("R2+hdr60", &[(Goodput, Fixed(0.98)), (Rejected, Fixed(0.2)), (Jain, Fixed(0.97))]),
    ("R50+hdr1", &[(Goodput, Fixed(0.98)), (Rejected, Fixed(0.2)), (Jain, Fixed(0.97))]),
    ("R50+hdr60", &[(Goodput, Fixed(0.98)), (Rejected, Fixed(0.2)), (Jain, Fixed(0.97))]),
    ("R5000+hdr60", &[(Goodput, Fixed(0.98)), (Rejected, Fixed(0.2)), (Jain, Fixed(0.97))]),
    ("N4R50+hdr60", &[(Goodput, Fixed(0.98)), (Rejected, Fixed(0.2)), (Jain, Fixed(0.97))]),
    ("N16R50+hdr60", &[(Goodput, Fixed(0.98)), (Rejected, Fixed(0.2)), (Jain, Fixed(0.97))]),
    ("N16R500+hdr1", &[(Jain, Fixed(0.88))]),
    ("W1200/m", &[(Goodput, Fixed(0.98))]),
    ("W120/m", &[(Goodput, Fixed(0.97)), (Rejected, Fixed(3.0))]),
    ("W20/s", &[(Goodput, Fixed(0.96))]),
    ("W1200/m+RA", &[(Goodput, Fixed(0.98))]),
    ("S20-100", &[(UpS, Fixed(9.0)), (DownS, Fixed(3.0)), (Rejected, Fixed(1.0))]),
    ("S100-500", &[(UpS, Fixed(6.0)), (DownS, Fixed(3.0)), (Rejected, Fixed(1.0))]),
    ("S1000-5000", &[(UpS, Fixed(5.0)), (DownS, Fixed(3.0)), (Rejected, Fixed(1.0))]),
    ("S20-100+hdr", &[(UpS, Fixed(13.0))]),
    ("S4-20", &[(UpS, Reported), (Goodput, Reported)]),
    ("C1", &[(Goodput, Fixed(0.98)), (Rejected, Fixed(1.2))]),
    ("C10", &[(Goodput, Fixed(0.98)), (Rejected, Fixed(1.2))]),
    ("C100", &[(Goodput, Fixed(0.98)), (Rejected, Fixed(1.2))]),
    ("C40x4", &[(Goodput, Fixed(0.82))]),
    ("K10", &[(Goodput, Fixed(0.84)), (P99S, Reported), (StartS, Reported)]),
    ("K40", &[(Goodput, Fixed(0.84)), (P99S, Oracle(3.0))]),
    ("K40-10-40", &[(Goodput, Fixed(0.84)), (P99S, Reported)]),
    ("K40x4", &[(Goodput, Fixed(0.70))]),
    ("N4R50", &[(Rejected, Fixed(1.7)), (Jain, Fixed(0.90))]),
    ("N16R500", &[(Rejected, Fixed(1.4)), (Jain, Fixed(0.90))]),
    ("N4R100", &[(Goodput, Reported), (Rejected, Reported), (Jain, Reported)]),
    ("N64R1500", &[(Goodput, Reported), (Rejected, Reported), (Jain, Reported)]),
    ("N2R100err", &[(Jain, Reported), (Goodput, Reported)]),
    ("llm10", &[(Goodput, Fixed(0.98))]),
    ("ht50", &[(Goodput, Fixed(0.98))]),
    ("free64", &[(Goodput, Fixed(0.98))]),
    ("free64slow4", &[(Goodput, Fixed(0.94))]),
    ("bg50", &[(Goodput, Fixed(0.92))]),
    ("bg500", &[(Goodput, Fixed(0.92))]),
    ("open15/50", &[(WaitMs, Fixed(50.0))]),
    ("open150/500", &[(WaitMs, Fixed(50.0))]),
    ("tpm20k/s", &[(Goodput, Fixed(0.97)), (Rejected, Fixed(2.5))]),
    ("tpm20k/s+hdr", &[(Goodput, Fixed(0.97))]),
    ("turns", &[(Goodput, Fixed(0.97)), (Rejected, Fixed(2.0))]),
    ("turns+dim", &[(Goodput, Fixed(0.97))]),
];

/// The names of the scenarios that have targets, in the order of the rows.
pub fn targeted() -> impl Iterator<Item = &'static str> {
    TARGETS.iter().map(|(name, _)| *name)
}

/// Compares the scores of `auto` with the targets, and with the oracle's score if the target depends on it.
///
/// A row whose scores are missing is left out.
pub fn rows(scores: &[Score]) -> Vec<Row> {
    let find = |name: &str, strategy| {
        scores.iter().find(|score| score.scenario == name && score.strategy == strategy)
    };
    let mut rows = Vec::new();
    for (name, targets) in TARGETS {
        let Some(auto) = find(name, Strategy::Auto) else { continue };
        let oracle = find(name, Strategy::Oracle);
        rows.extend(targets.iter().filter_map(|(measure, bound)| measure.row(*bound, auto, oracle)));
    }
    rows
}

impl Measure {
    fn row(self, bound: Bound, auto: &Score, oracle: Option<&Score>) -> Option<Row> {
        let ours = self.of(auto)?;
        let (peer, target) = match bound {
            // Goodput is a share of the capacity, and its target is that share.
            Fixed(share) if self == Goodput => (auto.measures.capacity, Some(share)),
            Fixed(bound) => (bound, Some(1.0)),
            Oracle(times) => (times * self.of(oracle?)?, Some(1.0)),
            Reported => (self.best(auto, oracle)?, None),
        };
        let ratio = ours / peer;
        let is_at_least = matches!(self, Goodput | Jain);
        let met = target.map(|target| if is_at_least { ratio >= target } else { ratio <= target });
        let name = format!("{}.{}", auto.scenario, self.name());
        let (unit, what) = (self.unit(), self.what());
        Some(Row { name, ours, peer, ratio, target, met, is_at_least, unit, what })
    }

    fn of(self, score: &Score) -> Option<f64> {
        let measures = &score.measures;
        let settled = |change: usize| measures.settled_s.get(change).copied();
        match self {
            Goodput => Some(measures.goodput * measures.capacity),
            Rejected => Some(100.0 * measures.rejected),
            Jain => Some(measures.jain),
            StartS => settled(0),
            UpS => settled(1),
            DownS => settled(2),
            P99S => Some(measures.p99_s),
            WaitMs => Some(1_000.0 * measures.wait_s),
        }
    }

    /// The value that a measure without a bound is compared with.
    #[expect(clippy::cast_precision_loss, reason = "points are few")]
    fn best(self, auto: &Score, oracle: Option<&Score>) -> Option<f64> {
        match self {
            Goodput => Some(auto.measures.capacity),
            Rejected => Some(100.0),
            Jain => Some(1.0),
            StartS | UpS | DownS => Some(auto.series.step_s * auto.series.good.len() as f64),
            P99S | WaitMs => self.of(oracle?),
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Goodput => "goodput",
            Rejected => "rejected",
            Jain => "jain",
            StartS => "start_s",
            UpS => "up_s",
            DownS => "down_s",
            P99S => "p99_s",
            WaitMs => "wait_ms",
        }
    }

    const fn unit(self) -> &'static str {
        match self {
            Goodput => "units/s",
            Rejected => "%",
            Jain => "",
            StartS | UpS | DownS | P99S => "s",
            WaitMs => "ms",
        }
    }

    const fn what(self) -> &'static str {
        match self {
            Goodput => "successes : capacity",
            Rejected => "429s : bound, or all requests",
            Jain => "Jain's index : bound, or 1",
            StartS => "start to 90 % : run",
            UpS => "rise to 90 % : bound, or run",
            DownS => "fall to 90 % : bound, or run",
            P99S => "p99 latency : bound, or oracle",
            WaitMs => "p99 wait : bound",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::{Measures, Series};
    use crate::scenario::Scenario;

    fn score(scenario: &str, strategy: Strategy) -> Score {
        let measures = Measures {
            goodput: 0.96,
            goodput_late: 0.96,
            capacity: 50.0,
            rejected: 0.01,
            jain: 0.9,
            p99_s: 0.5,
            wait_s: 0.025,
            settled_s: vec![2.0, 8.0, 4.0],
        };
        let series = Series { step_s: 1.0, good: vec![0.0; 180], ..Series::default() };
        let (goodput_min, goodput_max) = (0.95, 0.97);
        Score {
            scenario: scenario.to_owned(),
            strategy,
            seeds: 1,
            measures,
            goodput_min,
            goodput_max,
            series,
        }
    }

    fn row(scores: &[Score], name: &str) -> Row {
        rows(scores).into_iter().find(|row| row.name == name).unwrap_or_else(|| panic!("no row {name}"))
    }

    #[test]
    fn targeted_scenarios_are_built_in_and_unique() {
        let built_in = Scenario::built_in();
        for name in targeted() {
            assert!(built_in.iter().any(|scenario| scenario.name == name), "{name}");
        }
        let mut names: Vec<_> = targeted().collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), TARGETS.len());
    }

    #[test]
    fn goodput_is_compared_with_the_capacity() {
        let scores = [score("R0.2", Strategy::Auto), score("R2", Strategy::Auto)];
        let met = row(&scores, "R0.2.goodput");
        assert_eq!((met.ours, met.peer, met.target, met.met), (48.0, 50.0, Some(0.95), Some(true)));
        assert!((met.ratio - 0.96).abs() < 1e-9 && met.is_at_least);
        assert_eq!(row(&scores, "R2.goodput").met, Some(false));
    }

    #[test]
    fn other_measures_are_compared_with_their_bound() {
        let names = ["S20-100", "R500", "N4R50", "open15/50", "R50+hdr1"];
        let scores = names.map(|name| score(name, Strategy::Auto));
        let table = [
            ("S20-100.up_s", 8.0, 9.0, true),
            ("S20-100.down_s", 4.0, 3.0, false),
            ("S20-100.rejected", 1.0, 1.0, true),
            ("R500.rejected", 1.0, 0.2, false),
            ("N4R50.jain", 0.9, 0.9, true),
            ("R50+hdr1.jain", 0.9, 0.97, false),
            ("open15/50.wait_ms", 25.0, 50.0, true),
        ];
        for (name, ours, peer, met) in table {
            let row = row(&scores, name);
            assert_eq!(
                (row.ours, row.peer, row.target, row.met),
                (ours, peer, Some(1.0), Some(met)),
                "{name}"
            );
            assert!((row.ratio - ours / peer).abs() < 1e-9);
        }
    }

    #[test]
    fn p99_is_compared_with_three_times_the_oracle() {
        let auto = score("K40", Strategy::Auto);
        assert!(rows(std::slice::from_ref(&auto)).iter().all(|row| row.name != "K40.p99_s"));
        let row = row(&[auto, score("K40", Strategy::Oracle)], "K40.p99_s");
        assert_eq!((row.ours, row.peer, row.met), (0.5, 1.5, Some(true)));
    }

    #[test]
    fn reported_rows_have_no_target() {
        let scores = ["N4R100", "S4-20"].map(|name| score(name, Strategy::Auto));
        for (name, peer) in [
            ("N4R100.rejected", 100.0),
            ("N4R100.jain", 1.0),
            ("N4R100.goodput", 50.0),
            ("S4-20.up_s", 180.0),
        ] {
            let row = row(&scores, name);
            assert_eq!((row.peer, row.target, row.met), (peer, None, None), "{name}");
        }
    }

    #[test]
    fn scores_of_peers_make_no_rows() {
        assert!(rows(&[score("R50", Strategy::Aws), score("R50", Strategy::Oracle)]).is_empty());
        assert!(rows(&[score("unknown", Strategy::Auto)]).is_empty());
    }
}
